"""Checkpoints of several ranks: own trees, and their damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import xxhash
from checkpoint_samples import FACTS, arrays_of, at, commit, damage, same, seed_of, store_in

from everstep.checkpoint import Checkpoint, Store, format, read_checkpoint, read_own_trees, verify_checkpoint
from everstep.checkpoint.format import ARRAYS, MANIFEST, packed
from everstep.errors import CheckpointError, DamagedCheckpointError
from everstep.state import Encoded, decode, encode


def own_of(rank: int) -> Encoded:
    return encode({"rng": {f"rank{rank}": np.arange(3) + rank}, "user": {"replay": [rank, np.ones(rank)]}})


COMMON = encode({"user": {"w": np.arange(6.0)}, "progress": {"step": 20}})


def write_ranks(folder: Path, own: list[Encoded], common: Encoded = COMMON) -> Path:
    """Write a checkpoint as several ranks do."""
    folder.mkdir(parents=True)
    record = format.write_common(folder, common)
    ranks = [format.write_own(folder, rank, tree, common) for rank, tree in enumerate(own)]
    format.write_manifest(folder, {"name": folder.name, **FACTS}, common, record, ranks)
    return folder


def tree_of(found: Checkpoint) -> Any:
    return decode(Encoded(found.structure, found.arrays))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A checkpoint of three ranks, of which the last has nothing of its own."""
    return write_ranks(tmp_path / "checkpoints" / str(at(20)), [own_of(0), own_of(1), Encoded({})])


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Change a manifest's body and give it the checksum of that."""
    body = json.loads((folder / MANIFEST).read_bytes())["body"]
    change(body)
    (folder / MANIFEST).write_bytes(packed(body))


# ------------------------------------------------------------------------------------------ own trees


def test_each_rank_reads_the_common_tree_with_its_own_over_it(three: Path) -> None:
    with safetensors.safe_open(three / "rank-00001.safetensors", "numpy") as file:
        assert file.get_tensor("rng/rank1").tolist() == [1, 2, 3]
    for rank in (0, 1):
        found = read_checkpoint(three, rank)
        tree = tree_of(found)
        assert tree["user"]["w"].tolist() == [0, 1, 2, 3, 4, 5] and tree["progress"] == {"step": 20}
        assert tree["rng"][f"rank{rank}"].tolist() == [rank, rank + 1, rank + 2] and len(tree["rng"]) == 1
        assert tree["user"]["replay"][0] == rank and tree["user"]["replay"][1].shape == (rank,)
        assert found.ranks == 3 and found.digest == "of all"


@pytest.mark.parametrize("rank", [2, 3, 99])
def test_a_rank_without_an_own_tree_reads_the_common_tree(three: Path, rank: int) -> None:
    found = read_checkpoint(three, rank)
    assert tree_of(found).keys() == {"user", "progress"} and tree_of(found)["user"].keys() == {"w"}
    assert found.ranks == 3 and found.own.structure == {}


