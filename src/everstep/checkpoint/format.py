"""Format of a checkpoint on disk: a folder with two files, readable without everstep.

`arrays.safetensors` holds the arrays' bytes.  `manifest.json` is {"checksum": ..., "body": {...}}.  The
checksum (xxh3_128) covers the exact bytes of the body, and the body has the checksum and the size of
`arrays.safetensors`, so no bit of either file can change unnoticed.  Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, total_ordering
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import xxhash

from everstep.checkpoint import files
from everstep.contracts.state import HostArray, Json
from everstep.errors import CheckpointError, CheckpointVersionError, ConfigError, DamagedCheckpointError
from everstep.untrusted_files import open_regular, parse_json, read_regular

FORMAT = 5
"""Version of these files and of the state tree in them, as written; raised with every change of the tree's
shape (tests/supervisor/test_tree_shape.py).  Version 1 was never released."""
OLDEST = 3
"""Oldest version that is read."""

ARRAYS = "arrays.safetensors"
MANIFEST = "manifest.json"

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes per element, by safetensors' name of the element type."""

Phase = Literal["step", "epoch"]
"""Kind of the boundary at which a snapshot is taken: after a step, or after an epoch's tail."""

_CHUNK = 1 << 20  # bytes hashed and written (read) at a time: small enough to stay in the processor's cache
_NAME = re.compile(r"(?:epoch-(\d{4,})-)?step-(\d{8,})")
_MANIFEST = re.compile(rb'\{"checksum":"([0-9a-f]{32})","body":(\{.*\})\}\n', re.DOTALL)


