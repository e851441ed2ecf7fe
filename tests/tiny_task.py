"""A tiny task on NumPy, whose every bit depends on samples, order, noise and momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import everstep
from everstep.testing import ManualClock


class Notes(list[Any]):
    """What a test notes on a task: no plain list, which a resume would bring back."""


class TinyTask(everstep.Task):
    """The program of `tiny_runs.Tiny` as a task.

    Attributes:
        seen: sample numbers of every training step.
        trace: what was called, where a test asks for it.
    """

    def __init__(self) -> None:
        self.w, self.momentum = np.zeros(3), np.zeros(3)
        self.seen: list[tuple[int, ...]] = Notes()
        self.trace: list[str] = Notes()

    def state(self) -> Mapping[str, Any]:
        return {"w": self.w, "momentum": self.momentum}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        gradient = self.w - ids.mean() + np.random.standard_normal(3)
        self.momentum[:] = 0.9 * self.momentum + gradient
        self.w -= 0.1 * self.momentum
        self.seen.append(tuple(int(i) for i in ids))
        return {"loss": float(gradient @ gradient)}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        noise = np.random.standard_normal()
        return {"loss": float(np.mean((ids - self.w[0]) ** 2)), "noise": float(noise)}

    def inference_step(self, batch: Any) -> Any:
        return batch[0] * self.w[0]


Call = Callable[[], object]


def calling(step: Call = int, evaluation: Call = int, kind: type = TinyTask) -> Any:
    """A task that first calls a function in each of its steps, and in each batch of an evaluation."""

    class Calling(kind):  # type: ignore[misc]
        def train_step(self, batch: Any) -> Any:
            step()
            return super().train_step(batch)

        def eval_step(self, batch: Any) -> Any:
            evaluation()
            return super().eval_step(batch)

    return Calling()


def slow(clock: ManualClock, step: float = 0.0, evaluation: float = 0.0, kind: type = TinyTask) -> Any:
    """A task whose steps, and batches of evaluations, take seconds of a clock."""
    return calling(lambda: clock.advance(step), lambda: clock.advance(evaluation), kind)


def slow_data(clock: ManualClock, seconds: float, batches: Iterable[Any] = range(4)) -> Any:
    """Data whose batches take seconds of a clock, from the start in each pass."""

    class Slow:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches:
                clock.advance(seconds)
                yield batch

    return Slow()


def in_epochs(door: everstep.Trainer, body: Callable[[Any], object], **options: Any) -> Any:
    """Call a function with the loop in each of its epochs."""
    with door.open(**options) as loop:
        for _ in loop.iter_epochs():
            body(loop)
    return loop


class Own:
    """Data that keeps its own place: the order of a pass depends on how many were begun."""

    def __init__(self, samples: int = 6) -> None:
        self.samples, self.begun, self.place = samples, -1, samples

    def __iter__(self) -> Iterator[Any]:
        if self.place == self.samples:
            self.begun, self.place = self.begun + 1, 0
        while self.place < self.samples:
            self.place += 1
            yield (np.array([(self.place * (self.begun + 2)) % 7.0]),)

    def state_dict(self) -> dict[str, int]:
        return {"begun": self.begun, "place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.begun, self.place = state["begun"], state["place"]


def numbers(count: int, batch: int, *, shuffle: bool = False) -> Any:
    return everstep.data.arrays(np.arange(count), batch_size=batch, shuffle=shuffle)


def trainer(run_dir: Path, task: everstep.Task | None = None, **arguments: Any) -> everstep.Trainer:
    """A Trainer of the tiny task that prints nothing."""
    lines = arguments.pop("lines", [])
    streams = {
        "train": numbers(8, 2, shuffle=True),
        "valid": numbers(5, 2),
        "test": numbers(3, 2),
        **arguments.pop("streams", {}),
    }
    services = [*arguments.pop("services", ()), everstep.services.Console(sink=lines.append)]
    arguments = {"seed": 7, "max_epoch": 2, **arguments}
    return everstep.Trainer(task or TinyTask(), streams, run_dir, services=services, **arguments)
