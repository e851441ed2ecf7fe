"""The state tree of a run: what is written, and what a reader requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from everstep.checkpoint import Checkpoint
from everstep.errors import RestoreError
from everstep.state import Encoded, capture, decode
from everstep.supervisor.progress import Progress

WHOLE: Mapping[str, tuple[str, ...]] = {
    "progress": tuple(field.name for field in fields(Progress)),
    "user": (),
    "gradients": (),
    "streams": (),
    "rng": ("rank0", "lines0"),
    "services": ("metrics",),
    "wall": (),
}
"""The branches of a run's state, and what each has in every run.  Best weights have `user` alone."""
STREAM = ("pass", "position", "left", "generators", "data", "varies", "opened", "given")
"""What each stream has."""


def whole_tree(
    *,
    progress: dict[str, Any],
    user: dict[str, Any],
    streams: dict[str, Any],
    lines: dict[str, Any],
    services: dict[str, Any],
    metrics: dict[str, Any],
    wall: dict[str, Any],
) -> dict[str, Any]:
    """The state of a run as it stands here, the global random state included.

    Args:
        user: the branches of `UserState.save`.
        lines: random state of the program's lines that a resume runs again.
        metrics: the collector's windows.
    """
    return {
        "progress": progress,
        **user,
        "streams": streams,
        "rng": {"rank0": capture(), "lines0": lines},
        "services": {**services, "metrics": {"version": 1, "state": metrics}},
        "wall": wall,
    }


def saved_tree(checkpoint: Checkpoint, branches: tuple[str, ...] = tuple(WHOLE)) -> dict[str, Any]:
    """The decoded tree of a checkpoint, which has at least `branches`.

    Raises:
        RestoreError: it lacks some; lists them.
    """
    structure: Any = checkpoint.structure
    wanted = {name: structure[name] for name in branches if name in structure}
    tree: dict[str, Any] = decode(Encoded(wanted, checkpoint.arrays))
    if missing := list(_missing(tree, branches)):
        raise RestoreError(
            f"checkpoint {checkpoint.path} holds only {', '.join(structure) or 'nothing'}: best weights, or "
            "the state of another program; resume from one in checkpoints/, or take the weights alone with "
            f"init_from={str(checkpoint.path)!r} in a new run directory",
            missing=missing,
        )
    return tree


def _missing(tree: Mapping[str, Any], branches: tuple[str, ...]) -> Iterator[str]:
    for name in branches:
        branch = tree.get(name)
        if not isinstance(branch, dict):
            yield name
            continue
        yield from (f"{name}/{part}" for part in WHOLE[name] if part not in branch)
        if name == "streams":
            for stream, saved in branch.items():
                yield from (f"{name}/{stream}/{part}" for part in STREAM if part not in saved)
