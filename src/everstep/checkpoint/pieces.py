"""Pieces: arrays that several processes hold together, each some boxes of them (sharded models).

A rank writes its boxes into a file of its own, `pieces-00001.safetensors`, each under the name of the array.
A box that several ranks hold is written by one of them.  The manifest lists the pieces of each array, so a
reader puts together any box of it: layouts are mapped by the indices of the whole array alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from everstep.checkpoint.array_file import ITEM_BYTES, Bytes, Record, ordered, write_arrays
from everstep.contracts.state import HostArray, Json, Region, Regions
from everstep.errors import CheckpointError
from everstep.state import content_digest

LEAST = 4096
"""Bytes from which on equal arrays are written once: for less, a reference costs more than the content."""

Piece: TypeAlias = Mapping[str, Any]
"""{"file", "key", "offset", "shape", "xxh3_128"}, see `format`."""


def lay_out(
    file: str, arrays: Mapping[str, HostArray]
) -> tuple[dict[str, HostArray], dict[str, dict[str, Json]]]:
    """Return which arrays of a tree are written to `file`, equal ones once, and the description of each."""
    here, descriptions = {}, {}
    first: dict[tuple[str, str, tuple[int, ...]], str] = {}
    """Name of the first array of each content: digest of the bytes, element type and shape."""
    for name in ordered(arrays):
        array, digest = arrays[name], content_digest(arrays[name])
        descriptions[name] = describe(array, array.shape, array.nbytes, xxh3_128=digest)
        large = array.nbytes >= LEAST
        key = first.setdefault((digest, array.dtype, array.shape), name) if large else name
        if key == name:
            here[name] = array
        else:
            descriptions[name]["pieces"] = [_whole(file, key, array.shape)]
    return here, descriptions


def describe(array: HostArray, shape: Sequence[int], size: int, **more: Json) -> dict[str, Json]:
    """Describe an array, or the whole array of `shape` and `size` bytes of which `array` is a box."""
    facts: dict[str, Json] = {"dtype": array.dtype, "shape": [*shape], "backend": array.backend}
    return {**facts, "extra": array.extra, "bytes": size, **more}


def _whole(file: str, key: str, shape: Sequence[int]) -> dict[str, Json]:
    return {"file": file, "key": key, "offset": [0] * len(shape), "shape": list(shape)}


def pieces_of(name: str, facts: Mapping[str, Any], file: str) -> list[Piece]:
    """List the pieces of a described array of the tree in `file`, each with its checksum."""
    pieces: list[Piece] = facts.get("pieces", [_whole(file, name, facts["shape"])])
    return [{"xxh3_128": facts.get("xxh3_128"), **pieces[0]}] if len(pieces) == 1 else pieces


def write_pieces(
    folder: Path, rank: int, arrays: Mapping[str, HostArray]
) -> tuple[dict[str, Record], dict[str, Piece]]:
    """Write the file of a rank's pieces, if any; returns its record by its name, and the pieces by array."""
    regions = {n: array.region for n, array in arrays.items() if array.region is not None and array.nbytes}
    own_regions = {name: region for name, region in regions.items() if _writer(name, region) == rank}
    if not own_regions:
        return {}, {}
    file = f"pieces-{rank:05d}.safetensors"
    pieces: dict[str, Piece] = {}
    here, descriptions = lay_out(file, {name: arrays[name] for name in own_regions})
    for name, region in own_regions.items():
        (piece,) = pieces_of(name, descriptions[name], file)
        pieces[name] = {**piece, "offset": list(region.offset), "shape": list(region.shape)}
    return {file: write_arrays(folder / file, here)}, pieces


def _writer(name: str, region: Region) -> int:
    # by the name, so that the holders of a box share the work, and all of them know it without a word
    return region.holders[xxhash.xxh3_64_intdigest(name.encode()) % len(region.holders)]


def describe_arrays(
    arrays: Mapping[str, HostArray], ranks: Sequence[Mapping[str, Piece]]
) -> dict[str, dict[str, Any]]:
    """Describe the arrays that the ranks hold together, of which each rank wrote some pieces."""
    descriptions = {}
    for name, array in arrays.items():
        if (region := array.region) is None:
            continue
        pieces: Any = [by_name[name] for by_name in ranks if name in by_name]
        if not tile(pieces, region.whole):
            parts = ", ".join(f"{each['file']} has {each['shape']} at {each['offset']}" for each in pieces)
            raise CheckpointError(
                f"the ranks do not hold the array {name!r} of shape {list(region.whole)} together "
                f"({parts or 'nobody has a part'}): shard it over all ranks, in one layout"
            )
        count = math.prod(array.shape)
        item = array.nbytes // count if count else ITEM_BYTES[array.dtype]
        descriptions[name] = describe(array, region.whole, math.prod(region.whole) * item, pieces=pieces)
    return descriptions


