"""Format of a checkpoint on disk, written and read: a folder of files that are readable without everstep.

    manifest.json               {"checksum": ..., "body": {...}}, described below
    arrays.safetensors          the arrays of the common tree
    rank-00000.safetensors      the own tree of rank 0, if it has one; rank-00001.safetensors that of rank 1
    pieces-00000.safetensors    rank 0's pieces of arrays that the ranks hold together; and so on

The *common tree* is the same on all ranks, and written by the writer.  A rank's *own tree* is what only that
rank has: branches at places that the common tree leaves free.  A rank resumes from the common tree with its
own tree laid over it; a rank without one (in a checkpoint of fewer ranks) from the common tree.  On one
process all is common.  A tree is a *structure* (JSON, see `everstep.state`) and the *arrays* that it names.

The checksum of the manifest (xxh3_128) covers the exact bytes of the body.  The body has:

    format, name, step, epoch, phase, partial, digest, segment, created, versions, meta
                    facts, see `Checkpoint`
    structure       the structure of the common tree
    arrays          {NAME: {"dtype", "shape", "backend", "extra", "bytes", "xxh3_128"}} of the common tree;
                    the checksum is that of the array's bytes
    ranks           for each rank the file of its own tree, null for none; as many as the checkpoint has ranks
    files           {FILE: {"bytes", "xxh3_128"}}: size and checksum of every other file

Of several pieces each has "xxh3_128", too.  Who needs some of the arrays reads and verifies these alone, by
the checksums of the arrays or of their pieces.

Nothing is ever unpickled.

A rank's file is complete in itself, so that each rank writes one file and tells only its size and checksum.
The strings beside its arrays (safetensors' metadata) have `everstep`: JSON with `structure` and `arrays`.

An array lies whole, under its own name, in the file of its tree.  Or it lies in pieces, which any rank may
have written: its description then has "pieces", a list of {"file", "key", "offset", "shape"}.  A piece is the
array `key` of `file`; its first element is the element at index `offset` of the whole array.

An array from 4 KiB on that is equal to another one of its tree (tied weights) is written once: the
description of the second name has one piece, which is the whole array of the first name.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import xxhash

from everstep.checkpoint import files
from everstep.checkpoint.array_file import (
    Record,
    check_size,
    copy_file,
    raise_damaged,
    read_arrays,
    verified_chunks,
    write_arrays,
)
from everstep.checkpoint.pieces import Assembly, Piece, WholeArray, describe_arrays, lay_out
from everstep.checkpoint.retention import CheckpointName
from everstep.contracts.state import HostArray, Json, Regions
from everstep.errors import CheckpointError, CheckpointVersionError, RestoreError
from everstep.state import Encoded, merge
from everstep.untrusted_files import Count, Finite, is_file_name, misfits, parse_json, read_regular, readable
from everstep.version import __version__

FORMAT = 10
"""Version of these files and of the state tree in them, as written; raised with every change of the tree's
shape (tests/supervisor/test_forged_checkpoints.py).  No other is read."""

ARRAYS = "arrays.safetensors"
MANIFEST = "manifest.json"

_MANIFEST = re.compile(rb'\{"checksum":"([0-9a-f]{32})","body":(\{.*\})\}\n', re.DOTALL)


def pack_manifest(body: Mapping[str, Any]) -> bytes:
    text = json_bytes(body, f"checkpoint {body['name']}")
    return b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(text).encode(), text)


def json_bytes(value: Any, whose: str) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{whose}: JSON cannot hold its structure or meta ({error}); encode such values first"
        ) from error


def versions() -> dict[str, str]:
    by_package = {"everstep": __version__, "python": platform.python_version(), "numpy": np.__version__}
    if (torch := sys.modules.get("torch")) is not None:
        by_package["torch"] = str(torch.__version__)
    return by_package


def read_body(folder: Path) -> dict[str, Any]:
    """Read and verify the manifest alone, and return its body."""
    path = folder / MANIFEST
    with readable(path, raise_damaged):
        raw = read_regular(path)
    match = _MANIFEST.fullmatch(raw)
    if match is None:
        raise_damaged(path, "is empty" if not raw else f"is torn or overwritten ({len(raw)} bytes)")
    checksum = xxhash.xxh3_128_hexdigest(match[2])
    if checksum != match[1].decode():
        raise_damaged(path, f"has changed since it was written: checksum {match[1].decode()}, now {checksum}")
    try:
        body: dict[str, Any] = parse_json(match[2])
    except ValueError as error:
        raise_damaged(path, f"is not JSON ({error})", error)
    if not isinstance(body, dict) or not isinstance(body.get("versions", {}), dict):
        raise_damaged(path, "does not have the content of a manifest")
    _require_version(folder, body)
    if odd := _oddities(body):
        raise_damaged(path, f"does not have the content of format {FORMAT} ({', '.join(odd)})")
    return body


_BODY: dict[str, Any] = {
    "name": str,
    "step": Count,
    "epoch": Count,
    "phase": Literal["step", "epoch"],
    "partial": bool,
    "digest": str,
    "segment": Count,
    "created": str,
    "meta": dict[str, object] | None,
    "arrays": dict,
    "ranks": list[str | None],
    "files": dict[str, dict[str, object]],
}
"""Facts that every manifest must have, with their types."""

_RECORD: dict[str, Any] = {"bytes": Count, "xxh3_128": str}
_DESCRIPTION: dict[str, Any] = {
    "dtype": str,
    "shape": list[Count],
    "backend": str,
    "extra": dict,
    "bytes": Count,
}


def _oddities(body: Mapping[str, Any]) -> list[str]:
    if odd := [*misfits(body, _BODY)]:
        return odd
    records, rank_files = body["files"], body["ranks"]
    odd = [f"meta/{name}" for name in misfits(body["meta"] or {}, _META)]
    try:
        is_time = datetime.fromisoformat(body["created"]).timestamp() >= 0
    except (ValueError, OverflowError):
        is_time = False
    odd += ["created"] * (not is_time) + ["ranks"] * (not rank_files)
    odd += ["partial"] * (body["partial"] and not body["name"].startswith("epoch-"))
    # a name with a folder in it could lead anywhere
    odd += [n for n, record in records.items() if not is_file_name(n) or any(misfits(record, _RECORD))]
    return odd + [name for name in (ARRAYS, *rank_files) if name is not None and name not in records]


def _require_version(folder: Path, body: Mapping[str, Any]) -> None:
    number, writer = body.get("format"), body.get("versions", {}).get("everstep", "of its time")
    if number == FORMAT:
        return
    if isinstance(number, int) and number < FORMAT:
        remedy = f"continue with the everstep that wrote it ({writer}), or begin in another directory"
    else:
        remedy = f"install everstep {writer} or newer, or resume from an older checkpoint"
    raise CheckpointVersionError(
        f"checkpoint {folder} has format version {number}, this everstep ({__version__}) reads "
        f"only {FORMAT}: {remedy}"
    )


def check_sizes(folder: Path, body: Mapping[str, Any]) -> None:
    """Verify the cheap half: all files are there and have their sizes."""
    for name, record in body["files"].items():
        with readable(folder / name, raise_damaged):
            byte_count = (folder / name).stat().st_size
        check_size(folder / name, byte_count, record)


def size(body: Mapping[str, Any]) -> int:
    return sum(record["bytes"] for record in body["files"].values())


_META: dict[str, Any] = {
    "run?": str | None,
    "controllers?": dict,
    "options?": dict[str, dict[str, str]],
    "config?": dict[str, object] | None,
    "journal?": tuple[Count, Count] | None,
    "metrics?": dict[str, Finite],
    "metric_steps?": dict[str, Count] | None,
    "kept?": dict[str, list[str]],
    "open?": list[str] | None,
    "rollbacks?": list[tuple[dict[str, object], Count]] | None,
    "fingerprint?": dict[str, dict[str, str]] | None,
    "one_fingerprint?": bool,
    "data_ranks?": list[Count] | None,
    "interim?": bool,
    "metric?": str,
    "value?": Finite,
}
"""Types of the facts in `meta`; others may be anything."""


OWN = "everstep"

Phase = Literal["step", "epoch"]


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint as read from disk; every byte is verified.

    Attributes:
        epoch: the epoch at the snapshot, from 1; 0 before the first epoch.
        phase: "step", or "epoch" after an epoch's tail.
        partial: whether the epoch was ended before its pass over the data.
        structure: the state tree of the rank that reads, encoded as JSON by `everstep.state`.
        arrays: the arrays that `structure` names, or the wanted ones, each with memory of its own.
        common: the tree that all ranks have.
        own: the tree that the rank that reads has alone; its structure is {} if there is none.
        ranks, segment: numbers of the ranks and of the start that wrote the checkpoint, from 1.
        digest, meta: as given to the commit.
        created: time of the commit, in ISO form with zone.
    """

    path: Path
    name: CheckpointName
    epoch: int
    phase: Phase
    partial: bool
    structure: Json
    arrays: dict[str, HostArray]
    common: Encoded
    own: Encoded
    ranks: int
    digest: str
    created: str
    segment: int
    meta: Json

    @property
    def tree(self) -> Encoded:
        """The state tree of the rank that reads, with its arrays."""
        return Encoded(self.structure, self.arrays)

    @property
    def step(self) -> int:
        return self.name.step

    @property
    def origin(self) -> dict[str, Json]:
        """The run that has the checkpoint, and where: the fact `parent` of a run that begins with it."""
        meta: Any = self.meta or {}
        return {"run": meta.get("run"), "path": str(self.path.absolute()), "checkpoint": str(self.name)}


