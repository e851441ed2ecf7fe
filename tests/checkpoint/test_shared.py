"""Content that checkpoints share: written once, in two copies, kept as long as something refers to it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_samples import (
    FROZEN,
    act_best,
    arrays_of,
    at,
    commit,
    damage,
    frozen_of,
    host,
    same,
    seed_of,
    shared_files,
    store_in,
)
from test_parts import rewrite

from everstep import hazard
from everstep.checkpoint import (
    Commit,
    Retention,
    Store,
    find_checkpoint,
    read_checkpoint,
    read_own_tree,
    shared,
    verify_checkpoint,
)
from everstep.checkpoint.manifest import ARRAYS, MANIFEST
from everstep.errors import CheckpointError, DamagedCheckpointError
from everstep.state import Encoded, encode

BASE = "user/base/weight"


@pytest.fixture
def three(tmp_path: Path) -> Store:
    """Checkpoints of steps 10, 20 and 30; the last two share the weights that do not change."""
    store = store_in(tmp_path / "run")
    for step in (10, 20, 30):
        commit(store, at(step))
    return store


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share also what is small."""
    monkeypatch.setattr(shared, "LEAST_FILE", 1)


def body_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["body"]
    return body


def bytes_in(folder: Path) -> int:
    """Bytes on the disk: of files with several names once."""
    found = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sum(found.values())


def put(store: Store, step: int, **values: Any) -> None:
    arrays = {name: host(value) for name, value in values.items()}
    store.commit(Commit(at(step), Encoded(None, arrays), str(step)))
    assert same(store.read(at(step)).arrays, arrays)


def refers_to(store: Store, step: int) -> set[str]:
    return {name for name, record in body_of(store.path(at(step)))["files"].items() if "copy" in record}


# ------------------------------------------------------------------------------------------ writing


def test_what_has_not_changed_is_written_three_times_and_then_never(tmp_path: Path) -> None:
    store, base = store_in(tmp_path), FROZEN * 8
    written, before = [], 0
    for step in range(10, 100, 10):
        commit(store, at(step))
        assert seed_of(store.read(at(step))) == step
        written.append(bytes_in(tmp_path) - before)
        before = bytes_in(tmp_path)
    assert all(base < each < base + 4000 for each in written[:3])  # as much as if nothing were shared
    assert all(each < 4000 for each in written[3:])
    assert len(shared_files(store, 90)) == 2


def test_others_read_it_with_safetensors_and_json_alone(three: Store) -> None:
    folder = three.path(at(30))
    body = body_of(folder)
    (piece,) = body["arrays"][BASE]["pieces"]
    assert piece["offset"] == [0] and piece["shape"] == [FROZEN]
    for file in (piece["file"], body["files"][piece["file"]]["copy"]):
        found = safetensors.numpy.load_file(folder / file)[piece["key"]]
        np.testing.assert_array_equal(found, frozen_of(30), strict=True)
    assert BASE not in safetensors.numpy.load_file(folder / ARRAYS)


