"""What strace, which is not ours, sees of a process: the calls that change files, in their order.

`record` lets a program run and returns its calls below a folder.  `struck` runs it again, and lets strace
kill it before one of these calls, or refuse that call.  Neither trusts a word of `everstep.hazard`: a call
before which no hazard stands is seen and struck like any other.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import warm
from strace_log import ASKED, MAIN, Call, calls_in

PROGRAM = Path(__file__).with_name("struck_program.py")


@cache
def program() -> str:
    """The path of strace."""
    found = shutil.which("strace")
    if found is None:
        pytest.fail(
            "crash points and power cuts are made from strace's record: sh tools/strace.sh, or install strace"
        )
    return found


class Ended(NamedTuple):
    """How a program ended that was traced.

    Attributes:
        status: exit status, negative for a signal.
        output: what it printed.
        calls: its calls below the folder.
    """

    status: int
    output: str
    calls: list[Call]


def record(
    command: list[str], folder: Path, log: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a program of Python to its end; all its threads and all calls that name a file are seen.

    Args:
        command: a file and its arguments.
        folder: whose files count.
        log: where strace writes.
    """
    more = ["-f", "-e", "trace=%file,%desc", "-e", "raw=read,pread64,readv,getdents64"]
    return _traced(command, folder, log, MAIN, more, "", environment)


def strike(
    command: list[str],
    folder: Path,
    log: Path,
    call: Call,
    what: str,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program again, and strike the thread's call of this name and count.

    Args:
        what: "kill" to kill the process before the call, or the error with which the call is refused.
    """
    how = "signal=KILL" if what == "kill" else f"error={what}"
    more = ["-e", f"trace={','.join(sorted(set(ASKED)))}"]
    more += ["-e", f"inject={call.name}:{how}:when={call.count}"]
    return _traced(command, folder, log, call.thread, more, call.thread, environment)


WAYS = ("kill", "ENOSPC", "EIO", "EROFS", "torn")
"""How a call is struck: killed before it, refused, or killed inside a write, which is cut short."""


def ways_of(call: Call) -> tuple[str, ...]:
    """How a call can be struck."""
    if call.kind in ("map", "open") or call.failed:
        return ()  # what changes no file by itself
    return WAYS if len(call.data) > 1 else WAYS[:-1]


def struck(
    command: list[str],
    folder: Path,
    log: Path,
    call: Call,
    way: str,
    environment: Mapping[str, str] | None = None,
) -> tuple[Ended, Call | None]:
    """Strike a call in one of `WAYS`; returns what was struck, None if the program did not come so far."""
    ended = strike(command, folder, log, call, "kill" if way in ("kill", "torn") else way, environment)
    hit = next((found for found in ended.calls if found.injected), None)
    if hit is None:
        return ended, None
    if way in ("kill", "torn"):
        assert ended.status == -9, f"{call}: {ended.status}"
    else:
        assert hit.failed == way, f"{call}: {hit}"
    if way == "torn" and hit.data:
        path = folder / hit.path
        with open(path, "r+b") as file:  # a kill inside a write leaves its beginning
            file.seek(path.stat().st_size if hit.offset is None else hit.offset)
            file.write(hit.data[: len(hit.data) // 2])
    return ended, hit


def _traced(
    command: list[str],
    folder: Path,
    log: Path,
    thread: str,
    more: list[str],
    alone: str,
    environment: Mapping[str, str] | None,
) -> Ended:
    ours, theirs = socket.socketpair()
    output = log.with_suffix(".output")
    with ours, open(output, "wb") as said:
        with theirs:
            victim = warm.Popen(
                [sys.executable, str(PROGRAM), thread, *command],
                env={**os.environ, **warm.ONE_THREAD, **(environment or {})},
                stdin=theirs,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        ours.settimeout(60)
        number = ours.recv(64).decode()  # "" if the program ended without this thread
        log.unlink(missing_ok=True)
        if number:
            told = ["-y", "-xx", "-s", "9999999", "-o", str(log), "-p", number]
            tracer = subprocess.Popen(
                [program(), *told, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            assert tracer.stderr is not None
            said_first = tracer.stderr.readline().decode()
            assert "attached" in said_first, f"strace cannot trace a process here: {said_first}"
            _wait_for_tracer(number)
            ours.sendall(b"!")
            status = victim.wait(120)
            tracer.communicate(timeout=60)
        else:
            status = victim.wait(120)
    text = log.read_text() if number else ""
    return Ended(status, output.read_text(errors="replace"), calls_in(text, folder, alone=alone))


def _wait_for_tracer(number: str) -> None:
    for _ in range(10_000):
        if "TracerPid:\t0\n" not in Path(f"/proc/{number}/status").read_text():
            return
        time.sleep(0.001)
    raise AssertionError("strace does not trace the process")
