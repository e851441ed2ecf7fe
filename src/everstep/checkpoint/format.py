"""Format of a checkpoint on disk: a folder of files that are readable without everstep.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from everstep.checkpoint import files
from everstep.checkpoint.array_file import Record, copy_file, write_arrays
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.manifest import (
    ARRAYS,
    FORMAT,
    MANIFEST,
    json_bytes,
    packed,
    read_body,
    size,
    versions,
)
from everstep.checkpoint.pieces import Piece, described, lay_out
from everstep.contracts.state import HostArray, Json
from everstep.errors import CheckpointError, RestoreError
from everstep.state import Encoded, merge

OWN = "everstep"

Phase = Literal["step", "epoch"]


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint as read from disk; every byte is verified.

    Attributes:
        path: folder of the checkpoint.
        name: name of the checkpoint; `name.step` is the step.
        epoch: the epoch at the snapshot, from 1; 0 before the first epoch.
        phase: "step", or "epoch" after an epoch's tail.
        partial: whether the epoch was ended before its pass over the data.
        structure: the state tree of the rank that reads, encoded as JSON by `everstep.state`.
        arrays: the arrays that `structure` names, or the wanted ones, each with memory of its own.
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
    here, described = lay_out(ARRAYS, {n: a for n, a in common.arrays.items() if a.region is None})
    return Written(described, write_arrays(folder / ARRAYS, here))


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
        "arrays": written.described | described(common.arrays, pieces),
        "ranks": [name if (name := rank_file(rank)) in own else None for rank, own in enumerate(ranks)],
        "files": {ARRAYS: written.record} | {n: record for own in ranks for n, record in own.items()},
    }
    return _finish(folder, body)


def _finish(folder: Path, body: Mapping[str, Any]) -> int:
    manifest = packed(body)
    files.write_new(folder / MANIFEST, manifest)
    files.fsync_folder(folder)
    return size(body) + len(manifest)
