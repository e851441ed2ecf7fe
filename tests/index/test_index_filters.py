"""Comparisons over runs."""

from __future__ import annotations

import math

import pytest

from everstep.errors import ConfigError
from everstep.index.filters import Comparison, ordered, parse, where

RUNS = [
    {"name": "a", "loss": 0.5, "status": "finished"},
    {"name": "b", "loss": 0.1, "status": "killed", "dirty": True},
    {"name": "c", "status": "finished"},
    {"name": "d", "loss": math.nan, "status": "running"},
]


def test_a_text_is_conditions_that_must_all_hold() -> None:
    expected = [Comparison("valid/loss", "<", 0.3), Comparison("status", "=", "finished")]
    for text in (
        "valid/loss<0.3 status=finished",
        "valid/loss < 0.3, status == finished",
        "valid/loss<0.3 and status='finished'",
    ):
        assert parse(text) == expected
    assert parse("") == []
    assert parse("loss<3 sweep 7") == [
        Comparison("loss", "<", 3.0),
        Comparison("name", "~", "sweep"),
        Comparison("name", "~", "7"),
    ]
    assert parse("reason='no steps left' step>=1e3")[0].value == "no steps left"


@pytest.mark.parametrize("text", ["loss<", "<3", "loss<3 <", "status=finished &", "a && b"])
def test_what_is_no_comparison_is_an_error_that_shows_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a comparison; give NAME<VALUE"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("loss<0.3", "b"),
        ("loss>=0.1", "ab"),
        ("loss!=0.5", "bcd"),
        ("status=finished loss>0", "a"),
        ("status<g", "ac"),
        ("dirty=true", "b"),
        ("name=5", ""),
        ("name!=a", "bcd"),
    ],
)
def test_which_runs_hold(text: str, names: str) -> None:
    assert "".join(run["name"] for run in where(RUNS, parse(text))) == names


@pytest.mark.parametrize("text", ["loss=finished", "loss<abc", "loss>'0.3'"])
def test_numbers_are_compared_with_numbers_only(text: str) -> None:
    with pytest.raises(ConfigError, match="loss is a number; compare it with a number"):
        where(RUNS, parse(text))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("name=live-00000b", "live-00000b"),
        ("name=live", "live-00000b"),
        ("name=5", "5-00000a"),
        ("name=li", ""),
        ("name=live-0", ""),
        ("name!=live", "5-00000a live2-00000c"),
        ("name=dead", ""),
    ],
)
def test_a_name_is_meant_whole_or_without_its_digits(text: str, names: str) -> None:
    runs = [{"name": name} for name in ("5-00000a", "live-00000b", "live2-00000c")]
    assert " ".join(run["name"] for run in where(runs, parse(text))) == names


def test_what_has_no_value_is_sorted_last_either_way() -> None:
    assert [run["name"] for run in ordered(RUNS, "loss", False)] == ["b", "a", "c", "d"]
    assert [run["name"] for run in ordered(RUNS, "loss", True)] == ["a", "b", "c", "d"]
