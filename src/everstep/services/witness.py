"""Services of a drilled run, which the environment of the process asks for (see `everstep.unattended`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from everstep import hazard
from everstep.contracts.services import Boundary, Interrupt, Moment, Outcome, RunView, Save, Service, Stage
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
    """Make the services of a drill that the environment asks for.

    Args:
        save: returns the user's entries as trees, by name.
    """
    if limit := os.environ.get(LIMIT):
        yield DrillLimit(**json.loads(limit))
    if path := os.environ.get(FILE):
        yield Witness(path, save)


class Witness(Service):
    """Write a digest of every part of the run at every step, and pass the hazard "witness.PLACE" after each.

    The file has one JSON object per line, also after a kill; all ranks of a run append to the same file:

        {"run": DIRECTORY, "rank": 0, "pid": 4711, "time": SECONDS, "at": PLACE, "epoch": 1, "step": 7,
         "parts": {"weights/w": DIGEST}}

    | place | when | parts |
    |---|---|---|
    | enter | the run is open; after a resume, its state restored | state |
    | before | step `step` is about to begin | samples, state |
    | step | the step is complete | samples (`Supervisor`), random state, state |
    | epoch | the epoch is closed, after its tail | random state, state |
    | exit | the `with` block was left | none |

    Parts are named KIND/NAME: samples/STREAM, random/SOURCE, and the user's entries by `kind_of`.

    Args:
        path: the file; records are appended, so that one file can witness several runs and ranks.
        save: returns the user's entries as trees, by name.
    """

    moments = frozenset(_PLACES)
    window = "none"
    every_rank = True

    def __init__(self, path: str, save: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__("drill witness", Every(steps=1) | Every(epochs=1))
        self._path, self._save = path, save
        self._samples: dict[str, Any] = {}
        self._about: dict[str, Any] = {}

    def open(self, run: RunView) -> None:
        self._about = {"run": os.path.abspath(run.run_dir), "rank": run.rank, "pid": os.getpid()}

    def watching(self, name: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, and note each as handed out in the open step."""
        for batch in batches:
            key = f"samples/{name}"
            self._samples[key] = tree_digest([self._samples.get(key), tree_digest(batch)])
            yield batch

    def run(self, boundary: Boundary) -> None:
        place = _PLACES[boundary.moment]
        step, parts = boundary.step, {}
        if place == "before":
            # the moment lies before a step: the boundary still counts the step before
            step += 1
            if boundary.payload is not None:
                parts["samples/train"] = tree_digest(boundary.payload)
        elif place in ("step", "epoch"):
            parts = self._samples | {f"random/{name}": tree_digest(tree) for name, tree in capture().items()}
            self._samples = {}
        if place != "exit":
            parts |= {f"{kind_of(tree)}/{name}": tree_digest(tree) for name, tree in self._save().items()}
        record = {"at": place, "epoch": boundary.epoch, "step": step, "parts": parts}
        append_line(self._path, json.dumps({**self._about, "time": time.time(), **record}).encode())
        # after the record, so that a kill here leaves the record of the place
        hazard.reach(f"witness.{place}")


def tree_digest(tree: Any) -> str:
    """Digest all leaves of a tree; a tree that cannot be encoded counts by its type alone."""
    try:
        return digest(encode(tree), skip=())
    except StateError:
        return type(tree).__qualname__


def kind_of(tree: Any) -> str:
    """Name the kind of an entry's tree: "optimizer" (it has groups), "weights" (it has arrays) or "state"."""
    if isinstance(tree, Mapping) and tree.keys() >= {"state", "param_groups"}:
        return "optimizer"
    try:
        return "weights" if encode(tree).arrays else "state"
    except StateError:
        return "state"


class DrillLimit(Service):
    """Leave the run after some steps; the exit status is 0.

    So a script that takes hours can be drilled.  The run does not end there: it is interrupted, as by
    SIGTERM, with its state saved.  Its max_step, schedules and configuration are as the script gives them.

    Args:
        steps: total of the run, 1 or more.
        save_every: number of steps between checkpoints that the drill adds; None for none.
    """

    moments = frozenset({Moment.ENTER_LOOP, Moment.AFTER_STEP})
    stage = Stage.DECIDE
    controller = True
    window = "none"
    isolate = False

    def __init__(self, *, steps: int, save_every: int | None = None) -> None:
        super().__init__("drill limit", Every(steps=1))
        self._steps, self._save_every = steps, save_every

    def due(self, when: Instant) -> bool:
        return not when.at_epoch_end

    def run(self, boundary: Boundary) -> Outcome | None:
        why = f"the drill ends at step {boundary.step}"
        if boundary.step >= self._steps:
            if boundary.moment is Moment.ENTER_LOOP:  # an earlier start has saved there: no step is left
                raise Interrupted(exit_status(0), why)
            return Outcome(actions=(Interrupt(why, 0),))
        is_save = self._save_every is not None and boundary.step % self._save_every == 0
        if is_save and boundary.moment is Moment.AFTER_STEP:
            return Outcome(actions=(Save(),))
        return None
