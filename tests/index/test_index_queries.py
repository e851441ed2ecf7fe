"""MongoDB's filter language: the same answers on SQLite, on PostgreSQL and in plain Python."""

from __future__ import annotations

import json
import math
from typing import Any

import mongo_reference as reference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from query_samples import METRICS, a_run, same, store
from sqlalchemy import select, update

import gate
from everstep.errors import ConfigError
from everstep.index.database import Database
from everstep.index.documents import Asked, ask
from everstep.index.fields import fields_of, leads, typed, values_at
from everstep.index.mongo import parse
from everstep.index.query_checks import require_there
from everstep.index.run_facts import FACTS
from everstep.index.run_queries import all_runs
from everstep.index.sql_tables import fields, series

# ------------------------------------------------------------------------ documents and filters

NAMES = ("a", "b", "c", "0", "1")
NUMBERS = [0, 1, -1, 2, 0.5, -0.0, 1e300, math.inf, -math.inf, math.nan, 1 << 53, (1 << 53) + 1, 10**400]
TEXTS = [
    "",
    "a",
    "b",
    "B",
    "ab",
    "0",
    "1",
    "true",
    "null",
    "é",
    "z",
    "\U0001f600",
    "\0",
    "\ud800",
    "%",
    "_",
    "'",
]

scalars = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS))
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)
recorded = st.fixed_dictionaries(
    {"config": st.dictionaries(st.sampled_from(NAMES), trees, max_size=4)}, optional={"git": trees}
)
documents = st.fixed_dictionaries(
    {
        "recorded": recorded,
        "metrics": st.dictionaries(st.sampled_from(METRICS), st.sampled_from([0.5, 1.0, math.inf, math.nan])),
        "step": st.integers(0, 3),
        "seed": st.none() | st.sampled_from([0, 7, 1 << 62]),
        "reason": st.none() | st.sampled_from(["a", "no steps left"]),
    }
)
paths = st.one_of(
    st.lists(st.sampled_from(NAMES), max_size=3).map(lambda parts: ".".join(["config", *parts])),
    st.sampled_from(["step", "seed", "reason", "status", "name", "git", "git.a", *METRICS]),
)
comparisons = st.one_of(
    st.tuples(st.sampled_from(["$eq", "$ne"]), trees),
    st.tuples(st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), scalars),
    st.tuples(st.sampled_from(["$in", "$nin"]), st.lists(trees, max_size=3)),
    st.tuples(st.just("$exists"), st.booleans()),
)
operators = st.recursive(
    st.lists(comparisons, min_size=1, max_size=2).map(dict),
    lambda inner: inner.map(lambda one: {"$not": one}),
    max_leaves=3,
)
conditions = operators | scalars | st.lists(scalars, max_size=2)
filters = st.recursive(
    st.dictionaries(paths, conditions, max_size=2),
    lambda inner: st.tuples(st.sampled_from(["$and", "$or"]), st.lists(inner, min_size=1, max_size=3)).map(
        lambda pair: {pair[0]: pair[1]}
    ),
    max_leaves=4,
)
ORDERS = (
    "step",
    "-step",
    "seed",
    "-config.a",
    "config.b",
    "config.a.b",
    "-config.a.0",
    "valid_loss",
    "-name",
)
orders = st.lists(st.sampled_from(ORDERS), max_size=2)
queries = st.tuples(filters, orders, st.none() | st.integers(0, 5))


@settings(max_examples=40 if gate.is_campaign else 15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(documents, min_size=1, max_size=8), st.lists(queries, min_size=1, max_size=8))
def test_both_databases_answer_as_plain_python_does(
    both: list[Database], given: list[dict[str, Any]], asked: list[tuple[Any, list[str], int | None]]
) -> None:
    known = {name for one in given for name in one["metrics"]}
    tops = {name for one in given for name in one["recorded"]} | set(FACTS)
    asked = [one for one in asked if all(is_known(path, known, tops) for path in named(one[0]) | set(one[1]))]
    for database in both:
        with database.kept_open():
            with database.write() as connection:
                expected = store(connection, given)
            with database.read() as connection:
                for where, sort, limit in asked:
                    found = ask(connection, "runs", Asked(parse(where), sort, limit))
                    right = reference.answer(expected, where, sort, limit, known)
                    assert [one["name"] for one in found] == [one["name"] for one in right], (where, sort)
                    assert same(found) == same(json.loads(json.dumps(right)))


def named(where: Any) -> set[str]:
    found = set()
    for key, value in where.items():
        found |= {name for part in value for name in named(part)} if key in ("$and", "$or") else {key}
    return found


def is_known(path: str, known: set[str], tops: set[str]) -> bool:
    path = path.removeprefix("-")
    return path in known or path.partition(".")[0] in tops


