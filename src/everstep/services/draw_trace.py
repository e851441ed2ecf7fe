"""Trace of random draws: which lines of a program change the global random state, around one step.

A drill starts a program with EVERSTEP_DRILL_DRAWS, the arguments of `DrawTrace` as JSON, and reads the file
afterwards.  The file has one JSON object per line, in their order:

    {"draw": "train.py:14", "source": "numpy"}     the line has changed the state of this source
    {"mark": "restored"}                           a resume has put the random state back
    {"mark": "before"}                             a step is about to begin; "epoch": an epoch is closed

The state is compared at each line of the program's own files, not of the libraries'; a draw inside a library
counts for the line that called it.  Draws of other threads and of worker processes are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from everstep.contracts.services import Boundary, Moment, RunView, Service
from everstep.drilled import DRAWS
from everstep.record import located
from everstep.schedule import Every
from everstep.services.witness import tree_digest
from everstep.state import capture, restore

_RESTORE: CodeType = restore.__code__
_RESUME = "resume"
"""Name of the function of the engine that restores the random state at the resume point."""
_LIBRARIES = (
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,  # everstep
    "<",
)


class DrawTrace(Service):
    """Write the file: from the end of the step before a place until the place, or from a resume in between.

    Args:
        path: the file.
        run: the run directory to trace, as the script gives it, absolute.
        step: the step to trace, from 1.
        place: "step": until the step is complete; "epoch": until the epoch after it is closed.
    """

    moments = frozenset(
        {Moment.ENTER_LOOP, Moment.BEFORE_STEP, Moment.AFTER_STEP, Moment.AFTER_EPOCH, Moment.EXIT_LOOP}
    )
    window = "none"
    isolate = False

    def __init__(self, path: str, run: str, step: int, place: Literal["step", "epoch"]) -> None:
        super().__init__("draw trace", Every(steps=1) | Every(epochs=1))
        self._step, self._place, self._run = step, place, located(run)
        self._lines = _Lines(path)
        self._mine = False

    def open(self, run: RunView) -> None:
        self._mine = Path(run.run_dir) == self._run

    def run(self, boundary: Boundary) -> None:
        moment, step = boundary.moment, boundary.step
        if self._lines.tracing:
            if moment is Moment.BEFORE_STEP:
                self._lines.mark("before")
            elif moment is Moment.AFTER_EPOCH:
                self._lines.mark("epoch")
            if self._is_over(moment, step):
                self._lines.stop()
        elif self._mine and moment in (Moment.ENTER_LOOP, Moment.AFTER_STEP) and step == self._step - 1:
            self._lines.begin()

    def _is_over(self, moment: Moment, step: int) -> bool:
        """Whether the place is reached, or the run is left before."""
        last = Moment.AFTER_EPOCH if self._place == "epoch" else Moment.AFTER_STEP
        return moment is Moment.EXIT_LOOP or (moment is last and step >= self._step)


class _Lines:
    """Trace function for the lines of a program.

    Attributes:
        tracing: whether lines are traced now.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.tracing = False
        self._at: str | None = None
        """The line that runs, as FILE:LINE; None where there is none of the program's."""
        self._states: dict[str, str] = {}

    def begin(self) -> None:
        """Trace the lines from here on, also those of functions that were called before."""
        if sys.gettrace() is not None:  # of a debugger, or of a measurement of coverage
            return
        self.tracing, self._states = True, _states()
        frame: FrameType | None = sys._getframe()
        self._at = _line_of(frame)
        sys.settrace(self._called)
        while frame is not None:
            if _is_programs(frame):
                frame.f_trace = self._moved
            frame = frame.f_back

    def stop(self) -> None:
        """Trace no more; a draw of the last line counts."""
        sys.settrace(None)
        self._look()
        self.tracing = False

    def mark(self, name: str) -> None:
        """Write a place."""
        self._look()
        self._write({"mark": name})

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a function if it is the program's."""
        if frame.f_code is _RESTORE:
            self._look()
            return self._restored
        if not _is_programs(frame):
            return None
        self._look()
        self._at = _line_of(frame)
        return self._moved

    def _moved(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Look at the state before the next line, or after a function's last."""
        if self.tracing and event in ("line", "return"):
            self._look()
            self._at = _line_of(frame.f_back if event == "return" else frame)
        return self._moved

    def _restored(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Take what was put back as the state from now on: after a service, or at the resume point."""
        if event == "return":
            self._states = _states()
            if frame.f_back is not None and frame.f_back.f_code.co_name == _RESUME:
                self._write({"mark": "restored"})
        return self._restored

    def _look(self) -> None:
        """Write which sources have changed since the last look."""
        states = _states()
        for source in [name for name in states if states[name] != self._states.get(name)]:
            if self._at is not None:
                self._write({"draw": self._at, "source": source})
        self._states = states

    def _write(self, entry: dict[str, str]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _states() -> dict[str, str]:
    return {name: tree_digest(tree) for name, tree in capture().items()}


def _is_programs(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def _line_of(frame: FrameType | None) -> str | None:
    """Return the line of the program that runs in a frame, or that has called the frame."""
    while frame is not None and not _is_programs(frame):
        frame = frame.f_back
    return None if frame is None else f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"


def draw_traces() -> list[Service]:
    """Make the trace of this run, if the process is being drilled for the line that draws."""
    said = os.environ.get(DRAWS)
    return [DrawTrace(**json.loads(said))] if said else []
