"""Thread that ships a run while it trains; it sleeps in between, and touches nothing of the training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.errors import RunIndexError
from everstep.index.index_errors import IndexBusyError, again_if_malformed
from everstep.index.location import Location

if TYPE_CHECKING:
    from everstep.index.database import Database

SECONDS = 30.0
"""Seconds between two shippings, which are also the heartbeat that shows that the run is alive."""

ASKING = 5.0
"""Seconds between two questions to a server whether somebody looks at the run."""

_LOOKING = 0.2
"""Seconds between two looks at the size of the journal while somebody looks at the run."""

PATIENCE = 2.0
"""Seconds that the end of a run waits for the index; an earlier shipping does not wait."""

FILE_PATIENCE = 10.0
"""Further seconds that the end of a run waits if the index is a file."""


class IndexWriter:
    """Writer that ships a run's journal every `SECONDS` and at its end; if somebody looks, as it is written.

    The thread imports SQLAlchemy at the first shipping, and keeps its connection to a server.  A failure
    gives one message, and the next shipping tries again: the journal has it all.  A shipping does not wait
    for another process that writes the index, except the last shipping.

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
        self._over = self._shipped = False
        self._database: Database | None = None
        self._kept: Database | None = None
        """An index on a server, with the connection that is kept between uses."""
        self._connection = contextlib.ExitStack()
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
        while not self._ending.is_set():
            self._rest()
            if self._has_stepped() and not self._ending.is_set():
                self._use(self._ship)
        self._use(self._ship, PATIENCE)
        self._let_go()

    def _rest(self) -> None:
        """Wait for `SECONDS`; ship at once what somebody on another machine waits for."""
        shared = isinstance(self._place, str)
        # The first one comes early: others see that the run has begun, and can look at it.
        end = time.monotonic() + (SECONDS if self._shipped or not shared else min(ASKING, SECONDS))
        while (left := end - time.monotonic()) > 0:
            if self._ending.wait(min(ASKING, left) if shared else left):
                return
            if shared and self._has_stepped():
                self._use(self._ship_while_watched)

    def _ship(self, database: Database) -> None:
        from everstep.index.shipping import ship

        ship(database, self._run_dir, alive=True)
        self._shipped = True

    def _ship_while_watched(self, database: Database) -> None:
        """Ship each piece of the journal as it is written, as long as somebody looks at the run."""
        from everstep.index.readers import id_at
        from everstep.index.shipping import journal_sizes
        from everstep.record import Watch

        name = id_at(self._run_dir)
        if name is None or not database.is_watched(name):
            return
        with contextlib.closing(Watch()) as watch:
            watch.over([str(self._run_dir)])  # so that the training writes each second
            sizes: object = None
            shipped = asked = time.monotonic()
            while not self._ending.wait(_LOOKING):
                now, found = time.monotonic(), journal_sizes(self._run_dir)
                if found != sizes or now - shipped >= SECONDS:
                    with contextlib.suppress(IndexBusyError):  # another process is shipping the run
                        self._ship(database)
                        sizes, shipped = found, now
                if now - asked >= ASKING / 2:
                    asked = now
                    if not database.is_watched(name):
                        return

    def _use(self, work: Callable[[Database], object], patience: float = 0.0) -> None:
        try:
            self._try(work, patience)
        except IndexBusyError:
            if patience:  # only the last shipping waits for a busy index: no later one could send its rows
                name = self._database.name if self._database is not None else self._place
                self._say(f"the index {name} is busy: everstep sync will add the rest of this run")
        except Exception as error:
            if not self._said:
                self._said = True
                self._say(
                    f"warning: {error}. The training continues; nothing is lost: the journal has every row"
                )

    def _try(self, work: Callable[[Database], object], patience: float) -> None:
        database, is_kept = self._opened(patience)
        if database is None:
            return
        try:
            again_if_malformed(lambda: work(database), lambda said: self._say(f"warning: {said}"))
        except IndexBusyError:
            raise
        except RunIndexError:
            self._let_go()
            if not is_kept:
                raise
            self._try(work, patience)  # the server has ended the connection since it was used

    def _opened(self, patience: float) -> tuple[Database | None, bool]:
        """Return the index, and whether over an old connection; None if the run is over."""
        try:
            from everstep.index.database import Database

            with self._lock:
                if self._over:
                    return None, False
                if self._kept is not None and not patience:
                    return self._kept, True
                self._let_go()
                self._database = database = Database(self._place, patience)
        finally:
            self._ready.set()
        if database.shared and not patience:
            self._connection.enter_context(database.kept_open())
            self._kept = database
        return database, False

    def _let_go(self) -> None:
        """Close the connection that is kept."""
        self._kept = None
        self._connection.close()
