"""Checkpoints of several ranks: own trees, arrays in pieces, content that is shared, and their damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import xxhash
from checkpoint_samples import arrays_of, at, commit, damage, host, same, seed_of, store_in

from everstep.checkpoint import Checkpoint, Store, format, read_checkpoint, read_own_trees, verify_checkpoint
from everstep.checkpoint.array_file import write_arrays
from everstep.checkpoint.manifest import ARRAYS, MANIFEST, packed
from everstep.errors import CheckpointError, DamagedCheckpointError
from everstep.state import Encoded, decode, encode


def own_of(rank: int) -> Encoded:
    return encode({"rng": {f"rank{rank}": np.arange(3) + rank}, "user": {"replay": [rank, np.ones(rank)]}})


COMMON = encode({"user": {"w": np.arange(6.0)}, "progress": {"step": 20}})
FACTS: dict[str, Any] = {"epoch": 1, "phase": "step", "partial": False, "segment": 1, "meta": None}


def write_ranks(folder: Path, own: list[Encoded], common: Encoded = COMMON) -> Path:
    """Write a checkpoint as several ranks do."""
    folder.mkdir(parents=True)
    record = format.write_common(folder, common)
    ranks = [format.write_own(folder, rank, tree, common) for rank, tree in enumerate(own)]
    facts = {"name": folder.name, "step": 20, "digest": "of all", **FACTS}
    format.write_manifest(folder, facts, common, record, ranks)
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


def test_each_file_is_one_of_the_safetensors_library(three: Path) -> None:
    assert sorted(path.name for path in three.iterdir()) == [
        *(ARRAYS, MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors")
    ]
    with safetensors.safe_open(three / "rank-00001.safetensors", "numpy") as file:
        assert file.get_tensor("rng/rank1").tolist() == [1, 2, 3]
        assert json.loads(file.metadata()["everstep"])["structure"]["user"]["replay"][0] == 1


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
    if file == "rank-00001.safetensors":
        assert read_checkpoint(three, 2).ranks == 3  # rank 2 has no use for that file


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_missing_or_short_file_of_any_rank_damages_it_for_all(three: Path, rank: int, harm: str) -> None:
    path = three / "rank-00001.safetensors"
    path.unlink() if harm == "missing" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match="rank-00001"):
        read_checkpoint(three, rank)


def test_a_store_passes_over_a_checkpoint_that_one_rank_could_not_read(tmp_path: Path, three: Path) -> None:
    store = store_in(tmp_path)
    commit(store, at(10))
    damage(three / "rank-00001.safetensors")
    found, notes = store.find(True)
    assert seed_of(found) == 10 and "rank-00001.safetensors has changed" in notes[0]


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
    for header in (b"[]", b'{"user/w":{"data_offsets":[0,5]}}', b'{"w":3}', b"\xff"):
        raw = len(header).to_bytes(8, "little") + header + bytes(48)
        for text in (raw, raw[:5], (1 << 60).to_bytes(8, "little") + raw):
            (three / ARRAYS).write_bytes(text)
            rewrite(three, lambda body, text=text: body["files"].update({ARRAYS: record_of(text)}))
            with pytest.raises(DamagedCheckpointError, match="is not a safetensors file"):
                read_checkpoint(three)


def record_of(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


# ------------------------------------------------------------------------------------------ pieces


def in_pieces(folder: Path, whole: np.ndarray[Any, Any], cuts: list[tuple[slice, ...]]) -> None:
    """Divide the array user/w of a checkpoint among the files of ranks, one piece each."""
    pieces = []
    for number, cut in enumerate(cuts):
        file, part = f"rank-{number + 10:05d}.safetensors", whole[cut]
        record = write_arrays(folder / file, {"piece": host(part), "other": host(np.ones(5))})
        rewrite(folder, lambda body, file=file, record=record: body["files"].update({file: record}))
        offset = [span.indices(most)[0] for span, most in zip(cut, whole.shape, strict=True)]
        place = {"file": file, "key": "piece", "offset": offset, "shape": list(part.shape)}
        pieces.append({**place, "xxh3_128": xxhash.xxh3_128_hexdigest(part.tobytes())})
    told = {"shape": list(whole.shape), "bytes": whole.nbytes, "pieces": pieces}
    rewrite(folder, lambda body: body["arrays"]["user/w"].update(told))


WHOLE = np.arange(24.0).reshape(4, 6)
HALVES = [(slice(0, 2), slice(None)), (slice(2, 4), slice(None))]
BLOCKS = [(rows, columns) for rows in (slice(0, 3), slice(3, 4)) for columns in (slice(0, 1), slice(1, 6))]


@pytest.mark.parametrize("cuts", [HALVES, BLOCKS])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_array_in_pieces_is_put_together(three: Path, cuts: list[tuple[slice, ...]], rank: int) -> None:
    in_pieces(three, WHOLE, cuts)
    np.testing.assert_array_equal(tree_of(read_checkpoint(three, rank))["user"]["w"], WHOLE, strict=True)
    verify_checkpoint(three)
    damage(three / "rank-00011.safetensors")
    with pytest.raises(DamagedCheckpointError, match="rank-00011"):
        read_checkpoint(three, rank)


@pytest.mark.parametrize(
    "change",
    [
        lambda pieces: pieces.pop(),
        lambda pieces: pieces[1].update(offset=[3, 0]),
        lambda pieces: pieces[1].update(offset=[-2, 0]),
        lambda pieces: pieces[1].update(key="gone"),
        lambda pieces: pieces[1].update(file="rank-00099.safetensors"),
        lambda pieces: pieces[1].update(shape=[6, 2]),
        lambda pieces: pieces[1].pop("offset"),
    ],
)
def test_pieces_that_do_not_make_the_array_are_refused(three: Path, change: Callable[[Any], object]) -> None:
    in_pieces(three, WHOLE, HALVES)
    rewrite(three, lambda body: change(body["arrays"]["user/w"]["pieces"]))
    with pytest.raises(DamagedCheckpointError, match="does not have the content of format 9"):
        read_checkpoint(three)


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
