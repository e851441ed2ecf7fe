"""Retries: another try after a listed error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from everstep import hazard
from everstep.errors import TriedAgain
from everstep.record import Journal
from everstep.services.recovery import Retry
from everstep.supervisor.streams.run_streams import Streams
from everstep.supervisor.voice import Voice

T = TypeVar("T")
_POLL = 0.02
"""Seconds between two looks for a signal."""


class _Tries(NamedTuple):
    furthest: int
    in_a_row: int


_tries: dict[str, _Tries] = {}
"""Tries in a row of this process, and the furthest step that failed in them, by run directory."""


class Retries:
    """The tries of a run."""

    def __init__(
        self,
        retry: Retry | None,
        run_dir: str,
        streams: Streams,
        journal: Journal,
        ends: Callable[[], bool],
        voice: Voice,
    ) -> None:
        self._retry, self._run_dir, self._streams, self._journal = retry, run_dir, streams, journal
        self._ends, self._voice = ends, voice

    def again(self, error: BaseException, step: int) -> TriedAgain | None:
        """Decide to try again from the newest checkpoint, and wait; None if the error is final."""
        retry = self._retry
        if retry is None or not retry.takes(error):
            return None
        furthest, count = _tries.get(self._run_dir, _Tries(-1, 0))
        # a later step than ever before is progress: the tries count anew
        if step > furthest:
            furthest, count = step, 0
        if count >= retry.times:
            self.forget()
            error.add_note(f"tried again {count} times (Retry(times={retry.times})), and it failed each time")
            return None
        if why := self._streams.no_way_back():
            error.add_note(f"not tried again: {why}")
            return None
        _tries[self._run_dir] = _Tries(furthest, count + 1)
        text = self._decide(retry, error, f"step {step}", count + 1)
        hazard.reach("loop.retry")
        self._wait(retry.seconds(count + 1))
        return TriedAgain(text, self._run_dir, count + 1)

    def forget(self) -> None:
        """Forget the tries of a run that has ended, or given up."""
        _tries.pop(self._run_dir, None)

    def in_place(self, what: str, action: Callable[[], T]) -> T:
        """Call `action`, which leaves nothing behind where it fails, again after each listed error."""
        attempt = 0
        while True:
            try:
                return action()
            except Exception as error:
                attempt += 1
                retry = self._retry
                if retry is None or not retry.takes(error):
                    raise
                if attempt > retry.times:
                    error.add_note(f"tried again {retry.times} times (Retry(times={retry.times}))")
                    raise
                self._decide(retry, error, what, attempt)
                self._wait(retry.seconds(attempt))

    def _decide(self, retry: Retry, error: BaseException, what: str, attempt: int) -> str:
        """Record a try, and say it."""
        seconds = retry.seconds(attempt)
        message = f"{type(error).__name__}: {error}"
        text = f"{what} failed ({message}): try {attempt} of {retry.times}, in {seconds:g} s"
        self._voice.warn(text)
        data = {"what": "retry", "of": what, "error": message, "try": attempt, "times": retry.times}
        try:
            self._journal.decide({**data, "seconds": seconds})
        except OSError as refused:
            self._voice.warn(f"this retry is not recorded: {refused}")
        return text

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._ends() and (left := until - time.monotonic()) > 0:
            time.sleep(min(_POLL, left))
