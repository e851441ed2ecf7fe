"""Which checkpoints there are and are found, which are deleted, and which never."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import at, commit, damage, seed_of, store_in

from everstep import checkpoint, hazard
from everstep.checkpoint import CheckpointName, Draft, Retention, Store, read_checkpoint, save_apart
from everstep.checkpoint.format import ARRAYS, MANIFEST
from everstep.checkpoint.retention import Facts, expendable
from everstep.errors import CheckpointError, ConfigError, DamagedCheckpointError, NoCheckpointError
from everstep.schedule import At, Every
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
    assert seed_of(store.find(tmp_path / f"superseded/{at(20)}.segment-1")[0]) == 20


def test_a_copy_out_of_the_run_is_complete_in_itself(store: Store, tmp_path: Path) -> None:
    copied = store.copy(at(20), tmp_path / "new" / "folder")
    with pytest.raises(CheckpointError, match="exists already: choose another folder"):
        store.copy(at(20), tmp_path / "new" / "folder")
    damage(store.path(at(10)) / ARRAYS)
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        store.copy(at(10), tmp_path / "new" / "folder")
    shutil.rmtree(store.folder)
    assert seed_of(read_checkpoint(copied)) == 20
    checkpoint.verify_checkpoint(copied)
    assert list((tmp_path / "new" / "folder").iterdir()) == [copied]


def test_a_run_directory_can_be_moved_and_reached_through_links(tmp_path: Path) -> None:
    commit(store_in(tmp_path / "run"), at(10))
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    (tmp_path / "one").symlink_to(tmp_path / "link" / "checkpoints" / str(at(10)))
    (tmp_path / "all").symlink_to(tmp_path / "link" / "checkpoints")
    for path in (tmp_path / "link", tmp_path / "one", tmp_path / "all" / str(at(10))):
        assert seed_of(checkpoint.find_checkpoint(path, print)) == 10


def test_nothing_exists_before_the_first_commit(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.names() == [] and store.find(True) == (None, [])
    store.clean()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ find
def test_find_the_newest_or_by_step_name_and_path(store: Store, tmp_path: Path) -> None:
    found, notes = store.find(True)
    assert found is not None and found.name == at(20, 1) and notes == []
    assert seed_of(store.find(10)[0]) == 10 and seed_of(store.find(20)[0]) == 21
    assert seed_of(store.find(str(at(20)))[0]) == 20
    shutil.copytree(store.path(at(10)), tmp_path / "my best model")
    assert seed_of(store.find(tmp_path / "my best model")[0]) == 10


def test_what_is_not_there_names_the_nearest(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=f"of step 12 .*the nearest is {at(10)}; known: "):
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
FORMS = ["{name}", "\ufeff {name} \r\na spike", "checkpoints/{name}/", "./checkpoints/{name}", "{path}/\n"]


@pytest.mark.parametrize("form", FORMS)
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


def test_a_choice_that_names_nothing_or_cannot_be_followed_is_an_error(store: Store) -> None:
    choice, damaged = store.run_dir / "checkpoint", store.path(at(10)) / ARRAYS
    choice.write_text("\n")  # an empty line chooses nothing
    assert seed_of(store.find(True)[0]) == 21
    names = ("2", "STEP-00000010", "step-10\n", "latest", "step-10.bak", "/other/step-00000010", "\0/a")
    for written in names:
        choice.write_text(written)
        with pytest.raises(NoCheckpointError, match=r"checkpoint names .*name another one in its first line"):
            store.find(True)
    commit(store, at(30))
    assert choice.read_text() == written
    choice.write_text(f"{at(10)}\n")
    damage(damaged)
    with pytest.raises(DamagedCheckpointError, match="choose another one"):
        store.find(True)
    choice.unlink()
    choice.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.find(True)


# ------------------------------------------------------------------------------------------ best
def test_a_record_apart_replaces_the_older_ones(tmp_path: Path) -> None:
    folder = tmp_path / "best" / "valid" / "loss"

    def save(step: int, digest: str = "", keep: Collection[str] = ()) -> bool:
        draft = Draft(at(step, 1), Encoded({}), digest or str(step), 1, "epoch")
        return save_apart(folder, draft, keep=keep, top=tmp_path).kept

    assert not save(1) and not save(2)
    assert [path.name for path in folder.iterdir()] == [str(at(2, 1))]
    save(3, keep={str(at(2, 1))})
    assert sorted(path.name for path in folder.iterdir()) == [str(at(2, 1)), str(at(3, 1))]
    assert save(3) and not save(3, digest="other")
    damage(folder / str(at(3, 1)) / ARRAYS)
    assert not save(3, digest="other")
    assert [path.name for path in folder.iterdir()] == [str(at(3, 1))]


def facts(*names: CheckpointName, **more: Any) -> list[Facts]:
    return [Facts(name, False, 60.0 * name.step, more, {}) for name in names]


def kept(policy: Retention, present: list[Facts], protect: Collection[CheckpointName] = ()) -> list[Any]:
    gone = expendable(policy, present, set(protect))
    return [f.name.step if f.name.epoch is None else str(f.name) for f in present if f.name not in gone]


TEN = facts(*(at(step) for step in range(0, 100, 10)))


EPOCHS = facts(*(at(10 * epoch, epoch) for epoch in range(6)))
PARTIAL = [*facts(at(10), at(20)), Facts(at(20, 1), True, 0.0, {}, {})]
LOSSES: list[Any] = [9.0, 1.0, math.nan, 1.0, math.inf, 5.0]
WATCHED = [Facts(at(n), False, 0.0, {"loss": value}, {}) for n, value in enumerate(LOSSES)]
KEPT: list[tuple[Retention, list[Facts], list[int | str]]] = [
    (Retention(), TEN, [70, 80, 90]),
    (Retention(keep_last=None), TEN, [*range(0, 100, 10)]),
    (Retention(keep_last=50), TEN, [*range(0, 100, 10)]),
    # one of each so many steps, epochs, or seconds by the time of creation
    (Retention(1, Every(steps=40)), sorted([*TEN, *facts(at(40, 2))]), [str(at(40, 2)), 80, 90]),
    (Retention(1, Every(epochs=2)), EPOCHS, [str(at(10 * n, n)) for n in (2, 4, 5)]),
    (Retention(1, Every(seconds=1500)), TEN, [0, 30, 60, 90]),
    (Retention(1, Every(seconds=1500)), facts(at(0), at(30), at(60), at(90)), [0, 30, 60, 90]),
    # neither NaN nor infinity is a best; of equal ones the first
    (Retention(1, keep_best=("loss", "min", 2)), WATCHED, [1, 3, 5]),
    (Retention(1, keep_best=("loss", "max", 2)), WATCHED, [0, 4, 5]),
    # the partner of a partial one stays with it
    (Retention(1), PARTIAL, [20, str(at(20, 1))]),
    (Retention(1), [*PARTIAL, *facts(at(30))], [30]),
]


def test_what_each_policy_keeps() -> None:
    for number, (policy, present, expected) in enumerate(KEPT):
        assert kept(policy, present) == expected, number


def test_an_interim_one_counts_for_no_rule_and_stays_while_it_is_the_newest() -> None:
    present = [one._replace(metrics={"loss": -one.name.step}) for one in facts(at(3), at(6), at(8), at(9, 3))]
    present[2] = present[2]._replace(interim=True)
    end = str(at(9, 3))
    assert kept(Retention(2), present) == [6, end] and kept(Retention(None), present) == [3, 6, end]
    assert kept(Retention(1, Every(steps=4)), present) == [end]
    assert kept(Retention(1, keep_best=("loss", "min", 2)), present) == [6, end]
    assert kept(Retention(1), present[:3]) == [6, 8] and kept(Retention(1), present, {at(8)}) == [8, end]
    assert kept(Retention(1), [*present[:3], present[3]._replace(partial=True)]) == [8, end]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"keep_last": 0}, "keep_last=0: give an integer, 1 or more, or None"),
    ({"keep_last": True}, "keep_last=True"),
    ({"keep_last": 2.5}, "keep_last=2.5"),
    ({"keep_every": 100}, r"Every\(steps=1000\)"),
    ({"keep_every": At(3)}, r"keep_every=At\(3\)"),
    ({"keep_best": "loss"}, "as in"),
    ({"keep_best": ("loss", "least", 1)}, "'min' or 'max'"),
    ({"keep_best": ("loss", "min", 0)}, "keep_best's count=0: give"),
]


def test_wrong_policies() -> None:
    for wrong, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            Retention(**wrong)


# ------------------------------------------------------------------------------------------ on disk
@pytest.fixture
def five(tmp_path: Path, said: list[str]) -> Store:
    five = store_in(tmp_path, said=said)
    for step in (0, 10, 20, 30, 40):
        commit(five, at(step), meta={"metrics": {"loss": abs(step - 10) / 10}})
    return five


def test_what_is_deleted_is_gone_without_a_trace_and_metrics_come_from_the_manifests(five: Store) -> None:
    assert five.retain(Retention(3, keep_best=("loss", "min", 1))) == [at(0)]
    commit(five, at(20), seed=7, meta={"metrics": {"loss": -1.0}})  # judged by its new manifest
    assert five.retain(Retention(1, keep_best=("loss", "min", 1))) == [at(10), at(30)]
    assert {path.name for path in (five.run_dir / "checkpoints").iterdir()} == {str(at(20)), str(at(40))}
    assert five.retain(Retention(2)) == []


def test_pinned_and_chosen_ones_stay(five: Store) -> None:
    five.pin(at(0))
    (five.run_dir / "checkpoint").write_text(f"{at(20)}\n")
    damage(five.path(at(10)) / ARRAYS)  # manifests alone are read
    five.retain(Retention(1))
    assert five.names() == [at(0), at(20), at(40)]


def test_damaged_ones_do_not_count_and_the_newest_whole_one_stays(five: Store) -> None:
    (five.path(at(40)) / MANIFEST).write_bytes(b"")
    (five.path(at(30)) / ARRAYS).write_bytes(b"")
    damage(five.path(at(20)) / ARRAYS)  # only found by reading all of it
    assert seed_of(five.find(True)[0]) == 10 and five.retain(Retention(1)) == [at(0)]
    assert five.names() == [at(10), at(20), at(30), at(40)]


def test_a_disk_that_cannot_delete_is_said(five: Store, said: list[str]) -> None:
    hazard.arm("EACCES:checkpoint.rename:2")
    deleted = five.retain(Retention(1))
    hazard.arm(None)
    assert deleted == [at(0)] and "could not be deleted (Permission denied" in said[0]
    assert seed_of(five.read(at(10))) == 10


# ------------------------------------------------------------------------------------------ pins
def test_pins_and_unreadable_ones_delete_nothing(five: Store, said: list[str]) -> None:
    assert five.pins() == set()
    five.pin(at(10))
    five.pin(at(20))
    five.unpin(at(10))
    assert store_in(five.run_dir).pins() == {at(20)}
    with pytest.raises(NoCheckpointError, match=r"is not pinned: .*known: step-00000020"):
        five.unpin(at(0))
    with pytest.raises(NoCheckpointError, match="did you mean"):
        five.pin(at(11))
    for content in ("", "{", '["latest"]', "7", "[7]", "\0"):
        (five.run_dir / "pins.json").write_text(content)
        with pytest.raises(CheckpointError, match="correct or delete it"):
            five.pins()
        assert five.retain(Retention(1)) == [] and "no old checkpoint is deleted" in said.pop()
