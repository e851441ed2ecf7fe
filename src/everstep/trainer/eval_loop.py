"""Evaluation of a stream: a task's `eval_step` over its batches, and the means of the outputs.

On several ranks the values are those of one process.  Means and statistics are put together from parts: each
rank evaluates its part of each batch.  What else an evaluation may compute (an AUC of all scores, say)
follows from all batches, so each rank evaluates the whole data; the ranks then compare the batches that they
were handed, and take the writer's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeAlias

from everstep import backends
from everstep.arguments import positive
from everstep.contracts.data import WHOLE, Cursor, Share, Stream
from everstep.contracts.group import Group
from everstep.contracts.services import EvalStep
from everstep.contracts.tasks import Task, counted
from everstep.data.cursor import CursorWrapper
from everstep.errors import ConfigError, DataError, DisagreementError, MetricError, UsageError, nearest
from everstep.group import group_size
from everstep.metrics.collector import resolve, to_scalar
from everstep.metrics.statistics import Aggregate
from everstep.record import batch_digest
from everstep.services.evaluate import Evaluate
from everstep.state import isolated, make_entry, seed_all, undeclared
from everstep.supervisor.data_ranks import require_alike, require_same_samples

_READ_AFTER = 1000
"""Number of batches whose metrics wait on their device, to be read together."""


@contextmanager
def evaluating(task: Task, seed: int) -> Iterator[None]:
    """Put the task's models in evaluation mode for the block; random state and modes come back afterwards.

    Random numbers in the block follow from the seed alone, so an evaluation finds the same at any time and in
    any process.
    """
    with isolated(), ExitStack() as stack:
        # inside `isolated`, which puts the training's random state back
        seed_all(seed)
        for backend in backends.active():
            stack.enter_context(backend.evaluation_mode(undeclared(task.state())))
        stack.enter_context(task.evaluating())
        yield


@contextmanager
def places_kept(streams: Iterable[Stream], batches: bool = True) -> Iterator[None]:
    """After the block, put data that keeps a place or generators of its own back to where it stood.

    `batches`: whether what the block draws from an iterator comes again; it is kept in memory.
    """
    with ExitStack() as stack:
        for stream in streams:
            for generator in stream.generators:
                entry = make_entry("generator", generator)
                # saved now, loaded when the block ends
                stack.callback(entry.load, entry.save())
            stack.enter_context(stream.place_kept(batches))
        yield


def evaluate(
    task: Task,
    stream: Stream,
    name: str,
    num_steps: int,
    seed: int,
    service: Evaluate | None = None,
    say: Callable[[str], object] = print,
    poll: Callable[[], object] = lambda: None,
    on_step: Callable[[EvalStep], object] = lambda step: None,
    takes: Collection[str] = (),
    ranks: EvalRanks | None = None,
    comes_again: bool = True,
) -> dict[str, float]:
    """Evaluate the first `num_steps` batches of a stream, -1: all, from its start.

    Args:
        service: with the statistics and aggregations that are asked for, if any.
        say: takes a line that names the batch in which a metric is not finite.
        poll: called before each batch; its exception ends the evaluation.
        on_step: called after each batch that is not padding.
        takes: names of outputs that services look at: their values per sample are not metrics.
        comes_again: whether an iterator is to give the same batches at the next evaluation.

    Returns:
        The means of the outputs, weighted by the samples of each batch; the other statistics; and what
        `eval_end`, or `agg_func`, returns: on all ranks those of one process.
    """
    stats = {} if service is None else service.stats
    # the service from here on, if its functions reduce the outputs in place of the task
    service = service if service is not None and (service.agg_func or service.online_agg_func) else None
    takes_all = service is not None or type(task).eval_reduce is not Task.eval_reduce
    ranks = ranks or EvalRanks()
    stream = ranks.share_of(stream, name)
    metrics = _Metrics(stats, takes_all, takes, ranks)
    with (
        evaluating(task, seed),
        places_kept([stream], comes_again),
        closing(ranks.with_notes(stream.open(name, 0, seed=seed))) as batches,
    ):
        state = task.eval_begin() if service is None else None
        empty = True
        for inputs, logs in _inputs(task, batches, num_steps, poll):
            empty = False
            metrics.next_batch()
            outputs = mapping(task.eval_step(inputs), task, "eval_step")
            # Padding: the other ranks wait for this forward, and its samples are counted elsewhere.
            if not batches.weight:
                continue
            if clash := outputs.keys() & logs.keys():
                raise UsageError(
                    f"stream {name!r}: {min(clash)!r} is both a log of next_eval_inputs and an output of "
                    "eval_step; give one of them another name"
                )
            metrics.add(outputs, ranks.weight(*_samples(task, inputs), batches))
            outputs = {**outputs, **logs}
            state = _reduce(task, service, state, outputs, metrics.batches - 1)
            on_step(EvalStep(name, metrics.batches, inputs, outputs))
        if empty and not stream.may_be_empty:
            raise DataError(f"stream {name!r} gave no batch to evaluate; give it data")
        results = _results(task, service, state)
    values = metrics.read()
    if metrics.faults:
        text = ", ".join(f"{each!r} is {value} in batch {at}" for each, (at, value) in metrics.faults.items())
        say(f"stream {name!r}: {text} of the evaluation")
    values |= dict(zip(results, resolve([to_scalar(n, v) for n, v in results.items()]), strict=True))
    return ranks.agree(values, batches)


def _samples(task: Task, inputs: Any) -> tuple[float, bool]:
    """Return the weight of a batch, and whether the task can count its samples."""
    returned = f"{type(task).__name__}.batch_size"
    weight = positive(task.batch_size(inputs), returned, "how many samples the batch has")
    return weight, type(task).batch_size is not Task.batch_size or counted(inputs) is not None


def _reduce(task: Task, service: Evaluate | None, state: Any, outputs: dict[str, Any], step: int) -> Any:
    if service is None:
        return task.eval_reduce(state, outputs)
    if service.online_agg_func is not None:
        return service.online_agg_func(state, outputs, step)
    state = [] if state is None else state
    state.append(outputs)
    return state


def _results(task: Task, service: Evaluate | None, state: Any) -> Mapping[str, Any]:
    if service is None:
        result = task.eval_end(state)
        return {} if result is None else mapping(result, task, "eval_end")
    if service.agg_func is None:
        return mapping(state, service, "online_agg_func")
    return mapping(service.agg_func(state), service, "agg_func")


def _inputs(
    task: Task, batches: Cursor, num_steps: int, poll: Callable[[], object]
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    while num_steps:
        poll()
        try:
            pair = task.next_eval_inputs(batches)
        except StopIteration:
            return
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Mapping)):
            raise UsageError(
                f"{type(task).__name__}.next_eval_inputs returned a {type(pair).__name__}; return "
                "(inputs, logs), where logs is a mapping, {} for none"
            )
        yield pair
        num_steps -= 1


def prefixed(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in metrics.items()}


def mapping(value: Any, owner: object, method: str) -> Mapping[str, Any]:
    """Check and return metrics that a method of the task, or a function given to `Evaluate`, returned."""
    if not isinstance(value, Mapping):
        raise MetricError(
            f"{type(owner).__name__}.{method} returned {value!r}; return a mapping of names to numbers, "
            'as in {"loss": loss}'
        )
    for name in value:
        if not isinstance(name, str) or not name:
            raise MetricError(
                f"{type(owner).__name__}.{method} returned the metric name {name!r}: give a string, not empty"
            )
    return value


class _Metrics:
    """Statistics of the numbers among the outputs, weighted by samples.

    A name that once came with something else than a number (each sample's values, say) is not a metric, but
    only where a reduction takes it; where statistics of a name are asked for, each element counts as a value.
    """

    def __init__(
        self, stats: Mapping[str, Sequence[str]], takes_all: bool, takes: Collection[str], ranks: EvalRanks
    ) -> None:
        self.batches = 0
        """Number of the batch, from 1."""
        self._stats, self._takes_all, self._takes, self._ranks = stats, takes_all, takes, ranks
        self.faults: dict[str, tuple[int, float]] = {}
        """The first batch in which a metric without statistics, which may leave out NaN, was not finite."""
        self._waiting: list[tuple[str, Any, float, int]] = []
        self._samples: dict[str, list[float]] = {}
        """Values per sample that the other ranks do not have yet, by the name of a metric with statistics."""
        self._aggregates: dict[str, Aggregate] = {}
        self._no_metrics: set[str] = set()

    def next_batch(self) -> None:
        """Begin a batch, which may be padding: all ranks put values together after equally many."""
        if self.batches and not self.batches % _READ_AFTER:
            self._fold()
        self.batches += 1

    def add(self, outputs: Mapping[str, Any], weight: float) -> None:
        for name, value in outputs.items():
            if name in self._takes and name not in self._stats and _of_each_sample(value):
                self._no_metrics.add(name)
                continue
            # A part of one sample: its array would pass for a number, the mean of the part.
            if self._ranks.divides and weight == 1 and name in self._stats and _of_each_sample(value):
                self._take_samples(name, value)
                continue
            try:
                # not read here: each read would wait for the device
                self._waiting.append((name, to_scalar(name, value), weight, self.batches))
            except MetricError as error:
                if name in self._stats:
                    if not isinstance(value, Iterable):
                        raise
                    self._take_samples(name, value)
                elif self._takes_all:
                    self._no_metrics.add(name)
                else:
                    error.add_note(
                        "values per sample are for eval_reduce: write that method; or for Evaluate's "
                        f"stats=: ask for statistics of {name!r}"
                    )
                    raise

    def _take_samples(self, name: str, value: Any) -> None:
        # an array or tensor is read at once
        elements = value.reshape(-1).tolist() if hasattr(value, "reshape") else value
        values = resolve([to_scalar(name, each) for each in elements])
        if self._ranks.divides:
            self._samples.setdefault(name, []).extend(values)
        else:
            self._aggregate(name, values, [1.0] * len(values))

    def _aggregate(self, name: str, values: list[float], weights: list[float]) -> None:
        if name not in self._aggregates:
            self._aggregates[name] = Aggregate(self._stats.get(name, ()))
        self._aggregates[name].add(values, weights)

    def _fold(self) -> None:
        values = resolve([value for _, value, *_ in self._waiting])
        columns: dict[str, list[Row]] = {}
        for (name, _, weight, batch), value in zip(self._waiting, values, strict=True):
            if not math.isfinite(value) and name not in self._stats:
                self.faults.setdefault(name, (batch, value))
            columns.setdefault(name, []).append((batch, value, weight))
        if self._ranks.divides:
            # Spreads and quantiles are those of batches, not of parts; in one order of names on all ranks.
            for name in self._stats:
                columns[name] = self._ranks.batches(name, columns.get(name, []))
                if samples := self._ranks.gather(self._samples.pop(name, []), f"samples of {name!r}"):
                    self._aggregate(name, samples, [1.0] * len(samples))
        for name, rows in columns.items():
            if rows:
                self._aggregate(name, [value for _, value, _ in rows], [weight for *_, weight in rows])
        self._waiting.clear()

    def read(self) -> dict[str, float]:
        self._fold()
        if self._ranks.divides:
            plain = {name: each for name, each in self._aggregates.items() if name not in self._stats}
            self._aggregates |= self._ranks.means(plain, self.faults)
        missing = [name for name in self._stats if name not in self._aggregates]
        if missing and self.batches:
            hint = nearest(missing[0], self._aggregates)
            raise ConfigError(f"stats= asks for {missing[0]!r}, which eval_step did not return; {hint}")
        values: dict[str, float] = {}
        for name, aggregate in self._aggregates.items():
            if name not in self._no_metrics:
                values |= aggregate.read(name)
        return values


def _of_each_sample(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


# ------------------------------------------------------------------------- on several ranks

_WHOLE = ("eval_begin", "eval_reduce", "eval_end", "next_eval_inputs")
"""Methods of a task that see more than one batch, or draw batches, as they like."""

Row: TypeAlias = tuple[int, float, float]
"""(batch, mean over a rank's part of it, weight of that part)."""


def refuse_several(noun: str, remedy: str) -> None:
    """Refuse what only one process can do."""
    if (size := group_size()) > 1:
        raise UsageError(f"{noun} is for one process, and here {size} train together; {remedy}")


class EvalRanks:
    """The ranks that evaluate a stream together; usually there is one."""

    def __init__(self, group: Group | None = None, why_whole: str | None = None) -> None:
        self.group = group or Group()
        if self.group.data.size == 1:
            why_whole = why_whole or "the ranks compute with the same batches"
        self.why_whole = why_whole
        self.divides = self.group.data.size > 1 and why_whole is None
        self._name = ""

    def share_of(self, stream: Stream, name: str) -> Stream:
        """Return the stream of what this rank evaluates.

        Where a stream cannot be divided, each rank evaluates the whole of it.
        """
        self._name = name
        if self.group.size == 1:
            return stream
        if self.divides:
            try:
                part = stream.split(Share(self.group.data_rank, self.group.data.size, "pad"))
            except DataError as error:
                self.divides, self.why_whole = False, str(error)
            else:
                require_same_samples(self.group, stream, name)
                return part
        return whole(stream, self.why_whole)

    def notice(self, name: str) -> str | None:
        """Say, after an evaluation, that each rank makes the whole of it; None where they divide it."""
        if self.group.data.size == 1 or self.divides:
            return None
        return f"stream {name!r} is evaluated as a whole by each of {self.group.size} ranks: {self.why_whole}"

    def with_notes(self, cursor: Cursor) -> Cursor:
        """Return the cursor that notes the batches which several ranks have to be handed alike."""
        alike = self.group.data.shared or (self.group.size > 1 and not self.divides)
        return _NotedCursor(cursor) if alike else cursor

    def weight(self, batch_size: float, sized: bool, cursor: Cursor) -> float:
        """Return the weight of this rank's part of a batch."""
        return batch_size if sized or not self.divides else cursor.weight / self.group.data.size

    def batches(self, metric: str, rows: Sequence[Row]) -> list[Row]:
        """Put the batches of a metric together from their parts."""
        parts: dict[int, Aggregate] = {}
        for batch, mean, weight in self.gather(rows, f"batches of {metric!r}"):
            parts.setdefault(batch, Aggregate()).add([mean], [weight])
        return [(batch, *aggregate.mean_and_weight) for batch, aggregate in sorted(parts.items())]

    def means(self, own: Mapping[str, Aggregate], bad: dict[str, tuple[int, float]]) -> dict[str, Aggregate]:
        """Put means together, and the first batches in which values are not finite."""
        pairs = {name: aggregate.mean_and_weight for name, aggregate in own.items()}
        together: dict[str, Aggregate] = {}
        gathered = self.group.gather([pairs, bad], f"the evaluation of stream {self._name!r}")
        for means, worst in self.group.data.of_parts(gathered):
            for name, (mean, weight) in means.items():
                together.setdefault(name, Aggregate()).add([mean], [weight])
            for name, (batch, value) in worst.items():
                bad[name] = min(bad.get(name, (batch, value)), (batch, value))
        return together

    def gather(self, values: Sequence[Any], what: str) -> list[Any]:
        """Gather the values of all parts, in the order of parts."""
        title = f"the {what} of stream {self._name!r}"
        parts = self.group.data.of_parts(self.group.gather_lists(values, title))
        return [value for part in parts for value in part]

    def agree(self, values: dict[str, float], cursor: Cursor) -> dict[str, float]:
        """Return the values on which all ranks go on: of the whole data, those of the writer."""
        if not isinstance(cursor, _NotedCursor):
            return values
        if self.divides:
            title = f"the batches of stream {self._name!r}"
            require_alike(self.group.data, self.group.gather(cursor.noted, title), title)
            return values
        try:
            self.group.agree(cursor.noted, f"the data of stream {self._name!r}")
        except DisagreementError as error:
            error.add_note(_each_whole(self.why_whole))
            raise
        values = self.group.share(values, f"the evaluation of stream {self._name!r}")
        return values


def whole(stream: Stream, reason: str | None) -> Stream:
    """Return the whole stream, of which each rank is handed all batches."""
    try:
        return stream.split(WHOLE)
    except DataError as error:
        error.add_note(_each_whole(reason))
        raise


def _each_whole(reason: str | None) -> str:
    return f"each rank reads all samples here, as {reason}; give data that is not divided among the ranks"


class _NotedCursor(CursorWrapper):
    """Cursor that notes how many batches it hands out, and their digest."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__(cursor)
        self.noted = [0, 0]

    def __next__(self) -> Any:
        batch = next(self.cursor)
        count, digest = self.noted
        # None: a batch that gives nothing to digest
        self.noted = [count + 1, batch_digest(batch, digest) or digest]
        return batch


def why_whole(task: Task, service: Evaluate | None, looked_at: bool) -> str | None:
    """Say why an evaluation of parts would find something else; None where it would not."""
    overridden = [name for name in _WHOLE if getattr(type(task), name) is not getattr(Task, name)]
    if service is not None and (service.agg_func or service.online_agg_func):
        return f"{service!r} has a function of all outputs"
    if overridden:
        return f"{type(task).__name__} has {overridden[0]} of its own"
    return "services look at the batches of evaluations" if looked_at else None
