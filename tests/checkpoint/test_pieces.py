"""Arrays that ranks hold together: each element once, put together by whoever reads, and read in part."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_samples import FACTS, damage

import everstep
from everstep.checkpoint import (
    CheckpointName,
    Commit,
    Store,
    format,
    read_checkpoint,
    read_own_trees,
    verify_checkpoint,
)
from everstep.checkpoint.format import ARRAYS, MANIFEST, packed
from everstep.checkpoint.pieces import write_pieces
from everstep.contracts.state import HostArray, Region
from everstep.errors import CheckpointError, DamagedCheckpointError
from everstep.state import Encoded, decode, digest, encode

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


@pytest.mark.parametrize(
    ("whole", "boxes"),
    [
        ((4, 2), [((0, 0), (4, 2))]),
        ((5, 2), [((0, 0), (3, 2)), ((3, 0), (2, 2)), ((5, 0), (0, 2))]),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
        ((3, 3), [((1, 1), (1, 1)), ((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]),
        ((), [((), ())]),
    ],
)
def test_pieces_that_make_the_array_are_put_together_in_whole_and_in_part(
    tmp_path: Path, whole: tuple[int, ...], boxes: list[Box]
) -> None:
    values = np.arange(np.prod(whole), dtype=np.float32).reshape(whole) + 1
    for number, order in enumerate((boxes, [boxes[0], *boxes[:0:-1]])):
        folder = tmp_path / str(number) / "step-00000020"
        sharded(folder, len(boxes), {"a": (values, dict(enumerate(order)))})
        verify_checkpoint(folder)
        assert np.array_equal(decode(read_checkpoint(folder).common)["user"]["a"]["w"], values)
        for offset in itertools.product(*(range(n) for n in whole)):
            shape = tuple(min(2, n - at) for at, n in zip(offset, whole, strict=True))
            region = Region(offset, shape, whole, (0,))
            found = read_checkpoint(folder, regions=lambda name, shape, region=region: region).arrays
            cut = tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))
            assert found["user/a/w"].data.tobytes() == values[cut].tobytes()


@pytest.mark.parametrize(
    ("whole", "boxes"),
    [
        ((4, 2), [((0, 0), (2, 2))]),
        ((4, 2), [((0, 0), (2, 2)), ((0, 0), (2, 2))]),  # the volume alone would be right
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))]),
        ((4, 4), [((0, 0), (3, 3)), ((2, 2), (2, 2)), ((3, 0), (1, 3))]),
        ((4, 2), [((0, 0), (2, 2)), ((3, 0), (1, 2)), ((1, 0), (1, 2))]),
        ((), [((), ()), ((), ())]),
    ],
)
def test_pieces_with_a_gap_or_an_overlap_are_refused(
    tmp_path: Path, whole: tuple[int, ...], boxes: list[Box]
) -> None:
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
    for work in (read_checkpoint, verify_checkpoint):
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
    records = [
        format.write_own(tmp_path, rank, encode({"rng": {f"rank{rank}": np.arange(8) + rank}}), common)
        for rank in range(ranks)
    ]
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "pieces-00009.safetensors"}, "pieces-00009"),
        ({"key": "other"}, "not a safetensors file with other"),
        ({"offset": [6, 0]}, "do not make the shape"),
        ({"offset": [-4, 0]}, "do not make the shape"),
        ({"offset": None}, "not have the content"),
        ({"shape": [1 << 40, 8]}, "not have the content"),
        ({"file": ARRAYS}, "not a safetensors file with user/all/w"),
        ({"xxh3_128": "0" * 32}, "has changed"),
        ({"xxh3_128": 7}, "has changed"),
    ],
)
def test_forged_pieces_are_one_clear_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = few(tmp_path, 2)
    body = json.loads((folder / MANIFEST).read_bytes())["body"]
    body["arrays"]["user/all/w"]["pieces"][1] |= change
    (folder / MANIFEST).write_bytes(packed(body))
    with pytest.raises(DamagedCheckpointError, match=message):
        loaded(folder, "all", (8, 8))


@pytest.mark.parametrize("length", [b"\xff" * 8, (1 << 62).to_bytes(8, "little"), b"\0" * 8])
def test_an_absurd_header_is_not_allocated(tmp_path: Path, length: bytes) -> None:
    folder = few(tmp_path, 2)
    with open(folder / file_of(1), "r+b") as file:
        file.write(length)
    with pytest.raises(DamagedCheckpointError, match=r"pieces-00001\.safetensors is not a safetensors file"):
        loaded(folder, "all", (8, 8))
