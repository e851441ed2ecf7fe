"""Search all runs of an index by comparisons and a filter, as `everstep runs` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from everstep.cli.find_run import open_index
from everstep.index.columns import RunColumns
from everstep.index.database import Database
from everstep.index.filters import Group, leaves, parse_json, parse_words, why_none
from everstep.index.shipping import gone_runs


class Searched(NamedTuple):
    """Runs found in an index.

    Attributes:
        names: the names in the query, in their order.
        notes: what its names were taken for, where they could mean something else.
        why_none: what a query that found nothing may have meant; "" if there is nothing to say.
    """

    database: Database
    runs: list[dict[str, Any]]
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
        ConfigError: the question is not a comparison or a filter, or no run can match.
        RunIndexError: there is neither an index nor a run.
    """
    words = parse_words(" ".join(conditions))
    where = Group(True, (words, parse_json(filter_text or "{}")))
    names = [leaf.path for leaf in leaves(where) if not (leaf.path == "name" and leaf.operator == "$regex")]
    database = open_index(index)
    with database.read() as connection:
        columns = RunColumns(connection, gone_runs(database, connection))
        columns.require(leaves(where), wanted, strict=True)
        runs = columns.find(where)
        columns.add(runs, [*names, *wanted, "ranks"])
        notes = columns.taken_for_metrics([*names, *wanted])
    return Searched(database, runs, [*names, *wanted], notes, "" if runs else why_none(words))
