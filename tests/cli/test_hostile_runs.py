"""A run directory that is damaged, or was made to harm: one note, and its neighbours are listed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cli_runs
import pytest
import xxhash

from everstep.record import RunDir, journal_format
from everstep.record.journal_format import EVENT, METRICS
from everstep.record.rundir import _encode
from tiny_runs import Tiny

ROOM = 1 << 30
"""Bytes of address space that a command may take."""

LOOKING = (
    ("runs", "--json"),
    ("show", "runs/bad", "--json"),
    ("compare", "runs/bad", "runs/good"),
    ("report", "runs/bad", "--out", "report.html"),
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
    """Little memory; more of it is an error."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs "good" and "bad", each with checkpoints and two starts."""
    folder = tmp_path_factory.mktemp("template")
    for name in ("good", "bad"):
        for epochs in (1, 2):
            Tiny(folder / "runs" / name, max_epoch=epochs).train(
                tail=lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)
            )
    (folder / "runs" / "everstep.db").unlink(missing_ok=True)
    return folder


def segment(run_dir: Path) -> Path:
    return run_dir / "journal" / "segment-0001.evj"


def frame(kind: int, payload: bytes) -> Callable[[Path], None]:
    """Put a frame with a right checksum at the end of the journal."""

    def harm(run_dir: Path) -> None:
        with segment(run_dir).open("ab") as file:
            file.write(journal_format.pack_frame(kind, file.tell(), payload))

    return harm


def event(kind: str, data: Any, **more: Any) -> Callable[[Path], None]:
    return frame(EVENT, json.dumps({"kind": kind, "time": 1.0, "wall": True, "data": data, **more}).encode())


def facts(**changed: Any) -> Callable[[Path], None]:
    """Other facts in run.json, with a right checksum."""

    def harm(run_dir: Path) -> None:
        there = dict(RunDir.open(run_dir, create=False).facts) | changed
        facts_file(_encode(there))(run_dir)

    return harm


def facts_file(data: bytes) -> Callable[[Path], object]:
    return lambda run_dir: (run_dir / "run.json").write_bytes(data)


def replaced(name: str, how: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(run_dir: Path) -> None:
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        how(path)

    return harm


def manifest(bad: Path) -> None:
    """Brackets in all manifests, with a right checksum."""
    for path in (bad / "checkpoints").glob("*/manifest.json"):
        path.write_bytes(b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(DEEP).encode(), DEEP))


ZEROS = zlib.compress(bytes(10**6))
MANY_ROWS = journal_format._BLOCK.pack(1.0, 1, 10**8, 4, 4, len(ZEROS), 0) + b"steploss" + ZEROS
DEEP = b"[" * 200_000
CLAIMS = (journal_format._MARKER + (1 << 21).to_bytes(4, "little") + bytes(20)) * (1 << 17)

HARMS: dict[str, Callable[[Path], object]] = {
    "10**8 rows in 1,000 bytes": frame(METRICS, MANY_ROWS),
    "brackets in an event": frame(EVENT, DEEP),
    "an event whose data are a list": event("closed", []),
    "an event far away": event("closed", {"status": "x", "reason": 1}, time=1e300),
    "a status of its own": event("closed", {"status": {}, "reason": []}),
    "a checkpoint without a name": event("checkpoint", {}),
    "a divergence at no step": event("diverged", {"component": "x"}),
    "a step beyond 64 bits": event("ended", {"step": 1 << 80, "reason": ""}),
    "brackets in run.json": facts_file(DEEP),
    "a long run.json": facts_file(b" " * (2 << 20)),
    "an id that is a list": facts(id=["good"]),
    "a far day in run.json": facts(created=1e300),
    "a segment named ²": lambda bad: segment(bad).rename(bad / "journal" / "segment-².evj"),
    "a large number": lambda bad: segment(bad).rename(bad / "journal" / f"segment-{10**30}.evj"),
    "a checkpoint of ²": lambda bad: (bad / "checkpoints" / "step-0000000²").mkdir(),
    "brackets in a manifest": manifest,
    "many frames that claim the rest": lambda bad: segment(bad).write_bytes(CLAIMS),
    "a hole in a segment": lambda bad: os.truncate(segment(bad), 1 << 40),
    "an endless device": replaced("journal/segment-0001.evj", lambda path: path.symlink_to("/dev/zero")),
}
HARMS |= {
    f"a {how.__name__} as {name}": replaced(name, how)
    for name in ("run.json", "lock", "journal", "journal/segment-0001.evj", "checkpoints")
    for how in (os.mkfifo, Path.mkdir)
}


@pytest.mark.campaign("long", gate=5)
@pytest.mark.parametrize("harm", HARMS.values(), ids=list(HARMS))
def test_a_hostile_run_is_one_note_and_its_neighbours_are_listed(
    template: Path, tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    shutil.copytree(template / "runs", tmp_path / "runs", symlinks=True)
    harm(tmp_path / "runs" / "bad")
    for command in LOOKING:
        with limited():
            status, told, said = cli_runs.here(*command, cwd=tmp_path, EVERSTEP_INDEX="")
        assert status in (0, 1, 2), (command, said)
        if command[0] == "runs":
            assert status == 0, said
            assert "good" in {one["name"].rpartition("-")[0] for one in json.loads(told)}, said
            assert len([line for line in said.splitlines() if "bad" in line]) <= 4, said
