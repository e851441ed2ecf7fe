"""Services that judge a metric or the run's progress, and stop the run, fail it, or set a value."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import reduce
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from everstep.arguments import checked_init, integer, number, plain, real
from everstep.backends.describe_values import described
from everstep.contracts.services import (
    SCHEDULED,
    Action,
    Boundary,
    BuiltIn,
    Interrupt,
    Moment,
    Outcome,
    RunView,
    Save,
    Service,
    ServiceFunction,
    SetValue,
    Stage,
    Stop,
)
from everstep.contracts.state import Json
from everstep.errors import BadStepError, ConfigError, GuardStop, LossBoundError, NonFiniteError, UsageError
from everstep.metrics import Stats
from everstep.schedule import At, Every, Instant, Schedule
from everstep.services.best import Best, better, direction, latest, matches, name_patterns, reaches

NOT_MET = 4
"""Exit status of a run that does not meet a requirement."""

Policy = Literal["raise", "stop"]


@dataclass(eq=False, repr=False)
class Judge(Service):
    """Service whose outcome may change training; each kind is a dataclass, whose fields are its settings."""

    stage = Stage.DECIDE
    controller = True
    isolate = False
    default_schedule = Every(epochs=1)
    title: ClassVar[str]
    """Default name, with settings in braces."""
    memory: ClassVar[tuple[str, ...]] = ()
    """Attributes that are the state; a list is replaced, never changed."""
    _: KW_ONLY
    every: Schedule | None = None
    name: str = ""

    def __post_init__(self) -> None:
        settings = vars(self)
        super().__init__(self.name or self.title.format(**settings).replace("/", "."), self.every)
        if "metric" in settings:
            self.watches = (settings["metric"],)
        if "mode" in settings:
            settings["mode"] = direction(settings["metric"], settings["mode"])[0]

    def run(self, boundary: Boundary) -> Outcome | None:
        values = latest(boundary.readings, self.watches[0])
        boundary.readings.clear()
        return self.judge(values, boundary)

    def judge(self, values: Sequence[float], boundary: Boundary) -> Outcome | None:
        """Judge the metric: its values from outside steps since the last look, else the steps' mean."""
        return None

    def _integers(self, **least: int) -> None:
        """Require that settings are integers, of so much or more, or None where that is the default."""
        for name, lowest in least.items():
            none = "for none" if getattr(type(self), name) is None else ""
            setattr(self, name, integer(name, getattr(self, name), lowest, none=none))

    def _settings(self) -> dict[str, Any]:
        # those that are not None, so that a setting added later changes no run
        names = [field.name for field in fields(self) if field.name not in ("every", "name")]
        values = {name: getattr(self, name) for name in names} | {"every": self.schedule}
        return {name: value for name, value in values.items() if value is not None}

    def config(self) -> Json:
        def is_json(value: Any) -> bool:
            return isinstance(value, str | int | float) and value not in (math.inf, -math.inf)

        return {name: value if is_json(value) else repr(value) for name, value in self._settings().items()}

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._settings().items())
        return f"{type(self).__name__}(name={self.name!r}{options})"

    def state_dict(self) -> Any:
        return {name: getattr(self, name) for name in self.memory} or None

    def load_state_dict(self, state: Any) -> None:
        for name in self.memory:
            setattr(self, name, state[name])


