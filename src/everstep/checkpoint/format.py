"""Format of a checkpoint on disk: a folder of files that are readable without everstep.

    manifest.json               {"checksum": ..., "body": {...}}, described below
    arrays.safetensors          the arrays of the common tree
    rank-00000.safetensors      the own tree of rank 0, if it has one; rank-00001.safetensors that of rank 1

The *common tree* is the same on all ranks, and written by the writer.  A rank's *own tree* is what only that
rank has: branches at places that the common tree leaves free.  A rank resumes from the common tree with its
own tree laid over it; a rank without one (in a checkpoint of fewer ranks) from the common tree.  On one
process all is common.  A tree is a *structure* (JSON, see `everstep.state`) and the *arrays* that it names.

The checksum of the manifest (xxh3_128) covers the exact bytes of the body.  The body has:

    format, name, step, epoch, phase, partial, digest, segment, created, versions, meta
                    facts, see `Checkpoint`
    structure       the structure of the common tree
    arrays          {NAME: {"dtype", "shape", "backend", "extra", "bytes"}} of the common tree
    ranks           for each rank the file of its own tree, null for none; as many as the checkpoint has ranks
    files           {FILE: {"bytes", "xxh3_128"}}: size and checksum of every other file

So no bit of any file can change unnoticed, and nobody needs to list the folder.  Nothing is ever unpickled.

A rank's file is complete in itself, so that each rank writes one file and tells only its size and checksum.
The strings beside its arrays (safetensors' metadata) have `everstep`: JSON with `structure` and `arrays`.

An array lies whole, under its own name, in the file of its tree.  Or it lies in pieces, which any rank may
have written: its description then has "pieces", a list of {"file", "key", "offset", "shape"}.  A piece is the
array `key` of `file`; its first element is the element at index `offset` of the whole array.  Pieces are
read; nothing writes them so far.

A file that other checkpoints use, too, lies outside the folder: its record then has "shared", the path of its
folder from this one ("../../shared").  So far such a checkpoint is neither written nor read, but refused.

Formats 3 to 5 have neither `ranks` nor pieces, and arrays.safetensors is their only file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from everstep.checkpoint import files
from everstep.checkpoint.array_file import (
    ALL,
    ArrayFile,
    Bytes,
    Record,
    copy_file,
    damaged,
    ordered,
    read_arrays,
    verify_file,
    write_arrays,
)
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.manifest import (
    ARRAYS,
    FORMAT,
    MANIFEST,
    check_sizes,
    json_bytes,
    packed,
    read_body,
    size,
    versions,
)
from everstep.contracts.state import HostArray, Json
from everstep.errors import CheckpointError, RestoreError
from everstep.state import Encoded, merge
from everstep.untrusted_files import parse_json

OWN = "everstep"
"""Name of the string that has a rank's own tree."""

Phase = Literal["step", "epoch"]
"""Kind of the boundary at which a snapshot is taken: after a step, or after an epoch's tail."""


def rank_file(rank: int) -> str:
    """Name of the file of a rank's own tree."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint as read from disk; every byte is verified.

    Attributes:
        path: folder of the checkpoint.
        name: name of the checkpoint; `name.step` is the step.
        epoch: the epoch at the snapshot, from 1; 0 before the first epoch.
        phase: kind of the boundary: "step", or "epoch" after an epoch's tail.
        partial: whether the epoch was ended before its pass over the data.
        structure: the state tree of the rank that reads, encoded as JSON by `everstep.state`.
        arrays: the arrays to which `structure` refers, each with memory of its own.
        common: the tree that all ranks have.
        own: the tree that the rank that reads has alone; its structure is {} if there is none.
        ranks: number of ranks that wrote the checkpoint.
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
    common: Encoded
    own: Encoded
    ranks: int
    digest: str
    versions: dict[str, str]
    created: str
    segment: int
    meta: Json

    @property
    def step(self) -> int:
        return self.name.step


# ------------------------------------------------------------------------------------- writing


def write(
    folder: Path,
    facts: Mapping[str, Json],
    common: Encoded,
    own: Encoded | None = None,
    others: Path | None = None,
) -> int:
    """Write all files of a checkpoint into an existing folder, in one process; sync the files and the folder.

    Args:
        facts: the manifest's body without what this module adds.
        own: the own tree of rank 0.
        others: a checkpoint whose files of the other ranks are copied.

    Returns:
        Number of bytes of all files together.

    Raises:
        CheckpointError: an array's bytes do not fit its shape, the trees overlap, or `facts` are not JSON.
        OSError: the disk failed.
    """
    file = write_common(folder, common)
    ranks = [write_own(folder, 0, own or Encoded({}), common)]
    if others is not None:
        ranks += _copies(others, folder)
    return write_manifest(folder, facts, common, file, ranks)


def _copies(source: Path, folder: Path) -> list[dict[str, Record]]:
    """Copy the files of all ranks but rank 0; returns what `write_own` has returned for each."""
    body = read_body(source)
    ranks = [{} if name is None else {name: body["files"][name]} for name in body["ranks"][1:]]
    for name, record in (item for own in ranks for item in own.items()):
        copy_file(source / name, folder / name, record)
    return ranks


def write_common(folder: Path, common: Encoded) -> Record:
    """Write the arrays of the common tree; returns the file's record."""
    return write_arrays(folder / ARRAYS, common.arrays)


