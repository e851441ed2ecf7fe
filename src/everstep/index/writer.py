"""Ships a run while it trains: a thread beside the training that sleeps, and touches nothing of it."""

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
"""Between two shippings; also the heartbeat by which others see that the run is alive."""

PATIENCE = 2.0
"""Seconds that the end of a run waits for the index; in between, the next shipping is soon enough."""

FILE_PATIENCE = 10.0
"""Seconds that it waits for the rows to be written to a file, which nobody else has."""


class IndexWriter:
    """Ships one run's journal every `SECONDS` and at its end.

    SQLAlchemy is imported by the thread, with the first shipping.  Whatever fails is said once and
    tried again next time: the journal has it all.  An index that another process writes is left alone
    until the end, so that nothing but the last shipping waits for it.

    Args:
        place: the index.
        run_dir: the run directory.
        moved: whether the run has made a step; before, nothing is shipped.
        say: takes one sentence, from this thread.
    """

    def __init__(
        self, place: Location, run_dir: Path, moved: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._place, self._run_dir, self._moved, self._say = place, run_dir, moved, say
        self._said = False
        self._ending, self._ready = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._over = False
        self._database: Database | None = None
        self._thread = threading.Thread(target=self._work, name="everstep-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ship what there is, and end the thread; what takes too long is given up."""
        self._ending.set()
        self._ready.wait()  # only waiting for the index is limited
        self._thread.join(PATIENCE)
        if self._database is not None and not self._database.shared:
            self._thread.join(FILE_PATIENCE)
        with self._lock:
            self._over = True
        end = time.monotonic() + PATIENCE
        while self._thread.is_alive() and self._database is not None and time.monotonic() < end:
            self._database.interrupt()  # again: it may have been between two statements
            self._thread.join(0.05)  # a name that is looked up goes on

    def _work(self) -> None:
        while not self._ending.wait(SECONDS):
            if self._moved():
                self._ship()
        self._ship(PATIENCE)

    def _ship(self, patience: float = 0.0) -> None:
        try:
            try:
                from everstep.index.database import Database
                from everstep.index.faults import IndexBusyError, again_if_malformed
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
                if patience:  # it was the last one
                    self._say(
                        f"the index {database.name} is busy: everstep sync will bring this run up to date"
                    )
        except Exception as error:
            if not self._said:
                self._said = True
                self._say(f"warning: {error}. The training goes on; nothing is lost, the journal has it all")
