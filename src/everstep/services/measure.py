"""Measurements beside the training: the machine's load, the speed, traces of steps, values at the end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep import backends
from everstep.arguments import integer
from everstep.contracts.services import Boundary, BuiltIn, Outcome, RunView, Service
from everstep.durable import require_no_link
from everstep.metrics.collector import to_scalar
from everstep.schedule import At, Every, Instant, Schedule


class FinalValues(Service):
    """Call a function at the clean end, keep its result in `values`, and record it as metrics.

    Args:
        compute: returns names and real numbers; must not change the state.  If it fails, that is a warning.
    """

    moments = frozenset()
    window = "none"

    def __init__(self, compute: Callable[[], Mapping[str, float]], *, name: str | None = None) -> None:
        super().__init__(name or "final values")
        self.compute = compute
        self.values: dict[str, float] = {}

    def finish(self, boundary: Boundary) -> Outcome:
        self.values = {name: float(to_scalar(name, value)) for name, value in self.compute().items()}
        return Outcome(self.values)


class Throughput(BuiltIn):
    """Record the speed since the last look, and the shares of the time, and print them in a line.

    Metrics: steps_per_second, samples_per_second, and the shares data_share (waiting for batches),
    step_share (the program's lines), evaluation_share and services_share (all that runs at boundaries).
    Each look waits for the device first.

    Args:
        samples: number of samples in a step, 1 or more; None if the number is not known.
        every: when to look; default `Every(steps=100)`.
    """

    default_schedule = Every(steps=100)

    def __init__(
        self, samples: int | None = None, *, every: Schedule | None = None, name: str | None = None
    ) -> None:
        super().__init__(name or "throughput", every)
        self.samples = integer("samples", samples, none="if it is not known")

    def open(self, run: RunView) -> None:
        self._run, self._step, self._spent = run, run.step, run.spent()

    def run(self, boundary: Boundary) -> Outcome | None:
        for backend in backends.active():
            backend.synchronize()
        spent = self._run.spent()
        parts = {name: seconds - self._spent[name] for name, seconds in spent.items()}
        steps, total = boundary.step - self._step, sum(parts.values())
        if steps == 0 or total <= 0:
            return None
        self._step, self._spent = boundary.step, spent
        speeds = {"steps": steps / total}
        if self.samples is not None:
            speeds["samples"] = self.samples * steps / total
        shares = {name: seconds / total for name, seconds in parts.items()}
        speed = ", ".join(f"{value:.4g} {name}/s" for name, value in speeds.items())
        breakdown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        self._run.println(f"{speed}: {breakdown}", with_tag=True)
        metrics = {f"{name}_per_second": value for name, value in speeds.items()}
        return Outcome(metrics | {f"{name}_share": share for name, share in shares.items()}, wall=True)

    def finish(self, boundary: Boundary) -> Outcome | None:
        spent = self._run.spent()
        total = sum(spent.values()) or 1.0
        parts = ", ".join(f"{name} {time:.4g} s ({time / total:.0%})" for name, time in spent.items())
        self._run.println(f"time of this start: {parts}")
        return self.run(boundary)


class Profile(BuiltIn):
    """Record a few steps with torch.profiler, again and again, as Chrome traces (for ui.perfetto.dev).

    The traces lie in `logs/profile/` of the run, named by the step after which they begin.

    Args:
        every: when a window begins (steps, epochs or seconds); default `Every(steps=1000)`.
        steps: number of steps in a window, 1 or more.
        keep: number of the newest traces that stay, 1 or more; None for all.
    """

    default_schedule = Every(steps=1000)

    def __init__(
        self, every: Schedule | None = None, *, steps: int = 3, keep: int | None = 5, name: str | None = None
    ) -> None:
        super().__init__(name or "profile", every)
        self.steps, self.keep = integer("steps", steps), integer("keep", keep, none="for all")
        self._begins, self._until, self._path = self.schedule, 0, Path()
        self._trace: Any = None

    def open(self, run: RunView) -> None:
        self._folder = run.run_dir / "logs" / "profile"
        self._backend = backends.torch_files()

    def due(self, when: Instant) -> bool:
        return super().due(when) if self._trace is None else when.step >= self._until

    def run(self, boundary: Boundary) -> None:
        if self._trace is None:
            self._path = self._folder / f"step-{boundary.step:08d}.json"
            self._until = boundary.step + self.steps
            self.schedule = self._begins | At(self._until)  # the loop asks after that step, too
            self._trace = self._backend.start_profile()
            return
        trace = self._stop()
        require_no_link(self._folder, self._folder.parent.parent)
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name("unfinished.json")
        trace.export_chrome_trace(str(unfinished))
        os.replace(unfinished, self._path)
        if self.keep is not None:
            for old in sorted(self._folder.glob("step-*.json"))[: -self.keep]:
                old.unlink()

    def _stop(self) -> Any:
        trace, self._trace = self._trace, None
        self.schedule = self._begins
        if trace is not None:
            trace.stop()
        return trace

    def close(self) -> None:
        self._stop()


class System(BuiltIn):
    """Record the load of the machine: how busy processor and GPUs are, and how full memory and disk.

    Metrics, with shares from 0 to 1: cpu_share, memory_share (of the machine; Linux), process_cpus (busy
    processors), process_memory_gb (Linux), gpu_memory_share, gpu_share (of this process's GPU; the latter
    needs nvidia-ml-py), disk_free_gb (of the run directory's disk).  Several ranks: the machine of rank 0.

    Args:
        every: when to look; default `Every(seconds=30)`.
    """

    default_schedule = Every(seconds=30)

    def __init__(self, *, every: Schedule | None = None, name: str | None = None) -> None:
        super().__init__(name or "system", every)

    def open(self, run: RunView) -> None:
        self._run_dir = run.run_dir
        self._last = _times()

    def run(self, boundary: Boundary) -> Outcome:
        now, last = _times(), self._last
        self._last = now
        seconds, process, ticks, idle = (new - old for new, old in zip(now, last, strict=True))
        metrics = dict(_memory())
        if seconds:
            metrics["process_cpus"] = process / seconds
        if ticks:
            # the kernel's count of idle ticks may fall back a little
            metrics["cpu_share"] = min(max(0.0, 1 - idle / ticks), 1.0)
        metrics["disk_free_gb"] = shutil.disk_usage(self._run_dir).free / 1e9
        if "torch" in sys.modules:
            metrics |= backends.torch_files().gpu_load()
        return Outcome(metrics, wall=True)


def _text(path: str) -> str:
    return Path(path).read_text()


_UNREADABLE = (OSError, ValueError, IndexError, KeyError)


def _times() -> tuple[float, float, float, float]:
    """Return seconds, seconds of this process, and the machine's ticks, all of them and the idle ones."""
    ticks = [0.0] * 8
    with suppress(*_UNREADABLE):
        # user nice system idle iowait irq softirq steal; guests are part of user and nice
        ticks = [float(each) for each in _text("/proc/stat").split("\n", 1)[0].split()[1:9]]
    return time.monotonic(), time.process_time(), sum(ticks), ticks[3] + ticks[4]


def _memory() -> Iterator[tuple[str, float]]:
    with suppress(*_UNREADABLE):
        lines = (line.split(":") for line in _text("/proc/meminfo").splitlines())
        memory = {name: float(value.split()[0]) for name, value in lines}
        yield "memory_share", 1 - memory["MemAvailable"] / memory["MemTotal"]
    with suppress(*_UNREADABLE):
        pages = int(_text("/proc/self/statm").split()[1])
        yield "process_memory_gb", pages * os.sysconf("SC_PAGE_SIZE") / 1e9
