"""Refusal of several processes, before anything is opened: so far one process trains a run."""

from __future__ import annotations

import os

from everstep import backends
from everstep.errors import UsageError


def require_one() -> None:
    """Refuse to be one of several processes that train together.

    Launchers such as torchrun set WORLD_SIZE; the framework knows a group that was made without a launcher.
    Variables of a batch system (SLURM_NTASKS and the like) do not count: each task may be a run of its own.

    Raises:
        UsageError: says how many there are, and what to do.
    """
    said = os.environ.get("WORLD_SIZE", "")
    if said.isdecimal() and int(said) > 1:
        raise _refusal(
            f"WORLD_SIZE={said} in the environment", ", or unset WORLD_SIZE if it trains by itself"
        )
    for backend in backends.active():
        if (count := backend.processes()) > 1:
            raise _refusal(f"{backend.name} has a group of {count}", " and without a process group")


def _refusal(found: str, remedy: str) -> UsageError:
    return UsageError(
        f"this is one of several processes that train together ({found}), and everstep runs in one so far: "
        "each would keep a run of its own, and after a kill they would resume at different steps and mix "
        f"their gradients; start one process (as torchrun --nproc-per-node 1 does){remedy}"
    )