@checked_init
@dataclass(eq=False, repr=False)
class EarlyStop(Judge):
    """Stop the run after a while without a better value, or at a value that is good enough.

    Values that were collected outside steps are judged one by one, others by their mean.

    Args:
        metric: name of the metric.
        mode: "min" or "max"; None infers the mode for names ending in loss, acc or accuracy.
        patience: stop after n evaluations in a row without improvement, 1 or more.
        patience_steps: stop at the first evaluation n or more steps after the last improvement, 1 or more.
        threshold: stop at the first value that reaches the threshold.
        baseline: the value to improve on at first.
        min_delta: an improvement must be larger than this, 0 or more.
        min_steps: no stop before this step, 0 or more.
        every: when to judge; default `Every(epochs=1)`.
    """

    title = "early stop {metric}"
    memory = ("best", "waited", "improved")
    metric: str
    mode: str | None = None
    _: KW_ONLY
    patience: int | None = None
    patience_steps: int | None = None
    threshold: float | None = None
    baseline: float | None = None
    min_delta: float = 0.0
    min_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is None and self.patience_steps is None and self.threshold is None:
            remedy = "give patience=, patience_steps= or threshold="
            raise ConfigError(f"EarlyStop({self.metric!r}) has no reason to stop: {remedy}")
        self._integers(patience=1, patience_steps=1, min_steps=0)
        self.threshold = real("threshold", self.threshold, none="for none")
        self.baseline = real("baseline", self.baseline, none="for none")
        self.min_delta = number("min_delta", self.min_delta, zero=True)
        self.best, self.waited = self.baseline, 0
        self.improved: int | None = None
        """Step of the last improvement, or of the first value; None before the first value."""

    def judge(self, values: Sequence[float], boundary: Boundary) -> Outcome | None:
        for value in values:
            if self.improved is None:
                self.improved = boundary.step
            if better(value, self.best, self.mode, self.min_delta):
                self.best, self.waited, self.improved = value, 0, boundary.step
            else:
                self.waited += 1
        goal, steps = self.threshold, 0 if self.improved is None else boundary.step - self.improved
        reached = [] if goal is None else [value for value in values if reaches(value, goal, self.mode)]
        if reached:
            reason = f"has reached {goal} with {reached[0]:.6g}"
        elif self.patience is not None and self.waited >= self.patience:
            reason = f"has not improved on {self.best} for {self.waited} evaluations"
        elif self.patience_steps is not None and steps >= self.patience_steps:
            reason = f"has not improved on {self.best} for {steps} steps"
        else:
            return None
        # the memory was updated before: early values count for later judgements
        if boundary.step < self.min_steps or boundary.stop is not None:
            return None
        return Outcome(actions=(Stop(f"early stop: {self.metric} {reason}"),))


@checked_init
@dataclass(eq=False, repr=False)
class Plateau(Judge):
    """Act where the mean of a metric's last `short` values is not better than the mean of the last `long`.

        Plateau("valid_loss", then=SetValue("optimizer.lr", times=0.1, least=1e-6))

    NaN and infinities are passed over.  A scheduler that computes the rate anew would undo the change.

    Args:
        metric, mode, every: as in `EarlyStop`.
        then: `SetValue` or `Stop`.
        long: number of values in the long mean; with fewer values nothing is judged.
        short: number of values in the short mean, 1 or more and less than `long`.
        cooldown: number of values after an action that cannot cause the next; default `long`.
    """

    title = "plateau of {metric}"
    memory = ("values", "resting")
    metric: str
    mode: str | None = None
    _: KW_ONLY
    then: SetValue | Stop
    long: int = 50
    short: int = 10
    cooldown: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.then, SetValue | Stop):
            raise ConfigError(f"Plateau(then={self.then!r}): give SetValue(...) or Stop(...)")
        self._integers(long=1, short=1, cooldown=0)
        if self.short >= self.long:
            raise ConfigError(f"Plateau(long={self.long}, short={self.short}): give a larger long=")
        self.sets = (self.then.target,) if isinstance(self.then, SetValue) else ()
        self.cooldown = self.long if self.cooldown is None else self.cooldown
        self.values: list[float] = []
        self.resting = 0

    def judge(self, values: Sequence[float], boundary: Boundary) -> Outcome | None:
        # a list, not a generator: each value counts down the cooldown, also after a plateau
        if not any([self._is_plateau(value) for value in values if math.isfinite(value)]):
            return None
        self._run.println(f"plateau of {self.metric} at step {boundary.step}: {self.then}")
        return Outcome(actions=(self.then,))

    def _is_plateau(self, value: float) -> bool:
        self.values = [*self.values, value][-self.long :]
        if self.resting:
            self.resting -= 1
            return False
        short, long = (math.fsum(self.values[-n:]) / n for n in (self.short, self.long))
        if len(self.values) < self.long or better(short, long, self.mode):
            return False
        self.resting = self.cooldown or 0
        return True


