"""`everstep prune`: run directories, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import as_json, everstep
from index_runs import start, train

import everstep as library
from everstep.cli.common import find
from everstep.errors import ConfigError, RunDirError
from everstep.record import Journal, RunDir, remove, why_stays
from everstep.views.describe_run import describe
from tiny_runs import Tiny


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    """A copy of them, beside what is no run."""
    shutil.copytree(made / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("everstep.db*"))
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "ideas.txt").write_text("keep")
    return tmp_path


def there(here: Path) -> set[str]:
    return {path.name for path in (here / "runs").iterdir() if not path.name.startswith("everstep.db")}


def test_prune_without_delete_only_lists_the_runs(here: Path) -> None:
    before = there(here)
    said, _ = everstep("prune", "status=failed", cwd=here)
    assert "failed-" in said and "good" not in said
    assert said.endswith("1 run would be deleted; pass --delete to delete\n")
    assert there(here) == before


def test_it_deletes_what_was_chosen_and_the_index_forgets_it(here: Path) -> None:
    before = there(here)
    (row,) = as_json("prune", "status=failed", "--delete", cwd=here)
    assert row["deleted"] and row["stays"] == "" and row["bytes"] > 0
    assert there(here) == before - {"failed"}
    assert (here / "runs" / "notes" / "ideas.txt").read_text() == "keep"
    assert "failed" not in {run["status"] for run in as_json("runs", cwd=here)}
    said, _ = everstep("prune", "--where", '{"status": "killed"}', "--delete", cwd=here)
    assert "1 run deleted" in said
    assert there(here) == before - {"failed", "killed"}
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


@pytest.fixture
def running(here: Path) -> Iterator[Path]:
    """The same while one more is in the middle of its training."""
    victim = start(here / "runs" / "running", 4, 6, "wait")
    assert "waiting\n" in iter(victim.stdout.readline, "")
    yield here
    victim.kill()
    victim.communicate()


def test_a_running_run_stays(running: Path) -> None:
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


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("", 2, "give either RUNs, or CONDITIONS such as 'epoch<1' and --where JSON"),
        ("good epoch<1", 2, "give either RUNs, or CONDITIONS"),
        ("goood", 2, "did you mean 'good-"),
        ("epcoh<1", 2, "did you mean 'epoch'"),
        ("good --index none/everstep.db", 1, "there are no runs"),
    ],
)
def test_wrong_input_deletes_nothing(made: Path, command: str, status: int, said: str) -> None:
    before = there(made)
    assert said in everstep("prune", *command.split(), "--delete", cwd=made, status=status)[1]
    assert there(made) == before


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


def test_only_the_run_that_was_meant_is_removed(tmp_path: Path) -> None:
    RunDir.open(tmp_path / "a", seed=1)
    with pytest.raises(RunDirError, match="another run is there, a-"):
        remove(tmp_path / "a", "a-000000")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


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
