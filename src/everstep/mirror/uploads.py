"""Thread that uploads what is committed, and tries again after an outage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from everstep.checkpoint import CheckpointName
from everstep.errors import RunLockedError
from everstep.mirror.mirror import Committed, Mirror

PAUSES = (1.0, 60.0)
"""Seconds before the first try after a failure, and the most seconds between two tries."""
GRACE = 5.0
"""Seconds that an upload which is given up has for the file that it is at."""


class Uploads:
    """Uploads in the background: what waits while an upload runs is replaced by what is newer.

    The thread begins with the first state and ends with `close`.

    Args:
        mirror: taken over by this start; from now on only the thread uses it.
        told: describes an error, without credentials.
        say, warn: take sentences for the user, from the thread.

    Attributes:
        taken: the error with which another start has taken the mirror over; None until then.
    """

    def __init__(
        self,
        mirror: Mirror,
        told: Callable[[BaseException], str],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.taken: RunLockedError | None = None
        self._mirror, self._told, self._say, self._warn = mirror, told, say, warn
        self._changed = threading.Condition()
        self._next: Committed | None = None
        self._current: Committed | None = None
        self._error = ""
        self._pause = PAUSES[0]
        self._said: set[str] = set()
        self._over = self._hurry = False
        self._thread: threading.Thread | None = None

    def hand_over(self, committed: Committed) -> None:
        """Let the mirror have what is committed; returns at once."""
        with self._changed:
            self._next, self._hurry = committed, committed.ended
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="everstep-mirror", daemon=True)
            self._thread.start()

    def changing(self) -> AbstractContextManager[object]:
        """No upload begins inside the block, which deletes files and hands over what is left."""
        return self._changed

    @property
    def needed(self) -> frozenset[CheckpointName]:
        """Checkpoints of the upload that runs; during an outage none, or the disk would fill up."""
        with self._changed:
            return self._missing(self._current)

    @property
    def missing(self) -> frozenset[CheckpointName]:
        """Checkpoints that were handed over and are not in the mirror."""
        with self._changed:
            return self._missing(self._current, self._next)

    def _missing(self, *committed: Committed | None) -> frozenset[CheckpointName]:
        paths = [path for each in committed if each is not None for path in each.files]
        held = {} if self._mirror.contents is None else self._mirror.contents.files
        missing = [path for path in paths if path.startswith("checkpoints/") and path not in held]
        return frozenset(CheckpointName.parse(path.split("/")[1]) for path in missing)

    def wait(self, limit: float) -> str:
        """Wait for what was handed over; say what is missing after `limit` seconds, "" for nothing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy(), limit)
            if self.taken is not None or not self._busy():
                return ""
            return self._error or f"the upload takes longer than {limit:g} s"

    def close(self) -> None:
        """End the thread; an upload that runs is given up after the file that it is at."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(GRACE)

    def _busy(self) -> bool:
        alive = self._thread is not None and self._thread.is_alive()
        return alive and not (self._next is None and self._current is None)

    def _work(self) -> None:
        while (committed := self._take()) is not None and self._upload(committed):
            pass

    def _take(self) -> Committed | None:
        """Wait for what is to be uploaded; None when the thread shall end."""
        with self._changed:
            if self._error:  # an outage: the next try comes after a pause, but that of the end at once
                self._changed.wait_for(lambda: self._over or self._hurry, self._pause)
            self._hurry = False
            self._changed.wait_for(lambda: self._next is not None or self._over)
            if self._over:
                return None
            self._current, self._next = self._next, None
            return self._current

    def _upload(self, committed: Committed) -> bool:
        """Upload once; returns whether to go on."""
        failure: Exception | None = None
        try:
            self._tell(self._mirror.upload(committed, lambda: not self._over))
        except RunLockedError as error:
            self._end(error)
            return False
        except Exception as error:  # of any library: the training does not depend on the mirror
            failure = error
        if not self._over:
            self._note(failure)
        with self._changed:
            self._current = None
            if failure is not None and self._next is None:
                self._next = committed
            self._changed.notify_all()
        return True

    def _tell(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._said:
                self._said.add(problem)
                self._warn(problem)

    def _end(self, error: RunLockedError) -> None:
        with self._changed:
            self.taken = error
            self._current = self._next = None
            self._changed.notify_all()
        self._warn(f"{error}; nothing more is uploaded, and the next save is refused")

    def _note(self, error: Exception | None) -> None:
        """Tell the beginning and the end of an outage, each once."""
        name = self._mirror.place.name
        before, self._error = self._error, "" if error is None else self._told(error)
        self._pause = min(2 * self._pause, PAUSES[1]) if before else PAUSES[0]
        if error is not None and not before:
            self._warn(
                f"the mirror {name} cannot be written ({self._error}); the training continues, and what it "
                "commits is uploaded as soon as the mirror can be written again"
            )
        elif error is None and before:
            self._say(f"the mirror {name} can be written again, and has everything that is committed")
