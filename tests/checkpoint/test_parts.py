"""Checkpoints of several ranks: own trees, arrays that ranks hold together, and their damage."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import xxhash
from checkpoint_samples import FACTS, arrays_of, at, commit, damage, same, seed_of, store_in

import everstep
from everstep import checkpoint
from everstep.checkpoint import CheckpointName, Commit, Store, format, read_checkpoint, read_own_trees
from everstep.checkpoint.format import ARRAYS, MANIFEST, pack_manifest
from everstep.checkpoint.pieces import write_pieces
from everstep.contracts.state import HostArray, Region
from everstep.errors import CheckpointError, DamagedCheckpointError
from everstep.state import Encoded, decode, digest, encode


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


def tree_of(found: checkpoint.Checkpoint) -> Any:
    return decode(Encoded(found.structure, found.arrays))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A checkpoint of three ranks, of which the last has nothing of its own."""
    return write_ranks(tmp_path / "checkpoints" / str(at(20)), [own_of(0), own_of(1), Encoded({})])


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Change a manifest's body and give it the checksum of that."""
    body = json.loads((folder / MANIFEST).read_bytes())["body"]
    change(body)
    (folder / MANIFEST).write_bytes(pack_manifest(body))


# ------------------------------------------------------------------------------------------ own trees
def test_each_rank_reads_the_common_tree_with_its_own_over_it_where_it_has_one(three: Path) -> None:
    with safetensors.safe_open(three / "rank-00001.safetensors", "numpy") as file:
        assert file.get_tensor("rng/rank1").tolist() == [1, 2, 3]
    for rank in (0, 1, 2, 3, 99):
        found = read_checkpoint(three, rank)
        tree = tree_of(found)
        assert tree["user"]["w"].tolist() == [0, 1, 2, 3, 4, 5] and tree["progress"] == {"step": 20}
        assert found.ranks == 3 and found.digest == "of all"
        if rank < 2:
            assert tree["rng"][f"rank{rank}"].tolist() == [rank, rank + 1, rank + 2] and len(tree["rng"]) == 1
            assert tree["user"]["replay"][0] == rank and tree["user"]["replay"][1].shape == (rank,)
        else:
            assert tree.keys() == {"user", "progress"} and tree["user"].keys() == {"w"}
            assert found.own.structure == {}