def test_little_content_is_not_shared(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for step in range(5):
        put(store, step, **{f"w{i}": np.arange(511.0) + i for i in range(100)}, few=np.arange(8191.0))
    assert not refers_to(store, 4)


def test_small_arrays_are_shared_together(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for step in range(5):
        put(store, step, **{f"w{i}": np.arange(1000.0) + i for i in range(10)})
    assert len(shared_files(store, 4)) == 2


def test_what_moves_within_the_state_is_found_by_its_content(tmp_path: Path) -> None:
    store, queue = store_in(tmp_path), [np.full(10_000, i) for i in range(20)]
    for step in range(15):
        put(store, step, **{f"chunk{i}": each for i, each in enumerate(queue[step : step + 5])})
    assert (store.path(at(14)) / ARRAYS).stat().st_size < 90_000  # one chunk of five is new


def test_a_shared_file_of_which_less_than_half_is_used_is_written_anew(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    parts = {f"w{i}": np.arange(10_000) + i for i in range(8)}
    for step in range(3):
        put(store, step, **parts)
    (old,) = refers_to(store, 2)
    for i in range(3):
        parts[f"w{i}"] = parts[f"w{i}"] + 100
    put(store, 3, **parts)
    assert refers_to(store, 3) == {old}
    for i in (3, 4):
        parts[f"w{i}"] = parts[f"w{i}"] + 100
    put(store, 4, **parts)
    assert old not in refers_to(store, 4)
    put(store, 5, **parts)
    assert old not in refers_to(store, 5)
    store.retain(Retention(keep_last=2))
    assert bytes_in(tmp_path) < 3 * sum(part.nbytes for part in parts.values()) + 20_000


def test_a_later_start_shares_with_the_checkpoints_before(three: Store) -> None:
    later = store_in(three.run_dir, segment=2)
    commit(later, at(40))
    assert refers_to(later, 40) == refers_to(three, 30)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_copy_that_is_lost_is_made_again_at_the_next_save(three: Store, lost: int) -> None:
    raw = shared_files(three)[lost].read_bytes()
    shared_files(three)[lost].unlink()
    commit(three, at(40))
    assert shared_files(three, 40)[lost].read_bytes() == raw and refers_to(three, 40) == refers_to(three, 30)


@pytest.mark.parametrize("steps", [(10, 20), (10, 20, 30)])
def test_content_of_which_no_copy_can_be_had_counts_as_new(tmp_path: Path, steps: tuple[int, ...]) -> None:
    """It is damaged before its second copy is made; or both copies are lost."""
    store = store_in(tmp_path)
    for step in steps:
        commit(store, at(step))
    for path in shared_files(store, steps[-1]):
        damage(path) if len(steps) == 2 else path.unlink()
    commit(store, at(40))
    assert seed_of(store.read(at(40))) == 40 and not refers_to(store, 40)


@pytest.mark.parametrize("spec", ["EXDEV:checkpoint.link:1", "EMLINK:checkpoint.link:2"])
def test_where_there_are_no_links_all_is_written(three: Store, spec: str) -> None:
    hazard.arm(spec)
    commit(three, at(40))
    folder = best_of(three, 41)
    hazard.arm(None)
    assert seed_of(three.read(at(40))) == 40 and not refers_to(three, 40)
    assert sorted(path.name for path in folder.iterdir()) == [ARRAYS, MANIFEST]


def test_a_checkpoint_that_was_set_aside_is_no_source(three: Store) -> None:
    three.supersede_after(at(10))
    for step in (40, 50):
        commit(three, at(step))
        assert seed_of(three.read(at(step))) == step
    assert len(refers_to(three, 50)) == 1
    found = read_checkpoint(three.run_dir / "superseded" / f"{at(30)}.segment-1")
    assert same(found.arrays, arrays_of(30))


def flip(path: Path) -> None:
    """Change a byte in place, under each name of the file, while somebody may read it."""
    with path.open("r+b", buffering=0) as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")


# ------------------------------------------------------------------------------------------ damage


def test_every_damage_of_one_copy_is_found_and_healed(tmp_path: Path, small: None) -> None:
    store = store_in(tmp_path)
    arrays = {"w": host(np.arange(512.0))}
    for step in (1, 2, 3):
        store.commit(Commit(at(step), Encoded(step, arrays), "d"))
    first, copy = shared_files(store, 3)
    raw = first.read_bytes()
    assert len(raw) < 4300
    for index in range(0, len(raw), 11):
        flipped = raw[:index] + bytes([raw[index] ^ 4]) + raw[index + 1 :]
        for wrong in (raw[:index], flipped, raw[:index] + bytes(len(raw) - index)):
            first.write_bytes(wrong)
            found = read_checkpoint(store.path(at(3)))
            assert same(found.arrays, arrays)
            assert [flaw.path for flaw in found.flaws] == ([first] if wrong != raw else [])
    found, notes = store.find(True)
    assert found is not None and same(found.arrays, arrays)
    assert str(first) in notes[0] and f"it was made again from {copy.name}" in notes[0]
    assert first.read_bytes() == raw and store.find(True)[1] == []


def test_a_damaged_second_copy_is_found_at_the_next_start_and_by_verify(three: Store) -> None:
    first, copy = shared_files(three)
    damage(copy)
    assert [flaw.path for flaw in verify_checkpoint(three.path(at(30)))] == [copy]
    assert seed_of(three.read(at(30))) == 30
    (said,) = three.check_shared()
    assert str(copy) in said and "made again" in said
    assert copy.read_bytes() == first.read_bytes() and three.check_shared() == []


@pytest.mark.parametrize("harm", [damage, Path.unlink, lambda path: (path.unlink(), path.mkdir())])
def test_where_both_copies_are_damaged_the_checkpoint_before_is_used(three: Store, harm: Any) -> None:
    first, copy = shared_files(three)
    for path in (first, copy):
        harm(path)
    found, notes = three.find(True)
    # a flip in place damages the file under each of its names, of which step 20 has only one copy
    assert (
        found is not None and found.name in (at(10), at(20)) and f"{at(30)} is damaged: {first}" in notes[0]
    )
    with pytest.raises(DamagedCheckpointError, match=r"copy\.safetensors"):
        verify_checkpoint(three.path(at(30)))


def test_a_reader_of_a_run_in_use_changes_nothing(three: Store) -> None:
    first, copy = shared_files(three)
    damage(first)
    said: list[str] = []
    for path in (three.run_dir, three.path(at(30))):
        assert seed_of(find_checkpoint(path, said.append)) == 30
    assert len(said) == 2 and all(str(first) in line for line in said)
    assert first.read_bytes() != copy.read_bytes()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "a\0b", "half\ud800"])
@pytest.mark.parametrize("as_copy", [False, True])
def test_a_forged_name_of_a_file_is_refused(three: Store, name: str, as_copy: bool) -> None:
    forged = {"bytes": 9, "xxh3_128": "3" * 32}
    files = {"x": {**forged, "copy": name}} if as_copy else {name: forged}
    rewrite(three.path(at(30)), lambda body: body["files"].update(files))
    with pytest.raises(DamagedCheckpointError, match="does not have the content of format"):
        three.read(at(30))


# ------------------------------------------------------------------------------------------ copies


def test_a_copy_in_another_run_is_complete_in_itself(three: Store, tmp_path: Path) -> None:
    there, _ = three.find(three.path(at(30)))
    assert there is not None
    (tmp_path / "other").mkdir()
    other = Store(tmp_path / "other", run="other")
    other.adopt(replace(there, meta={}))
    shutil.rmtree(three.run_dir)
    assert seed_of(other.read(at(30))) == 30 and not refers_to(other, 30)
    for step in (40, 50):
        commit(other, at(step))
    assert len(refers_to(other, 50)) == 1


def test_a_copy_out_of_the_run_is_complete_in_itself(three: Store, tmp_path: Path) -> None:
    damage(shared_files(three)[0])
    commit(three, at(31), own=own_of(0, 31))
    copies = [three.copy(at(step), tmp_path / "new" / "folder") for step in (30, 31)]
    with pytest.raises(CheckpointError, match="exists already: choose another folder"):
        three.copy(at(30), tmp_path / "new" / "folder")
    expected = [read_checkpoint(three.path(at(step))).arrays for step in (30, 31)]
    shutil.rmtree(three.run_dir)
    for path, arrays in zip(copies, expected, strict=True):
        assert same(read_checkpoint(path).arrays, arrays) and verify_checkpoint(path) == []
    assert not list((tmp_path / "new").rglob(".tmp-*"))


def test_what_is_damaged_is_not_copied(three: Store, tmp_path: Path) -> None:
    for path in shared_files(three):
        damage(path)
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        three.copy(at(30), tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_a_folder_is_complete_in_itself(three: Store, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(three.path(at(30)), tmp_path / "a" / str(at(30))))
    three.retain(Retention(keep_last=1))
    shutil.rmtree(three.run_dir)
    assert seed_of(read_checkpoint(alone)) == 30 and verify_checkpoint(alone) == []


def test_a_run_directory_can_be_moved_and_reached_through_links(three: Store, tmp_path: Path) -> None:
    three.run_dir.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    (tmp_path / "one").symlink_to(tmp_path / "link" / "checkpoints" / str(at(30)))
    (tmp_path / "all").symlink_to(tmp_path / "link" / "checkpoints")
    for path in (tmp_path / "link", tmp_path / "one", tmp_path / "all" / str(at(30))):
        assert seed_of(find_checkpoint(path, print)) == 30


# ------------------------------------------------------------------------------------------ best weights


def best_of(store: Store, step: int) -> Path:
    act_best(store.run_dir, print, step, "valid_loss", writing=store.writing_best)
    (folder,) = store.best_folders()
    assert seed_of(read_checkpoint(folder)) == step and verify_checkpoint(folder) == []
    return folder


def test_best_weights_do_not_write_a_base_again_and_stay_complete(three: Store, tmp_path: Path) -> None:
    commit(three, at(40))
    before = bytes_in(three.run_dir)
    folder = best_of(three, 41)
    assert bytes_in(three.run_dir) - before < 4000
    alone = Path(shutil.copytree(folder, tmp_path / "elsewhere" / folder.name))
    assert three.best_weights.check() == []
    shutil.rmtree(three.folder)
    for path in (folder, alone):
        assert seed_of(read_checkpoint(path)) == 41 and verify_checkpoint(path) == []


def test_a_flip_in_a_file_with_several_names_takes_nothing(three: Store) -> None:
    folder = best_of(three, 41)
    first = shared_files(three)[0]
    raw = first.read_bytes()
    flip(first)
    assert seed_of(three.read(at(30))) == 30 and seed_of(read_checkpoint(folder)) == 41
    (said,) = three.best_weights.check()
    assert "best weights in valid_loss" in said and "made again" in said
    assert first.read_bytes() != (folder / first.name).read_bytes() == raw
    assert len(three.find(True)[1]) == 1
    assert first.read_bytes() == raw and three.best_weights.check() == []


# ------------------------------------------------------------------------------------------ own trees


def own_of(rank: int, step: int) -> Any:
    return encode({"replay": {f"rank{rank}": {"old": np.arange(FROZEN) + rank, "new": np.arange(9) + step}}})


def test_a_tree_of_a_rank_shares_too(tmp_path: Path) -> None:
    for start in (1, 2):  # of the second start, the first save knows the files of the first start
        store = store_in(tmp_path, segment=start)
        for step in range(10 * start, 10 * start + 4):
            commit(store, at(step), own=own_of(0, step))
            folder = store.path(at(step))
            found = read_checkpoint(folder)
            assert same(found.own.arrays, own_of(0, step).arrays) and found.flaws == ()
            assert same(read_own_tree(folder, 0).arrays, own_of(0, step).arrays)
    assert len(refers_to(store, 23)) == 2 and refers_to(store, 23) == refers_to(store, 13)
    assert (folder / "rank-00000.safetensors").stat().st_size < 2000


def test_pieces_of_a_later_start_are_known_by_their_content() -> None:
    """A rank finds what any rank has written of an array, whatever the names of the files."""
    piece = {"file": "a", "key": "w", "offset": [0], "shape": [1024], "xxh3_128": "1"}
    described = {
        "w": {
            "dtype": "F32",
            "shape": [2048],
            "bytes": 8192,
            "pieces": [piece, {**piece, "xxh3_128": "2", "key": "v"}],
        }
    }
    record = {"bytes": 9000, "xxh3_128": "3", "copy": "b"}
    known = shared.Known.of(
        Path("x"), "pieces-00003.safetensors", described, {"a": record, "b": {"bytes": 1}}
    )
    assert known.places == {("1", "F32", (1024,)): ("a", "w"), ("2", "F32", (1024,)): ("a", "v")}
    assert known.files == {"a": record}
