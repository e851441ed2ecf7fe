"""`Supervisor`: process-level care for any loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from everstep.contracts.services import SCHEDULED, Moment, ServiceFunction
from everstep.errors import ConfigError, ProgressError, UsageError, nearest
from everstep.keywords import checked_keywords, number, plain, whole
from everstep.metrics.collector import to_scalar
from everstep.schedule import Schedule
from everstep.services.function import FunctionService
from everstep.services.witness import Witness
from everstep.supervisor.engine import Run
from everstep.supervisor.progress import StopRecord
from everstep.supervisor.streams import Endless, StreamSlot
from everstep.supervisor.threads import PeriodicThread


class Handle:
    """What `on` returns: `remove()` ends the registration."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Do not call the function any more.  May be called twice."""
        if self._remove is not None:
            self._remove()
            self._remove = None


class Supervisor(Run):
    """Keeps any loop safe: lock, recovery, checkpoints, signals, services, a record, an ending.

        with Supervisor("runs/x", state={"model": model, "optimizer": optimizer}) as sv:
            batches = sv.stream(train)
            while not sv.should_stop():
                sv.advance(loss=train_step(next(batches)))

    Run twice, it resumes.  Carries on TensorFlow's Supervisor and MonitoredSession.

    Args:
        run_dir: the run's directory, made if needed.
        state: name to object, or pairs of them: everything that must survive.  Models, optimizers,
            schedulers, scalers, anything with state_dict/load_state_dict, arrays, dictionaries of
            JSON values, random generators, `Slot`.
        services: what else happens around steps, beyond the default ones.
        seed: of the run; drawn and recorded if None.  Given, it also seeds the global generators of
            Python, NumPy and the framework at a fresh start.
        max_step: total number of steps of the run, 1 or more; None for no limit.
        max_time: seconds for this start of the process; then the run is interrupted, exit status 3.
        resume: True: go on where the run stands; a step, a checkpoint's name or path: from there;
            False: start over (what was there moves to `superseded/`).
        init_from: a checkpoint to take weights from where the run has none of its own.
        init_fn: called only when there is nothing to recover.
        local_init_fn: called at every start.
        ready: says what is not ready: None, True or nothing if all is, else a message or a list of
            names.  Asked before and after `local_init_fn`.
        default_services: False leaves out the console and the NaN guard.
        on_change: where the stored `config`, the configuration of a controller, the seed, or what the data
            is (kind, length, batch size, order) differs from what is given: "error" shows both and
            refuses, "override" goes on with what is given; a pass that was open over other data begins
            anew.
        on_divergence: where steps that are executed again find something else than the first time: "stop" or
            "warn"; None: other batches stop the run, other numbers are a warning.  It is a mark of the run
            in any case.
        config: what the run is configured with, a dictionary of JSON values, such as the arguments of the
            command line: recorded (queries find it as config.NAME) and compared at a resume.
        lock: False where the file system has no locks and you are sure that nobody else runs this.
        clock: monotonic seconds; for tests.  One of your own is asked after each step, so what is due by
            it runs at the very step, without a thread.

    Raises:
        ConfigError: an argument is out of range, unknown or contradicts another.
        StateError: a state entry cannot be saved.
    """

    _reads_no_data = False
    """Said by the program, with `stream(None)`."""

    _moments = Run._moments | {
        Moment.BEFORE_STEP,
        Moment.AFTER_STEP,
        Moment.METRICS_COLLECTED,
        Moment.SUMMARY_ADDED,
    }
    _begun_step = 0
    """The newest step that was announced."""

    # ------------------------------------------------------------------------------ the user's

    def should_stop(self) -> bool:
        """Whether the loop is to end.  Its first call is where the run begins, or goes on.

        Raises:
            ProgressError: the loop does not get anywhere: in one step it asked 100 times while an optimizer
                of the state made updates, 1,000 times with a batch drawn each time, or 100,000 times
                without waiting between.
            Interrupted: a signal has come to a loop that does not get anywhere.
        """
        self._require_open("should_stop")
        if not self._begun:
            if not self._endless and not self._reads_no_data:
                self._warn(
                    "no stream is registered, so no data position is saved; take the batches from "
                    "sv.stream(data) if the loop reads data, or say sv.stream(None) if it reads none"
                )
            self._streams.require_bound()
            self._begin_loop()
        for endless in self._endless:
            endless.look_ahead()
        if self._progress.stop is not None:
            return True
        self._count_round()
        if self._synchronous and not self._endless:
            self._begin_step(None)
        return False

    def _begin_step(self, batch: Any) -> None:
        """Announce the step that comes: with its first batch; without data, where the loop goes on."""
        if self._begun_step <= self._progress.step:
            self._begun_step = self._progress.step + 1
            self._announce(Moment.BEFORE_STEP, batch)

    def _handed_out(self, slot: StreamSlot, batch: Any) -> None:
        """A stream gives a batch to the program."""
        self._verifier.drew(self._progress.step + 1, slot.name, slot.pass_index, batch)
        self._batches[slot.name] = batch
        self._step_data = batch if len(self._endless) == 1 else self._batches
        if self._synchronous:
            self._begin_step(self._step_data)

    _never_done = "sv.advance() was not called"
    _to_be_done = "call it at the end of each step: while not sv.should_stop(): ...; sv.advance()"

    def _count_round(self) -> None:
        """Notice a loop that asks and never gets anywhere; a signal ends it at the last checkpoint."""
        current = self._progress
        spent_on = self._rounds.asked((current.step, current.epoch))
        if spent_on is not None:
            rounds = f"{self._rounds.count:,} rounds of the loop"
            raise ProgressError(f"{self._never_done} in {rounds}, {spent_on}; {self._to_be_done}")
        if self._signals.received is not None and self._rounds.in_vain and not self._open_step:
            self._notice_signal()
            assert self._interruption is not None
            self.println(
                f"no step was completed after step {current.step}: what the loop did since is not saved"
            )
            self._leave(self._interruption)

    def advance(self, **metrics: Any) -> None:
        """A step is complete; every batch handed out so far is finished.

        Args:
            metrics: one real number each; a tensor stays on its device until somebody reads it.

        Raises:
            Interrupted: a signal, or the time budget; the state is saved.
            UsageError: before the first `should_stop()`, or after the step at which the loop was to end.
            MetricError: a value is not one real number.
        """
        if self._phase != "open" or not self._begun:
            self._require_begun()
        if self._progress.stop is not None:
            self._require_goes_on(self._progress.stop)
        if self._synchronous:
            self._begin_step(self._step_data)  # where the step drew no batch
        if metrics:
            self._collect(self._progress.step + 1, metrics)
        self._drawn = sum(endless.drawn for endless in self._endless)
        self._complete_step()
        self._batches, self._step_data = {}, None

    def _collect(self, step: int, given: Mapping[str, Any]) -> None:
        """Take what a step has for the record, and for those who look at it."""
        metrics = self._taken_out(step, given) if self._looked_at else given
        self._collector.pending.extend([(step, n, to_scalar(n, v)) for n, v in metrics.items()])
        if self._synchronous:
            self._announce(Moment.METRICS_COLLECTED, given)

    @checked_keywords
    def stream(self, data: Any, name: str = "train", *, passes: int | None = None) -> Iterator[Any]:
        """Endless batches of `data`, pass after pass; their position is part of the state.

        Args:
            data: a stream, a DataLoader, anything iterable (see `everstep.data`).  None says that the
                loop reads no data, or keeps its place in it by itself, in `state`.
            name: unique in the run.
            passes: stop the run after so many passes; None: never.

        Raises:
            ConfigError: the name is taken, or `passes` is not positive.
        """
        self._require_open("stream")
        if data is None:
            self._reads_no_data = True
            return _no_batches()
        passes = whole("passes", passes, none="for no limit")
        if self._streams.bound(name):
            raise ConfigError(f'stream {name!r} is in use; give this data another name, as in name="{name}2"')
        slot = self._streams.bind(data, name)
        self._passes_changed(slot, passes)
        endless = Endless(
            slot,
            passes,
            self._require_begun,
            lambda: self._stream_ended(name, passes or 0),
            self._clock,
            self._handed_out,
            lambda pass_index: self._verifier.pass_ended(self._progress.step, name, pass_index),
        )
        self._endless.append(endless)
        witness = self._board.find(Witness)
        return endless if witness is None else witness.watching(name, endless)

    def _passes_changed(self, slot: StreamSlot, passes: int | None) -> None:
        """A run that had used up this stream's passes goes on where there are more now."""
        stop = self._progress.stop
        more = passes is None or slot.pass_index + slot.in_pass < passes
        if more and stop is not None and (stop.kind, stop.by) == ("stream", slot.name):
            self._progress.stop = None
            self.println(f"stream {slot.name!r} has more passes now: the run goes on")

    def _require_goes_on(self, stop: StopRecord) -> None:
        """The step in which a stop was requested is completed; none is where a boundary decided it."""
        if stop.kind not in ("request", "stream"):
            raise UsageError(
                f"advance() after the loop was to end ({stop.reason}); ask before each step: "
                "while not sv.should_stop()"
            )

    @checked_keywords
    def request_stop(self, reason: str = "request_stop() was called") -> None:
        """End the loop's iterators.  What follows them runs, and the run is finished.

        Raises:
            UsageError: outside the `with` block.
        """
        self._require_open("request_stop")
        self._decide_stop(reason, "request")

    def make_checkpoint(self) -> None:
        """Save at the next boundary: the end of this step, or of this epoch."""
        self._require_open("make_checkpoint")
        self._save_asked = True
        self._wake()

    def add_summary(self, summary: Any) -> None:
        """Hand a summary (image, text, histogram ...) to the services that asked for SUMMARY_ADDED."""
        self._require_open("add_summary")
        self._announce(Moment.SUMMARY_ADDED, summary)

    @checked_keywords
    def loop(self, seconds: float, fn: Callable[[], object]) -> None:
        """Run `fn` in a thread of its own every `seconds` until the loop ends, first at once.

        An exception in it ends the training at the next boundary, with its original traceback.

        Args:
            seconds: 0 or more; 0 runs it back to back.
            fn: called without arguments; must not touch the state.
        """
        self._require_open("loop")
        seconds = number("seconds", seconds, zero=True)
        self._threads.append(PeriodicThread(seconds, fn, self._report_error))

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """For threads of your own: an exception in the block ends the training, and is raised there."""
        try:
            yield
        except Exception as error:
            self._report_error(error)

    @checked_keywords
    def on(self, moment: Moment, fn: ServiceFunction, every: Schedule | int | None = None) -> Handle:
        """Call `fn(boundary)` at a moment.

        Args:
            moment: a member of `everstep.Moment`, or its name.
            every: for AFTER_STEP and AFTER_EPOCH: a schedule, or n for every n of them.

        Returns:
            A handle with `.remove()`.

        Raises:
            ConfigError: no such moment (names the nearest), one that never comes in this loop, or `every`
                where it has no meaning.
            UsageError: the loop has ended.
        """
        if self._phase == "closed":
            raise UsageError("on(...) after the loop has ended; register it before or inside the with block")
        if not isinstance(moment, Moment):
            names = {m.name: m for m in Moment} | {m.value: m for m in Moment}
            if moment not in names:
                raise ConfigError(f"no moment {moment!r}; {nearest(str(moment), [m.name for m in Moment])}")
            moment = names[moment]
        every = plain(every)
        if every is not None and moment not in SCHEDULED:
            raise ConfigError(f"{moment.name} happens when it happens; leave out every={every!r}")
        self._require_moments([moment], "on()")
        self._registered += 1
        service = FunctionService(moment, fn, every, f"on {moment.value} {self._registered}")
        self._board.add(service)
        if self._phase == "open":
            self._board.open_one(service, self, self._clock())
        self._services_changed()

        def remove() -> None:
            self._board.remove(service)
            self._services_changed()

        return Handle(remove)


def _no_batches() -> Iterator[Any]:
    raise UsageError(
        "a batch was asked of stream(None), which says that the loop reads no data; give it data"
    )
    yield
