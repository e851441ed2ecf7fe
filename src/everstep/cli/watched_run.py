"""What `everstep watch` shows of a run, from its directory; for another machine's run from the index."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection

from everstep.cli.find_run import find
from everstep.errors import ConfigError
from everstep.index.database import Database
from everstep.index.readers import id_at, is_run
from everstep.index.run_facts import GONE
from everstep.index.run_queries import badges, find_run, metric_rows, starts, summaries
from everstep.index.shipping import ALIVE_SECONDS, is_gone, ship
from everstep.record import Watch, newest_step
from everstep.views.progress import whole_steps

_MOST_POINTS = 1000


class Look(NamedTuple):
    """A run at one moment.

    Attributes:
        name, status, reason: as in the index; `status` with the step of a divergence.
        step, epoch: last complete step, and its epoch.
        steps: number of steps at which the run will be complete; None if that is not known.
        starts: a sentence for each start.
        values: the last value of each metric.
    """

    name: str
    status: str
    reason: str
    step: int
    epoch: int
    steps: int | None
    starts: tuple[str, ...]
    values: dict[str, float]


class WatchedRun:
    """A run that is looked at again and again.

    Args:
        text: what RUN means.
        index: what --index names.
    """

    def __init__(self, text: str, index: str | None) -> None:
        found = find(text, index)
        self._name = str(found.facts["name"])
        self._run_dir: Path | None = Path(found.facts["path"])
        self._database = found.database
        self._locks = Watch()
        if id_at(self._run_dir) not in ((None, self._name) if is_run(self._run_dir) else (self._name,)):
            self._run_dir = None  # of another machine, which ships it
        elif found.database.exists():
            self._database = Database(None)  # in memory: to look changes no index

    @contextmanager
    def following(self) -> Iterator[None]:
        """Let the training hand over its rows at once as long as the block runs."""
        with ExitStack() as stack:
            stack.callback(self._locks.close)
            if self._run_dir is None and self._database.shared:
                stack.enter_context(self._database.kept_open())
            yield

    def look(self) -> Look:
        """Look at the run, as it is now."""
        if self._run_dir is not None:
            self._locks.over([str(self._run_dir)])
            ship(self._database, self._run_dir)
        with self._database.read() as connection:
            facts = find_run(connection, self._name, exactly=True)
            gone = self._run_dir is None and is_gone(self._database, facts)
            status = GONE if gone else str(facts["status"])
            begun = starts(connection, facts["id"])
            verified = badges(connection, facts["id"])
            found = summaries(connection, facts["id"])
            whole = whole_steps(connection, facts["id"], begun[-1]["facts"] if begun else {})
        if status == "running" and self._run_dir is None:
            status += _silence(facts["heartbeat"])
        step, epoch = max(facts["step"], self._step_of_trail(begun)), facts["epoch"]
        values = {one.name: one.last for one in reversed(found)}
        told = tuple(_told(start, str(verified.get(start["number"], ""))) for start in begun)
        return Look(
            self._name,
            status + ("" if facts["diverged"] is None else f", diverged at {facts['diverged']}"),
            facts["reason"] or "",
            step,
            epoch,
            whole,
            told,
            dict(reversed(values.items())),
        )

    def points(self, metric: str) -> tuple[list[int], list[float]]:
        """Return steps and finite values of a metric; of many points some are left out."""
        with self._database.read() as connection:
            rows = self._rows(connection, metric)
        rows = [row for row in rows if row.phase == rows[0].phase and math.isfinite(row.value)]
        rows = rows[:: 1 + len(rows) // _MOST_POINTS]
        return [row.step for row in rows], [row.value for row in rows]

    def _rows(self, connection: Connection, metric: str) -> list[Any]:
        try:
            return metric_rows(connection, find_run(connection, self._name, exactly=True)["id"], metric)
        except ConfigError:  # it has no value yet
            return []

    def _step_of_trail(self, begun: list[dict[str, Any]]) -> int:
        """Return the newest complete step, which the journal has seconds later."""
        if self._run_dir is None or not begun:
            return 0
        return newest_step(self._run_dir, begun[-1]["number"])


def _silence(heartbeat: float | None) -> str:
    """Say for how long another machine has not told that the run is alive; "" if it has."""
    silent = 0.0 if heartbeat is None else time.time() - heartbeat
    return "" if silent < ALIVE_SECONDS else f", silent for {silent / 60:.0f} minutes"


def _told(start: dict[str, Any], badge: str) -> str:
    came = start["facts"].get("resumed_from")
    how = start["status"] or "no end recorded"
    reason = f": {start['reason']}" if start["reason"] else ""
    begun = f"from {came}" if came else "from nothing"
    return f"start {start['number']} {begun}" + (f", {badge}" if badge else "") + f"; {how}{reason}"
