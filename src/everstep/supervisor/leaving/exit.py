"""Leaving the loop: the last state is committed, everything is closed, and the ending is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep import hazard
from everstep.checkpoint import Store, read_checkpoint
from everstep.contracts.services import Interrupt, Moment, Save, Service
from everstep.durable import remedy
from everstep.errors import (
    BadStepError,
    CheckpointError,
    DamagedCheckpointError,
    DivergenceError,
    GuardStop,
    Interrupted,
    NoCheckpointError,
    RestoreError,
    RolledBack,
)
from everstep.services.best import Best, Place
from everstep.services.console import Voice
from everstep.supervisor.saving.state_tree import StopRecord, reading, saved_tree
from everstep.supervisor.saving.user_state import UserState
from everstep.supervisor.threads.signals import describe, exit_error

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine


@dataclass(frozen=True)
class BestRecord:
    """The best value of a metric so far.

    Attributes:
        metric, value: the metric's name and its best value.
        step, epoch: step and epoch in which the value was collected.
        path: the folder with the weights of that value, a string; None where they were not kept.
    """

    metric: str
    value: float
    step: int
    epoch: int
    path: str | None


@dataclass(frozen=True)
class Ending:
    """Result of a `with` block.

    Attributes:
        reason: why the start ended, in words.
        step, epoch: last completed step and epoch.
        finished: True if the run is complete: starting it again runs no step.
        best: the best record of the watched metric, None if there is none.
        where: paths by name: "run", "checkpoints", "journal", "log", "best".
        digest: digest of every leaf of the last committed state outside `wall/`; equal digests are equal
            runs.  None if nothing was committed.
        resumed_from: name of the checkpoint that this start continued from, None for a fresh start.
        segment: the number of this start, from 1.
        failed_saves: number of saves that failed in this start.
        warnings: the warnings of this start, in order.
        rollbacks: number of rollbacks in all starts of the run (`Recovery`).
        one_fingerprint: whether every step of the run was computed on the same kind of machine, by the same
            libraries, number and layout of ranks, and under the same settings: else weights and `digest` need
            not be those of a run that was never stopped.  Numbers of ranks count as the same where steps have
            the same bits on each (`everstep.torch.VirtualShards`, and no `PerRank` entry): the weights are
            then those of a run that was never stopped; the digest covers each rank's random state, too.
        diverged: the first step of the run that had other results when a resume executed it again, and that
            nobody has accepted (`everstep accept`); None if there is none.
    """

    reason: str
    step: int
    epoch: int
    finished: bool
    best: BestRecord | None
    where: dict[str, str]
    digest: str | None
    resumed_from: str | None
    segment: int
    failed_saves: int = 0
    warnings: tuple[str, ...] = field(default=())
    rollbacks: int = 0
    one_fingerprint: bool = True
    diverged: int | None = None

    def __str__(self) -> str:
        state = "finished" if self.finished else "resumable"
        diverged = "" if self.diverged is None else f", diverged at step {self.diverged}"
        return f"{self.reason} (step {self.step}, {state}{diverged})"


class Exit:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._at_end = True
        """Whether the program reached the loop's own end."""
        self._fails_alone = False
        """Whether this rank leaves by an error that the other ranks do not have."""

    def leave(self, error: BaseException | None) -> bool:
        """Close everything, whatever fails; return True if `error` is the loop's end and not an error."""
        engine = self._engine
        engine.signals.end_limit()  # first: nothing that closes may be left half-way
        stop = engine.progress.stop
        ended = isinstance(error, StopIteration) and stop is not None and stop.kind == "stream"
        if ended:
            error = None  # next(batches) after the last pass: as clean an end as should_stop()
        hazard.reach("loop.exit")
        step, body_error = engine.step, error
        if isinstance(error, NameError) and engine.recovered.mid_epoch and step == engine.recovered.step:
            error.add_note(
                f"this start has resumed behind step {step}, the last of its epoch, so no step has assigned "
                "the variables that the lines after the steps read: set them before the loop (loss = None); "
                "data with a __len__ (a stream with remaining()) lets the last step run again"
            )
        self._fails_alone = body_error is not None and not self._on_all_ranks(body_error, step)
        if body_error is not None and self._fails_alone:
            engine.reporter.leaving.set()
            engine.reporter.report(body_error)  # first: the other ranks wait in their collectives
        is_clean = error is None and not engine.boundaries.is_saved
        failures = _attempt(self._finish if is_clean else self._abandon)
        # before the resources close: a decision to go back is written to the journal
        error = self._go_back([*([] if body_error is None else [body_error]), *failures], step) or body_error
        error = self._after_save(error)
        cause = error or (failures[0] if failures else None)
        # each is tried whatever failed before; the ending comes first, because EXIT_LOOP shows it
        failures += _attempt(lambda: self._conclude(cause))
        # where no save came later that would have been refused
        failures += _attempt(engine.opening.mirror.require_held)
        failures += _attempt(lambda: engine.board.fire(Moment.EXIT_LOOP, engine.ending))
        failures += _attempt(engine.resources.close)
        engine.status = "closed"
        number, interruption = engine.ranks.signal, engine.decisions.interruption
        if isinstance(error, RolledBack):  # a signal, or the time budget, ends this process instead
            if interruption is not None:
                error = exit_error(interruption.code, interruption.reason)
            elif number is not None:
                error = exit_error(128 + number, describe(number))
        if error is not None:
            _note(error, failures)
            if error is not body_error:
                raise error from body_error
            return False
        if failures:
            _note(failures[0], failures[1:])
            raise failures[0]
        # last: errors go before the exit status of a service's stop, or of a late signal
        stop, number = engine.progress.stop, engine.signals.received
        if stop is not None and (stop.failed or stop.code):
            raise GuardStop(1 if stop.failed else stop.code, stop.reason)
        if number is not None:
            raise exit_error(128 + number, f"{describe(number)} while the loop was ending")
        return ended

    def _after_save(self, error: BaseException | None) -> BaseException | None:
        """Return what ends the step after an interrupted start's save: what fails in it will do so again."""
        interruption = self._engine.decisions.interruption
        is_told = isinstance(error, DivergenceError | Interrupted) or not isinstance(error, Exception | None)
        if interruption is None or not self._engine.boundaries.is_saved or is_told:
            return error
        if error is not None:
            self._engine.voice.say(f"the step after the save failed ({type(error).__name__}: {error})")
        return exit_error(interruption.code, interruption.reason)

    def _go_back(self, errors: Sequence[BaseException], step: int) -> RolledBack | None:
        """Decide to go back, or to try again, if the error that ended the loop allows it."""
        engine = self._engine
        # what fails in the step after the last save will do so again
        if (self._fails_alone and engine.ranks.several) or engine.boundaries.is_saved:
            return None
        if not errors or not isinstance(errors[0], BadStepError | RolledBack):
            return engine.retries.prepare_retry(errors[0], step) if errors and engine.begun else None
        # may find an earlier bad step
        errors = [*errors, *_attempt(lambda: engine.saver.announce_commits(wait=True))]
        return engine.rollbacks.undo(errors, step)

    def _on_all_ranks(self, error: BaseException, step: int) -> bool:
        """Whether all ranks leave by such an error; only then is a failed step undone."""
        engine = self._engine
        if not isinstance(error, BadStepError):  # of these no rank waits for the others
            return isinstance(error, RolledBack | Interrupted | GuardStop)
        # services at a boundary judge values that are equal on all ranks
        on_all = not engine.ranks.several or engine.boundaries.inside
        if not on_all and engine.settings.recovery is not None:
            error.add_note(
                f"step {step} is not undone, because other ranks may not have failed in it; let NaNGuard and "
                "LossBound judge metrics, which are equal on all ranks"
            )
        return on_all

    def _finish(self) -> None:
        """Finish cleanly: commit the last state, let services finish, record `ended`."""
        engine, current = self._engine, self._engine.progress
        self._at_end = engine.loop.finish()
        engine.wakeups.require_no_error()
        engine.saver.await_first()
        # a loop without epochs has no earlier end at which to ask
        if not current.epoch:
            engine.program_checks.check_updates()
        self._save_last()
        # before `ended` is recorded: a finished run has its last state on disk
        engine.saver.await_commit()
        if engine.begun and engine.ranks.group.writer:
            # where no step was run, and nothing saved
            engine.opening.store.apply_choice()
        engine.collector.read()
        engine.verifier.end()
        finishing = [s for s in engine.board if type(s).finish is not Service.finish]
        engine.spent.begin_boundary()
        engine.board.run(finishing, engine.board.view(Moment.EXIT_LOOP), finish=True)
        if (current.step, current.epoch) != (engine.recovered.step, engine.recovered.epoch):
            engine.watched.check(engine.recording.last_values.keys(), at_end=True)
        if self._at_end and current.stop is not None and not current.stop.failed:
            ended = {"reason": current.stop.reason, "step": current.step, "epoch": current.epoch}
            engine.journal.event("ended", ended)
        try:
            engine.journal.sync()
        except OSError as error:
            raise CheckpointError(
                f"the end of the run could not be recorded ({error}); {remedy(error)} and start again: "
                "no step is lost"
            ) from error
        # after the last save: best weights in the live objects must not reach a checkpoint
        for service in engine.board.bests:
            if service.restore_at_end:
                engine.restored = restore_best(service, engine.opening.store, engine.user, engine.voice)
        engine.retries.forget()
        # last: no rank leaves while another may still need its answer
        engine.ranks.group.barrier("the end of the run")

    def _save_last(self) -> None:
        """Save the state after the last step, unless a boundary has saved it and no stop came later."""
        engine, current = self._engine, self._engine.progress
        if not engine.begun:
            return
        if engine.saver.step == current.step and not engine.saver.save_due:
            engine.saver.commit_kept()
            return
        drawn, completed = engine.loop.batches()
        if drawn != completed:
            engine.voice.warn(
                "a batch was drawn and its step not completed by advance(): it is not part of the last save"
            )
            return
        engine.saver.save([(None, Save())], "step" if current.step and not current.epoch else "epoch")

    def _abandon(self) -> None:
        """Abandon the loop after an exception: finish a running commit, start none, record every step."""
        engine = self._engine
        try:
            engine.collector.abandon_step()
        except Exception as error:  # of a broken device, say: the first error is to be raised
            engine.voice.warn(f"the metrics of the last steps are lost ({type(error).__name__}: {error})")
        engine.verifier.end()
        engine.saver.announce_commits(wait=True)
        engine.journal.flush()

    def _conclude(self, cause: BaseException | None) -> None:
        engine, current = self._engine, self._engine.progress
        interruption = engine.decisions.interruption
        status, reason = end_status(cause, current.stop, interruption, at_end=self._at_end)
        if status == "failed" and cause is not None:
            reason = engine.reporter.describe_failure(cause)
        at = {"step": current.step, "epoch": current.epoch}
        engine.journal.event("closed", {"status": status, "reason": reason, **at}, wall=True)
        engine.journal.flush()
        # before the ending, which lists its warnings; the journal has its last event now
        engine.opening.mirror.finish(engine.journal, engine.saver.save_jobs.retain)
        parent = engine.recovered.parent
        diverged = [] if parent is None else engine.opening.history.divergences(parent)
        engine.ending = Ending(
            reason=reason,
            step=current.step,
            epoch=current.epoch,
            finished=status == "finished",
            best=best_record(engine),
            where=engine.opening.where(),
            digest=engine.saver.save_jobs.digest or engine.recovered.digest,
            resumed_from=engine.recovered.checkpoint,
            segment=engine.segment,
            failed_saves=engine.saver.failures,
            warnings=tuple(engine.voice.warnings),
            rollbacks=len(engine.rollbacks.decided),
            one_fingerprint=engine.recovered.one_fingerprint,
            diverged=diverged[0].data["step"] if diverged else engine.verifier.diverged,
        )
        if interruption is None and not isinstance(cause, RolledBack):
            engine.voice.say(f"ended: {engine.ending}")


