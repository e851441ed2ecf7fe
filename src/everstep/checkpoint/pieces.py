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
from typing import Any, NamedTuple, TypeAlias

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


# ------------------------------------------------------------------------------- descriptions of arrays


def lay_out(
    file: str, arrays: Mapping[str, HostArray]
) -> tuple[dict[str, HostArray], dict[str, dict[str, Json]]]:
    """Return which arrays of a tree are written, equal ones once, and the description of each.

    Args:
        file: name of the file that has the arrays.
    """
    here, described = {}, {}
    first: dict[tuple[str, str, tuple[int, ...]], str] = {}
    """Name of the first array of each content: digest of the bytes, element type and shape."""
    for name in ordered(arrays):
        array, digest = arrays[name], content_digest(arrays[name])
        described[name] = describe(array, array.shape, array.nbytes, xxh3_128=digest)
        large = array.nbytes >= LEAST
        key = first.setdefault((digest, array.dtype, array.shape), name) if large else name
        if key == name:
            here[name] = array
        else:
            whole: dict[str, Json] = {"offset": [0] * len(array.shape), "shape": list(array.shape)}
            described[name]["pieces"] = [{"file": file, "key": key, **whole}]
    return here, described


def describe(array: HostArray, shape: Sequence[int], size: int, **more: Json) -> dict[str, Json]:
    """Describe an array.

    Args:
        array: the array, or a box of it.
        shape, size: shape and number of bytes of the whole array.
        more: "xxh3_128", "pieces" or both.
    """
    return {
        "dtype": array.dtype,
        "shape": list(shape),
        "backend": array.backend,
        "extra": array.extra,
        "bytes": size,
        **more,
    }


def pieces_of(name: str, facts: Mapping[str, Any], file: str) -> list[Piece]:
    """List the pieces of a described array, each with its checksum.

    Args:
        file: the file of the array's tree.  An array that lies whole in it is one piece.
    """
    shape = facts["shape"]
    whole = {"file": file, "key": name, "offset": [0] * len(shape), "shape": shape}
    pieces: list[Piece] = facts.get("pieces", [whole])
    return [{"xxh3_128": facts.get("xxh3_128"), **pieces[0]}] if len(pieces) == 1 else pieces


class RankPiece(NamedTuple):
    """Piece that a rank wrote of an array.

    Attributes:
        offset: index, in the whole array, of the first element.
        shape: shape of the piece.
        file, key: place of the piece.
        xxh3_128: digest of the bytes, in hex.
    """

    offset: Sequence[int]
    shape: Sequence[int]
    file: str
    key: str
    xxh3_128: str


# ------------------------------------------------------------------------------------- writing


def write_pieces(
    folder: Path, rank: int, arrays: Mapping[str, HostArray]
) -> tuple[dict[str, Record], dict[str, RankPiece]]:
    """Write the file of a rank's pieces, unless the rank has none.

    Returns:
        The record of the file by its name, and the pieces by the names of the arrays.
    """
    regions = {n: array.region for n, array in arrays.items() if array.region is not None and array.nbytes}
    mine = {name: region for name, region in regions.items() if _writer(name, region) == rank}
    if not mine:
        return {}, {}
    file, pieces = f"pieces-{rank:05d}.safetensors", {}
    here, described = lay_out(file, {name: arrays[name] for name in mine})
    for name, region in mine.items():
        (piece,) = pieces_of(name, described[name], file)
        pieces[name] = RankPiece(region.offset, region.shape, file, piece["key"], piece["xxh3_128"])
    return {file: write_arrays(folder / file, here)}, pieces


def _writer(name: str, region: Region) -> int:
    # by the name, so that the holders of a box share the work, and all of them know it without a word
    return region.holders[xxhash.xxh3_64_intdigest(name.encode()) % len(region.holders)]


def described(
    arrays: Mapping[str, HostArray], ranks: Sequence[Mapping[str, RankPiece]]
) -> dict[str, dict[str, Any]]:
    """Describe the arrays that the ranks hold together, for the manifest.

    Args:
        arrays: the common tree's.
        ranks: what each rank wrote.
    """
    return {
        name: describe(
            array,
            region.whole,
            math.prod(region.whole) * _item(array),
            pieces=_pieces(name, region, ranks),
        )
        for name, array in arrays.items()
        if (region := array.region) is not None
    }


def _pieces(name: str, region: Region, ranks: Sequence[Mapping[str, RankPiece]]) -> list[Piece]:
    found = [theirs[name]._asdict() for theirs in ranks if name in theirs]
    if not tile(found, region.whole):
        parts = ", ".join(f"{piece['file']} has {piece['shape']} at {piece['offset']}" for piece in found)
        raise CheckpointError(
            f"the ranks do not hold the array {name!r} of shape {list(region.whole)} together "
            f"({parts or 'nobody has a part'}): shard it over all ranks, in one layout"
        )
    return list(found)