def test_one_process_may_have_a_tree_of_its_own(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    commit(store, at(20), own=own_of(0))
    found = store.read(at(20))
    assert found.ranks == 1 and found.structure == {"seed": 20, **own_of(0).structure}  # type: ignore[dict-item]
    assert same(found.arrays, {**arrays_of(20), **own_of(0).arrays})
    assert same(found.common.arrays, arrays_of(20)) and same(found.own.arrays, own_of(0).arrays)
    commit(store, at(30))
    assert not list(store.path(at(30)).glob("rank-*"))


def test_what_is_common_cannot_be_a_ranks_own(tmp_path: Path) -> None:
    for number, own in enumerate(({"user": {"w": np.zeros(2)}}, {"user": {"w": 3}}, {"progress": 1})):
        with pytest.raises(CheckpointError, match=r"rank cannot save as its own .*\((user/w|progress) is in"):
            write_ranks(tmp_path / str(number) / str(at(20)), [own_of(0), encode(own)])


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
        checkpoint.verify_checkpoint(three)
    commit(store := store_in(three.parent.parent), at(10))
    found, notes = store.find(True)
    assert seed_of(found) == 10 and f"{file} has changed" in notes[0]
    if file == "rank-00001.safetensors":
        assert read_checkpoint(three, 2).ranks == 3  # rank 2 has no use for that file


def test_a_missing_or_short_file_of_any_rank_damages_it_for_all(three: Path) -> None:
    path = three / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for _ in ("short", "missing"):
        for rank in (0, 1, 2):
            with pytest.raises(DamagedCheckpointError, match="rank-00001"):
                read_checkpoint(three, rank)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(("what", "change"), [
    ("ranks", lambda body: body.update(ranks=[])), ("partial", lambda body: body.update(partial=True)),
    ("rank-00009", lambda body: body["ranks"].append("rank-00009")),
    ("ranks", lambda body: body.update(ranks="all")),
    ("../odd", lambda body: body["files"].update({"../odd": body["files"][ARRAYS]})),
    ("metadata|everstep", lambda body: body.update(ranks=[ARRAYS])),
    ("user/w", lambda body: body["arrays"]["user/w"].update(bytes=9)),
    ("user/v", lambda body: body["arrays"].update({"user/v": body["arrays"]["user/w"]})),
])  # fmt: skip
def test_a_manifest_of_odd_content_is_one_error(three: Path, what: str, change: Any) -> None:
    rewrite(three, change)
    with pytest.raises(DamagedCheckpointError, match=f"does not have the content of format 10.*({what})"):
        read_checkpoint(three)


def test_a_file_of_arrays_with_a_forged_header_is_one_error_and_is_not_allocated(three: Path) -> None:
    floats = b'{"user/w":{"dtype":"F64","shape":[6],"data_offsets":[0.0,48]}}'
    for header in (b"[]", b'{"user/w":{"data_offsets":[0,5]}}', b'{"w":3}', b"\xff", floats):
        raw = len(header).to_bytes(8, "little") + header + bytes(48)
        lengths = ((1 << 60).to_bytes(8, "little"), b"\xff" * 8, bytes(8))
        for text in (raw, raw[:5], *(length + raw for length in lengths)):
            (three / ARRAYS).write_bytes(text)
            rewrite(three, lambda body, text=text: body["files"].update({ARRAYS: record_of(text)}))
            with pytest.raises(DamagedCheckpointError, match="is not a safetensors file"):
                read_checkpoint(three)


def record_of(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


# ------------------------------------------------------------------------------------------ copies
def test_a_checkpoint_of_several_ranks_is_adopted_whole_or_not_at_all(tmp_path: Path, three: Path) -> None:
    rewrite(three, lambda body: body.update(meta={"run": "a"}))
    store, other = (Store(tmp_path / name, 4, run=name) for name in ("b", "c"))
    for each in (store, other):
        each.run_dir.mkdir()
    found = read_checkpoint(three)
    store.adopt(found, journal=None)
    for rank in range(3):
        before, after = read_checkpoint(three, rank), store.read(at(20), rank)
        assert same(after.arrays, before.arrays) and after.structure == before.structure
        assert after.ranks == 3 and after.segment == 4
    assert store.read(at(20)).meta == {"run": "b", "journal": None}
    damage(three / "rank-00001.safetensors")  # of another rank
    with pytest.raises(DamagedCheckpointError, match="rank-00001"):
        other.adopt(found)
    assert other.names() == [] and not list(other.run_dir.rglob(".tmp-*"))


Box = tuple[tuple[int, ...], tuple[int, ...]]


def sharded(folder: Path, ranks: int, arrays: dict[str, tuple[Any, dict[int, Box]]]) -> Path:
    """Write a checkpoint as ranks do; of each array by its entry, the boxes (offset, shape) by rank."""
    folder.mkdir(parents=True)
    records, pieces, common = [], [], Encoded({})
    for rank in range(ranks):
        mine: dict[str, HostArray] = {}
        for entry, (whole, boxes) in arrays.items():
            if rank in boxes:
                offset, shape = boxes[rank]
                cut = tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))
                data = np.frombuffer(np.ascontiguousarray(whole[cut]).tobytes(), np.uint8)
                region = Region(offset, shape, whole.shape, (rank,))
                mine[f"user/{entry}/w"] = HostArray("F32", shape, data, "numpy", region=region)
        record, written = write_pieces(folder, rank, mine)
        records.append(record)
        pieces.append(written)
        common.arrays.update(mine)
    structure = {"user": {entry: {"w": {"$array": f"user/{entry}/w"}} for entry in arrays}}
    common = Encoded(structure, common.arrays)
    facts = {**FACTS, "name": folder.name}
    format.write_manifest(folder, facts, common, format.write_common(folder, common), records, pieces)
    return folder


def rows(entry: str, count: int, every: int = 1, each: int = 4) -> tuple[Any, dict[int, Box]]:
    """An array of which every so-many-th rank holds some rows, other values for each entry."""
    whole = np.arange(count * each * 8, dtype=np.float32).reshape(-1, 8) + len(entry)
    return whole, {every * at: ((at * each, 0), (each, 8)) for at in range(count)}