@checked_init
@dataclass(eq=False, repr=False)
class Require(Judge):
    """End the run with exit status 4 where a metric has not reached a value by a step or an epoch.

    The state is saved; a new start ends in the same way, until the requirement is changed or taken away.  A
    run that ends before the deadline fails, too, and with a raised limit it continues.

    Args:
        metric, mode, every: as in `EarlyStop`.
        value: the value that the metric must reach at least once.
        step, epoch: the deadline; exactly one of them, 1 or more.
    """

    title = "require {metric}"
    memory = ("best",)
    moments = frozenset({Moment.AFTER_STEP, Moment.AFTER_EPOCH, Moment.EXIT_LOOP})
    metric: str
    value: float
    mode: str | None = None
    _: KW_ONLY
    step: int | None = None
    epoch: int | None = None

    def __post_init__(self) -> None:
        if (self.step is None) == (self.epoch is None):
            raise ConfigError(f"Require({self.metric!r}) needs one deadline: give step= or epoch=")
        self._integers(step=1, epoch=1)
        self.value = real("value", self.value)
        deadline = Every(epochs=self.epoch) if self.step is None else At(self.step)
        self.every = deadline | (self.default_schedule if self.every is None else self.every)
        super().__post_init__()
        self.best: float | None = None

    def judge(self, values: Sequence[float], boundary: Boundary) -> Outcome | None:
        for value in values:
            if better(value, self.best, self.mode):
                self.best = value
        if self.best is not None and reaches(self.best, self.value, self.mode):
            return None
        unmet = f"requirement not met: {self.metric} has not reached {self.value}"
        best = "it has no value" if self.best is None else f"its best is {self.best:.6g}"
        # judged after the loop, too, whose last boundary may have brought the value
        if boundary.moment is Moment.EXIT_LOOP:
            ending = boundary.payload
            if ending.finished and not ending.reason.startswith(unmet):
                reason = f"{unmet}, {best} ({ending.reason})"
                self._run.println(reason)
                raise GuardStop(NOT_MET, reason)
            return None
        if self.step is not None:
            by, late = f"step {self.step}", boundary.step >= self.step
        else:
            by = f"epoch {self.epoch}"
            late = boundary.moment is Moment.AFTER_EPOCH and boundary.epoch >= (self.epoch or 0)
        return Outcome(actions=(Stop(f"{unmet} by {by}, {best}", code=NOT_MET),)) if late else None


_BAD_STEP = (
    "nothing after the last checkpoint is saved. Lower the learning rate or look at that step's batch; the "
    "run resumes from the last good checkpoint"
)


def _end_run(policy: Policy, error: type[BadStepError], message: str, step: int | None) -> Outcome:
    """End the run without saving its state, by the policy."""
    if policy == "raise":
        raise error(message, step=step)
    return Outcome(actions=(Stop(message, failed=True, step=step),))


def _check_policy(policy: Policy) -> Policy:
    if policy not in ("raise", "stop"):
        raise ConfigError(f'policy={policy!r}: give "raise" or "stop"')
    return policy


@checked_init
@dataclass(eq=False, repr=False)
class LossBound(Judge):
    """End the run at a loss that is too large (or NaN), before its state is saved.

    The largest single value since the last look is judged, never a mean.  Each look waits for the device.

    Args:
        metric: name of the metric.
        bound: the largest value allowed.
        times: the largest value allowed, as a multiple of the median of the last looks' means; more than 1.
        last: number of looks for the median, before which nothing is judged by it, 1 or more.
        policy: as in `NaNGuard`; the error is a `LossBoundError`.
        every: when to look; default `Every(steps=1)`.  A save between two looks is not judged.
    """

    stage = Stage.GUARD
    default_schedule = Every(steps=1)
    title = "bound of {metric}"
    memory = ("looks",)
    metric: str = "loss"
    _: KW_ONLY
    bound: float | None = None
    times: float | None = None
    last: int = 100
    policy: Policy = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound is None and self.times is None:
            raise ConfigError(f"LossBound({self.metric!r}) has no bound: give bound= or times=")
        self.policy = _check_policy(self.policy)
        self.bound = real("bound", self.bound, none="for none")
        self.times = number("times", self.times, none="for an absolute bound")
        if self.times is not None and self.times <= 1:
            raise ConfigError(f"LossBound(times={self.times!r}): give more than 1")
        self._integers(last=1)
        self.looks: list[float] = []
        """Means of the last looks."""

    def run(self, boundary: Boundary) -> Outcome | None:
        stats = boundary.readings.stats(self.metric)
        boundary.readings.clear()
        if stats is None:
            return None
        broken = self._find_fault(stats)
        if self.times is not None:  # after the judgement: a value is not part of its own median
            self.looks = [*self.looks, stats.mean][-self.last :]
        if broken is None:
            return None
        message = f"{self.metric} is {stats.max:.6g} at step {boundary.step}, {broken}; {_BAD_STEP}"
        return _end_run(self.policy, LossBoundError, message, boundary.step)

    def _find_fault(self, stats: Stats) -> str | None:
        """Say what is wrong with the largest value; None if it is within bounds."""
        if not math.isfinite(stats.max):  # also while there is no median yet: a NaN would spoil it
            return "which is not finite"
        if self.bound is not None and stats.max > self.bound:
            return f"above its bound {self.bound:g}"
        if self.times is not None and len(self.looks) >= self.last:
            middle = np.median(self.looks[-self.last :])
            if stats.max > self.times * middle:
                return f"above {self.times:g} times {middle:.6g}, the median of the last {self.last}"
        return None


