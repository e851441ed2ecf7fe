"""Which checkpoint a start goes on from, and where the others go."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from checkpoint_samples import at, commit, damage, seed_of, store_in

from everstep.checkpoint import Retention, Store, save_apart
from everstep.checkpoint.manifest import ARRAYS
from everstep.errors import CheckpointError, ConfigError, DamagedCheckpointError, NoCheckpointError


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> Store:
    store = store_in(tmp_path, said=said)
    for name in (at(10), at(20), at(20, 1)):
        commit(store, name, seed=name.step + (name.epoch or 0))
    return store


def pointer(store: Store) -> Path:
    return store.run_dir / "checkpoint"


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


def test_nothing_exists_before_the_first_commit(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.names() == [] and store.find(True) == (None, [])
    store.clean()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ find


def test_the_newest_is_found_and_after_epoch_is_newer(store: Store) -> None:
    found, notes = store.find(True)
    assert found is not None and found.name == at(20, 1) and notes == []
    assert store.names() == [at(10), at(20), at(20, 1)]


def test_find_by_step_name_and_path(store: Store, tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match="which=False"):
        store.find(False)


# ------------------------------------------------------------------------------------------ the pointer


@pytest.mark.parametrize("rest", ["", "\n", "\n0123456789abcdef\n", None])
def test_an_edit_wins_and_later_ones_cannot_come_back(store: Store, tmp_path: Path, rest: str | None) -> None:
    rest = pointer(store).read_text()[len(str(at(20, 1))) :] if rest is None else rest
    pointer(store).write_text(f"{at(10)}{rest}")
    found, notes = store.find(True)
    assert seed_of(found) == 10
    assert "was edited: resuming from step-00000010" in notes[0]

    store.supersede_after(at(10))
    assert store.names() == [at(10)]
    assert {path.name for path in (tmp_path / "superseded").iterdir()} == {
        f"{at(20)}.segment-1",
        f"{at(20, 1)}.segment-1",
    }
    assert store.find(True)[1] == []


def test_an_edit_that_names_nothing_is_an_error(store: Store) -> None:
    second = pointer(store).read_text().split("\n")[1]
    for content in (f"step-00000021\n{second}\n", "latest\n", "step-00000021"):
        pointer(store).write_text(content)
        with pytest.raises(
            NoCheckpointError, match=r"was edited to name .*known: epoch-0001-step-00000020, step-"
        ):
            store.find(True)


@pytest.mark.parametrize(
    "written", ["2", "STEP-00000010", "step-1", "step-10", "epoch-1", "step-00000010.bak"]
)
def test_what_a_person_wrote_without_a_line_end_is_no_torn_file(store: Store, written: str) -> None:
    pointer(store).write_text(written)
    with pytest.raises(NoCheckpointError, match=rf"was edited to name '{re.escape(written)}', which"):
        store.find(True)
    commit(store, at(30))
    assert pointer(store).read_text() == written


@pytest.mark.parametrize(
    "form", ["{name}/", "checkpoints/{name}", "./checkpoints/{name}/\n", "{path}", "{path}/\n"]
)
def test_an_edit_may_be_the_path_of_the_folder(store: Store, form: str) -> None:
    pointer(store).write_text(form.format(name=at(10), path=store.path(at(10))))
    assert seed_of(store.find(True)[0]) == 10
    store.retain(Retention(keep_last=1))
    assert store.names() == [at(10), at(20, 1)]


def test_an_edit_to_a_checkpoint_of_another_run_is_an_error(store: Store, tmp_path: Path) -> None:
    pointer(store).write_text(str(tmp_path / "other" / "checkpoints" / str(at(10))))
    with pytest.raises(NoCheckpointError, match=r"was edited to name '/.*other/checkpoints/step-00000010'"):
        store.find(True)


def test_an_edit_that_names_a_damaged_one_is_an_error(store: Store) -> None:
    pointer(store).write_text(f"{at(10)}\n")
    damage(store.path(at(10)) / ARRAYS)
    with pytest.raises(DamagedCheckpointError, match="choose another one"):
        store.find(True)


@pytest.mark.parametrize(
    "torn", ["", "\n", "epo", "epoch-0001-step-", "step-0", "\0" * 40, "\0" * 40 + "\n", f"{at(10)}\0\0"]
)
def test_a_torn_file_is_rebuilt(store: Store, torn: str) -> None:
    whole = pointer(store).read_bytes()
    pointer(store).write_text(torn)
    found, notes = store.find(True)
    assert seed_of(found) == 21
    assert "was damaged" in notes[0]
    assert pointer(store).read_bytes() == whole


def test_a_missing_pointer_is_no_matter(store: Store) -> None:
    pointer(store).unlink()
    assert seed_of(store.find(True)[0]) == 21
    store.supersede_after(at(20, 1))
    assert store.find(True)[1] == [] and pointer(store).exists()


def test_an_edit_during_the_run_is_left_to_the_next_start(store: Store, said: list[str]) -> None:
    pointer(store).write_text(f"{at(10)}\n")
    commit(store, at(30))
    commit(store, at(40))
    assert len(said) == 1 and f"the next start resumes from {at(10)}" in said[0]
    assert seed_of(store.find(True)[0]) == 10


def test_the_last_saved_one_is_gone(store: Store) -> None:
    shutil.rmtree(store.path(at(20, 1)))
    found, notes = store.find(True)
    assert seed_of(found) == 20
    assert notes == [f"checkpoint {at(20, 1)}, the last that was saved, is gone; resuming from {at(20)}"]


def test_all_gone_is_never_a_silent_fresh_start(store: Store) -> None:
    shutil.rmtree(store.run_dir / "checkpoints")
    with pytest.raises(CheckpointError, match=f"names '{at(20, 1)}', but there is no checkpoint .*delete"):
        store.find(True)
    pointer(store).unlink()
    assert store.find(True)[0] is None


def test_superseding_after_what_is_not_there(store: Store) -> None:
    with pytest.raises(NoCheckpointError):
        store.supersede_after(at(11))
    assert len(store.names()) == 3


# ------------------------------------------------------------------------------------------ best


def test_a_record_apart_replaces_the_older_ones(tmp_path: Path) -> None:
    folder = tmp_path / "best" / "valid" / "loss"

    def save(step: int, **more: object) -> bool:
        facts = {"digest": str(step), "epoch": 1, "phase": "epoch", "top": tmp_path, **more}
        return save_apart(folder, at(step, 1), {}, {}, **facts).kept  # type: ignore[arg-type]

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