@total_ordering
@dataclass(frozen=True)
class CheckpointName:
    """Name of a checkpoint: "step-00000120", or "epoch-0003-step-00000120" after an epoch's tail.

    Names sort from older to newer: by step; of two at one step, the checkpoint after the epoch is newer.

    Attributes:
        step: number of complete steps, from 0.
        epoch: the epoch that is over, 0 before the first epoch; None inside an epoch.
    """

    step: int
    epoch: int | None = None

    @classmethod
    def parse(cls, text: str) -> CheckpointName:
        """Parse what `str` returns.

        Raises:
            ConfigError: `text` is not a checkpoint's name.
        """
        match = _NAME.fullmatch(text)
        name = None if match is None else cls(int(match[2]), None if match[1] is None else int(match[1]))
        if name is None or str(name) != text:
            raise ConfigError(
                f"{text!r} is not a checkpoint's name; give one such as 'step-00000120' or "
                "'epoch-0003-step-00000120'"
            )
        return name

    @classmethod
    def matches(cls, text: str) -> bool:
        """Whether `text` is a checkpoint's name."""
        try:
            cls.parse(text)
        except ConfigError:
            return False
        return True

    def __str__(self) -> str:
        step = f"step-{self.step:08d}"
        return step if self.epoch is None else f"epoch-{self.epoch:04d}-{step}"

    def __lt__(self, other: CheckpointName) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[int, int]:
        return self.step, -1 if self.epoch is None else self.epoch


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint as read from disk; every byte is verified.

    Attributes:
        path: folder of the checkpoint.
        name: name of the checkpoint; `name.step` is the step.
        epoch: the epoch at the snapshot, from 1; 0 before the first epoch.
        phase: kind of the boundary: "step", or "epoch" after an epoch's tail.
        partial: whether the epoch was ended before its pass over the data.
        structure: the state tree, encoded as JSON by `everstep.state`.
        arrays: the arrays to which `structure` refers, each with memory of its own.
        digest: digest of the state, as given to the commit.
        versions: versions of everstep, python, numpy and torch that wrote the checkpoint.
        created: time of the commit, in ISO form with zone.
        segment: number of the start that wrote the checkpoint, from 1.
        meta: further facts given to the commit.
    """

    path: Path
    name: CheckpointName
    epoch: int
    phase: Phase
    partial: bool
    structure: Json
    arrays: dict[str, HostArray]
    digest: str
    versions: dict[str, str]
    created: str
    segment: int
    meta: Json

    @property
    def step(self) -> int:
        return self.name.step


# ------------------------------------------------------------------------------------- writing


def write(folder: Path, facts: Mapping[str, Json], arrays: Mapping[str, HostArray]) -> int:
    """Write both files of a checkpoint into an existing folder; sync the files and the folder.

    Args:
        facts: the manifest's body without `format`, `arrays`, `files`, `versions` and `created`.

    Returns:
        Number of bytes of both files together.

    Raises:
        CheckpointError: an array's bytes do not fit its shape, or `facts` are not JSON.
        OSError: the disk failed.
    """
    file = write_arrays(folder / ARRAYS, arrays)
    described = {
        name: {
            "dtype": a.dtype,
            "shape": list(a.shape),
            "backend": a.backend,
            "extra": a.extra,
            "bytes": a.data.nbytes,
        }
        for name, a in ((name, arrays[name]) for name in _ordered(arrays))
    }
    made = {"versions": versions(), "created": datetime.now(UTC).isoformat()}
    manifest = _manifest({"format": FORMAT, **facts, **made, "arrays": described, "files": {ARRAYS: file}})
    files.write_new(folder / MANIFEST, manifest)
    files.fsync_folder(folder)
    return int(file["bytes"]) + len(manifest)


def _manifest(body: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {body['name']}: JSON cannot hold its structure or meta ({error}); encode such "
            "values first"
        ) from error
    return b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(text).encode(), text)


def _ordered(arrays: Mapping[str, HostArray]) -> list[str]:
    """Sort the names of arrays as in the file: the widest elements first, so that all are aligned."""
    return sorted(arrays, key=lambda name: (-ITEM_BYTES.get(arrays[name].dtype, 1), name))


def write_arrays(path: Path, arrays: Mapping[str, HostArray]) -> dict[str, Any]:
    """Write a safetensors file; returns its size and checksum for the manifest."""
    arrays = {name: arrays[name] for name in _ordered(arrays)}
    header = _header(arrays)
    digest = xxhash.xxh3_128()
    with files.create(path) as out:
        for data in (memoryview(header), *(a.data.data for a in arrays.values())):
            for chunk in _chunks(data):
                digest.update(chunk)
                files.write(out, chunk)
        size = out.tell()
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def _header(arrays: Mapping[str, HostArray]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for name, array in arrays.items():
        end = start + array.data.nbytes
        entries[name] = {"dtype": array.dtype, "shape": _shape(name, array), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shape(name: str, array: HostArray) -> list[int]:
    """Return the shape for the header; of elements unknown to safetensors, the number of bytes."""
    items = ITEM_BYTES.get(array.dtype)
    if items is not None and math.prod(array.shape) * items == array.data.nbytes and name != "__metadata__":
        return list(array.shape)
    if array.dtype == "U8" and "dtype" in array.extra:
        return [array.data.nbytes]
    raise CheckpointError(
        f"array {name!r} cannot be written: dtype {array.dtype!r} and shape {array.shape} do not fit its "
        f"{array.data.nbytes} bytes; known dtypes: {', '.join(sorted(ITEM_BYTES))}"
    )


def _chunks(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))


@cache
def _own_version() -> str:
    """Return the version of the running everstep; a later upgrade on disk does not change the answer."""
    return version("everstep")


def versions() -> dict[str, str]:
    """Return the versions of everstep, Python and NumPy, and of torch if the program uses torch."""
    found = {"everstep": _own_version(), "python": platform.python_version(), "numpy": np.__version__}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = str(torch.__version__)
    return found


# ------------------------------------------------------------------------------------- reading


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint, and verify the very bytes that are returned.

    Raises:
        DamagedCheckpointError: says which file is damaged, and how.
        CheckpointVersionError: another everstep wrote the checkpoint in a format that is not read here.
    """
    body = read_body(folder)
    try:
        return Checkpoint(
            path=folder,
            name=CheckpointName.parse(body["name"]),
            arrays=_read_arrays(folder / ARRAYS, body["arrays"], body["files"][ARRAYS]),
            **{key: body[key] for key in _PLAIN},
        )
    except (KeyError, TypeError, ConfigError) as error:
        _damaged(folder / MANIFEST, f"does not have the content of format {FORMAT} ({error!r})", error)