def copy(source: Path, folder: Path, facts: Mapping[str, Json] | None = None) -> int:
    """Copy a checkpoint into an existing folder, with other values of some facts; returns the bytes."""
    body = read_body(source)
    for name, record in body["files"].items():
        copy_file(source / name, folder / name, record)
    return _finish(folder, {**body, **(facts or {})})


class Written(NamedTuple):
    """Descriptions of the arrays of the common tree, and the record of their file."""

    described: dict[str, dict[str, Json]]
    record: Record


def write_common(folder: Path, common: Encoded) -> Written:
    """Write the arrays of the common tree that are whole."""
    here, descriptions = lay_out(ARRAYS, {n: a for n, a in common.arrays.items() if a.region is None})
    return Written(descriptions, write_arrays(folder / ARRAYS, here))


def write_own(folder: Path, rank: int, own: Encoded, common: Encoded) -> dict[str, Record]:
    """Write the file of a rank's own tree, unless the tree is empty; returns its record by its name."""
    if own.structure == {}:
        return {}
    try:
        merge(common, own)
    except RestoreError as error:
        raise CheckpointError(
            f"a rank cannot save as its own what all ranks have in common ({error}); give each path to one"
        ) from None
    file = rank_file(rank)
    here, arrays = lay_out(file, own.arrays)
    tree = json_bytes({"structure": own.structure, "arrays": arrays}, f"the tree of rank {rank}").decode()
    return {file: write_arrays(folder / file, here, {OWN: tree})}


