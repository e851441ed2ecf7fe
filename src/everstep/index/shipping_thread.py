"""Thread that ships a run while it trains; it sleeps in between, and touches nothing of the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from everstep.index.location import Location
from everstep.index.run_facts import IndexBusyError

SECONDS = 30.0
"""Seconds between two shippings, which are also the heartbeat that shows that the run is alive."""

FIRST = 5.0
"""Seconds until the first shipping to a server: other machines see that the run has begun."""

PATIENCE = 2.0
"""Seconds that the end of a run waits for the index; an earlier shipping does not wait."""

FILE_PATIENCE = 10.0
"""Further seconds that the end of a run waits if the index is a file."""


class IndexWriter:
    """Writer that ships a run's journal every `SECONDS` and at its end.

    A failure gives one message, and the next shipping tries again: the journal has it all.  Only the last
    shipping waits for another process that writes.
    """

    def __init__(
        self, place: Location, run_dir: Path, has_stepped: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._place, self._run_dir, self._has_stepped, self._say = place, run_dir, has_stepped, say
        self._has_warned = False
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
        wait = min(FIRST, SECONDS) if isinstance(self._place, str) else SECONDS
        while not self._ending.wait(wait):
            if self._has_stepped():
                self._ship(0.0)
                wait = SECONDS
        self._ship(PATIENCE)

    def _ship(self, patience: float) -> None:
        try:
            try:
                from everstep.index.database import Database
                from everstep.index.shipping import ship
            finally:
                self._ready.set()
            ship(Database(self._place, patience), self._run_dir, alive=True)
        except IndexBusyError as error:
            if patience:  # no later shipping could send its rows
                self._say(f"the rest of this run is not in the index yet: {error}")
        except Exception as error:
            self._warn(f"{error}")

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(
                f"warning: {message}. The training continues; nothing is lost: the journal has every row"
            )
