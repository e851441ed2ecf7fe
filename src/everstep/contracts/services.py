"""What happens around steps: a `Service`, the `Boundary` it sees, the `Outcome` it returns."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from everstep.errors import ConfigError
from everstep.keywords import checked_keywords
from everstep.schedule import Instant, Never, Schedule

if TYPE_CHECKING:
    from everstep.contracts.state import Json
    from everstep.metrics.statistics import Stats


class Moment(enum.Enum):
    """The moments of a run at which something can happen.

    BEFORE_STEP, AFTER_EVAL_STEP and the four data events (METRICS_COLLECTED and below) are synchronous
    observers: they may look, not act.
    """

    ENTER_LOOP = "enter_loop"
    BEFORE_EPOCH = "before_epoch"
    BEFORE_STEP = "before_step"
    AFTER_STEP = "after_step"
    AFTER_EPOCH = "after_epoch"
    AFTER_EVAL_STEP = "after_eval_step"
    AFTER_EVALUATION = "after_evaluation"
    AFTER_CHECKPOINT = "after_checkpoint"
    EXIT_LOOP = "exit_loop"
    METRICS_COLLECTED = "metrics_collected"
    SUMMARY_ADDED = "summary_added"
    METRIC_STATS_PRINTED = "metric_stats_printed"
    TIME_METRIC_STATS_PRINTED = "time_metric_stats_printed"


SCHEDULED = frozenset({Moment.AFTER_STEP, Moment.AFTER_EPOCH})
"""The moments that are boundaries: state is consistent there, and services are due or not."""

SYNCHRONOUS = frozenset(
    {
        Moment.BEFORE_STEP,
        Moment.AFTER_EVAL_STEP,
        Moment.METRICS_COLLECTED,
        Moment.SUMMARY_ADDED,
        Moment.METRIC_STATS_PRINTED,
        Moment.TIME_METRIC_STATS_PRINTED,
    }
)
"""The moments that are announced at once, to observers that only look."""

OBSERVED = SYNCHRONOUS | {Moment.AFTER_CHECKPOINT, Moment.EXIT_LOOP}
"""The moments at which nobody may act."""


class Stage(enum.IntEnum):
    """The order in which the due services of one boundary run."""

    MEASURE = 1
    GUARD = 2
    EVALUATE = 3
    DECIDE = 4
    REPORT = 5
    SAVE = 6


class EvalStep(NamedTuple):
    """One batch of an evaluation, to look at.

    Attributes:
        stream: which stream is evaluated.
        number: of the batch in this evaluation, from 1; one that an interruption left begins again at 1.
        batch: what `Task.eval_step` got.
        outputs: what it returned, with the logs of `Task.next_eval_inputs`.
    """

    stream: str
    number: int
    batch: Any
    outputs: Mapping[str, Any]


@dataclass(frozen=True)
class Stop:
    """Action: end the loop's iterators; the tail runs.

    Attributes:
        reason: in words.
        failed: the state is bad and is not saved; the exit status is 1.
        code: another exit status after the clean end, which a restart of the run has too.
        step: of a failure, the step that is at fault; None: the last one.
    """

    reason: str
    failed: bool = False
    code: int = 0
    step: int | None = None


@dataclass(frozen=True)
class Interrupt:
    """Action: save at this boundary and leave through `Interrupted` with exit status `code`."""

    reason: str
    code: int = 3


@dataclass(frozen=True)
class Save:
    """Action: a checkpoint at this boundary."""


@dataclass(frozen=True)
class SaveBest:
    """Action: keep this boundary's user state among the best by `metric`, apart from the checkpoints.

    Attributes:
        metric, value: which, and what it reached.
        beside: names of those kept before that stay.
    """

    metric: str
    value: float
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class SetValue:
    """Action: give a number in the state another value, from the next step on.

    The new value is a row of the record, under the target's name.  Give `value` or `times`.

    Attributes:
        target: "optimizer.lr" is option "lr" of every group of state entry "optimizer"; "settings.beta"
            is a key of a dictionary; "beta" alone is the value of a `Slot`.
        value: the new value.
        times: what the value, of each group, is multiplied by.
        least: `times` lowers no value below it.

    Raises:
        ConfigError: both or none of `value` and `times` is given, or it is no finite number.
    """

    target: str
    value: float | None = None
    times: float | None = None
    least: float = -math.inf

    def __post_init__(self) -> None:
        if (self.value is None) == (self.times is None):
            raise ConfigError(f"{self}: give one of value= and times=")
        if not _is_finite(self.times if self.value is None else self.value):
            raise ConfigError(f"{self}: give a finite number")

    def applied(self, old: float) -> float:
        """What becomes of one number.

        Raises:
            ConfigError: it would not be finite.
        """
        if self.times is None:
            assert self.value is not None
            return self.value
        new = max(old * self.times, min(old, self.least))
        if not math.isfinite(new):
            raise ConfigError(f"{self} makes {new} of {old}; give a finite value=")
        return new


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except (TypeError, ValueError, OverflowError):
        return False


Action: TypeAlias = Stop | Interrupt | Save | SaveBest | SetValue


@dataclass(frozen=True)
class Outcome:
    """What a service may return.

    Attributes:
        metrics: to add to the record.
        actions: for the supervisor to take.
        wall: whether the metrics depend on the clock, and so are no part of exact equality.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    wall: bool = False