def write_manifest(
    folder: Path,
    facts: Mapping[str, Json],
    common: Encoded,
    written: Written,
    ranks: Sequence[Mapping[str, Record]],
    pieces: Sequence[Mapping[str, Piece]] = (),
) -> int:
    """Write the manifest, which makes a checkpoint of the files in the folder, and sync the folder."""
    body: dict[str, Any] = {
        "format": FORMAT,
        **facts,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(),
        "structure": common.structure,
        "arrays": written.described | describe_arrays(common.arrays, pieces),
        "ranks": [name if (name := rank_file(rank)) in own else None for rank, own in enumerate(ranks)],
        "files": {ARRAYS: written.record} | {n: record for own in ranks for n, record in own.items()},
    }
    return _finish(folder, body)


def _finish(folder: Path, body: Mapping[str, Any]) -> int:
    manifest = pack_manifest(body)
    files.write_new(folder / MANIFEST, manifest)
    files.fsync_folder(folder)
    return size(body) + len(manifest)


_PLAIN = ("epoch", "phase", "partial", "digest", "created", "segment", "meta")
"""Facts that a `Checkpoint` has as the manifest has them."""


def every(name: str) -> bool:
    return True


def read(
    folder: Path, rank: int = 0, select: Callable[[str], bool] = every, regions: Regions | None = None
) -> Checkpoint:
    """Read a checkpoint as a rank resumes from it, and verify the very bytes that are returned.

    Rank 0 verifies every byte of the other ranks' files, too; each rank, the sizes of all files.

    Args:
        select: whether an array is read, by its name.  Of a part of the arrays, only the bytes that these
            need are read and verified; the structure is whole.
        regions: which part of an array of the common tree is kept in memory; None: all of each.
    """
    body = read_body(folder)
    check_sizes(folder, body)
    try:
        assembly = Assembly()
        arrays = assembly.add(_descriptions(body["arrays"], select), ARRAYS, regions)
        own, own_file = _own_tree(folder, body, rank, select), _own_file(body, rank)
        for name, record in body["files"].items():
            keys = assembly.keys[name]
            # of the other ranks' files one rank verifies all
            all_of_it = select is every and (rank == 0 or name == ARRAYS)
            if keys or (all_of_it and name != own_file):
                put = partial(assembly.put, name)
                read_arrays(folder / name, record, keys, put, None if all_of_it else keys)
        common = Encoded(body["structure"], _arrays(arrays))
        tree = merge(common, own) if own.structure else common
        return Checkpoint(
            path=folder,
            name=CheckpointName.parse(body["name"]),
            structure=tree.structure,
            arrays=tree.arrays,
            common=common,
            own=own,
            ranks=len(body["ranks"]),
            **{key: body[key] for key in _PLAIN},
        )
    except (KeyError, TypeError, ValueError) as error:
        _raise_odd(folder, error)


