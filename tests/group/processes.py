"""Programs run by several real processes that train together, under torchrun or started one by one."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import warm

HERE = Path(__file__).parent
HEAD = f"""
import os, signal, sys, threading, time
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
from everstep.group import find_group
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def say(*words):  # one write: lines of several processes do not mix
    os.write(1, (" ".join(map(str, (f"{{rank}}:", *words))) + "\\n").encode())
"""
"""What each program has: its rank, the modules of these tests, and `say`, whose lines begin with the rank."""


POLL = 0.02
PIPED: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
FIRST_PORT = 20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.count(os.getpid())
_held: deque[socket.socket] = deque()
"""One at each of the last ports given away: taken for other tests on this machine, and not for a store."""


def free_port() -> int:
    """Return the next port of this worker's 500, from which no connection of another process begins."""
    for attempt in range(500):  # beside other sessions on this machine many are taken
        port = FIRST_PORT + next(_ports) % 500
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE or attempt == 499:
                raise
        else:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _held.append(held)
            if len(_held) > 100:
                _held.popleft().close()  # its test is over; a campaign asks for more than 500
            return port
    raise AssertionError


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    limit = {"EVERSTEP_GROUP_LIMIT": "120"}
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**limit, **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), **addresses}


@contextmanager
def started(program: str, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start `size` processes without a launcher; what is left of them at the end is killed."""
    port = free_port()
    text = HEAD + textwrap.dedent(program)
    command = [sys.executable, "-c", text]
    processes = [warm.Popen(command, env=environment(rank, size, port), **PIPED) for rank in range(size)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all of them; return what each has printed."""
    return [process.communicate(timeout=180)[0] for process in processes]


def outputs(program: str, size: int, status: int = 0, dies: bool = False) -> list[str]:
    """Run a program in `size` processes; return what each has printed.

    All have to end with `status`; or, if the last one `dies`, it is killed and the others fail.
    """
    with started(program, size) as processes:
        printed = ended(processes)
        codes = [process.returncode for process in processes]
    as_it_should = codes[-1] == -signal.SIGKILL and 0 not in codes if dies else codes == [status] * size
    assert as_it_should, f"they ended with {codes}\n" + "\n".join(printed)
    return printed


def lines_by_rank(text: str) -> dict[int, list[str]]:
    """Sort the lines of `say` by rank."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        rank, colon, said = line.partition(": ")
        if colon and rank.isdecimal():
            found.setdefault(int(rank), []).append(said)
    return found


@contextmanager
def under_torchrun(program: str, size: int, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program under torchrun, in a process group of its own, which is killed at the end."""
    path = folder / "program.py"
    path.write_text(HEAD + textwrap.dedent(program))
    command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *options, str(path)]
    process = warm.Popen([sys.executable, "-m", *command], start_new_session=True, **PIPED)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
