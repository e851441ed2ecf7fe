"""Epochs and step loops of a `TrainLoop`: opened, counted and closed here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from everstep import hazard
from everstep.contracts.services import Moment
from everstep.data.adapt import length_of
from everstep.errors import ProgressError, UsageError
from everstep.metrics import log_tag
from everstep.metrics.collector import Reader
from everstep.schedule import NEVER
from everstep.supervisor.checks.sanity_checks import wrapper_warning
from everstep.supervisor.engine import Engine
from everstep.supervisor.settings import LoopDriver
from everstep.supervisor.streams.run_stream import RunStream, no_batch
from everstep.timing import progress

IDLE_AT_MOST = 100
"""Limit on epochs in a row without a step, where max_epoch is not set."""


class Steps(Iterator[Any]):
    """The steps of an `iter_steps` loop: a `for` loop takes the generator inside, which costs no call more.

    Its length is the number of steps from where this process enters the loop.
    """

    def __init__(self, steps: Iterator[Any], count: Callable[[], int | None]) -> None:
        self._steps, self._count = steps, count

    def __iter__(self) -> Iterator[Any]:
        return self._steps

    def __next__(self) -> Any:
        return next(self._steps)

    def __len__(self) -> int:
        if (count := self._count()) is None:
            raise TypeError("the data of iter_steps() has no length, and no limit of steps is set")
        return count


class Epochs(LoopDriver):
    """The epochs and step loops of a `TrainLoop`; answers the engine's questions about them.

    A resume inside an epoch enters that epoch again: until the program reaches the step loop of the
    checkpoint, `before_resume_point` is true, and earlier step loops of the epoch run no step.
    """

    def __init__(
        self, engine: Engine, steps_per_epoch: int | None, epoch_lines: Reader, show_eta: bool
    ) -> None:
        self._engine, self._steps_per_epoch = engine, steps_per_epoch
        self._epoch_lines, self._show_eta = epoch_lines, show_eta
        self.within_epoch = self.before_resume_point = False
        self.has_broken_step = False
        """Whether a step's body was left by `break` or `return`, or by an exception: then nothing follows."""
        self.batch: Any = None
        """The batch of the open step, or of the last one."""
        self._step_began: float | None = None
        """Clock time at which the open step began; None once its time is noted."""
        self._waited = self._waited_before = 0.0
        """Seconds waited for batches in this epoch, and in those before."""
        self._in_epochs = False
        self._epoch_loops = 0
        """Epoch loops entered, those skipped by a resume included."""
        self._in_steps = False
        self._loop_end = NEVER
        """The step after which the open step loop ends, by steps_per_epoch."""
        self._live_loop = 0
        """Number of the step loop that may act; a step loop that begins raises it, and an epoch that ends."""
        self._epoch_began = 0.0
        self._step_loops = 0
        """`iter_steps` loops entered in this epoch, those skipped by a resume included."""
        self._epoch_updates = 0
        """Optimizer updates when the epoch began."""
        self._idle_epochs = 0
        """Epochs without a step since the last one with a step."""
        self._epoch_data: dict[str, Any] = {}
        """Data that the first step loop of each stream in this epoch reads, by stream."""
        self._warned_of_second_data = False
        self._run_stream: RunStream | None = None
        self._iterator: Callable[[], Iterator[Any] | None] = lambda: None
        """The newest step loop's iterator, which the program alone keeps alive."""
        self._pass_unfinished = False
        self._tail_ready = False
        """Whether a state is kept for a resume from the epoch's tail."""

    @property
    def within_step(self) -> bool:
        return self._engine.collector.open_step != 0 and not self.has_broken_step

    @property
    def epoch_seconds(self) -> float:
        return self._engine.clock() - self._epoch_began

    @property
    def place(self) -> str:
        """Place of the program in the epoch, outside steps: "head" before its step loops, else "tail"."""
        return "tail" if self._engine.progress.calls else "head"

    def iter_epochs(self) -> Iterator[int]:
        engine = self._engine
        engine.require_open("iter_epochs")
        if self._in_epochs:
            raise UsageError("iter_epochs() inside another iter_epochs(); one epoch loop at a time")
        self._epoch_loops += 1
        engine.reach_loop()
        if not engine.begun and self._epoch_loops < engine.progress.epoch_loop:
            return  # a resume continues in a later loop
        self._in_epochs = True
        try:
            while self._open_epoch():
                yield engine.progress.epoch
                engine.require_open("iter_epochs")
                self._close_epoch()
        finally:
            self._in_epochs = False

    def _open_epoch(self) -> bool:
        engine, current = self._engine, self._engine.progress
        current.epoch_loop = self._epoch_loops
        if self.within_epoch:  # left by `break`, and a new epoch loop begun
            self._close_epoch()
        if not engine.begun and engine.recovered.mid_epoch:
            engine.begun = self.before_resume_point = True  # `engine.resume` follows at the resume point
            # before the epoch's first line, so that the head draws the same random numbers as the first time
            engine.rng_marks.back_to("epoch")
            self._enter_epoch()
            return True
        if not engine.begun:
            self._pass_unfinished = engine.recovered.partial  # its boundary may be open, and save again
            engine.begin()
        engine.decisions.check_limits(True)
        if current.stop is not None:
            return False
        current.epoch += 1
        current.epoch_start = current.step
        current.calls, current.iterating, current.stream = 0, False, None
        engine.collector.begin_epoch()
        engine.rng_marks.forget()
        # at the same place in the code as back_to() above, so that both see the same random state
        engine.rng_marks.mark("epoch")
        self._enter_epoch()
        return True

    def _enter_epoch(self) -> None:
        self._step_loops = 0
        self._epoch_data.clear()
        self._epoch_updates = self._engine.user.updates
        self.within_epoch = True
        self._pass_unfinished = False
        self._tail_ready = False
        self._epoch_began = self._engine.clock()
        if not self.before_resume_point:
            self._epoch_lines.clear()
        self._engine.boundaries.announce_epoch()

    def _close_epoch(self) -> None:
        engine = self._engine
        hazard.reach("loop.tail_end")
        self.has_broken_step = self.has_broken_step or engine.collector.open_step != 0
        self._live_loop += 1  # a step loop that the program has kept belongs to no open epoch
        self._in_steps = False
        self.close_broken_step()
        if self.before_resume_point:
            raise UsageError(
                f"the checkpoint is in iter_steps() loop number {engine.progress.calls + 1} of epoch "
                f"{engine.progress.epoch}, but the program entered only {self._step_loops}; run the program "
                "that made it"
            )
        engine.collector.note_epoch_time(self.epoch_seconds)
        # before the boundary: services judge the means of the epoch there
        current = engine.progress
        engine.collector.end_epoch(current.step)
        # the times are an event: they belong to a range of steps, not to rows
        times = {
            "epoch": current.epoch,
            "steps": [current.epoch_start + 1, current.step],
            "seconds": self.epoch_seconds,
            "data_wait": self._waited,
        }
        engine.journal.event("times", times, wall=True)
        self._waited_before += self._waited
        self._waited = 0.0
        # with steps_per_epoch a pass continues in the next epoch
        if self._steps_per_epoch is None:
            engine.streams.end_passes()
        engine.streams.end_epoch()
        self._tail_ready = False
        self.within_epoch = False
        # before the boundary saves: a resume from there runs no line of this epoch again
        engine.rng_marks.forget()
        engine.boundaries.run(Moment.AFTER_EPOCH)
        engine.watched.check(engine.recording.last_values.keys())

    def iter_steps(self, data: Any, name: str) -> Steps:
        engine, current = self._engine, self._engine.progress
        engine.require_open("iter_steps")
        if not (self.within_epoch and self._in_epochs):
            raise UsageError("iter_steps() outside an epoch; put it inside: for epoch in loop.iter_epochs():")
        self.close_broken_step()
        self._require_no_steps()
        if data is None and engine.limits.max_step is None and not self._steps_per_epoch:
            raise UsageError(
                "iter_steps() without data never ends; give it data, or set max_step or steps_per_epoch"
            )
        run_stream = None
        if data is not None:
            run_stream = engine.streams.bind(data, name)
            self._note_data(data, name)
        self._step_loops += 1
        if self.before_resume_point and self._step_loops <= current.calls:  # done before the checkpoint
            engine.rng_marks.back_to(f"steps {self._step_loops}")
            if self._step_loops == current.calls and not current.iterating:
                self.before_resume_point = False
                engine.resume()
                self._tail_ready = True
            return Steps(iter(()), lambda: 0)
        reads = None if run_stream is None else run_stream.name
        if not self.before_resume_point:
            current.iterating, current.call_start, current.stream = True, current.step, reads
        elif current.stream != reads:
            raise UsageError(
                f"the checkpoint is inside iter_steps() over stream {current.stream!r}, this one reads "
                f"{reads!r}; {engine.lost_variables() or 'run the program that made the checkpoint'}"
            )
        self._run_stream, self.batch = run_stream, None
        in_open_pass = not self.before_resume_point and run_stream is not None and run_stream.in_pass
        begun, done = current.step, current.step - current.call_start
        steps = self._steps(run_stream)
        self._iterator = weakref.ref(steps)
        return Steps(steps, lambda: None if in_open_pass else self._count_steps(data, begun, done))

    def _count_steps(self, data: Any, begun: int, done: int) -> int | None:
        """Count the steps of a loop from step `begun` on, before which it has `done` some; None: unknown."""
        total, limit = self._steps_per_epoch or length_of(data), self._engine.limits.max_step
        ends = ([] if total is None else [total - done]) + ([] if limit is None else [limit - begun])
        return max(0, min(ends)) if ends else None

    def _note_data(self, data: Any, name: str) -> None:
        """Warn once if a second step loop of the epoch reads other data as the same stream."""
        if self._epoch_data.setdefault(name, data) is data or self._warned_of_second_data:
            return
        self._warned_of_second_data = True
        self._engine.voice.warn(
            f"a second iter_steps() of epoch {self._engine.progress.epoch} reads other data as stream "
            f"{name!r}: its steps count as training steps. Evaluation reads its data itself: with "
            "loop.evaluation(): for x, y in valid: ...; two kinds of training data: iter_steps(other, "
            f'name="{name}2")'
        )

    def _require_no_steps(self) -> None:
        if self._in_steps:
            raise UsageError("iter_steps() inside another iter_steps(); one step loop at a time")

    def _steps(self, run_stream: RunStream | None) -> Iterator[Any]:
        """Fetch, yield, count: the only loop body of a TrainLoop."""
        self._require_no_steps()
        self._live_loop += 1
        number = self._live_loop
        self._in_steps = True
        engine = self._engine
        warning = wrapper_warning(self._iterator()) if number == 1 else None
        engine.wakeups.wake()  # the first boundary finds out which step is the last
        current, clock = engine.progress, engine.clock
        collector, board, note_batch = engine.collector, engine.board, engine.verifier.note_batch
        step_times, complete_step = collector.step_times, engine.complete_step
        self._loop_end = end = (
            NEVER if self._steps_per_epoch is None else current.call_start + self._steps_per_epoch
        )
        if self.before_resume_point:
            self.before_resume_point = False
            engine.resume()
        if warning is not None:
            engine.warn_once(warning)
        engine.variables.steps_begin(current.epoch_loop if self._step_loops == 1 else None)
        engine.decisions.check_limits(False)
        pass_began = -1 if run_stream is None or run_stream.in_pass else current.step
        finished = exhausted = False
        try:
            while current.stop is None and current.step < end:
                fetch_began = clock()
                if run_stream is not None:
                    try:
                        batch = next(run_stream.cursor or run_stream.open())
                    except StopIteration:
                        if current.step == pass_began and not self._may_be_empty(run_stream):
                            raise no_batch(run_stream.name) from None
                        engine.verifier.pass_ended(current.step, run_stream.name, run_stream.pass_index)
                        engine.boundaries.leave_saved()  # before the lines after the loop
                        run_stream.end_pass()
                        if self._steps_per_epoch is None:
                            exhausted = True
                            break
                        pass_began = current.step
                        continue
                    except Exception:
                        engine.boundaries.leave_saved()  # Ctrl-C has killed the workers, too
                        # a fetch lies between two steps: if a signal is to blame, the last one is saved
                        if engine.killed_by_signal(run_stream.cursor):
                            if current.step > current.epoch_start:
                                engine.saver.keep("step")
                            engine.saver.commit_kept()
                            engine.announce_leaving()
                            engine.leave()
                        raise
                    self.batch = batch
                    # before the program gets the batch, as it may change the batch
                    note_batch(current.step + 1, run_stream.name, run_stream.pass_index, batch)
                began = clock()
                self._waited += began - fetch_began
                collector.open_step = step = current.step + 1
                self._step_began = began
                if board.synchronous:
                    board.announce(Moment.BEFORE_STEP, self.batch)
                yield step if run_stream is None else (step, batch)
                if self._live_loop != number or collector.open_step != step:
                    raise UsageError(
                        f"the step loop of step {step} continued after its epoch had ended; do not keep the "
                        "iterator"
                    )
                if self._step_began is not None:
                    step_times.append(clock() - began)
                collector.open_step = 0
                complete_step(self.batch)
            finished = True
            if not exhausted and current.step < end:
                self._cut_short(run_stream)
        finally:
            if self._live_loop == number:
                self._in_steps = False
                # the lines after the loop draw from here, also when a resume runs them again
                engine.rng_marks.mark(f"steps {self._step_loops}")
                if finished:
                    self._end_steps()
                elif collector.open_step:
                    self.has_broken_step = True

    def note_step_time(self) -> None:
        """Record the step's time so far as the time of the whole step, as TFSnippet does."""
        if self._step_began is not None:
            self._engine.collector.step_times.append(self._engine.clock() - self._step_began)
            self._step_began = None

    def _may_be_empty(self, run_stream: RunStream) -> bool:
        """Whether a pass may give no batch: its batches are quarantined, or it was allowed."""
        ends = self._steps_per_epoch is None and self._engine.limits.max_epoch is not None
        stream = run_stream.stream
        return run_stream.skipped or (ends and stream is not None and stream.may_be_empty)

    def _cut_short(self, run_stream: RunStream | None) -> None:
        """Note a pass that a stop has cut short, unless it would have ended here anyway."""
        cursor = None if run_stream is None or self._steps_per_epoch is not None else run_stream.cursor
        if cursor is None or cursor.remaining() != 0:
            self._pass_unfinished = True
        else:
            next(cursor, None)  # some data draws random numbers when it ends: the next pass begins after them

    def _end_steps(self) -> None:
        current = self._engine.progress
        current.iterating, current.calls = False, self._step_loops
        # a resume from the tail needs the copy of one step before, so that the last step runs again
        if not self._engine.saver.one_before():
            self._engine.saver.keep("step")
        self._tail_ready = True
        hazard.reach("loop.tail")

    def close_broken_step(self) -> None:
        """Complete a step that was left by `break` or `return`, which ends its pass."""
        if not self.has_broken_step:
            return
        self.has_broken_step = False
        self._engine.collector.open_step = 0
        self._engine.complete_step(self.batch, can_save=False)
        if self._run_stream is not None and self._steps_per_epoch is None:
            self._run_stream.end_pass()
        self._engine.progress.iterating, self._engine.progress.calls = False, self._step_loops
        self._tail_ready = False

    # ------------------------------------------------------------------------- between the steps

    def enter_outside(self, what: str) -> None:
        """Prepare a call between steps: require an epoch, complete a broken step, look for signals."""
        self._engine.require_open(what)
        if not self.within_epoch:
            raise UsageError(f"{what}() outside an epoch; call it inside: for epoch in loop.iter_epochs():")
        self.close_broken_step()
        self.poll()

    def poll(self) -> None:
        """Commit the kept snapshot and leave at an interruption in the tail, before the epoch's end."""
        engine = self._engine
        if engine.collector.open_step:
            return
        engine.polls += 1
        engine.wakeups.require_no_error()
        engine.decisions.notice_signal()
        if engine.decisions.interruption is not None and self._tail_ready:
            engine.saver.commit_kept()
            engine.announce_leaving()
            engine.leave()

    # ------------------------------------------------------------------- what the engine asks

    def tag(self, with_eta: bool = True) -> str:
        engine, limits = self._engine, self._engine.limits
        eta = self.shown_eta if with_eta else None
        return log_tag(engine.progress.epoch, limits.max_epoch, engine.step, limits.max_step, eta)

    @property
    def shown_eta(self) -> float | None:
        """The ETA in seconds, for lines; None if unknown or not wanted."""
        return self._engine.view.get_eta() if self._show_eta else None

    def get_progress(self) -> float | None:
        engine = self._engine
        return progress(
            engine.step,
            engine.progress.epoch,
            engine.limits.max_step,
            engine.limits.max_epoch,
            steps_per_epoch=self._steps_per_epoch or self._known_steps(),
            within_epoch=self.within_epoch,
            within_step=self.within_step,
        )

    def _known_steps(self) -> float | None:
        """Steps per epoch: the mean of epochs whose steps are over, else the number that the stream tells."""
        current = self._engine.progress
        if self._tail_ready:
            return current.step / current.epoch
        finished = current.epoch - self.within_epoch
        if finished > 0:
            return (current.epoch_start if self.within_epoch else current.step) / finished
        cursor = None if self._run_stream is None else self._run_stream.cursor
        steps = None if cursor is None else cursor.remaining()
        return None if steps is None else current.step + steps + (self._engine.collector.open_step != 0)

    def data_wait(self) -> float:
        return self._waited_before + self._waited

    def remaining_steps(self) -> int | None:
        if not self._in_steps:
            return None
        step = self._engine.progress.step
        limits = (self._loop_end, self._engine.limits.max_step or NEVER)
        ends = [end - step for end in limits if end != NEVER]
        run_stream = self._run_stream if self._steps_per_epoch is None else None
        cursor = None if run_stream is None else run_stream.cursor
        if cursor is not None and (remaining := cursor.remaining()) is not None:
            ends.append(remaining)
        return min(ends, default=None)

    def reads_on(self) -> bool:
        return self._run_stream is not None and self.remaining_steps() != 0

    def is_partial(self) -> bool:
        return self._pass_unfinished

    def check_epoch(self) -> None:
        current, max_epoch = self._engine.progress, self._engine.limits.max_epoch
        self._idle_epochs = 0 if current.step > current.epoch_start else self._idle_epochs + 1
        if current.stop is None and max_epoch is None and self._idle_epochs >= IDLE_AT_MOST:
            raise ProgressError(
                f"no step was completed in {IDLE_AT_MOST} epochs in a row, and max_epoch is not set, so the "
                "run may never end; give the data to the loop: for step, batch in loop.iter_steps(data):, "
                "or give max_epoch= if epochs without steps are meant"
            )
        count = self._engine.user.updates - self._epoch_updates
        if count and not (current.step or self._step_loops):
            raise ProgressError(
                f"in epoch {current.epoch} the optimizers of the state made {count} updates and no step was "
                "counted; give the data to the loop: for step, batch in loop.iter_steps(data):"
            )

    def finish(self) -> bool:
        self.close_broken_step()
        expected = self._engine.progress.epoch_loop
        if 0 < self._epoch_loops < expected:
            raise UsageError(
                f"the checkpoint is in iter_epochs() loop number {expected}, but the "
                f"program entered only {self._epoch_loops}; run the program that made it"
            )
        if not self.within_epoch:
            return True
        self._engine.saver.save_due = True  # left by `break`: closed here; the run is resumable, not finished
        self._close_epoch()
        return False