def read_own_trees(folder: Path) -> list[Encoded]:
    """Read the own trees of all ranks, and verify their bytes; the manifest is read once."""
    body = read_body(folder)
    try:
        return [_own_tree(folder, body, rank, every) for rank in range(len(body["ranks"]))]
    except (KeyError, TypeError, ValueError) as error:
        _raise_odd(folder, error)


def _own_file(body: dict[str, Any], rank: int) -> str | None:
    return body["ranks"][rank] if rank < len(body["ranks"]) else None


def _own_tree(folder: Path, body: dict[str, Any], rank: int, select: Callable[[str], bool]) -> Encoded:
    if (file := _own_file(body, rank)) is None:
        return Encoded({})
    content = read_arrays(folder / file, body["files"][file])
    tree, assembly = parse_json(content.metadata[OWN]), Assembly()
    arrays = assembly.add(_descriptions(tree["arrays"], select), file)
    for key, data in content.arrays.items():
        assembly.put(file, key, data)
    return Encoded(tree["structure"], _arrays(arrays))


def _descriptions(arrays: dict[str, Any], select: Callable[[str], bool]) -> dict[str, Any]:
    """Return the wanted descriptions; each array must have the facts that a `HostArray` needs."""
    for name, facts in arrays.items():
        if not isinstance(facts, dict) or any(misfits(facts, _DESCRIPTION)):
            raise KeyError(f"arrays/{name}")
    return {name: facts for name, facts in arrays.items() if select(name)}


def _arrays(assembled: list[WholeArray]) -> dict[str, HostArray]:
    return {array.name: array.array() for array in assembled}


def verify(folder: Path) -> None:
    """Verify every byte of a checkpoint, in little memory."""
    body = read_body(folder)
    if body["name"] != folder.name:
        raise_damaged(folder / MANIFEST, f"belongs to {body['name']}")
    for name, record in body["files"].items():
        for _ in verified_chunks(folder / name, record):
            pass


def _raise_odd(folder: Path, error: Exception) -> NoReturn:
    if isinstance(error, CheckpointError):
        raise error
    raise_damaged(folder / MANIFEST, f"does not have the content of format {FORMAT} ({error!r})", error)
