"""Services of a drilled run, which the environment of the process asks for (see `everstep.drilled`)."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from everstep import hazard
from everstep.contracts.services import Boundary, Interrupt, Moment, Outcome, RunView, Save, Service, Stage
from everstep.drilled import DRAWS, LIMIT, append_line
from everstep.errors import Interrupted, StateError
from everstep.group import exit_status
from everstep.record import located
from everstep.schedule import Every, Instant
from everstep.state import capture, digest, encode, restore

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
    if draws := os.environ.get(DRAWS):
        yield DrawTrace(**json.loads(draws))
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
    """Leave the run after some steps, or at the first step after some seconds; the exit status is 0.

    So a script that takes hours can be drilled.  The run does not end there: it is interrupted, as by
    SIGTERM, with its state saved.  Its max_step, schedules and configuration are as the script gives them.

    Args:
        steps: total of the run, 1 or more; None for no limit.
        seconds: seconds since the run was opened; None for no limit.
        save_every: number of steps between checkpoints that the drill adds; None for none.
        run: the run directory that has the limit, as the script gives it, absolute; None for every run.
    """

    moments = frozenset({Moment.ENTER_LOOP, Moment.AFTER_STEP})
    stage = Stage.DECIDE
    controller = True
    window = "none"
    isolate = False

    def __init__(
        self,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        save_every: int | None = None,
        run: str | None = None,
    ) -> None:
        super().__init__("drill limit", Every(steps=1))
        self._steps, self._seconds, self._save_every, self._run = steps, seconds, save_every, run
        self._opened = 0.0

    def open(self, run: RunView) -> None:
        self._opened = time.monotonic()
        if self._run is not None and located(self._run) != Path(run.run_dir):
            self._steps = self._seconds = self._save_every = None

    def due(self, when: Instant) -> bool:
        return not when.at_epoch_end

    def run(self, boundary: Boundary) -> Outcome | None:
        reached = self._steps is not None and boundary.step >= self._steps
        if boundary.moment is Moment.ENTER_LOOP:
            if reached:  # an earlier start has saved there: no step is left to run
                raise Interrupted(exit_status(0), f"the drill ends at step {boundary.step}")
            return None
        if reached or (self._seconds is not None and time.monotonic() > self._opened + self._seconds):
            return Outcome(actions=(Interrupt(f"the drill ends at step {boundary.step}", 0),))
        if self._save_every is not None and boundary.step % self._save_every == 0:
            return Outcome(actions=(Save(),))
        return None


_LIBRARIES = (
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,  # everstep
    "<",
)


class DrawTrace(Service):
    """Write which lines of a program change the global random state, around one step.

    The file has one JSON object per line, in their order: from the end of the step before a place until the
    place, or from a resume in between.

        {"draw": "train.py:14", "source": "numpy"}     the line has changed the state of this source
        {"mark": "restored"}                           a resume has put the random state back
        {"mark": "before"}                             a step is about to begin; "epoch": an epoch is closed

    The state is compared at each line of the program's own files, not of the libraries'; a draw inside a
    library counts for the line that called it.  Draws of other threads and of worker processes are not seen.

    Args:
        path: the file.
        run: the run directory to trace, as the script gives it, absolute.
        step: the step to trace, from 1.
        place: "step": until the step is complete; "epoch": until the epoch after it is closed.
    """

    moments = frozenset(_PLACES)
    window = "none"
    isolate = False

    def __init__(self, path: str, run: str, step: int, place: Literal["step", "epoch"]) -> None:
        super().__init__("draw trace", Every(steps=1) | Every(epochs=1))
        self._path, self._step, self._run = path, step, located(run)
        self._last = Moment.AFTER_EPOCH if place == "epoch" else Moment.AFTER_STEP
        self._mine = self._tracing = False
        self._line: str | None = None
        """The line that runs, as FILE:LINE; None where there is none of the program's."""
        self._states: dict[str, str] = {}

    def open(self, run: RunView) -> None:
        self._mine = Path(run.run_dir) == self._run

    def run(self, boundary: Boundary) -> None:
        moment, step = boundary.moment, boundary.step
        if not self._tracing:
            if self._mine and moment in (Moment.ENTER_LOOP, Moment.AFTER_STEP) and step == self._step - 1:
                self._begin()
            return
        if moment in (Moment.BEFORE_STEP, Moment.AFTER_EPOCH):
            self._look()
            self._write({"mark": _PLACES[moment]})
        if moment is Moment.EXIT_LOOP or (moment is self._last and step >= self._step):
            sys.settrace(None)
            self._look()  # a draw of the last line counts
            self._tracing = False

    def _begin(self) -> None:
        """Trace the lines from here on, also those of functions that were called before."""
        if sys.gettrace() is not None:  # of a debugger, or of a measurement of coverage
            return
        self._tracing, self._states = True, _states()
        frame: FrameType | None = sys._getframe()
        self._line = _line_of(frame)
        sys.settrace(self._called)
        while frame is not None:
            if _is_programs(frame):
                frame.f_trace = self._moved
            frame = frame.f_back

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a function if it is the program's."""
        if frame.f_code is restore.__code__:
            self._look()
            return self._restored
        if not _is_programs(frame):
            return None
        self._look()
        self._line = _line_of(frame)
        return self._moved

    def _moved(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Look at the state before the next line, or after a function's last."""
        if self._tracing and event in ("line", "return"):
            self._look()
            self._line = _line_of(frame.f_back if event == "return" else frame)
        return self._moved

    def _restored(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Take what was put back as the state from now on: after a service, or at the resume point."""
        if event == "return":
            self._states = _states()
            # the engine's function that restores the random state at the resume point
            if frame.f_back is not None and frame.f_back.f_code.co_name == "resume":
                self._write({"mark": "restored"})
        return self._restored

    def _look(self) -> None:
        """Write which sources have changed since the last look."""
        states = _states()
        for source in [name for name in states if states[name] != self._states.get(name)]:
            if self._line is not None:
                self._write({"draw": self._line, "source": source})
        self._states = states

    def _write(self, entry: dict[str, str]) -> None:
        append_line(self._path, json.dumps(entry).encode())


def _states() -> dict[str, str]:
    return {name: tree_digest(tree) for name, tree in capture().items()}


def _is_programs(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def _line_of(frame: FrameType | None) -> str | None:
    """Return the line of the program that runs in a frame, or that has called the frame."""
    while frame is not None and not _is_programs(frame):
        frame = frame.f_back
    return None if frame is None else f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
