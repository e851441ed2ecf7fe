"""Thread that ships a run while it trains; it sleeps in between, and touches nothing of the training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.index import IndexBusyError
from everstep.index.location import Location

if TYPE_CHECKING:
    from everstep.index.database import Database

SECONDS = 30.0
"""Seconds between two shippings of a run that has nothing new: the heartbeat that shows that it is alive."""

PAUSE, _LOOK = 1.0, 0.2
"""Least seconds between two shippings to a server, and seconds between two looks at the journal's size."""

PATIENCE, FILE_PATIENCE = 2.0, 10.0
"""Seconds that the end of a run waits for the index, and further ones if that is a file."""


class IndexWriter:
    """Writer that ships a run's journal: to a server when it has grown, to a file every `SECONDS`.

    A failure gives one message, and the next shipping tries again: the journal has it all.  Only the last
    shipping waits for another process that writes.
    """

    def __init__(
        self, place: Location, run_dir: Path, has_stepped: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._place, self._run_dir, self._has_stepped, self._say = place, run_dir, has_stepped, say
        self._has_warned = False
        self._database: Database | None = None
        """The connection that is kept between two shippings to a server."""
        self._ending, self._ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="everstep-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ship the rest, and end the thread; a shipping that takes too long is left behind."""
        self._ending.set()
        self._ready.wait()  # for the imports, without a limit: the limits below are for the index
        self._thread.join(PATIENCE + (0.0 if isinstance(self._place, str) else FILE_PATIENCE))
        if self._thread.is_alive():
            self._warn("the index did not answer in time; run everstep sync, which adds the rest of this run")
            self._say = lambda line: None

    def _work(self) -> None:
        look = idle = min(_LOOK if isinstance(self._place, str) else SECONDS, SECONDS)
        shipped, beat = None, 0.0
        while not self._ending.wait(look):
            look, now = idle, time.monotonic()
            if self._has_stepped() and ((end := self._end()) != shipped or now >= beat):
                succeeded = self._ship(0.0)
                shipped, beat = end, now + SECONDS
                look = min(max(look, PAUSE), SECONDS) if succeeded else SECONDS
        self._ship(PATIENCE)
        self._database = None

    def _end(self) -> tuple[str, int] | None:
        """Return the newest file of the journal, and its bytes; None where the disk does not say it now."""
        folder = self._run_dir / "journal"
        try:
            segments = (name for name in os.listdir(folder) if name.endswith(".evj"))
            newest = max(segments, key=lambda name: (len(name), name))
            return newest, os.stat(folder / newest).st_size
        except (OSError, ValueError):
            return None

    def _ship(self, patience: float) -> bool:
        """Ship what is new; return whether a server was there."""
        try:
            try:
                from everstep.index.database import Database
                from everstep.index.shipping import ship
            finally:
                self._ready.set()
            if self._database is None or patience:
                self._database = Database(self._place, patience)
            ship(self._database, self._run_dir, alive=True)
        except IndexBusyError as error:
            if patience:  # no later shipping could send its rows
                self._say(f"the rest of this run is not in the index yet: {error}")
        except Exception as error:
            self._warn(f"{error}")
            return False
        return True

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(f"warning: {message}. The training goes on; nothing is lost: the journal has every row")
