"""`everstep prune` deletes runs, and nothing else; a hostile run is one note, and harms no other."""

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
from cli_runs import as_json, everstep
from index_runs import train

import everstep as library
from everstep.cli.common import find
from everstep.errors import ConfigError, RunDirError
from everstep.record import Journal, RunDir, journal_format, remove, why_stays
from everstep.record.journal_format import EVENT, METRICS
from everstep.views.describe_run import describe
from tiny_runs import Tiny, collecting


def there(here: Path) -> set[str]:
    return {path.name for path in (here / "runs").iterdir() if not path.name.startswith("everstep.db")}


def test_it_lists_or_deletes_what_was_chosen_and_the_index_forgets_it(here: Path) -> None:
    before = there(here)
    said, _ = everstep("prune", "status=failed", cwd=here)
    assert "failed-" in said and "good" not in said and there(here) == before
    assert said.endswith("1 run would be deleted; pass --delete to delete\n")
    (row,) = as_json("prune", "status=failed", "--delete", cwd=here)
    assert row["deleted"] and row["stays"] == "" and row["bytes"] > 0
    assert there(here) == before - {"failed"}
    assert (here / "runs" / "notes" / "ideas.txt").read_text() == "keep"
    assert "failed" not in {run["status"] for run in as_json("runs", cwd=here)}
    said, _ = everstep("prune", "--where", '{"status": "killed"}', "--delete", cwd=here)
    assert "1 run deleted" in said and there(here) == before - {"failed", "killed"}
    assert everstep("prune", "status=killed", cwd=here)[0].startswith("0 runs would be deleted")


@pytest.mark.campaign("long")
def test_a_run_whose_name_only_begins_so_is_not_deleted(here: Path) -> None:
    """The same line again deletes nothing more."""
    (here / "runs" / "good").rename(here / "runs" / "goodness")
    before = there(here)
    (row,) = as_json("runs", "name=good", cwd=here)
    assert "there is no run 'goo'" in everstep("prune", "goo", "--delete", cwd=here, status=2)[1]
    (found,) = as_json("prune", "name=good", "--delete", cwd=here)
    assert found["deleted"] and found["name"] == row["name"]
    for same in (["name=good"], ["name=l"], ["name=lon"], ["name=long-"], ["--where", '{"name": "lon"}']):
        assert as_json("prune", *same, "--delete", cwd=here) == []
    assert there(here) == before - {"goodness"}
    (found,) = as_json("prune", "--where", '{"name": {"$in": ["long", 3]}}', "--delete", cwd=here)
    assert found["deleted"] and there(here) == before - {"goodness", "long"}


def test_a_running_run_is_seen_and_left_alone(running: Path) -> None:
    assert as_json("show", "runs/running", cwd=running)["status"] == "running"
    command = ("checkpoints", "runs/running", "prune", "--keep-last", "1")
    assert as_json(*command, cwd=running)
    assert "is in use by process" in everstep(*command, "--delete", cwd=running, status=1)[1]
    said, beside = everstep("prune", "step>=0", "--delete", cwd=running)
    assert "stays: it is running" in beside and "running-" not in said
    assert there(running) == {"notes", "running"}
    _, beside = everstep("prune", "runs/running", "--delete", cwd=running, status=1)
    assert "stays: it is running" in beside
    (row,) = as_json("prune", "running", "--delete", cwd=running, status=1)
    assert row["stays"] == "it is running" and not row["deleted"]


def test_a_run_without_a_lock_stays_unless_it_said_its_end(tmp_path: Path) -> None:
    """However long ago its last sign of life was: it may wait for its data."""
    run = RunDir.open(tmp_path / "runs" / "a")
    for number in (1, 2):
        journal = Journal.open(run.path, number, None, {})
        journal.flush()
        assert "may be running" in why_stays(run.path, run.id)
        with pytest.raises(RunDirError, match="delete the directory by hand"):
            remove(run.path, run.id)
        with pytest.raises(RunDirError, match="another run is there, a-"):
            remove(run.path, "a-000000")
        journal.event("closed", {"status": "stopped", "reason": "left"}, wall=True)
        journal.close()
    (row,) = as_json("prune", "a", "--delete", cwd=tmp_path)
    assert row["deleted"] and there(tmp_path) == set()