def best_record(engine: Engine) -> BestRecord | None:
    """Return the best value of the first `Best` service; None before its first value."""
    service = next(iter(engine.board.bests), None)
    if service is None or not service.places:
        return None
    best = service.places[0]
    folder = engine.opening.store.best_folder(service.metric) / (best.name or "")
    path = str(folder) if best.name is not None and folder.exists() else None
    return BestRecord(service.metric, best.value, best.step, best.epoch, path)


def _note(error: BaseException, failures: Sequence[BaseException]) -> None:
    for failure in failures:
        error.add_note(f"and while closing: {type(failure).__name__}: {failure}")


def _attempt(action: Callable[[], object]) -> list[BaseException]:
    try:
        action()
    except BaseException as error:
        return [error]
    return []


def restore_best(service: Best, store: Store, user: UserState, voice: Voice) -> BestRecord | None:
    """Load the weights of the best value, or of the next best; an error would come again at every start."""
    problems: list[str] = []
    for place in service.places:
        what = f"{place.value:.6g}, step {place.step}"
        try:
            record = _load(service, place, store, user)
        except (CheckpointError, RestoreError) as error:
            problems.append(f"those of {what}: {error}")
            continue
        if problems:
            voice.warn(
                f"{service.name!r}: restore_at_end loaded the next best weights by {service.metric} "
                f"({what}); not {'; '.join(problems)}"
            )
        else:
            part = "" if service.part is None else f" into {', '.join(map(repr, service.part))}"
            voice.say(f"the best weights by {service.metric} ({what}) are loaded{part}")
        return record
    why = "; ".join(problems) or "there is no value of it"
    voice.warn(f"{service.name!r}: restore_at_end restored nothing: {why}; the last weights stay")
    return None


