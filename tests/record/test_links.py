"""Nothing below a run directory is deleted, moved or overwritten through a link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import everstep
from everstep.checkpoint import (
    CheckpointName,
    Commit,
    Retention,
    Store,
    place_apart,
    retire_others,
    save_apart,
)
from everstep.cli.group import commands
from everstep.errors import CheckpointError, RunDirError
from everstep.record import RunDir, remove, trail_path
from everstep.services import CSV, Export
from everstep.state import Encoded
from tiny_runs import Tiny

FOLDERS = (
    "checkpoints",
    "best",
    "damaged",
    "superseded",
    "exports",
    "evaluations",
    "journal",
    "logs",
    "failures",
)
FILES = ("lock", "checkpoint", "pins.json", "labels.json", "run.json")
EMPTY = Commit(CheckpointName(1), Encoded({}), "1")


def train(run_dir: Path, epochs: int = 2) -> Tiny:
    services = [
        everstep.Best("loss", mode="min"),
        everstep.Checkpoints(everstep.Every(steps=1), keep_last=100),
        Export(everstep.Every(epochs=1), entry="w"),
        CSV("logs/table.csv"),
    ]
    return Tiny(run_dir, max_epoch=epochs, services=services).train()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A run that somebody else's run must not touch."""
    return train(tmp_path / "victim").run_dir


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    return train(tmp_path / "evil", 1).run_dir


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, and every name."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def replaced(place: Path, target: Path) -> None:
    """Put a link in the place of something that a run has."""
    place.parent.mkdir(exist_ok=True)
    if os.path.lexists(place):
        place.rename(place.with_name(f"{place.name}.away"))
    place.symlink_to(target)


def refused(victim: Path, use: Callable[[], object]) -> None:
    """It is refused because of the link, and the victim is as it was."""
    before = content(victim)
    with pytest.raises(RunDirError, match="a link"):
        use()
    assert content(victim) == before


@pytest.mark.campaign("long")
def test_prune_does_not_delete_in_another_run(evil: Path, victim: Path) -> None:
    replaced(evil / "checkpoints", victim / "checkpoints")
    for more in ([], ["--delete"]):
        prune = ["checkpoints", str(evil), "prune", "--keep-last", "1", *more]
        refused(victim, lambda prune=prune: commands.main(prune, standalone_mode=False))  # type: ignore[misc]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_a_training_refuses_a_link_in_its_directory(evil: Path, victim: Path, name: str) -> None:
    (victim / name).mkdir(exist_ok=True) if name in FOLDERS else (victim / name).touch()
    replaced(evil / name, victim / name)
    refused(victim, lambda: train(evil, 3))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("place", ["best/loss", "exports/export", "logs/run.log", "logs/table.csv"])
def test_a_training_leaves_alone_what_a_deeper_link_leads_to(evil: Path, victim: Path, place: str) -> None:
    replaced(evil / place, victim / "checkpoints" if (evil / place).is_dir() else victim / "run.json")
    before = content(victim)
    try:
        said = train(evil, 3).lines
    except (RunDirError, CheckpointError) as error:
        said = [str(error)]
    assert content(victim) == before
    assert any("it is a link" in line for line in said), said


def test_a_checkpoint_that_is_a_link_is_not_followed(evil: Path, victim: Path) -> None:
    oldest = sorted((evil / "checkpoints").iterdir())[0]
    replaced(oldest, sorted((victim / "checkpoints").iterdir())[0])
    before, said = content(victim), list[str]()
    Store(evil, 9, said.append).retain(Retention(keep_last=1))
    assert content(victim) == before
    assert "could not be deleted" in said[0]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", ["damaged", "superseded", "checkpoints"])
def test_a_store_moves_nothing_through_a_link(evil: Path, victim: Path, name: str) -> None:
    (victim / name).mkdir(exist_ok=True)
    replaced(evil / name, victim / name)
    store = Store(evil, 9, lambda _: None)
    newest = store.names()[-1]
    if name == "damaged":
        manifest = store.path(newest) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])
        refused(victim, lambda: store.commit(Commit(newest, Encoded({}), "1")))
    else:
        refused(victim, store.supersede_all)


def test_what_is_kept_apart_is_not_kept_through_a_link(tmp_path: Path, victim: Path) -> None:
    run = tmp_path / "run"
    (run / "best").mkdir(parents=True)
    folder = run / "best" / "loss"
    folder.symlink_to(victim / "checkpoints")
    refused(victim, lambda: save_apart(folder, EMPTY, top=run))
    refused(victim, lambda: retire_others(folder, (), top=run))
    refused(victim, lambda: place_apart(folder / "step-00000001", lambda _: 0, top=run))


def test_links_among_a_runs_files_are_not_followed(evil: Path, victim: Path) -> None:
    """One beside a file that is written, one that comes while the run trains; and as the run is removed."""
    before = content(victim)
    (evil / "logs" / ".table.csv.tmp").symlink_to(victim / "run.json")
    train(evil, 2)
    run = Tiny(evil, max_epoch=3)
    run.train(
        inside=lambda loop, step: replaced(trail_path(evil, 3), victim / "run.json") if step == 10 else None
    )
    replaced(evil / "checkpoints", victim / "checkpoints")
    replaced(evil / "best" / "loss", victim / "best" / "loss")
    (evil / "mine").symlink_to(victim)
    remove(evil, RunDir.open(evil, create=False).id)
    assert content(victim) == before and not evil.exists()
