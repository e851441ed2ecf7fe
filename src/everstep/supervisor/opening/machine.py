"""Machine of a run: the fingerprint that is compared at each resume.

State, samples and random state come back to the bit on any machine.  Results computed from them are equal
only where processor, libraries, threads and flags are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from everstep import backends
from everstep.record import machine
from everstep.supervisor.opening.configuration import NONE, Difference, told

Fingerprint: TypeAlias = Mapping[str, Mapping[str, str]]
"""Facts by name, under "machine" and under the name of each framework in use."""


def fingerprint(objects: Mapping[str, Any]) -> Fingerprint:
    """Take the fingerprint of this process, now.

    Args:
        objects: the objects of the state; of the devices only those count on which the objects lie.
    """
    return {"machine": machine(), **{each.name: each.fingerprint(objects) for each in backends.active()}}


def changes(stored: Fingerprint | None, given: Fingerprint) -> list[Difference]:
    """List facts that differ between two fingerprints, as "torch.threads"; empty where none is stored.

    A framework in only one of the fingerprints is ignored: it may have been imported without computing.
    """
    stored = stored or {}
    return [
        Difference(f"{who}.{name}", was, now)
        for who in stored.keys() & given.keys()
        for name in sorted(stored[who].keys() | given[who].keys())
        if (was := stored[who].get(name, NONE)) != (now := given[who].get(name, NONE))
    ]


def warning(found: list[Difference]) -> str:
    """Write the warning of a resume whose checkpoint was computed under another fingerprint."""
    return (
        "the checkpoint was computed on another machine, or under other settings of it:"
        f"{told(found).rstrip()}\nstate, samples and random state come back to the bit; numbers that are "
        "computed from here on may differ from those of an uninterrupted run"
    )
