"""Weights that a program without everstep has written: a file, a folder of shards, or one of torch's.

A folder of torch.distributed.checkpoint has a pickle with facts about arrays, and files with their chunks.
The pickle is read as data (`read_pickle`), and each chunk, which torch.save has written, by torch's reader
for weights only.  Objects other than tensors are pickles, too; they are left out and listed.  For such
programs `write_shards` writes safetensors files.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from everstep.backends import torch_files
from everstep.checkpoint import files, write_arrays
from everstep.checkpoint.array_file import ITEM_BYTES, Span, parse_header
from everstep.checkpoint.pieces import tile
from everstep.contracts.state import HostArray, Unread
from everstep.errors import CheckpointError, ConfigError
from everstep.untrusted_files import is_file_name, open_regular, parse_json, read_regular, readable

METADATA = ".metadata"
LARGEST_METADATA = 256 << 20
"""Most bytes of the pickle; that of 1,000 ranks with 1,000 tensors has about 100 MB."""
_ROOM = "torch.distributed.checkpoint."


class Made:
    """Description of an object: the name of its class or function (`kind`), its arguments, and its state."""

    kind = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> Made:
        instance = object.__new__(cls)
        instance.args = args
        return instance

    def __setstate__(self, state: Any) -> None:
        self.state = state


_FOLLOWED = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES EMPTY_TUPLE EMPTY_LIST EMPTY_DICT
TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD
"""
"""Operations of a pickle that are followed: those that torch.distributed.checkpoint needs, and no others."""


class _Unpickler(pickle._Unpickler):
    """Python's own, whose memo needs no more memory than its content; each class or function is a `Made`."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for name in _FOLLOWED.split() for code in getattr(pickle, name)
    }

    def find_class(self, module: str, name: str) -> Any:
        return type("Made", (Made,), {"kind": f"{module}.{name}"})


def read_pickle(data: bytes) -> Any:
    """Return the value of a pickle with a `Made` in place of each object; nothing is imported or called."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever Python meets in odd bytes
        raise ValueError(f"{type(error).__name__}: {error}") from None


class _Chunk(NamedTuple):
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


def open_folder(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """List the arrays of a folder, each read when it is needed, and the names of its other objects."""
    path = folder / METADATA
    with readable(path, refuse):
        raw = read_regular(path, LARGEST_METADATA)
    try:
        return _content(folder, read_pickle(raw))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        refuse(path, f"is not the metadata of a checkpoint, or is damaged ({reason})", error)


def _content(folder: Path, root: Any) -> tuple[dict[str, Any], list[str]]:
    about = _facts(root, "metadata.Metadata")
    places = {}
    for index, info in about["storage_data"].items():
        key, place = _facts(index, "metadata.MetadataIndex"), _facts(info, "filesystem._StorageInfo")
        offset = () if key.get("offset") is None else _size(key["offset"])
        places[key["fqn"], offset] = _place(folder, key["fqn"], place)
    paths = about.get("planner_data")
    tree: dict[str, Any] = {}
    other_names = []
    for name, facts in about["state_dict_metadata"].items():
        if _kind(facts) != f"{_ROOM}metadata.TensorStorageMetadata":
            other_names.append(str(name))
            continue
        # its path in the tree that was saved, where that is known; the result has two levels, or one
        path: Any = paths.get(name) if isinstance(paths, dict) else None
        is_path = isinstance(path, tuple) and path and all(isinstance(key, str | int) for key in path)
        top, *rest = map(str, path if is_path else (name,))
        branch: Any = tree.setdefault(top, {}) if rest else tree
        inner = ".".join(rest) if rest else top
        branch[inner] = _array(name, facts.state, places)
    return tree, other_names


def _place(folder: Path, name: str, place: dict[str, Any]) -> tuple[Path, int, int]:
    if place.get("transform_descriptors"):
        refuse(folder, f"has {name!r} in an encoding of another program", remedy="save without extensions")
    file = inside(folder, place["relative_path"], folder / METADATA)
    start, size = _lengths((place["offset"], place["length"]))
    with readable(file, refuse):
        length = file.stat().st_size
    if start + size > length:
        refuse(file, f"has {length:,} bytes, and {name!r} should end at {start + size:,}")
    return file, start, size


def _array(name: str, facts: dict[str, Any], places: dict[Any, tuple[Path, int, int]]) -> Unread:
    properties, shape = facts["properties"].state, _size(facts["size"])
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    chunks = []
    for chunk in facts["chunks"]:
        region = _facts(chunk, "metadata.ChunkStorageMetadata")
        offset, sizes = _size(region["offsets"]), _size(region["sizes"])
        chunks.append(_Chunk(offset, sizes, *places[name, offset]))
    if not tile([{"offset": each.offset, "shape": each.shape} for each in chunks], shape):
        raise ValueError(f"the chunks of {name!r} are not the whole of {shape}")
    element = torch_files().dtype_name(dtype.kind)
    return Unread(element, shape, partial(_read, name, element, shape, chunks))


def _read(name: str, dtype: str, shape: tuple[int, ...], chunks: list[_Chunk]) -> HostArray:
    array: NDArray[np.uint8] | None = None
    extra: dict[str, Any] = {}
    for chunk in chunks:
        with readable(chunk.file, refuse), open_regular(chunk.file) as file:
            file.seek(chunk.start)
            raw = file.read(chunk.size)
        tensor = torch_files().read_saved(io.BytesIO(raw), f"{chunk.file} (at byte {chunk.start:,})")
        if not isinstance(tensor, Unread):
            refuse(chunk.file, f"has a {type(tensor).__name__} for {name!r}, which should be a tensor")
        part = tensor.read()
        if part.extra.get("dtype", part.dtype) != dtype or part.shape != chunk.shape:
            refuse(chunk.file, f"has {part.dtype} {part.shape} for the chunk {chunk.offset} of {name!r}")
        extra = {key: value for key, value in part.extra.items() if key == "dtype"}
        item = part.data.nbytes // max(1, math.prod(part.shape))
        if array is None:
            array = np.zeros((*shape, item), np.uint8)
        place = tuple(slice(at, at + count) for at, count in zip(chunk.offset, chunk.shape, strict=True))
        array[place] = part.data.reshape(*part.shape, item)
    data = np.empty(0, np.uint8) if array is None else array.reshape(-1)
    return HostArray("U8" if extra else dtype, shape, data, "torch", extra)


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Made) else type(value).__name__


