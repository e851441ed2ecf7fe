"""Trace of a drilled run: a digest of every part of the run at every step.

A drill starts a program with EVERSTEP_DRILL=FILE and reads the file afterwards, also after a kill.  The file
has one JSON object per line:

    {"run": DIRECTORY, "rank": 0, "pid": 4711, "time": SECONDS, "at": PLACE, "epoch": 1, "step": 7,
     "parts": {"weights/w": DIGEST}}

All ranks of a run append to the same file.

| place | when | parts |
|---|---|---|
| enter | the run is open; after a resume, its state restored | state |
| before | step `step` is about to begin | samples, state |
| step | the step is complete | samples (`Supervisor`), random state, state |
| epoch | the epoch is closed, after its tail | random state, state |
| exit | the `with` block was left | none |

Parts are named KIND/NAME: samples/STREAM, random/SOURCE, and the user's entries as weights/NAME (an entry
with arrays), optimizer/NAME (with param_groups) or state/NAME (with neither).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from everstep import hazard
from everstep.contracts.services import Boundary, Moment, RunView, Service
from everstep.errors import StateError
from everstep.schedule import Every
from everstep.state import capture, digest, encode

FILE = "EVERSTEP_DRILL"
"""Environment variable that names the file."""


class Witness(Service):
    """Write the file, and pass the hazard "witness.PLACE" after each record.

    Args:
        path: the file; records are appended, so that one file can witness several runs and ranks.
        save: returns the user's entries as trees, by name.
    """

    moments = frozenset(
        {Moment.ENTER_LOOP, Moment.BEFORE_STEP, Moment.AFTER_STEP, Moment.AFTER_EPOCH, Moment.EXIT_LOOP}
    )
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
            parts |= {f"{_kind(tree)}/{name}": tree_digest(tree) for name, tree in self._save().items()}
        self._write({"at": place, "epoch": boundary.epoch, "step": step, "parts": parts})
        # after the record, so that a kill here leaves the record of the place
        hazard.reach(f"witness.{place}")

    def _write(self, record: dict[str, Any]) -> None:
        """Append a record by a single write: it survives SIGKILL, and no second process can tear it."""
        line = json.dumps({**self._about, "time": time.time(), **record}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


_PLACES = {
    Moment.ENTER_LOOP: "enter",
    Moment.BEFORE_STEP: "before",
    Moment.AFTER_STEP: "step",
    Moment.AFTER_EPOCH: "epoch",
    Moment.EXIT_LOOP: "exit",
}


def witnesses(save: Callable[[], Mapping[str, Any]]) -> list[Service]:
    """Make the witness of this run, if the process is being drilled."""
    path = os.environ.get(FILE)
    return [Witness(path, save)] if path else []


def tree_digest(tree: Any) -> str:
    """Digest all leaves of a tree; a tree that cannot be encoded counts by its type alone."""
    try:
        return digest(encode(tree), skip=())
    except StateError:
        return type(tree).__qualname__


def _kind(tree: Any) -> str:
    if isinstance(tree, Mapping) and tree.keys() >= {"state", "param_groups"}:
        return "optimizer"
    return "weights" if encode(tree).arrays else "state"
