"""Collector of metrics: values become rows of the record, and fill the windows of every consumer.

Inside steps a value is only appended to a list.  When something is due, all values are read together, on a
device with one transfer.  The content of a window does not depend on the time of reading.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from everstep import backends
from everstep.contracts.group import Group
from everstep.contracts.metrics import Block
from everstep.errors import MetricError
from everstep.metrics.statistics import Stats, Window, means_of_steps, means_of_values

Convert = Callable[[Any], Any]
Ordinals = dict[str, dict[str, tuple[int, int]]]
"""Phase -> name -> (step, number of rows at that step)."""
_RATES = (
    r"(?:^|[_/ ])(?:[fs]ps|throughput|elapsed|step_ms|(?:its?|iters?|iterations|steps?|batch|batches|"
    r"samples?|examples|images?|frames|tokens?|tok)(?:_per_|/)(?:s|sec|second))$"
)
_PROGRAM = ("head", "step", "tail", "epoch")
"""Phases in which the program collects."""


@lru_cache(maxsize=1024)  # the names of a run are the same at each boundary
def is_wall(name: str) -> bool:
    """Whether a metric counts seconds of the clock: the last word of its name is time or timer.

    Words end at "_", "/" or a space: `step_time`, `valid/timer`; not `runtime`.
    """
    return re.split(r"[_/ ]", name)[-1] in ("time", "timer")


@lru_cache(maxsize=1024)
def is_clocked(name: str) -> bool:
    """Whether a metric is a time or, by its name, a rate: `it_per_s`, `tokens/sec`, `fps`, `step_ms`.

    Steps that run again are not compared by it.  Unlike a time it is part of the state, as names may mislead.
    """
    return is_wall(name) or re.search(_RATES, name, re.IGNORECASE) is not None


def _whole(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise MetricError(
            f"a metric is a float, and an int of {value.bit_length()} bits is beyond its range (1.8e308): "
            "collect its logarithm, or scale it"
        ) from None


_CONVERT: dict[type, Convert] = {float: float, int: _whole, bool: _whole}


def _converter(kind: type, name: str, value: Any) -> Convert:
    backend = backends.of(value)
    if backend is None:
        remedy = (
            f"; of several values their mean: with loop.metric_collector({name!r}) as mean: "
            "mean.collect(value, weight=...) for each"
            if isinstance(value, list | tuple)
            else "; give what its .compute() returns"
            if callable(getattr(value, "compute", None))  # of torchmetrics
            else ""
        )
        raise MetricError(
            f"metric {name!r} is {value!r}, a {kind.__name__}: collect one real number (float, int, or an "
            f"array or tensor with one element){remedy}"
        )
    _CONVERT[kind] = backend.scalar
    return backend.scalar


def to_scalar(name: str, value: Any) -> Any:
    """Convert a metric value to a float, or to a detached copy on its device."""
    convert = _CONVERT.get(type(value)) or _converter(type(value), name, value)
    try:
        return convert(value)
    except MetricError as error:
        raise MetricError(f"metric {name!r}: {error}") from None


def is_scalar(name: str, value: Any) -> bool:
    try:
        to_scalar(name, value)
    except MetricError:
        return False
    return True


def resolve(values: list[Any]) -> list[float]:
    """Return the floats of values from `to_scalar`, in one transfer from each device."""
    resolved = list(values)
    by_backend: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        if type(value) is not float:
            backend = backends.of(value)
            assert backend is not None, type(value)
            by_backend.setdefault(backend.name, []).append(index)
    for name, indices in by_backend.items():
        numbers = backends.get(name).read_scalars([values[i] for i in indices])
        for index, number in zip(indices, numbers, strict=True):
            resolved[index] = number
    return resolved


class Column(NamedTuple):
    """Values of one metric, collected inside steps, with the step of each."""

    name: str
    steps: list[int]
    values: list[float]
    finite: bool


class Reader:
    """Windows of one consumer: reading or clearing them changes no other consumer's windows."""

    def __init__(self, *, outside: bool = True) -> None:
        self.saved = True
        self._outside = outside
        self._windows: defaultdict[str, Window] = defaultdict(Window)
        self._values: dict[str, list[float]] = {}
        self._nonfinite: dict[str, tuple[int, float]] = {}
        self._refresh: Callable[[], None] = lambda: None

    def add_steps(self, columns: Iterable[Column]) -> None:
        for column in columns:
            self._windows[column.name].add_many(column.values)
            if not column.finite:
                self._note(column.name, column.steps, column.values)

    def add_outside(self, name: str, step: int, value: float) -> None:
        if self._outside:
            self._windows[name].add(value)
            self._values.setdefault(name, []).append(value)
            self._note(name, [step], [value])

    def _note(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        for step, value in zip(steps, values, strict=True):
            if not math.isfinite(value):
                self._nonfinite.setdefault(name, (step, value))
                return

    def stats(self, name: str) -> Stats | None:
        """Return the statistics of `name` since the last clear; None without values."""
        self._refresh()
        return self._windows[name].stats() if name in self._windows else None

    def values(self, name: str) -> list[float]:
        """Return the values of `name` collected outside steps since the last clear, in order."""
        return list(self._values.get(name, ()))

    def names(self) -> list[str]:
        self._refresh()
        return sorted(self._windows)

    def nonfinite(self, name: str) -> tuple[int, float] | None:
        """Return (step, value) of the first NaN or infinity of `name` since the last clear, else None."""
        self._refresh()
        return self._nonfinite.get(name)

    def clear(self) -> None:
        self._refresh()
        self._windows, self._values, self._nonfinite = defaultdict(Window), {}, {}

    def state(self) -> dict[str, Any]:
        """Return all that does not depend on the clock, as plain values."""
        return {
            "windows": {n: w.state() for n, w in self._windows.items() if not is_wall(n)},
            "values": {n: list(v) for n, v in self._values.items() if not is_wall(n)},
            "nonfinite": {n: list(v) for n, v in self._nonfinite.items() if not is_wall(n)},
        }

    def load(self, state: dict[str, Any]) -> None:
        windows = {n: Window.from_state(w) for n, w in state["windows"].items()}
        self._windows = defaultdict(Window, windows)
        self._values = {n: list(v) for n, v in state["values"].items()}
        self._nonfinite = {n: (v[0], v[1]) for n, v in state["nonfinite"].items()}


def all_stats(readings: Reader) -> dict[str, Stats]:
    return {name: stats for name in readings.names() if (stats := readings.stats(name)) is not None}


class Collector:
    """Collector of all metric values of a run."""

    def __init__(self, epoch: Callable[[], int]) -> None:
        self.pending: list[tuple[int, str, Any]] = []
        """(step, name, value) of values collected inside steps and not read yet."""
        self.step_times: list[float] = []
        """Seconds of each step, not read yet; the loop appends."""
        self.emit: Callable[[Block], None] = lambda block: None
        """Takes finished rows; set when the journal is open."""
        self.open_step = 0
        """Step whose body is running, 0 outside; set by the loop.  Its rows wait for its end."""
        self.open_rows: dict[str, tuple[int, float, int]] = {}
        """Metrics that were read in the middle of a step: name -> (step, sum, count of values)."""
        self.epoch = epoch
        self.across: Group | None = None
        self.weights: dict[int, float] = {}
        """Weight of this rank's part of a step's batch, for steps in `pending`; 1.0 where missing."""
        self.alone = False
        """Whether a service runs that only this rank of several runs."""
        self._readers: dict[str, Reader] = {}
        self._epoch = Reader(outside=False)
        self._ended: set[str] = set()
        """Names of the epoch whose steps have ended, until the next epoch begins."""
        self._seqs: Ordinals = {}
        self._wall_seqs: Ordinals = {}
        self._unclaimed: dict[str, Any] = {}
        self._watchers: dict[str, list[Callable[[float], None]]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the values of a step: all of them, or none if one is not a real number."""
        values = []
        for name, value in metrics.items():
            convert = _CONVERT.get(type(value)) or _converter(type(value), name, value)
            try:  # as `to_scalar`, without its call: each step comes here
                values.append((step, name, convert(value)))
            except MetricError as error:
                raise MetricError(f"metric {name!r}: {error}") from None
        self.pending += values

    def watch(self, name: str, seen: Callable[[float], None]) -> None:
        self._watchers.setdefault(name, []).append(seen)

    def reader(self, name: str, reader: Reader, *, saved: bool = True) -> Reader:
        """Let consumer `name` take part from now on; `saved`: its open window is part of the state."""
        self._readers[name] = reader
        reader.saved, reader._refresh = saved, self.read
        if saved and name in self._unclaimed:
            reader.load(self._unclaimed.pop(name))
        return reader

    def drop_reader(self, name: str) -> None:
        del self._readers[name]

    def outside(self, phase: str, step: int, name: str, value: Any, *, wall: bool = False) -> None:
        """Take a value collected outside steps: the value is read at once, and gets a row of its own.

        `wall`: the value depends on the clock; as that of a service which runs on this rank alone, it is
        recorded, but no window of the state holds it, and no service decides by it.
        """
        self.read()  # first: windows take values in the order of collection
        number = value if type(value) is float else resolve([value])[0]
        passing = wall or self.alone
        for reader in self._readers.values():
            if not (passing and reader.saved):
                reader.add_outside(name, step, number)
        clocked = wall or is_wall(name)
        ordinals = (self._wall_seqs if clocked else self._seqs).setdefault(phase, {})
        at, seq = ordinals.get(name, (step, 0))
        seq = seq if at == step else 0
        ordinals[name] = (step, seq + 1)
        self._emit(phase, name, [(step, number, 1)], seq, wall)
        for seen in () if passing else self._watchers.get(name, ()):
            seen(number)

    def reduced(self, values: dict[str, Any]) -> dict[str, Any]:
        """Reduce values collected outside steps over the ranks; every rank calls this with the same names."""
        if self.across is None or self.alone or not values:
            return values
        resolved = dict(zip(values, resolve(list(values.values())), strict=True))
        return dict(means_of_values(self.across, resolved))

    def require_alone(self, writer: str, step: int, name: str) -> None:
        """Refuse a second writer of a name at the same moment: a best value would mix the two."""
        tables = [*self._seqs.items(), *self._wall_seqs.items()]
        phases = [phase for phase, ordinals in tables if ordinals.get(name, (-1, 0))[0] == step]
        if writer not in _PROGRAM and name in self._in_steps():
            phases.append("step")
        for phase in phases:
            if _writer(phase) != _writer(writer):
                raise MetricError(
                    f"metric {name!r} is written at step {step} by {_writer(phase)} and by "
                    f"{_writer(writer)}; give one of the two another name, or leave one out"
                )

    def note_epoch_time(self, seconds: float) -> None:
        """Add the duration of an epoch to the windows that take values outside steps, without a row."""
        for reader in self._readers.values():
            reader.add_outside("epoch_time", 0, seconds)

    def begin_epoch(self) -> None:
        self._seqs.clear()
        self._wall_seqs.clear()
        self._ended.clear()

    def collected_names(self) -> set[str]:
        """Return the names that the program has collected in this epoch, in and outside steps."""
        outside = (self._seqs.get(phase, {}) for phase in ("head", "tail"))
        return self._in_steps().union(*outside)

    def _in_steps(self) -> set[str]:
        return self._ended.union(self._epoch.names())

    def read(self) -> None:
        """Read all pending values into windows and rows; of several ranks, every rank calls this."""
        if self.alone:  # the values of the other ranks are missing
            return
        if self.step_times or self.pending:
            seconds, columns = self.step_times[:], self._take_columns()
            self.step_times.clear()
            self._epoch.add_steps(columns)
            # no rows of step times: the journal has times per range of steps
            timed = [Column("step_time", [], seconds, True), *columns] if seconds else columns
            for reader in self._readers.values():
                reader.add_steps(timed)
            for column in columns:
                self._step_rows(column.name, column.steps, column.values)
        for name, (step, total, count) in list(self.open_rows.items()):
            if step != self.open_step:
                del self.open_rows[name]
                self._emit("step", name, [(step, total / count, count)])

    def _take_columns(self) -> list[Column]:
        """Take the pending values out, as columns by name; on a device they are read here."""
        items = self.pending[:]
        self.pending.clear()
        if self.across is not None:
            numbers = resolve([value for _, _, value in items])
            items = [(step, name, number) for (step, name, _), number in zip(items, numbers, strict=True)]
            items = means_of_steps(self.across, items, self.weights)
            self.weights.clear()
        by_name = defaultdict[str, tuple[list[int], list[Any]]](lambda: ([], []))
        for step, name, value in items:
            steps, raw = by_name[name]
            steps.append(step)
            raw.append(value)
        columns = []
        for name, (steps, raw) in by_name.items():
            values = raw if set(map(type, raw)) == {float} else resolve(raw)
            columns.append(Column(name, steps, values, math.isfinite(sum(values))))
        return columns

    def _step_rows(self, name: str, steps: list[int], values: list[float]) -> None:
        """Fold values into a row per step; the last row stays open: its step may collect again."""
        previous = self.open_rows.pop(name, None)
        rows = [] if previous is None else [previous]
        for step, value in zip(steps, values, strict=True):
            if rows and rows[-1][0] == step:
                _, total, count = rows[-1]
                rows[-1] = (step, total + value, count + 1)
            else:
                rows.append((step, value, 1))
        self.open_rows[name] = rows.pop()
        if rows:
            self._emit("step", name, [(step, total / count, count) for step, total, count in rows])

    def _emit(
        self, phase: str, name: str, rows: Sequence[tuple[int, float, int]], seq: int = 0, wall: bool = False
    ) -> None:
        steps, values, counts = map(list, zip(*rows, strict=True))
        wall = wall or is_wall(name)
        self.emit(Block(self.epoch(), phase, name, wall, steps, values, counts, [seq] * len(steps)))

    def abandon_step(self) -> None:
        """Read all pending values, and leave the running step: it is not completed, and has no rows."""
        if self.across is not None:  # the other ranks are not here; a resume executes these steps again
            self.pending.clear()
            self.step_times.clear()
        try:
            self.read()
        finally:
            self.open_step = 0
            self.open_rows.clear()  # else a service that reads at the exit would write them as rows of a step

    def end_epoch(self, step: int) -> None:
        """Emit each name's mean over the epoch's steps, and begin a new epoch."""
        self.read()
        for name, stats in all_stats(self._epoch).items():
            if not is_wall(name):
                self._emit("epoch", name, [(step, stats.mean, stats.count)])
        self._ended.update(self._epoch.names())
        self._epoch.clear()

    def state(self) -> dict[str, Any]:
        """Return the open windows (after a read) and the ordinals, as plain values."""
        self.read()
        return {
            "epoch": self._epoch.state(),
            "seqs": {phase: dict(ordinals) for phase, ordinals in self._seqs.items()},
            "readers": {name: reader.state() for name, reader in self._readers.items() if reader.saved},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`; a window waits for its consumer, which may come during the loop."""
        self._epoch.load(state["epoch"])
        self._seqs = {phase: dict(ordinals) for phase, ordinals in state["seqs"].items()}
        self._unclaimed = dict(state["readers"])
        for name, reader in self._readers.items():
            if reader.saved and name in self._unclaimed:
                reader.load(self._unclaimed.pop(name))


def _writer(phase: str) -> str:
    return "the program" if phase in _PROGRAM else f"service {phase.removeprefix('eval/')!r}"
