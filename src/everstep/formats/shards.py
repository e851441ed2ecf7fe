"""Weights for programs without everstep: safetensors files with an index, as Hugging Face lays them out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from everstep.checkpoint import files, write_arrays
from everstep.contracts.state import HostArray
from everstep.errors import ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(size: int | str) -> int:
    """Return a size as a number of bytes: 500_000_000, "500MB" or "2GiB"."""
    found = re.fullmatch(r"(\d+) ?([A-Za-z]*)", str(size))
    if found is None or found[2].upper() not in _UNITS or int(found[1]) < 1:
        raise ConfigError(f'{size!r} is not a size: give bytes, or as in "500MB", "5GB", "2GiB"')
    return int(found[1]) * _UNITS[found[2].upper()]


def write_shards(folder: Path, arrays: Mapping[str, HostArray], most: int | None = None) -> None:
    """Write arrays as `model.safetensors`, or, where they are larger than `most`, as shards with an index.

    Args:
        most: most bytes of arrays in a file; an array that is larger has a file of its own.
    """
    shards = _divided(arrays, most)
    # some readers of Hugging Face refuse a file that does not name the framework
    about = {"format": "pt"} if {array.backend for array in arrays.values()} == {"torch"} else {}
    if len(shards) == 1:
        write_arrays(folder / "model.safetensors", arrays, about)
        return
    named = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}
    for name, shard in named.items():
        write_arrays(folder / name, {each: arrays[each] for each in shard}, about)
    total = sum(array.data.nbytes for array in arrays.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {each: name for name, shard in named.items() for each in shard},
    }
    text = json.dumps(index, indent=2).encode() + b"\n"
    files.write_new(folder / "model.safetensors.index.json", text)


def _divided(arrays: Mapping[str, HostArray], most: int | None) -> list[list[str]]:
    """Divide the names of arrays among files, in their order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        if most is not None and shards[-1] and size + array.data.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += array.data.nbytes
    return shards
