"""Starts of a command by `everstep run`: a process, what it tells of itself, and how far its runs came."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from everstep.cli.exit_signals import ASKING
from everstep.drill.marked_processes import kill_marked, with_parent
from everstep.errors import EverstepError
from everstep.polling import wait_until
from everstep.record import RunJournal, newest_step
from everstep.services.notify import Target, facts_of
from everstep.unattended import PIPE

_LOOK = 0.2
"""Seconds between two looks at the process."""
_SAVING = 600.0
"""Seconds to wait for what a command that was asked to end has left."""


class Place(NamedTuple):
    """How far a run has come: its last complete step, and the number of its rollbacks."""

    step: int
    rollbacks: int


class End(NamedTuple):
    """End of a start.

    Attributes:
        status: exit status; 128 + N where signal N killed the process, as shells tell it.  Where torchrun has
            turned an interruption into 0, the status that was meant.
        kinds: names of the classes of the errors that ended its processes; empty where they told none.
        error: the first of these errors in words.
        runs: the runs that it opened, in their order, and how far each has come.
        receivers: who is to be told of which events of these runs, by their `Notify` services.
    """

    status: int
    kinds: frozenset[str]
    error: str
    runs: dict[Path, Place]
    receivers: tuple[tuple[Target, frozenset[str]], ...]

    @property
    def steps(self) -> int:
        """Number of complete steps of all these runs."""
        return sum(place.step for place in self.runs.values())

    @property
    def rollbacks(self) -> int:
        """Number of rollbacks of all these runs."""
        return sum(place.rollbacks for place in self.runs.values())


class Starts:
    """Starts a command, passes signals on to it, and hears what it tells; a context, in the main thread.

    Args:
        command: the command and its arguments.

    Attributes:
        signal: number of the first signal that asked this process to end; None before.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self.signal: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="everstep-run-")  # for this user alone
        self._path = os.path.join(self._folder.name, "pipe")
        os.mkfifo(self._path, 0o600)
        # also for writing: else reading would end when the last writer has closed it
        self._pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in ASKING:
            # an ignored signal stays ignored, as SIGHUP is under nohup
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._pipe)
        self._folder.cleanup()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._send(number)

    def _send(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)  # as a terminal does: a shell may stand between

    def wait(self, seconds: float) -> bool:
        """Wait, unless a signal comes; return whether none has come."""
        return not wait_until(lambda: self.signal is not None, seconds)

    def once(self) -> End | None:
        """Start the command, and wait until it ends; None if a signal came before.

        Raises:
            OSError: the command cannot be started.
        """
        heard: list[dict[str, Any]] = []
        began = time.time()
        # held back: a signal finds either no process, or the one that it is passed on to, once
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        try:
            if self.signal is not None:
                return None
            self._process = self._started(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while self._process.poll() is None:
            select.select([self._pipe], [], [], _LOOK)
            heard += self._words()
        heard += self._words()
        status = self._process.returncode
        if self.signal is not None:
            # a shell between ends at once, and what it has started may still save
            wait_until(lambda: not self._is_any_left(), _SAVING)
        elif status:
            self._clear_away()
        self._process = None
        return _end(status, heard, began)

    def _started(self, mask: set[int]) -> subprocess.Popen[bytes]:
        # a session of its own: Ctrl-C reaches this process alone, and comes to the command once
        return subprocess.Popen(
            self._command,
            env={**os.environ, PIPE: self._path},
            start_new_session=True,
            preexec_fn=_prepared(mask),
        )

    def _words(self) -> list[dict[str, Any]]:
        """Read what was told since the last call; a line that is not a word is somebody else's."""
        data = b""
        with suppress(BlockingIOError):
            while part := os.read(self._pipe, 1 << 16):
                data += part
        words = []
        for line in data.splitlines():
            with suppress(ValueError):
                word = json.loads(line)
                if isinstance(word, dict):
                    words.append(word)
        return words

    def _is_any_left(self) -> bool:
        """Whether a process lives that the command has started, and that is in its group."""
        assert self._process is not None
        with suppress(ChildProcessError):  # orphans are ours where this is the first process of a container
            os.waitpid(-self._process.pid, os.WNOHANG)
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _clear_away(self) -> None:
        """Kill what a failed start has left (workers, ranks): it would meet the next start."""
        self._send(signal.SIGKILL)
        kill_marked(os.fsencode(f"{PIPE}={self._path}"))


def _prepared(mask: set[int]) -> Callable[[], None]:
    """Make the function that a new process calls first: when this one dies, it saves and ends.

    Args:
        mask: the signals that the new process holds back.
    """
    ended = with_parent(signal.SIGTERM)

    def prepare() -> None:
        ended()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _end(status: int, heard: list[dict[str, Any]], began: float) -> End:
    errors = [word for word in heard if word.get("word") == "error"]
    kinds = frozenset(str(kind) for error in errors for kind in error.get("kinds", ()))
    opened = [Path(str(word["path"])) for word in heard if word.get("word") == "run" and "path" in word]
    runs = {path: place for path in opened if (place := _place(path)) is not None}
    error = str(errors[0].get("what", "")) if errors else ""
    status = 128 - status if status < 0 else status or _meant(runs, began)
    receivers = {_receiver(word): None for word in heard if word.get("word") == "notify"}
    return End(status, kinds, error, runs, tuple(receivers))


def _receiver(word: dict[str, Any]) -> tuple[Target, frozenset[str]]:
    command, url, timeout = word["target"]
    return Target(tuple(command), url, timeout), frozenset(word["on"])


def _place(run_dir: Path) -> Place | None:
    """Find how far a run has come, by its journal and its trails; None if there is none to be read."""
    try:
        journal = RunJournal(run_dir)
        step = journal.status().step
        newest = max((segment.number for segment in journal.segments()), default=0)
        return Place(max(step, newest_step(run_dir, newest)), len(journal.rollbacks()))
    except (EverstepError, OSError):
        return None


def _meant(runs: Iterable[Path], began: float) -> int:
    """Return the status of an interruption; torchrun takes 0 alone for an end without a failure."""
    for run_dir in runs:
        for event in RunJournal(run_dir).events("interrupted", valid=False):
            if event.time >= began and isinstance(event.data.get("status"), int):
                return int(event.data["status"])
    return 0


def notify(end: End, reason: str) -> list[str]:
    """Tell the receivers that a start has failed, which it could not tell itself; return what went wrong."""
    if not end.runs:
        return []
    run_dir, place = [*end.runs.items()][-1]
    facts = facts_of(run_dir, "failed", reason, step=place.step)
    sent = [(target, target.send(facts)) for target, on in end.receivers if "failed" in on]
    return [f"{target} was not told: {problem}" for target, problem in sent if problem is not None]
