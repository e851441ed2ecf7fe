"""Services of a drilled run, which the environment of the process asks for (see `everstep.unattended`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from everstep import hazard
from everstep.contracts.services import (
    Boundary,
    BuiltIn,
    Interrupt,
    Moment,
    Outcome,
    RunView,
    Save,
    Service,
    Stage,
)
from everstep.errors import Interrupted, StateError
from everstep.group import exit_status
from everstep.schedule import Every, Instant
from everstep.state import capture, digest, encode
from everstep.unattended import LIMIT, append_line

FILE = "EVERSTEP_DRILL"
"""Environment variable that names the witness's file."""

_PLACES = {
    Moment.ENTER_LOOP: "enter",
    Moment.BEFORE_STEP: "before",
    Moment.AFTER_STEP: "step",
    Moment.AFTER_EPOCH: "epoch",
    Moment.EXIT_LOOP: "exit",
}


def drill_services(save: Callable[[], Mapping[str, Any]]) -> Iterator[Service]:
    """Make the services of a drill that the environment asks for; `save` returns the entries as trees."""
    if limit := os.environ.get(LIMIT):
        yield DrillLimit(**json.loads(limit))
    if path := os.environ.get(FILE):
        yield Witness(path, save)


class Witness(Service):
    """Append a digest of every part of the run at every step to a file; hazard "witness.PLACE" follows each.

    The file has one JSON object per line, also after a kill; it can witness several runs and ranks:

        {"run": DIRECTORY, "rank": 0, "pid": 4711, "time": SECONDS, "at": PLACE, "epoch": 1, "step": 7,
         "parts": {"weights/w": DIGEST}}

    Places are "enter" (the state is restored), "before" a step, "step" (it is complete), "epoch" (after its
    tail) and "exit".  Parts are named KIND/NAME: samples/STREAM, random/SOURCE, entries by `_kind`.
    """

    moments = frozenset(_PLACES)
    window = "none"
    every_rank = True

    def __init__(self, path: str, save: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__("drill witness", Every(steps=1) | Every(epochs=1))
        self._path, self._save = path, save
        self._samples: dict[str, Any] = {}

    def open(self, run: RunView) -> None:
        self._about = {"run": str(run.run_dir), "rank": run.rank, "pid": os.getpid()}

    def watching(self, name: str, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            key = f"samples/{name}"
            self._samples[key] = _digest([self._samples.get(key), _digest(batch)])
            yield batch

    def run(self, boundary: Boundary) -> None:
        place, step, parts = _PLACES[boundary.moment], boundary.step, dict[str, Any]()
        if place == "before":
            step += 1  # the boundary still counts the step before
            if boundary.payload is not None:
                parts["samples/train"] = _digest(boundary.payload)
        elif place in ("step", "epoch"):
            parts = self._samples | {f"random/{name}": _digest(tree) for name, tree in capture().items()}
            self._samples = {}
        if place != "exit":
            parts |= {f"{_kind(tree)}/{name}": _digest(tree) for name, tree in self._save().items()}
        record = {"at": place, "epoch": boundary.epoch, "step": step, "parts": parts}
        append_line(self._path, json.dumps({**self._about, "time": time.time(), **record}).encode())
        # after the record, so that a kill here leaves the record of the place
        hazard.reach(f"witness.{place}")


def _digest(tree: Any) -> str:
    try:
        return digest(encode(tree), skip=())
    except StateError:
        return type(tree).__qualname__


def _kind(tree: Any) -> str:
    """Name the kind of an entry's tree: "optimizer" (it has groups), "weights" (it has arrays) or "state"."""
    if isinstance(tree, Mapping) and tree.keys() >= {"state", "param_groups"}:
        return "optimizer"
    return "weights" if encode(tree).arrays else "state"


class DrillLimit(BuiltIn):
    """Leave the run after some steps in all, interrupted as by SIGTERM, with exit status 0.

    So a script that takes hours can be drilled; its max_step, schedules and configuration are its own.
    `save_every`: steps between checkpoints that the drill adds.
    """

    moments = frozenset({Moment.ENTER_LOOP, Moment.AFTER_STEP})
    stage = Stage.DECIDE
    controller = True

    def __init__(self, *, steps: int, save_every: int | None = None) -> None:
        super().__init__("drill limit", Every(steps=1))
        self._steps, self._save_every = steps, save_every

    def due(self, when: Instant) -> bool:
        return not when.at_epoch_end

    def run(self, boundary: Boundary) -> Outcome | None:
        reason = f"the drill ends at step {boundary.step}"
        at_start = boundary.moment is Moment.ENTER_LOOP
        if boundary.step >= self._steps:
            if at_start:  # an earlier start has saved there: no step is left
                raise Interrupted(exit_status(0), reason)
            return Outcome(actions=(Interrupt(reason, 0),))
        if self._save_every is None or at_start or boundary.step % self._save_every:
            return None
        return Outcome(actions=(Save(),))