def tile(pieces: Sequence[Piece], whole: Sequence[int]) -> bool:
    """Whether pieces make an array of shape `whole`: each of its elements lies in exactly one of them."""
    if not all(len(piece["offset"]) == len(piece["shape"]) == len(whole) for piece in pieces):
        return False
    full = [piece for piece in pieces if math.prod(piece["shape"])]
    if not all(at + n <= most for piece in full for at, n, most in _sides(piece, whole)):
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


def _item(array: HostArray) -> int:
    """Bytes of an element; of a box without elements, by the name of its type."""
    count = math.prod(array.shape)
    return array.nbytes // count if count else ITEM_BYTES[array.dtype]


# ------------------------------------------------------------------------------------- reading


class Assembly:
    """Arrays, put together while the files that have their pieces are read.

    Attributes:
        keys: for each file, the names of the wanted arrays there, with their checksums.
    """

    def __init__(self) -> None:
        self.keys: dict[str, dict[str, str]] = defaultdict(dict)
        self._users: dict[tuple[str, str], list[tuple[Made, Piece]]] = defaultdict(list)

    def add(self, arrays: Mapping[str, Any], file: str, regions: Regions | None = None) -> list[Made]:
        """Want the arrays of a tree; returns what `arrays` takes once all is read.

        Args:
            arrays: their descriptions, by name.
            file: where an array without pieces lies.
            regions: which part of each array is wanted; None: all of each.
        """
        wanted = []
        for name, facts in arrays.items():
            region = None if regions is None else regions(name, tuple(facts["shape"]))
            wanted.append(made := Made(name, facts, region))
            for piece in pieces_of(name, facts, file):
                if region is None or _overlap(piece, region.offset, region.shape) is not None:
                    place = piece["file"], piece["key"]
                    made.places[place] = f"no file {place[0]} with an array {place[1]!r} is there"
                    self._users[place].append((made, piece))
                    self.keys[piece["file"]][piece["key"]] = piece["xxh3_128"]
        return wanted

    def put(self, file: str, key: str, data: Bytes) -> None:
        """Take an array of a file; what is not wanted takes no memory."""
        for number, (made, piece) in enumerate(self._users.get((file, key), ())):
            # copies: arrays do not share memory
            made.places[file, key] = made.put(piece, data.copy() if number else data)


class Made:
    """Array that is being put together.

    Attributes:
        places: for each file and key of a piece, the bytes that it has filled, or what is wrong.
    """

    def __init__(self, name: str, facts: Mapping[str, Any], region: Region | None) -> None:
        self.name, self._facts, self._region = name, facts, region
        self._shape = tuple(facts["shape"])
        self._offset = (0,) * len(self._shape) if region is None else region.offset
        self._box = self._shape if region is None else region.shape
        self._item = facts["bytes"] // max(1, math.prod(self._shape))
        self._data: Bytes | None = None
        self.places: dict[tuple[str, str], int | str] = {}

    def put(self, piece: Piece, data: Bytes) -> int | str:
        """Take a piece, of a file that may yet turn out to be damaged; returns the bytes that were filled."""
        if not all(0 <= at <= at + n <= most for at, n, most in _sides(piece, self._shape)):
            return f"the piece {dict(piece)} is not inside the shape {[*self._shape]}"
        if data.size != math.prod(piece["shape"]) * self._item:
            return f"the piece {dict(piece)} has {data.size} bytes"
        elements = data.reshape(*piece["shape"], self._item)
        if (tuple(piece["offset"]), elements.shape[:-1]) == (self._offset, self._box):
            self._data = data
            return data.size
        if self._data is None:  # zeros: where nothing is put, no old memory may show
            self._data = np.zeros(math.prod(self._box) * self._item, np.uint8)
        spans = _overlap(piece, self._offset, self._box)
        assert spans is not None, "the piece does not meet the region"
        inside = elements[_slices(spans, piece["offset"])]
        self._data.reshape(*self._box, self._item)[_slices(spans, self._offset)] = inside
        return inside.size

    def array(self) -> HostArray:
        """Return the array; a ValueError says which piece is missing or odd."""
        facts, size = self._facts, math.prod(self._box) * self._item
        odd = [found for found in self.places.values() if isinstance(found, str)]
        filled = sum(found for found in self.places.values() if isinstance(found, int))
        if odd or filled != size:
            told = odd[0] if odd else f"its pieces have {filled} bytes of {size}"
            raise ValueError(f"arrays/{self.name}: {told}")
        data = np.zeros(0, np.uint8) if self._data is None else self._data
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