_PLAIN = ("epoch", "phase", "partial", "structure", "digest", "versions", "created", "segment", "meta")


def verify(folder: Path) -> None:
    """Verify every byte of a checkpoint, in little memory.

    Raises:
        DamagedCheckpointError, CheckpointVersionError: as `read`.
    """
    body, path = read_body(folder), folder / ARRAYS
    try:
        name, record = body["name"], body["files"][ARRAYS]
    except (KeyError, TypeError) as error:
        _damaged(folder / MANIFEST, f"does not have the content of format {FORMAT} ({error!r})", error)
    if name != folder.name:
        _damaged(folder / MANIFEST, f"belongs to {name}")
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    try:
        with open_regular(path) as file:
            _check_size(path, os.fstat(file.fileno()).st_size, record["bytes"])
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        _unreadable(path, error)
    _check_digest(path, digest, record)


def read_body(folder: Path) -> dict[str, Any]:
    """Read and verify the manifest alone, and return its body.

    Raises:
        DamagedCheckpointError, CheckpointVersionError: as `read`.
    """
    path = folder / MANIFEST
    try:
        raw = read_regular(path)
    except OSError as error:
        _unreadable(path, error)
    match = _MANIFEST.fullmatch(raw)
    if match is None:
        _damaged(path, "is empty" if not raw else f"is torn or overwritten ({len(raw)} bytes)")
    found = xxhash.xxh3_128_hexdigest(match[2])
    if found != match[1].decode():
        _damaged(path, f"has changed since it was written: checksum {match[1].decode()}, now {found}")
    try:
        body: dict[str, Any] = parse_json(match[2])
    except ValueError as error:
        _damaged(path, f"is not JSON ({error})", error)
    if not isinstance(body, dict) or not isinstance(body.get("versions", {}), dict):
        _damaged(path, "does not have the content of a manifest")
    _require_version(folder, body)
    odd = [name for name, kind in _KINDS.items() if not isinstance(body.get(name), kind)]
    if odd or not _is_record(body["files"].get(ARRAYS)):
        _damaged(path, f"does not have the content of format {FORMAT} ({', '.join(odd) or ARRAYS})")
    return body


_KINDS = {
    "name": str,
    "epoch": int,
    "phase": str,
    "partial": bool,
    "digest": str,
    "created": str,
    "segment": int,
    "meta": dict | None,
    "arrays": dict,
    "files": dict,
}
"""Facts that every manifest must have, with their types."""


