"""A run, and runs side by side, as objects that a notebook shows: `everstep.runs.show` and `.compare`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from everstep.display.cells import cell, in_line
from everstep.display.html import notebook_html
from everstep.errors import ConfigError
from everstep.index.query import Documents
from everstep.views.compare_runs import Compared, SideBySide
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


class Comparison:
    """Runs side by side, as `everstep compare` prints them; a notebook shows tables.

    Attributes:
        runs: the titles of the runs, which are columns of the tables.
        facts: a dictionary for each fact that differs, settings included (`config.optimizer.lr`).
        metrics: the same for the last and best value of each metric.
        verdict: whether the newest checkpoints are equal to the bit; None where nothing can be said.
    """

    def __init__(self, compared: Compared) -> None:
        self.runs, self.verdict = compared.runs, compared.verdict()
        self.facts = _documents("fact", self.runs, compared.differing())
        self.metrics = _documents("metric", self.runs, compared.metrics)

    def __repr__(self) -> str:
        return f"<{', '.join(map(in_line, self.runs))}: {len(self.facts)} facts differ>"

    def _repr_html_(self) -> str:
        facts = [{name: cell(row["fact"], value) for name, value in row.items()} for row in self.facts]
        tables = (
            ("facts that differ", facts, self.facts.columns),
            ("metrics", self.metrics, self.metrics.columns),
        )
        return notebook_html(self.verdict or repr(self), (), tables)


def _documents(what: str, runs: Sequence[str], values: SideBySide) -> Documents:
    return Documents([{what: name, **each} for name, each in values.items()], (what, *runs))


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


def compare(*runs: str | os.PathLike[str], index: str | os.PathLike[str] | None = None) -> Comparison:
    """Return the facts in which two or more runs differ, and their metrics.

    Args:
        runs, index: as in `everstep.runs.show`.

    Raises:
        ConfigError: fewer than two runs are given, or there is no such run.
        RunDirError, JournalError, RunIndexError: a run cannot be read.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare needs two runs or more, not {len(runs)}; give their directories or names")
    return Comparison(side_by_side([os.fspath(run) for run in runs], _find(runs, index)))


def _find(runs: Sequence[str | os.PathLike[str]], index: str | os.PathLike[str] | None) -> list[Found]:
    problems: list[str] = []
    found = find_all(
        [os.fspath(run) for run in runs], None if index is None else os.fspath(index), problems.extend
    )
    for problem in problems:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
    return found
