"""`TrainLoop`: epochs, steps, metrics, timers and lines for a loop that you write."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from everstep import backends, hazard
from everstep.contracts.services import Moment, Service
from everstep.errors import ConfigError, DataError, MetricError, ProgressError, UsageError
from everstep.keywords import checked_keywords, whole
from everstep.metrics import MetricFormatter, Window, environment_table, log_line, log_tag, parameter_table
from everstep.metrics.collector import Reader, is_wall, resolve, to_scalar
from everstep.metrics.statistics import Stats
from everstep.progress_estimate import progress
from everstep.schedule import NEVER, Instant
from everstep.services.best import Best, direction
from everstep.services.early_stop import EarlyStop
from everstep.state import isolated
from everstep.supervisor import Supervisor
from everstep.supervisor.board import listed
from everstep.supervisor.engine import Abandoned
from everstep.supervisor.streams import StreamSlot

IDLE_AT_MOST = 100
"""Epochs in a row without a step, where nothing says how many there are to be."""


class TrainLoop(Supervisor):
    """A `Supervisor` with epochs, steps and metrics; you write the two `for` loops.

        with TrainLoop("runs/digits", state={"model": model, "optimizer": optimizer}, max_epoch=20) as loop:
            for epoch in loop.iter_epochs():
                for step, (x, y) in loop.iter_steps(train):
                    loss = ...
                    loop.collect_metrics(loss=loss)
                with loop.evaluation(), loop.timeit("valid_time"):
                    loop.collect_metrics(valid_loss=evaluate(model, valid))
                loop.print_logs()

    Run twice, it resumes, in the middle of an epoch if need be: the epoch is entered again, lines
    before the inner loop run again (`resumed_mid_epoch` tells), the remaining steps and the lines
    after it run.  Carries on TFSnippet's TrainLoop.

    Args:
        run_dir, state: as for `Supervisor`, like all arguments not listed here.
        max_epoch: total number of epochs, 1 or more; None for no limit.
        steps_per_epoch: an epoch is so many steps, and a pass over the data goes on in the next
            epoch; None: an epoch is a pass.
        watch: the metric whose best value is tracked, kept and marked ` (*)`, and which `best` is of: a
            name, or (name, "min" or "max"); beside any `Best` among the services.  Default: that of the
            first `Best` or `EarlyStop` among them, else "valid_loss".
        groups: prefixes of parameter names that get tables of their own in the training summary.
        formatter: how metrics are written in log lines.
        show_eta: whether log lines have the ETA.
    """

    _moments = frozenset(Moment) - {Moment.AFTER_EVAL_STEP}

    @partial(checked_keywords, forwards_to=Supervisor.__init__)
    def __init__(
        self,
        run_dir: str | Path,
        state: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
        *,
        max_epoch: int | None = None,
        max_step: int | None = None,
        steps_per_epoch: int | None = None,
        watch: str | tuple[str, str] | None = None,
        services: Iterable[Service] = (),
        groups: Sequence[str] = (),
        formatter: MetricFormatter | None = None,
        show_eta: bool = True,
        **supervisor: Any,
    ) -> None:
        self._max_epoch = whole("max_epoch", max_epoch, none="for no limit")
        self._steps_per_epoch = whole("steps_per_epoch", steps_per_epoch, none="for no limit")
        services = _with_best(watch, listed(services))
        super().__init__(run_dir, state, max_step=max_step, services=services, **supervisor)
        self._groups, self._formatter, self._show_eta = (
            tuple(groups),
            formatter or MetricFormatter(),
            show_eta,
        )
        self._epoch_lines = self._collector.reader("print epoch", Reader())
        self._step_lines = self._collector.reader("print steps", Reader(outside=False))
        self._durations: list[float] = []
        self._step_began: float | None = None
        """When the open step began; None once its time is committed."""
        self._waited = self._waited_before = 0.0
        """Seconds waited for batches in this epoch, and in those before."""
        self._in_epochs = self._left_epochs = False
        self._epoch_loops = 0
        """How many were entered, those skipped by a resume included."""
        self._in_steps = False
        self._loop_end = NEVER
        """The step after which the open step loop ends, by steps_per_epoch."""
        self._step_loops = 0
        """How many were entered or closed: the number of the one that may act."""
        self._left_open = False
        """A step's body was left by `break` or `return` (or by an exception: then nothing follows)."""
        self._epoch_open = False
        self._epoch_began = 0.0
        self._replaying = False
        """In an epoch that a resume entered again, before the point where it goes on."""
        self._calls = 0
        """`iter_steps` loops entered in this epoch, those skipped by a resume included."""
        self._epoch_updates = 0
        """Optimizer updates when it began."""
        self._idle_epochs = 0
        """How many without a step have come since one with a step."""
        self._epoch_data: dict[str, Any] = {}
        """By stream, the data that its first step loop in this epoch reads."""
        self._told_of_second_data = False
        self._slot: StreamSlot | None = None
        self._pass_unfinished = False
        self._tail_ready = False
        self._found_inside: dict[str, Any] | None = None
        """What was collected in the open `evaluation()`."""

    # ------------------------------------------------------------------------------ what it is

    @property
    def max_epoch(self) -> int | None:
        """The limit of `epoch`; may be set while running."""
        return self._max_epoch

    @max_epoch.setter
    def max_epoch(self, value: int | None) -> None:
        self._max_epoch = whole("max_epoch", value, none="for no limit")
        self._limits_changed()

    @property
    def within_epoch(self) -> bool:
        """Whether an epoch is open."""
        return self._epoch_open

    @property
    def within_step(self) -> bool:
        """Whether the body of a step is running."""
        return self._open_step != 0 and not self._left_open

    @property
    def step_data(self) -> Any:
        """The batch of the step that is running, None outside steps and without data."""
        return self._step_data if self.within_step else None

    @property
    def resumed_mid_epoch(self) -> bool:
        """True in the epoch that a resume entered again, from its first line to its last."""
        self._require_entered("resumed_mid_epoch")
        recovered = self._recovered
        return recovered.mid_epoch and self._progress.epoch == recovered.epoch

    @property
    def best_valid_metric(self) -> float | None:
        """The best value of the watched metric; None if there is none yet."""
        best = self.best
        return None if best is None else best.value

    def get_progress(self) -> float | None:
        """The part of the run that is done, 0 to 1; None if it is unbounded."""
        return progress(
            self.step,
            self.epoch,
            self.max_step,
            self.max_epoch,
            steps_per_epoch=self._steps_per_epoch or self._known_steps(),
            within_epoch=self._epoch_open,
            within_step=self.within_step,
        )

    # -------------------------------------------------------------------------------- the epochs

    def iter_epochs(self) -> Iterator[int]:
        """Yield the number of each epoch, from 1, until a limit or a stop.

        After a resume inside an epoch it yields that epoch again.

        Raises:
            UsageError: outside the `with` block, or inside another epoch loop.
            Interrupted: a signal, or the time budget; the state is saved.
        """
        self._require_open("iter_epochs")
        if self._in_epochs:
            raise UsageError("iter_epochs() inside another iter_epochs(); one epoch loop at a time")
        self._epoch_loops += 1
        if not self._begun and self._epoch_loops < self._progress.epoch_loop:
            return  # a resume goes on in a later loop
        self._in_epochs = True
        try:
            while self._open_epoch():
                yield self.epoch
                self._require_open("iter_epochs")
                self._close_epoch()
        finally:
            self._in_epochs = False

    def _open_epoch(self) -> bool:
        self._progress.epoch_loop = self._epoch_loops
        if self._epoch_open:  # left by `break`, and a new epoch loop begun
            self._close_epoch()
        if not self._begun and self._recovered.mid_epoch:
            self._begun = self._replaying = True
            self._lines.back_to("epoch")
            self._enter_epoch()
            return True
        if not self._begun:
            self._begin_loop()
        self._check_limits(True)
        if self._progress.stop is not None:
            return False
        current = self._progress
        current.epoch += 1
        current.epoch_start = current.step
        current.calls, current.iterating, current.stream = 0, False, None
        self._collector.begin_epoch()
        self._lines.forget()
        self._lines.mark("epoch")
        self._enter_epoch()
        return True

    def _enter_epoch(self) -> None:
        self._calls = 0
        self._epoch_data.clear()
        self._epoch_updates = self.updates
        self._epoch_open = True
        self._pass_unfinished = False
        self._tail_ready = False
        self._epoch_began = self.clock()
        if not self._replaying:
            self._epoch_lines.clear()
        self._spent.begin_boundary()
        self._may_abandon = not self._progress.step  # then the checkpoint of step 0 is what to go on from
        try:
            self._fire(Moment.BEFORE_EPOCH)
        except Abandoned:
            assert self._interruption is not None
            self._leave(self._interruption)
        finally:
            self._may_abandon = False
        self._spent.end_boundary()

    def _close_epoch(self) -> None:
        """The tail is over: the after_epoch boundary."""
        hazard.reach("loop.tail_end")
        self._left_open = self._left_open or self._open_step != 0
        self._step_loops += 1  # one that is kept alive is not this epoch's any more
        self._in_steps = False
        self._settle()
        if self._replaying:
            self._require_calls()
        self._collector.note_epoch_time(self.clock() - self._epoch_began)
        self._collector.end_epoch(self._progress.step)
        self._record_times()
        if self._steps_per_epoch is None:
            self._streams.end_passes()
        self._tail_ready = False
        self._epoch_open = False
        self._lines.forget()
        self._boundary(Moment.AFTER_EPOCH)
        self._watched.check(self._last_values.keys())

    def _record_times(self) -> None:
        """Times belong to ranges of steps, not to rows."""
        current = self._progress
        times = {
            "epoch": current.epoch,
            "steps": [current.epoch_start + 1, current.step],
            "seconds": self.clock() - self._epoch_began,
            "data_wait": self._waited,
        }
        self._journal.event("times", times, wall=True)
        self._waited_before += self._waited
        self._waited = 0.0

    def _data_wait(self) -> float:
        return self._waited_before + self._waited

    def _check_epoch(self) -> None:
        super()._check_epoch()
        self._idle_epochs = 0 if self._progress.step > self._progress.epoch_start else self._idle_epochs + 1
        if self._progress.stop is None and self._max_epoch is None and self._idle_epochs >= IDLE_AT_MOST:
            raise ProgressError(
                f"no step was completed in {IDLE_AT_MOST} epochs in a row, and max_epoch is not set, so they "
                "may never end; give the data to the loop: for step, batch in loop.iter_steps(data):, or "
                "give max_epoch= if epochs without steps are meant"
            )
        made = self.updates - self._epoch_updates
        if made and not (self._progress.step or self._calls):
            raise ProgressError(
                f"in epoch {self.epoch} the optimizers of the state made {made} updates and no step was "
                "counted; give the data to the loop: for step, batch in loop.iter_steps(data):"
            )

    def _require_calls(self) -> None:
        raise UsageError(
            f"the checkpoint stands in iter_steps() loop number {self._progress.calls + 1} of epoch "
            f"{self.epoch}, but the program entered only {self._calls}; run the program that made it"
        )

    def _check_limits(self, at_epoch_end: bool) -> None:
        super()._check_limits(at_epoch_end)
        if at_epoch_end and self._max_epoch is not None and self.epoch >= self._max_epoch:
            self._decide_stop(f"max_epoch {self._max_epoch} is reached", "max_epoch")

    def _is_partial(self) -> bool:
        return self._pass_unfinished

    def _steps_left(self) -> int | None:
        if not self._in_steps:
            return None
        step = self._progress.step
        ends = [end - step for end in (self._loop_end, self._max_step or NEVER) if end != NEVER]
        cursor = self._slot.cursor if self._slot is not None and self._steps_per_epoch is None else None
        if cursor is not None and (left := cursor.remaining()) is not None:
            ends.append(left)
        return min(ends, default=None)

    def _known_steps(self) -> float | None:
        """Steps per epoch: the mean of those whose steps are over, else what the stream says of this one."""
        current = self._progress
        if self._tail_ready:
            return current.step / current.epoch
        finished = current.epoch - self._epoch_open
        if finished > 0:
            return (current.epoch_start if self._epoch_open else current.step) / finished
        cursor = None if self._slot is None else self._slot.cursor
        left = None if cursor is None else cursor.remaining()
        return None if left is None else current.step + left + (self._open_step != 0)

    # --------------------------------------------------------------------------------- the steps

    @checked_keywords
    def iter_steps(self, data: Any = None, name: str = "train") -> Iterator[Any]:
        """Yield (step, batch), or step if there is no data; step counts from 1 over the whole run.

        Args:
            data: a stream, a DataLoader, anything iterable (`everstep.data`); None counts up to
                max_step, or steps_per_epoch steps.
            name: the stream's name; two loops over different data in one epoch need two.

        Raises:
            UsageError: outside an epoch, inside another step loop, or without any end.
            DataError: the data gave no batch at all.
            Interrupted: a signal, or the time budget; the state is saved.
        """
        self._require_open("iter_steps")
        if not (self._epoch_open and self._in_epochs):
            raise UsageError("iter_steps() outside an epoch; put it inside: for epoch in loop.iter_epochs():")
        self._settle()
        self._require_no_steps()
        if data is None and self._max_step is None and not self._steps_per_epoch:
            raise UsageError(
                "iter_steps() without data never ends; give it data, or set max_step or steps_per_epoch"
            )
        slot = None
        if data is not None:
            slot = self._streams.bind(data, name)
            self._note_data(data, name)
        self._calls += 1
        current = self._progress
        if self._replaying and self._calls <= current.calls:  # done before the checkpoint
            self._lines.back_to(f"steps {self._calls}")
            if self._calls == current.calls and not current.iterating:
                self._resume_here()
                self._tail_ready = True
            return iter(())
        reads = None if slot is None else slot.name
        if not self._replaying:
            current.iterating, current.call_start, current.stream = True, current.step, reads
        elif current.stream != reads:
            raise UsageError(
                f"the checkpoint stands inside iter_steps() over stream {current.stream!r}, this one reads "
                f"{reads!r}; run the program that made the checkpoint"
            )
        self._slot, self._step_data = slot, None
        return self._steps(slot)

    def _note_data(self, data: Any, name: str) -> None:
        """Say once if a second step loop of the epoch reads other data as the same stream."""
        if self._epoch_data.setdefault(name, data) is data or self._told_of_second_data:
            return
        self._told_of_second_data = True
        self._warn(
            f"a second iter_steps() of epoch {self.epoch} reads other data as stream {name!r}: its steps "
            "count as training steps. Evaluation reads its data itself: with loop.evaluation(): "
            f'for x, y in valid: ...; two kinds of training data: iter_steps(other, name="{name}2")'
        )

    def _require_no_steps(self) -> None:
        if self._in_steps:
            raise UsageError("iter_steps() inside another iter_steps(); one step loop at a time")

    def _resume_here(self) -> None:
        """The resume point inside an epoch."""
        self._replaying = False
        self._go_on()

    def _steps(self, slot: StreamSlot | None) -> Iterator[Any]:
        """The one loop body: fetch, yield, count."""
        self._require_no_steps()
        self._step_loops += 1
        number = self._step_loops
        self._in_steps = True
        self._wake()  # the first boundary finds out which step is the last
        current, clock, durations = self._progress, self._clock, self._durations
        self._loop_end = end = (
            NEVER if self._steps_per_epoch is None else current.call_start + self._steps_per_epoch
        )
        if self._replaying:
            self._resume_here()
        self._check_limits(False)
        pass_began = -1 if slot is None or slot.in_pass else current.step
        finished = exhausted = False
        try:
            while current.stop is None and current.step < end:
                asked = clock()
                if slot is not None:
                    try:
                        batch = next(slot.cursor or slot.open())
                    except StopIteration:
                        if current.step == pass_began and not self._may_be_empty(slot):
                            raise _no_batch(slot.name) from None
                        self._verifier.pass_ended(current.step, slot.name, slot.pass_index)
                        slot.end_pass()
                        if self._steps_per_epoch is None:
                            exhausted = True
                            break
                        pass_began = current.step
                        continue
                    except Exception as error:
                        self._data_failed(slot, error)
                        raise
                    self._step_data = batch
                    self._verifier.drew(current.step + 1, slot.name, slot.pass_index, batch)
                began = clock()
                self._waited += began - asked
                self._open_step = step = current.step + 1
                self._step_began = began
                if self._synchronous:
                    self._announce(Moment.BEFORE_STEP, self._step_data)
                yield step if slot is None else (step, batch)
                if self._step_loops != number or self._open_step != step:
                    raise UsageError(
                        f"the step loop of step {step} went on after its epoch had ended; do not keep it"
                    )
                if self._step_began is not None:
                    durations.append(clock() - began)
                self._complete_step()
            finished = True
            if not exhausted and current.step < end:
                self._cut_short(slot)
        finally:
            if self._step_loops == number:
                self._in_steps = False
                self._lines.mark(f"steps {self._calls}")
                if finished:
                    self._end_steps()
                elif self._open_step:
                    self._left_open = True

    def _may_be_empty(self, slot: StreamSlot) -> bool:
        """Whether a pass without a batch is no error: its batches are quarantined, or it was allowed."""
        ends = self._steps_per_epoch is None and self._max_epoch is not None
        return slot.skipped or (ends and slot.stream is not None and slot.stream.may_be_empty)

    def _data_failed(self, slot: StreamSlot, error: Exception) -> None:
        """Ctrl-C reaches the whole process group and kills loader workers: then it is the interruption."""
        if slot.cursor is None or not slot.cursor.fetch_error_may_be_signal:
            return
        if self._signals.received_within(1.0):
            self._notice_signal()
            assert self._interruption is not None
            if self._progress.step > self._progress.epoch_start:
                self._keep_snapshot("step")
            self._commit_kept()
            self._leave(self._interruption)

    def _cut_short(self, slot: StreamSlot | None) -> None:
        """A stop ended the step loop, maybe exactly where its pass would have ended anyway."""
        cursor = None if slot is None or self._steps_per_epoch is not None else slot.cursor
        if cursor is None or cursor.remaining() != 0:
            self._pass_unfinished = True
        else:
            next(cursor, None)  # some data draws random numbers for its end: the next pass begins after them

    def _end_steps(self) -> None:
        """The step loop has ended; what follows in the epoch is its tail."""
        current = self._progress
        current.iterating, current.calls = False, self._calls
        if not self._one_before():
            self._keep_snapshot("step")
        self._tail_ready = True
        hazard.reach("loop.tail")

    def _settle(self) -> None:
        """Complete a step that was left by `break` or `return`, which ends its pass."""
        if not self._left_open:
            return
        self._left_open = False
        self._complete_step(can_save=False)
        if self._slot is not None and self._steps_per_epoch is None:
            self._slot.end_pass()
        self._progress.iterating, self._progress.calls = False, self._calls
        self._tail_ready = False

    # ----------------------------------------------------------------------- metrics and timers

    def collect_metrics(self, metrics: Mapping[str, Any] | None = None, /, **values: Any) -> None:
        """Add metric values: to the step, if one is open, and to the epoch.

        A value is copied; one that lies on a device stays there until somebody reads it.

        Args:
            metrics: name to value.
            values: the same as keywords.

        Raises:
            MetricError: a value is not one real number, or a name is no text or given twice.
            UsageError: outside an epoch.
        """
        if metrics is not None:
            _require_metrics(metrics)
            if both := metrics.keys() & values.keys():
                raise MetricError(
                    f"metric {min(both)!r} is given twice, in the mapping and as a keyword; give it once"
                )
            values = {**metrics, **values}
        step = self._open_step
        if step and not self._left_open:
            self._collect(step, values)
            return
        self._enter_outside("collect_metrics")
        values = {name: to_scalar(name, value) for name, value in values.items()}
        if self._found_inside is not None:
            self._found_inside.update(values)
        for name, value in values.items():
            self._collect_outside(name, value)
        if self._synchronous:
            self._announce(Moment.METRICS_COLLECTED, values)

    def _enter_outside(self, what: str) -> None:
        """Every method for use between steps passes here: epoch open, broken step closed, signals seen."""
        self._require_open(what)
        if not self._epoch_open:
            raise UsageError(f"{what}() outside an epoch; call it inside: for epoch in loop.iter_epochs():")
        self._settle()
        self._poll()

    def _collect_outside(self, name: str, value: Any) -> None:
        """A value outside steps; in the head of an epoch entered again it was recorded the first time."""
        if not self._replaying:
            current = self._progress
            phase = "tail" if current.calls else "head"
            self._collector.require_alone(phase, current.step, name)
            self._collector.outside(phase, current.step, name, value)

    def _poll(self) -> None:
        """In the tail, an interruption does not wait for the epoch's end: the kept snapshot is committed."""
        if self._open_step:
            return
        self._require_no_error()
        self._notice_signal()
        if self._interruption is not None and self._tail_ready:
            self._commit_kept()
            self._leave(self._interruption)

    @contextmanager
    def metric_collector(self, name: str) -> Iterator[MetricMean]:
        """A collector of (value, weight) pairs; on leaving the block their mean is collected as `name`."""
        collected = MetricMean(name)
        yield collected
        if (mean := collected.mean) is not None:
            self.collect_metrics({name: mean})

    @contextmanager
    def timeit(self, name: str) -> Iterator[None]:
        """Time the block, in seconds, as metric `name`; nothing is recorded if it raises.

        Raises:
            ConfigError: the name does not end in time or timer, by which clock values are recognised.
        """
        if not is_wall(name):
            raise ConfigError(f"timeit({name!r}): end the name in time or timer, as in {name + '_time'!r}")
        if not self.within_step:
            self._enter_outside("timeit")
        began = self.clock()
        yield
        self.collect_metrics({name: self.clock() - began})

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluate inside: models in evaluation mode; random state and modes come back afterwards.

        So evaluating, or not, more or less often, changes nothing in the training.  The block may run
        again after a resume and must not change the state.

        Raises:
            UsageError: outside an epoch; at the block's end, if an optimizer of the state stepped inside.
        """
        self._enter_outside("evaluation")
        began = self.clock()
        self._estimator.update(self._progress.step)
        before = self.updates
        found: dict[str, Any] = {}
        around, self._found_inside = self._found_inside, found
        try:
            with isolated(), self._user.evaluation_mode():
                yield
        finally:
            self._found_inside = around
        if self.updates != before:
            raise UsageError(
                f"an optimizer of the state stepped inside evaluation() ({before} updates before the block, "
                f"{self.updates} after); train in iter_steps(), and evaluate without optimizer.step()"
            )
        self._note_evaluation(self.clock() - began)
        self._fire(Moment.AFTER_EVALUATION, dict(zip(found, resolve(list(found.values())), strict=True)))

    def add_summary(self, summary: Any) -> None:
        """Hand a summary (image, text, histogram ...) to the services that asked for SUMMARY_ADDED.

        Outside steps only in an epoch; in the head of one that a resume enters again it was handed over the
        first time.
        """
        if not self.within_step:
            self._enter_outside("add_summary")
        if not self._replaying:
            super().add_summary(summary)

    # ------------------------------------------------------------------------------- the lines

    def print_logs(self) -> None:
        """Print one line of what was collected since the last such line, and clear that.

        In a step: the values collected in steps.  Otherwise: all values of the epoch.  Call it at the
        end of the step or of the epoch.
        """
        if self.within_step:
            lines = self._step_lines
            if self._step_began is not None:  # the step's time so far is its time, as in the seed
                self._durations.append(self.clock() - self._step_began)
                self._step_began = None
        else:
            self._enter_outside("print_logs")
            if self._replaying:
                return  # it was printed the first time, and what came since is still to be
            lines = self._epoch_lines
            lines.add_outside("epoch_time", self.step, self.clock() - self._epoch_began)
        self._note_durations()
        stats = {name: found for name in lines.names() if (found := lines.stats(name)) is not None}
        when = Instant(self._open_step or self.step, self.epoch, not self._open_step, self.clock())
        new = {best.metric for best in self._board.all(Best) if best.is_on_line(lines, when)}
        lines.clear()
        self.println(log_line(self._tag(), stats, new, self._formatter))
        self.announce_printed(stats)

    def announce_printed(self, stats: Mapping[str, Stats]) -> None:
        """Tell observers what stood on a line."""
        self._announce(Moment.METRIC_STATS_PRINTED, {n: s for n, s in stats.items() if not is_wall(n)})
        self._announce(Moment.TIME_METRIC_STATS_PRINTED, {n: s for n, s in stats.items() if is_wall(n)})

    def _tag(self) -> str:
        eta = self.get_eta() if self._show_eta else None
        return log_tag(self.epoch, self.max_epoch, self.step, self.max_step, eta)

    def print_training_summary(self) -> None:
        """Print the environment and the table of the state's parameters, by groups."""
        self._require_open("print_training_summary")
        facts = {"run": str(self.run_dir), "seed": str(self.seed), "python": platform.python_version()}
        for backend in backends.active():
            facts |= backend.describe()
        self.println(environment_table(facts))
        if parameters := [p for b in backends.active() for p in b.parameters(self._user.objects)]:
            self.println(parameter_table("Trainable Parameters", parameters, self._groups))

    # -------------------------------------------------------------------------- what it overrides

    def make_checkpoint(self) -> None:
        """Save at the next boundary: the end of this step, or of this epoch.

        Raises:
            UsageError: outside an epoch.
        """
        if not self.within_step:
            self._enter_outside("make_checkpoint")
        super().make_checkpoint()

    def should_stop(self) -> bool:
        """Whether a stop has been decided; the iterators end by themselves.

        Raises:
            ProgressError: asked 100,000 times, without waiting between, while no step and no epoch ended.
            Interrupted: a signal, where no step is open.
        """
        self._require_open("should_stop")
        if self._progress.stop is not None:
            return True
        self._poll()
        self._count_round()
        return False

    _never_done = "no step and no epoch was completed"
    _to_be_done = (
        "let the loop count them: for epoch in loop.iter_epochs(): for step, batch in loop.iter_steps(data):"
    )

    def advance(self, **metrics: Any) -> None:
        """Not in a TrainLoop: `iter_steps` completes the steps.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "advance() is a Supervisor's; leave it out: in a TrainLoop iter_steps() completes each step"
        )

    def stream(self, data: Any, name: str = "train", *, passes: int | None = None) -> Iterator[Any]:
        """Not in a TrainLoop: `iter_steps` reads the data.

        Raises:
            UsageError: always.
        """
        self._require_open("stream")
        raise UsageError("stream() is a Supervisor's; in a TrainLoop give the data to iter_steps()")

    def _boundary(
        self, moment: Moment, *, can_save: bool = True, rest: Collection[str] | None = None
    ) -> None:
        self._note_durations()
        super()._boundary(moment, can_save=can_save, rest=rest)

    def _note_durations(self) -> None:
        self._collector.note_step_times(self._durations)
        self._durations.clear()

    def _finish(self) -> None:
        self._settle()
        if 0 < self._epoch_loops < self._progress.epoch_loop:
            raise UsageError(
                f"the checkpoint stands in iter_epochs() loop number {self._progress.epoch_loop}, but the "
                f"program entered only {self._epoch_loops}; run the program that made it"
            )
        if self._epoch_open:  # left by `break`: closed here; the run is resumable, not finished
            self._save_asked = True
            self._left_epochs = True
            self._close_epoch()
        super()._finish()

    def _explain(self, error: BaseException) -> None:
        if isinstance(error, NameError) and self.resumed_mid_epoch:
            error.add_note(
                f"this epoch was resumed after step {self._recovered.step}; a step loop that had ended "
                "before (which step is its last is not always known beforehand) ran no step and assigned "
                "nothing: give what follows it a value before the loop"
            )

    def _is_over(self) -> bool:
        return super()._is_over() and not self._left_epochs


class MetricMean:
    """The weighted mean of what was collected."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._window = Window()

    def collect(self, value: Any, weight: float = 1.0) -> None:
        """Add one value with a weight of 0 or more.

        Raises:
            MetricError: not one real number, or a negative weight.
        """
        self._window.add(float(to_scalar(self._name, value)), weight)

    @property
    def mean(self) -> float | None:
        """The mean so far, None before the first value."""
        stats = self._window.stats()
        return None if stats is None else stats.mean


