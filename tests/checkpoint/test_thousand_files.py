"""A part of a checkpoint is read alone: its files and its bytes; also of a checkpoint of 1,000 files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_samples import damage
from shards import ROWS, file_of, rows_of, sharded

import everstep
from everstep.checkpoint import format, read_checkpoint, read_own_trees, verify_checkpoint
from everstep.checkpoint.manifest import MANIFEST, packed
from everstep.errors import DamagedCheckpointError
from everstep.state import Encoded, decode, encode

FILES = 1000


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 1,000 files: pieces of "all" are in each, those of "few" in every hundredth."""
    return sharded(tmp_path_factory.mktemp("thousand"), FILES, {"all": 1, "few": 100})


def bytes_read() -> int:
    """Number of bytes that this process has read from files so far, as the kernel counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def loaded(source: Path, entry: str, rows: int) -> tuple[Any, int]:
    """An entry's array as `everstep.load` gives it, and the number of bytes that were read for it."""
    state = {entry: {"w": np.zeros((rows, 8), np.float32)}}
    with contextlib.suppress(DamagedCheckpointError):
        everstep.load(source, state)  # reads modules, too
    before = bytes_read()
    everstep.load(source, state)
    return state[entry]["w"], bytes_read() - before


def test_a_thousand_files_are_opened_and_verified_and_no_byte_is_read_twice(thousand: Path) -> None:
    size = sum(path.stat().st_size for path in thousand.iterdir())
    for work in (read_checkpoint, verify_checkpoint):
        work(thousand)  # reads modules, too
        before = bytes_read()
        work(thousand)
        assert bytes_read() - before <= size + 4096, work
    found = read_checkpoint(thousand).arrays["user/all/w"]
    assert found.data.view(np.float32).reshape(-1, 8).tolist() == rows_of("all", FILES * ROWS).tolist()


def test_one_entry_of_a_thousand_files_reads_its_own_bytes(thousand: Path) -> None:
    array, count = loaded(thousand, "few", 10 * ROWS)
    assert np.array_equal(array, rows_of("few", 10 * ROWS))
    # the manifest, the headers of ten files, and ten pieces: nothing of the other 990 files
    manifest = (thousand / MANIFEST).stat().st_size
    headers = sum(
        int.from_bytes((thousand / file_of(n)).read_bytes()[:8], "little") for n in range(0, FILES, 100)
    )
    assert count - manifest <= headers + array.nbytes + 4096


def test_the_own_trees_of_many_ranks_are_read_with_one_manifest(tmp_path: Path) -> None:
    """As a start on another number of ranks reads them: no byte twice."""
    common, ranks = Encoded({"common": {}}), 200
    records = [
        format.write_own(tmp_path, rank, encode({"rng": {f"rank{rank}": np.arange(8) + rank}}), common)
        for rank in range(ranks)
    ]
    facts: Any = {"name": "step-00000001", "step": 1, "epoch": 1, "phase": "step", "partial": False}
    facts |= {"digest": "d", "segment": 1, "meta": {}}
    written = format.write_common(tmp_path, common)
    format.write_manifest(tmp_path, facts, common, written, records)
    before = bytes_read()
    trees = read_own_trees(tmp_path)
    count = bytes_read() - before
    assert [decode(tree)["rng"][f"rank{n}"][0] for n, tree in enumerate(trees)] == list(range(ranks))
    assert count <= sum(path.stat().st_size for path in tmp_path.iterdir()) + 4096


def test_damage_is_found_in_what_is_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 8, {"all": 1, "few": 4})
    damage(folder / file_of(1))
    assert np.array_equal(loaded(folder, "few", 2 * ROWS)[0], rows_of("few", 2 * ROWS))
    with pytest.raises(DamagedCheckpointError, match=r"pieces-00001\.safetensors has changed"):
        loaded(folder, "all", 8 * ROWS)
    damage(folder / file_of(4))
    with pytest.raises(DamagedCheckpointError, match=r"pieces-00004\.safetensors has changed"):
        loaded(folder, "few", 2 * ROWS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "pieces-00009.safetensors"}, "pieces-00009"),
        ({"key": "other"}, "not a safetensors file with other"),
        ({"offset": [6, 0]}, "do not make the shape"),
        ({"offset": [-1, 0]}, "do not make the shape"),
        ({"shape": [1 << 40, 8]}, "not have the content"),
        ({"xxh3_128": "0" * 32}, "has changed"),
        ({"xxh3_128": 7}, "has changed"),
    ],
)
def test_forged_pieces_are_one_clear_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = sharded(tmp_path, 2, {"a": 1})
    body = json.loads((folder / MANIFEST).read_bytes())["body"]
    body["arrays"]["user/a/w"]["pieces"][1] |= change
    (folder / MANIFEST).write_bytes(packed(body))
    with pytest.raises(DamagedCheckpointError, match=message):
        loaded(folder, "a", 2 * ROWS)


@pytest.mark.parametrize("length", [b"\xff" * 8, (1 << 62).to_bytes(8, "little"), b"\0" * 8])
def test_an_absurd_header_is_not_allocated(tmp_path: Path, length: bytes) -> None:
    folder = sharded(tmp_path, 2, {"a": 1})
    with open(folder / file_of(1), "r+b") as file:
        file.write(length)
    with pytest.raises(DamagedCheckpointError, match=r"pieces-00001\.safetensors is not a safetensors file"):
        loaded(folder, "a", 2 * ROWS)
