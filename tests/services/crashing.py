"""A program with services, crashed in its steps and started again: it must end as if it never had been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import everstep
from everstep import Every, Service
from everstep.errors import GuardStop
from gate import share
from tiny_runs import Boom, LoopHook, Tiny, boom_at

STEPS_PER_EPOCH = 4


def collecting(name: str, values: Sequence[float]) -> LoopHook:
    """A tail that collects a metric: in epoch n the n-th value, in later ones the last."""
    return lambda loop, epoch: loop.collect_metrics({name: values[min(epoch, len(values)) - 1]})


def run(
    run_dir: Path,
    services: Sequence[Service],
    tail: LoopHook = lambda loop, epoch: None,
    inside: LoopHook = lambda loop, step: None,
    **arguments: Any,
) -> Tiny:
    """One start; a checkpoint every third step."""
    services = [*services, everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
    tiny = Tiny(run_dir, services=services, **arguments)
    with contextlib.suppress(GuardStop):
        tiny.train(inside, tail)
    return tiny


def check_crashes(
    folder: Path, make: Callable[[], Sequence[Service]], tail: LoopHook, **arguments: Any
) -> Tiny:
    """Crash in every other step of a run, start it again, compare; the undisturbed run is returned.

    With a checkpoint every third step and at each epoch's end, the crashes lie at each distance from one.
    A share of the steps is two of them.
    """
    whole = run(folder / "whole", make(), tail, **arguments)
    for step in share(range(1, whole.loop.ending.step + 1, 2), 2):
        run_dir = folder / f"crashed in {step}"
        with contextlib.suppress(Boom):
            run(run_dir, make(), tail, boom_at(step), **arguments)
        again = run(run_dir, make(), tail, **arguments)
        assert again.result() == whole.result()
        assert again.loop.ending.reason == whole.loop.ending.reason
    return whole