def file_of(rank: int) -> str:
    return f"pieces-{rank:05d}.safetensors"


def loaded(source: Path, entry: str, shape: tuple[int, ...]) -> tuple[Any, int]:
    """An entry's array as `everstep.load` gives it, and the number of bytes that were read for it."""
    state = {entry: {"w": np.zeros(shape, np.float32)}}
    with contextlib.suppress(DamagedCheckpointError):
        everstep.load(source, state)  # reads modules, too
    before = bytes_read()
    everstep.load(source, state)
    return state[entry]["w"], bytes_read() - before


def bytes_read() -> int:
    """Number of bytes that this process has read from files so far, as the kernel counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


# ---------------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize(("whole", "boxes"), [
    ((4, 2), [((0, 0), (4, 2))]),
    ((5, 2), [((0, 0), (3, 2)), ((3, 0), (2, 2)), ((5, 0), (0, 2))]),
    ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
    ((3, 3), [((1, 1), (1, 1)), ((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]),
    ((), [((), ())]),
])  # fmt: skip
def test_pieces_that_make_the_array_are_put_together(tmp_path: Path, whole: Any, boxes: list[Box]) -> None:
    values = np.arange(np.prod(whole), dtype=np.float32).reshape(whole) + 1
    for number, order in enumerate((boxes, [boxes[0], *boxes[:0:-1]])):
        folder = tmp_path / str(number) / "step-00000020"
        sharded(folder, len(boxes), {"a": (values, dict(enumerate(order)))})
        checkpoint.verify_checkpoint(folder)
        assert np.array_equal(decode(read_checkpoint(folder).common)["user"]["a"]["w"], values)
        for offset in itertools.product(*(range(n) for n in whole)):
            shape = tuple(min(2, n - at) for at, n in zip(offset, whole, strict=True))
            region = Region(offset, shape, whole, (0,))
            found = read_checkpoint(folder, regions=lambda name, shape, region=region: region).arrays
            cut = tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))
            assert found["user/a/w"].data.tobytes() == values[cut].tobytes()


@pytest.mark.parametrize(("whole", "boxes"), [
    ((4, 2), [((0, 0), (2, 2))]),
    ((4, 2), [((0, 0), (2, 2)), ((0, 0), (2, 2))]),  # the volume alone would be right
    ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))]), ((), [((), ()), ((), ())]),
    ((4, 4), [((0, 0), (3, 3)), ((2, 2), (2, 2)), ((3, 0), (1, 3))]),
    ((4, 2), [((0, 0), (2, 2)), ((3, 0), (1, 2)), ((1, 0), (1, 2))]),
])  # fmt: skip
def test_pieces_with_a_gap_or_an_overlap_are_refused(tmp_path: Path, whole: Any, boxes: list[Box]) -> None:
    with pytest.raises(CheckpointError, match="do not hold the array 'user/a/w'"):
        sharded(tmp_path / "x", len(boxes), {"a": (np.zeros(whole, np.float32), dict(enumerate(boxes)))})


def test_a_checkpoint_of_which_a_rank_has_read_its_part_is_adopted_whole(tmp_path: Path) -> None:
    """A run of sharded ranks forks a run of one process: the writer holds a part of each array."""
    store, other = Store(tmp_path / "a", 1), Store(tmp_path / "b", 1)
    for each in (store, other):
        each.run_dir.mkdir()
    whole = np.arange(12, dtype=np.float32)
    encoded = encode({"user": {"w": whole}})
    name = store.commit(Commit(CheckpointName(1), encoded, digest(encoded), meta={})).name

    def half(name: str, shape: tuple[int, ...]) -> Region | None:
        return Region((0,), (6,), shape, (0,)) if name == "user/w" else None

    part = read_checkpoint(store.path(name), regions=half)
    assert part.common.arrays["user/w"].data.nbytes == 24
    other.adopt(part)
    assert read_checkpoint(other.path(name)).arrays["user/w"].data.tobytes() == whole.tobytes()


# ---------------------------------------------------------------------------------------------- many files
FILES = 1000


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 1,000 files: pieces of "all" are in each, those of "few" in every hundredth."""
    folder = tmp_path_factory.mktemp("thousand") / "run" / "checkpoints" / "step-00000020"
    return sharded(folder, FILES, {"all": rows("all", FILES), "few": rows("few", 10, 100)})


