"""Asking for documents: patterns, injections, misuse, and `everstep.query`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mongo_reference as reference
import pytest
from query_samples import a_run, same, store

import everstep
from everstep.errors import ConfigError, RunIndexError
from everstep.index import regex
from everstep.index.database import Database
from everstep.index.documents import COLLECTIONS, Asked, ask, project
from everstep.index.mongo import MOST_CONDITIONS, MOST_LEVELS, MOST_VALUES, parse
from everstep.index.shipping import sync
from postgres_server import Server

# -------------------------------------------------------------------------------------- patterns


TEXTS_TO_FIND = ["abc", "aBC", "a.c", "", "é", "x\ny", "tail", "100%", "a\0b"]


@pytest.mark.parametrize("pattern", ["^a", "C$", "(?i)bc", "^$", r"\w\W", "(?m)^y"])
def test_patterns_are_pythons_on_both(both: list[Database], pattern: str) -> None:
    given = [a_run({"a": text, "b": [1, text]}, text) for text in TEXTS_TO_FIND if text.isprintable()]
    for name in ("config.a", "config.b", "reason"):
        where = {name: {"$regex": pattern}}
        for database in both:
            with database.write() as connection:
                expected = store(connection, given)
                found = ask(connection, "runs", Asked(parse(where)))
            assert [one["name"] for one in found] == [
                one["name"] for one in reference.answer(expected, where, [], None)
            ]


def test_no_pattern_is_found_in_what_is_no_text(both: list[Database]) -> None:
    for database in both:
        with database.write() as connection:
            store(connection, [a_run({"a": 1}, "1", valid_loss=1.0)])
            for name in ("step", "seed", "heartbeat", "valid_loss", "config.a"):
                assert not ask(connection, "runs", Asked(parse({name: {"$regex": ""}}))), name
            for name in ("value", "wall", "step"):
                assert not ask(connection, "metrics", Asked(parse({name: {"$regex": "1"}}))), name
            assert ask(connection, "metrics", Asked(parse({"name": {"$regex": "loss"}})))


@pytest.mark.campaign("timed")
def test_a_pattern_without_end_is_given_up(both: list[Database], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex, "SECONDS", 0.5)
    given = [a_run({"a": "a" * 60 + "b"})]
    for database in both:
        with database.write() as connection:
            store(connection, given)
            with pytest.raises(ConfigError, match=r"'\(a\+\)\+\$' did not end within 0\.5 s; give one"):
                ask(connection, "runs", Asked(parse({"config.a": {"$regex": "(a+)+$"}})))


# ------------------------------------------------------------------------------------- injections

ATTACKS = [
    "'; DROP TABLE runs; --",
    '"; DROP TABLE runs; --',
    "') OR 1=1 --",
    "\\'; DROP TABLE runs; --",
    "%(a)s :a ? $1 {0}",
    "a' UNION SELECT text FROM fields --",
    "$$; DROP TABLE runs; $$",
    "\0'; DROP TABLE runs; --",
    'a)b"c`d[e]f',
]


def positions(attack: str) -> Iterator[tuple[str, Asked]]:
    """A query with a text at each place where one can stand."""
    for value in (attack, [attack], {f"a{attack}": attack}, {"a": [attack]}):
        yield "runs", Asked(parse({"config.a": value}))
        yield "runs", Asked(parse({"config.a": {"$in": [value]}}))
        yield "metrics", Asked(parse({"name": {"$ne": value}}))
    for operator in ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte"):
        yield "runs", Asked(parse({"status": {operator: attack}}))
        yield "checkpoints", Asked(parse({"name": {"$not": {operator: attack}}}))
    yield "runs", Asked(parse({"valid_loss": attack, "$or": [{"seed": attack}]}))
    yield (
        "runs",
        Asked(parse({f"config.{attack}": {"$exists": True}}), [f"config.{attack}"], 1, [f"config.{attack}"]),
    )
    yield "configs", Asked(parse({f"config.{attack}": 1}), [f"-config.{attack}"], 1, [f"config.{attack}"])
    yield (
        "metrics",
        Asked(
            parse(
                {"name": {"$regex": r"\A" + attack.replace("\\", "").replace("(", "").replace(")", "")[:3]}}
            )
        ),
    )


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_text_becomes_sql(both: list[Database], attack: str) -> None:
    innocent = a_run({"a": "x"}, valid_loss=1.0)
    guilty = a_run({"a": attack, attack: attack}, attack.replace("\0", ""), valid_loss=2.0)
    answers = []
    for database in both:
        with database.write() as connection:
            store(connection, [innocent, guilty])
            found = [ask(connection, collection, asked) for collection, asked in positions(attack)]
            (one,) = ask(connection, "runs", Asked(parse({"config.a": attack})))
            assert one["config"]["a"] == attack
            assert len(ask(connection, "runs", Asked(parse({})))) == 2
        answers.append(same(found))
    assert answers[0] == answers[-1]


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_unknown_name_is_an_error_and_no_sql(both: list[Database], attack: str) -> None:
    for database in both:
        with database.write() as connection:
            store(
                connection,
                [a_run()],
            )
            for collection in COLLECTIONS:
                for where, sort, names in (({attack: 1}, [], []), ({}, [attack], []), ({}, [], [attack])):
                    with pytest.raises(ConfigError):
                        ask(connection, collection, Asked(parse(where), sort, 1, names))
            with pytest.raises(ConfigError, match="no collection"):
                ask(connection, attack, Asked(parse({})))


# ------------------------------------------------------------------------------------------ misuse


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"step": {"$gtt": 1}}, r"no operator \$gtt; did you mean '\$gt'"),
        ({"$nor": []}, r"no operator \$nor; did you mean '\$or'"),
        ({"$gt": 1}, "belongs to a field"),
        ({"step": {"$gt": 1, "x": 2}}, "no operator x"),
        ({"valid/loss": {"gt": 0.8, "lt": 1}}, "begin with \\$; give {'\\$gt': 0.8, '\\$lt': 1}"),
        ({"step": {"$gt": [1]}}, r"\$gt compares numbers, strings"),
        ({"step": {"$in": 1}}, "takes a list"),
        ({"step": {"$in": [0] * (MOST_VALUES + 1)}}, "at most"),
        ({"step": {"$exists": 1}}, "true or false"),
        ({"step": {"$not": 1}}, "takes operators"),
        ({"step": {"$not": {}}}, "takes operators"),
        ({"name": {"$regex": "("}}, "not a regular expression"),
        ({"name": {"$regex": 1}}, "not a regular expression"),
        ({"name": {"$regex": b"a"}}, "takes a string"),
        ({"$and": []}, "one or more filters"),
        ({"$and": {"a": 1}}, "one or more filters"),
        ({"$or": [1]}, "a filter is an object"),
        ({"step": {1, 2}}, "not a JSON value"),
        ({"step": {1: 2}}, "not a JSON value"),
        ({1: 2}, "the name of a field"),
        ({"": 2}, "the name of a field"),
        ([], "a filter is an object"),
        ({"$or": [{"step": n} for n in range(MOST_CONDITIONS + 1)]}, "more than"),
    ],
)
def test_what_is_no_filter_is_an_error(where: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(where)


def listed(number: int) -> list[int]:
    return [number]


def boxed(number: int) -> dict[str, int]:
    return {"a": number}


def test_what_a_filter_may_hold_at_most(both: list[Database]) -> None:
    deep: Any = {"step": 1}
    for _ in range(48):
        deep = {"$and": [deep]}
    with pytest.raises(ConfigError, match="nested more than 50 deep"):
        parse({"$and": [{"$and": [{"$and": [deep]}]}]})
    nested: Any = 1
    for _ in range(MOST_LEVELS - 2):
        nested = [nested]
    for where in ({"a": {"$in": [nested]}}, {"a": {"$gt": [nested]}}, {"$and": [[nested]]}, [[[nested]]]):
        with pytest.raises(ConfigError, match="nested more than 150 deep"):
            parse(where)  # type: ignore[arg-type]
    eighths = [{"step": {"$in": list(range(MOST_VALUES // 8))}} for _ in range(8)]
    with pytest.raises(ConfigError, match="at most 10000 values in all; give fewer than 10001"):
        parse({"$or": [*eighths, {"step": {"$nin": [0]}}]})
    many = {"$or": [{"config.a": {"$not": {"$in": ["x"]}}} for _ in range(MOST_CONDITIONS)]}
    values: list[Any] = [
        {"config.a": {"$in": [*range(MOST_VALUES // 2), *map(str, range(MOST_VALUES // 2))]}},
        *({"config.a": {"$in": [as_one(n) for n in range(MOST_VALUES)]}} for as_one in (listed, boxed)),
        {"config.a": {"$in": [None, True, math.nan, math.inf] * (MOST_VALUES // 4)}},
        {"config.a": {"$eq": nested}},
        {"$or": eighths},
    ]
    for database in both:
        with database.write() as connection:
            store(
                connection,
                [a_run({"a": 7})],
            )
            for where in (deep, many, *values):
                ask(connection, "runs", Asked(parse(where)))


# ---------------------------------------------------------------------------------- the public door


def test_everything_can_be_asked_for_and_both_say_the_same(
    made: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # runs of the current directory are looked at, too
    url = server.database()
    sync(Database(url), [made])
    for places in (made, url):
        names = [
            run["name"].rpartition("-")[0]
            for run in everstep.query("runs", {"status": "finished"}, sort="step", index=places)
        ]
        assert names == ["good", "long"]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("runs", {"where": {"valid_loss": {"$lte": 0.5}}, "sort": ["-valid_loss", "name"]}),
        (
            "runs",
            {"fields": ["name", "valid_loss", "step/loss", "config.optimizer.lr", "argv"], "sort": "name"},
        ),
        (
            "configs",
            {
                "where": {"config.optimizer.lr": {"$lt": 0.2}, "config.optimizer.betas": 0.99},
                "sort": "-run",
                "limit": 2,
            },
        ),
        (
            "metrics",
            {"where": {"name": "loss", "phase": "step", "step": {"$lt": 3}}, "fields": ["run", "value"]},
        ),
        ("evaluations", {"sort": ["value", "run"], "limit": 5}),
        ("checkpoints", {"where": {"step": {"$gt": 4}}, "sort": ["step", "run"]}),
    ]
    for collection in COLLECTIONS:
        asked.append((collection, {"limit": 10**30}))
    for collection, arguments in asked:
        found = everstep.query(collection, **arguments, index=made)
        assert found
        for one in found, (others := everstep.query(collection, **arguments, index=url)):
            for document in one:
                document.pop("heartbeat", None)  # one index was there meanwhile
        assert same(found) == same(others)
    (one, *_) = everstep.query("runs", {"name": {"$regex": "^long"}}, index=made)
    assert (
        one["valid_loss"] == 0.25 and one["loss"] >= 0 and one["config"]["optimizer"]["betas"] == [0.9, 0.99]
    )
    assert all(
        row["phase"] == "tail" for row in everstep.query("evaluations", {"name": "valid_loss"}, index=made)
    )


def test_a_run_whose_directory_is_gone_is_found_by_that(tmp_path: Path) -> None:
    path = tmp_path / "everstep.db"
    with Database(path).write() as connection:
        store(connection, [a_run()])
    assert [run["status"] for run in everstep.query("runs", {"status": "gone"}, index=path)] == ["gone"]
    assert everstep.query("runs", {"status": "finished"}, index=path) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"collection": "run"}, "no collection 'run'; did you mean 'runs'"),
        ({"collection": "runs", "where": {"valid_los": 1}}, "did you mean 'valid_loss'"),
        ({"collection": "runs", "sort": "stpe"}, "did you mean 'step'"),
        ({"collection": "runs", "where": {"config.optimizer.lr": {"$gt": "0"}}}, "lr is a number"),
        ({"collection": "runs", "where": {"status": "finnished"}}, "did you mean 'finished'"),
        ({"collection": "runs", "fields": ["stpe"]}, "did you mean 'step'"),
        ({"collection": "metrics", "where": {"vale": 1}}, "did you mean 'value'"),
        ({"collection": "configs", "fields": ["cfg.lr"]}, "configs have no field 'cfg.lr'"),
        ({"collection": "runs", "limit": -1}, "0 or more"),
        ({"collection": "runs", "fields": "name"}, "a list of names"),
        ({"collection": "runs", "fields": 5}, "fields is a list of names; change 5"),
        ({"collection": "runs", "sort": 5}, "sort is a list of names; change 5"),
        ({"collection": "metrics", "sort": [None]}, r"sort is a list of names; change \[None\]"),
    ],
)
def test_unknown_names_are_errors(made: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        everstep.query(**arguments, index=made)


def test_a_slip_in_the_place_of_an_index_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for slip in ("rusn", "runs/typo", "no/such"):
        with pytest.raises(RunIndexError, match=f"there is no index {tmp_path / slip}") as told:
            everstep.query("runs", index=tmp_path / slip)
        assert ("did you mean 'runs'" in str(told.value)) == (slip == "rusn")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_a_part_of_a_document() -> None:
    tree = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "l": [{"x": 1, "y": 2}, 5, {"x": 3}], "n": None}
    before = copy.deepcopy(tree)
    assert project(tree, ["a.b.c", "a.e"]) == {"a": {"b": {"c": 1}, "e": 3}}
    assert project(tree, ["l.x"]) == {"l": [{"x": 1}, {"x": 3}]}
    assert project(tree, ["l.x", "l.y"]) == {"l": [{"x": 1, "y": 2}, {"x": 3}]}
    assert project(tree, ["l.x", "l"]) == project(tree, ["l", "l.x", "l.q"]) == {"l": tree["l"]}
    assert project(tree, ["a.b.c", "a.b", "a.b.d"]) == {"a": {"b": tree["a"]["b"]}}
    deep = {"l": [{"b": {"c": 1, "d": 2, "e": 3}}, 5, {"b": {"d": 4}}, {"b": 6}]}
    assert project(deep, ["l.b.c", "l.b.d"]) == {"l": [{"b": {"c": 1, "d": 2}}, {"b": {"d": 4}}, {}]}
    assert project(tree, ["n", "q", "a.q.r"]) == {"n": None, "a": {}}
    assert tree == before