def _load(service: Best, place: Place, store: Store, user: UserState) -> BestRecord:
    if place.name is None:
        raise NoCheckpointError(
            "they were not kept; leave save=True, measure after the last step, and check for failed saves"
        )
    path = store.best_folder(service.metric) / place.name
    if not path.exists():
        raise NoCheckpointError(f"{path} is gone; bring it back from a copy")
    try:
        saved = read_checkpoint(path, regions=store.regions)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}; {store.set_best_aside(path)}") from error
    about: Any = saved.meta
    if about.get("value", place.value) != place.value:
        raise NoCheckpointError(
            f"{path} has the weights of {about['value']:.6g}, of an earlier timeline; bring back the right "
            "ones from a copy"
        )
    tree = saved_tree(saved, ("user",))["user"]
    with reading(path, "user"):
        user.check(tree, str(path))
        user.load_user(tree, service.part)
    return BestRecord(service.metric, place.value, place.step, place.epoch, str(path))


def end_status(
    cause: BaseException | None, stop: StopRecord | None, interruption: Interrupt | None, *, at_end: bool
) -> tuple[str, str]:
    """Find how a start has ended, "finished" (the run is complete), "stopped" or "failed", and why."""
    if isinstance(cause, Interrupted):
        return ("stopped", cause.reason)
    # an interactive session is left by KeyboardInterrupt, saved like a script that a signal ends
    if isinstance(cause, KeyboardInterrupt) and interruption is not None:
        return ("stopped", interruption.reason)
    if cause is not None:
        return ("failed", f"{type(cause).__name__}: {cause}")
    if stop is None:
        return ("stopped", "the loop was left before its end")
    if stop.failed:
        return ("failed", stop.reason)
    return ("finished" if at_end else "stopped", stop.reason)
