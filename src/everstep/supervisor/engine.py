"""The engine under every door: entry, the step, the boundary, saving, the exit."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from everstep import hazard
from everstep.checkpoint import CheckpointName, Phase
from everstep.contracts.metrics import Block
from everstep.contracts.services import (
    OBSERVED,
    SCHEDULED,
    SYNCHRONOUS,
    Action,
    Boundary,
    Clock,
    Interrupt,
    Moment,
    Save,
    SaveBest,
    Service,
    SetValue,
    Stage,
    Stop,
)
from everstep.durable import remedy
from everstep.errors import (
    BadStepError,
    CheckpointError,
    ConfigError,
    GuardStop,
    Interrupted,
    NonFiniteError,
    NotResumableError,
    ProgressError,
    RolledBack,
    ServiceError,
    StateError,
    UsageError,
    nearest,
)
from everstep.keywords import checked_keywords, number, plain, whole
from everstep.metrics.collector import Collector, is_scalar
from everstep.progress_estimate import Estimator, progress
from everstep.record import CHOSEN, Position, located, user_path
from everstep.redaction import redacted, without_credentials
from everstep.schedule import NEVER, Every, Instant, Schedule
from everstep.services.best import Best
from everstep.services.checkpoints import Checkpoints
from everstep.services.console import Console
from everstep.services.index import Index
from everstep.services.nan_guard import NaNGuard
from everstep.services.record import Record
from everstep.services.recovery import Recovery
from everstep.services.retry import Retry
from everstep.services.stop_after import StopAfter
from everstep.services.witness import Witness, witnesses
from everstep.state import Encoded, decode, encode, restore
from everstep.supervisor.board import ServiceBoard, listed
from everstep.supervisor.configuration import Configuration
from everstep.supervisor.ending import BestRecord, Ending
from everstep.supervisor.init_from import InitFrom
from everstep.supervisor.lines import Lines
from everstep.supervisor.opening import Opening, Recovered, Start
from everstep.supervisor.processes import require_one
from everstep.supervisor.progress import Progress, StopRecord
from everstep.supervisor.restoring_best import restore_best
from everstep.supervisor.retrying import Retries
from everstep.supervisor.rolling_back import Rollbacks
from everstep.supervisor.rounds import Rounds, Work
from everstep.supervisor.saving import Saver, Snapshot
from everstep.supervisor.signals import SignalWatch, describe, leaving
from everstep.supervisor.spent import Spent
from everstep.supervisor.streams import Endless
from everstep.supervisor.threads import PeriodicThread, Ticker
from everstep.supervisor.tree import reading, whole_tree
from everstep.supervisor.trials import Trials
from everstep.supervisor.user_state import UserState
from everstep.supervisor.verifying import OnDivergence, Verifier
from everstep.supervisor.watched import WatchedMetrics

GRACE = 120.0
"""Seconds that a periodic function may take to end after the loop, as in TensorFlow's Supervisor."""


_LOOKS = 16
"""Steps of a start after which modules outside the state are looked at: an average changes now and then."""
_DOORS = dict.fromkeys(Moment, "a TrainLoop and a Trainer have it") | {
    Moment.AFTER_EVAL_STEP: "a Trainer, which evaluates by the task's eval_step, has it"
}
"""Where moments come that not every loop has."""


class Abandoned(BaseException):
    """An evaluation is left for an interruption; its boundary stays open, for the resume to go on with."""


