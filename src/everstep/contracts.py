"""Every protocol that somebody can implement, on one page, and the few values they exchange.

Who implements what: a user's own state (`Stateful`), data (`Stream`, `Cursor`), things that happen
around steps (`Service`), the steps of a `Trainer` (`Task`), a framework (`Backend`).
"""

from __future__ import annotations

import copy
import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from everstep.errors import ConfigError
from everstep.keywords import checked_keywords
from everstep.schedule import Never, Schedule, When

if TYPE_CHECKING:
    from everstep.metrics.statistics import Stats

Json: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A value that JSON can hold (tuples, int keys, bytes ... are the state codec's business)."""


# ---------------------------------------------------------------------------------------- state


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken and given back: models, optimizers, schedulers, your own."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists, tuples of arrays and plain values."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Become what `state_dict` described."""


@dataclass
class HostArray:
    """An array's bytes in host memory, and how to make the array again.

    Attributes:
        dtype: safetensors' name of the element type ("F32", "BF16", "I64", "BOOL" ...); "U8" with
            `extra["dtype"]` set where safetensors has no name for it.
        shape: the array's shape.
        data: its bytes in C order, uint8, 1-D, contiguous and writable.
        backend: name of the backend that made it and makes the array again ("numpy", "torch").
        extra: what else the backend needs for that, JSON only (device, memory order ...).
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    backend: str
    extra: dict[str, Any] = field(default_factory=dict)


class Mismatch(NamedTuple):
    """How a saved tree differs from what an entry expects, as names ("layer.weight (4, 2) -> (8, 2)")."""

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]


BESIDE = frozenset({"_metadata", "_buffers", "_flags", "_attributes"})
"""Keys under which the tree of a model has what is none of its weights."""


class Entry(ABC):
    """One named entry of the user's state, whatever object is behind it."""

    is_random: ClassVar[bool] = False
    """Whether it is a generator of random numbers."""

    def as_seeded(self) -> bool:
        """Of a generator: whether it is known that nothing was drawn since it was seeded."""
        return False

    @abstractmethod
    def save(self) -> Any:
        """A tree (dicts, lists, tuples, arrays, plain values) that refers to live arrays: copied at once."""

    def check(self, tree: Any) -> Mismatch:
        """What of `tree` would not fit, without changing anything.  Empty lists where it cannot be told."""
        return Mismatch([], [], [])

    @abstractmethod
    def load(self, tree: Any) -> None:
        """Become what `save` described; the object stays the same object."""

    def guarded(self, path: tuple[Any, ...]) -> bool:
        """Whether the array at `path` in `save()`'s tree must be finite (parameters, moments)."""
        return False

    def inner(self) -> Iterator[tuple[Any, Entry]]:
        """Of a container, the entries of what is in it, by key."""
        return iter(())

    def enter(self) -> None:  # noqa: B027
        """A loop is entered: what the object has now is what the program gives."""

    def leave(self) -> None:  # noqa: B027
        """The loop is left: what the object has now is what training made of it."""

    def options(self) -> dict[str, str]:
        """How the program made the object, where that changes training: name to value, as texts.

        The checkpoint keeps it, for comparison on resume; a learning rate, for example, is saved state
        too, and what the program gives for it would else be overruled in silence.  Functions are described
        by `everstep.backends.described`.
        """
        return {}

    def in_schedule(self, option: str) -> bool:
        """Whether an option belongs to a schedule, whose counts of steps may grow with the run's limit."""
        return False

    def use_options(self, names: Collection[str]) -> None:  # noqa: B027
        """After `load`: go on with these options as the program gave them."""


class OutsideWatch(Protocol):
    """Looks at objects of the framework that the state does not save."""

    def changed(self, epoch: int) -> list[str]:
        """Classes of those that changed since the last call; called after each step, of this epoch."""

    def skip(self) -> None:
        """What has changed until now was changed by no step."""


class UpdateWatch(Protocol):
    """Counts the updates that really happen (optimizer steps), and knows open accumulation windows."""

    updates: int
    """How many optimizer steps happened."""
    optimizers: int
    """How many optimizers the state has; 0 where only strangers are looked out for."""

    @property
    def outside(self) -> OutsideWatch:
        """What looks at objects that the state does not save."""

    def gradients(self) -> Any:
        """The gradients as a tree, or None where the state needs none (no window is open)."""

    def load_gradients(self, tree: Any) -> None:
        """Put saved gradients back; None clears them."""

    def left_out(self) -> bool:
        """Whether updates that were due were left out, their gradients not being finite."""

    def strangers(self) -> list[str]:
        """Descriptions of optimizers that training depends on without their being part of the state."""

    def unsaved(self, user: Any) -> list[str]:
        """Descriptions of parameters that the state's optimizers step and that no entry of it saves.

        Args:
            user: the saved tree of each entry by its name.
        """

    def recomputing(self, owner: str, option: str) -> list[str]:
        """Descriptions of schedulers that compute an option of optimizer `owner` anew at each step."""

    def unscheduled(self) -> list[str]:
        """Names of the state's optimizers whose learning rate has a schedule that the state lacks."""

    def close(self) -> None:
        """Remove every hook."""


