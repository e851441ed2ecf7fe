"""Reading of a checkpoint, for a rank that resumes from it: all of it, some arrays, or regions of arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from everstep.checkpoint.array_file import ALL, damaged, read_arrays, verified_chunks
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.format import OWN, Checkpoint
from everstep.checkpoint.manifest import ARRAYS, FORMAT, MANIFEST, check_sizes, checked, read_body
from everstep.checkpoint.pieces import Assembly, Made
from everstep.contracts.state import HostArray, Json, Regions
from everstep.errors import CheckpointError
from everstep.state import Encoded, merge
from everstep.untrusted_files import parse_json

_PLAIN = ("epoch", "phase", "partial", "digest", "versions", "created", "segment", "meta")
"""Facts that a `Checkpoint` has as the manifest has them."""


def every(name: str) -> bool:
    """Want each array of a checkpoint."""
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

    Raises:
        DamagedCheckpointError: says which file is damaged, and how.
        CheckpointVersionError: another everstep wrote the checkpoint in a format that is not read here.
    """
    body = read_body(folder)
    check_sizes(folder, body)
    try:
        common, own = _Reader(folder, body, rank, wanted).trees(regions)
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


def read_own(folder: Path, rank: int) -> Encoded:
    """Read the own tree of a rank, and verify its bytes; an empty tree if the rank has none."""
    return _own(folder, read_body(folder), rank)


def read_all_own(folder: Path) -> list[Encoded]:
    """Read the own trees of all ranks, as `read_own` reads one; the manifest, which grows with them, once."""
    body = read_body(folder)
    return [_own(folder, body, rank) for rank in range(len(body["ranks"]))]


def _own(folder: Path, body: dict[str, Any], rank: int) -> Encoded:
    try:
        return _Reader(folder, body, rank).own_tree()
    except (KeyError, TypeError, ValueError) as error:
        _odd(folder, error)


def verify(folder: Path) -> None:
    """Verify every byte of a checkpoint, in little memory."""
    body = read_body(folder)
    if body["name"] != folder.name:
        damaged(folder / MANIFEST, f"belongs to {body['name']}")
    for name, record in body["files"].items():
        for _ in verified_chunks(folder / name, record):
            pass


def _odd(folder: Path, error: Exception) -> NoReturn:
    """Raise the error of a checkpoint whose checksums are right and whose content is not."""
    if isinstance(error, CheckpointError):
        raise error
    damaged(folder / MANIFEST, f"does not have the content of format {FORMAT} ({error!r})", error)


class _Reader:
    """Reader of a checkpoint for one rank: first all wanted arrays are told, then each file is read once.

    Args:
        folder: the checkpoint.
        body: the body of its manifest.
        rank: the rank.
        wanted: as in `read`.
    """

    def __init__(
        self, folder: Path, body: dict[str, Any], rank: int, wanted: Callable[[str], bool] = every
    ) -> None:
        self._folder, self._body, self._rank, self._wanted = folder, body, rank, wanted
        self._mine: str | None = body["ranks"][rank] if rank < len(body["ranks"]) else None
        self._assembly = Assembly()

    def trees(self, regions: Regions | None) -> tuple[Encoded, Encoded]:
        """Read the common tree and the rank's own."""
        common = self._assembly.add(self._described(self._body["arrays"]), ARRAYS, regions)
        structure, own = self._read_own_file()
        for name, record in self._body["files"].items():
            keys = self._assembly.keys[name]
            # of the other ranks' files one rank verifies all
            all_of_it = self._wanted is every and (self._rank == 0 or name == ARRAYS)
            if name != self._mine and (keys or all_of_it):
                put = partial(self._assembly.put, name)
                read_arrays(self._folder / name, record, keys, put, None if all_of_it else keys)
        return Encoded(self._body["structure"], _arrays(common)), Encoded(structure, _arrays(own))

    def own_tree(self) -> Encoded:
        """Read the rank's own tree alone."""
        structure, own = self._read_own_file()
        return Encoded(structure, _arrays(own))

    def _described(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the descriptions of the wanted arrays."""
        return {name: facts for name, facts in checked(arrays).items() if self._wanted(name)}

    def _read_own_file(self) -> tuple[Json, list[Made]]:
        """Read the file of the rank's own tree; returns the structure, and its arrays to be made."""
        if self._mine is None:
            return {}, []
        found = read_arrays(self._folder / self._mine, self._body["files"][self._mine], ALL)
        tree = parse_json(found.metadata[OWN])
        own = self._assembly.add(self._described(tree["arrays"]), self._mine)
        for key, data in found.arrays.items():
            self._assembly.put(self._mine, key, data)
        return tree["structure"], own


def _arrays(wanted: list[Made]) -> dict[str, HostArray]:
    return {made.name: made.array() for made in wanted}
