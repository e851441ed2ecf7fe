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
    content,
    find_checkpoint,
    read_checkpoint,
    read_own_tree,
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
    monkeypatch.setattr(content, "LEAST_FILE", 1)


def body_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["body"]
    return body


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def put(store: Store, step: int, **values: Any) -> None:
    arrays = {name: host(value) for name, value in values.items()}
    store.commit(Commit(at(step), Encoded(None, arrays), str(step)))
    assert same(store.read(at(step)).arrays, arrays)


def refers_to(store: Store, step: int) -> set[str]:
    return {name for name, record in body_of(store.path(at(step)))["files"].items() if "shared" in record}


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
    assert len(shared_files(tmp_path)) == 2


def test_others_read_it_with_safetensors_and_json_alone(three: Store) -> None:
    folder = three.path(at(30))
    body = body_of(folder)
    (piece,) = body["arrays"][BASE]["pieces"]
    place = folder / body["files"][piece["file"]]["shared"] / piece["file"]
    assert piece["offset"] == [0] and piece["shape"] == [FROZEN]
    for path in (place, place.with_name(place.name.replace(".safetensors", ".copy.safetensors"))):
        found = safetensors.numpy.load_file(path)[piece["key"]]
        np.testing.assert_array_equal(found, frozen_of(30), strict=True)
    assert BASE not in safetensors.numpy.load_file(folder / ARRAYS)


