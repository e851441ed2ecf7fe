"""What decides the bits of what a start computes: compared before a resume claims anything to be equal.

The state, the samples and the random state come back to the bit on any machine.  What is computed from them
does so only where processor, libraries, threads and flags are the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from everstep import backends
from everstep.record import machine
from everstep.supervisor.configuration import NONE, Difference, told

Fingerprint: TypeAlias = Mapping[str, Mapping[str, str]]
"""Facts by name, by who computes: "machine", and the name of each framework in use."""


def fingerprint(objects: Mapping[str, Any]) -> Fingerprint:
    """That of this process, now.

    Args:
        objects: the objects of the state: of devices, those count on which they lie.
    """
    return {"machine": machine(), **{each.name: each.fingerprint(objects) for each in backends.active()}}


def changes(stored: Fingerprint | None, given: Fingerprint) -> list[Difference]:
    """Where two fingerprints differ, as "torch.threads"; nothing where none is stored.

    A framework that only one of them knows was imported, and need not compute anything.
    """
    stored = stored or {}
    return [
        Difference(f"{who}.{name}", was, now)
        for who in stored.keys() & given.keys()
        for name in sorted(stored[who].keys() | given[who].keys())
        if (was := stored[who].get(name, NONE)) != (now := given[who].get(name, NONE))
    ]


def warning(found: list[Difference]) -> str:
    """What a resume says before anything else, where the checkpoint was computed under another one."""
    return (
        "the checkpoint was computed on another machine, or under other settings of it:"
        f"{told(found).rstrip()}\nstate, samples and random state come back to the bit; numbers that are "
        "computed from here on may differ from those of a run that was never stopped"
    )