class NaNGuard(Service):
    """Watch losses, parameters and optimizer moments for NaN and infinities.

    The guard costs nothing per step.  Metrics are checked when they are read, at the latest before every
    save; parameters and moments in the background, on the very bytes that would be committed.

    Args:
        policy: "raise" a `NonFiniteError`, or "stop": the loop ends as written, exit status 1.  The state is
            not saved in either case.
        metrics: names or patterns of the metrics that must be finite; name others than the default if your
            own gradient scaler lets the norm of the gradients overflow.
        parameters: whether parameters and optimizer moments must be finite.
    """

    stage = Stage.GUARD
    controller = True
    isolate = False
    window = "unsaved"
    guards_saves = True

    def __init__(
        self,
        policy: Policy = "raise",
        *,
        metrics: Sequence[str] = ("*loss", "*grad_norm"),
        parameters: bool = True,
    ) -> None:
        super().__init__("nan_guard")
        self.policy, (self.metrics, _) = _check_policy(policy), name_patterns("NaNGuard", metrics)
        self.guards_state = parameters

    def due(self, when: Instant) -> bool:
        return True

    def run(self, boundary: Boundary) -> Outcome | None:
        readings = boundary.readings
        guarded = [name for name in readings.names() if matches(name, self.metrics)]
        nonfinite = [(*first, name) for name in guarded if (first := readings.nonfinite(name)) is not None]
        readings.clear()
        if not nonfinite:
            return None
        step, value, name = min(nonfinite)
        return self.bad_state(f"metric {name!r} is {value} at step {step}; {_BAD_STEP}", step)

    def bad_state(self, message: str, step: int | None) -> Outcome:
        return _end_run(self.policy, NonFiniteError, message, step)


class StopAfter(BuiltIn):
    """End the run at a limit; the first limit reached wins.

    Args:
        steps, epochs: totals of the run, 1 or more; the loop ends as written.
        seconds: time of this start of the process, more than 0: it saves at the next boundary and ends with
            exit status 3, to be started again.
    """

    stage = Stage.DECIDE
    controller = True

    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        seconds: float | None = None,
        name: str | None = None,
    ) -> None:
        self.steps, self.epochs, self.seconds = plain(steps), plain(epochs), plain(seconds)
        limits: list[Schedule] = [] if steps is None else [At(self.steps)]
        limits += [] if epochs is None else [Every(epochs=self.epochs)]
        limits += [] if seconds is None else [Every(seconds=self.seconds)]
        if not limits:
            raise ConfigError("StopAfter() needs a limit: give steps=, epochs= or seconds=")
        super().__init__(name or "stop_after", reduce(operator.or_, limits))
        self._ends: float | None = None
        """The clock's time at which the budget is used up; None without one."""
        self._now = 0.0

    def config(self) -> Json:
        if self.steps is None and self.epochs is None:
            return None  # a time budget does not change training, only the time of the next start
        return {"steps": self.steps, "epochs": self.epochs}

    def due(self, when: Instant) -> bool:
        self._now = when.now  # of several ranks the writer's: all decide alike
        return super().due(when) or (self.steps is not None and when.step >= self.steps)

    def open(self, run: RunView) -> None:
        # by the schedule, which began before other services were opened: both end at the same instant
        self._run, self._ends = run, self.schedule.next_time()

    def run(self, boundary: Boundary) -> Outcome | None:
        at_epoch_end = boundary.moment is Moment.AFTER_EPOCH
        if self.steps is not None and boundary.step >= self.steps:
            return Outcome(actions=(Stop(f"stop after {self.steps} steps"),))
        if self.epochs is not None and at_epoch_end and boundary.epoch >= self.epochs:
            return Outcome(actions=(Stop(f"stop after {self.epochs} epochs"),))
        late = self._late(self._now)
        return None if late is None else Outcome(actions=(late,))

    def overtime(self) -> Interrupt | None:
        return None if self._ends is None else self._late(self._run.clock())

    def _late(self, now: float) -> Interrupt | None:
        if self._ends is None or now < self._ends:
            return None
        return Interrupt(f"time budget of {self.seconds:g} s is used up")


