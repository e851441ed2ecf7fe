"""Checkpoints of many piece files, written as the docstring of `checkpoint/format.py` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from checkpoint_samples import host

from everstep.checkpoint import CheckpointName
from everstep.checkpoint.array_file import write_arrays
from everstep.checkpoint.manifest import ARRAYS, FORMAT, MANIFEST, packed
from everstep.contracts.state import HostArray

ROWS = 4
"""Rows of each piece of an array."""


def sharded(run_dir: Path, files: int, entries: dict[str, int]) -> Path:
    """Write the checkpoint of step 20 of which each entry has one array "w", in pieces in `files` files.

    Args:
        entries: the first file and the last plus one that hold pieces of an entry, by steps: entry "a" with
            10 has a piece in every tenth file.

    Returns:
        The checkpoint's folder.
    """
    name = CheckpointName(20)
    folder = run_dir / "checkpoints" / str(name)
    folder.mkdir(parents=True)
    described: dict[str, Any] = {}
    pieces: dict[int, dict[str, HostArray]] = {rank: {} for rank in range(files)}
    for entry, stride in entries.items():
        key, ranks = f"user/{entry}/w", range(0, files, stride)
        whole = rows_of(entry, len(ranks) * ROWS)
        listed = []
        for at, rank in enumerate(ranks):
            piece = pieces[rank][key] = host(whole[at * ROWS : (at + 1) * ROWS])
            place = {"file": file_of(rank), "key": key, "offset": [at * ROWS, 0], "shape": list(piece.shape)}
            listed.append({**place, "xxh3_128": xxhash.xxh3_128_hexdigest(piece.data)})
        about = {"dtype": "F32", "shape": list(whole.shape), "backend": "numpy", "extra": {}}
        described[key] = {**about, "bytes": whole.nbytes, "pieces": listed}
    records = {file_of(rank): write_arrays(folder / file_of(rank), pieces[rank]) for rank in range(files)}
    records[ARRAYS] = write_arrays(folder / ARRAYS, {})
    facts = {"epoch": 1, "phase": "step", "partial": False, "digest": "d", "segment": 1, "meta": None}
    tree = {entry: {"w": {"$array": f"user/{entry}/w"}} for entry in entries}
    body = {"format": FORMAT, "name": str(name), "step": 20, **facts, "versions": {}, "created": "2026-01-01"}
    body |= {"structure": {"user": tree}, "arrays": described, "ranks": [None] * files, "files": records}
    (folder / MANIFEST).write_bytes(packed(body))
    return folder


def rows_of(entry: str, rows: int) -> Any:
    """Values of an entry's array, other ones for each entry."""
    return np.arange(rows * 8, dtype=np.float32).reshape(rows, 8) + len(entry)


def file_of(rank: int) -> str:
    return f"pieces-{rank:05d}.safetensors"
