"""Processes and folders that must not outlive who made them.

Where /proc exists, processes that were left behind are found by a variable of their environment.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from everstep.errors import ConfigError

_DYING = 10.0
"""Seconds to wait until killed processes have disappeared."""


def with_parent(number: signal.Signals) -> Callable[[], None]:
    """Make the function by which a new process gets a signal when this one dies: on Linux alone."""
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(1, int(number), 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:  # it died before
                os._exit(128 + number)

    return prepare


def kill_marked(mark: bytes) -> None:
    """Kill the processes of this user that were started with a variable, given as b"NAME=VALUE"."""
    deadline = time.monotonic() + _DYING
    while (pids := with_environment(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def with_environment(mark: bytes) -> list[int]:
    """List the processes of this user that were started with a variable."""
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process ended meanwhile, or belongs to another user
            if mark in environment.read_bytes().split(b"\0"):
                pids.append(int(environment.parent.name))
    return pids


@contextmanager
def owned_process(
    command: Sequence[str], env: Mapping[str, str], log: Path, mark: str, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own; after the block it has ended, with all that it started.

    `mark` names a variable of `env` by which what is left in other sessions is found.
    """
    end_with_parent = with_parent(signal.SIGKILL)

    def prepare() -> None:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell may have it ignore Ctrl-C

    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also loader workers that outlived the process
        process.wait()
        kill_marked(os.fsencode(f"{mark}={env[mark]}"))


def last_lines(log: Path) -> str:
    """Return the last lines of a program's output, without those that torchrun or `accelerate launch` adds;
    of several ranks those of the one that failed first.
    """
    output = re.sub(r"\x1b\[[\d;]*m", "", log.read_text(errors="replace"))  # without colours
    program, _, launcher = output.rpartition("Traceback (most recent call last):\n")
    cause = re.search(r"^[\w.]*(ChildFailed|CalledProcess)Error:.*", launcher, re.M | re.S)
    if cause and "(SIG" not in cause[0].rpartition("Root Cause")[2]:
        first = re.search(r"Root Cause.*? rank +: (\d+) ", launcher, re.S)
        own = re.findall(rf"^\[rank{first[1]}\]: .*", program, re.M) if first else []
        output = "\n".join(own or re.findall(r"^(?!.*torch/distributed/elastic/).*", program, re.M)) or output
    return "\n".join([line for line in output.splitlines() if line.strip("=-")][-15:])


@contextmanager
def owned_folder(prefix: str, keep: Path | None = None) -> Iterator[Path]:
    """Make a temporary folder, deleted after the block; or the folder `keep`, which stays."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
            yield Path(folder).resolve()
    elif keep.exists():
        raise ConfigError(f"{keep.resolve()} exists; give --keep a folder that can be made")
    else:
        yield keep.resolve()