@checked_init
@dataclass(frozen=True)
class Annealing:
    """Value that is multiplied by `ratio` every n steps, or epochs: call it with the step's number.

        temperature = Annealing(1.0, 0.5, every=1000, least=0.1)
        for step, batch in loop.iter_steps(train):
            temperature(step)  # 1.0 at steps 1 to 1000, 0.5 at steps 1001 to 2000

    It depends on that number alone, so step k has the same value in a fresh and in a resumed run.

    Args:
        initial: the value of the first `every` steps, or epochs.
        every: number of steps, or epochs, between two multiplications, 1 or more.
        least, most: limits of the value.
    """

    initial: float
    ratio: float
    every: int = 1
    least: float = -math.inf
    most: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", integer("every", self.every))
        for name in ("initial", "ratio", "least", "most"):
            object.__setattr__(self, name, real(name, getattr(self, name)))
        if not self.least <= self.initial <= self.most:
            raise ConfigError(f"{self}: give bounds between which the initial value lies")

    def __call__(self, number: int) -> float:
        """Return the value of a step, or of an epoch, by its number from 1; number 0 has the value of 1."""
        value: float = self.initial * self.ratio ** (max(number - 1, 0) // self.every)
        return min(max(value, self.least), self.most)


@checked_init
@dataclass(eq=False, repr=False)
class Scheduled(Judge):
    """Set a number of the state to a function of the step: step k runs with `value(k)`.

        Scheduled("optimizer.lr", lambda step: 0.1 * min(1, step / 1000))

    Each change is a row of the record.

    Args:
        target: the number to set, as in `SetValue`.
        value: function of a step's number, from 1; it must depend on nothing else.
        every: steps after which the value is set; default `Every(steps=1)`.  In between, the value stays.
    """

    title = "schedule of {target}"
    isolate = True  # the function is the user's
    moments = frozenset({Moment.ENTER_LOOP, Moment.AFTER_STEP})
    window = "none"
    default_schedule = Every(steps=1)
    target: str
    value: Callable[[int], float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.value):
            raise ConfigError(f"Scheduled({self.target!r}, {self.value!r}): give a function of the step")
        self.sets = (self.target,)

    def config(self) -> Json:
        value = repr(self.value) if isinstance(self.value, Annealing) else described(self.value, "value")
        return {"target": self.target, "value": value, "every": repr(self.schedule)}

    def run(self, boundary: Boundary) -> Outcome | None:
        if boundary.moment is Moment.ENTER_LOOP and boundary.step:
            return None  # a resume: the value is part of the state
        return Outcome(actions=(SetValue(self.target, float(self.value(boundary.step + 1))),))


@checked_init
@dataclass(frozen=True)
class OnBest:
    """Condition: a metric has a new best value, judged as in `Best`; after a restart no worse one is new.

    Args:
        metric: name of the metric.
        mode: "min" or "max"; None infers the mode for names ending in loss, acc or accuracy.
    """

    metric: str
    mode: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", direction(self.metric, self.mode)[0])


Condition: TypeAlias = Schedule | OnBest | Callable[[Boundary], Any]


class Conditional(Service):
    """Service that acts under a condition; `every` says when to ask, unless the condition is a schedule."""

    default_schedule = Every(epochs=1)

    def __init__(self, condition: Condition, every: Schedule | None, name: str | None = None) -> None:
        self._best: Best | None = None
        self._described: Json = repr(condition)
        text = repr(condition)
        if isinstance(condition, Schedule):
            if every is not None:
                raise ConfigError(f"every={every!r} beside the schedule {condition!r}: leave out every=")
            every = condition
        elif isinstance(condition, OnBest):
            if isinstance(every, Schedule) and every.wall:
                raise ConfigError(f"every={every!r} with {condition!r}: give a schedule of steps or epochs")
            self._best = Best(condition.metric, condition.mode, save=False)
            self.watches = (condition.metric,)
        elif callable(condition):
            self._described = described(condition, "condition")
            text = getattr(condition, "__name__", "a function")  # the same in every process
        else:
            raise ConfigError(
                f"{condition!r} is not a condition; give a schedule such as Every(epochs=1), "
                'OnBest("valid_loss"), or a function of the boundary'
            )
        self._condition = condition
        label = re.sub(r"\w+=None, |, \w+=None", "", text).replace("/", ".")
        super().__init__(f"when {label}" if name is None else name, every)

    @property
    def measured(self) -> int | None:
        """Step of a best value that has not been acted on."""
        return None if self._best is None else self._best.measured

    def open(self, run: RunView) -> None:
        if self._best is not None:
            self._best.open(run)

    def met(self, boundary: Boundary, action: str = "") -> bool:
        """Whether the condition holds, where the service is due; for an `action` on weights, whether here."""
        if self._best is None:
            return not callable(self._condition) or bool(self._condition(boundary))
        place = self._best.place_at(boundary)
        return place is not None and (not action or self._best.has_weights(place, boundary, action))

    def state_dict(self) -> Any:
        return None if self._best is None else self._best.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self._best is not None and state is not None:
            self._best.load_state_dict(state)


_DECISIONS = Stop | Interrupt | SetValue
Deed: TypeAlias = Action | Callable[[Boundary], None]


class When(Conditional):
    """Act where a condition holds, as Orbit's ConditionalAction does.

        When(OnBest("valid_loss"), Save())
        When(Every(epochs=5), [SetValue("optimizer.lr", times=0.5), tell])

    A function gets the boundary and returns nothing; steps that are executed again after a kill call it
    again.  With a decision (`Stop`, `Interrupt`, `SetValue`) the service is a controller of stage DECIDE;
    else it runs before this boundary's checkpoint.

    Args:
        condition: a schedule, `OnBest(metric)`, or a function of the boundary.
        actions: one or several: `Save()`, `Stop(reason)`, `SetValue(...)`, `Interrupt(reason)`, functions.
        every: when a function is asked, or a best value judged; default each epoch.
    """

    stage = Stage.SAVE

    def __init__(
        self,
        condition: Condition,
        actions: Deed | Sequence[Deed],
        *,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(condition, every, name)
        self.actions = tuple(actions) if isinstance(actions, Sequence) else (actions,)
        for action in self.actions:
            is_function = callable(action) and not isinstance(action, type)
            if not (is_function or isinstance(action, _DECISIONS | Save)):
                raise ConfigError(
                    f"{action!r} is not an action; give Save(), Stop(reason), Interrupt(reason), "
                    "SetValue(...) or a function of the boundary"
                )
        self.sets = tuple(action.target for action in self.actions if isinstance(action, SetValue))
        if any(isinstance(action, _DECISIONS) for action in self.actions):
            self.stage, self.controller = Stage.DECIDE, True

    def config(self) -> Json:
        actions: list[Json] = [str(action) for action in self.actions if isinstance(action, _DECISIONS)]
        return {"condition": self._described, "actions": actions, "every": repr(self.schedule)}

    def run(self, boundary: Boundary) -> Outcome | None:
        holds = self.met(boundary)
        boundary.readings.clear()  # in any case: each window reaches from one boundary to the next
        if not holds:
            return None
        for action in self.actions:
            if callable(action) and (result := action(boundary)) is not None:
                raise UsageError(
                    f"{self.name!r}: {action!r} returned {result!r}; return nothing, and give actions, such "
                    "as Stop(reason), beside the function"
                )
        return Outcome(actions=tuple(action for action in self.actions if not callable(action)))


class FunctionService(Service):
    """Call `fn(boundary)` at one moment; made by `loop.on`, with a schedule or every n steps or epochs."""

    def __init__(self, moment: Moment, fn: ServiceFunction, every: Schedule | int | None, name: str) -> None:
        if every is None or isinstance(every, int):
            count = 1 if every is None else every
            every = Every(epochs=count) if moment is Moment.AFTER_EPOCH else Every(steps=count)
        super().__init__(name, every)
        self.moments = frozenset({moment})
        if moment not in SCHEDULED:
            self.window = "none"
        self._fn = fn

    def run(self, boundary: Boundary) -> Outcome | None:
        return self._fn(boundary)