def _is_record(value: object) -> bool:
    """Whether a value has the length and the checksum of a file."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("bytes"), int)
        and isinstance(value.get("xxh3_128"), str)
    )


def _require_version(folder: Path, body: Mapping[str, Any]) -> None:
    written, writer = body.get("format"), body.get("versions", {}).get("everstep", "of its time")
    if isinstance(written, int) and OLDEST <= written <= FORMAT:
        return
    if isinstance(written, int) and written < OLDEST:
        remedy = f"continue with the everstep that wrote it ({writer}), or begin in another directory"
    else:
        remedy = f"install everstep {writer} or newer, or resume from an older checkpoint"
    reads = f"{OLDEST} to {FORMAT}" if OLDEST < FORMAT else f"only {FORMAT}"
    raise CheckpointVersionError(
        f"checkpoint {folder} has format version {written}, this everstep ({version('everstep')}) reads "
        f"{reads}: {remedy}"
    )


def check_sizes(folder: Path, body: Mapping[str, Any]) -> None:
    """Verify the cheap half: `arrays.safetensors` is there and has its size.

    Raises:
        DamagedCheckpointError: the file is missing or has another size.
    """
    path = folder / ARRAYS
    try:
        found = path.stat().st_size
    except OSError as error:
        _unreadable(path, error)
    _check_size(path, found, body["files"][ARRAYS]["bytes"])


def _read_arrays(path: Path, described: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, HostArray]:
    """Read each array into memory of its own; the manifest lists arrays in the order of the file."""
    if odd := [name for name, facts in described.items() if not _is_described(facts)]:
        _damaged(path.with_name(MANIFEST), f"does not have the content of format {FORMAT} (arrays/{odd[0]})")
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_size(path, size, record["bytes"])
            digest = xxhash.xxh3_128()
            header = size - sum(facts["bytes"] for facts in described.values())
            if header < 0:
                _damaged(path, f"is smaller ({size} bytes) than the arrays that the manifest lists")
            _read_into(file, np.empty(header, np.uint8), digest)
            arrays = {
                name: HostArray(
                    dtype=facts["dtype"],
                    shape=tuple(facts["shape"]),
                    data=_read_into(file, np.empty(facts["bytes"], np.uint8), digest),
                    backend=facts["backend"],
                    extra=facts["extra"],
                )
                for name, facts in described.items()
            }
    except OSError as error:
        _unreadable(path, error)
    _check_digest(path, digest, record)
    return arrays


def _is_described(facts: object) -> bool:
    """Whether a value has the facts that a `HostArray` needs."""
    return (
        isinstance(facts, dict)
        and isinstance(facts.get("dtype"), str)
        and isinstance(facts.get("backend"), str)
        and isinstance(facts.get("extra"), dict)
        and all(map(_is_length, [facts.get("bytes"), *_listed(facts.get("shape"))]))
    )


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [None]


def _is_length(value: object) -> bool:
    return type(value) is int and value >= 0


def _read_into(file: FileIO, data: np.ndarray[Any, np.dtype[np.uint8]], digest: xxhash.xxh3_128) -> Any:
    for chunk in _chunks(data.data):
        rest = chunk
        while rest:
            count = file.readinto(rest)
            if not count:
                _damaged(Path(str(file.name)), "ended early while it was read")
            rest = rest[count:]
        digest.update(chunk)
    return data


def _check_size(path: Path, found: int, written: int) -> None:
    if found != written:
        _damaged(path, f"has {found} bytes, {written} were written" if found else "is empty")


def _check_digest(path: Path, found: xxhash.xxh3_128, record: Mapping[str, Any]) -> None:
    if found.hexdigest() != record["xxh3_128"]:
        _damaged(
            path,
            f"has changed since it was written, or belongs to another checkpoint: checksum "
            f"{record['xxh3_128']}, now {found.hexdigest()}",
        )


def _damaged(path: Path, how: str, cause: Exception | None = None) -> NoReturn:
    raise DamagedCheckpointError(f"checkpoint {path.parent.name} is damaged: {path} {how}") from cause


def _unreadable(path: Path, error: OSError) -> NoReturn:
    how = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    _damaged(path, how, error)


# ------------------------------------------------------------------------------------- finite


_NON_FINITE: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000, 0x7F80_0000),
    "C64": (np.uint32, 0x7F80_0000, 0x7F80_0000),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),  # no infinity, one NaN per sign
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),  # the one NaN is "minus zero"
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
}
"""Type, mask and pattern by dtype: an element is NaN or infinite if its bits & mask == pattern."""


def finite(array: HostArray) -> bool:
    """Whether all elements are finite, of complex numbers both parts; looks at the bytes, chunk by chunk."""
    name = str(array.extra.get("dtype", "")).removeprefix("torch.") if array.dtype == "U8" else ""
    rule = _NON_FINITE.get("F16" if name == "complex32" else array.dtype)
    chunks = _chunks(array.data.data)
    if rule is not None:
        kind, mask, pattern = rule
        return not any(((np.frombuffer(c, kind) & kind(mask)) == kind(pattern)).any() for c in chunks)
    wide = _numpy_float(name)
    return wide is None or all(np.isfinite(np.frombuffer(c, wide)).all() for c in chunks)


def _numpy_float(name: str) -> np.dtype[Any] | None:
    """Return NumPy's float or complex dtype of that name; None for other names."""
    try:
        dtype = np.dtype(name or "u1")
    except (TypeError, ValueError):
        return None
    return dtype if dtype.kind in "fc" else None