class Readings(Protocol):
    """One service's own metric window: its reads clear it for nobody else."""

    def stats(self, name: str) -> Stats | None:
        """Statistics of `name` since this service last cleared its window; None if nothing came."""

    def values(self, name: str) -> list[float]:
        """The values of `name` collected outside steps since the last clear, in order."""

    def names(self) -> list[str]:
        """Names with anything in the window."""

    def nonfinite(self, name: str) -> tuple[int, float] | None:
        """(step, value) of the first NaN or infinity of `name` since the last clear, None if none."""

    def clear(self) -> None:
        """Start a new window."""


@dataclass(frozen=True)
class Boundary:
    """What a service sees at one moment.  Immutable; metrics are read only when asked for.

    Attributes:
        moment: which moment this is.
        step: the last completed step, from 0.
        epoch: the current epoch, from 1; 0 before the first.
        readings: this service's own metric window.
        stop: the reason of a stop that was already decided, else None.
        payload: of BEFORE_STEP and AFTER_STEP, the step's batch (to look at; None without data, and
            where a resume closes a boundary that an interruption had left in an evaluation; in a
            `Supervisor` the newest that was drawn, with several streams by their names); of
            AFTER_EVAL_STEP, an `EvalStep`; of AFTER_EVALUATION, the metrics that were found; of a
            data event, what was collected, added or printed; of AFTER_CHECKPOINT, the checkpoint's
            name; of EXIT_LOOP, the `Ending` (None in `Service.finish`, which comes before); else None.
        outputs: at AFTER_STEP, of what the step returned or collected, whatever services look at
            (`Service.outputs`), by name; to look at.
    """

    moment: Moment
    step: int
    epoch: int
    readings: Readings
    stop: str | None = None
    payload: Any = None
    outputs: Mapping[str, Any] = field(default_factory=dict)