def write_own(folder: Path, rank: int, own: Encoded, common: Encoded) -> dict[str, Record]:
    """Write the file of a rank's own tree, unless the tree is empty; returns its record by its name.

    Raises:
        CheckpointError: the trees overlap, or an array's bytes do not fit its shape.
        OSError: the disk failed.
    """
    if own.structure == {}:
        return {}
    try:
        merge(common, own)
    except RestoreError as error:
        raise CheckpointError(
            f"a rank cannot save as its own what all ranks have in common ({error}); give each path to one"
        ) from None
    tree = json_bytes(
        {"structure": own.structure, "arrays": _described(own.arrays)}, f"the tree of rank {rank}"
    )
    return {rank_file(rank): write_arrays(folder / rank_file(rank), own.arrays, {OWN: tree.decode()})}


def write_manifest(
    folder: Path,
    facts: Mapping[str, Json],
    common: Encoded,
    file: Record,
    ranks: Sequence[Mapping[str, Record]],
) -> int:
    """Write the manifest, which makes a checkpoint of the files in the folder, and sync the folder.

    Args:
        file: the record of the common tree's arrays.
        ranks: what `write_own` returned on each rank.

    Returns:
        Number of bytes of all files together.
    """
    written = {ARRAYS: file, **{name: record for own in ranks for name, record in own.items()}}
    body: dict[str, Any] = {
        "format": FORMAT,
        **facts,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(),
        "structure": common.structure,
        "arrays": _described(common.arrays),
        "ranks": [next(iter(own), None) for own in ranks],
        "files": written,
    }
    manifest = packed(body)
    files.write_new(folder / MANIFEST, manifest)
    files.fsync_folder(folder)
    return size(body) + len(manifest)


def _described(arrays: Mapping[str, HostArray]) -> dict[str, dict[str, Json]]:
    return {
        name: {
            "dtype": a.dtype,
            "shape": list(a.shape),
            "backend": a.backend,
            "extra": a.extra,
            "bytes": a.data.nbytes,
        }
        for name, a in ((name, arrays[name]) for name in ordered(arrays))
    }


# ------------------------------------------------------------------------------------- reading


def read(folder: Path, rank: int = 0) -> Checkpoint:
    """Read a checkpoint as a rank resumes from it, and verify the very bytes that are returned.

    Rank 0 verifies every byte of the other ranks' files, too; each rank, the sizes of all files.

    Raises:
        DamagedCheckpointError: says which file is damaged, and how.
        CheckpointVersionError: another everstep wrote the checkpoint in a format that is not read here.
    """
    body = read_body(folder)
    check_sizes(folder, body)
    try:
        common, own = _trees(folder, body, rank)
        whole = merge(common, own) if own.structure else common
        return Checkpoint(
            path=folder,
            name=CheckpointName.parse(body["name"]),
            structure=whole.structure,
            arrays=whole.arrays,
            common=common,
            own=own,
            ranks=len(body["ranks"]),
            **{key: body[key] for key in _PLAIN},
        )
    except (KeyError, TypeError, ValueError) as error:
        _odd(folder, error)


def _odd(folder: Path, error: Exception) -> NoReturn:
    """Raise the error of a checkpoint whose checksums are right and whose content is not."""
    if isinstance(error, CheckpointError):
        raise error
    damaged(folder / MANIFEST, f"does not have the content of format {FORMAT} ({error!r})", error)