class Run:
    """One start of a run, from entry to ending.  The only place where a step advances.

    It has what every run tells of itself (`step`, `best`, `ending` ...), `println`, and what services see
    as `RunView`; `Supervisor` adds what a loop of the user's calls, `TrainLoop` the loops themselves.
    Arguments: see `Supervisor`.
    """

    _moments = frozenset({Moment.ENTER_LOOP, Moment.AFTER_CHECKPOINT, Moment.EXIT_LOOP})
    """Those that come in this loop."""
    _goes_back_itself = False
    """Whether a rollback goes on in this process, with the same data."""

    @checked_keywords
    def __init__(
        self,
        run_dir: str | Path,
        state: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
        *,
        services: Iterable[Service] = (),
        seed: int | None = None,
        max_step: int | None = None,
        max_time: float | None = None,
        resume: bool | int | str | Path = True,
        init_from: str | Path | InitFrom | None = None,
        init_fn: Callable[[], object] | None = None,
        local_init_fn: Callable[[], object] | None = None,
        ready: Callable[[], object] | None = None,
        default_services: bool = True,
        on_change: Literal["error", "override"] = "error",
        on_divergence: OnDivergence = None,
        config: Mapping[str, Any] | Configuration | None = None,
        lock: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        self._max_step = whole("max_step", max_step, none="for no limit")
        seed = whole("seed", seed, 0, none="to draw one")
        max_time = number("max_time", max_time, of="seconds", none="for no limit")
        resume = plain(resume)
        if not isinstance(resume, bool | int | str | Path):
            raise ConfigError(f"resume={resume!r}: give True, False, a step, a checkpoint's name or a path")
        services = listed(services)
        if sum(isinstance(service, Best) and service.restore_at_end for service in services) > 1:
            raise ConfigError("two Best services have restore_at_end=True; give it to one of them")
        if sum(isinstance(service, Checkpoints) for service in services) > 1:
            raise ConfigError(
                "two Checkpoints services: a run has one; it takes both schedules and all rules, as in "
                "Checkpoints(Every(epochs=1) | Every(steps=500), keep_last=3, keep_every=Every(epochs=10))"
            )
        if on_change not in ("error", "override"):
            raise ConfigError(f'on_change={on_change!r}: give "error" or "override"')
        if on_divergence not in ("stop", "warn", None):
            raise ConfigError(
                f'on_divergence={on_divergence!r}: give "stop" or "warn", or leave it out: then other '
                "batches stop the run, and other numbers are a warning"
            )
        self._on_divergence = on_divergence
        self._start = Start(
            path=located(user_path(run_dir, "run_dir")),
            seed=seed,
            resume=resume,
            init_from=InitFrom.of(init_from),
            init_fn=init_fn,
            local_init_fn=local_init_fn,
            ready=ready,
            on_change=on_change,
            lock=lock,
            config=Configuration.of(config),
        )
        self.run_dir = self._start.path
        self.segment = 0
        self._clock = clock
        self._phase: Literal["new", "open", "closed"] = "new"
        self._user = UserState(state)
        for service in services:
            if isinstance(service, Best):
                self._user.require_entries(f"restore_at_end= of {service.name!r}", service.part or ())
        self._progress = Progress(seed=seed or 0)
        self._recovered = Recovered(self._progress)
        self._open_step = 0
        self._step_data: Any = None
        """The batch of the open step, or of the last one."""
        self._batches: dict[str, Any] = {}
        """By stream, what the open step has drawn from a Supervisor's."""
        self._next_due = self._due_step = 0
        """The first step after which there is something to ask; after which a boundary is due by number."""
        self._looks_left = _LOOKS
        """Steps after which modules outside the state are still looked at."""
        self._due_time: float | None = None
        """The clock's time at which one is due."""
        self._collector = Collector(self._record_rows, lambda: self._open_step, lambda: self._progress.epoch)
        self._board = ServiceBoard(self._collector, self._warn)
        self._add_services(list(services), default_services, max_time)
        self._synchronous: set[Moment] = set()
        """Those that somebody asked for; the others cost nothing."""
        self._looked_at: set[str] = set()
        """The outputs of steps that services look at."""
        self._outputs: dict[str, Any] = {}
        self._outputs_of = 0
        """Those of the newest step that had any, and which it is."""
        self._estimator = Estimator(clock)
        self._ticker = Ticker(clock, self._wake)
        self._signals = SignalWatch(self._wake)
        self._threads: list[PeriodicThread] = []
        self._endless: list[Endless] = []
        self._drawn = 0
        self._registered = 0
        self._warnings: list[str] = []
        self._unsaid: list[str] = []
        self._woken = False
        self._begun = False
        self._tainted = False
        self._save_asked = False
        self._trial_open = False
        self._interruption: Interrupt | None = None
        self._may_abandon = False
        """Whether an evaluation runs that an interruption may end."""
        self._rest: list[str] = []
        """The services that a boundary which an interruption leaves open has still to run."""
        self._error: BaseException | None = None
        self._soon: deque[tuple[Service | None, Action]] = deque()  # threads append
        self._snapshot: Snapshot | None = None
        """The last one taken, at a boundary or where an epoch's steps ended; in the kept buffers."""
        self._reserved = False
        self._kept_only = False
        """Whether it was not handed to the writer."""
        self._last_values: dict[str, float] = {}
        """Of each metric the newest outside steps, the means of epochs included; without epochs, of all."""
        self._last_steps: dict[str, int] = {}
        """Of which step each of them is."""
        self._watched = WatchedMetrics(self._board, self._warn)
        self._flushed = (0, 0)
        """The step and epoch that the journal was told last."""
        self._targets: set[str] = set()
        """What services have set."""
        self._resume_state: Encoded | None = None
        """As of entry, until the resume point is reached."""
        self._restored: BestRecord | None = None
        """The best weights that the objects were given at the end."""
        self._spent = Spent(clock)
        self._ending: Ending | None = None

    def _add_services(self, given: list[Service], defaults: bool, max_time: float | None) -> None:
        services: list[Service] = list(given)

        def lacks(kind: type[Service]) -> bool:
            return not any(isinstance(service, kind) for service in services)

        if max_time is not None:
            services.append(StopAfter(seconds=max_time, name="max_time"))
        if defaults:
            services += [kind() for kind in (NaNGuard, Console) if lacks(kind)]
        if lacks(Checkpoints):
            services.append(Checkpoints())
        if lacks(Index):
            services.append(Index())
        for service in services:
            if isinstance(service, Service):  # the board refuses what is none
                self._require_moments(service.moments, f"service {service.name!r}", service.schedule)
        services += witnesses(lambda: self._user.save()["user"])
        for service in (*services, Record(self._flush)):
            self._board.add(service)

    def _require_moments(self, wanted: Iterable[Moment], who: str, every: Schedule | None = None) -> None:
        """Refuse what would never happen behind this door.

        Args:
            who: asks for them.
            every: when it is to run after steps and epochs, if it is.

        Raises:
            ConfigError: names the moment, and the doors that have it.
        """
        wanted = frozenset(wanted)
        missing = wanted - self._moments
        if Moment.AFTER_STEP in wanted:
            missing -= {Moment.AFTER_EPOCH}  # a schedule's own choice
            if Moment.AFTER_EPOCH not in self._moments and isinstance(every, Every) and every.epochs:
                raise ConfigError(
                    f"{who} is due Every(epochs={every.epochs}), and a {type(self).__name__} has no epochs; "
                    "give every=Every(steps=...), or take a TrainLoop"
                )
        for moment in sorted(missing, key=lambda each: each.value):
            raise ConfigError(
                f"{who} asks for {moment.name}, which never comes in a {type(self).__name__}: "
                f"{_DOORS[moment]}"
            )

    # ------------------------------------------------------------------------------ what it is

    @property
    def step(self) -> int:
        """Number of the step whose body is running, else of the last completed one; from 0."""
        return self._open_step or self._progress.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 1; 0 before the first, and in a loop without epochs."""
        return self._progress.epoch

    @property
    def updates(self) -> int:
        """Optimizer updates that really happened."""
        return self._user.updates

    @property
    def seed(self) -> int:
        """The run's seed, given or drawn; one that was not given is known once the loop is entered."""
        if self._start.seed is None:
            self._require_entered("seed")
        return self._progress.seed

    @property
    def max_step(self) -> int | None:
        """The limit of `step`; may be set while running."""
        return self._max_step

    @max_step.setter
    def max_step(self, value: int | None) -> None:
        self._max_step = whole("max_step", value, none="for no limit")
        self._limits_changed()

    @property
    def max_epoch(self) -> int | None:
        """The limit of `epoch`; a Supervisor has none."""
        return None

    @property
    def resumed(self) -> bool:
        """Whether this start went on from a checkpoint; known once the loop is entered."""
        self._require_entered("resumed")
        return self._recovered.checkpoint is not None

    @property
    def interrupted(self) -> bool:
        """Whether a signal asks the run to end; it does at the next boundary."""
        return self._signals.received is not None

    @property
    def tainted(self) -> bool:
        """Whether a guard has found the state bad: it is not saved."""
        return self._tainted

    def live_object(self, entry: str) -> Any:
        """The live object of a state entry, to look at.

        Raises:
            ConfigError: there is no such entry; names the nearest.
        """
        if entry not in self._user.objects:
            raise ConfigError(f"no state entry is named {entry!r}; {nearest(entry, self._user.objects)}")
        return self._user.objects[entry]

    @property
    def best(self) -> BestRecord | None:
        """The best of the first `Best` service; None if there is none yet."""
        service = self._board.find(Best)
        return None if service is None else self._best_record(service)

    def _best_record(self, service: Best) -> BestRecord | None:
        if service.value is None:
            return None
        folder = self._opening.store.best_folder(service.metric) / (service.saved_as or "")
        path = str(folder) if service.saved_as is not None and folder.exists() else None
        return BestRecord(service.metric, service.value, service.step, service.epoch, path)

    @property
    def ending(self) -> Ending:
        """How this start ended.

        Raises:
            UsageError: it has not.
        """
        if self._ending is None:
            raise UsageError("the loop has not ended; .ending is there after the with block")
        return self._ending

    def get_progress(self) -> float | None:
        """The part of the run that is done, 0 to 1; None if it is unbounded."""
        return progress(self._progress.step, self.epoch, self.max_step, self.max_epoch)

    def get_eta(self) -> float | None:
        """Seconds to the end by the recent rate, evaluation included; None if that cannot be told."""
        return self._estimator.eta(self._progress.step, self.get_progress())

    def _require_entered(self, what: str) -> None:
        if self._phase == "new":
            raise UsageError(f".{what} is not known before the loop is entered; ask inside its with block")

    def clock(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def spent(self) -> dict[str, float]:
        """Seconds of this start by part: "data", "step", "evaluation", "services"; together, all of them."""
        return self._spent.parts(self._data_wait())

    def _data_wait(self) -> float:
        """Seconds that this start has waited for batches."""
        return sum(endless.waited for endless in self._endless)

    # ----------------------------------------------------------------------------------- entry

    def __enter__(self) -> Self:
        if self._phase != "new":
            raise UsageError(f"this {type(self).__name__} was entered before; make a new one to run again")
        require_one()
        try:
            with ExitStack() as stack:
                stack.callback(self._mark_closed)  # if it fails to open
                self._open(stack)
                self._fire(Moment.ENTER_LOOP)
                if self._recovered.checkpoint is not None:
                    self._fire(Moment.AFTER_CHECKPOINT, self._recovered.checkpoint)
                self._resources = stack.pop_all()
        finally:
            self._say_unsaid()
        return self

    def _mark_closed(self) -> None:
        self._phase = "closed"

    def _open(self, stack: ExitStack) -> None:
        """Take what is needed, in this order; given back in the reverse, also if a later one fails."""
        self._opening = opening = Opening(self._start, self.println, self._warn, stack)
        self._signals.install()
        stack.callback(self._signals.restore)
        stack.callback(self._ticker.close)
        self._user.open(stack)
        self._user.require_whole()
        self._recovered = recovered = opening.recover(self._user, self._board, self._limits())
        self.segment = opening.segment
        for target in (target for service in self._board for target in service.sets):
            self._user.numbers(target)  # which refuses what is not there
        self._progress = recovered.progress
        self._streams = opening.streams(recovered)
        stack.callback(self._streams.close)
        self._streams.stand(self._user.objects.values())
        self._journal = opening.journal(recovered, self._board, self._warn)
        stack.callback(self._journal.close)
        self._trials = Trials(self._streams, self._user.trial, self._journal, self.println, self._warn)
        self._verifier = self._opened_verifier(recovered, stack)
        self._streams.changed = self._verifier.waive
        recovery = self._board.find(Recovery)
        self._rollbacks = Rollbacks(
            opening.rollbacks,
            recovery,
            opening.store,
            self._streams,
            self._journal,
            self.println,
            same_data=self._goes_back_itself,
        )
        self._retries = Retries(
            self._board.find(Retry),
            str(opening.run_dir.path),
            self._streams,
            self._journal,
            lambda: self.interrupted,
            self._warn,
            same_data=self._goes_back_itself,
        )
        if recovery is not None:
            self._streams.drew = lambda *batch: recovery.drew(self._progress.step + 1, *batch)
        if recovered.checkpoint is not None and recovered.replay.done and not recovered.finished:
            self._verifier.say()  # there is nothing to verify
        retention = self._board.need(Checkpoints).retention
        self._saver = Saver(opening, self._journal, retention, self._retries, self._wake, self._warn)
        stack.callback(self._saver.close)
        opening.check_disk(self._saver.encode(self._user.save()))
        self._estimator.start(self._progress.step)
        self._phase = "open"
        self._rounds = Rounds(lambda: Work(self.updates, sum(endless.drawn for endless in self._endless)))
        self._spent.begin()
        stack.callback(self._close_services)
        if recovered.checkpoint is not None:
            where = opening.run_dir.checkpoints / recovered.checkpoint
            self._board.load(recovered.services, self.println, where)
            with reading(where, "services/metrics"):
                self._collector.load(recovered.collector)
            self._last_values = dict(recovered.last_values)
            self._last_steps = dict(recovered.last_steps)
        self._board.open(self, self._clock())
        self._say_unsaid()
        self._services_changed()
        if recovered.checkpoint is not None:
            self._resume_state = encode(self._user.save())
            self._saver.tidy()
        self._lines = Lines(self._user, recovered.lines)

    def _opened_verifier(self, recovered: Recovered, stack: ExitStack) -> Verifier:
        if recovered.chosen:  # at once in the file: a later start must not compare with what is left behind
            decision = {"what": CHOSEN, "why": recovered.chosen, "step": recovered.step}
            self._journal.event("decision", decision)
            self._journal.flush()
        drilled = self._board.find(Witness) is not None  # by a drill, which finds what differs and how far
        trail = self._opening.trail(recovered, self._warn)
        stack.callback(trail.close)
        return Verifier(
            trail,
            recovered.replay,
            "warn" if drilled else self._on_divergence,
            self._collector,
            self._journal,
            self.println,
            self._warn,
        )

    def _limits(self) -> dict[str, int | None]:
        return {"max_step": self.max_step, "max_epoch": self.max_epoch}

    def _begin_loop(self) -> None:
        """Where the run begins, or goes on: random state is put back, or the step-0 checkpoint made."""
        self._begun = True
        if self._recovered.checkpoint is None:
            self._trial_open = True
            self._save([(None, Save())], "epoch")
            if self._progress.step:
                self._warn(f"the steps count on from {self.step}, that of the weights that it begins with")
            return
        self._check_limits(False)
        self._go_on()

    def _go_on(self) -> None:
        """The resume point: the state, the streams, then random state as they stood there.

        The program's lines before it have run again, and the checkpoint has what they did to the state
        when they ran first: doing it again is undone.
        """
        assert self._resume_state is not None
        self._user.load(decode(self._resume_state), self._progress.updates)
        self._resume_state = None
        self._streams.open_bound()
        if self._recovered.random is not None:
            restore(self._recovered.random)
            self._recovered.random = None
        if rest := self._recovered.open:
            self._recovered.open = []
            at_epoch_end = self._progress.phase == "epoch"
            self._boundary(Moment.AFTER_EPOCH if at_epoch_end else Moment.AFTER_STEP, rest=rest)

    def println(self, message: str, with_tag: bool = False) -> None:
        """Print a line, above the live line and into the run's log."""
        console = self._board.find(Console)
        message = redacted(message)
        text = f"{self._tag()} {message}" if with_tag else message
        if console is None:
            print(text, flush=True)
        elif self._phase == "new":
            self._unsaid.append(text)  # until the console has its log
        else:
            console.print(text)

    def _tag(self) -> str:
        limit = "" if self.max_step is None else f"/{self.max_step}"
        return f"[Step {self.step}{limit}]"

    def call_soon(self, action: Action) -> None:
        """From any thread: apply `action` at the next boundary.

        Raises:
            UsageError: it is no `Stop`, `Interrupt` or `Save`, or the loop has ended.
        """
        if not isinstance(action, Stop | Interrupt | Save):
            raise UsageError(f"call_soon({action!r}): give Stop(...), Interrupt(...) or Save()")
        if self._phase == "closed":
            raise UsageError(f"call_soon({action!r}): the loop has ended; call it inside its with block")
        self._soon.append((None, action))
        self._wake()

    def watch(self, metric: str, seen: Callable[[float], None]) -> None:
        """Call `seen` with each value of `metric` collected outside steps, at once."""
        self._collector.watch(metric, seen)

    def flush(self) -> object:
        """Hand every row and event so far to the journal's file."""
        return self._flush()

    def note(self, kind: str, data: dict[str, Any]) -> None:
        """Add an event to the journal; `data` is JSON."""
        self._journal.event(kind, data)

    # -------------------------------------------------------------------------------- the step

    def _complete_step(self, can_save: bool = True) -> None:
        """A step is complete: the one place where it counts."""
        current = self._progress
        current.step = step = current.step + 1
        self._open_step = 0
        self._verifier.step_done(step, current.epoch)
        if self._looks_left:
            self._look_outside()
        if step >= self._next_due and (step >= self._due_step or self._time_has_come(step)):
            self._boundary(Moment.AFTER_STEP, can_save=can_save)

    def _look_outside(self) -> None:
        """A start's first steps are looked at: do they change what the state does not save?"""
        self._looks_left -= 1
        try:
            names = self._user.forgotten(self._progress.epoch)
        except Exception as error:  # of objects that are none of this run's
            self._looks_left = 0
            self.println(f"what lies outside the state was not looked at ({type(error).__name__}: {error})")
            return
        if names:
            self._looks_left = 0
            self._warn(
                f"{', '.join(names)}: the steps change it and the state does not save it, so a resume inside "
                "an epoch begins it anew, and what the tail reads from it lacks the steps before; add it, as "
                "in state={..., 'metrics': metrics}, unless it is begun anew before each use"
            )

    def _wake(self) -> None:
        """Make the next boundary due.  Threads and signal handlers call it: plain attributes only."""
        self._woken = True
        self._next_due = 0

    def _schedule_next(self) -> None:
        step = self._progress.step
        limit = NEVER if self._max_step is None else max(self._max_step, step + 1)
        left = self._steps_left()
        before_last = NEVER if left is None or left < 2 else step + left - 1
        self._due_step = min(self._board.next_step(step), limit, before_last, self._verifier.next_due(step))
        self._next_due, self._due_time = self._due_step, self._board.next_time()
        if self._clock is time.monotonic:
            self._ticker.set(self._due_time)
        elif self._due_time is not None:
            self._next_due = step + 1  # only who made the clock knows when it moves: it is asked at each step
        if self._woken:
            self._next_due = 0

    def _time_has_come(self, step: int) -> bool:
        """Asked where no step number is due: whether somebody woke the loop, or the user's own clock did."""
        if self._woken or (self._due_time is not None and self._clock() >= self._due_time):
            return True
        self._next_due = step + 1
        return False

    # ---------------------------------------------------------------------------- the boundary

    def _boundary(
        self, moment: Moment, *, can_save: bool = True, rest: Collection[str] | None = None
    ) -> None:
        """Between two steps, or after an epoch's tail: what is due runs, by stage.

        Args:
            can_save: False where the state is not the one after the step (it was left by `break`).
            rest: of a boundary that an interruption had left open, the services that had not run.
        """
        self._spent.begin_boundary()
        self._woken = False
        self._require_no_error()
        self._await_trial()
        self._trials.try_streams()
        self._announce_commits()
        asked = self._clock()
        self._collector.read()
        self._spent.in_steps(self._clock() - asked)  # until the device is done with them
        self._verifier.boundary(self._progress.step)
        at_epoch_end = moment is Moment.AFTER_EPOCH
        current = self._progress
        self._estimator.update(current.step)
        self._check_limits(at_epoch_end)
        self._notice_signal()
        when = Instant(current.step, current.epoch, at_epoch_end, self._clock())
        if rest is None:
            due = [s for s in self._board.due(moment, when) if can_save or s.stage is not Stage.SAVE]
        else:
            due = [s for s in self._board if s.name in rest]
            self._save_asked = True  # the checkpoint that is open is replaced
        self._apply(self._run_deciding(due, moment, can_save))
        while self._soon:
            self._apply([self._soon.popleft()])
        self._notice_signal()
        view = self._viewer(moment, None if at_epoch_end else self._step_data)
        self._mark_best()
        self._board.run([s for s in due if s.stage is Stage.REPORT], view)
        if can_save:
            self._check_optimizers(at_epoch_end)
            saves = self._board.run([s for s in due if s.stage is Stage.SAVE], view)
            if self._must_save():
                saves.append((None, Save()))
            self._save(saves, "epoch" if at_epoch_end else "step")
            if at_epoch_end:
                self._keep_snapshot("epoch")
            elif self._steps_left() == 1:
                self._keep_snapshot("step")
            self._reserve_buffers()
        self._board.fired(due, when)
        self._schedule_next()
        self._spent.end_boundary()
        if self._interruption is not None and can_save:
            self._leave(self._interruption)

    def _run_deciding(
        self, due: list[Service], moment: Moment, can_save: bool
    ) -> list[tuple[Service | None, Action]]:
        """Run what comes before the reports; an interruption may leave an evaluation among it."""
        view = self._viewer(moment, self._step_data if moment is Moment.AFTER_STEP else None)
        actions: list[tuple[Service | None, Action]] = []
        for service in [s for s in due if s.stage <= Stage.DECIDE]:
            self._may_abandon = can_save and not actions  # what was asked for is applied first
            try:
                actions += self._board.run([service], view)
            except Abandoned:
                self._leave_open(moment, due[due.index(service) :])
            finally:
                self._may_abandon = False
        return actions

    def _leave_open(self, moment: Moment, rest: list[Service]) -> None:
        """Save the state of a boundary whose evaluation is left, and which services it has still to run."""
        assert self._interruption is not None
        self._rest = [service.name for service in rest]
        self._save([(None, Save())], "epoch" if moment is Moment.AFTER_EPOCH else "step")
        self._leave(self._interruption)

    def _poll_evaluation(self) -> None:
        """Between two batches of an evaluation by a service.

        Raises:
            Abandoned: a signal has come, or the time is used up.
        """
        if not self._may_abandon:
            return
        self._notice_signal()
        asked = [action for _, action in self._soon if isinstance(action, Interrupt)]
        asked += [late for s in self._board.all(StopAfter) if (late := s.overtime()) is not None]
        self._interruption = self._interruption or next(iter(asked), None)
        if self._interruption is not None:
            raise Abandoned

    def _note_evaluation(self, seconds: float) -> None:
        """So long it took, which is no time of steps."""
        self._spent.in_evaluation(seconds)
        self._estimator.exclude(seconds)

    def _mark_best(self) -> None:
        """Let the live line show which value is the best so far."""
        console = self._board.find(Console)
        if console is not None:
            for best in self._board.all(Best):
                if best.value is not None:
                    console.mark_best(best.metric, best.value)

    def _check_limits(self, at_epoch_end: bool) -> None:
        if self._max_step is not None and self._progress.step >= self._max_step:
            self._decide_stop(f"max_step {self._max_step} is reached", "max_step")

    def _notice_signal(self) -> None:
        number = self._signals.received
        if number is not None and self._interruption is None:
            self._interruption = Interrupt(describe(number), 128 + number)

    def _must_save(self) -> bool:
        return self._save_asked or self._interruption is not None or self._progress.stop is not None

    def _apply(self, actions: Iterable[tuple[Service | None, Action]]) -> None:
        for service, action in actions:
            if isinstance(action, Stop):
                if action.failed:
                    self._roll_back(action)
                by = None if service is None else service.name
                self._decide_stop(action.reason, "service", by, failed=action.failed, code=action.code)
                self._tainted = self._tainted or action.failed
            elif isinstance(action, Interrupt):
                self._interruption = self._interruption or action
            elif isinstance(action, Save):
                self._save_asked = True
            elif isinstance(action, SetValue) and service is not None:
                self._set_value(service, action)
            else:
                raise UsageError(f"{action!r} cannot be applied here; give Stop, Interrupt, Save or SetValue")

    def _roll_back(self, stop: Stop) -> None:
        """Leave the loop to go on before the step that failed, if that may be."""
        self._announce_commits(wait=True)  # a failure found there lies before this one
        rolled = self._rollbacks.decide(stop.step or self._progress.step, stop.reason)
        if rolled is not None:
            raise rolled

    def _set_value(self, service: Service, action: SetValue) -> None:
        """Its rows are its record: superseded and compared like every other when steps run again."""
        for name, value in self._user.set_value(action):
            self._collector.outside(
                f"eval/{service.name}", self._progress.step, name, value, wall=service.schedule.wall
            )
        if action.target not in self._targets:
            self._targets.add(action.target)
            for scheduler in self._user.recomputing(action.target):
                self._warn(
                    f"service {service.name!r} sets {action.target}, and {scheduler} computes it anew from "
                    "the step's number: at its next step the value is undone; take one of the two"
                )

    def _decide_stop(
        self, reason: str, kind: str, by: str | None = None, *, failed: bool = False, code: int = 0
    ) -> None:
        """The first reason counts, but for a failure, which an orderly end must not hide."""
        stop, reason = self._progress.stop, without_credentials(reason)
        if stop is None or (failed, code) > (stop.failed, stop.code):
            self._progress.stop = StopRecord(reason, kind, by, self._limits(), failed, code)
            self._journal.event("stop", {"reason": reason, "kind": kind, "by": by, "step": self.step})
            self._save_asked = True  # so that a restart ends the same way
            self._wake()

    def _limits_changed(self) -> None:
        """A limit was set while running: a stop that an old limit decided may not hold any more."""
        stop = self._progress.stop
        if stop is not None and stop.kind in ("max_step", "max_epoch"):
            now = self._limits()[stop.kind]
            count = self._progress.step if stop.kind == "max_step" else self._progress.epoch
            if now is None or now > count:
                self._progress.stop = None
        self._wake()

    def _stream_ended(self, name: str, passes: int) -> None:
        self._decide_stop(f"stream {name!r} ended after {passes} passes", "stream", name)

    def _check_optimizers(self, at_epoch_end: bool) -> None:
        """Every optimizer that steps the state must be in it, and one that is in it must step."""
        if strangers := self._user.strangers():
            raise StateError(
                f"{', '.join(strangers)} is not part of the state, so a resume would lose what it does; "
                "add it and what it steps, as in state={'model': model, 'optimizer': optimizer}"
            )
        if at_epoch_end:
            self._check_epoch()

    def _check_epoch(self) -> None:
        """Ask at an epoch's end whether what it did makes sense."""
        if self._progress.epoch == 1:
            self._check_updates()

    def _check_updates(self) -> None:
        """Asked after the first epoch; of a loop without epochs at its end."""
        counted = self._progress.step > self._recovered.step
        none = self._user.watches_optimizers and not self._user.updates
        if counted and none and not self._user.left_out():
            raise ProgressError(
                f"{self._progress.step} steps were counted and no optimizer of the state made an update; "
                "call optimizer.step() in the loop, or leave the optimizer out of state"
            )

    # ---------------------------------------------------------------------------------- saving

    def _steps_left(self) -> int | None:
        """Steps until the open step loop ends by itself; None where that is not known."""
        return None

    def _is_last(self) -> bool:
        """Whether the loop's last step is complete, and the state of one step before it is at hand.

        A resume from after the last step would enter the loop and run no step: names that the program
        assigns in the loop and uses in the epoch's tail would not exist.  So the state of one step before
        is committed instead, and the last step runs again.
        """
        left = self._steps_left()
        return left is not None and left < 1 and self._one_before()

    def _one_before(self) -> bool:
        """Whether the newest snapshot is from one step before.

        Of a loop of one step: from one step before the end of the loop before it, which has no other state
        either; then both run again.
        """
        current = self._progress
        behind = current.step - self._saved_step()
        return behind == 1 or (behind == 2 and current.call_start == current.step - 1)

    def _saved_step(self) -> int:
        """The step of the newest snapshot, committed or kept."""
        return self._recovered.step if self._snapshot is None else self._snapshot.name.step

    def _save(self, actions: Sequence[tuple[Service | None, Action]], phase: Phase) -> None:
        """One snapshot for all that asked for one here."""
        best = [action for _, action in actions if isinstance(action, SaveBest)]
        whole = any(isinstance(action, Save) for _, action in actions)
        if not (best or whole) or not self._is_good():
            return
        if self._progress.step > self._recovered.step:
            self._trials.try_state()
        last = phase == "step" and self._is_last()
        if last:
            self._commit_kept(interim=self._interruption is None)
        self._save_asked = last and (whole or self._save_asked)  # then at the epoch's end
        whole = whole and not last
        if not (best or whole):
            return
        name = self._name(phase)
        for service, action in actions:
            if isinstance(service, Best) and isinstance(action, SaveBest):
                service.keep_as(str(name), name.step)
        self._snapshot = self._take_snapshot(phase)
        self._saver.commit(self._snapshot, best, whole=whole)
        self._kept_only = not (whole or last)

    def _keep_snapshot(self, phase: Phase) -> None:
        """Copy the state as it is here, to be committed if an interruption comes before the next boundary."""
        name = self._name(phase)
        if self._snapshot is not None and self._snapshot.name == name:
            return
        if self._recovered.checkpoint == str(name):
            return
        self._await_trial()
        if not self._is_good():
            return
        try:
            self._snapshot = self._take_snapshot(phase)
            self._kept_only = True
        except NotResumableError:
            self._snapshot = None  # an error only where a save is really asked for

    def _is_good(self) -> bool:
        """Whether the state may be saved: forces the guard, and the findings on what is being written.

        Afterwards the kept buffers are free.
        """
        guard = self._board.find(NaNGuard)
        if guard is not None:
            self._apply(self._board.run([guard], self._viewer(Moment.AFTER_STEP)))
        self._announce_commits(wait=True)
        return not self._tainted

    def _commit_kept(self, *, interim: bool = False) -> None:
        """Commit the kept snapshot, if it is not.

        Args:
            interim: nobody asked for it; it only stands in for the checkpoint at the epoch's end.
        """
        if self._kept_only and self._snapshot is not None and not self._tainted:
            self._snapshot.meta["interim"] = interim
            self._saver.commit(self._snapshot)
            self._kept_only = False

    def _reserve_buffers(self) -> None:
        """Optimizers have their moments since the first update: the first save of them must not stall."""
        if not self._reserved and self._user.updates and not self._saver.busy:
            self._reserved = True
            self._saver.reserve(self._user.arrays())

    def _name(self, phase: Phase) -> CheckpointName:
        current = self._progress
        return CheckpointName(current.step, current.epoch if phase == "epoch" else None)

    def _take_snapshot(self, phase: Phase) -> Snapshot:
        """Copy the whole state tree, as of this boundary."""
        current = self._progress
        current.updates = self._user.updates
        user = self._user.save()
        self._trials.try_parts(user["user"])
        streams, words = self._streams.tree()
        tree = whole_tree(
            progress=current.tree(phase),
            user=user,
            streams=streams,
            lines=self._lines.tree(),
            services=self._board.state(),
            metrics=self._collector.state(),
            wall={"segment": self.segment, "seconds": self._seconds(), "streams": words},
        )
        guard = self._board.find(NaNGuard)
        encoded = self._saver.encode(tree)
        self._verifier.snapshot(current.step, phase, encoded)
        position = self._flush()
        meta = {
            "run": self._opening.run_dir.id,
            "controllers": self._board.controllers(),
            "options": self._user.options(),
            "config": None if self._start.config is None else self._start.config.tree,
            "journal": list(position),
            "metrics": {n: v for n, v in self._last_values.items() if math.isfinite(v)},
            "metric_steps": dict(self._last_steps),
            "best": {b.metric: b.saved_as for b in self._board.all(Best) if b.saved_as is not None},
            "kept": {b.metric: b.kept for b in self._board.all(Best) if b.kept},
            "open": self._rest,
            "rollbacks": [rollback.stored() for rollback in self._rollbacks.decided],
            "fingerprint": self._recovered.fingerprint,
            "one_fingerprint": self._recovered.one_fingerprint,
        }
        return Snapshot(
            name=self._name(phase),
            encoded=encoded,
            guarded=self._user.guarded(user["user"]) if guard and guard.parameters else frozenset(),
            phase=phase,
            epoch=current.epoch,
            partial=phase == "epoch" and self._is_partial(),
            meta=meta,
            position=position,
        )

    def _is_partial(self) -> bool:
        return False

    def _await_trial(self) -> None:
        """The first boundary waits for the step-0 checkpoint: no row reaches the journal before it."""
        if self._trial_open:
            self._announce_commits(wait=True)
            if self._saver.error is not None:
                raise CheckpointError(
                    f"the trial save at step 0 failed: {self._saver.error}; {self._saver.remedy}, or choose "
                    "another run directory, before training"
                ) from self._saver.error
            self._trial_open = False

    def _announce_commits(self, *, wait: bool = False) -> None:
        """Tell the journal and the observers of what the writer thread has committed since."""
        try:
            self._saver.settle(wait=wait)
        except NonFiniteError as error:
            guard = self._board.need(NaNGuard)
            self._apply([(guard, action) for action in guard.tripped(str(error), error.step).actions])
        for committed in self._saver.take_committed():
            name = str(committed.name)
            self._verifier.committed(committed.name.step)
            self._journal.event("checkpoint", {"name": name, "bytes": committed.bytes}, wall=True)
            self._fire(Moment.AFTER_CHECKPOINT, name)

    def _await_commit(self) -> None:
        """Wait until what was handed to the writer is committed.

        Raises:
            CheckpointError: it could not be.
        """
        self._announce_commits(wait=True)
        error = self._saver.error
        if error is not None:
            raise CheckpointError(
                f"the last state could not be saved: {error}; {self._saver.remedy} and start again: "
                "the run goes on from the checkpoint before"
            ) from error

    def _leave(self, interruption: Interrupt) -> None:
        """The state of this boundary is being saved: wait for it, then leave the body."""
        self._await_commit()
        saved = self._saver.last
        where = "nothing new to save" if saved is None else f"saved {saved.path}"
        self._journal.event(
            "interrupted", {"reason": interruption.reason, "step": self._progress.step}, wall=True
        )
        self.println(f"{interruption.reason}: {where}; start again to go on")
        raise leaving(interruption.code, interruption.reason)

    # ------------------------------------------------------------------------------- the record

    def _flush(self) -> Position:
        """Hand every row and event so far to the journal's file, and how far the run has come.

        Rows alone do not say it: there may be one each 1,000 steps, or none.
        """
        current = self._progress.step, self._progress.epoch
        if current != self._flushed:
            self._flushed = current
            self._journal.event("progress", {"step": current[0], "epoch": current[1]}, wall=True)
        return self._journal.flush()

    def _record_rows(self, block: Block) -> None:
        """Rows that the collector finished: into the journal, and compared if executed again."""
        if block.phase != "step" or not block.epoch:
            self._last_values[block.name] = block.values[-1]
            self._last_steps[block.name] = block.steps[-1]
        self._journal.append(block)
        self._verifier.rows(block)

    def _fire(self, moment: Moment, payload: Any = None) -> None:
        """Announce a moment that is no boundary to the services that asked for it."""
        actions = self._board.run(self._board.wanting(moment), self._viewer(moment, payload))
        if actions and moment in OBSERVED:
            raise UsageError(
                f"{moment.name} is for observers, and {actions[0][0]!r} asked for {actions[0][1]}; "
                "act at another moment, such as AFTER_STEP"
            )
        self._apply(actions)

    def _viewer(self, moment: Moment, payload: Any = None) -> Callable[[Service], Boundary]:
        current = self._progress
        outputs = self._outputs if moment is Moment.AFTER_STEP and self._outputs_of == current.step else {}
        stop = None if current.stop is None else current.stop.reason

        def view(service: Service) -> Boundary:
            return Boundary(
                moment=moment,
                step=current.step,
                epoch=current.epoch,
                readings=self._board.reader(service),
                stop=stop,
                payload=payload,
                outputs={name: outputs[name] for name in _names(service.outputs) if name in outputs},
            )

        return view

    def _services_changed(self) -> None:
        self._synchronous = {moment for moment in SYNCHRONOUS if self._board.wanting(moment)}
        self._looked_at = {
            name for service in self._board.wanting(Moment.AFTER_STEP) for name in _names(service.outputs)
        }
        self._wake()

    def _taken_out(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep of a step's values what services look at; what is left are metrics."""
        if self._outputs_of != step:
            self._outputs, self._outputs_of = {}, step
        looked_at = {name: value for name, value in values.items() if name in self._looked_at}
        self._outputs.update(looked_at)
        return {n: v for n, v in values.items() if n not in looked_at or is_scalar(n, v)}

    def _announce(self, moment: Moment, payload: Any = None) -> None:
        """Tell synchronous observers, which may look but not act."""
        if moment in self._synchronous:
            self._fire(moment, payload)

    # ------------------------------------------------------------------------------------ exit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        stop = self._progress.stop
        if isinstance(error, StopIteration) and stop is not None and stop.kind == "stream":
            error = None  # next(batches) after the last pass: as clean an end as should_stop()
            suppress = True
        else:
            suppress = False
        hazard.reach("loop.exit")
        step, given = self.step, error
        failures = _attempt(self._finish if error is None else self._abandon)
        error = self._undone([*([] if given is None else [given]), *failures], step) or given
        cause = error or (failures[0] if failures else None)
        failures += _attempt(lambda: self._conclude(cause))
        failures += _attempt(lambda: self._fire(Moment.EXIT_LOOP, self._ending))
        failures += _attempt(self._resources.close)
        self._phase = "closed"
        if isinstance(error, RolledBack):
            error = self._leaving_instead() or error
        if error is not None:
            self._explain(error)
            for failure in failures:
                error.add_note(f"and while closing: {type(failure).__name__}: {failure}")
            if error is not given:
                raise error from given
            return False
        if failures:
            for failure in failures[1:]:
                failures[0].add_note(f"and while closing: {type(failure).__name__}: {failure}")
            raise failures[0]
        self._raise_exit_status()
        return suppress

    def _undone(self, errors: Sequence[BaseException], step: int) -> RolledBack | None:
        """The decision to go back, if what ended the loop is a failed step that may be undone.

        Args:
            errors: what ended it, and what came while it was left.
            step: the one that was running, or the last.
        """
        if not errors or not isinstance(errors[0], BadStepError | RolledBack):
            return self._retries.again(errors[0], step) if errors and self._begun else None
        errors = [*errors, *_attempt(lambda: self._announce_commits(wait=True))]  # it may lie before
        return self._rollbacks.undo(errors, step)

    def _leaving_instead(self) -> BaseException | None:
        """The run goes back, but not in this process: a signal, or the time budget, ends it."""
        number, interruption = self._signals.received, self._interruption
        if interruption is not None:
            return leaving(interruption.code, interruption.reason)
        return None if number is None else leaving(128 + number, describe(number))

    def _explain(self, error: BaseException) -> None:
        """Add what this door knows about an error in the body."""

    def _finish(self) -> None:
        """A clean end: the last state is committed, the last reports run, `ended` is recorded."""
        self._require_no_error()
        self._await_trial()
        if not self._progress.epoch:
            self._check_updates()
        self._save_last()
        self._await_commit()
        self._collector.read()
        self._verifier.end()
        reports = [s for s in self._board if s.stage is Stage.REPORT and s.moments & SCHEDULED]
        self._spent.begin_boundary()
        self._board.run(reports, self._viewer(Moment.EXIT_LOOP), finish=True)
        if (self._progress.step, self._progress.epoch) != (self._recovered.step, self._recovered.epoch):
            self._watched.check(self._last_values.keys(), at_end=True)
        if self._is_over():
            current = self._progress
            assert current.stop is not None
            ended = {"reason": current.stop.reason, "step": current.step, "epoch": current.epoch}
            self._journal.event("ended", ended)
        try:
            self._journal.sync()
        except OSError as error:
            raise CheckpointError(
                f"the end of the run could not be recorded ({error}); {remedy(error)} and start again: "
                "no step is lost"
            ) from error
        self._restore_best()
        self._retries.forget()

    def _is_over(self) -> bool:
        """Whether this clean end is the run's end, not only this start's."""
        stop = self._progress.stop
        return stop is not None and not stop.failed

    def _save_last(self) -> None:
        """Save the state after the last completed step, where no boundary has or a stop came later."""
        current = self._progress
        if not self._begun:
            return
        if self._saved_step() == current.step and not self._save_asked:
            self._commit_kept()
            return
        if sum(endless.drawn for endless in self._endless) != self._drawn:
            self._warn(
                "a batch was drawn and its step not completed by advance(): it is not part of the last save"
            )
            return
        self._save([(None, Save())], "step" if current.step and not current.epoch else "epoch")

    def _restore_best(self) -> None:
        for service in self._board.all(Best):
            if service.restore_at_end:
                store = self._opening.store
                self._restored = restore_best(service, store, self._user, self.println, self._warn)

    def _abandon(self) -> None:
        """After an exception: a pending commit is finished, none is started; the record has every step."""
        try:
            self._collector.read()
        except Exception as error:  # of a broken device, say: the one that ended the run is the one to raise
            self._warn(f"the metrics of the last steps are lost ({type(error).__name__}: {error})")
        self._open_step = 0
        self._verifier.end()
        self._announce_commits(wait=True)
        self._journal.flush()

    def _conclude(self, cause: BaseException | None) -> None:
        stop = self._progress.stop
        status = "finished" if cause is None and self._is_over() else "stopped"
        if isinstance(cause, Interrupted):
            reason = cause.reason
        elif isinstance(cause, KeyboardInterrupt) and self._interruption is not None:
            reason = self._interruption.reason
        elif cause is not None:
            status, reason = "failed", f"{type(cause).__name__}: {cause}"
        elif stop is None:
            reason = "the loop was left before its end"
        else:
            status, reason = "failed" if stop.failed else status, stop.reason
        at = {"step": self._progress.step, "epoch": self._progress.epoch}
        self._journal.event("closed", {"status": status, "reason": reason, **at}, wall=True)
        self._journal.flush()
        self._ending = Ending(
            reason=reason,
            step=self._progress.step,
            epoch=self._progress.epoch,
            finished=status == "finished",
            best=self.best,
            where=self._opening.where(),
            digest=self._saver.digest or self._recovered.digest,
            resumed_from=self._recovered.checkpoint,
            segment=self.segment,
            failed_saves=self._saver.failures,
            warnings=tuple(self._warnings),
            rollbacks=len(self._rollbacks.decided),
            one_fingerprint=self._recovered.one_fingerprint,
        )
        if self._interruption is None and not isinstance(cause, RolledBack):
            self.println(f"ended: {self._ending}")

    def _close_services(self) -> None:
        for thread in self._threads:
            thread.stop()
        late = [thread.name for thread in self._threads if not thread.join(GRACE)]
        self._board.close()
        if late:
            raise ServiceError(
                f"{', '.join(late)} did not return within {GRACE:g} s after the loop; make it return"
            )

    def _raise_exit_status(self) -> None:
        """After a clean end: the status of a service's stop, or of a signal that came too late to act on."""
        stop, number = self._progress.stop, self._signals.received
        if stop is not None and (stop.failed or stop.code):
            raise GuardStop(stop.reason, 1 if stop.failed else stop.code)
        if number is not None:
            raise leaving(128 + number, f"{describe(number)} while the loop was ending")

    # --------------------------------------------------------------------------- what must hold

    def _require_open(self, what: str) -> None:
        if self._phase == "new":
            raise UsageError(
                f"{what}() before the with block; enter it first: with {type(self).__name__}(...) as loop:"
            )
        if self._phase == "closed":
            raise UsageError(
                f"{what}() after the with block has ended; make a new {type(self).__name__} to go on"
            )

    def _require_begun(self) -> None:
        self._require_open("advance")
        if not self._begun:
            raise UsageError(
                "a batch was drawn, or advance() called, before the first should_stop(), where the run's "
                "state comes back; loop with: while not sv.should_stop()"
            )

    def _report_error(self, error: BaseException) -> None:
        """From any thread: raise `error` in the main thread at the next boundary."""
        self._error = self._error or error
        self._wake()

    def _require_no_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _warn(self, message: str) -> None:
        self._warnings.append(message)
        self.println(f"warning: {message}")

    def _say_unsaid(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        console = self._board.find(Console)
        for text in unsaid:
            assert console is not None
            console.print(text)

    def _seconds(self) -> float:
        """Wall time of the whole run, over its starts."""
        before = float(self._recovered.wall.get("seconds", 0.0))
        return before + self._spent.seconds


def _attempt(action: Callable[[], object]) -> list[BaseException]:
    try:
        action()
    except BaseException as error:
        return [error]
    return []


def _names(given: Sequence[str]) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given
