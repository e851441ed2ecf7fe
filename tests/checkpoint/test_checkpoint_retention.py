"""Which checkpoints are deleted, and which never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import at, commit, damage, seed_of, store_in

from everstep import hazard
from everstep.checkpoint import CheckpointName, Retention, Store
from everstep.checkpoint.format import ARRAYS, MANIFEST
from everstep.checkpoint.retention import Facts, expendable
from everstep.errors import CheckpointError, ConfigError, NoCheckpointError
from everstep.schedule import At, Every


def facts(*names: CheckpointName, **more: Any) -> list[Facts]:
    return [Facts(name, False, 60.0 * name.step, more, {}) for name in names]


def kept(
    policy: Retention, present: list[Facts], protect: set[CheckpointName] = frozenset()
) -> list[int | str]:  # type: ignore[assignment]
    gone = expendable(policy, present, protect)
    return [f.name.step if f.name.epoch is None else str(f.name) for f in present if f.name not in gone]


TEN = facts(*(at(step) for step in range(0, 100, 10)))


def test_the_default_keeps_three_and_none_keeps_all() -> None:
    assert kept(Retention(), TEN) == [70, 80, 90]
    assert len(kept(Retention(keep_last=None), TEN)) == 10
    assert kept(Retention(keep_last=50), TEN) == [f.name.step for f in TEN]


def test_every_n_steps_keeps_one_of_each() -> None:
    both = sorted([*TEN, *facts(at(40, 2))])
    assert kept(Retention(1, Every(steps=40)), both) == [str(at(40, 2)), 80, 90]


def test_every_n_epochs() -> None:
    present = facts(*(at(10 * epoch, epoch) for epoch in range(6)))
    assert kept(Retention(1, Every(epochs=2)), present) == [str(at(10 * n, n)) for n in (2, 4, 5)]


def test_every_n_seconds_by_the_time_of_creation() -> None:
    policy = Retention(1, Every(seconds=1500))
    assert kept(policy, TEN) == [0, 30, 60, 90]
    again = [f for f in TEN if f.name.step in (0, 30, 60, 90)]
    assert kept(policy, again) == [0, 30, 60, 90]


@pytest.mark.parametrize(("mode", "best"), [("min", [1, 3, 5]), ("max", [0, 4, 5])])
def test_the_best(mode: str, best: list[int]) -> None:
    values: list[Any] = [9.0, 1.0, None, 1.0, float("inf"), 5.0]
    present = [Facts(at(n), False, 0.0, {} if v is None else {"loss": v}, {}) for n, v in enumerate(values)]
    present[2] = Facts(at(2), False, 0.0, {"loss": float("nan")}, {})
    assert kept(Retention(1, keep_best=("loss", mode, 2)), present) == best


def test_the_partner_of_a_partial_one_stays_with_it() -> None:
    present = [*facts(at(10), at(20)), Facts(at(20, 1), True, 0.0, {}, {})]
    assert kept(Retention(1), present) == [20, str(at(20, 1))]
    assert kept(Retention(1), [*present, *facts(at(30))]) == [30]


def test_an_interim_one_counts_for_no_rule_and_stays_while_it_is_the_newest() -> None:
    present = [one._replace(metrics={"loss": -one.name.step}) for one in facts(at(3), at(6), at(8), at(9, 3))]
    present[2] = present[2]._replace(interim=True)
    end = str(at(9, 3))
    assert kept(Retention(2), present) == [6, end]
    assert kept(Retention(None), present) == [3, 6, end]
    assert kept(Retention(1, Every(steps=4)), present) == [end]
    assert kept(Retention(1, keep_best=("loss", "min", 2)), present) == [6, end]
    assert kept(Retention(1), present[:3]) == [6, 8]
    assert kept(Retention(1), present, {at(8)}) == [8, end]
    assert kept(Retention(1), [*present[:3], present[3]._replace(partial=True)]) == [8, end]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep_last": 0}, "keep_last=0: give an integer, 1 or more, or None"),
        ({"keep_last": True}, "keep_last=True"),
        ({"keep_last": 2.5}, "keep_last=2.5"),
        ({"keep_every": 100}, "Every\\(steps=1000\\)"),
        ({"keep_every": At(3)}, "keep_every=At\\(3\\)"),
        ({"keep_best": "loss"}, "as in"),
        ({"keep_best": ("loss", "least", 1)}, "'min' or 'max'"),
        ({"keep_best": ("loss", "min", 0)}, "keep_best's count=0: give"),
    ],
)
def test_wrong_policies(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Retention(**wrong)


# ------------------------------------------------------------------------------------------ on disk


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> Store:
    store = store_in(tmp_path, said=said)
    for step in (0, 10, 20, 30, 40):
        commit(store, at(step), meta={"metrics": {"loss": abs(step - 10) / 10}})
    return store


def test_what_is_deleted_is_gone_without_a_trace(store: Store) -> None:
    assert store.retain(Retention(2)) == [at(0), at(10), at(20)]
    assert {path.name for path in (store.run_dir / "checkpoints").iterdir()} == {str(at(30)), str(at(40))}
    assert store.retain(Retention(2)) == []


def test_metrics_come_from_the_manifests(store: Store) -> None:
    store.retain(Retention(1, keep_best=("loss", "min", 1)))
    assert store.names() == [at(10), at(40)]


def test_pinned_and_chosen_ones_stay(store: Store) -> None:
    store.pin(at(0))
    (store.run_dir / "checkpoint").write_text(f"{at(20)}\n")
    damage(store.path(at(10)) / ARRAYS)  # manifests alone are read
    store.retain(Retention(1))
    assert store.names() == [at(0), at(20), at(40)]


def test_damaged_ones_do_not_count_and_the_newest_whole_one_stays(store: Store) -> None:
    (store.path(at(40)) / MANIFEST).write_bytes(b"")
    (store.path(at(30)) / ARRAYS).write_bytes(b"")
    damage(store.path(at(20)) / ARRAYS)  # only found by reading all of it
    assert seed_of(store.find(True)[0]) == 10
    assert store.retain(Retention(1)) == [at(0)]
    assert store.names() == [at(10), at(20), at(30), at(40)]


def test_a_replaced_checkpoint_is_judged_by_its_new_manifest(store: Store) -> None:
    store.retain(Retention(5))
    commit(store, at(20), seed=7, meta={"metrics": {"loss": -1.0}})
    store.retain(Retention(1, keep_best=("loss", "min", 1)))
    assert store.names() == [at(20), at(40)]


def test_a_disk_that_cannot_delete_is_said(store: Store, said: list[str]) -> None:
    hazard.arm("EACCES:checkpoint.rename:2")
    deleted = store.retain(Retention(1))
    hazard.arm(None)
    assert deleted == [at(0)] and "could not be deleted (Permission denied" in said[0]
    assert seed_of(store.read(at(10))) == 10


# ------------------------------------------------------------------------------------------ pins


def test_pins(store: Store) -> None:
    assert store.pins() == set()
    store.pin(at(10))
    store.pin(at(20))
    store.unpin(at(10))
    assert store_in(store.run_dir).pins() == {at(20)}
    with pytest.raises(NoCheckpointError, match=r"is not pinned: .*known: step-00000020"):
        store.unpin(at(0))
    with pytest.raises(NoCheckpointError, match="did you mean"):
        store.pin(at(11))


@pytest.mark.parametrize("content", ["", "{", '["latest"]', "7", "[7]", "\0"])
def test_unreadable_pins_delete_nothing(store: Store, said: list[str], content: str) -> None:
    (store.run_dir / "pins.json").write_text(content)
    with pytest.raises(CheckpointError, match="correct or delete it"):
        store.pins()
    assert store.retain(Retention(1)) == []
    assert "no old checkpoint is deleted" in said[0]
