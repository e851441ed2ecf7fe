"""Nothing below a run directory is deleted, moved or overwritten through a link."""

from __future__ import annotations

import os
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
from everstep.record import RunDir, remove
from everstep.record.trail import trail_path
from everstep.services import CSV, Export
from everstep.state import Encoded
from tiny_runs import Tiny

FOLDERS = (
    *("checkpoints", "best", "damaged", "superseded", "exports", "evaluations", "journal", "logs"),
    "failures",
)
FILES = ("lock", "checkpoint", "pins.json", "labels.json", "run.json")


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


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, and every name."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def everstep_says(*command: str) -> None:
    commands.main(list(command), standalone_mode=False)


def replaced(place: Path, target: Path) -> None:
    """Put a link in the place of something that a run has."""
    place.parent.mkdir(exist_ok=True)
    if os.path.lexists(place):
        place.rename(place.with_name(f"{place.name}.away"))
    place.symlink_to(target)


@pytest.mark.campaign("long")
def test_prune_does_not_delete_in_another_run(tmp_path: Path, victim: Path) -> None:
    evil = train(tmp_path / "evil", 1).run_dir
    replaced(evil / "checkpoints", victim / "checkpoints")
    before = content(victim)
    for more in ((), ("--delete",)):
        with pytest.raises(RunDirError, match=r"checkpoints.*a link|a link.*checkpoints"):
            everstep_says("checkpoints", str(evil), "prune", "--keep-last", "1", *more)
    assert content(victim) == before


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_a_training_refuses_a_link_in_its_directory(tmp_path: Path, victim: Path, name: str) -> None:
    evil = train(tmp_path / "evil", 1).run_dir
    (victim / name).mkdir(exist_ok=True) if name in FOLDERS else (victim / name).touch()
    replaced(evil / name, victim / name)
    before = content(victim)
    with pytest.raises(RunDirError, match="it is a link"):
        train(evil, 3)
    assert content(victim) == before


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("place", ["best/loss", "exports/export", "logs/run.log", "logs/table.csv"])
def test_a_training_leaves_alone_what_a_deeper_link_leads_to(
    tmp_path: Path, victim: Path, place: str
) -> None:
    evil = train(tmp_path / "evil", 1).run_dir
    replaced(evil / place, victim / "checkpoints" if (evil / place).is_dir() else victim / "run.json")
    before = content(victim)
    said: list[str] = []
    try:
        said = train(evil, 3).lines
    except (RunDirError, CheckpointError) as error:
        said = [str(error)]
    assert content(victim) == before
    assert any("it is a link" in line for line in said), said


def test_a_checkpoint_that_is_a_link_is_not_followed(tmp_path: Path, victim: Path) -> None:
    evil = train(tmp_path / "evil", 1).run_dir
    oldest = sorted((evil / "checkpoints").iterdir())[0]
    replaced(oldest, sorted((victim / "checkpoints").iterdir())[0])
    before, said = content(victim), list[str]()
    Store(evil, 9, said.append).retain(Retention(keep_last=1))
    assert content(victim) == before
    assert "could not be deleted" in said[0]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", ["damaged", "superseded", "checkpoints"])
def test_a_store_moves_nothing_through_a_link(tmp_path: Path, victim: Path, name: str) -> None:
    evil = train(tmp_path / "evil", 1).run_dir
    (victim / name).mkdir(exist_ok=True)
    replaced(evil / name, victim / name)
    before = content(victim)
    store = Store(evil, 9, lambda _: None)
    newest = store.names()[-1]
    if name == "damaged":
        manifest = store.path(newest) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])
        with pytest.raises(RunDirError, match="it is a link"):
            store.commit(Commit(newest, Encoded({}), "1"))
    else:
        with pytest.raises(RunDirError, match="it is a link"):
            store.supersede_all()
    assert content(victim) == before


def test_what_is_kept_apart_is_not_kept_through_a_link(tmp_path: Path, victim: Path) -> None:
    run, before = tmp_path / "run", content(victim)
    (run / "best").mkdir(parents=True)
    (run / "best" / "loss").symlink_to(victim / "checkpoints")
    folder = run / "best" / "loss"
    with pytest.raises(RunDirError, match="it is a link"):
        save_apart(folder, Commit(CheckpointName(1), Encoded({}), "1"), top=run)
    with pytest.raises(RunDirError, match="it is a link"):
        retire_others(folder, (), top=run)
    with pytest.raises(RunDirError, match="it is a link"):
        place_apart(folder / "step-00000001", lambda _: 0, top=run)
    assert content(victim) == before


def test_what_is_prepared_beside_a_file_is_not_prepared_through_a_link(tmp_path: Path, victim: Path) -> None:
    evil = train(tmp_path / "evil", 1).run_dir
    before = content(victim)
    (evil / "logs" / ".table.csv.tmp").symlink_to(victim / "run.json")
    train(evil, 2)
    assert content(victim) == before


def test_removing_a_run_leaves_alone_what_its_links_lead_to(tmp_path: Path, victim: Path) -> None:
    evil = train(tmp_path / "evil", 1).run_dir
    replaced(evil / "checkpoints", victim / "checkpoints")
    replaced(evil / "best" / "loss", victim / "best" / "loss")
    (evil / "mine").symlink_to(victim)
    before = content(victim)
    remove(evil, RunDir.open(evil, create=False).id)
    assert content(victim) == before and not evil.exists()


def test_a_link_that_comes_while_the_run_trains_is_not_followed(tmp_path: Path, victim: Path) -> None:
    before = content(victim)
    run = Tiny(tmp_path / "run", max_epoch=1)

    def inside(loop: object, step: int) -> None:
        if step == 2:
            replaced(trail_path(run.run_dir, 1), victim / "run.json")

    run.train(inside=inside)
    assert content(victim) == before
