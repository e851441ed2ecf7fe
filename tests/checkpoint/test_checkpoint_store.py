"""Which checkpoint a start goes on from, and where the others go."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from checkpoint_samples import at, commit, damage, seed_of, store_in

from everstep.checkpoint import (
    Commit,
    Retention,
    Store,
    find_checkpoint,
    read_checkpoint,
    save_apart,
    verify_checkpoint,
)
from everstep.checkpoint.format import ARRAYS
from everstep.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from everstep.state import Encoded


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> Store:
    store = store_in(tmp_path, said=said)
    for name in (at(10), at(20), at(20, 1)):
        commit(store, name, seed=name.step + (name.epoch or 0))
    return store


# ------------------------------------------------------------------------------------------ commit


def test_an_equal_one_is_kept_and_another_one_superseded(store: Store, tmp_path: Path) -> None:
    before = (store.path(at(20)) / ARRAYS).stat().st_ino
    again = commit(store, at(20))
    assert again.kept and again.bytes == 0
    assert (store.path(at(20)) / ARRAYS).stat().st_ino == before

    other = commit(store, at(20), seed=7)
    assert not other.kept and other.bytes == sum(path.stat().st_size for path in other.path.iterdir())
    assert seed_of(store.read(at(20))) == 7
    old = store.find(tmp_path / f"superseded/{at(20)}.segment-1")[0]
    assert seed_of(old) == 20


def test_a_copy_out_of_the_run_is_complete_in_itself(store: Store, tmp_path: Path) -> None:
    copied = store.copy(at(20), tmp_path / "new" / "folder")
    with pytest.raises(CheckpointError, match="exists already: choose another folder"):
        store.copy(at(20), tmp_path / "new" / "folder")
    damage(store.path(at(10)) / ARRAYS)
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        store.copy(at(10), tmp_path / "new" / "folder")
    shutil.rmtree(store.folder)
    assert seed_of(read_checkpoint(copied)) == 20
    verify_checkpoint(copied)
    assert list((tmp_path / "new" / "folder").iterdir()) == [copied]


def test_a_run_directory_can_be_moved_and_reached_through_links(tmp_path: Path) -> None:
    commit(store_in(tmp_path / "run"), at(10))
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    (tmp_path / "one").symlink_to(tmp_path / "link" / "checkpoints" / str(at(10)))
    (tmp_path / "all").symlink_to(tmp_path / "link" / "checkpoints")
    for path in (tmp_path / "link", tmp_path / "one", tmp_path / "all" / str(at(10))):
        assert seed_of(find_checkpoint(path, print)) == 10


def test_nothing_exists_before_the_first_commit(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.names() == [] and store.find(True) == (None, [])
    store.clean()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ find


def test_find_the_newest_or_by_step_name_and_path(store: Store, tmp_path: Path) -> None:
    found, notes = store.find(True)
    assert found is not None and found.name == at(20, 1) and notes == []
    assert seed_of(store.find(10)[0]) == 10
    assert seed_of(store.find(20)[0]) == 21
    assert seed_of(store.find(str(at(20)))[0]) == 20
    shutil.copytree(store.path(at(10)), tmp_path / "my best model")
    assert seed_of(store.find(tmp_path / "my best model")[0]) == 10


def test_what_is_not_there_names_the_nearest(store: Store, tmp_path: Path) -> None:
    with pytest.raises(
        NoCheckpointError, match=f"no checkpoint of step 12 .*the nearest is {at(10)}; known: "
    ):
        store.find(12)
    with pytest.raises(NoCheckpointError, match=f"did you mean '{at(20)}'"):
        store.find("step-0000020")
    with pytest.raises(NoCheckpointError, match=f"did you mean '.*{at(10)}'"):
        store.find(tmp_path / "checkpoints" / "step-00000011")
    with pytest.raises(NoCheckpointError, match="there is no checkpoint at all"):
        store_in(tmp_path / "other").find(12)
    for act in (store.supersede_after, store.read):
        with pytest.raises(NoCheckpointError):
            act(at(11))
    assert store.names() == [at(10), at(20), at(20, 1)]


# ------------------------------------------------------------------------------------------ a person's choice


@pytest.mark.parametrize(
    "form",
    [
        "{name}",
        "\ufeff {name} \r\nbecause of the spike",
        "checkpoints/{name}/",
        "./checkpoints/{name}",
        "{path}/\n",
    ],
)
def test_a_persons_choice_is_followed_once(store: Store, tmp_path: Path, form: str) -> None:
    (tmp_path / "checkpoint").write_text(form.format(name=at(10), path=store.path(at(10))))
    store.retain(Retention(keep_last=1))
    assert store.names() == [at(10), at(20, 1)]
    found, notes = store.find(True)
    assert seed_of(found) == 10
    assert notes == [f"resuming from {at(10)}, as {tmp_path / 'checkpoint'} says (the newest is {at(20, 1)})"]
    store.supersede_after(at(10))
    assert store.names() == [at(10)] and not (tmp_path / "checkpoint").exists()
    assert [path.name for path in (tmp_path / "superseded").iterdir()] == [f"{at(20, 1)}.segment-1"]
    commit(store, at(30))
    assert seed_of(store.find(True)[0]) == 30


@pytest.mark.parametrize(
    "written",
    ["2", "STEP-00000010", "step-10\n", "latest", "step-10.bak", "/other/step-00000010", "\0/a"],
)
def test_a_choice_that_names_nothing_is_an_error(store: Store, written: str) -> None:
    (store.run_dir / "checkpoint").write_text(written)
    with pytest.raises(NoCheckpointError, match=r"checkpoint names .*name another one in its first line"):
        store.find(True)
    commit(store, at(30))
    assert (store.run_dir / "checkpoint").read_text() == written


def test_a_choice_that_cannot_be_followed(store: Store) -> None:
    (store.run_dir / "checkpoint").write_text(f"{at(10)}\n")
    damage(store.path(at(10)) / ARRAYS)
    with pytest.raises(DamagedCheckpointError, match="choose another one"):
        store.find(True)
    (store.run_dir / "checkpoint").unlink()
    (store.run_dir / "checkpoint").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.find(True)


def test_an_empty_file_chooses_nothing(store: Store) -> None:
    (store.run_dir / "checkpoint").write_text("\n")
    assert seed_of(store.find(True)[0]) == 21


# ------------------------------------------------------------------------------------------ best


def test_a_record_apart_replaces_the_older_ones(tmp_path: Path) -> None:
    folder = tmp_path / "best" / "valid" / "loss"

    def save(step: int, digest: str = "", keep: Collection[str] = ()) -> bool:
        commit = Commit(at(step, 1), Encoded({}), digest or str(step), 1, "epoch")
        return save_apart(folder, commit, keep=keep, top=tmp_path).kept

    assert not save(1)
    assert not save(2)
    assert [path.name for path in folder.iterdir()] == [str(at(2, 1))]
    save(3, keep={str(at(2, 1))})
    assert sorted(path.name for path in folder.iterdir()) == [str(at(2, 1)), str(at(3, 1))]
    assert save(3)
    assert not save(3, digest="other")
    damage(folder / str(at(3, 1)) / ARRAYS)
    assert not save(3, digest="other")
    assert [path.name for path in folder.iterdir()] == [str(at(3, 1))]