def test_a_thousand_files_are_opened_and_verified_and_no_byte_is_read_twice(thousand: Path) -> None:
    size = sum(path.stat().st_size for path in thousand.iterdir())
    for work in (read_checkpoint, checkpoint.verify_checkpoint):
        work(thousand)  # reads modules, too
        before = bytes_read()
        work(thousand)
        assert bytes_read() - before <= size + 4096, work
    found = read_checkpoint(thousand).arrays["user/all/w"]
    assert found.data.tobytes() == rows("all", FILES)[0].tobytes()


def test_one_entry_of_a_thousand_files_reads_its_own_bytes(thousand: Path) -> None:
    expected = rows("few", 10)[0]
    array, count = loaded(thousand, "few", expected.shape)
    assert np.array_equal(array, expected)
    # the manifest, the headers of ten files, and ten pieces: nothing of the other 990 files
    manifest = (thousand / MANIFEST).stat().st_size
    files = [thousand / file_of(n) for n in range(0, FILES, 100)]
    headers = sum(int.from_bytes(path.read_bytes()[:8], "little") for path in files)
    assert count - manifest <= headers + array.nbytes + 4096


def test_the_own_trees_of_many_ranks_are_read_with_one_manifest(tmp_path: Path) -> None:
    """As a start on another number of ranks reads them: no byte twice."""
    common, ranks = Encoded({"common": {}}), 200
    own = [encode({"rng": {f"rank{rank}": np.arange(8) + rank}}) for rank in range(ranks)]
    records = [format.write_own(tmp_path, rank, tree, common) for rank, tree in enumerate(own)]
    facts = {**FACTS, "name": "step-00000001"}
    format.write_manifest(tmp_path, facts, common, format.write_common(tmp_path, common), records)
    before = bytes_read()
    trees = read_own_trees(tmp_path)
    count = bytes_read() - before
    assert [decode(tree)["rng"][f"rank{n}"][0] for n, tree in enumerate(trees)] == list(range(ranks))
    assert count <= sum(path.stat().st_size for path in tmp_path.iterdir()) + 4096


# ---------------------------------------------------------------------------------------------- damage
def few(tmp_path: Path, ranks: int = 8) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step-00000020"
    return sharded(folder, ranks, {"all": rows("all", ranks), "few": rows("few", 2, ranks // 2)})


def test_damage_is_found_in_what_is_read(tmp_path: Path) -> None:
    folder, expected = few(tmp_path), rows("few", 2)[0]
    damage(folder / file_of(1))
    assert np.array_equal(loaded(folder, "few", expected.shape)[0], expected)
    for rank in (0, 1, 7):
        with pytest.raises(DamagedCheckpointError, match=r"pieces-00001\.safetensors has changed"):
            read_checkpoint(folder, rank)
    damage(folder / file_of(4))
    with pytest.raises(DamagedCheckpointError, match=r"pieces-00004\.safetensors has changed"):
        loaded(folder, "few", expected.shape)


@pytest.mark.parametrize(("change", "message"), [
    ({"file": "pieces-00009.safetensors"}, "pieces-00009"),
    ({"key": "other"}, "not a safetensors file with other"),
    ({"offset": [6, 0]}, "do not make the shape"), ({"offset": [-4, 0]}, "do not make the shape"),
    ({"offset": None}, "not have the content"), ({"shape": [1 << 40, 8]}, "not have the content"),
    ({"file": ARRAYS}, "not a safetensors file with user/all/w"),
    ({"xxh3_128": "0" * 32}, "has changed"), ({"xxh3_128": 7}, "has changed"),
])  # fmt: skip
def test_forged_pieces_are_one_clear_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = few(tmp_path, 2)
    body = json.loads((folder / MANIFEST).read_bytes())["body"]
    body["arrays"]["user/all/w"]["pieces"][1] |= change
    (folder / MANIFEST).write_bytes(pack_manifest(body))
    with pytest.raises(DamagedCheckpointError, match=message):
        loaded(folder, "all", (8, 8))
