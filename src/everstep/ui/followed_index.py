"""The index behind the page, brought up to date with the journals of this machine when the page asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from sqlalchemy import func, select

from everstep.index import query
from everstep.index.database import Database
from everstep.index.location import is_run, runs_of
from everstep.index.run_facts import IndexBusyError, UnwritableIndexError
from everstep.index.run_queries import newest_facts, run_rows
from everstep.index.shipping import is_here, sync
from everstep.index.sql_tables import segments
from everstep.labels import NAMES as LABELS
from everstep.ui.runs_table import RunsTable, run_id

_PAUSE, _SHARE = 0.5, 4
"""Least seconds between two looks at all journals; a look that takes long pauses `_SHARE` times as long."""

_MOST_PROBLEMS = 20
"""Most descriptions of faults that are kept."""


class FollowedIndex:
    """Index of runs, and their table in memory.  May be used by several threads; writes no run directory.

    Args:
        index: a folder of runs, a file, a URL, or a run directory; None for the default index.
    """

    def __init__(self, index: str | None) -> None:
        place = query.index_place(index)
        self._folder = runs_of(place)
        self._is_own = isinstance(place, Path) and is_run(self._folder) and not place.exists()
        """Whether a run directory is followed, by an index of this process alone."""
        self._problems: deque[str] = deque(maxlen=_MOST_PROBLEMS)
        self._trouble: list[str] = []
        """Why the newest look has failed."""
        self._lock = threading.Lock()
        self._due = 0.0
        self._state: object = None
        """Rows and labels of all runs, as the table has them."""
        self.version = 0
        self.database, problems = (Database(None), []) if self._is_own else query.open_index(str(place))
        self._note(problems)
        self._look()

    @property
    def problems(self) -> list[str]:
        """Descriptions of faults in journals and index, the newest last; then why the page shows old data."""
        return [*self._problems, *self._trouble]

    def refresh(self) -> None:
        """Bring index and table up to date, if the last look is a while ago and no other thread does so."""
        if time.monotonic() < self._due or not self._lock.acquire(blocking=False):
            return
        begun = time.monotonic()
        try:
            self._look()
        except Exception as error:  # a server that is away for a while: the page shows what it has
            self._trouble = [f"the page shows old data: {error}"]
        finally:
            now = time.monotonic()
            self._due = now + max(_PAUSE, _SHARE * (now - begun))
            self._lock.release()

    def sizes(self, ids: Collection[str]) -> dict[str, int]:
        """Return id -> bytes of the journal that are in the index, of runs whose charts are open.

        Their journals are shipped first.
        """
        runs = {run["id"]: run for run in self.table.chosen(ids)}
        watched = [run for run in runs.values() if run["status"] == "running"]
        here = [Path(run["path"]) for run in watched if is_here(self.database, run["host"])]
        if here:
            with self._lock, suppress(IndexBusyError, UnwritableIndexError):  # the next look tells that
                self._ship(here)
        sized = select(segments.c.run, func.sum(segments.c.size)).where(segments.c.run.in_(runs))
        with self.database.read() as connection:
            found = connection.execute(sized.group_by(segments.c.run))
            return {run_id(runs[run]): int(size) for run, size in found}

    def _ship(self, only: Collection[Path] | None = None) -> None:
        self._note(sync(self.database, [self._folder], named=self._is_own, only=only).problems)

    def _note(self, problems: list[str]) -> None:
        self._problems.extend(one for one in dict.fromkeys(problems) if one not in self._problems)

    def _look(self) -> None:
        trouble = []
        try:
            self._ship()
        except (IndexBusyError, UnwritableIndexError) as error:
            trouble = [f"the page may lack the newest rows: {error}"]
        with self.database.read() as connection:
            state = run_rows(connection), newest_facts(connection, names=LABELS)
        if state != self._state:
            self.table = RunsTable(self.database)
            self.version, self._state = self.version + 1, state
        self._trouble = trouble
