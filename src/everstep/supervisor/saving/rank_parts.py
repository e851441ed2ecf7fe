"""What is a rank's own in a run's state, and the state of a rank from the parts of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from everstep.checkpoint import Checkpoint
from everstep.contracts.group import Group
from everstep.errors import RestoreError
from everstep.state import merge
from everstep.state.parts import Path
from everstep.supervisor.saving.other_ranks import OtherRanks, on_current_devices, own_entries
from everstep.supervisor.saving.state_tree import random_parts, saved_data
from everstep.supervisor.saving.user_state import UserState


def own_paths(rank: int, user: Iterable[Path], streams: Iterable[Path]) -> frozenset[Path]:
    """Return the paths of what is a rank's own in its state tree, for `split`.

    Args:
        user: `UserState.rank_paths()`.
        streams: `Streams.rank_paths()`.
    """
    random = (("rng", name) for name in random_parts(rank))
    return frozenset({*random, *user, *streams, ("wall", "streams")})


def for_rank(checkpoint: Checkpoint, group: Group, user: UserState) -> Checkpoint:
    """Return a checkpoint with the state tree of one rank, whatever number of ranks wrote the checkpoint.

    Arrays in common go to the device that is current when they are decoded; only the writer keeps numbers of
    devices.  `OtherRanks` makes what is a rank's own in another number of ranks, or of parts of the data.

    Args:
        checkpoint: as `read_checkpoint(path, rank)` returns it.
        group: the ranks now.
        user: the state of the program.

    Raises:
        RestoreError: an entry is a rank's own in the checkpoint and not in the program; or the number of
            ranks has changed, and what is a rank's own cannot be given to others.  Names it.
    """
    if undeclared := own_entries(checkpoint.own, checkpoint.common) - user.per_rank:
        raise RestoreError(
            f"{checkpoint.path}: state entries that were each rank's own are not declared so now: "
            f"{', '.join(map(repr, sorted(undeclared)))}; declare them, as in "
            f"state={{{min(undeclared)!r}: everstep.PerRank(...)}}, or start in another directory"
        )
    common, own = checkpoint.common, checkpoint.own
    if saved_data(checkpoint).of != group.data.of:
        common, own = OtherRanks(checkpoint, group, user).trees()
    whole = merge(on_current_devices(common) if group.rank else common, own)
    return replace(checkpoint, structure=whole.structure, arrays=whole.arrays)
