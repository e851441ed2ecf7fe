"""Background thread for one job at a time; unexpected errors reach the caller's thread."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from everstep.errors import UsageError

T = TypeVar("T")
_Failed = Callable[[OSError | MemoryError], None]

_BUGS = {errno.EBADF, errno.EFAULT, errno.EINVAL}


def disk_failed(error: BaseException) -> bool:
    """Whether an error of a save comes from the disk or lack of memory, and not from a bug in everstep."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _BUGS


class WriterThread:
    """Runs jobs in the background, one at a time, each in a thread of its own.

    A job that a disk error or lack of memory ends is a *failed save*: the error goes to the job's `failed`,
    and training continues.  The next `poll`, `wait`, `submit` or `close` raises any other error in the
    caller's thread, with its traceback.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._count = 0
        """Number of jobs so far."""

    def submit(self, job: Callable[[], T], done: Callable[[T], None], failed: _Failed | None = None) -> None:
        """Run `job` after the running one; its thread calls `done` with the result, or `failed`."""
        if self._closed:
            raise UsageError("the writer is closed: submit before close()")
        self.wait()
        self._count += 1
        calls = (job, done, failed or self._say_failed)
        thread = threading.Thread(target=self._run, args=calls, name="everstep-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            calls[2](MemoryError(str(error)))
        else:
            self._thread = thread

    def wait_idle(self) -> None:
        """Wait until no job runs; an unexpected error stays for `poll`."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until no job runs, then `poll`."""
        self.wait_idle()
        self.poll()

    def poll(self) -> None:
        """Raise the unexpected error of a job once, if there is one; waits for nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def job(self) -> int | None:
        """Number of the job that is running, from 1; None while none is."""
        return self._count if self._thread is not None and self._thread.is_alive() else None

    def close(self) -> None:
        """Let the running job end, then `poll`; may be called twice."""
        self._closed = True
        self.wait()

    def _run(self, job: Callable[[], Any], done: Callable[[Any], None], failed: _Failed) -> None:
        try:
            try:
                result = job()
            except (OSError, MemoryError) as error:
                if not disk_failed(error):
                    raise
                failed(error)
            else:  # outside the try: an error of `done` is a bug, not a failed save
                done(result)
        except BaseException as error:  # carried to the caller's thread
            self._error = error

    def _say_failed(self, error: OSError | MemoryError) -> None:
        self._say(f"a save failed, training continues ({type(error).__name__}: {error})")