class RunView(Protocol):
    """What a service sees of the run when it opens: read-only facts and two ways to speak."""

    @property
    def run_dir(self) -> Any: ...

    @property
    def segment(self) -> int: ...

    @property
    def interrupted(self) -> bool:
        """Whether a signal asks the run to end: who waits for something, waits no more."""

    @property
    def tainted(self) -> bool:
        """Whether a guard has found the state bad: it is not saved."""

    def live_object(self, entry: str) -> Any:
        """The live object of a state entry, to look at.

        Raises:
            ConfigError: there is no such entry; names the nearest.
        """

    @property
    def step(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def max_step(self) -> int | None: ...

    @property
    def max_epoch(self) -> int | None: ...

    def get_progress(self) -> float | None: ...

    def get_eta(self) -> float | None: ...

    def println(self, message: str, with_tag: bool = False) -> None: ...

    def clock(self) -> float: ...

    def spent(self) -> dict[str, float]:
        """Seconds of this start by part; together, all since it was opened.

        "data" (waiting for batches to train on), "evaluation" (`evaluation()` blocks, a Trainer's
        evaluations), "services" (all else that runs at boundaries and before epochs), "step" (the rest:
        the program's own lines, and what the device does for them).
        """

    def call_soon(self, action: Action) -> None:
        """From any thread: apply `action` at the next boundary."""

    def watch(self, metric: str, seen: Callable[[float], None]) -> None:
        """Call `seen` with each value of `metric` collected outside steps, at once."""

    def flush(self) -> object:
        """Hand every row and event so far to the journal's file."""

    def note(self, kind: str, data: dict[str, Any]) -> None:
        """Add an event to the journal; `data` is JSON."""


class Service:
    """Something that happens around steps.  Subclass it, override what you need.

    Class attributes:
        stage: where in a boundary it runs.
        moments: the moments it wants; a moment nobody wants costs nothing.
        controller: True if its outcome may change training; observers must obey law 2.

    Attributes:
        name: unique in a run; the key of its state in the checkpoint.
        schedule: when it is due at AFTER_STEP and AFTER_EPOCH; other moments always run it.
        watches: names of the metrics that it is there for; one of which no value comes is warned about.
        sets: targets of the `SetValue`s that it may return; each must be there when the loop opens.
        outputs: names of what steps return or collect that it looks at, in `Boundary.outputs` at AFTER_STEP,
            in the `EvalStep` at AFTER_EVAL_STEP: numbers, or what else a step has for it (arrays of each
            sample's values, say), which is no metric then.
    """

    stage: Stage = Stage.REPORT
    moments: frozenset[Moment] = frozenset({Moment.AFTER_STEP, Moment.AFTER_EPOCH})
    controller: bool = False
    isolate: ClassVar[bool] = True
    """Whether global random state is put back after it ran; built-in services draw none."""
    watches: Sequence[str] = ()
    sets: Sequence[str] = ()
    outputs: Sequence[str] = ()
    default_schedule: ClassVar[Schedule] = Never()
    """Its schedule where none is given."""
    window: Literal["saved", "unsaved", "none"] = "saved"
    """Its metric window: part of the checkpoint (unless its schedule depends on the clock), free, or none."""

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):
            cls.__init__ = checked_keywords(cls.__init__)  # type: ignore[method-assign]

    @checked_keywords
    def __init__(self, name: str | None = None, schedule: Schedule | None = None) -> None:
        self.name = type(self).__name__.lower() if name is None else name
        if not self.name or "/" in self.name:
            raise ConfigError(f"service name {self.name!r}: give a name without '/', not empty")
        if not isinstance(schedule, Schedule | None):
            raise ConfigError(
                f"every={schedule!r} of service {self.name!r} is no schedule; give Every(steps=...), "
                "Every(epochs=...) or Every(seconds=...)"
            )
        # A copy: one in seconds remembers when it was due last, and another service may be given the same.
        self.schedule = copy.deepcopy(self.default_schedule if schedule is None else schedule)

    def config(self) -> Json:
        """What of its arguments changes training, for comparison on resume (controllers only)."""
        return None

    def open(self, run: RunView) -> None:
        """The loop was entered; state is restored."""

    def due(self, when: Instant) -> bool:
        """Whether it runs at this AFTER_STEP or AFTER_EPOCH boundary."""
        return self.schedule.due(when)

    def run(self, boundary: Boundary) -> Outcome | None:
        """Do the work of one boundary.  Never mutates training: return an `Outcome` for that."""
        raise NotImplementedError(f"{type(self).__name__}.run")

    def finish(self, boundary: Boundary) -> Outcome | None:
        """The loop has come to a clean end, and the last state is committed; called once.

        Whatever came since `run` was due last is in `boundary.readings`.
        """
        return None

    def close(self) -> None:
        """The loop ends, in whatever way: stop threads, close files."""

    def state_dict(self) -> Any:
        """State that must survive a restart; None for nothing.  Part of law 1."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, schedule={self.schedule!r})"


class Clock(Protocol):
    """Monotonic seconds; `everstep.testing.ManualClock` is one that tests can set."""

    def __call__(self) -> float: ...


ServiceFunction: TypeAlias = Callable[[Boundary], Outcome | None]
