"""`everstep doctor`"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

from everstep.cli.common_options import json_option
from everstep.cli.output import print_json, say
from everstep.display.cells import in_line, size

_PACKAGES = ("everstep", "numpy", "torch", "sqlalchemy", "click", "plotext", "matplotlib")
_WRITE = 64 << 20
_ASK = "import sys, pathlib, everstep.record as r; print(r.is_held(pathlib.Path(sys.argv[1])))"


class Finding(NamedTuple):
    """Result of an examination; `ok` is False for a fault that must be mended, None for information."""

    name: str
    found: str
    ok: bool | None = None


@click.command("doctor")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
@json_option
def command(folder: Path, as_json: bool) -> None:
    """Check this machine, and FOLDER for runs (default: the current folder).

    If FOLDER is a run directory, also list the errors, hangs and lost ranks of its newest start; their
    tracebacks are in FOLDER/failures.

    Exit status 1 if a run there would not be exact or safe.
    """
    findings = [*_disk(folder), *_environment(), *_determinism(), *_failures(folder)]
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        width = max(len(finding.name) for finding in findings)
        for name, found, ok in findings:
            mark = {True: "ok", False: "BAD", None: ""}[ok]
            say(f"{mark:4}{name:{width}}  {found}")
    if any(finding.ok is False for finding in findings):
        sys.exit(1)


def _failures(folder: Path) -> Iterator[Finding]:
    """List what went wrong in the newest start of a run."""
    if not (folder / "journal").is_dir():
        return
    from everstep.record import RunJournal, failures

    newest = max((segment.number for segment in RunJournal(folder).segments()), default=0)
    for page in failures(folder):
        if page.segment == newest:
            yield Finding(page.kind, f"rank {page.rank}, after step {page.step}: {in_line(str(page))}")


def _environment() -> Iterator[Finding]:
    from importlib import metadata

    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        try:
            yield Finding(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "not installed")


def _determinism() -> Iterator[Finding]:
    from everstep import backends

    cuda = None
    if find_spec("torch") is not None:
        facts = backends.get("torch").describe()
        cuda = ", ".join(importlib.import_module("everstep.backends.torch.backend").cuda_devices())
        yield Finding(
            "devices", f"CPU, {facts['torch_threads']} threads" + (f"; CUDA: {cuda}" if cuda else "")
        )
    else:
        yield Finding("devices", f"CPU, {os.cpu_count()} cores")
    if cuda:
        said = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        yield Finding(
            "determinism",
            f"on CUDA, bits are equal with torch.use_deterministic_algorithms(True) and "
            f"CUBLAS_WORKSPACE_CONFIG=:4096:8 (now {said or 'not set'})",
        )
    else:
        yield Finding("determinism", "on the CPU, the same program gives the same bits", True)
    seed = os.environ.get("PYTHONHASHSEED")
    fixed = seed is not None and seed != "random"
    told = f"PYTHONHASHSEED={seed}" if fixed else "the order of a set of strings differs from start to start"
    yield Finding("hash seed", told)


def _disk(folder: Path) -> Iterator[Finding]:
    try:
        with tempfile.TemporaryDirectory(prefix=".everstep-doctor-", dir=folder) as place:
            yield _guarded("write speed", lambda: _write_speed(Path(place)))
            yield _guarded("fsync", lambda: _fsync_time(Path(place)))
            yield _guarded("locks", lambda: _locks(Path(place)))
    except OSError as error:
        yield Finding("folder", f"{folder} cannot be written: {error.strerror}; choose another folder", False)
    free = os.statvfs(folder)
    yield Finding("free space", size(free.f_bavail * free.f_frsize))


def _guarded(name: str, examine: Callable[[], Finding]) -> Finding:
    try:
        return examine()
    except OSError as error:
        return Finding(name, f"{error.strerror or error}; check the disk, or choose another folder", False)


def _write_speed(place: Path) -> Finding:
    data = os.urandom(1 << 20)
    begun = time.perf_counter()
    with open(place / "data", "wb") as file:
        for _ in range(_WRITE >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    return Finding("write speed", f"{size(_WRITE / seconds)}/s, durable", True)


def _fsync_time(place: Path) -> Finding:
    times = []
    for number in range(5):
        with open(place / f"small-{number}", "wb") as file:
            file.write(b"everstep")
            file.flush()
            begun = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begun)
    return Finding("fsync", f"{median(times) * 1000:.2g} ms", True)


def _locks(place: Path) -> Finding:
    """Test whether another process sees a lock that this process holds."""
    from everstep.record import RunLock

    lock = RunLock(place)
    lock.acquire()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK, str(place)], capture_output=True, text=True, check=False
        )
    finally:
        lock.release()
    if done.stdout.strip() == "True":
        return Finding("locks", "seen by other processes", True)
    return Finding(
        "locks", "other processes do not see them, so two could train one run: choose another folder", False
    )
