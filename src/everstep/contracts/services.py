"""Work around steps: a `Service`, the `Boundary` that it sees, the `Outcome` that it returns."""

from __future__ import annotations

import copy
import enum
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from everstep.arguments import checked_keywords, valid_name
from everstep.errors import ConfigError
from everstep.schedule import Instant, Schedule, Unscheduled

if TYPE_CHECKING:
    from everstep.contracts.state import Json
    from everstep.metrics.collector import Reader
    from everstep.supervisor.door import RunView as LoopView


class Moment(enum.Enum):
    """Moments of a run at which services run."""

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
"""Moments that are boundaries: state is consistent there, and schedules say which services are due."""

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
"""Moments that are announced at once, to observers that only look."""

OBSERVED = SYNCHRONOUS | {Moment.AFTER_CHECKPOINT, Moment.EXIT_LOOP}
"""Moments at which no service may act."""


class Stage(enum.IntEnum):
    """Order in which the due services of one boundary run."""

    MEASURE = 1
    GUARD = 2
    EVALUATE = 3
    DECIDE = 4
    REPORT = 5
    SAVE = 6


class EvalStep(NamedTuple):
    """Batch of an evaluation, to look at: the argument of `Task.eval_step`, and the step's result.

    `number` counts from 1, also where an interrupted evaluation begins again.
    """

    stream: str
    number: int
    batch: Any
    outputs: Mapping[str, Any]
    """With the logs of `Task.next_eval_inputs`."""


@dataclass(frozen=True)
class Stop:
    """Action: end the loop's iterators, for a `reason` in words; the tail runs.

    `failed`: the state is bad and is not saved, the exit status is 1; `step` (None: the last) is at fault.
    `code` is another exit status after a clean end, which a restart of the run has, too.
    """

    reason: str
    failed: bool = False
    code: int = 0
    step: int | None = None


@dataclass(frozen=True)
class Interrupt:
    """Action: save at this boundary and leave by `Interrupted`, for `reason`, with exit status `code`."""

    reason: str
    code: int = 3


@dataclass(frozen=True)
class Save:
    """Action: save a checkpoint at this boundary."""


@dataclass(frozen=True)
class SaveBest:
    """Action: keep this boundary's user state among the best by `metric`, apart from the checkpoints."""

    metric: str
    value: float
    beside: tuple[str, ...] = ()
    """Names of the best weights kept before that stay."""


@dataclass(frozen=True)
class SetValue:
    """Action: give a number in the state another value, from the next step on.

    The record gets a row with the new value, under the target's name.  Give `value` or `times`.

    Attributes:
        target: "optimizer.lr" is option "lr" of every group of state entry "optimizer"; "settings.beta"
            is a key of a dictionary; "beta" alone is the value of a `Slot`.
        value, times: the new value, or a factor for the old one, in each group.
        least: limit below which `times` lowers no value.
    """

    target: str
    value: float | None = None
    times: float | None = None
    least: float = -math.inf

    def __post_init__(self) -> None:
        if (self.value is None) == (self.times is None):
            raise ConfigError(f"{self}: give one of value= and times=")
        number: Any = self.times if self.value is None else self.value
        try:
            is_finite = math.isfinite(number)
        except (TypeError, ValueError, OverflowError):
            is_finite = False
        if not is_finite:
            raise ConfigError(f"{self}: give a finite number")

    def applied(self, old: float) -> float:
        """Return the new value of one number, which must be finite."""
        if self.times is None:
            assert self.value is not None
            return self.value
        new = max(old * self.times, min(old, self.least))
        if not math.isfinite(new):
            raise ConfigError(f"{self} makes {new} of {old}; give a finite value=")
        return new


Action: TypeAlias = Stop | Interrupt | Save | SaveBest | SetValue


