"""A run, and runs side by side, as a notebook shows them: `everstep.runs.show` and `.compare`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from everstep.display.cells import cell, in_line
from everstep.display.html import notebook_html
from everstep.errors import ConfigError
from everstep.index.query import Documents
from everstep.views.compare_runs import Compared
from everstep.views.compare_runs import compare as side_by_side
from everstep.views.describe_run import describe
from everstep.views.find_run import Found, find_all

_FACTS = ("reason", "step", "epoch", "created", "heartbeat", "seed", "digest", "path")
_STARTS = ("number", "started", "from", "status", "step", "verified", "reason")
_METRICS = ("phase", "name", "rows", "last", "step", "smallest", "largest", "best", "best_step")
_CHECKPOINTS = ("name", "bytes", "created", "pinned", "next")


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
        self.checkpoints = Documents(facts["checkpoints"], _CHECKPOINTS)

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

    Raises:
        ConfigError: there is no such run; names the nearest.
        RunDirError, JournalError, RunIndexError: the run cannot be read.

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

    Raises:
        ConfigError: fewer than two runs are given, or there is no such run.
        RunDirError, JournalError, RunIndexError: a run cannot be read.
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
