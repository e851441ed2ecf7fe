"""The index behind the page, kept up to date with the journals of this machine by a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from everstep.index import query
from everstep.index.database import Database
from everstep.index.location import Location, runs_of
from everstep.index.readers import is_run
from everstep.index.run_facts import IndexBusyError, UnwritableIndexError
from everstep.index.shipping import Journals, gone_runs, is_here
from everstep.ui.runs_table import RunsTable, run_id

PAUSE = 0.5
"""Least seconds between two looks at all journals and the index; a look takes at most a tenth of all time,
unless that would make a new run wait for more than `_LONGEST` seconds."""

_LONGEST = 1.2

_GLANCE = 0.25
"""Seconds between two looks at the runs whose charts are open; a point waits for its row a second, too."""

_MOST_PROBLEMS = 100
"""Most descriptions of faults that are kept."""


class News(NamedTuple):
    """What a look has found: names of changed runs, and (name, step) of runs with new rows."""

    changed: list[str]
    points: list[tuple[str, int]]


class FollowedIndex:
    """Index of runs, and their table in memory; both have rows soon after the journals have them.

    Journals are shipped into the index as `everstep runs` ships them; where this user may not write it, into
    an index of this process.  No run directory is written or locked.

    Args:
        place: the index, or None for an index of this process alone.
        folder: the folder whose runs the index should have, or a run directory.

    Attributes:
        database: the index; each transaction has its own connection.
        table: all runs, in memory.
    """

    def __init__(self, place: Location | None, folder: Path) -> None:
        self._problems: list[str] = []
        self._trouble: list[str] = []
        """Why the newest look has failed."""
        self._folder = folder
        self._gone: set[int] = set()
        """Keys of the runs whose directories do not exist any more."""
        self._seen: object = None
        self._glanced: object = None
        """State of the index at the newest look and glance."""
        self._is_whole = True
        """Whether the index has all runs of the folder, as far as is known."""
        self._listeners: list[tuple[Callable[[News], object], frozenset[str]]] = []
        self._ending = threading.Event()
        # Before the index is brought up to date: what changes after that is then seen as a change.
        self._journals = Journals([folder], named=place is None)
        if place is None:
            self.database = Database(None)
        else:
            self.database, found = query.open_index(str(place))
            self._note(found)
        self.table = RunsTable(self.database)
        self._look()
        self._thread = threading.Thread(target=self._follow, name="everstep-ui", daemon=True)
        self._thread.start()

    @property
    def problems(self) -> list[str]:
        """Descriptions of faults in journals and index, the newest last; then why the page shows old data."""
        return [*self._problems, *self._trouble]

    def subscribe(
        self, listener: Callable[[News], object], runs: frozenset[str] = frozenset()
    ) -> Callable[[], None]:
        """Call a function with all news, from another thread; returns a function that ends this.

        Args:
            runs: ids of runs whose points somebody waits for.
        """
        self._listeners.append((listener, runs))
        return lambda: self._listeners.remove((listener, runs))

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join()

    def _note(self, problems: list[str]) -> None:
        new = [problem for problem in dict.fromkeys(problems) if problem not in self._problems]
        self._problems = [*self._problems, *new][-_MOST_PROBLEMS:]

    def _follow(self) -> None:
        while not self._ending.is_set():
            try:
                self._follow_connected()
            except Exception as error:  # a server that is away for a while: the page shows what it has
                self._trouble = [f"the page shows old data: {error}"]
                self._is_whole = False
                self._ending.wait(_LONGEST)

    def _follow_connected(self) -> None:
        due = time.monotonic() + PAUSE
        while not self._ending.wait(max(0.0, min(_GLANCE, due - time.monotonic()))):
            begun = time.monotonic()
            watched = self._watched()
            if begun < due:
                self._glance(watched)
                continue
            self._look()
            now = time.monotonic()
            due = now + min(max(PAUSE, 9 * (now - begun)), _LONGEST)

    def _watched(self) -> list[dict[str, Any]]:
        """List the runs whose points somebody waits for."""
        asked: set[str] = set().union(*(runs for _, runs in list(self._listeners)))
        return self.table.chosen(asked)

    def _glance(self, watched: list[dict[str, Any]]) -> None:
        """Tell of new points of some runs; the next look notes what else has changed."""
        if not watched:
            return
        with contextlib.suppress(IndexBusyError, UnwritableIndexError):  # the next look tells that
            here = [Path(run["path"]) for run in watched if is_here(self.database, run["host"])]
            self._note(self._journals.ship(self.database, only=here).problems)
        state = self._state()
        if state is None or state != self._glanced:
            with self.database.read() as connection:
                self._tell(News([], self.table.grown(connection, [run_id(run) for run in watched])))
            self._glanced = state

    def _look(self) -> None:
        trouble = []
        try:
            if not self._is_whole:  # made anew from one run alone, perhaps
                self._journals = Journals([self._folder], named=False)
                self._is_whole = True  # runs that are missing even so were taken out on purpose
            self._note(self._journals.ship(self.database).problems)
        except (IndexBusyError, UnwritableIndexError) as error:
            trouble = [f"the page may lack the newest rows: {error}"]
        self._gone = gone_runs(self.database, self.table.runs())
        state = self._state()
        if state is None or state != self._seen:
            with self.database.read() as connection:
                before = len(self.table.runs())
                news = News(*self.table.update(connection, gone_runs(self.database, connection)))
                self._is_whole = len(self.table.runs()) >= before
            self._seen = self._glanced = state
            self._tell(news)
        self._trouble = trouble

    def _tell(self, news: News) -> None:
        if news.changed or news.points:
            for listener, _ in list(self._listeners):
                listener(news)

    def _state(self) -> object:
        """Return what differs after a change of an index in a file; None for an index in a database."""
        place = self.database.place
        if not isinstance(place, Path):
            return None
        found = [_stat(path) for path in (place, place.with_name(f"{place.name}-wal"))]
        return frozenset(self._gone), *found


def _stat(path: Path) -> object:
    """Return what differs after a file was written or replaced; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextlib.contextmanager
def followed(index: str | None) -> Iterator[FollowedIndex]:
    """Open and follow the index that a person names: a folder of runs, a file, a URL, or a run directory."""
    place = query.index_place(index)
    folder = runs_of(place)
    alone = isinstance(place, Path) and is_run(folder) and not place.exists()
    found = FollowedIndex(None if alone else place, folder)
    try:
        yield found
    finally:
        found.close()