@pytest.mark.campaign("long")
def test_what_is_no_run_or_holds_another_one_stays(here: Path) -> None:
    assert "is not a run directory" in everstep("prune", "./runs/notes", "--delete", cwd=here, status=2)[1]
    (here / "link").symlink_to(here / "runs" / "good")
    assert "it is a link" in everstep("prune", "link", "--delete", cwd=here, status=1)[1]
    RunDir.open(here / "runs" / "long" / "mine")
    assert "it contains another run" in everstep("prune", "runs/long", "--delete", cwd=here, status=1)[1]
    everstep("sync", "runs", cwd=here)
    (here / "runs" / "failed" / "run.json").unlink()
    assert "is gone" in everstep("prune", "failed", "--delete", cwd=here, status=1)[1]
    assert there(here) == {"notes", "good", "long", "stopped", "failed", "killed"}
    assert "1 run deleted" in everstep("prune", "stopped", "--delete", cwd=here)[0]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("point", ["rename:1", "fsync_folder:1", "entry:1", "entry:4"])
def test_killed_anywhere_what_is_left_is_a_run_and_can_be_deleted(here: Path, point: str) -> None:
    everstep("prune", "good", "--delete", cwd=here, status=-9, EVERSTEP_HAZARD=f"kill:removing.{point}")
    (left,) = [name for name in there(here) if name.startswith("good")]
    assert (left == "good") == (point == "rename:1")
    (row,) = as_json("prune", f"runs/{left}", "--delete", cwd=here)
    assert row["deleted"] and row["name"].startswith("good-")
    assert not [name for name in there(here) if name.startswith("good")]


@pytest.mark.campaign("long")
def test_a_run_that_was_trained_anew_in_the_place_of_a_deleted_one_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    assert train(run_dir, 1, 2, "raise") == 1
    (old,) = as_json("runs", cwd=tmp_path)
    shutil.rmtree(run_dir)
    assert train(run_dir, 1) == 0
    assert as_json("prune", "status=failed", "--delete", cwd=tmp_path) == []
    said = everstep("prune", old["name"], "--delete", cwd=tmp_path, status=1)[1]
    assert "its directory is gone" in said
    found = find(old["name"], str(tmp_path / "runs"))
    with pytest.raises(ConfigError, match=f"{run_dir} is now the run a-"):
        _ = found.path
    with found.database.read() as connection:
        described = describe(connection, found)
    assert described["checkpoints"] == [] and described["digest"] is None
    compared = as_json("compare", old["name"], "a", cwd=tmp_path)["facts"]
    assert compared["status"][old["name"]] == "gone" and compared["digest"][old["name"]] is None
    assert there(tmp_path) == {"a"}
    (row,) = as_json("prune", "a", "--delete", cwd=tmp_path)
    assert row["deleted"] and row["name"] != old["name"]


ROOM = 1 << 30
"""Bytes of address space that a command may take."""

LOOKING = (
    "runs --json", "show runs/bad --json", "compare runs/bad runs/good", "report runs/bad --out report.html",
    "checkpoints runs/bad verify", "config runs/bad", "accept runs/bad --divergence 1", "prune status=failed",
    "export runs/bad --out exported", "sync runs", "runs --json",
)  # fmt: skip


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
    tail = collecting("valid_loss", [1.0, 0.5])
    for name in ("good", "bad"):
        for epochs in (1, 2):
            Tiny(folder / "runs" / name, max_epoch=epochs).train(tail=tail)
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