class Backend(Protocol):
    """A framework (NumPy, torch ...): the only code that touches its arrays and its random state."""

    name: str
    array_types: tuple[type, ...]

    def random_state(self) -> Any:
        """The framework's global random state as a tree."""

    def set_random_state(self, state: Any) -> None:
        """Restore what `random_state` returned."""

    def seed(self, seed: int) -> None:
        """Seed the framework's global generators."""

    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        """Copy an array to host memory, into `reuse`'s buffer where that fits."""

    def from_host(self, host: HostArray) -> Any:
        """The array again, equal in type, dtype, shape and memory order, on the host or its device."""

    def pack(self, value: Any) -> tuple[str, Any] | None:
        """A value that is no dense array (a dtype, a NumPy scalar ...) as (kind, tree), None if foreign."""

    def unpack(self, kind: str, tree: Any) -> Any:
        """The value again, equal in type and bits."""

    def scalar(self, value: Any) -> Any:
        """A metric value kept for later: a float where that needs no waiting, else a detached copy.

        Raises:
            MetricError: more than one element, or not a real number.
        """

    def read_scalars(self, values: Sequence[Any]) -> list[float]:
        """The floats of what `scalar` kept, in one transfer."""

    def host_view(self, array: Any) -> NDArray[Any] | None:
        """The elements of an array in host memory, shared and not copied; None where they are not there.

        It never waits.  An element type that NumPy lacks may be given as integers of its size.
        """

    def is_deterministic(self) -> bool:
        """Whether the same operations on the same values give the same bits, as far as the settings tell."""

    def entry(self, value: Any) -> Entry | None:
        """The entry for one of this framework's own objects, None for anything else."""

    def watch_updates(self, objects: Mapping[str, Any]) -> UpdateWatch | None:
        """Watch the optimizers among the state's objects, and strangers that should be among them.

        None for a framework without optimizers.
        """

    def parameters(self, objects: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], bool]]:
        """(name, shape, trainable) of each parameter of the state's models, for the summary table."""

    def evaluation_mode(self, objects: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Switch the state's models to evaluation inside the block; afterwards every flag is as before."""

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it; of what nobody has used yet, nothing."""

    def processes(self) -> int:
        """How many processes compute together by the framework's own means, this one included."""

    def describe(self) -> dict[str, str]:
        """Version and devices, for the run's record."""

    def fingerprint(self, objects: Mapping[str, Any]) -> dict[str, str]:
        """What decides the last bits of what the framework computes here and now, as texts by name.

        Its version and those of its libraries, the processor's features that it uses, threads, flags, and
        the devices on which the state's `objects` lie.  Two processes in which it is equal compute equal
        bits from equal input, as far as the framework promises that.  What only changes speed is left out.
        """


# ----------------------------------------------------------------------------------------- data


class Cursor(Protocol):
    """An iterator over one pass of a stream.  Not shared, not restarted.

    It may have an attribute `done`: the batches handed out since the start of the pass, also where the
    cursor was opened at a position.  `Recovery` names a batch by it, and refuses a cursor that has none.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any:
        """The next batch; `StopIteration` at the end of the pass, also when asked again."""

    def position(self) -> Any:
        """Where the pass stands after the batches handed out so far (prefetched ones do not count).

        A tree that the checkpoint can hold.  Called between batches, not per batch.

        Raises:
            NotResumableError: the data cannot tell; says how to make it able to.
        """

    def remaining(self) -> int | None:
        """How many batches are left in this pass, None if unknown."""

    def close(self) -> None:
        """Stop workers and threads.  May be called twice."""


@runtime_checkable
class Stream(Protocol):
    """An immutable, named description of data; each pass over it is a cursor.

    It may have a method `describe(seed)` that returns what decides which batches come in a run of this
    seed, as a dictionary of JSON values ("kind", "length", "batch_size" ...).  The checkpoint keeps it,
    and data that is described otherwise is refused at the resume.  What counts only for going on inside
    a pass stands under the key "inside", a dictionary; what only changes speed does not belong there.

    Where something else than the cursor knows the place in the data, attribute `keeps_place` is that
    object: it cannot be trained on and evaluated at once.

    A method `sample_ids(purpose, pass_index, index, *, seed)` gives the numbers of a batch's samples.

    Our own have more, all of it optional: `generators` that it draws from; `carries_over`: the next pass
    depends on where this one leaves the data; `may_be_empty`: a pass without a batch is no error;
    `holds_state`: objects that tell their place at any time; the contexts `place_kept()` and
    `drawn_again()`, after which the data stands where it stood, or what was drawn comes again; `spent`:
    this object cannot be read from an earlier place any more; `unsaveable`: why no run can be saved while
    it reads this, and the remedy, in words, or None; `on_word`: whether its state is taken at its word,
    which is tried; `resumes`: "state", or "replay" where batches are drawn and discarded;
    `end_workers()`; `no_thread`: why no other thread may draw, in words.
    """

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        """Open one pass.

        Args:
            purpose: the name under which the loop uses it ("train", "valid" ...); keys randomness.
            pass_index: which pass over the data this is, from 0.
            position: None for the pass's start, else what `Cursor.position` returned.
            seed: the run's seed; a stream with a seed of its own ignores it.

        Raises:
            DataError: the position does not fit the data (it changed its length since).
        """


# ------------------------------------------------------------------------------------- the task


class Task:
    """Your steps, for a `Trainer`.  Subclass it; only `train_step` must be there to train.

    It knows no framework.  Carries on the tasks of Model Garden and Orbit.

    Attributes:
        model: what `build_model` returned; or assign it yourself, then nothing is built.
        optimizer: the same of `build_optimizer`.
        is_built: whether a Trainer has called `build`, which no other one does again.
    """

    model: Any = None
    optimizer: Any = None
    is_built = False

    def build(self) -> None:
        """Make what is not there yet; called once, however many Trainers the task has."""
        if self.model is None:
            self.model = self.build_model()
        if self.optimizer is None:
            self.optimizer = self.build_optimizer(self.model)

    def build_model(self) -> Any:
        """Make the model.  Where the Trainer has a seed, random numbers drawn here follow from it."""
        return None

    def build_optimizer(self, model: Any) -> Any:
        """Make the optimizer of `model`."""
        return None

    def initialize(self) -> None:
        """Start from other weights than `build_model` made; called only where the run has no checkpoint."""

    def state(self) -> Mapping[str, Any]:
        """Name to object: everything that training changes.  Default: the model and the optimizer."""
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {name: part for name, part in parts.items() if part is not None}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Train on one batch; returns metrics, one real number each (a tensor may stay on its device)."""
        raise _lacks(self, "train_step")

    def train_loop_begin(self) -> None:
        """Before the steps of each epoch; of one that a resume enters again, again."""

    def train_loop_end(self) -> Mapping[str, Any] | None:
        """After them; may return metrics of the epoch."""
        return None

    def next_train_inputs(self, batches: Iterator[Any]) -> Any:
        """What the next `train_step` gets; may draw several batches, or end the pass by `StopIteration`."""
        return next(batches)

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Look at one batch, in evaluation mode.

        Returns:
            Names to values.  Numbers are averaged over the evaluation, weighted by `batch_size`;
            others (arrays of each sample's values, say) are for `eval_reduce`.
        """
        raise _lacks(self, "eval_step")

    def batch_size(self, batch: Any) -> float:
        """How many samples a batch has: the weight of its metrics in the mean.

        A number above 0.  Default: the length of the batch, or of its first part if it is a tuple, list or
        mapping; what has no length is one sample.
        """
        while isinstance(batch, tuple | list | Mapping) and batch:
            batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
        try:
            return float(len(batch))
        except TypeError:
            return 1.0

    def eval_begin(self) -> Any:
        """Before an evaluation: the state that `eval_reduce` is first called with."""
        return None

    def eval_reduce(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        """Take in one batch: what `eval_step` returned and the logs of `next_eval_inputs`; the new state."""
        return state

    def eval_end(self, state: Any) -> Mapping[str, Any] | None:
        """After an evaluation: metrics made of the last state, instead of means of the same name."""
        return None

    def next_eval_inputs(self, batches: Iterator[Any]) -> tuple[Any, Mapping[str, Any]]:
        """What the next `eval_step` gets, and logs (file names, ids) that it does not need.

        The logs are merged with what the step returns, for `eval_reduce`.
        """
        return next(batches), {}

    def inference_step(self, batch: Any) -> Any:
        """The predictions for one batch, in evaluation mode."""
        raise _lacks(self, "inference_step")

    def evaluating(self) -> AbstractContextManager[object]:
        """Surrounds each evaluation and prediction; what it changes it puts back, also after an error."""
        return nullcontext()


def _lacks(task: Task, method: str) -> ConfigError:
    return ConfigError(f"{type(task).__name__} has no {method}; give it one: def {method}(self, batch): ...")


# ------------------------------------------------------------------------------------- services


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

    run_dir: Any
    segment: int

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
        self.schedule = Never() if schedule is None else copy.deepcopy(schedule)

    def config(self) -> Json:
        """What of its arguments changes training, for comparison on resume (controllers only)."""
        return None

    def open(self, run: RunView) -> None:
        """The loop was entered; state is restored."""

    def due(self, when: When) -> bool:
        """Whether it runs at this AFTER_STEP or AFTER_EPOCH boundary."""
        return self.schedule.due(when)

    def run(self, boundary: Boundary) -> Outcome | None:
        """Do the work of one boundary.  Never mutates training: return an `Outcome` for that."""
        raise NotImplementedError(f"{type(self).__name__}.run")

    def finish(self, boundary: Boundary) -> Outcome | None:
        """The loop has come to a clean end, and the last state is committed; called once, in stage REPORT.

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
