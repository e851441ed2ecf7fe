"""Starts of the program under judgement: followed line by line, struck from outside, read afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeAlias

from forked import Forked
from witness import TRACE

PAUSE = 0.001
"""Seconds between two looks at a program that is followed."""
LEAVING = 5.0
"""Seconds that processes of a program (loader workers, for one) may outlive it."""


class Step(NamedTuple):
    """A step as the witness wrote it."""

    number: int
    samples: tuple[int, ...]
    loss: str


@dataclass
class Start:
    """What one start of the program did.

    Attributes:
        steps: the steps that it executed, in order.
        end: path -> digest; None if it did not come to its end.
        status: exit status; negative: the signal that ended it; None: it hung and was ended.
        words: last lines of what it printed.
        seconds: how long it ran.
        trace_bytes: length of what it told.
    """

    steps: list[Step] = field(default_factory=list)
    end: dict[str, str] | None = None
    about: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    words: str = ""
    seconds: float = 0.0
    trace_bytes: int = 0

    @property
    def error(self) -> str:
        """The message of the exception that it printed last; the last line, if it printed none."""
        _, traceback, after = self.words.rpartition("Traceback (most recent call last)")
        lines = [line for line in after.splitlines() if line.strip()]
        message = " ".join(line for line in lines[1:] if not line.startswith(" "))
        return message if traceback else "".join(lines[-1:])

    @property
    def resumed_after(self) -> int | None:
        """The step after which it went on, 0 at the beginning; None if it executed no step."""
        return self.steps[0].number - 1 if self.steps else None


Files: TypeAlias = dict[str, tuple[int, int]]


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class Running:
    """A program that runs now."""

    def __init__(self, process: Process, trace: Path, limit: float) -> None:
        self.process = process
        self._trace = trace
        self._until = time.monotonic() + limit
        self._at = 0
        self._rest = b""
        self.count = 0

    @property
    def is_over(self) -> bool:
        """Whether the program has ended, or its time is up."""
        return self.process.poll() is not None or time.monotonic() > self._until

    def look(self) -> int:
        """Return the number of steps that this start has told of until now."""
        with suppress(FileNotFoundError), open(self._trace, "rb") as file:
            file.seek(self._at)
            new = file.read()
            self._at += len(new)
            *whole, self._rest = (self._rest + new).split(b"\n")
            self.count += sum(line.startswith(b'{"step"') for line in whole)
        return self.count

    def wait_for(self, steps: int) -> bool:
        """Wait until this start has told of so many steps; False if the program is over before."""
        return self.wait_until(lambda: self.look() >= steps)

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Ask until `ready`; False if the program is over before."""
        while not ready():
            if self.is_over:
                return False
            time.sleep(PAUSE)
        return True

    def send(self, number: int) -> None:
        """Send a signal to the process that was started, and to no other."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)


Strike: TypeAlias = Callable[[Running], None]


class Program:
    """The command under judgement, and the place where it works.

    Args:
        command: what is started; the run's folder is appended.
        place: an empty folder for runs, traces and logs.
        limit: seconds after which a start has hung.
        preload: modules that are imported once, before all starts; see `Forked`.
    """

    def __init__(
        self, command: Sequence[str], place: Path, limit: float, preload: Sequence[str] = ()
    ) -> None:
        self.command, self.place, self.limit = list(command), place, limit
        self._preload = list(preload)
        self._starts = 0

    def start(self, run: Path, strike: Strike | None = None) -> Start:
        """Start the program in a folder, let `strike` happen to it, and wait for its end."""
        self._starts += 1
        trace, log = (self.place / f"{self._starts:04}.{kind}" for kind in ("jsonl", "log"))
        run.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with open(log, "wb") as output:
            process = self._process([*self.command, str(run)], {TRACE: str(trace)}, output)
        running = Running(process, trace, self.limit)
        try:
            if strike is not None:
                strike(running)
            while not running.is_over:
                time.sleep(0.005)
            status = process.poll()
        finally:
            _end(process)
        return _read(trace, log, status, time.monotonic() - began)

    def _process(self, command: list[str], added: Mapping[str, str], output: IO[bytes]) -> Process:
        if self._preload:
            return Forked(command[1:], added, output.name, self._preload)
        return subprocess.Popen(
            command,
            env={**os.environ, **added},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(process: Process) -> None:
    """End what is left of a start: the process, and those that it has started."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + LEAVING
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.002)


def _read(trace: Path, log: Path, status: int | None, seconds: float) -> Start:
    found = Start(status=status, seconds=seconds)
    text = trace.read_text() if trace.exists() else ""
    for line in text.split("\n")[:-1]:  # a torn last line has no line break
        told: dict[str, Any] = json.loads(line)
        if "step" in told:
            found.steps.append(Step(told["step"], tuple(told["samples"]), told["loss"]))
        found.about = told.get("about", found.about)
        found.end = told.get("end", found.end)
    found.trace_bytes = len(text)
    lines = log.read_text(errors="replace").splitlines()
    found.words = "\n".join(lines[-200:])
    return found


def files(folder: Path) -> Files:
    """Path, size and time of change of each file below a folder."""
    found: Files = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with suppress(FileNotFoundError):
                state = os.lstat(path)
                found[path] = (state.st_size, state.st_mtime_ns)
    return found
