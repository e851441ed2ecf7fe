"""Search all runs of an index by comparisons and a filter, as `everstep runs` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection

from everstep.cli.find_run import open_index
from everstep.index import mongo
from everstep.index.computed_columns import add_computed, is_computed
from everstep.index.database import Database
from everstep.index.documents import run_condition
from everstep.index.filters import parse, parse_json_filter, where, why_none
from everstep.index.query_checks import require_comparable, require_there
from everstep.index.run_facts import FACTS
from everstep.index.run_queries import NewestFacts, all_runs, is_metric, ranks_of, taken_for_metrics
from everstep.index.shipping import gone_runs


class Searched(NamedTuple):
    """Runs found in an index.

    Attributes:
        names: the names in the query, in their order.
        notes: what its names were taken for, where they could mean something else.
        why_none: what a query that found nothing may have meant; "" if there is nothing to say.
    """

    database: Database
    runs: list[Mapping[str, Any]]
    names: list[str]
    notes: list[str]
    why_none: str


def search(
    index: str | None, conditions: Sequence[str], filter_text: str | None, wanted: Sequence[str] = ()
) -> Searched:
    """Find the runs that fulfil the comparisons and the filter, the newest start last.

    A run has `ranks`, the number of ranks of its newest start, where that is recorded.

    Args:
        wanted: further names to add to each run that has them.

    Raises:
        ConfigError: the question is not a comparison or a filter, or no run can match (`index.query_checks`).
        RunIndexError: there is neither an index nor a run.
    """
    asked, filtered = parse(" ".join(conditions)), parse_json_filter(filter_text or "{}")
    parts = [condition.name for condition in asked if condition.operator != "~"]
    names = [*parts, *mongo.paths(filtered), *wanted]
    database = open_index(index)
    with database.read() as connection:
        leaves = [*(each.leaf for each in asked), *mongo.leaves(filtered)]
        require_there(connection, leaves, wanted)
        require_comparable(connection, leaves)
        gone = gone_runs(database, connection)
        chosen = run_condition(connection, filtered, gone) if filter_text else None
        newest = NewestFacts(connection)
        counted = [name for name in names if name not in FACTS and _is_computed(connection, name)]
        runs = all_runs(connection, [name for name in names if name not in counted], gone, chosen, newest)
        add_computed(connection, runs, counted)
        paths = {each.name for each in asked}.difference(FACTS, counted)
        several = {path: newest.at(path) for path in paths if not is_metric(connection, path)}
        ranks = ranks_of(connection)
        told = [{**run, "ranks": ranks[run["id"]]} if run["id"] in ranks else run for run in runs]
        found = where(told, asked, several)
        notes = taken_for_metrics(connection, names)
    return Searched(database, found, names, notes, "" if found else why_none(asked))


def _is_computed(connection: Connection, name: str) -> bool:
    return not is_metric(connection, name) and is_computed(connection, name)
