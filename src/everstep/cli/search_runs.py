"""Search all runs of an index by comparisons and a filter, as `everstep runs` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from everstep.cli.find_run import open_index
from everstep.errors import ConfigError
from everstep.index import mongo
from everstep.index.database import Database
from everstep.index.documents import run_condition
from everstep.index.filters import parse, where
from everstep.index.query_checks import require_comparable, require_there
from everstep.index.run_queries import FACTS, NewestFacts, all_runs, is_metric
from everstep.index.shipping import gone_runs


class Searched(NamedTuple):
    """Runs found in an index; `names` are the names in the query, in their order."""

    database: Database
    runs: list[Mapping[str, Any]]
    names: list[str]


def search(
    index: str | None, conditions: Sequence[str], filter_text: str | None, wanted: Sequence[str] = ()
) -> Searched:
    """Find the runs that fulfil the comparisons and the filter, the newest start last.

    Args:
        wanted: further names to add to each run that has them.

    Raises:
        ConfigError: the question is not a comparison or a filter, or no run can match (`index.query_checks`).
        RunIndexError: there is neither an index nor a run.
    """
    asked, filtered = parse(" ".join(conditions)), _filter(filter_text)
    names = [*(condition.name for condition in asked), *mongo.paths(filtered), *wanted]
    database = open_index(index)
    with database.read() as connection:
        leaves = [*(each.leaf for each in asked), *mongo.leaves(filtered)]
        require_there(connection, leaves, wanted)
        require_comparable(connection, leaves)
        gone = gone_runs(database, connection)
        chosen = run_condition(connection, filtered, gone) if filter_text else None
        newest = NewestFacts(connection)
        runs = all_runs(connection, names, gone, chosen, newest)
        paths = {each.name for each in asked} - set(FACTS)
        several = {path: newest.at(path) for path in paths if not is_metric(connection, path)}
        found = where(runs, asked, several)
    return Searched(database, found, names)


def _filter(text: str | None) -> mongo.Node:
    try:
        return mongo.parse(json.loads(text or "{}", object_pairs_hook=_object))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f'--where is not JSON ({error}); give an object, as in \'{{"step": {{"$gt": 100}}}}\''
        ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(
                f"--where gives {key!r} twice in one object; put its conditions together, as in "
                '{"step": {"$gt": 100, "$lt": 200}}, or use $and'
            )
        found[key] = value
    return found