# ------------------------------------------------------------------------------- what is asked about rows


ROWS = (*("run", "phase", "name"), *("epoch", "step", "seq", "value", "count", "wall", "segment"))
row_values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 0.5, math.inf, math.nan]),
    st.sampled_from(["run1", "tail", "x"]),
)
row_filters = st.dictionaries(
    st.sampled_from(ROWS),
    st.one_of(
        row_values,
        st.dictionaries(
            st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"]), row_values, min_size=1
        ),
        st.lists(row_values, max_size=3).map(lambda values: {"$nin": values}),
        st.booleans().map(lambda there: {"$not": {"$exists": there}}),
    ),
    max_size=3,
)
row_orders = st.lists(st.sampled_from([*ROWS, *(f"-{name}" for name in ROWS)]), max_size=2)


@pytest.mark.campaign("long")
@settings(max_examples=40 if gate.is_campaign else 15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(documents, min_size=1, max_size=6),
    st.lists(st.tuples(row_filters, row_orders), min_size=1, max_size=8),
)
def test_metrics_too(
    both: list[Database], given: list[dict[str, Any]], asked: list[tuple[Any, list[str]]]
) -> None:
    for database in both:
        with database.kept_open():
            with database.write() as connection:
                expected = rows_of_metrics(store(connection, given))
            with database.read() as connection:
                for where, sort in asked:
                    found = ask(connection, "metrics", Asked(parse(where), sort, 7))
                    assert same(found) == same(reference.answer(expected, where, sort, 7))


def rows_of_metrics(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    always = {"epoch": 1, "step": 1, "count": 1, "wall": False, "segment": 1}
    rows = [
        {"run": one["name"], "phase": "tail", "name": name, "seq": row, "value": one[name], **always}
        for one in found
        for name in METRICS
        if name in one
        for row in range(2)
    ]
    return sorted(rows, key=lambda row: (row["run"], row["phase"], row["name"], row["seq"]))


@pytest.mark.parametrize("phase", ["tail", "eval/valid"])
def test_a_metric_is_found_by_its_phase_where_names_have_slashes(both: list[Database], phase: str) -> None:
    for database in both:
        with database.write() as connection:
            store(connection, [a_run(**{"Loss/train": 0.25, "loss": 0.5, "a//b/": 0.75})])
            connection.execute(update(series).values(phase=phase))
        with database.read() as connection:
            for name, value in (("Loss/train", 0.25), ("loss", 0.5), ("a//b/", 0.75)):
                for asked in (name, f"{phase}/{name}"):
                    (run,) = all_runs(connection, [asked])
                    assert run[asked] == value
                    (found,) = ask(connection, "runs", Asked(parse({asked: value})))
                    assert found["name"] == "run1"
            with pytest.raises(ConfigError, match="no run has 'train'"):
                all_runs(connection, ["train"])


# ------------------------------------------------------------------------------------ lists in lists


def test_lists_in_lists_take_a_row_per_value(both: list[Database]) -> None:
    tree: Any = {"x": 1}
    for _ in range(20):
        tree = {"b": [tree, {"\x1f0": 2, "x1": 3}]}
    given = [{"recorded": {"config": tree}, "metrics": {}, "step": 0, "seed": 1, "reason": None}]
    deep = ".".join("b" * 20)
    asked = {
        f"config.{deep}.x": 1,
        f"config.{deep.replace('b', 'b.0')}.x": 1,
        f"config.{deep.replace('b', 'b.0', 7)}.x": 1,
        f"config.{deep.replace('b', 'b.1', 1)}.x": None,
        "config.b.b.\x1f0": 2,
        "config.b.\x1f0.b": None,
    }
    for database in both:
        with database.write() as connection:
            store(connection, given)
            assert len(connection.execute(select(fields)).all()) == 2 + 20 * 5
            for path, value in asked.items():
                assert len(ask(connection, "runs", Asked(parse({path: value})))) == 1, path
                assert not ask(connection, "runs", Asked(parse({path: 3}))), path
                require_there(connection, [], [path] if value else [])
                (run,) = all_runs(connection, [path])
                assert run.get(path) == value

            with pytest.raises(ConfigError, match=r"did you mean 'config\.b\.b\.x1'"):
                require_there(connection, [], ["config.b.b.x1y"])


@settings(max_examples=100 if gate.is_campaign else 40, deadline=None)
@given(recorded, paths)
def test_a_path_leads_to_the_same_values_in_the_tree_and_in_its_rows(tree: dict[str, Any], path: str) -> None:
    rows = [(one.kind, one.number, one.text) for one in fields_of(tree) if leads(path, one.path)]
    assert sorted(map(repr, rows)) == sorted(repr(typed(value)) for value in values_at(tree, path))
