"""Truncations, flips, zeroed tails, swapped and missing files: all detected, the newest whole one is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_samples import at, commit, seed_of, store_in

from everstep.checkpoint import Store
from everstep.checkpoint.format import ARRAYS, MANIFEST
from everstep.errors import CheckpointError, DamagedCheckpointError

BOTH = pytest.mark.parametrize("file", [ARRAYS, MANIFEST])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = store_in(tmp_path)
    for step in (10, 20):
        commit(store, at(step))
    return store


def damages(raw: bytes) -> Iterator[bytes]:
    bits = random.Random(0)
    for index in range(len(raw)):
        yield raw[:index]
        yield raw[:index] + bytes([raw[index] ^ 1 << bits.randrange(8)]) + raw[index + 1 :]
        if any(raw[index:]):
            yield raw[:index] + bytes(len(raw) - index)
    yield raw + b"\0"
    yield raw + raw


@pytest.mark.campaign("long", gate=1)
@BOTH
def test_every_damage_of_every_byte_is_detected(store: Store, file: str) -> None:
    path = store.path(at(20)) / file
    raw = path.read_bytes()
    count = 0
    for wrong in damages(raw):
        path.write_bytes(wrong)
        with pytest.raises(DamagedCheckpointError, match=file):
            store.read(at(20))
        count += 1
    path.write_bytes(raw)
    assert seed_of(store.read(at(20))) == 20
    assert count > 800


@BOTH
@pytest.mark.parametrize(
    ("harm", "how"),
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: (path.unlink(), path.mkdir()), "(cannot be read|has .* bytes)"),
    ],
)
def test_how_a_file_is_damaged_is_said_and_the_previous_one_used(
    store: Store, file: str, harm, how: str
) -> None:
    harm(path := store.path(at(20)) / file)
    with pytest.raises(DamagedCheckpointError, match=f"{file} {how}"):
        store.read(at(20))
    found, notes = store.find(True)
    assert seed_of(found) == 10
    assert len(notes) == 1 and str(path) in notes[0] and "passed over" in notes[0]


@BOTH
def test_a_file_of_another_checkpoint_is_detected(store: Store, file: str) -> None:
    shutil.copy(store.path(at(10)) / file, store.path(at(20)) / file)
    with pytest.raises(DamagedCheckpointError, match=ARRAYS):
        store.read(at(20))


def test_a_checkpoint_under_another_name_is_detected(store: Store) -> None:
    shutil.copytree(store.path(at(10)), store.path(at(30)))
    with pytest.raises(DamagedCheckpointError, match="belongs to step-00000010"):
        store.read(at(30))


def test_all_damaged_is_an_error_that_lists_each(store: Store) -> None:
    (store.path(at(10)) / ARRAYS).unlink()
    (store.path(at(20)) / MANIFEST).write_bytes(b"")
    with pytest.raises(CheckpointError, match="all 2 checkpoints") as caught:
        store.find(True)
    text = str(caught.value)
    assert f"{at(10)}/{ARRAYS} is missing" in text and f"{at(20)}/{MANIFEST} is empty" in text


def test_damaged_ones_move_away_when_their_name_is_needed(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        (store.path(at(20)) / ARRAYS).write_bytes(b"")
        assert not commit(store, at(20)).kept
        assert seed_of(store.find(True)[0]) == 20
    aside = {path.name for path in (tmp_path / "damaged").glob("*") if not (path / ARRAYS).read_bytes()}
    assert aside == {f"{at(20)}.segment-1", f"{at(20)}.segment-1.2"}


def test_superseding_after_a_fallback_tells_damaged_from_superseded(store: Store, tmp_path: Path) -> None:
    commit(store, at(30))
    (store.path(at(30)) / ARRAYS).write_bytes(b"")
    store.find(True)
    store.supersede_after(at(10))
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == [f"{at(30)}.segment-1"]
    assert [path.name for path in (tmp_path / "superseded").iterdir()] == [f"{at(20)}.segment-1"]


def test_one_that_was_asked_for_has_no_replacement(store: Store) -> None:
    (store.path(at(20)) / ARRAYS).write_bytes(b"")
    for which in (20, str(at(20))):
        with pytest.raises(DamagedCheckpointError, match=f"choose another one: {at(10)}"):
            store.find(which)
