"""Traces of the time inside steps."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from everstep.arguments import integer
from everstep.contracts.services import Boundary, RunView, Service, Stage
from everstep.durable import require_no_link
from everstep.schedule import Every, Instant, Schedule


class Profile(Service):
    """Record a few steps with torch.profiler, again and again, as Chrome traces.

    The traces lie in `logs/profile/` of the run, named by the step after which they begin; Perfetto
    (ui.perfetto.dev) and chrome://tracing show them.  A window that the run's end cuts short is dropped.

    Args:
        every: when a window begins (steps, epochs or seconds); default `Every(steps=1000)`.
        steps: number of steps in a window, 1 or more.
        keep: number of the newest traces that stay, 1 or more; None for all.
    """

    stage = Stage.REPORT
    isolate = False
    window = "none"

    def __init__(
        self,
        every: Schedule | None = None,
        *,
        steps: int = 3,
        keep: int | None = 5,
        name: str | None = None,
    ) -> None:
        self._windows = _Windows(Every(steps=1000) if every is None else every)
        super().__init__(name or "profile", self._windows)
        assert isinstance(self.schedule, _Windows)
        self._windows = self.schedule  # Service.__init__ has copied the schedule
        self.steps, self.keep = integer("steps", steps), integer("keep", keep, none="for all")
        self._trace: Any = None
        self._begun = 0
        self._folder = Path()

    def open(self, run: RunView) -> None:
        self._folder = Path(run.run_dir).absolute() / "logs" / "profile"
        self._backend = importlib.import_module("everstep.backends.torch.profiling")

    def run(self, boundary: Boundary) -> None:
        if self._trace is not None:
            self._write()
        else:
            self._begun = boundary.step
            self._windows.until = boundary.step + self.steps
            self._trace = self._backend.Trace()

    def _write(self) -> None:
        trace = self._stopped()
        require_no_link(self._folder, self._folder.parent.parent)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{self._begun:08d}.json"
        unfinished = path.with_name("unfinished.json")
        trace.export(unfinished)
        os.replace(unfinished, path)
        if self.keep is not None:
            for old in sorted(self._folder.glob("step-*.json"))[: -self.keep]:
                old.unlink()

    def _stopped(self) -> Any:
        trace, self._trace, self._windows.until = self._trace, None, None
        trace.stop()
        return trace

    def close(self) -> None:
        if self._trace is not None:
            self._stopped()


class _Windows(Schedule):
    """Schedule that is due where a window begins, and where the open window ends."""

    def __init__(self, begin: Schedule) -> None:
        self.begin = begin
        self.until: int | None = None
        """Step after which the open window ends; None if no window is open."""

    def due(self, when: Instant) -> bool:
        return self.begin.due(when) if self.until is None else when.step >= self.until

    def next_step(self, step: int) -> int:
        return self.begin.next_step(step) if self.until is None else self.until

    def next_time(self) -> float | None:
        return self.begin.next_time() if self.until is None else None

    def start(self, now: float) -> None:
        self.begin.start(now)

    def fired(self, when: Instant) -> None:
        self.begin.fired(when)

    @property
    def wall(self) -> bool:
        return self.begin.wall

    def __repr__(self) -> str:
        return repr(self.begin)