def _require_metrics(metrics: Mapping[str, Any]) -> None:
    if not isinstance(metrics, Mapping):
        raise MetricError(f"collect_metrics({metrics!r}): give a mapping of names to values, or keywords")
    for name in metrics:
        if not isinstance(name, str) or not name:
            raise MetricError(f"metric name {name!r}: give a text, not empty")


def _no_batch(name: str) -> DataError:
    return DataError(
        f"stream {name!r} gave no batch in a whole pass; give it data (or is it an iterator used up?)"
    )


def _with_best(watch: str | tuple[str, str] | None, services: list[Service]) -> list[Service]:
    """The services, with the `Best` of the watched metric before every other `Best`."""
    bests = [service for service in services if isinstance(service, Best)]
    if watch is None:
        return services if bests else [*services, _default_best(services)]
    if isinstance(watch, str):
        metric, mode = watch, None
    elif isinstance(watch, tuple) and len(watch) == 2:
        metric, mode = watch
    else:
        raise ConfigError(f'watch={watch!r}: give a name, or a pair as in watch=("valid_acc", "max")')
    found = next((best for best in bests if best.metric == metric), None)
    if found is None:
        direction(metric, mode, f'give watch=("{metric}", "min") or "max"')
        found = Best(metric, mode)
    elif mode not in (None, found.mode):
        raise ConfigError(f"watch={watch!r} and {found!r} with mode={found.mode!r}: give one of the two")
    return [found, *(service for service in services if service is not found)]


def _default_best(services: Sequence[Service]) -> Best:
    """Marks the best value of the metric that stops the run, or of "valid_loss" if it comes."""
    stopper = next((s for s in services if isinstance(s, EarlyStop)), None)
    metric, mode = ("valid_loss", None) if stopper is None else (stopper.metric, stopper.mode)
    best = Best(metric, mode, save=False)
    best.watches = ()  # nobody asked for it
    return best
