"""One evaluation: a task's `eval_step` over a stream, and the means of what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

from everstep import backends
from everstep.contracts import Cursor, EvalStep, Stream, Task
from everstep.errors import DataError, MetricError, UsageError
from everstep.metrics.collector import resolve, to_scalar
from everstep.state import decode, encode, isolated, make_entry
from everstep.supervisor.user_state import UserState

_READ_AFTER = 1000
"""Batches whose numbers wait on their device to be read together."""


@contextmanager
def evaluating(task: Task) -> Iterator[None]:
    """Models in evaluation mode; random state and modes come back afterwards."""
    with isolated(), ExitStack() as stack:
        for backend in backends.active():
            stack.enter_context(backend.evaluation_mode(task.state()))
        stack.enter_context(task.evaluating())
        yield


@contextmanager
def places_kept(streams: Iterable[Stream]) -> Iterator[None]:
    """Data that keeps its own place, or generators, stands afterwards where it stood."""
    with ExitStack() as stack:
        for stream in streams:
            for generator in getattr(stream, "generators", ()):
                entry = make_entry("generator", generator)
                stack.callback(entry.load, entry.save())
            stack.enter_context(getattr(stream, "place_kept", nullcontext)())
        yield


@contextmanager
def drawn_again(streams: Iterable[Stream]) -> Iterator[None]:
    """What is drawn from iterators is kept in memory, and comes again afterwards."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(getattr(stream, "drawn_again", nullcontext)())
        yield


@contextmanager
def unchanged(task: Task, streams: Collection[Stream]) -> Iterator[None]:
    """Whatever is trained inside, the task's state, its gradients, data and random state come back."""
    user = UserState(task.state())
    with isolated(), places_kept(streams), drawn_again(streams), ExitStack() as stack:
        user.open(stack)
        for stream in streams:
            stack.callback(getattr(stream, "end_workers", _nothing))
        before = encode(user.save())
        try:
            yield
        finally:
            user.load(decode(before), 0)


def _nothing() -> None:
    """Of data without workers."""


def evaluate(
    task: Task, stream: Stream, name: str, num_steps: int, seed: int, seen: Callable[[EvalStep], object]
) -> dict[str, float]:
    """Evaluate the first `num_steps` batches of a stream, -1: all, from its start.

    Args:
        seen: called after each batch.

    Returns:
        The means of the outputs, weighted by the samples of each batch, and what `eval_end` returns.

    Raises:
        DataError: there was no batch.
        MetricError: a step returned no mapping, or what is neither a number nor taken by `eval_reduce`.
        UsageError: a log of `next_eval_inputs` has the name of an output.
    """
    means = _Means(task)
    with evaluating(task), places_kept([stream]), closing(stream.open(name, 0, seed=seed)) as batches:
        state = task.eval_begin()
        for inputs, logs in _inputs(task, batches, num_steps):
            outputs = mapping(task.eval_step(inputs), task, "eval_step")
            if clash := outputs.keys() & logs.keys():
                raise UsageError(
                    f"stream {name!r}: {min(clash)!r} is a log of next_eval_inputs and an output of "
                    "eval_step; give one of them another name"
                )
            means.add(outputs, task.batch_size(inputs))
            outputs = {**outputs, **logs}
            state = task.eval_reduce(state, outputs)
            seen(EvalStep(name, means.batches, inputs, outputs))
        if not means.batches and not getattr(stream, "may_be_empty", False):
            raise DataError(f"stream {name!r} gave no batch to evaluate; give it data")
        found = task.eval_end(state)
    found = {} if found is None else mapping(found, task, "eval_end")
    return means.read() | dict(zip(found, resolve([to_scalar(n, v) for n, v in found.items()]), strict=True))


def _inputs(task: Task, batches: Cursor, num_steps: int) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    while num_steps:
        try:
            given = task.next_eval_inputs(batches)
        except StopIteration:
            return
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
            raise UsageError(
                f"{type(task).__name__}.next_eval_inputs returned a {type(given).__name__}; return "
                "(inputs, logs), where logs is a mapping, {} for none"
            )
        yield given
        num_steps -= 1


def mapping(value: Any, task: Task, method: str) -> Mapping[str, Any]:
    """`value`, which a method of the task returned as metrics.

    Raises:
        MetricError: it is no mapping.
    """
    if not isinstance(value, Mapping):
        raise MetricError(
            f"{type(task).__name__}.{method} returned {value!r}; return a mapping of names to numbers, "
            'as in {"loss": loss}'
        )
    return value


class _Means:
    """Means of the numbers among the outputs, weighted by samples.

    A name that came once as something else than a number (each sample's values, say) is no metric, but
    only where `eval_reduce` takes it.
    """

    def __init__(self, task: Task) -> None:
        self.batches = 0
        self._reduces = type(task).eval_reduce is not Task.eval_reduce
        self._waiting: list[tuple[str, Any, float]] = []
        self._parts: dict[str, tuple[list[float], list[float]]] = {}
        self._no_metrics: set[str] = set()

    def add(self, outputs: Mapping[str, Any], weight: float) -> None:
        self.batches += 1
        for name, value in outputs.items():
            try:
                self._waiting.append((name, to_scalar(name, value), weight))
            except MetricError as error:
                if not self._reduces:
                    error.add_note("what eval_step returns of each sample is for eval_reduce: write one")
                    raise
                self._no_metrics.add(name)
        if not self.batches % _READ_AFTER:
            self._fold()

    def _fold(self) -> None:
        values = resolve([value for _, value, _ in self._waiting])
        for (name, _, weight), value in zip(self._waiting, values, strict=True):
            products, weights = self._parts.setdefault(name, ([], []))
            products.append(value * weight)
            weights.append(weight)
        self._waiting.clear()

    def read(self) -> dict[str, float]:
        self._fold()
        parts = {name: part for name, part in self._parts.items() if name not in self._no_metrics}
        return {name: _mean(products, weights) for name, (products, weights) in parts.items()}


def _mean(products: list[float], weights: list[float]) -> float:
    """Their quotient; the sums are exact, so that the order of the batches counts for nothing."""
    if not all(map(math.isfinite, products)):
        return sum(products) / sum(weights)
    total = math.fsum(weights)
    return math.fsum(products) / total if total else math.nan
