"""A tiny training program on NumPy, whose every bit depends on samples, order, noise and momentum."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

import everstep
from everstep import Every
from everstep.errors import GuardStop
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from everstep.schedule import Schedule
from everstep.services import Stage

LoopHook = Callable[[Any, int], object]
T = TypeVar("T")


def bind(data: Any, run_dir: Path) -> None:
    """A loop over data that is to be refused before a step is made."""
    with everstep.TrainLoop(run_dir, default_services=False, max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps(data):
                raise AssertionError("a step was made")


class Notes(list[Any]):
    """What a test writes down of a program: of a list of the program itself a resume would warn."""


class Tiny:
    """One start of the program; call `train` once.

    Attributes:
        seen: (epoch, step, sample numbers) of every step whose body ran to its end.
        lines: what was printed, unless `say` takes it.
        loop: the TrainLoop.

    Args:
        also: further entries of the state.
    """

    def __init__(self, run_dir: Path, *, samples: int = 8, batch: int = 2, **arguments: Any) -> None:
        self.run_dir = run_dir
        self.w, self.momentum = np.zeros(3), np.zeros(3)
        self.data = everstep.data.arrays(np.arange(samples), batch_size=batch, shuffle=True)
        self.seen: list[tuple[int, int, tuple[int, ...]]] = Notes()
        self.lines: list[str] = Notes()
        state = {"w": self.w, "momentum": self.momentum, **arguments.pop("also", {})}
        arguments = {"seed": 7, "state": state, **arguments}
        sink = arguments.pop("say", self.lines.append)
        services = [*arguments.pop("services", ()), everstep.services.Console(sink=sink)]
        self.loop = everstep.TrainLoop(run_dir, services=services, **arguments)

    def train(
        self, inside: LoopHook = lambda loop, step: None, tail: LoopHook = lambda loop, epoch: None
    ) -> Tiny:
        """Run to the end; `inside` is called at the end of each step's body, `tail` after the steps."""
        with self.loop as loop:
            for epoch in loop.iter_epochs():
                for step, (ids,) in loop.iter_steps(self.data):
                    self.update(ids)
                    inside(loop, step)
                    self.seen.append((epoch, step, tuple(int(i) for i in ids)))
                tail(loop, epoch)
        return self

    def update(self, ids: Any) -> None:
        """One optimizer step by hand."""
        gradient = self.w - ids.mean() + np.random.standard_normal(3)
        self.momentum[:] = 0.9 * self.momentum + gradient
        self.w -= 0.1 * self.momentum
        self.loop.collect_metrics(loss=float(gradient @ gradient))

    def result(self) -> tuple[bytes, str | None, list[tuple[Any, ...]]]:
        """What equal runs have in common: weights, digest of the last state, every row."""
        return self.w.tobytes(), self.loop.ending.digest, rows(self.run_dir)


class Told(everstep.Service):
    """Calls a function at its boundaries."""

    def __init__(
        self,
        name: str,
        fn: Callable[[everstep.Boundary], everstep.Outcome | None],
        stage: Stage = Stage.REPORT,
        every: Schedule | None = None,
    ) -> None:
        super().__init__(name, Every(steps=1) if every is None else every)
        self.stage, self.fn = stage, fn

    def run(self, boundary: everstep.Boundary) -> everstep.Outcome | None:
        return self.fn(boundary)


class Acts(Told):
    """A controller."""

    controller: ClassVar[bool] = True


def quiet(run_dir: Path, state: Any = None, **arguments: Any) -> everstep.Supervisor:
    """A Supervisor that prints nothing."""
    services = [*arguments.pop("services", ()), everstep.services.Console(sink=lambda line: None)]
    return everstep.Supervisor(run_dir, state, services=services, **arguments)


def supervised(sv: everstep.Supervisor, each: Callable[[Any], Any] = lambda sv: None) -> Any:
    """Step to the end of a loop without data; `each` is called in each step, and may return its metrics."""
    with sv:
        sv.stream(None)
        while not sv.should_stop():
            sv.advance(**(each(sv) or {}))
    return sv


def collecting(name: str, values: Sequence[float]) -> LoopHook:
    """A tail that collects a metric: in epoch n the n-th value, in later ones the last."""
    return lambda loop, epoch: loop.collect_metrics({name: values[min(epoch, len(values)) - 1]})


def serviced(
    run_dir: Path,
    services: Sequence[everstep.Service],
    tail: LoopHook = lambda loop, epoch: None,
    inside: LoopHook = lambda loop, step: None,
    **arguments: Any,
) -> Tiny:
    """One start; four steps an epoch, a checkpoint every third step and at each epoch's end."""
    services = [*services, everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
    tiny = Tiny(run_dir, services=services, **arguments)
    with contextlib.suppress(GuardStop):
        tiny.train(inside, tail)
    return tiny


def resumed(folder: Path, start: Callable[[Path, int], T], *crashes: int) -> tuple[T, T]:
    """Start a program that raises Boom at a step, at each of these and then not, and undisturbed.

    Returns what the undisturbed start returned, and the last one; the two runs are equal.
    """
    whole = start(folder / "whole", 0)
    for crash in crashes:
        with pytest.raises(Boom):
            start(folder / "run", crash)
    again = start(folder / "run", 0)
    assert compare_runs(folder / "whole", folder / "run") == []
    return whole, again


def flip(path: Path, at: int = -1) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flip_array(checkpoint: Path, name: str) -> None:
    """Turn one bit of an array of a checkpoint."""
    path = checkpoint / "arrays.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    flip(path, start + json.loads(raw[8:start])[name]["data_offsets"][0])


def rows(run_dir: Path, phase: str | None = None) -> list[tuple[Any, ...]]:
    """The valid rows that do not depend on the clock: (epoch, step, phase, name, seq, bits, count)."""
    return sorted(
        (r.epoch, r.step, r.phase, r.name, r.seq, r.value.hex(), r.count)
        for r in RunJournal(run_dir).rows()
        if not r.wall and phase in (None, r.phase)
    )


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The data of the run's valid events of one kind."""
    return [event.data for event in RunJournal(run_dir).events(kind)]


class Boom(Exception):
    """What the tests raise."""


def boom_at(at: int) -> LoopHook:
    """Raise when the count is reached."""

    def hook(loop: Any, count: int) -> None:
        if count == at:
            raise Boom(f"at {at}")

    return hook
