"""Program under drill: started, struck, started again, in a root of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import DrillError
from everstep.record import RunJournal
from everstep.record.rundir import ROOT
from everstep.services.witness import FILE

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that may end a drill."""

_DYING = 10.0
"""Seconds to wait until killed processes have disappeared."""

HAZARD, INDEX = "EVERSTEP_HAZARD", "EVERSTEP_INDEX"


class Strike(NamedTuple):
    """Harm to a start: a hazard (`everstep.hazard`), or SIGKILL some seconds after its first run opened."""

    spec: str = ""
    seconds: float | None = None

    def __str__(self) -> str:
        return self.spec if self.seconds is None else f"kill after {self.seconds:.3f} s"


class WitnessLine(NamedTuple):
    """Line of the witness, see `everstep.services.witness`; `run` is relative to the root."""

    run: str
    time: float
    at: str
    epoch: int
    step: int
    parts: dict[str, str]


@dataclass(frozen=True)
class ProgramStart:
    """Start of the program.

    Attributes:
        strike: the strike that was aimed at the start; None if it was left alone.
        status: exit status; negative: the signal that ended the start.
        began, seconds: time of the start (seconds since 1970), and its duration.
        records: lines of the witness.
        log: file with the output.
    """

    strike: Strike | None
    status: int
    began: float
    seconds: float
    records: list[WitnessLine]
    log: Path

    @property
    def tail(self) -> str:
        """Last lines of the output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


@dataclass
class Program:
    """Script with its arguments, and all that a chain of its starts leaves.

    Attributes:
        command: command line of a start, in the current directory.
        folder: folder of this chain; `root` inside has the run directories.
        timeout: seconds that a start may take.
        starts: starts of the chain, in order.
    """

    command: tuple[str, ...]
    folder: Path
    timeout: float
    starts: list[ProgramStart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @cached_property
    def runs(self) -> list[str]:
        """Run directories, relative to the root, in the order in which they were made."""
        found = sorted(self.root.rglob("run.json"), key=lambda path: json.loads(path.read_bytes())["created"])
        return [str(path.parent.relative_to(self.root)) for path in found]

    def start(self, strike: Strike | None = None, trace: Path | None = None) -> ProgramStart:
        """Start the program, and wait until it ends.

        Args:
            trace: file for the names of the hazards that the start passes.

        Raises:
            DrillError: the start did not end in time.
        """
        number = len(self.starts) + 1
        log, witness = self.folder / f"start-{number}.log", self.folder / f"start-{number}.jsonl"
        env = {**os.environ, ROOT: str(self.root), FILE: str(witness)}
        spec = f"trace:{trace}" if trace else strike.spec if strike else ""
        env[INDEX] = "off"  # drilled runs do not belong in the user's index
        env.pop(HAZARD, None)
        if spec:
            env[HAZARD] = spec
        began, clock = time.time(), time.monotonic()
        with open(log, "wb") as output, _held_back():
            process = subprocess.Popen(
                self.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_hear_signals,
            )
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
                status = self._wait(process, witness, None if strike is None else strike.seconds)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also loader workers that outlived the process
                process.wait()
                _end_all(witness)
        start = ProgramStart(strike, status, began, time.monotonic() - clock, self._read(witness), log)
        self.starts.append(start)
        self.__dict__.pop("runs", None)
        return start

    def _wait(self, process: subprocess.Popen[bytes], witness: Path, seconds: float | None) -> int:
        until = time.monotonic() + self.timeout
        if seconds is not None:
            while not witness.exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.001)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(seconds)
            process.kill()
        try:
            return process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise DrillError(
                f"{' '.join(self.command[1:])} ran longer than {self.timeout:g} s in one start; make it "
                "smaller by its arguments, or raise the timeout"
            ) from None

    def _read(self, witness: Path) -> list[WitnessLine]:
        lines = witness.read_text().splitlines() if witness.exists() else []
        records = []
        for line in lines:
            with suppress(ValueError):  # a kill may tear the last line
                fields: dict[str, Any] = json.loads(line)
                fields["run"] = os.path.relpath(fields["run"], self.root)
                records.append(WitnessLine(**fields))
        return records

    def journal(self, run: str) -> RunJournal:
        """Read the journal of a run."""
        return RunJournal(self.root / run)


def command(script: Path, args: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that starts a script by the drill's own Python; a config by `everstep train`."""
    program = ("-m", "everstep", "train") if script.suffix in (".yaml", ".yml") else ()
    return (sys.executable, *program, str(script), *args)


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold back the signals that end a drill, so that a process which is being started is not forgotten."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hear_signals() -> None:
    """Let a new process hear signals: a shell may have it ignore Ctrl-C, and `_held_back` blocks them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _end_all(witness: Path) -> None:
    """Kill the processes that a start left in other sessions; found by their environment, if /proc exists."""
    mark = os.fsencode(f"{FILE}={witness}")
    until = time.monotonic() + _DYING
    while (left := _with_environment(mark)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _with_environment(mark: bytes) -> list[int]:
    """List the processes of this user that were started with a variable."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process ended meanwhile, or belongs to another user
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found
