"""What is a rank's own in a run's state, and the state of a rank from the parts of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from everstep.checkpoint import Checkpoint, read_own_tree
from everstep.contracts.state import HostArray
from everstep.errors import RestoreError
from everstep.state import Encoded, capture, encode, isolated, leaves, merge, rekey, split
from everstep.state.parts import Path, children
from everstep.supervisor.saving.state_tree import random_parts


def own_paths(rank: int, user: Iterable[Path], streams: Iterable[Path]) -> frozenset[Path]:
    """Return the paths of what is a rank's own in its state tree, for `split`.

    Args:
        user: `UserState.rank_paths()`.
        streams: `Streams.rank_paths()`.
    """
    random = (("rng", name) for name in random_parts(rank))
    return frozenset({*random, *user, *streams, ("wall", "streams")})


def for_rank(
    checkpoint: Checkpoint, *, rank: int, size: int, per_rank: Collection[str]
) -> tuple[Checkpoint, str | None]:
    """Return a checkpoint with the state tree of one rank, whatever number of ranks wrote the checkpoint.

    Arrays in common go to the device that is current when they are decoded; only the writer keeps numbers of
    devices.  With another number of ranks, what is a rank's own and equal on all saved ranks is every rank's.
    A further rank has no random state: its generators are keyed by (seed, rank, step).

    Args:
        checkpoint: as `read_checkpoint(path, rank)` returns it.
        rank, size: number of this rank, and of all ranks now.
        per_rank: `UserState.per_rank` of the program.

    Returns:
        The checkpoint; and a sentence about what is not exact, equal on all ranks, or None.

    Raises:
        RestoreError: an entry is a rank's own in the checkpoint and not in the program; or the number of
            ranks has changed, and what is a rank's own cannot be given to others.  Names it.
    """
    own, note = checkpoint.own, None
    if checkpoint.ranks == size:
        _require_declared(_entries(own, checkpoint.common) - set(per_rank), checkpoint.path)
    else:
        own, note = _own_of_others(checkpoint, rank, size, set(per_rank))
    common = _on_current_devices(checkpoint.common) if rank else checkpoint.common
    whole = merge(common, own)
    return replace(checkpoint, structure=whole.structure, arrays=whole.arrays), note


def _own_of_others(checkpoint: Checkpoint, rank: int, size: int, per_rank: set[str]) -> tuple[Encoded, str]:
    """Make the own tree of a rank in another number of ranks, and say what is not exact."""
    saved = checkpoint.ranks
    changed = f"{checkpoint.path} is of {_ranks(saved)}, and this start has {_ranks(size)}"
    parts = [read_own_tree(checkpoint.path, each) for each in range(saved)]
    _require_none(_entries(parts[0], checkpoint.common) | per_rank, saved, changed)
    # random state apart: each rank has another, and further ranks are keyed
    rests = [split(part, [("rng",)])[0] for part in parts]
    _require_equal(rests, saved, changed)
    further = rank >= saved
    random = _keyed(checkpoint.common.structure, rank) if further else split(parts[rank], [("rng",)])[1]
    keyed = f"; ranks from {saved} on have generators keyed by (seed, rank, step)" if size > saved else ""
    note = f"{changed}: from here on the steps are not to the bit those of {_ranks(saved)}{keyed}"
    return merge(rests[0], random), note


def _on_current_devices(common: Encoded) -> Encoded:
    """Leave out the numbers of devices: all ranks would load onto the writer's, and not each onto its own."""

    def placed(array: HostArray) -> HostArray:
        device = array.extra.get("device")
        if device is None:
            return array
        return replace(array, extra={**array.extra, "device": device.partition(":")[0]})

    return Encoded(common.structure, {name: placed(array) for name, array in common.arrays.items()})


def _entries(own: Encoded, common: Encoded) -> set[str]:
    """Names of the user's entries that are a rank's own as a whole; of others a rank may have some keys."""
    found = []
    for tree in (own, common):
        branches = children(tree.structure) or {}
        found.append(set(children(branches.get("user")) or ()))
    return found[0] - found[1]


def _require_declared(names: Collection[str], where: object) -> None:
    if names:
        raise RestoreError(
            f"{where}: state entries that were each rank's own are not declared so now: {_listed(names)}; "
            f"declare them, as in state={{{min(names)!r}: everstep.PerRank(...)}}, or start in another "
            "directory"
        )


def _require_none(names: Collection[str], saved: int, changed: str) -> None:
    if names:
        raise RestoreError(
            f"{changed}: state entries that are each rank's own cannot be divided among other ranks: "
            f"{_listed(names)}; start with {_ranks(saved)}, or in another directory with init_from= and "
            "exclude=, which takes the other entries"
        )


def _require_equal(parts: Sequence[Encoded], saved: int, changed: str) -> None:
    """Refuse parts other than the first: a further rank cannot be given one of several."""
    first, *others = (dict(leaves(part)) for part in parts)
    for other in others:
        for path in sorted({*first, *other}):
            if bytes(first.get(path, b"")) != bytes(other.get(path, b"")):
                raise RestoreError(
                    f"{changed}: {path!r} is not the same on all saved ranks, so it cannot be given to other "
                    f"ranks; start with {_ranks(saved)}, or resume from a checkpoint at the end of an epoch"
                )


def _keyed(structure: Any, rank: int) -> Encoded:
    """Make the random state of a rank that the checkpoint does not know; nothing is drawn or changed here."""
    progress = structure["progress"]
    now, again = random_parts(rank)
    with isolated():
        rekey(progress["seed"], rank, progress["step"])
        return encode({"rng": {now: capture(), again: {}}})


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