def _facts(value: Any, kind: str) -> dict[str, Any]:
    """Return the state of an object that must be of a class of torch.distributed.checkpoint."""
    if _kind(value) != _ROOM + kind or not isinstance(value.state, dict):
        raise ValueError(f"{_kind(value)!r:.100} in place of {kind}")
    facts: dict[str, Any] = value.state
    return facts


def _size(value: Any) -> tuple[int, ...]:
    return _lengths(*value.args)


def _lengths(numbers: Any) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r:.100} are not sizes")
    return tuple(numbers)


DISTRIBUTED = "torch.distributed.checkpoint"
"""Kind of a folder whose chunks are read, and found to be damaged, when they are needed."""
_INDEX = ".index.json"
_LARGEST_INDEX = 100_000_000
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = tuple(f"{name}{_INDEX}" for name in _WHOLE)


class Foreign(NamedTuple):
    """Weights as another program has written them, not read yet."""

    path: Path
    kind: str
    tree: dict[str, Any]
    """Names to arrays (`Unread`), or the names of branches to such trees and plain values."""


def open_foreign(path: Path, say: Callable[[str], None]) -> Foreign | None:
    """Open weights of another program; None where a path is neither a file nor a folder of weights.

    Read are a safetensors file, a file of torch.save (weights only), a folder as Hugging Face writes it
    (one file, or shards with an index), and a folder of torch.distributed.checkpoint (tensors only).  Only
    headers are read now, and files of torch.save as a whole, to compare their checksums.  Nothing in a file
    is run.
    """
    if (path / METADATA).exists():
        tree, names = open_folder(path)
        if names:
            some = ", ".join(names[:5])
            say(f"{path}: {len(names)} values that are not tensors are pickles, and are not read: {some}")
        return Foreign(path, DISTRIBUTED, tree)
    places = [path / name for name in (*_INDICES, *_WHOLE)] if path.is_dir() else [path]
    for file in places:
        if file.exists() and file.name.endswith(_INDEX):
            return Foreign(path, "shards with an index", _open_shards(file))
        if file.exists():
            return Foreign(path, *_open_file(file))
    return None


def _open_file(path: Path) -> tuple[str, dict[str, Any]]:
    with readable(path, refuse), open_regular(path) as file:
        start = file.read(9)
    if start[8:] == b"{":
        return "safetensors", dict(_open_safetensors(path))
    if not start.startswith((b"PK\x03\x04", b"\x80")):
        refuse(path, "is neither a safetensors file nor a file of torch.save", remedy="give one of these")
    tree = torch_files().read_saved(path, str(path))
    if isinstance(tree, Unread):
        return "torch.save", {"": tree}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        remedy = "save a dictionary, as model.state_dict() is"
        refuse(path, f"has a {type(tree).__name__} without names", remedy=remedy)
    return "torch.save", tree


