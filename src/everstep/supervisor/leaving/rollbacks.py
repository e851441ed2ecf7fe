"""Rollbacks: the decision to go back from a failed step, and the new start after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from everstep import hazard
from everstep.checkpoint import Store
from everstep.contracts.group import Group
from everstep.durable import remedy
from everstep.errors import BadStepError, CheckpointError, RolledBack, TriedAgain
from everstep.record import Batch, Journal, Rollback, shared_samples
from everstep.services.recovery import Drawn, Recovery
from everstep.supervisor.streams.run_streams import Streams
from everstep.supervisor.voice import Voice

T = TypeVar("T")


class Rollbacks:
    """Rollbacks of a run: the decided ones, and the next.

    Attributes:
        decided: rollbacks of all starts, this one included.
    """

    def __init__(
        self,
        decided: Sequence[Rollback],
        recovery: Recovery | None,
        store: Store,
        streams: Streams,
        journal: Journal,
        voice: Voice,
        group: Group,
    ) -> None:
        self.decided = list(decided)
        self._group = group
        self._recovery, self._store, self._streams = recovery, store, streams
        self._journal, self._voice = journal, voice
        self._refused = ""
        """Reason why the last failure was not undone; empty if there was none."""

    def decide(self, step: int, reason: str) -> RolledBack | None:
        """Decide, durably, to go back from a failed step; None if the failure is final."""
        if self._recovery is None:
            return None
        reason = reason.partition("; ")[0]  # what follows are remedies
        used = self._recovery.used(self.decided, step)
        rollback = self._shared(self._new(self._recovery, used, step, reason) if self._group.writer else "")
        if isinstance(rollback, str):
            self._refused = f"step {step} is not undone: {rollback}{self._so_far()}"
            self._voice.say(self._refused)
            return None
        self.decided.append(rollback)
        text = (
            f"rollback {used + 1} of {self._recovery.max_rollbacks}: {reason}. "
            f"Quarantined: {_listed(rollback.batches)}; the run continues from {rollback.checkpoint}"
        )
        self._voice.say(text)
        return RolledBack(text, str(self._store.run_dir), rollback.number)

    def undo(self, errors: Sequence[BaseException], step: int) -> RolledBack | None:
        """Return the rollback for a loop that failed: the decided one, or a new one from the first bad step.

        Args:
            errors: the error that ended the loop comes first, and gets a note if the failure is final.
            step: the step that was running, or the last one.
        """
        for error in errors:
            if isinstance(error, RolledBack):
                return error
        bad = [(step if e.step is None else e.step, e) for e in errors if isinstance(e, BadStepError)]
        at, first = min(bad, key=lambda each: each[0])
        rolled = self.decide(at, str(first))
        if rolled is None and self._refused:
            errors[0].add_note(self._refused)
        return rolled

    def _shared(self, mine: Rollback | str) -> Rollback | str:
        """Return the writer's decision, or its reason why there is none; every rank calls this."""
        if self._group.size == 1:
            return mine
        shared = self._group.share(mine if isinstance(mine, str) else mine.stored(), "a rollback")
        if self._group.writer or isinstance(shared, str):
            return mine if self._group.writer else shared
        return Rollback.among([tuple(shared)])[0]

    def _new(self, recovery: Recovery, used: int, step: int, reason: str) -> Rollback | str:
        """Decide and record a rollback; return it, or the reason why there is none."""
        rollback = self._rollback(recovery, used, step, reason)
        if isinstance(rollback, str):
            return rollback
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

    def _rollback(self, recovery: Recovery, used: int, step: int, reason: str) -> Rollback | str:
        """Return the rollback to decide, or the reason why there is none."""
        if used >= recovery.max_rollbacks:
            return self._used_up(recovery, used)
        blamed = recovery.blamed(self.decided, step)
        if why := self._streams.no_way_back():
            return why
        if not blamed:
            return "it read no batch from a stream of this run"
        try:
            # before the choice: the next start must not find what this start has not continued from
            self._store.settle()
        except (OSError, CheckpointError) as error:
            return f"the checkpoints that this start left could not be set aside ({error})"
        checkpoints = [facts.name for facts in self._store.facts() if facts.name.step < blamed[-1].step]
        if not checkpoints:
            return "no checkpoint from before that step is left; keep more with Checkpoints(keep_last=...)"
        # the oldest checkpoint that is left bounds how far the run can go back
        blamed = [drawn for drawn in blamed if drawn.step > checkpoints[0].step]
        first = blamed[0].step
        target = [name for name in checkpoints if name.step < first][-1]
        batches = tuple(self._batch(drawn) for drawn in blamed)
        number = max((each.number for each in self.decided), default=0) + 1
        return Rollback(number, step, reason, first, str(target), batches, self._journal.segment)

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

    def _batch(self, drawn: Drawn) -> Batch:
        place = drawn.stream, drawn.pass_index, drawn.batch_index
        return Batch(*place, self._streams.sample_ids(*place))

    def _so_far(self) -> str:
        batches = [batch for rollback in self.decided for batch in rollback.batches]
        return f"; quarantined are {_listed(batches)}" if batches else ""


def _listed(batches: Sequence[Batch]) -> str:
    return ", ".join(map(str, batches))


def recovering(main: Callable[[], T]) -> T:
    """Call `main`, and again after each rollback or retry of a run in it; return its result in the end.

    A program with `Recovery`, or `services.Retry`, resumes in the same process by this:

        everstep.recovering(main)

    Args:
        main: makes its objects anew at each call (model, optimizer, data, the loop), as a new process would.

    Raises:
        RolledBack: the run began from nothing instead of going back (`resume=False`).
    """
    last: dict[str, int] = {}
    while True:
        try:
            return main()
        except RolledBack as rolled:
            if isinstance(rolled, TriedAgain):
                continue  # Retry counts its own tries
            run = str(Path(rolled.run_dir).resolve())
            if rolled.number <= last.get(run, 0):
                rolled.add_note("the run started over instead of continuing; leave out resume=False")
                raise
            last[run] = rolled.number
