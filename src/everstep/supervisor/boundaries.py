"""The boundary: between two steps, or after an epoch's tail, what is due runs by stage."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from everstep.checkpoint import Phase
from everstep.contracts.services import Action, Moment, Save, Service, Stage
from everstep.schedule import NEVER, Instant
from everstep.services.best import Best

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine


class Abandoned(BaseException):
    """An evaluation is left for an interruption; its boundary stays open, and the resume runs the rest."""


class Boundaries:
    """Walks each boundary of a run.

    Attributes:
        left_open: names of the services that a boundary left by an interruption has still to run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.left_open: list[str] = []
        self._may_abandon = False
        """Whether an evaluation runs that an interruption may end."""

    def walk(
        self,
        moment: Moment,
        batch: Any = None,
        *,
        can_save: bool = True,
        rest: Collection[str] | None = None,
    ) -> None:
        """Between two steps, or after an epoch's tail: what is due runs, by stage.

        Args:
            batch: what the step before it read.
            can_save: as in `complete_step`.
            rest: of a boundary that an interruption had left open, the services that had not run.
        """
        engine = self._engine
        engine.spent.begin_boundary()
        engine.wakeups.begin_boundary()
        engine.wakeups.require_no_error()
        engine.saves.await_first()
        engine.trials.try_streams()
        engine.settle()
        asked = engine.clock()
        engine.collector.read()
        engine.spent.in_steps(engine.clock() - asked)  # until the device is done with them
        engine.verifier.boundary(engine.progress.step)
        at_epoch_end = moment is Moment.AFTER_EPOCH
        engine.estimator.update(engine.progress.step)
        engine.decisions.check_limits(at_epoch_end)
        engine.decisions.notice_signal()
        when = Instant(engine.progress.step, engine.progress.epoch, at_epoch_end, engine.clock())
        if rest is None:
            due = [s for s in engine.board.due(moment, when) if can_save or s.stage is not Stage.SAVE]
        else:
            due = [s for s in engine.board if s.name in rest]
            engine.saves.ask()  # the checkpoint that is open is replaced
        payload = None if at_epoch_end else batch
        engine.decisions.apply(self._run_deciding(due, moment, payload, can_save))
        engine.decisions.apply_pending()
        engine.decisions.notice_signal()
        view = engine.announcer.view(moment, payload)
        self._mark_best()
        engine.board.run([s for s in due if s.stage is Stage.REPORT], view)
        if can_save:
            self._check_program(at_epoch_end)
            saves = engine.board.run([s for s in due if s.stage is Stage.SAVE], view)
            self._save_due(saves, "epoch" if at_epoch_end else "step")
        engine.board.fired(due, when)
        self._plan()
        engine.spent.end_boundary()
        if engine.decisions.interruption is not None and can_save:
            engine.leave()
        engine.watched.check_evaluated(engine.recording.last_values.keys())

    def _run_deciding(
        self, due: list[Service], moment: Moment, payload: Any, can_save: bool
    ) -> list[tuple[Service | None, Action]]:
        """Run what comes before the reports; an interruption may leave an evaluation among it."""
        engine = self._engine
        view = engine.announcer.view(moment, payload)
        actions: list[tuple[Service | None, Action]] = []
        for service in [s for s in due if s.stage <= Stage.DECIDE]:
            self._may_abandon = can_save and not actions  # what was asked for is applied first
            try:
                actions += engine.board.run([service], view)
            except Abandoned:
                self._leave_open(moment, due[due.index(service) :])
            finally:
                self._may_abandon = False
        return actions

    def _check_program(self, at_epoch_end: bool) -> None:
        engine = self._engine
        engine.oversights.check_strangers()
        if at_epoch_end:
            if engine.progress.epoch == 1:
                engine.oversights.check_updates()
            engine.loop.check_epoch()

    def _save_due(self, actions: list[tuple[Service | None, Action]], phase: Phase) -> None:
        """Save what is asked for; keep the state that a resume from the epoch's tail will need."""
        engine = self._engine
        interruption, stop = engine.decisions.interruption, engine.progress.stop
        if engine.saves.asked or interruption is not None or stop is not None:
            actions.append((None, Save()))
        engine.save(actions, phase)
        if phase == "epoch" or engine.loop.steps_left() == 1:
            engine.saves.keep(phase)
        engine.saves.reserve()

    def _mark_best(self) -> None:
        """Let the live line show which value is the best so far."""
        engine = self._engine
        if (console := engine.voice.console) is not None:
            for best in engine.board.all(Best):
                if best.value is not None:
                    console.mark_best(best.metric, best.value)

    def _plan(self) -> None:
        """Find out after which step, or when, the next boundary is due."""
        engine = self._engine
        step, limit = engine.progress.step, engine.limits.max_step
        last = NEVER if limit is None else max(limit, step + 1)
        left = engine.loop.steps_left()
        before_last = NEVER if left is None or left < 2 else step + left - 1
        due_step = min(engine.board.next_step(step), last, before_last, engine.verifier.next_due(step))
        engine.wakeups.plan(step, due_step, engine.board.next_time())

    # ---------------------------------------------------------------------------- interruptions

    def announce_epoch(self) -> None:
        """Tell that an epoch begins.  Before the first step an interruption may leave what this evaluates."""
        engine = self._engine
        engine.spent.begin_boundary()
        self._may_abandon = not engine.progress.step  # the checkpoint of step 0 is what to resume from
        try:
            engine.announcer.fire(Moment.BEFORE_EPOCH)
        except Abandoned:
            engine.leave()
        finally:
            self._may_abandon = False
        engine.spent.end_boundary()

    def poll_evaluation(self) -> None:
        """Between two batches of an evaluation by a service.

        Raises:
            Abandoned: a signal has come, or the time is used up.
        """
        engine = self._engine
        if not self._may_abandon:
            return
        engine.decisions.notice_interruption()
        if engine.decisions.interruption is not None:
            raise Abandoned

    def _leave_open(self, moment: Moment, rest: list[Service]) -> None:
        """Save the state of a boundary whose evaluation is left, and which services it has still to run."""
        engine = self._engine
        self.left_open = [service.name for service in rest]
        engine.save([(None, Save())], "epoch" if moment is Moment.AFTER_EPOCH else "step")
        engine.leave()