def replaced(name: str, how: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(run_dir: Path) -> None:
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        how(path)

    return harm


ZEROS = zlib.compress(bytes(10**6))
MANY_ROWS = journal_format._BLOCK.pack(1.0, 1, 10**8, 4, 4, len(ZEROS), 0) + b"steploss" + ZEROS
DEEP = b"[" * 200_000
CLAIMS = (journal_format._MARKER + (1 << 21).to_bytes(4, "little") + bytes(20)) * (1 << 17)

HARMS: dict[str, Callable[[Path], object]] = {
    "10**8 rows in 1,000 bytes": frame(METRICS, MANY_ROWS),
    "brackets in an event": frame(EVENT, DEEP),
    "brackets in run.json": lambda bad: (bad / "run.json").write_bytes(DEEP),
    "a segment named ²": lambda bad: segment(bad).rename(bad / "journal" / "segment-².evj"),
    "a large number": lambda bad: segment(bad).rename(bad / "journal" / f"segment-{10**30}.evj"),
    "a checkpoint of ²": lambda bad: (bad / "checkpoints" / "step-0000000²").mkdir(),
    "many frames that claim the rest": lambda bad: segment(bad).write_bytes(CLAIMS),
    "a hole in a segment": lambda bad: os.truncate(segment(bad), 1 << 40),
    "an endless device": replaced("journal/segment-0001.evj", lambda path: path.symlink_to("/dev/zero")),
    "a pipe": replaced("run.json", os.mkfifo),
    "a folder": replaced("lock", Path.mkdir),
}
"""What a stranger may do to a run; tests/hostile has the bytes of each file, test_damaged_run.py the rest."""


@pytest.mark.campaign("long", gate=5)
@pytest.mark.parametrize("harm", HARMS.values(), ids=list(HARMS))
def test_a_hostile_run_is_one_note_and_others_are_listed(template: Path, tmp_path: Path, harm: Any) -> None:
    shutil.copytree(template / "runs", tmp_path / "runs", symlinks=True)
    harm(tmp_path / "runs" / "bad")
    for command in LOOKING:
        with limited():
            status, told, said = cli_runs.here(*command.split(), cwd=tmp_path, EVERSTEP_INDEX="")
        assert status in (0, 1, 2), (command, said)
        if command == "runs --json":
            assert status == 0, said
            assert "good" in {one["name"].rpartition("-")[0] for one in json.loads(told)}, said
            assert len([line for line in said.splitlines() if "bad" in line]) <= 4, said


def test_du_tells_what_runs_take_and_what_pruning_frees(tmp_path: Path) -> None:
    keep_all = library.Checkpoints(library.Every(epochs=1), keep_last=None)
    best = library.Best("loss")
    Tiny(tmp_path / "runs" / "many", max_epoch=6, services=[keep_all, best]).train()
    Tiny(tmp_path / "runs" / "few", max_epoch=1).train()
    many, few = as_json("du", cwd=tmp_path)
    assert [Path(row["run"]).name for row in (many, few)] == ["many", "few"]
    for row in (many, few):
        files = [path for path in Path(row["run"]).rglob("*") if path.is_file()]
        parts = ("checkpoints", "journal", "best", "exports", "other")
        assert row["bytes"] == sum(path.stat().st_size for path in files)
        assert row["bytes"] == sum(row[f"{part}_bytes"] for part in parts)
    assert many["best_bytes"] > 0 and few["prunable_bytes"] == few["exports_bytes"] == 0
    told, _ = everstep("du", "runs", cwd=tmp_path)
    assert told.splitlines()[-1].startswith("2 runs ") and "kB" in told
    everstep("checkpoints", "many", "prune", "--delete", cwd=tmp_path)
    pruned = as_json("du", "runs/many", cwd=tmp_path)[0]
    assert 0 < many["prunable_bytes"] == many["checkpoints_bytes"] - pruned["checkpoints_bytes"]
    assert pruned["prunable_bytes"] == 0
    (tmp_path / "empty").mkdir()
    assert everstep("du", "empty", cwd=tmp_path)[0] == "there are no runs\n"
