"""Programs run by several real processes that train together, under torchrun or started one by one."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import warm

HEAD = """
import os, signal, sys, threading, time
from everstep.group import find_group
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def say(*words):  # one write: lines of several processes do not mix
    os.write(1, (" ".join(map(str, (f"{rank}:", *words))) + "\\n").encode())
"""
"""What each program has: its rank, and `say`, which prints a line that begins with the rank."""


POLL = 0.02
FIRST_PORT = 20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.count(os.getpid())


def free_port() -> int:
    """Return the next port of this worker's 500, from which no connection of another process begins."""
    for attempt in range(3):
        port = FIRST_PORT + next(_ports) % 500
        try:
            socket.create_server(("127.0.0.1", port)).close()
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE or attempt == 2:
                raise
            print(f"port {port} is taken: another one is tried")
    raise AssertionError


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), **addresses}


@contextmanager
def started(program: str, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start `size` processes without a launcher; what is left of them at the end is killed."""
    port = free_port()
    text = HEAD + textwrap.dedent(program)
    processes = [
        warm.Popen(
            [sys.executable, "-c", text],
            env=environment(rank, size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all of them; return what each has printed."""
    return [process.communicate(timeout=180)[0] for process in processes]


def outputs(program: str, size: int) -> list[str]:
    """Run a program in `size` processes that all have to succeed; return what each has printed."""
    with started(program, size) as processes:
        printed = ended(processes)
        codes = [process.returncode for process in processes]
        assert codes == [0] * size, f"they ended with {codes}\n" + "\n".join(printed)
    return printed


def strike(program: str, size: int, run: Path, chosen: random.Random, within: float) -> int:
    """Start ranks that train, and kill all of them or one; return 1 if a rank was killed, 0 if all had ended.

    Args:
        program: makes the file RUN.PID when the loop of its process is entered.
        chosen: chooses when, and whom.
        within: seconds after the run's first checkpoint until the latest kill.
    """
    with started(program, size) as processes:
        while not list(run.glob("checkpoints/*")) and any(process.poll() is None for process in processes):
            Event().wait(POLL)
        Event().wait(chosen.random() * within)
        began = all(Path(f"{run}.{process.pid}").exists() for process in processes)
        victims = processes if chosen.random() < 0.5 or not began else [chosen.choice(processes)]
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        ended(processes)
        return int(any(victim.returncode == -signal.SIGKILL for victim in victims))


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
    process = warm.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