def test_little_content_is_not_shared(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for step in range(5):
        put(store, step, **{f"w{i}": np.arange(511.0) + i for i in range(100)}, few=np.arange(8191.0))
    assert not (tmp_path / "shared").exists()


def test_small_arrays_are_shared_together(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for step in range(5):
        put(store, step, **{f"w{i}": np.arange(1000.0) + i for i in range(10)})
    assert len(shared_files(tmp_path)) == 2


def test_what_moves_within_the_state_is_found_by_its_content(tmp_path: Path) -> None:
    store, queue = store_in(tmp_path), [np.full(10_000, i) for i in range(20)]
    for step in range(15):
        put(store, step, **{f"chunk{i}": each for i, each in enumerate(queue[step : step + 5])})
    assert bytes_in(tmp_path / "checkpoints" / str(at(14))) < 90_000  # one chunk of five is new


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
    assert not (tmp_path / "shared" / old).exists()
    most = sum(part.nbytes for part in parts.values())
    assert bytes_in(tmp_path / "shared") < 2 * most + 10_000


def test_a_later_start_shares_with_the_checkpoints_before(three: Store) -> None:
    later = store_in(three.run_dir, segment=2)
    commit(later, at(40))
    assert refers_to(later, 40) == refers_to(three, 30)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_copy_that_is_lost_is_made_again_at_the_next_save(three: Store, lost: int) -> None:
    whole = shared_files(three.run_dir)
    raw = whole[lost].read_bytes()
    whole[lost].unlink()
    commit(three, at(40))
    assert shared_files(three.run_dir) == whole and whole[lost].read_bytes() == raw
    assert refers_to(three, 40) == refers_to(three, 30)


def test_content_whose_copies_are_all_lost_counts_as_new(three: Store) -> None:
    shutil.rmtree(three.run_dir / "shared")
    commit(three, at(40))
    assert seed_of(three.read(at(40))) == 40 and not refers_to(three, 40)


def test_a_damaged_file_gets_no_second_copy_and_its_content_counts_as_new(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for step in (10, 20):
        commit(store, at(step))
    damage(shared_files(tmp_path)[0])
    commit(store, at(30))
    assert seed_of(store.read(at(30))) == 30 and len(shared_files(tmp_path)) == 1


def flip(path: Path) -> None:
    """Change a byte in place, under each name of the file, while somebody may read it."""
    with path.open("r+b", buffering=0) as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")


def test_failing_saves_do_not_fill_the_disk_with_shared_files(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    commit(store, at(10))
    for _ in range(4):
        hazard.arm("ENOSPC:checkpoint.rename:1")
        with pytest.raises(OSError, match="No space left"):
            commit(store, at(20))
        hazard.arm(None)
    assert len(shared_files(tmp_path)) == 1
    commit(store, at(20))
    assert len(shared_files(tmp_path)) == 1 and seed_of(store.read(at(20))) == 20


# ------------------------------------------------------------------------------------------ damage


def test_every_damage_of_one_copy_is_found_and_healed(tmp_path: Path, small: None) -> None:
    store = store_in(tmp_path)
    arrays = {"w": host(np.arange(512.0))}
    for step in (1, 2, 3):
        store.commit(Commit(at(step), Encoded(step, arrays), "d"))
    copy, first = shared_files(tmp_path)
    raw = first.read_bytes()
    assert len(raw) < 4300
    for index in range(0, len(raw), 3):
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
    copy, first = shared_files(three.run_dir)
    damage(copy)
    assert [flaw.path for flaw in verify_checkpoint(three.path(at(30)))] == [copy]
    assert seed_of(three.read(at(30))) == 30
    (said,) = three.check_shared()
    assert str(copy) in said and "made again" in said
    assert copy.read_bytes() == first.read_bytes() and three.check_shared() == []


@pytest.mark.parametrize("harm", [damage, Path.unlink, lambda path: (path.unlink(), path.mkdir())])
def test_where_both_copies_are_damaged_the_checkpoint_before_is_used(three: Store, harm: Any) -> None:
    for path in shared_files(three.run_dir):
        harm(path)
    found, notes = three.find(True)
    assert seed_of(found) == 10
    for step, note in zip((20, 30), reversed(notes), strict=False):
        assert f"checkpoint {at(step)} is damaged: {shared_files_of(three, step)}" in note
    with pytest.raises(DamagedCheckpointError, match=r"copy\.safetensors"):
        verify_checkpoint(three.path(at(30)))


def shared_files_of(store: Store, step: int) -> Path:
    (name,) = refers_to(store, step)
    return store.run_dir / "shared" / name


def test_a_reader_of_a_run_in_use_changes_nothing(three: Store) -> None:
    copy, first = shared_files(three.run_dir)
    damage(first)
    said: list[str] = []
    for path in (three.run_dir, three.path(at(30))):
        assert seed_of(find_checkpoint(path, said.append)) == 30
    assert len(said) == 2 and all(str(first) in line for line in said)
    assert first.read_bytes() != copy.read_bytes()


@pytest.mark.parametrize("up", ["../../../../shared", "shared", "/shared", "../../best", 3, None])
def test_a_forged_way_to_the_shared_files_is_refused(three: Store, up: Any) -> None:
    (name,) = refers_to(three, 30)
    rewrite(three.path(at(30)), lambda body: body["files"][name].update(shared=up))
    with pytest.raises(DamagedCheckpointError, match=name):
        three.read(at(30))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "a\0b", "half\ud800"])
@pytest.mark.parametrize("record", [{}, {"shared": "../../shared"}], ids=["own", "shared"])
def test_a_forged_name_of_a_file_is_refused(three: Store, name: str, record: dict[str, str]) -> None:
    forged = {"bytes": 9, "xxh3_128": "3" * 32, **record}
    rewrite(three.path(at(30)), lambda body: body["files"].update({name: forged}))
    with pytest.raises(DamagedCheckpointError, match="does not have the content of format"):
        three.read(at(30))


def test_nothing_is_written_or_deleted_through_a_link(three: Store, tmp_path: Path) -> None:
    (three.run_dir / "shared").rename(tmp_path / "elsewhere")
    (three.run_dir / "shared").symlink_to(tmp_path / "elsewhere")
    there = sorted((tmp_path / "elsewhere").iterdir())
    with pytest.raises(OSError, match="it is a link"):
        forget(three)
    assert sorted((tmp_path / "elsewhere").iterdir()) == there


# ------------------------------------------------------------------------------------------ retention


def forget(store: Store) -> list[Path]:
    """Save a state without the shared content, and keep only that; returns the shared files that are left."""
    commit(store, at(500))
    store.retain(Retention(keep_last=1))
    return shared_files(store.run_dir)


def test_what_nothing_refers_to_is_deleted(three: Store) -> None:
    assert forget(three) == []


def test_a_pin_keeps_the_shared_files(three: Store) -> None:
    three.pin(at(20))
    assert len(forget(three)) == 2
    assert seed_of(three.read(at(20))) == 20
    three.unpin(at(20))
    assert forget(three) == []


@pytest.mark.parametrize("where", ["superseded", "damaged", "best/valid_loss"])
@pytest.mark.parametrize("harmed", [False, True])
def test_a_folder_anywhere_in_the_run_keeps_the_shared_files(three: Store, where: str, harmed: bool) -> None:
    folder = three.run_dir / where
    folder.mkdir(parents=True)
    three.path(at(20)).rename(folder / str(at(20)))
    if harmed:
        damage(folder / str(at(20)) / MANIFEST)
    three = store_in(three.run_dir, segment=2)
    assert len(forget(three)) == 2
    shutil.rmtree(folder)
    assert forget(three) == []


def test_superseded_checkpoints_stay_readable(three: Store) -> None:
    three.supersede_after(at(10))
    for step in (40, 50, 60):
        commit(three, at(step))
    three.retain(Retention(keep_last=1))
    found = read_checkpoint(three.run_dir / "superseded" / f"{at(30)}.segment-1")
    assert same(found.arrays, arrays_of(30))


def test_a_manifest_that_cannot_be_read_stops_the_deleting(
    three: Store, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(three.run_dir, segment=2, said=said)
    (store.run_dir / "superseded" / "x").mkdir(parents=True)
    os.mkfifo(store.run_dir / "superseded" / "x" / MANIFEST)
    assert len(forget(store)) == 2
    assert "could not be deleted" in said[0]


# ------------------------------------------------------------------------------------------ copies


def test_a_copy_in_another_run_is_complete_in_itself(three: Store, tmp_path: Path) -> None:
    there, _ = three.find(three.path(at(30)))
    assert there is not None
    (tmp_path / "other").mkdir()
    other = Store(tmp_path / "other", run="other")
    other.adopt(replace(there, meta={}))
    shutil.rmtree(three.run_dir)
    assert seed_of(other.read(at(30))) == 30 and not (tmp_path / "other" / "shared").exists()
    for step in (40, 50):
        commit(other, at(step))
    assert len(refers_to(other, 50)) == 1


def test_a_copy_out_of_the_run_is_complete_in_itself(three: Store, tmp_path: Path) -> None:
    damage(shared_files(three.run_dir)[1])
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
    for path in shared_files(three.run_dir):
        damage(path)
    with pytest.raises(DamagedCheckpointError, match="shared"):
        three.copy(at(30), tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_a_folder_that_was_copied_alone_says_what_is_missing(three: Store, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(three.path(at(30)), tmp_path / "a" / "b" / str(at(30))))
    with pytest.raises(CheckpointError, match=r"shared/step-.* is missing.*everstep checkpoints RUN copy"):
        read_checkpoint(alone)


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


def bytes_on_disk(folder: Path) -> int:
    """Of files with several names once."""
    found = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sum(found.values())


def test_best_weights_do_not_write_a_base_again_and_stay_complete(three: Store, tmp_path: Path) -> None:
    commit(three, at(40))
    before = bytes_on_disk(three.run_dir)
    folder = best_of(three, 41)
    assert bytes_on_disk(three.run_dir) - before < 4000
    alone = Path(shutil.copytree(folder, tmp_path / "elsewhere" / folder.name))
    assert three.best_weights.check() == []
    assert len(forget(three)) == 2, "a name in shared/ costs nothing while the best has the file"
    shutil.rmtree(three.run_dir / "shared")
    for path in (folder, alone):
        assert seed_of(read_checkpoint(path)) == 41 and verify_checkpoint(path) == []


def test_a_flip_in_a_file_with_several_names_takes_nothing(three: Store) -> None:
    folder = best_of(three, 41)
    first = shared_files(three.run_dir)[1]
    raw = first.read_bytes()
    flip(first)
    assert seed_of(three.read(at(30))) == 30 and seed_of(read_checkpoint(folder)) == 41
    (said,) = three.best_weights.check()
    assert "best weights in valid_loss" in said and "made again" in said
    assert first.read_bytes() != (folder / first.name).read_bytes() == raw
    assert len(three.find(True)[1]) == 1
    assert first.read_bytes() == raw and three.best_weights.check() == []


@pytest.mark.parametrize("spec", ["EXDEV:checkpoint.link:1", "EMLINK:checkpoint.link:2"])
def test_best_weights_are_written_whole_where_there_are_no_links(three: Store, spec: str) -> None:
    hazard.arm(spec)
    folder = best_of(three, 41)
    hazard.arm(None)
    assert sorted(path.name for path in folder.iterdir()) == [ARRAYS, MANIFEST]


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
    record = {"bytes": 9000, "xxh3_128": "3", "shared": "../../shared"}
    known = content.Known.of("pieces-00003.safetensors", described, {"a": record, "b": {"bytes": 1}})
    assert known.places == {("1", "F32", (1024,)): ("a", "w"), ("2", "F32", (1024,)): ("a", "v")}
    assert known.files == {"a": record}
