"""Everything about a run except its rows, as JSON and for a notebook: `everstep.runs.show` and `.compare`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from everstep.display.cells import cell, in_line
from everstep.display.html import notebook_html
from everstep.errors import CheckpointError, ConfigError
from everstep.index.location import is_run
from everstep.index.query import Documents
from everstep.index.run_facts import FACTS
from everstep.index.run_queries import newest_facts, rollbacks, starts, summaries
from everstep.index.sql_tables import stored
from everstep.labels import NAMES as LABELS
from everstep.record import evaluations, failures
from everstep.redaction import without_credentials
from everstep.views.checkpoint_tables import asked_for, best_weights, checkpoints_of, newest_whole
from everstep.views.compare_runs import Compared
from everstep.views.compare_runs import compare as side_by_side
from everstep.views.find_run import Found, find_all

_FACTS = ("reason", "step", "epoch", "created", "heartbeat", "seed", "digest", "path")
_STARTS = ("number", "started", "from", "status", "step", "verified", "reason")
_METRICS = ("phase", "name", "rows", "last", "step", "smallest", "largest", "best", "best_step")


def describe(connection: Connection, found: Found, *, steps: bool = True) -> dict[str, Any]:
    """Return everything about a run except its rows, as JSON; a summary of `steps` takes time per row."""
    recorded = without_credentials(newest_facts(connection, [found.id]).get(found.id, {}))
    problems = stored(found.facts["problems"], list)
    checkpoints, best = [], []
    there = not found.is_gone and is_run(found.path)
    if there:
        try:
            checkpoints, best = asked_for(checkpoints_of(found.path)), best_weights(found.path)
        except CheckpointError as error:
            problems.append(str(error))
    return {
        **{name: found.facts[name] for name in FACTS},
        "facts": {name: value for name, value in recorded.items() if name not in LABELS},
        "tags": recorded.get("tags", []),
        "note": recorded.get("note", ""),
        "segments": starts(connection, found.id),
        "rollbacks": [
            one._asdict()
            | {"batches": [each._asdict() for each in one.batches], "quarantined": len(one.batches)}
            for one in rollbacks(connection, found.id)
        ],
        "digest": newest_whole(checkpoints).get("digest"),
        "checkpoints": checkpoints,
        "best": best,
        "evaluations": [one._asdict() for one in evaluations(found.path)] if there else [],
        "failures": [one._asdict() for one in failures(found.path)] if there else [],
        "problems": problems,
        "metrics": summaries(connection, found.id, steps=steps),
    }


class ShownRun:
    """Everything about a run, as `everstep show` prints it; a notebook shows tables.

    Attributes:
        facts: the content of `everstep show RUN --json`.
        starts, metrics, checkpoints: parts of it, as results of a query: lists that become frames.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.starts = Documents(facts["segments"], _STARTS)
        self.metrics = Documents(facts["metrics"], _METRICS)
        self.checkpoints = Documents(facts["checkpoints"], ("name", "bytes", "created", "pinned", "next"))

    def __repr__(self) -> str:
        facts, count = self.facts, len(self.starts)
        diverged = "" if facts["diverged"] is None else f", diverged at {facts['diverged']}"
        return (
            f"<run {in_line(facts['name'])}: {facts['status']}{diverged}, step {facts['step']}, "
            f"{count} start{'s' * (count != 1)}>"
        )

    def _repr_html_(self) -> str:
        facts = Documents([{"": n, "value": cell(n, self.facts[n])} for n in _FACTS], ("", "value"))
        tables = {"": facts, "starts": self.starts, "metrics": self.metrics, "checkpoints": self.checkpoints}
        return notebook_html(repr(self), (), [(title, rows, rows.columns) for title, rows in tables.items()])


def show(run: str | os.PathLike[str], *, index: str | os.PathLike[str] | None = None) -> ShownRun:
    """Return everything about a run except its rows.

    Args:
        run: a run directory, of which only the journal is read, or a name in the index; the beginning of a
            name is enough.
        index: as in `everstep.query`.

    Warns:
        RuntimeWarning: a journal is damaged or the index could not be brought up to date.
    """
    (found,) = _find([run], index)
    with found.database.read() as connection:
        return ShownRun(describe(connection, found))


def compare(*runs: str | os.PathLike[str], index: str | os.PathLike[str] | None = None) -> Compared:
    """Return the facts and metrics of two or more runs, side by side.

    Args:
        runs, index: as in `everstep.runs.show`.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare needs two runs or more, not {len(runs)}; give their directories or names")
    return side_by_side([os.fspath(run) for run in runs], _find(runs, index))


def _find(runs: Sequence[str | os.PathLike[str]], index: str | os.PathLike[str] | None) -> list[Found]:
    problems: list[str] = []
    found = find_all(
        [os.fspath(run) for run in runs], None if index is None else os.fspath(index), problems.extend
    )
    for problem in problems:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
    return found
