"""Boundaries: between two steps, or after an epoch's tail, due services run and decisions apply."""

from __future__ import annotations

import resource
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from everstep.checkpoint import Phase
from everstep.contracts.services import Interrupt, Moment, Save, Service, SetValue, Stage, Stop
from everstep.errors import UsageError
from everstep.redaction import redacted, without_credentials
from everstep.schedule import NEVER, Instant
from everstep.services.witness import DrillLimit
from everstep.supervisor.board import find_service
from everstep.supervisor.saving.state_tree import StopRecord
from everstep.supervisor.threads.signals import describe, is_interactive
from everstep.supervisor.threads.wakeups import Pending

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine

_LONG_STEP = 10.0
"""Seconds of a step above which none follows the last save of an interrupted start, or is left."""


class Decisions:
    """Applies the actions that services and threads ask for, and the run's own limits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.interruption: Interrupt | None = None
        """Why this start is to be left at the next boundary; None while it is not."""
        self._targets: set[str] = set()
        """Targets of `SetValue` that services have set in this start."""

    def apply(self, actions: Iterable[Pending]) -> None:
        engine = self._engine
        for service, action in actions:
            if isinstance(action, Stop):
                if action.failed:
                    engine.saver.announce_commits(wait=True)  # the writer may find an earlier failure
                    # first: a rollback, if one is allowed, takes the place of this stop
                    error = engine.rollbacks.decide(action.step or engine.progress.step, str(action.reason))
                    if error is not None:
                        raise error
                by = None if service is None else service.name
                self.stop(action.reason, "service", by, failed=action.failed, code=action.code)
                if action.failed:
                    engine.user.tainted = True
            elif isinstance(action, Interrupt):
                self.interruption = self.interruption or action
            elif isinstance(action, Save):
                engine.saver.save_due = True
            elif isinstance(action, SetValue) and service is not None:
                self._set_value(service, action)
            else:
                raise UsageError(f"{action!r} cannot be applied here; give Stop, Interrupt, Save or SetValue")

    def stop(
        self, reason: str, kind: str, by: str | None = None, *, failed: bool = False, code: int = 0
    ) -> None:
        """End the run.  The first reason counts, unless a later one is a failure or has a higher code."""
        engine = self._engine
        # a reason of everstep's own is part of the state, whatever patterns a program has
        clean = redacted if kind in ("service", "request") else without_credentials
        stop, reason = engine.progress.stop, clean(reason)
        if stop is None or (failed, code) > (stop.failed, stop.code):
            engine.progress.stop = StopRecord(reason, kind, by, engine.limits.tree(), failed, code)
            engine.journal.event("stop", {"reason": reason, "kind": kind, "by": by, "step": engine.step})
            engine.saver.save_due = True  # so that a restart ends the same way
            engine.wakeups.wake()

    def check_limits(self, at_epoch_end: bool) -> None:
        engine = self._engine
        step, epoch = engine.limits.max_step, engine.limits.max_epoch
        if step is not None and engine.progress.step >= step:
            self.stop(f"max_step {step} is reached", "max_step")
        if at_epoch_end and epoch is not None and engine.progress.epoch >= epoch:
            self.stop(f"max_epoch {epoch} is reached", "max_epoch")

    def limits_changed(self) -> None:
        """Take back a stop that the old limit decided, if the new limit is not reached."""
        engine = self._engine
        stop = engine.progress.stop
        if stop is not None and stop.kind in ("max_step", "max_epoch"):
            limit = engine.limits.tree()[stop.kind]
            count = engine.progress.step if stop.kind == "max_step" else engine.progress.epoch
            if limit is None or limit > count:
                engine.progress.stop = None

    def notice_signal(self) -> None:
        number = self._engine.ranks.signal
        if number is not None and self.interruption is None:
            self.interruption = Interrupt(describe(number), 128 + number)

    def notice_interruption(self) -> None:
        """Look for an interruption inside a boundary: a signal, a thread's action or the time budget."""
        engine = self._engine
        if engine.ranks.several:
            return  # the other ranks are inside the same evaluation, and know nothing of it
        self.notice_signal()
        interrupts = [action for _, action in engine.wakeups.actions if isinstance(action, Interrupt)]
        interrupts += [late for s in engine.board if (late := s.overtime()) is not None]
        self.interruption = self.interruption or next(iter(interrupts), None)

    def _set_value(self, service: Service, action: SetValue) -> None:
        """Set a value and record it as rows: superseded and compared like other rows when steps run again."""
        engine = self._engine
        for name, value in engine.user.set_value(action):
            engine.collector.outside(
                f"eval/{service.name}", engine.progress.step, name, value, wall=service.schedule.wall
            )
        if action.target not in self._targets:
            self._targets.add(action.target)
            if service.schedule.wall:
                engine.voice.warn(
                    f"service {service.name!r} sets {action.target} by the clock (a schedule in seconds): no "
                    "two runs set it at the same steps, killed or not; give the schedule in steps or epochs"
                )
            for scheduler in engine.user.recomputing(action.target):
                engine.voice.warn(
                    f"service {service.name!r} sets {action.target}, and {scheduler} computes it from the "
                    "step's number, so its next step undoes the value; take one of the two"
                )