_PLAIN = ("epoch", "phase", "partial", "digest", "versions", "created", "segment", "meta")


def _trees(folder: Path, body: dict[str, Any], rank: int) -> tuple[Encoded, Encoded]:
    """Read the common tree and a rank's own."""
    described = _checked(body["arrays"])
    mine = body["ranks"][rank] if rank < len(body["ranks"]) else None
    wanted: dict[str, set[str]] = defaultdict(set, {ARRAYS: set()})
    for name, facts in described.items():
        for piece in _pieces(name, facts):
            wanted[piece["file"]].add(piece["key"])
    found = {
        name: read_arrays(folder / name, record, ALL if name == mine else wanted[name])
        for name, record in body["files"].items()
        if rank == 0 or name == mine or name in wanted
    }
    common = Encoded(body["structure"], {name: _array(name, described[name], found) for name in described})
    return common, Encoded({}) if mine is None else _own(mine, found)


def read_own(folder: Path, rank: int) -> Encoded:
    """Read the own tree of a rank, and verify its bytes; an empty tree if the rank has none.

    Raises:
        DamagedCheckpointError, CheckpointVersionError: as `read`.
    """
    body = read_body(folder)
    mine = body["ranks"][rank] if rank < len(body["ranks"]) else None
    if mine is None:
        return Encoded({})
    try:
        return _own(mine, {mine: read_arrays(folder / mine, body["files"][mine], ALL)})
    except (KeyError, TypeError, ValueError) as error:
        _odd(folder, error)


def _own(mine: str, found: Mapping[str, ArrayFile]) -> Encoded:
    tree = parse_json(found[mine].metadata[OWN])
    arrays = {name: _array(name, facts, found, mine) for name, facts in _checked(tree["arrays"]).items()}
    return Encoded(tree["structure"], arrays)


def _checked(described: dict[str, Any]) -> dict[str, Any]:
    """Require that all arrays are described as a `HostArray` needs it."""
    if odd := [name for name, facts in described.items() if not _is_described(facts)]:
        raise KeyError(f"arrays/{odd[0]}")
    return described


def _pieces(name: str, facts: Mapping[str, Any], file: str = ARRAYS) -> list[dict[str, Any]]:
    """Return the pieces of an array; an array that lies whole is one piece."""
    shape = facts["shape"]
    whole = [{"file": file, "key": name, "offset": [0] * len(shape), "shape": shape}]
    pieces: list[dict[str, Any]] = facts.get("pieces", whole)
    return pieces


def _array(
    name: str, facts: Mapping[str, Any], found: Mapping[str, ArrayFile], file: str = ARRAYS
) -> HostArray:
    pieces = _pieces(name, facts, file)
    parts = [found[piece["file"]].arrays[piece["key"]] for piece in pieces]
    if sum(part.nbytes for part in parts) != facts["bytes"]:
        raise ValueError(f"arrays/{name}: not the {facts['bytes']} bytes that it should have")
    data = _joined(facts, pieces, parts) if "pieces" in facts else parts[0]
    return HostArray(facts["dtype"], tuple(facts["shape"]), data, facts["backend"], facts["extra"])


def _joined(facts: Mapping[str, Any], pieces: list[dict[str, Any]], parts: list[Bytes]) -> Bytes:
    """Put pieces together, as bytes in C order."""
    shape = facts["shape"]
    item = facts["bytes"] // max(1, math.prod(shape))
    # zeros: where nothing is put, no old memory may show
    whole = np.zeros((*shape, item), np.uint8)
    for piece, part in zip(pieces, parts, strict=True):
        spans = [(at, at + count) for at, count in zip(piece["offset"], piece["shape"], strict=True)]
        if not all(0 <= start <= end <= most for (start, end), most in zip(spans, shape, strict=True)):
            raise ValueError(f"the piece {piece} is not inside the shape {shape}")
        whole[tuple(slice(*span) for span in spans)] = part.reshape(*piece["shape"], item)
    return whole.reshape(-1)


def verify(folder: Path) -> None:
    """Verify every byte of a checkpoint, in little memory.

    Raises:
        DamagedCheckpointError, CheckpointVersionError: as `read`.
    """
    body = read_body(folder)
    if body["name"] != folder.name:
        damaged(folder / MANIFEST, f"belongs to {body['name']}")
    for name, record in body["files"].items():
        verify_file(folder / name, record)


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
