"""The part of every loop that users and services call: facts, messages, stops, saves, registrations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from everstep.arguments import checked_keywords, number, plain
from everstep.contracts.services import SCHEDULED, Action, Interrupt, Moment, Save, ServiceFunction, Stop
from everstep.errors import ConfigError, UsageError, nearest
from everstep.record import misfit
from everstep.schedule import Schedule
from everstep.services.judges import FunctionService
from everstep.supervisor.engine import Engine
from everstep.supervisor.leaving.exit import BestRecord, Ending, Exit, best_record
from everstep.supervisor.settings import LoopDriver


class Handle:
    """Registration of a function, made by `on`; `remove()` ends it."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """End the registration; a second call does nothing."""
        self._remove()


class RunView:
    """The loop as a service sees it: facts to read, ways to speak, and a few requests."""

    _engine: Engine

    @property
    def run_dir(self) -> Path:
        """The run's directory, as an absolute path."""
        return self._engine.settings.path

    @property
    def segment(self) -> int:
        """Number of this start, from 1; 0 before the loop is entered."""
        return self._engine.segment

    @property
    def step(self) -> int:
        """Number of the step whose body is running, else of the last completed one; from 0."""
        return self._engine.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 1; 0 before the first, and in a loop without epochs."""
        return self._engine.progress.epoch

    @property
    def max_step(self) -> int | None:
        """The limit of `step`; may be set while running."""
        return self._engine.limits.max_step

    @max_step.setter
    def max_step(self, value: int | None) -> None:
        self._engine.set_limit("max_step", value)

    @property
    def max_epoch(self) -> int | None:
        """The limit of `epoch`; a Supervisor has none."""
        return self._engine.limits.max_epoch

    @property
    def rank(self) -> int:
        """Number of this process among those that train together, from 0; the writer is rank 0."""
        return self._engine.ranks.group.rank

    @property
    def ranks(self) -> int:
        """Number of processes that train together, 1 or more; known once the loop is entered."""
        return self._engine.ranks.group.size

    @property
    def interrupted(self) -> bool:
        """Whether a signal asks the run to end at the next boundary; a service that waits looks here."""
        self._engine.polls += 1
        return self._engine.ranks.signal is not None

    @property
    def tainted(self) -> bool:
        """Whether a guard has found the state bad, so that it is not saved."""
        return self._engine.user.tainted

    def live_object(self, entry: str) -> Any:
        """Return the live object of a state entry, to look at.

        Raises:
            ConfigError: no entry has that name; names the nearest.
        """
        objects = self._engine.user.objects
        if entry not in objects:
            raise ConfigError(f"no state entry is named {entry!r}; {nearest(entry, objects)}")
        return objects[entry]

    def get_progress(self) -> float | None:
        """The part of the run that is done, 0 to 1; None if it is unbounded."""
        return self._engine.loop.get_progress()

    def get_rate(self) -> float | None:
        """Steps per second of training over the recent time; None before the first step."""
        return self._engine.estimator.rate()

    def get_eta(self) -> float | None:
        """Seconds to the end by the recent rate, evaluation included; None if unknown."""
        return self._engine.estimator.eta(self._engine.progress.step, self.get_progress())

    def clock(self) -> float:
        """Monotonic seconds."""
        return self._engine.clock()

    def spent(self) -> dict[str, float]:
        """Seconds of this start by part; their sum is its time.

        "data" (waiting for batches to train on), "evaluation" (`evaluation()`, a Trainer's evaluations),
        "services" (all else at boundaries and before epochs), "step" (the program's lines, and the device).
        """
        return self._engine.spent.parts(self._engine.loop.data_wait())

    def println(self, message: str, with_tag: bool = False, shorten: bool = False) -> None:
        """Print a line, above the live line and into the run's log.

        Args:
            with_tag: whether the line begins with epoch, step and ETA.
            shorten: whether a terminal leaves out the last of the line's parts, which "; " divides, if the
                line is longer than the terminal is wide.  Elsewhere, and in the log, the line is whole.
        """
        message = f"{self._engine.loop.tag()} {message}" if with_tag else message
        self._engine.voice.say(message, shorten)

    def call_soon(self, action: Action) -> None:
        """Apply `action` at the next boundary; may be called from any thread.

        Raises:
            UsageError: not a `Stop`, `Interrupt` or `Save`, or the loop has ended.
        """
        if not isinstance(action, Stop | Interrupt | Save):
            raise UsageError(f"call_soon({action!r}): give Stop(...), Interrupt(...) or Save()")
        if self._engine.status == "closed":
            raise UsageError(f"call_soon({action!r}): the loop has ended; call it inside its with block")
        # the action first: a boundary that is woken must find it
        self._engine.wakeups.actions.append((None, action))
        self._engine.wakeups.wish()

    def watch(self, metric: str, seen: Callable[[float], None]) -> None:
        """Call `seen` with each value of `metric` collected outside steps, at once."""
        self._engine.collector.watch(metric, seen)

    def flush(self) -> object:
        """Hand every row and event so far to the journal's file."""
        return self._engine.recording.flush()

    def note(self, kind: str, data: dict[str, Any], wall: bool = False) -> None:
        """Add an event to the journal; `data` is JSON.  `wall`: it depends on the clock or on the start.

        Raises:
            JournalError: `data` is not JSON.
            ConfigError: the kind is one of everstep's, and `data` does not have its fields.
        """
        if wrong := misfit(kind, data):
            raise ConfigError(f"an event of kind {kind!r} has other fields: {wrong}; give another kind")
        self._engine.journal.event(kind, data, wall)

    def listen(self, heard: Callable[[str, Mapping[str, Any]], None]) -> None:
        """Call `heard` with kind and data of each event of the journal, in the thread that adds it."""
        self._engine.journal.listeners.append(heard)


class Door(RunView):
    """Base class of `Supervisor` and `TrainLoop`: what the program calls."""

    def __init__(self, engine: Engine, loop: LoopDriver) -> None:
        self._engine = engine
        engine.view, engine.loop = self, loop
        self._registered = 0

    def __enter__(self) -> Self:
        self._process = os.getpid()
        self._engine.enter()
        if self._engine.user.task is None and self._engine.ranks.group.writer:
            self._engine.variables.find_opener()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # a child that a step has forked: run, threads and signals are not its own
        if os.getpid() != self._process:
            return False
        return Exit(self._engine).leave(error)

    @property
    def updates(self) -> int:
        """Optimizer updates that really happened."""
        return self._engine.user.updates

    @property
    def seed(self) -> int:
        """The run's seed, given or drawn; a drawn seed is known once the loop is entered."""
        if self._engine.settings.seed is None:
            self._engine.require_entered("seed")
        return self._engine.progress.seed

    @property
    def resumed(self) -> bool:
        """Whether this start continues from a checkpoint; known once the loop is entered."""
        self._engine.require_entered("resumed")
        return self._engine.recovered.checkpoint is not None

    @property
    def data_rank(self) -> int:
        """Number of the part of each batch that this process reads, from 0; `rank` without `data_ranks=`."""
        return self._engine.ranks.group.data_rank

    @property
    def data_ranks(self) -> int:
        """Number of parts into which each batch is divided; known once the loop is entered."""
        return self._engine.ranks.group.data.size

    @property
    def batch_weight(self) -> float:
        """Factor for the loss of the step's batch, so that the mean over ranks is the mean over the batch.

        1.0 on one process, and wherever the number of ranks divides the batch.
        """
        return self._engine.streams.weight

    @property
    def best(self) -> BestRecord | None:
        """The best of the first `Best` service; None if there is none yet."""
        return best_record(self._engine)

    @property
    def ending(self) -> Ending:
        """The ending of this start.

        Raises:
            UsageError: the start has not ended.
        """
        ending = self._engine.ending
        if ending is None:
            raise UsageError("the loop has not ended; .ending is there after the with block")
        return ending

    @checked_keywords
    def request_stop(self, reason: str = "request_stop() was called") -> None:
        """End the loop's iterators; the lines after them run, and the run is finished.

        Raises:
            UsageError: outside the `with` block.
        """
        self._engine.require_open("request_stop")
        self._engine.decisions.stop(reason, "request")

    def make_checkpoint(self) -> None:
        """Save at the next boundary: the end of this step, or of this epoch."""
        self._engine.require_open("make_checkpoint")
        self._engine.saver.save_due = True
        self._engine.wakeups.wake()

    def add_summary(self, summary: Any) -> None:
        """Hand a summary (image, text, histogram ...) to the services that asked for SUMMARY_ADDED."""
        self._engine.require_open("add_summary")
        self._engine.board.announce(Moment.SUMMARY_ADDED, summary)

    @checked_keywords
    def loop(self, seconds: float, fn: Callable[[], object]) -> None:
        """Run `fn` in a thread of its own every `seconds` until the loop ends, first at once.

        An exception in `fn` ends the training at the next boundary, with its original traceback.

        Args:
            seconds: 0 or more; 0 runs it back to back.
            fn: called without arguments; must not touch the state.
        """
        self._engine.require_open("loop")
        self._engine.threads.start(number("seconds", seconds, zero=True), fn)

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Pass an exception of the block, in a thread of your own, to the training, which ends with it."""
        try:
            yield
        except Exception as error:
            self._engine.wakeups.fail(error)

    @checked_keywords
    def on(self, moment: Moment, fn: ServiceFunction, every: Schedule | int | None = None) -> Handle:
        """Call `fn(boundary)` at a moment.

        Args:
            moment: a member of `everstep.services.Moment`, or its name.
            every: for AFTER_STEP and AFTER_EPOCH: a schedule, or n for every n steps or epochs.

        Returns:
            A handle with `.remove()`.

        Raises:
            ConfigError: an unknown moment (names the nearest), a moment that never comes in this loop, or
                `every` at a moment without a schedule.
            UsageError: the loop has ended.
        """
        engine = self._engine
        if engine.status == "closed":
            raise UsageError("on(...) after the loop has ended; register it before or inside the with block")
        moment = _moment(moment)
        every = plain(every)
        if every is not None and moment not in SCHEDULED:
            raise ConfigError(f"{moment.name} has no schedule; leave out every={every!r}")
        engine.kind.require([moment], "on()")
        self._registered += 1
        service = FunctionService(moment, fn, every, f"on {moment.value} {self._registered}")
        engine.board.add(service)
        if engine.status == "open":
            engine.board.open_one(service, self, engine.ranks.now())
        engine.services_changed()

        def remove() -> None:
            if service in engine.board:
                engine.board.remove(service)
                engine.services_changed()

        return Handle(remove)


def _moment(moment: Any) -> Moment:
    if isinstance(moment, Moment):
        return moment
    names = {m.name: m for m in Moment} | {m.value: m for m in Moment}
    if moment not in names:
        raise ConfigError(f"no moment {moment!r}; {nearest(str(moment), [m.name for m in Moment])}")
    return names[moment]
