"""A small program with services, for tests of what they do and of what a crash leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import everstep
from everstep import Every, Service
from everstep.errors import GuardStop
from tiny_runs import LoopHook, Tiny


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
    """One start; four steps an epoch, a checkpoint every third step and at each epoch's end."""
    services = [*services, everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
    tiny = Tiny(run_dir, services=services, **arguments)
    with contextlib.suppress(GuardStop):
        tiny.train(inside, tail)
    return tiny
