"""Blocks of a training program and of the bare loop, in turns, and the tiny model that both train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

import everstep
from everstep.data import Cursor

SAVE_EVERY = 1000
"""Steps between two saves of the programs that save; a block begins in the middle between two."""


class Measured(Exception):
    """Ends a program of which all blocks are measured."""


class Turns:
    """Blocks of a program and of the bare loop, in turns.

    Args:
        bare: runs so many steps of the bare loop.
        repeats, steps: blocks, and steps of each.

    Attributes:
        due: number of steps after which the next block begins.
        theirs, ours: microseconds of CPU a step, of each block of the program and of the bare loop.
    """

    def __init__(self, bare: Callable[[int], None], repeats: int, steps: int) -> None:
        self._bare, self._repeats, self._steps = bare, repeats, steps
        self.due = SAVE_EVERY // 2
        self.theirs: list[float] = []
        self.ours: list[float] = []
        self._began = 0

    def take(self) -> None:
        """End the program's block, run one of the bare loop, begin the next.

        Raises:
            Measured: there were enough.
        """
        if self._began:
            self.theirs.append((time.process_time_ns() - self._began) / self._steps / 1000)
        began = time.process_time_ns()
        self._bare(self._steps)
        if self._began:  # the first bare block warms up
            self.ours.append((time.process_time_ns() - began) / self._steps / 1000)
        if len(self.theirs) == self._repeats:
            raise Measured
        self.due += self._steps
        self._began = time.process_time_ns()


class Batches(Cursor):
    """An endless stream of ready batches, the same on both sides: an iterator, and a cursor of everstep."""

    done: int

    def __init__(self, batches: list[Any], turns: Turns | None = None, done: int = 0) -> None:
        self.batches, self.turns, self.done = batches, turns, done
        self.due = -1 if turns is None else turns.due

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.done == self.due:
            assert self.turns is not None
            self.turns.take()
            self.due = self.turns.due
        batch = self.batches[self.done % len(self.batches)]
        self.done += 1
        return batch

    def position(self) -> int:
        return self.done

    def remaining(self) -> None:
        return None


class Stream(everstep.data.Stream):
    """The batches as everstep opens them; a position is true, since a start tries it out."""

    def __init__(self, batches: list[Any], turns: Turns | None = None) -> None:
        self.batches, self.turns = batches, turns

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Batches:
        return Batches(self.batches, self.turns, position or 0)


class Model:
    """The state, the batches and the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.batches = [(torch.rand(32, 32), torch.rand(32, 1)) for _ in range(50)]
        self.loss_of = torch.nn.functional.mse_loss

    def step(self, batch: Any) -> Any:
        x, y = batch
        loss = self.loss_of(self.module(x), y)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss


class Empty(Model):
    """A step that does nothing: what is left is the library's own instructions, with warm caches."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = super().step(self.batches[0])

    def step(self, batch: Any) -> Any:
        return self.loss


def bare_loop(model: Model) -> Callable[[int], None]:
    source, step = Batches(model.batches), model.step

    def run(steps: int) -> None:
        for batch in islice(source, steps):
            step(batch)

    return run


def without_hooks(block: Callable[[int], None]) -> Callable[[int], None]:
    """A bare loop has no hook on its optimizer; while an everstep loop is open, every optimizer has."""

    def run(steps: int) -> None:
        kept = dict(hooks)
        hooks.clear()
        block(steps)
        hooks.update(kept)

    return run
