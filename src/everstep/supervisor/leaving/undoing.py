"""Failed steps undone: the decision to go back, or to try again, and the new start after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from everstep import hazard
from everstep.durable import remedy
from everstep.errors import BadStepError, CheckpointError, RolledBack, TriedAgain
from everstep.polling import SHORT_PAUSE, wait_until
from everstep.record import Batch, Rollback, shared_samples
from everstep.services.recovery import Recovery, Retry
from everstep.supervisor.opening.open_run import OpenRun
from everstep.supervisor.streams.all_streams import Streams

T = TypeVar("T")


class Rollbacks:
    """Rollbacks of a run; `decided` has those of all starts, this one included."""

    def __init__(self, opening: OpenRun, streams: Streams) -> None:
        self.decided = list(opening.rollbacks)
        self._recovery, self._store, self._streams = opening.settings.recovery, opening.store, streams
        self._journal, self._voice, self._group = opening.journal, opening.voice, opening.group
        self._refused = ""
        """Reason why the last failure was not undone; empty if there was none."""

    def decide(self, step: int, reason: str) -> RolledBack | None:
        """Decide, durably, to go back from a failed step; None if the failure is final."""
        if self._recovery is None:
            return None
        reason = reason.partition("; ")[0]  # what follows are remedies
        used = self._recovery.used(self.decided, step)
        rollback = self._make_rollback(self._recovery, used, step, reason) if self._group.writer else ""
        shared = self._group.share(rollback if isinstance(rollback, str) else rollback.stored(), "a rollback")
        if not self._group.writer:
            rollback = shared if isinstance(shared, str) else Rollback.among([tuple(shared)])[0]
        if isinstance(rollback, str):
            quarantined = ", ".join(str(batch) for each in self.decided for batch in each.batches)
            so_far = f"; quarantined are {quarantined}" if quarantined else ""
            self._refused = f"step {step} is not undone: {rollback}{so_far}"
            self._voice.say(self._refused)
            return None
        self.decided.append(rollback)
        quarantined = ", ".join(map(str, rollback.batches))
        text = (
            f"rollback {used + 1} of {self._recovery.max_rollbacks}: {reason}. "
            f"Quarantined: {quarantined}; the run continues from {rollback.checkpoint}"
        )
        self._voice.say(text)
        return RolledBack(text, str(self._store.run_dir), rollback.number)

    def undo(self, errors: Sequence[BaseException], step: int) -> RolledBack | None:
        """Return the rollback decided for a loop that failed, or a new one from the first bad step."""
        for error in errors:
            if isinstance(error, RolledBack):
                return error
        bad_steps = [(step if e.step is None else e.step, e) for e in errors if isinstance(e, BadStepError)]
        at, bad_step_error = min(bad_steps, key=lambda each: each[0])
        rollback = self.decide(at, str(bad_step_error))
        if rollback is None and self._refused:  # on the error that ended the loop
            errors[0].add_note(self._refused)
        return rollback

    def _make_rollback(self, recovery: Recovery, used: int, step: int, reason: str) -> Rollback | str:
        """Decide and record a rollback; return it, or the reason why there is none."""
        if used >= recovery.max_rollbacks:
            return self._used_up(recovery, used)
        blamed = recovery.blamed(self.decided, step)
        if why := self._streams.no_way_back():
            return why
        if not blamed:
            return "it read no batch from a stream of this run"
        try:
            # before the choice: the next start must not find what this start has not continued from
            self._store.apply_choice()
        except (OSError, CheckpointError) as error:
            return f"the checkpoints that this start left could not be set aside ({error}); {remedy(error)}"
        checkpoints = [facts.name for facts in self._store.facts() if facts.name.step < blamed[-1].step]
        if not checkpoints:
            return "no checkpoint from before that step is left; keep more with Checkpoints(keep_last=...)"
        # the oldest checkpoint that is left bounds how far the run can go back
        blamed = [batch for batch in blamed if batch.step > checkpoints[0].step]
        first_step = blamed[0].step
        target = [name for name in checkpoints if name.step < first_step][-1]
        places = [(batch.stream, batch.pass_index, batch.batch_index) for batch in blamed]
        batches = tuple(Batch(*place, self._streams.sample_ids(*place)) for place in places)
        number = max((each.number for each in self.decided), default=0) + 1
        rollback = Rollback(number, step, reason, first_step, str(target), batches, self._journal.segment)
        try:
            hazard.reach("loop.rollback")
            # durable before the loop is left: a kill from here on leads to the same resume
            self._journal.decide(rollback.data())
        except OSError as error:
            return (
                f"the decision could not be written to the journal ({error}); {remedy(error)} and start again"
            )
        hazard.reach("loop.rolled_back")
        return rollback

    def _used_up(self, recovery: Recovery, used: int) -> str:
        tries, anew = recovery.max_rollbacks, recovery.reset_after
        message = (
            f"all {tries} rollbacks are used up; for more, raise max_rollbacks={tries} of Recovery, or "
            f"{'give reset_after=' if anew is None else f'lower reset_after={anew}'}"
        )
        if shared := shared_samples(self.decided[-used:]):
            samples = ", ".join(f"{sample} of stream {stream!r}" for stream, sample in shared[:8])
            message += f"; each of them quarantined sample {samples}: look at that sample first"
        return message


_tries: dict[str, tuple[int, int]] = {}
"""The furthest step that failed in this process's tries in a row, and their number, by run directory."""


class Retries:
    """The tries of a run after listed errors; `ends` tells whether a signal ends the run."""

    def __init__(self, opening: OpenRun, streams: Streams, ends: Callable[[], bool]) -> None:
        self._retry, self._run_dir = opening.settings.retry, str(opening.run_dir.path)
        self._streams, self._ends = streams, ends
        self._journal, self._voice = opening.journal, opening.voice

    def prepare_retry(self, error: BaseException, step: int) -> TriedAgain | None:
        """Decide to try again from the newest checkpoint, and wait; None if the error is final."""
        retry = self._retry
        if retry is None or not retry.takes(error):
            return None
        furthest, count = _tries.get(self._run_dir, (-1, 0))
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
        _tries[self._run_dir] = furthest, count + 1
        text = self._decide(retry, error, f"step {step}", count + 1)
        hazard.reach("loop.retry")
        wait_until(self._ends, retry.seconds(count + 1), SHORT_PAUSE)
        return TriedAgain(text, self._run_dir, count + 1)

    def forget(self) -> None:
        """Forget the tries of a run that has ended, or given up."""
        _tries.pop(self._run_dir, None)

    def retry_in_place(self, what: str, action: Callable[[], T]) -> T:
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
                wait_until(self._ends, retry.seconds(attempt), SHORT_PAUSE)

    def _decide(self, retry: Retry, error: BaseException, what: str, attempt: int) -> str:
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


def recovering(main: Callable[[], T]) -> T:
    """Call `main`, and again after each rollback or retry of a run in it; return its result in the end.

    A program with `Recovery`, or `services.Retry`, resumes in the same process by this:

        everstep.recovering(main)

    Args:
        main: makes its objects anew at each call (model, optimizer, data, the loop), as a new process would.

    Raises:
        RolledBack: the run began from nothing instead of going back (`resume=False`).
    """
    last_numbers: dict[str, int] = {}
    while True:
        try:
            return main()
        except RolledBack as rollback:
            if isinstance(rollback, TriedAgain):
                continue  # Retry counts its own tries
            run = str(Path(rollback.run_dir).resolve())
            if rollback.number <= last_numbers.get(run, 0):
                rollback.add_note("the run started over instead of continuing; leave out resume=False")
                raise
            last_numbers[run] = rollback.number
