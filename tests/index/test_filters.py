"""The filter language: what holds of which document, in Python and in SQL; what is no filter."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_runs import indexed, written

import gate
from everstep.errors import ConfigError
from everstep.index import filters as language
from everstep.index.database import Database
from everstep.index.filters import Leaf, matcher, ordered, parse, parse_words
from everstep.index.query import ask
from everstep.index.shipping import sync
from everstep.record import Block, Journal, RunDir

BIG = 10**400
DOCUMENTS: dict[str, dict[str, Any]] = {
    "a": {"n": 1, "t": "abc", "b": True, "o": {"x": 1, "y": [1, 2]}, "l": [1, "z", {"w": 3}]},
    "b": {"n": 2.5, "t": "B", "b": False, "o": {"y": [1, 2], "x": 1.0}, "l": []},
    "c": {"n": math.nan, "t": "é", "b": None, "l": [{"w": [4, 5]}, {"w": 6}, {"a.b": 7}]},
    "d": {"n": math.inf, "t": "", "z": 0.0, "l": [[1], None], "0": "x"},
    "e": {"n": "1", "o": {"x": True}, "z": BIG},
}


def holding(where: Any) -> str:
    """The names of the documents for which a filter holds."""
    holds = matcher(where if isinstance(where, language.Group) else parse(where))
    of = {name: partial(language.values_at, tree) for name, tree in DOCUMENTS.items()}
    return "".join(name for name, values in of.items() if holds(values))


@pytest.mark.parametrize(("where", "names"), [
    ({}, "abcde"), ({"n": 1}, "a"), ({"n": 1.0, "t": "abc"}, "a"), ({"n": "1"}, "e"), ({"n": True}, ""),
    ({"n": {"$ne": 1}}, "bcde"), ({"n": {"$gt": 1}}, "bd"), ({"n": {"$gte": 1, "$lt": 3}}, "ab"),
    ({"n": {"$lte": math.inf}}, "abd"), ({"n": math.nan}, "c"), ({"n": {"$gt": math.nan}}, ""),
    ({"n": {"$not": {"$lt": 2}}}, "bcde"), ({"z": {"$gt": 1e308}}, "e"),
    ({"z": {"$in": [-0.0, BIG]}}, "de"), ({"t": {"$gt": "B"}}, "ac"), ({"t": {"$lt": "a"}}, "bd"),
    ({"b": {"$gt": False}}, "a"), ({"b": None}, "cde"), ({"b": {"$ne": None}}, "ab"),
    ({"b": {"$in": [None, True]}}, "acde"), ({"b": {"$not": {"$in": [None, True]}}}, "b"),
    ({"b": {"$exists": True}}, "abc"), ({"b": {"$exists": False}}, "de"),
    ({"b": {"$not": {"$exists": False}}}, "abc"), ({"o": {"x": 1, "y": [1, 2]}}, "ab"),
    ({"o": {"$in": [{"x": True}]}}, "e"), ({"o.x": 1}, "ab"), ({"o.y": [1, 2]}, "ab"), ({"o.y": 2}, "ab"),
    ({"o.y.1": 2}, "ab"), ({"o.y.2": {"$exists": True}}, ""), ({"l": 1}, "a"), ({"l": []}, "b"),
    ({"l": [1]}, "d"), ({"l": None}, "de"), ({"l": {"$ne": 1}}, "bcde"), ({"l.w": 3}, "a"),
    ({"l.w": {"$gt": 4}}, "c"), ({"l.0.w.1": 5}, "c"), ({"l.1.w": 6}, "c"), ({"l.a.b": 7}, "c"),
    ({"0": "x"}, "d"), ({"q": {"$exists": False}, "n": 1}, "a"), ({"$or": [{"n": 1}, {"n": 2.5}]}, "ab"),
    ({"$and": [{"n": {"$gt": 1}}, {"t": "B"}]}, "b"),
    ({"$or": [{"$and": [{"n": 1}, {"t": "B"}]}, {"z": 0}]}, "d"),
])  # fmt: skip
def test_which_documents_hold(where: Any, names: str) -> None:
    assert holding(where) == names


@pytest.mark.parametrize(("text", "names"), [
    ("", "abcde"), ("n>1 and t=B", "b"), ("n > 1, n<=2.5", "b"), ("n!=1", "bcde"), ("n=='1'", "e"),
    ("b=true", "a"), ("b!=false", "acde"), ("o.x=1", "ab"), ("t='' z=0", "d"), ("l=z", "a"),
])  # fmt: skip
def test_which_documents_hold_in_words(text: str, names: str) -> None:
    assert holding(parse_words(text)) == names


def test_a_bare_word_is_a_part_of_a_name() -> None:
    named = Leaf("name", language.CONTAINS, "a.b")
    assert parse_words("loss<3 a.b").parts == (Leaf("loss", "$lt", 3.0), named)
    holds = matcher(parse_words("a.b"))
    assert holds(lambda path: ["xa.by"]) and not holds(lambda path: ["axb"])
    assert parse_words("name!=5").parts == (language.Group(language.none, (Leaf("name", "$in", ["5"]),)),)


def test_a_status_alone_finds_the_runs_that_have_it() -> None:
    holds = matcher(parse_words("failed"))
    assert holds({"name": ["a"], "status": ["failed"]}.__getitem__)
    assert holds({"name": ["with-failed-disk"], "status": ["finished"]}.__getitem__)
    assert not holds({"name": ["a"], "status": ["finished"]}.__getitem__)


@pytest.mark.parametrize("text", ["loss<", "<3", "loss<3 <", "status=finished &", "a && b"])
def test_what_is_no_comparison_is_an_error_that_shows_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a comparison; give NAME<VALUE"):
        parse_words(text)


@pytest.mark.parametrize(("where", "words"), [
    ({"step": {"$gtt": 1}}, r"no operator \$gtt; did you mean '\$gt'"),
    ({"$nor": []}, r"no operator \$nor between filters; did you mean '\$or'"),
    ({"$gt": 1}, "those on a field stand inside"), ({"step": {"$gt": 1, "x": 2}}, "no operator x"),
    ({"valid/loss": {"gt": 0.8, "lt": 1}}, r"begin with \$"),
    ({"step": {"$gt": [1]}}, r"\$gt takes a number, a string"),
    ({"step": {"$lt": None}}, r"\$lt takes a number, a string"),
    ({"step": {"$in": 1}}, "takes a list"), ({"step": {"$exists": 1}}, "true or false"),
    ({"step": {"$not": {}}}, "takes operators"), ({"$and": []}, "one or more filters"),
    ({"$or": [1]}, "a filter is an object"), ({"step": {1, 2}}, "not a JSON value"),
    ({1: 2}, "the name of a field"), ({"": 2}, "the name of a field"), ([], "a filter is an object"),
])  # fmt: skip
def test_what_is_no_filter_is_an_error(where: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(where)


def test_json_is_an_object_that_is_not_too_deep() -> None:
    assert language.parse_json('{"step": {"$gt": 1}}') == parse({"step": {"$gt": 1}})
    for text, words in (
        ("{", "the filter is not JSON"),
        ('{"step": %s}' % ("9" * 5000), "not JSON"),
        ('{"$and": [' * 5000 + "{}" + "]}" * 5000, "is not JSON|nested too deep"),
    ):
        with pytest.raises(ConfigError, match=words):
            language.parse_json(text)


def test_what_has_no_value_is_sorted_last_either_way() -> None:
    found = [{"n": 0.5}, {"n": 0.1}, {}, {"n": math.nan}, {"n": "x"}, {"n": None}]
    assert ordered(found, "n", False)[:3] == [{"n": 0.1}, {"n": 0.5}, {"n": "x"}]
    assert ordered(found, "n", True)[:3] == [{"n": "x"}, {"n": 0.5}, {"n": 0.1}]
    assert len(ordered(found, "n", True)) == 6


ROW = ("run", "phase", "name", "epoch", "step", "seq", "value", "count", "wall", "segment")
SOME = [None, True, False, 0, 1, 2, 0.5, 2.5, math.inf, math.nan, BIG, "run-1", "step", "x'"]
values, numbers = st.sampled_from(SOME), st.sampled_from(SOME[1:])
conditions = st.one_of(
    values,
    st.dictionaries(st.sampled_from(["$eq", "$ne"]), values, min_size=1),
    st.dictionaries(st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), numbers, min_size=1),
    st.lists(values, max_size=3).map(lambda several: {"$not": {"$in": several}}),
    st.booleans().map(lambda there: {"$not": {"$exists": there}}),
)
fields = st.dictionaries(st.sampled_from(ROW), conditions, min_size=1, max_size=2)
filters = fields | st.lists(fields, min_size=1, max_size=2).map(lambda several: {"$or": several})
orders = st.lists(st.sampled_from([*ROW, *(f"-{name}" for name in ROW)]), max_size=2)


@pytest.fixture(scope="module")
def databases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Database]:
    """An index of each kind with the same rows of metrics."""
    folder = tmp_path_factory.mktemp("runs")
    written(folder / "other", id="run-2")
    run = RunDir.open(folder / "run", about={"id": "run-1"})
    journal = Journal.open(run.path, 1, None, {})
    for phase, name, wall in (("step", "x'", False), ("tail", "loss", True)):
        numbers = [0.5, math.nan, math.inf, -0.0]
        journal.append(Block(2, phase, name, wall, [1, 2, 2, 3], numbers, [1, 2, 1, 1], [0, 0, 1, 2]))
    journal.close()
    servers = [request.getfixturevalue("server").database()] if gate.is_campaign else []
    found = [Database(place) for place in (None, *servers)]
    for database in found:
        sync(database, [folder])
    return found


@settings(max_examples=200 if gate.is_campaign else 40, deadline=None)
@given(filters, orders)
def test_rows_are_found_in_sql_as_they_are_in_python(databases: Any, where: Any, sort: list[str]) -> None:
    for database in databases:
        right = ask(database, "metrics", parse({}))
        assert len(right) == 11
        holds = matcher(parse(where))
        right = [row for row in right if holds(lambda name, row=row: [row[name]])]  # type: ignore[misc]
        for name in reversed(sort):
            right = ordered(right, name.removeprefix("-"), name.startswith("-"))
        assert repr(ask(database, "metrics", parse(where), sort, 7)) == repr(right[:7])


@pytest.mark.parametrize("attack", ["'; DROP TABLE runs; --", "%(a)s :a ? $1 {0}", "a' UNION SELECT 1 --"])
def test_no_text_becomes_sql(tmp_path: Path, attack: str) -> None:
    written(tmp_path / "run", config={"a": attack, attack: 1})
    database = Database(indexed(tmp_path / "more") / "everstep.db")
    sync(database, [tmp_path])
    for where in ({"config.a": attack}, {f"config.{attack}": {"$in": [1, attack]}}):
        assert len(ask(database, "runs", parse(where), [f"config.{attack}"])) == 1
    for sign in ("$eq", "$gt", "$lte"):
        ask(database, "checkpoints", parse({"name": {sign: attack}, "run": {"$ne": attack}}))
    for collection in ("runs", "metrics", attack):
        with pytest.raises(ConfigError):
            ask(database, collection, parse({attack: 1}), [attack], 1, [attack])
    assert len(ask(database, "runs", parse({}))) == 2