def _open_shards(index: Path) -> dict[str, Any]:
    with readable(index, refuse):
        raw = read_regular(index, _LARGEST_INDEX)
    try:
        weight_map = parse_json(raw)["weight_map"]
        names: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            names.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(index, f'is not an index with a "weight_map" of names to files ({error!r:.200})', error)
    tree: dict[str, Any] = {}
    for file, expected in names.items():
        path = inside(index.parent, file, index)
        _, arrays = _open_file(path)
        if odd := sorted(expected ^ arrays.keys()):
            fault = "lacks" if odd[0] in expected else "has, beside what the index names,"
            refuse(path, f"{fault} {', '.join(odd[:3])}: the shards and {index.name} are of different models")
        tree |= arrays
    return {name: tree[name] for name in weight_map}


# ------------------------------------------------------------------------- safetensors files

LARGEST_HEADER = 100_000_000
"""Most bytes of a header; the limit of the safetensors library."""


def _open_safetensors(path: Path) -> dict[str, Unread]:
    """List the arrays of a file by name, from its header; each is read when it is needed."""
    with readable(path, refuse), open_regular(path) as file:
        spans = _spans(path, file)
    return {n: Unread(each.dtype, each.shape, partial(_read_at, path, n, each)) for n, each in spans.items()}


def _spans(path: Path, file: FileIO) -> dict[str, Span]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        refuse(path, f"is damaged: its header would have {length:,} bytes, and the file has {size:,}")
    try:
        spans, _ = parse_header(file.read(length), size - 8 - length)
        for span in spans.values():
            if not all(type(number) is int and number >= 0 for number in span.shape):
                raise ValueError(f"{span.shape!r:.200} has other numbers than sizes")
            if span.dtype not in ITEM_BYTES:
                raise ValueError(f"{span.dtype!r:.50} is not a known element type: {', '.join(ITEM_BYTES)}")
            if math.prod(span.shape) * ITEM_BYTES[span.dtype] != span.end - span.start:
                room = f"{span.end - span.start:,} bytes"
                raise ValueError(f"{span.dtype} {span.shape!r:.200} does not fit {room}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(path, f"is damaged: its header cannot be understood ({type(error).__name__}: {error})", error)
    data = 8 + length
    return {name: span._replace(start=data + span.start, end=data + span.end) for name, span in spans.items()}


def _read_at(path: Path, name: str, span: Span) -> HostArray:
    with readable(path, refuse), open_regular(path) as file:
        file.seek(span.start)
        data = np.fromfile(file, np.uint8, span.end - span.start)
    if len(data) < span.end - span.start:
        refuse(path, f"ended early while array {name!r} was read")
    return HostArray(span.dtype, span.shape, data, "")


def refuse(
    path: Path, problem: str, cause: Exception | None = None, remedy: str = "give another copy of it"
) -> NoReturn:
    raise CheckpointError(f"{path} {problem}; {remedy}") from cause


def inside(folder: Path, name: object, source: Path) -> Path:
    """Return the path of a file of a folder; `source` is the file that names it."""
    if not is_file_name(name):
        refuse(source, f"names the file {name!r:.200}, which is not a name in its folder and is not followed")
    return folder / name


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(size: int | str) -> int:
    """Return a size as a number of bytes: 500_000_000, "500MB" or "2GiB"."""
    match = re.fullmatch(r"(\d+) ?([A-Za-z]*)", str(size))
    if match is None or match[2].upper() not in _UNITS or int(match[1]) < 1:
        raise ConfigError(f'{size!r} is not a size: give bytes, or as in "500MB", "5GB", "2GiB"')
    return int(match[1]) * _UNITS[match[2].upper()]


def write_shards(folder: Path, arrays: Mapping[str, HostArray], most: int | None = None) -> None:
    """Write arrays as `model.safetensors`, or, of more than `most` bytes, as shards with an index."""
    shards = _divided(arrays, most)
    # some readers of Hugging Face refuse a file that does not name the framework
    about = {"format": "pt"} if {array.backend for array in arrays.values()} == {"torch"} else {}
    if len(shards) == 1:
        write_arrays(folder / "model.safetensors", arrays, about)
        return
    by_file = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}
    for name, shard in by_file.items():
        write_arrays(folder / name, {each: arrays[each] for each in shard}, about)
    total = sum(array.data.nbytes for array in arrays.values())
    weight_map = {each: name for name, shard in by_file.items() for each in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files.write_new(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n")


def _divided(arrays: Mapping[str, HostArray], most: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        size += array.data.nbytes
        if most is not None and shards[-1] and size > most:
            shards.append([])
            size = array.data.nbytes
        shards[-1].append(name)
    return shards