@dataclass(frozen=True)
class Outcome:
    """Result of a service: `metrics` to add to the record, and `actions` to take.

    `wall`: the metrics depend on the clock, and do not count for exact equality.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    wall: bool = False


@dataclass(frozen=True)
class Boundary:
    """View of the run at one moment, for a service.  Immutable; metrics are read only when asked for.

    Attributes:
        moment: the moment.
        step: the last completed step, from 0.
        epoch: the current epoch, from 1; 0 before the first.
        readings: this service's own metric window.
        stop: the reason of a stop that was already decided, else None.
        payload: at BEFORE_STEP and AFTER_STEP, the step's batch (None without data, and where a resume
            closes a boundary that was left in an evaluation; in a `Supervisor` the newest that was drawn,
            of several streams by name); at AFTER_EVAL_STEP, an `EvalStep`; at AFTER_EVALUATION, the
            evaluation's metrics; at the four last moments, the values that were collected, added or printed;
            at AFTER_CHECKPOINT, the checkpoint's name; at EXIT_LOOP, the `Ending`; else None.
        outputs: at AFTER_STEP, values that the step returned or collected, by name, if a service looks at
            them (`Service.outputs`); to look at.
    """

    moment: Moment
    step: int
    epoch: int
    readings: Readings
    stop: str | None = None
    payload: Any = None
    outputs: Mapping[str, Any] = field(default_factory=dict)


RunView: TypeAlias = "LoopView"
"""The loop as a service sees it: facts to read, ways to speak, and a few requests."""
Readings: TypeAlias = "Reader"
"""Metric window of one service: its reads clear no other window."""


class Service:
    """Work around steps.  Subclass it, override what you need.

    Attributes:
        name: unique in a run; the key of the service's state in the checkpoint.
        schedule: when the service is due at AFTER_STEP and AFTER_EPOCH; at other moments (AFTER_EVALUATION,
            say) it always runs.
    """

    stage: Stage = Stage.REPORT
    """Place of the service in the order of a boundary."""
    moments: frozenset[Moment] = SCHEDULED
    """Moments at which the service runs; one without services costs nothing."""
    controller: bool = False
    """Whether the service's outcome may change training; observers must obey law 2."""
    isolate: ClassVar[bool] = True
    """Whether global random state is put back after the service ran; built-in services draw none."""
    every_rank: ClassVar[bool] = False
    """Whether the service runs on all ranks although its stage is REPORT, which is the writer's."""
    watches: Sequence[str] = ()
    """Metrics that the service needs; one without values is warned about."""
    sets: Sequence[str] = ()
    """Targets of the `SetValue`s that the service may return; each must exist when the loop opens."""
    outputs: Sequence[str] = ()
    """Values of steps to look at, in `Boundary.outputs` and `EvalStep`; arrays are then not metrics."""
    default_schedule: ClassVar[Schedule] = Unscheduled()
    """Schedule of a service that was given none; one whose `run` would then never be called is refused."""
    window: Literal["saved", "unsaved", "none"] = "saved"
    """Metric window: saved in checkpoints (unless the schedule depends on the clock), not saved, or none."""
    runs_last: ClassVar[bool] = False
    """Whether the service runs after all others of its stage."""
    guards_saves: ClassVar[bool] = False
    """Whether the service runs before each save, where its window has values, and acts on `bad_state`."""
    guards_state: bool = False
    """Whether parameters and optimizer moments must be finite to be saved."""

    @property
    def output_names(self) -> Sequence[str]:
        """`outputs` as a sequence: a string is one name."""
        return (self.outputs,) if isinstance(self.outputs, str) else self.outputs

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):
            cls.__init__ = checked_keywords(cls.__init__)  # type: ignore[method-assign]

    @checked_keywords
    def __init__(self, name: str | None = None, schedule: Schedule | None = None) -> None:
        self.name = valid_name("service", type(self).__name__.lower() if name is None else name)
        if not isinstance(schedule, Schedule | None):
            # most classes call this argument every; the base, and classes without __init__, schedule
            keyword = "every" if "every" in inspect.signature(type(self)).parameters else "schedule"
            raise ConfigError(
                f"{keyword}={schedule!r} of service {self.name!r} is not a schedule; give Every(steps=...), "
                "Every(epochs=...) or Every(seconds=...)"
            )
        # A copy, because a schedule in seconds remembers when it was due, and two services may share one.
        self.schedule = copy.deepcopy(self.default_schedule if schedule is None else schedule)

    def config(self) -> Json:
        """Return the arguments that change the result; None for none.

        Those of a controller are compared at a resume, those of an observer are recorded.
        """
        return None

    def open(self, run: RunView) -> None:
        """Prepare for the loop, which was entered; state is restored."""
        self._run = run

    def due(self, when: Instant) -> bool:
        """Whether the service runs at this AFTER_STEP or AFTER_EPOCH boundary."""
        return self.schedule.due(when)

    def run(self, boundary: Boundary) -> Outcome | None:
        """Do the work of one boundary.  Never mutates training: return an `Outcome` for that."""
        raise NotImplementedError(f"{type(self).__name__}.run")

    def overtime(self) -> Interrupt | None:
        """Return the interruption that is due by now, also asked for inside an evaluation; None for none."""
        return None

    def bad_state(self, message: str, step: int | None) -> Outcome:
        """Decide, as a service that guards saves, about NaN or infinity in a state of `step`."""
        return Outcome(actions=(Stop(message, failed=True, step=step),))

    def best_to_keep(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the best weights that must stay on the disk, by metric, the best first."""
        return {}

    def finish(self, boundary: Boundary) -> Outcome | None:
        """Do the last work after a clean end, with the last state committed; called once.

        `boundary.readings` has the values since `run` was last due.
        """
        return None

    def close(self) -> None:
        """Stop threads and close files: the loop ends, in whatever way."""

    def state_dict(self) -> Any:
        """Return the state that must survive a restart; None for no state.  Part of law 1."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore a result of `state_dict`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, schedule={self.schedule!r})"


class BuiltIn(Service):
    """Service of everstep itself: it draws no random numbers, and reads no window of metrics."""

    isolate = False
    window = "none"


Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds; tests can set `everstep.testing.ManualClock`."""
ServiceFunction: TypeAlias = Callable[[Boundary], Outcome | None]
