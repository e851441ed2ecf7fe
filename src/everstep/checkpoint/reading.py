"""Reading of a checkpoint, for a rank that resumes from it: all of it, some arrays, or regions of arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from everstep.checkpoint.array_file import damaged, read_arrays, verified_chunks
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.format import OWN, Checkpoint
from everstep.checkpoint.manifest import ARRAYS, FORMAT, MANIFEST, check_sizes, checked, read_body
from everstep.checkpoint.pieces import Assembly, Made
from everstep.contracts.state import HostArray, Regions
from everstep.errors import CheckpointError
from everstep.state import Encoded, merge
from everstep.untrusted_files import parse_json

_PLAIN = ("epoch", "phase", "partial", "digest", "versions", "created", "segment", "meta")
"""Facts that a `Checkpoint` has as the manifest has them."""


def every(name: str) -> bool:
    return True


def read(
    folder: Path,
    rank: int = 0,
    wanted: Callable[[str], bool] = every,
    regions: Regions | None = None,
) -> Checkpoint:
    """Read a checkpoint as a rank resumes from it, and verify the very bytes that are returned.

    Rank 0 verifies every byte of the other ranks' files, too; each rank, the sizes of all files.

    Args:
        wanted: whether an array is read, by its name.  Of a part of the arrays, only the bytes that these
            need are read and verified; the structure is whole.
        regions: which part of an array of the common tree is kept in memory; None: all of each.
    """
    body = read_body(folder)
    check_sizes(folder, body)
    try:
        assembly = Assembly()
        made = assembly.add(_described(body["arrays"], wanted), ARRAYS, regions)
        own, mine = _own_tree(folder, body, rank, wanted), _own_file(body, rank)
        for name, record in body["files"].items():
            keys = assembly.keys[name]
            # of the other ranks' files one rank verifies all
            all_of_it = wanted is every and (rank == 0 or name == ARRAYS)
            if keys or (all_of_it and name != mine):
                put = partial(assembly.put, name)
                read_arrays(folder / name, record, keys, put, None if all_of_it else keys)
        common = Encoded(body["structure"], _arrays(made))
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


def read_own_trees(folder: Path) -> list[Encoded]:
    """Read the own trees of all ranks, and verify their bytes; the manifest is read once."""
    body = read_body(folder)
    try:
        return [_own_tree(folder, body, rank, every) for rank in range(len(body["ranks"]))]
    except (KeyError, TypeError, ValueError) as error:
        _odd(folder, error)


def _own_file(body: dict[str, Any], rank: int) -> str | None:
    return body["ranks"][rank] if rank < len(body["ranks"]) else None


def _own_tree(folder: Path, body: dict[str, Any], rank: int, wanted: Callable[[str], bool]) -> Encoded:
    if (file := _own_file(body, rank)) is None:
        return Encoded({})
    content = read_arrays(folder / file, body["files"][file])
    tree, assembly = parse_json(content.metadata[OWN]), Assembly()
    made = assembly.add(_described(tree["arrays"], wanted), file)
    for key, data in content.arrays.items():
        assembly.put(file, key, data)
    return Encoded(tree["structure"], _arrays(made))


def _described(arrays: dict[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    return {name: facts for name, facts in checked(arrays).items() if wanted(name)}


def _arrays(wanted: list[Made]) -> dict[str, HostArray]:
    return {made.name: made.array() for made in wanted}


def verify(folder: Path) -> None:
    """Verify every byte of a checkpoint, in little memory."""
    body = read_body(folder)
    if body["name"] != folder.name:
        damaged(folder / MANIFEST, f"belongs to {body['name']}")
    for name, record in body["files"].items():
        for _ in verified_chunks(folder / name, record):
            pass


def _odd(folder: Path, error: Exception) -> NoReturn:
    if isinstance(error, CheckpointError):
        raise error
    damaged(folder / MANIFEST, f"does not have the content of format {FORMAT} ({error!r})", error)
