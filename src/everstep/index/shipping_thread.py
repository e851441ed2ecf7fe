"""Thread that ships a run while it trains; it sleeps in between, and touches nothing of the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.index.location import Location

if TYPE_CHECKING:
    from everstep.index.database import Database

SECONDS = 30.0
"""Seconds between two shippings, which are also the heartbeat that shows that the run is alive."""

PATIENCE = 2.0
"""Seconds that the end of a run waits for the index; an earlier shipping does not wait."""

FILE_PATIENCE = 10.0
"""Further seconds that the end of a run waits if the index is a file."""


class IndexWriter:
    """Writer that ships a run's journal every `SECONDS` and at its end.

    The thread imports SQLAlchemy at the first shipping.  A failure gives one message, and the next shipping
    tries again: the journal has it all.  A shipping does not wait for another process that writes the
    index, except the last shipping.

    Args:
        place: the index.
        run_dir: the run directory.
        has_stepped: returns whether the run has made a step; before, nothing is shipped.
        say: called with a sentence, from this thread.
    """

    def __init__(
        self, place: Location, run_dir: Path, has_stepped: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._place, self._run_dir, self._has_stepped, self._say = place, run_dir, has_stepped, say
        self._said = False
        self._ending, self._ready = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._over = False
        self._database: Database | None = None
        self._thread = threading.Thread(target=self._work, name="everstep-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ship the rest, and end the thread; a shipping that takes too long is given up."""
        self._ending.set()
        self._ready.wait()  # for the imports, without a limit: the limits below are for the index
        self._thread.join(PATIENCE)
        if self._database is not None and not self._database.shared:
            self._thread.join(FILE_PATIENCE)
        with self._lock:
            self._over = True
        end = time.monotonic() + PATIENCE
        while self._thread.is_alive() and self._database is not None and time.monotonic() < end:
            # Repeated: an interrupt between two statements has no effect.
            self._database.interrupt()
            self._thread.join(0.05)

    def _work(self) -> None:
        while not self._ending.wait(SECONDS):
            if self._has_stepped():
                self._ship()
        self._ship(PATIENCE)

    def _ship(self, patience: float = 0.0) -> None:
        try:
            try:
                from everstep.index.database import Database
                from everstep.index.index_errors import IndexBusyError, again_if_malformed
                from everstep.index.shipping import ship

                with self._lock:
                    if self._over:
                        return
                    self._database = database = Database(self._place, patience)
            finally:
                self._ready.set()
            try:
                again_if_malformed(
                    lambda: ship(database, self._run_dir, alive=True),
                    lambda said: self._say(f"warning: {said}"),
                )
            except IndexBusyError:
                if (
                    patience
                ):  # only the last shipping waits for a busy index: no later one could send its rows
                    self._say(
                        f"the index {database.name} is busy: everstep sync will add the rest of this run"
                    )
        except Exception as error:
            if not self._said:
                self._said = True
                self._say(
                    f"warning: {error}. The training continues; nothing is lost: the journal has every row"
                )
