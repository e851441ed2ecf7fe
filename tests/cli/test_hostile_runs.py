"""A run directory that is damaged, or was made to harm: one note, and its neighbours are listed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from everstep.cli import _run
from everstep.record import RunDir, journal_format
from everstep.record.rundir import _encode
from tiny_runs import Tiny

SECONDS = 20
ROOM = 1 << 30
"""Bytes of address space that a command may take."""

LOOKING = (
    ("runs", "--json"),
    ("show", "runs/bad"),
    ("show", "runs/bad", "--json"),
    ("compare", "runs/bad", "runs/good"),
    ("report", "runs/bad", "--out", "report.html"),
    ("checkpoints", "runs/bad"),
    ("checkpoints", "runs/bad", "verify"),
    ("config", "runs/bad"),
    ("accept", "runs/bad", "--divergence", "1"),
    ("export", "runs/bad", "--out", "exported"),
    ("prune", "status=failed"),
    ("sync", "runs"),
    ("runs", "--json"),
)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Little time and memory; more of either is an error."""

    def late(*_: Any) -> None:
        raise AssertionError(f"it takes more than {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(*command: str) -> tuple[int, str, str]:
    """A command in this process: exit status, standard output, standard error."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["everstep", *command]
    try:
        with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = _run()
            except SystemExit as left:
                status = int(left.code or 0)
    finally:
        sys.argv = before
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs "good" and "bad", each with checkpoints, best weights and two starts."""
    folder = tmp_path_factory.mktemp("template")
    for name in ("good", "bad"):
        for epochs in (1, 2):
            Tiny(folder / "runs" / name, max_epoch=epochs).train(
                tail=lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)
            )
    (folder / "runs" / "everstep.db").unlink(missing_ok=True)
    return folder


@pytest.fixture
def here(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(template / "runs", tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_INDEX", "")
    return tmp_path / "runs" / "bad"


def all_commands_end_well() -> None:
    for command in LOOKING:
        status, out, err = run(*command)
        assert status in (0, 1, 2), (command, err)
        if command[0] == "runs":
            assert status == 0, err
            names = {name.rpartition("-")[0] for name in (one["name"] for one in json.loads(out))}
            assert names >= {"good"}, err
            of_bad = [line for line in err.splitlines() if "bad" in line]
            assert len(of_bad) <= 4, of_bad


def segment(run_dir: Path) -> Path:
    return run_dir / "journal" / "segment-0001.evj"


def frame(run_dir: Path, kind: int, payload: bytes) -> None:
    """Put a frame with a right checksum at the end of the journal."""
    path = segment(run_dir)
    with path.open("ab") as file:
        file.write(journal_format.pack_frame(kind, file.tell(), payload))


def facts(run_dir: Path, **changed: Any) -> None:
    """Other facts in run.json, with a right checksum."""
    there = dict(RunDir.open(run_dir, create=False).facts) | changed
    (run_dir / "run.json").write_bytes(_encode(there))


def event(kind: str, data: Any, **more: Any) -> bytes:
    return json.dumps({"kind": kind, "time": 1.0, "wall": True, "data": data, **more}).encode()


def replaced(name: str, how: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(run_dir: Path) -> None:
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        how(path)

    return harm


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40) if path.exists() else os.truncate(
        os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40
    )


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


MANY_ROWS = (
    journal_format._BLOCK.pack(1.0, 1, 10**8, 4, 4, 0)
    + b"steploss"
    + (journal_format._COLUMN.pack(0, 1) + journal_format._STRIDE.pack(1)) * 3
)
DEEP = b"[" * 200_000

HARMS: dict[str, Callable[[Path], object]] = {
    "10**8 rows in 124 bytes": lambda bad: frame(bad, journal_format.METRICS, MANY_ROWS),
    "a block without rows": lambda bad: frame(
        bad, journal_format.METRICS, journal_format._BLOCK.pack(1.0, 1, 0, 0, 0, 0)
    ),
    "brackets in an event": lambda bad: frame(bad, journal_format.EVENT, DEEP),
    "an event whose data are a list": lambda bad: frame(bad, journal_format.EVENT, event("closed", [])),
    "an event far away": lambda bad: frame(
        bad, journal_format.EVENT, event("closed", {"status": "x", "reason": 1}, time=1e300)
    ),
    "a status of its own": lambda bad: frame(
        bad, journal_format.EVENT, event("closed", {"status": {}, "reason": []})
    ),
    "a checkpoint without a name": lambda bad: frame(bad, journal_format.EVENT, event("checkpoint", {})),
    "a start without facts": lambda bad: frame(bad, journal_format.EVENT, event("segment", {})),
    "a divergence at no step": lambda bad: frame(
        bad, journal_format.EVENT, event("diverged", {"component": "x"})
    ),
    "an acceptance at a text": lambda bad: frame(
        bad, journal_format.EVENT, event("decision", {"what": "accepted", "step": "1"})
    ),
    "a step beyond 64 bits": lambda bad: frame(
        bad, journal_format.EVENT, event("ended", {"step": 1 << 80, "reason": ""})
    ),
    "the same frame twice": lambda bad: segment(bad).write_bytes(
        segment(bad).read_bytes() + segment(bad).read_bytes()[journal_format.HEADER_SIZE :]
    ),
    "brackets in run.json": lambda bad: (bad / "run.json").write_bytes(DEEP),
    "a long run.json": lambda bad: (bad / "run.json").write_bytes(b" " * (2 << 20)),
    "no number in run.json": lambda bad: facts(bad, created="yesterday"),
    "an id that is a list": lambda bad: facts(bad, id=["good"]),
    "a far day in run.json": lambda bad: facts(bad, created=1e300),
    "a segment named ²": lambda bad: segment(bad).rename(bad / "journal" / "segment-².evj"),
    "a segment with a large number": lambda bad: segment(bad).rename(
        bad / "journal" / f"segment-{10**30}.evj"
    ),
    "a checkpoint of ²": lambda bad: (bad / "checkpoints" / "step-0000000²").mkdir(),
    "a leftover of ²": lambda bad: (bad / ".tmp-x-²").mkdir(),
    "brackets in the pointer": lambda bad: (bad / "checkpoint").write_bytes(DEEP),
    "brackets in a manifest": lambda bad: manifest(bad, DEEP),
    "many frames that claim the rest": lambda bad: segment(bad).write_bytes(
        (journal_format._MARKER + (1 << 21).to_bytes(4, "little") + bytes(20)) * (1 << 17)
    ),
    "a hole in a segment": lambda bad: sparse(segment(bad)),
}


def manifest(bad: Path, body: bytes) -> None:
    """The body of all manifests, with a right checksum."""
    for path in (bad / "checkpoints").glob("*/manifest.json"):
        path.write_bytes(b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(body).encode(), body))


PLACES = ("run.json", "lock", "lock.json", "checkpoint", "journal", "journal/segment-0001.evj", "checkpoints")
THINGS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": a_socket,
    "folder": Path.mkdir,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "loop of links": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
}
HARMS |= {
    f"a {what} as {name}": replaced(name, how)
    for name in PLACES
    for what, how in THINGS.items()
    if what in ("fifo", "folder") or name.endswith(".evj")
}


@pytest.mark.campaign("long", gate=5)
@pytest.mark.parametrize("harm", HARMS.values(), ids=list(HARMS))
def test_a_hostile_run_is_one_note_and_its_neighbours_are_listed(
    here: Path, harm: Callable[[Path], object]
) -> None:
    harm(here)
    all_commands_end_well()
