"""Ships a run while it trains: a thread beside the training that sleeps, and touches nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

SECONDS = 30.0
"""Between two shippings; also the heartbeat by which others see that the run is alive."""


class IndexWriter:
    """Ships one run's journal every `SECONDS` and at its end.

    SQLAlchemy is imported by the thread, with the first shipping.  Whatever fails is said once and
    tried again next time: the journal has it all.

    Args:
        path: the index.
        run_dir: the run directory.
        moved: whether the run has made a step; before, nothing is shipped.
        say: takes one sentence, from this thread.
    """

    def __init__(
        self, path: Path, run_dir: Path, moved: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._path, self._run_dir, self._moved, self._say = path, run_dir, moved, say
        self._said = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="everstep-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ship what there is, and end the thread."""
        self._ending.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ending.wait(SECONDS):
            if self._moved():
                self._ship()
        self._ship()

    def _ship(self) -> None:
        try:
            from everstep.index.database import Database, IndexBusyError
            from everstep.index.shipping import ship

            try:
                ship(Database(self._path), self._run_dir, alive=True)
            except IndexBusyError:
                return  # a long writing by somebody else: next time, or by the next reader
        except Exception as error:
            if not self._said:
                self._said = True
                self._say(f"warning: {error}. The training goes on; nothing is lost, the journal has it all")