def tile(pieces: Sequence[Piece], whole: Sequence[int]) -> bool:
    """Whether pieces make an array of shape `whole`: each of its elements lies in exactly one of them."""
    if not all(len(piece["offset"]) == len(piece["shape"]) == len(whole) for piece in pieces):
        return False
    full = [piece for piece in pieces if math.prod(piece["shape"])]
    if not all(0 <= at <= at + n <= most for piece in full for at, n, most in _sides(piece, whole)):
        return False
    if sum(math.prod(piece["shape"]) for piece in full) != math.prod(whole):
        return False
    # the volume is right: without an overlap there is no gap
    behind: list[Piece] = []
    for piece in sorted(full, key=lambda piece: list(piece["offset"])):
        # of those before, only what reaches this piece along the first side can meet it, or a later one
        behind = [
            each for each in behind if not whole or each["offset"][0] + each["shape"][0] > piece["offset"][0]
        ]
        if any(_overlap(each, piece["offset"], piece["shape"]) is not None for each in behind):
            return False
        behind.append(piece)
    return True


class Assembly:
    """Arrays, put together while the files that have their pieces are read."""

    def __init__(self) -> None:
        self.keys: dict[str, dict[str, str]] = defaultdict(dict)
        self._users: dict[tuple[str, str], list[tuple[WholeArray, Piece]]] = defaultdict(list)

    def add(self, arrays: Mapping[str, Any], file: str, regions: Regions | None = None) -> list[WholeArray]:
        """Want the arrays of a tree, or regions of them; returns what has each of `arrays` once all is read.

        A ValueError says that the pieces of an array are not the whole of it.
        """
        assembled = []
        for name, facts in arrays.items():
            pieces = pieces_of(name, facts, file)
            if not tile(pieces, facts["shape"]):
                raise ValueError(f"arrays/{name}: its pieces do not make the shape {facts['shape']}")
            region = None if regions is None else regions(name, tuple(facts["shape"]))
            assembled.append(array := WholeArray(name, facts, region))
            for piece in pieces:
                if region is None or _overlap(piece, region.offset, region.shape) is not None:
                    array.missing.add((piece["file"], piece["key"]))
                    self._users[piece["file"], piece["key"]].append((array, piece))
                    self.keys[piece["file"]][piece["key"]] = piece["xxh3_128"]
        return assembled

    def put(self, file: str, key: str, data: Bytes) -> None:
        """Take an array of a file, which may yet turn out to be damaged; what is not wanted goes."""
        for number, (array, piece) in enumerate(self._users.get((file, key), ())):
            # copies: arrays do not share memory
            array.put(piece, data.copy() if number else data)


class WholeArray:
    """Array that is being put together; `missing` are the files and keys of pieces that it still lacks."""

    def __init__(self, name: str, facts: Mapping[str, Any], region: Region | None) -> None:
        self.name, self._facts, self._region = name, facts, region
        shape = tuple(facts["shape"])
        self._offset = (0,) * len(shape) if region is None else region.offset
        self._box = shape if region is None else region.shape
        self._item = facts["bytes"] // max(1, math.prod(shape))
        self._size = math.prod(self._box) * self._item if region is not None else facts["bytes"]
        self._data: Bytes | None = None
        self.missing: set[tuple[str, str]] = set()

    def put(self, piece: Piece, data: Bytes) -> None:
        if data.size != math.prod(piece["shape"]) * self._item:
            return
        self.missing.discard((piece["file"], piece["key"]))
        elements = data.reshape(*piece["shape"], self._item)
        if (tuple(piece["offset"]), elements.shape[:-1]) == (self._offset, self._box):
            self._data = data
            return
        if self._data is None:
            self._data = np.zeros(self._size, np.uint8)
        spans = _overlap(piece, self._offset, self._box)
        assert spans is not None, "the piece does not meet the region"
        inside = elements[_slices(spans, piece["offset"])]
        self._data.reshape(*self._box, self._item)[_slices(spans, self._offset)] = inside

    def array(self) -> HostArray:
        """Return the array; a ValueError names a piece that it lacks."""
        for file, key in sorted(self.missing):
            raise ValueError(f"arrays/{self.name}: {file} has no array {key!r} of the size")
        data = np.zeros(0, np.uint8) if self._data is None else self._data
        if data.size != self._size:
            raise ValueError(f"arrays/{self.name}: it has {data.size} bytes in place of {self._size}")
        facts = self._facts
        return HostArray(facts["dtype"], self._box, data, facts["backend"], facts["extra"], self._region)


def _sides(piece: Piece, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return zip(piece["offset"], piece["shape"], shape, strict=True)


def _overlap(piece: Piece, offset: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the first and the last index, plus 1, of what a piece and a box share; None for nothing."""
    spans = [
        (max(at, start), min(at + count, start + most))
        for (at, count, most), start in zip(_sides(piece, shape), offset, strict=True)
    ]
    return spans if all(start < end for start, end in spans) else None


def _slices(spans: Sequence[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - at, end - at) for (start, end), at in zip(spans, offset, strict=True))
