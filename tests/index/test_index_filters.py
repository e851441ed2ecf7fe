"""Comparisons over runs."""

from __future__ import annotations

import math

import pytest

from everstep.errors import ConfigError
from everstep.index.filters import Condition, ordered, parse, where

RUNS = [
    {"name": "a", "loss": 0.5, "status": "finished"},
    {"name": "b", "loss": 0.1, "status": "killed", "dirty": True},
    {"name": "c", "status": "finished"},
    {"name": "d", "loss": math.nan, "status": "running"},
]


def test_a_text_is_conditions_that_must_all_hold() -> None:
    expected = [Condition("valid/loss", "<", 0.3), Condition("status", "=", "finished")]
    for text in (
        "valid/loss<0.3 status=finished",
        "valid/loss < 0.3, status == finished",
        "valid/loss<0.3 and status='finished'",
    ):
        assert parse(text) == expected
    assert parse("") == []
    assert parse("reason='no steps left' step>=1e3")[0].value == "no steps left"


@pytest.mark.parametrize("text", ["loss", "loss<", "<3", "loss<3 status", "loss 3", "status=finished &"])
def test_what_is_no_comparison_is_an_error_that_shows_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no comparison; give NAME<VALUE"):
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
        ("loss=finished", ""),
    ],
)
def test_which_runs_hold(text: str, names: str) -> None:
    assert "".join(run["name"] for run in where(RUNS, parse(text))) == names


def test_what_has_no_value_is_sorted_last_either_way() -> None:
    assert [run["name"] for run in ordered(RUNS, "loss", False)] == ["b", "a", "c", "d"]
    assert [run["name"] for run in ordered(RUNS, "loss", True)] == ["a", "b", "c", "d"]
