"""Load of the machine beside the training: processor, memory, GPUs, disk."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from everstep.contracts.services import Boundary, Outcome, RunView, Service, Stage
from everstep.schedule import Every, Schedule

_GB = 1e9


class System(Service):
    """Record the load of the machine: how busy processor, GPUs and disk are, and how full memory and disk.

    Metrics, which depend on the clock and are no part of any comparison; shares are from 0 to 1:

    | metric | what |
    |---|---|
    | cpu_share | busy part of all processors of the machine since the last look (Linux) |
    | process_cpus | processors that this process kept busy since the last look |
    | memory_share | part of the machine's memory that is in use (Linux) |
    | process_memory_gb | memory of this process (Linux) |
    | gpu0_share, gpu0_memory_share | busy part and used memory of each visible NVIDIA GPU |
    | disk_share, disk_free_gb | used part and free space of the disk with the run directory |
    | disk_read_mb_per_s, disk_written_mb_per_s | what this process read and wrote meanwhile (Linux) |

    A figure that the system does not give is left out.  A look takes less than a millisecond and imports
    nothing; between two looks a step costs nothing more.  Several ranks: the machine of rank 0.

    Args:
        every: when to look; default `Every(seconds=30)`.
    """

    stage = Stage.REPORT
    isolate = False
    window = "none"
    default_schedule = Every(seconds=30)

    def __init__(self, *, every: Schedule | None = None, name: str | None = None) -> None:
        super().__init__(name or "system", every)
        self._run_dir = Path()
        self._last: dict[str, float] = {}
        """Counters at the last look."""
        self._gpus: _Gpus | None = None

    def open(self, run: RunView) -> None:
        self._run_dir = Path(run.run_dir).absolute()
        self._gpus = _Gpus()
        self._last = dict(_counters())

    def run(self, boundary: Boundary) -> Outcome:
        now, before = dict(_counters()), self._last
        self._last = now
        risen = {name: now[name] - before[name] for name in now.keys() & before.keys()}
        found = {**_rates(risen), **dict(_levels()), **dict(_disk(self._run_dir))}
        if self._gpus is not None:
            found |= self._gpus.read()
        return Outcome(found, wall=True)

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None


def _counters() -> Iterator[tuple[str, float]]:
    """Yield what only rises: seconds, ticks and bytes."""
    yield "seconds", time.monotonic()
    yield "process seconds", time.process_time()
    with suppress(OSError, ValueError, IndexError):
        # user nice system idle iowait irq softirq steal; guests are part of user and nice
        ticks = [float(each) for each in _text("/proc/stat").split("\n", 1)[0].split()[1:9]]
        yield "ticks", sum(ticks)
        yield "idle ticks", ticks[3] + ticks[4]
    with suppress(OSError, ValueError, KeyError):
        told = dict(line.split(": ") for line in _text("/proc/self/io").splitlines())
        yield "read", float(told["read_bytes"])
        yield "written", float(told["write_bytes"])


def _rates(risen: dict[str, float]) -> dict[str, float]:
    found = {}
    if risen.get("ticks"):
        # the kernel's count of idle ticks may fall back a little
        found["cpu_share"] = min(max(0.0, 1 - risen["idle ticks"] / risen["ticks"]), 1.0)
    if seconds := risen["seconds"]:
        found["process_cpus"] = risen["process seconds"] / seconds
        for name in ("read", "written"):
            if name in risen:
                found[f"disk_{name}_mb_per_s"] = risen[name] / seconds / 1e6
    return found


def _levels() -> Iterator[tuple[str, float]]:
    with suppress(OSError, ValueError, KeyError):
        told = dict(line.split(":") for line in _text("/proc/meminfo").splitlines())
        total, left = (float(told[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        yield "memory_share", 1 - left / total
    with suppress(OSError, ValueError, IndexError):
        pages = int(_text("/proc/self/statm").split()[1])
        yield "process_memory_gb", pages * os.sysconf("SC_PAGE_SIZE") / _GB


def _disk(folder: Path) -> Iterator[tuple[str, float]]:
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        yield "disk_share", usage.used / usage.total if usage.total else 0.0
        yield "disk_free_gb", usage.free / _GB


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Busy(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class _Gpus:
    """The NVIDIA GPUs that this process may use, by the driver's library (NVML); none without a driver."""

    def __init__(self) -> None:
        self._handles: list[ctypes.c_void_p] = []
        self._library: ctypes.CDLL | None = None
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self._library = library
                self._handles = list(self._visible(library))

    def _visible(self, library: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
        """Yield a handle of each visible GPU.

        Numbers are those of the bus, which are CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID.
        """
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        said = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(n) for n in range(count.value)] if said is None else said.split(",")
        for name in map(str.strip, names):
            handle = ctypes.c_void_p()
            if name.isdecimal():
                failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
            else:
                failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            if failed:  # as CUDA does: the first name that is none ends the list
                return
            yield handle

    def read(self) -> dict[str, float]:
        """Return the shares of each GPU that its driver tells."""
        found: dict[str, float] = {}
        if self._library is None:
            return found
        busy, memory = _Busy(), _Memory()
        for number, handle in enumerate(self._handles):
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)) == 0:
                found[f"gpu{number}_share"] = busy.gpu / 100
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 and memory.total:
                found[f"gpu{number}_memory_share"] = memory.used / memory.total
        return found

    def close(self) -> None:
        if self._library is not None:
            self._library.nvmlShutdown()