class EvaluationInterrupted(BaseException):
    """Raised to stop an evaluation; the resume runs the services that the boundary had still to run."""


class Boundaries:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.unfinished: list[str] = []
        """Names of the services that a boundary left by an interruption has still to run."""
        self.inside = False
        """Whether a boundary is open; still true after an exception has left it."""
        self._may_abandon = False
        """Whether an interruption may end the evaluation that runs now."""
        self.is_saved = False
        """Whether the last state of this start is saved: one step more is for the resume to compare with."""

    def run(
        self,
        moment: Moment,
        batch: Any = None,
        *,
        can_save: bool = True,
        unrun: Collection[str] | None = None,
    ) -> None:
        """Run the due services, by stage, between two steps or after an epoch's tail.

        `unrun`: names of the services that had not run, where an interruption had left this boundary open.
        """
        engine = self._engine
        self.leave_saved()
        self.inside = True
        engine.spent.begin_boundary()
        # first: what wakes the loop from here on asks for another boundary
        engine.wakeups.begin_boundary()
        engine.wakeups.require_no_error()
        # before anything is decided: all ranks decide from the same facts
        if engine.ranks.several:
            self._exchange_facts(moment)
        # before rows are read: none reaches the journal before the checkpoint of step 0 is committed
        engine.saver.await_first()
        if engine.ranks.saves_are_done:
            engine.saver.announce_commits()
        read_began = engine.clock()
        engine.collector.read()
        engine.spent.in_steps(engine.clock() - read_began)  # reading waits for the device
        # after reading, before services: a divergence ends the run before anything acts on its numbers
        engine.verifier.boundary(engine.progress.step)
        at_epoch_end = moment is Moment.AFTER_EPOCH
        engine.estimator.update(engine.progress.step)
        # before services run: each sees the stop in its view of the boundary
        engine.decisions.check_limits(at_epoch_end)
        engine.decisions.notice_signal()
        when = Instant(engine.progress.step, engine.progress.epoch, at_epoch_end, engine.ranks.now())
        on_schedule = engine.board.due(moment, when)
        if unrun is None:
            due = [s for s in on_schedule if can_save or s.stage is not Stage.SAVE]
        else:
            due = [s for s in engine.board if s.name in unrun]
            engine.saver.save_due = True  # to replace the checkpoint that was left open
        payload = None if at_epoch_end else batch
        engine.decisions.apply(self._run_deciding(due, moment, payload, can_save))
        if (stop := engine.progress.stop) is not None and not stop.failed:
            # a service has ended the run: what evaluates the end is due now
            late = [s for s in engine.board.due(moment, when) if s.stage is Stage.EVALUATE]
            late = [s for s in late if s not in on_schedule]
            remaining = [*late, *(s for s in due if s.stage > Stage.DECIDE)]
            engine.decisions.apply(self._run_deciding(remaining, moment, payload, can_save))
            due += late
        for pending in engine.ranks.take_pending():  # including those that come meanwhile
            engine.decisions.apply([pending])
        engine.decisions.notice_signal()
        # a new view: reports and saves see what was decided
        view = engine.board.view(moment, payload)
        # an evaluation at this boundary may have measured a best value, of which these are the weights
        acting = [*due, *(s for s in engine.board.measured(engine.progress.step) if s not in due)]
        engine.board.run([s for s in acting if s.stage is Stage.REPORT], view)
        if can_save:
            # saves come last: the checkpoint has what the reports did (windows cleared, exports listed)
            engine.program_checks.check_strangers()
            if at_epoch_end:
                if engine.progress.epoch == 1:
                    engine.program_checks.check_updates()
                engine.loop.check_epoch()
            saving = [s for s in acting if s.stage is Stage.SAVE]
            saves = engine.board.merged(engine.board.run(saving, view), saving)
            self._save_due(saves, "epoch" if at_epoch_end else "step")
        engine.board.fired(due, when)
        self._plan()
        engine.spent.end_boundary()
        if engine.decisions.interruption is not None and can_save:
            is_followed = not at_epoch_end and self._may_repeat_a_step()
            engine.announce_leaving(is_followed=is_followed)
            # only now: the save may have been refused
            self.is_saved = engine.verifier.digests_update = is_followed
            if not is_followed:
                engine.leave()
            engine.wakeups.wake()
            engine.signals.limit(_LONG_STEP, engine.leave)  # its data may have ended with the same signal
        engine.watched.check_evaluated(engine.recording.last_values.keys())
        self.inside = False

    def _may_repeat_a_step(self) -> bool:
        """Whether one step more is to follow the last save, and to be lost: for a resume to compare with.

        Not for a person who goes on in this process, and not where it takes long.  An epoch's last step runs
        again anyway, as the saver keeps the state before it.
        """
        engine = self._engine
        if engine.progress.stop is not None or is_interactive() or not engine.loop.reads_on():
            return False
        if find_service(DrillLimit, engine.board) is not None:  # its runs have a number of steps
            return False
        rate = engine.estimator.rate()
        # ranks have clocks of their own, and must decide alike
        return bool(
            engine.ranks.group.share(rate is None or rate * _LONG_STEP > 1, "the step after the save")
        )

    def leave_saved(self) -> None:
        """Leave, if the last state of this start is saved; what its last step has found is recorded."""
        if self.is_saved:
            self._engine.collector.read()
            self._engine.leave()

    def _exchange_facts(self, moment: Moment) -> None:
        """Tell all ranks what this rank knows alone, and require that their programs asked for the same."""
        engine, current, stop = self._engine, self._engine.progress, self._engine.progress.stop
        requests = {
            "stop": None if stop is None else [stop.kind, stop.by, stop.failed, stop.code],
            "save": engine.saver.save_due,
            "services": len(list(engine.board)),
            **engine.limits.tree(),
        }
        where, times = f"step {current.step}", None
        if moment is Moment.AFTER_EPOCH:
            # this rank's seconds by part since its start, and its largest memory so far in bytes
            where, kilobytes = f"epoch {current.epoch}", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            times = {**engine.spent.parts(engine.loop.data_wait()), "peak_memory": kilobytes * 1024.0}
        engine.ranks.exchange_facts(
            f"the boundary after {where}",
            saving=engine.saver.job is not None,
            reason=None if stop is None else stop.reason,
            requests=requests,
            batches=engine.verifier.batches_digest,
            times=times,
        )
        if engine.ranks.times:
            facts = {"epoch": current.epoch, "step": current.step, "ranks": engine.ranks.times}
            engine.journal.event("rank times", facts, wall=True)
        if stop is not None:
            # a program may name its rank's own loss: the state has one reason
            current.stop = replace(stop, reason=engine.ranks.writers_reason or stop.reason)

    def _run_deciding(
        self, due: list[Service], moment: Moment, payload: Any, can_save: bool
    ) -> list[Pending]:
        """Run services up to stage DECIDE; an interruption may leave an evaluation among them."""
        engine = self._engine
        view = engine.board.view(moment, payload)
        actions: list[Pending] = []
        for service in [s for s in due if s.stage <= Stage.DECIDE]:
            self._may_abandon = can_save and not actions  # actions asked for so far must be applied
            try:
                actions += engine.board.run([service], view)
            except EvaluationInterrupted:
                self._leave_open(moment, due[due.index(service) :])
            finally:
                self._may_abandon = False
        return engine.board.merged(actions, [s for s in due if s.stage <= Stage.DECIDE and s.controller])

    def _save_due(self, actions: list[Pending], phase: Phase) -> None:
        """Save where asked; keep the state that a resume from the epoch's tail will need."""
        engine = self._engine
        interruption, stop = engine.decisions.interruption, engine.progress.stop
        if engine.saver.save_due or interruption is not None or stop is not None:
            actions.append((None, Save()))
        engine.saver.save(actions, phase)
        # an interrupted tail commits this copy: the last step runs again, and assigns what the tail uses
        if phase == "epoch" or engine.loop.remaining_steps() == 1:
            engine.saver.keep(phase)

    def _plan(self) -> None:
        engine = self._engine
        step, limit = engine.progress.step, engine.limits.max_step
        last = NEVER if limit is None else max(limit, step + 1)
        remaining_steps = engine.loop.remaining_steps()
        before_last = NEVER if remaining_steps is None or remaining_steps < 2 else step + remaining_steps - 1
        due_step = min(engine.board.next_step(step), last, before_last, engine.verifier.next_due(step))
        engine.wakeups.plan(step, due_step, engine.board.next_time())

    def announce_epoch(self) -> None:
        """Announce that an epoch begins; before step 1 an interruption may leave an evaluation here."""
        engine = self._engine
        engine.spent.begin_boundary()
        self._may_abandon = not engine.progress.step  # a resume has the checkpoint of step 0
        try:
            engine.board.fire(Moment.BEFORE_EPOCH)
        except EvaluationInterrupted:
            engine.announce_leaving()
            engine.leave()
        finally:
            self._may_abandon = False
        engine.spent.end_boundary()

    def poll_evaluation(self) -> None:
        """Look for an interruption between two batches of a service's evaluation."""
        engine = self._engine
        engine.polls += 1
        if not self._may_abandon:
            return
        engine.decisions.notice_interruption()
        if engine.decisions.interruption is not None:
            raise EvaluationInterrupted

    def _leave_open(self, moment: Moment, services: list[Service]) -> None:
        """Save a boundary whose evaluation is left, with the names of the services still to run."""
        engine = self._engine
        self.unfinished = [service.name for service in services]
        engine.saver.save([(None, Save())], "epoch" if moment is Moment.AFTER_EPOCH else "step")
        engine.announce_leaving()
        engine.leave()