def test_one_process_may_have_a_tree_of_its_own(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    commit(store, at(20), own=own_of(0))
    found = store.read(at(20))
    assert found.ranks == 1 and found.structure == {"seed": 20, **own_of(0).structure}  # type: ignore[dict-item]
    assert same(found.arrays, {**arrays_of(20), **own_of(0).arrays})
    assert same(found.common.arrays, arrays_of(20)) and same(found.own.arrays, own_of(0).arrays)
    commit(store, at(30))
    assert not list(store.path(at(30)).glob("rank-*"))


@pytest.mark.parametrize(
    "own",
    [encode({"user": {"w": np.zeros(2)}}), encode({"user": {"w": 3}}), encode({"progress": 1})],
)
def test_what_is_common_cannot_be_a_ranks_own(tmp_path: Path, own: Encoded) -> None:
    with pytest.raises(CheckpointError, match=r"a rank cannot save as its own .*\((user/w|progress) is in"):
        write_ranks(tmp_path / str(at(20)), [own_of(0), own])


def test_own_trees_are_read_without_the_rest(three: Path) -> None:
    damage(three / ARRAYS)
    own = read_own_trees(three)
    assert [decode(tree).get("rng", {}).keys() for tree in own] == [{"rank0"}, {"rank1"}, set()]
    damage(three / "rank-00001.safetensors")
    with pytest.raises(DamagedCheckpointError, match="rank-00001"):
        read_own_trees(three)


# ------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("file", [ARRAYS, "rank-00000.safetensors", "rank-00001.safetensors"])
def test_the_writer_finds_damage_in_every_ranks_file(three: Path, file: str) -> None:
    damage(three / file)
    with pytest.raises(DamagedCheckpointError, match=f"{file} has changed"):
        read_checkpoint(three)
    with pytest.raises(DamagedCheckpointError, match=f"{file} has changed"):
        verify_checkpoint(three)
    commit(store := store_in(three.parent.parent), at(10))
    found, notes = store.find(True)
    assert seed_of(found) == 10 and f"{file} has changed" in notes[0]
    if file == "rank-00001.safetensors":
        assert read_checkpoint(three, 2).ranks == 3  # rank 2 has no use for that file


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_missing_or_short_file_of_any_rank_damages_it_for_all(three: Path, rank: int, harm: str) -> None:
    path = three / "rank-00001.safetensors"
    path.unlink() if harm == "missing" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match="rank-00001"):
        read_checkpoint(three, rank)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("ranks", lambda body: body.update(ranks=[])),
        ("rank-00009", lambda body: body["ranks"].append("rank-00009")),
        ("ranks", lambda body: body.update(ranks="all")),
        ("../odd", lambda body: body["files"].update({"../odd": body["files"][ARRAYS]})),
        ("metadata|everstep", lambda body: body.update(ranks=[ARRAYS])),
        ("user/w", lambda body: body["arrays"]["user/w"].update(bytes=9)),
        ("user/v", lambda body: body["arrays"].update({"user/v": body["arrays"]["user/w"]})),
    ],
)
def test_a_manifest_of_odd_content_is_one_error(
    three: Path, what: str, change: Callable[[Any], object]
) -> None:
    rewrite(three, change)
    with pytest.raises(DamagedCheckpointError, match=f"does not have the content of format 9.*({what})"):
        read_checkpoint(three)


def test_a_file_of_arrays_with_a_forged_header_is_one_error(three: Path) -> None:
    floats = b'{"user/w":{"dtype":"F64","shape":[6],"data_offsets":[0.0,48]}}'
    for header in (b"[]", b'{"user/w":{"data_offsets":[0,5]}}', b'{"w":3}', b"\xff", floats):
        raw = len(header).to_bytes(8, "little") + header + bytes(48)
        for text in (raw, raw[:5], (1 << 60).to_bytes(8, "little") + raw):
            (three / ARRAYS).write_bytes(text)
            rewrite(three, lambda body, text=text: body["files"].update({ARRAYS: record_of(text)}))
            with pytest.raises(DamagedCheckpointError, match="is not a safetensors file"):
                read_checkpoint(three)


def record_of(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


# ------------------------------------------------------------------------------------------ copies


def test_a_checkpoint_of_several_ranks_is_adopted_whole(tmp_path: Path, three: Path) -> None:
    rewrite(three, lambda body: body.update(meta={"run": "a"}))
    (tmp_path / "b").mkdir()
    store = Store(tmp_path / "b", 4, run="b")
    store.adopt(read_checkpoint(three), journal=None)
    for rank in range(3):
        before, after = read_checkpoint(three, rank), store.read(at(20), rank)
        assert same(after.arrays, before.arrays) and after.structure == before.structure
        assert after.ranks == 3 and after.segment == 4
    assert store.read(at(20)).meta == {"run": "b", "journal": None}


def test_damage_of_another_ranks_file_is_not_adopted(tmp_path: Path, three: Path) -> None:
    rewrite(three, lambda body: body.update(meta={"run": "a"}))
    found = read_checkpoint(three)
    damage(three / "rank-00001.safetensors")
    (tmp_path / "b").mkdir()
    store = Store(tmp_path / "b", run="b")
    with pytest.raises(DamagedCheckpointError, match="rank-00001"):
        store.adopt(found)
    assert store.names() == [] and not list((tmp_path / "b").rglob(".tmp-*"))
