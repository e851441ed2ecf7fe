"""Machine of a run: the fingerprint that is compared at each resume.

State, samples and random state come back to the bit on any machine.  Results computed from them are equal
only where processor, libraries, threads and flags are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from everstep import backends
from everstep.contracts.group import DataRanks
from everstep.record import machine
from everstep.supervisor.opening.configuration import NONE, Difference, told

_LAYOUT = "layout"
"""Name of the fact that does not depend on the machine, see `Backend.fingerprint`."""
_WHOLE = "whole on each rank"

Fingerprint: TypeAlias = Mapping[str, Mapping[str, str]]
"""Facts by name, under "machine" and under the name of each framework in use."""


def fingerprint(objects: Mapping[str, Any], data: DataRanks) -> Fingerprint:
    """Take the fingerprint of this process, now.

    Args:
        objects: the objects of the state; of the devices only those count on which the objects lie.
        data: which part of each batch every rank reads.
    """
    found = {"machine": machine(), **{each.name: each.fingerprint(objects) for each in backends.active()}}
    if not data.in_order:
        found["data"] = {_LAYOUT: _parts(data)}
    return found


def _parts(data: DataRanks) -> str:
    """Say which part of each batch every rank reads; the number of parts says it where they are in order."""
    read = ", ".join(map(str, data.of))
    by = "" if list(data.of) == sorted(data.of) else f" (ranks read the parts {read})"
    return f"batches in {data.size} part{'s' if data.size > 1 else ''}{by}"


def changes(stored: Fingerprint | None, given: Fingerprint) -> list[Difference]:
    """List facts that differ between two fingerprints, as "torch.threads"; empty where none is stored.

    A framework in only one of the fingerprints is ignored: it may have been imported without computing.
    The layout is left out, see `layout`.
    """
    stored = stored or {}
    return [
        Difference(f"{who}.{name}", was, now)
        for who in stored.keys() & given.keys()
        for name in sorted((stored[who].keys() | given[who].keys()) - {_LAYOUT})
        if (was := stored[who].get(name, NONE)) != (now := given[who].get(name, NONE))
    ]


def layout(fingerprint: Fingerprint | None) -> str:
    """Return how the state was divided among the ranks; "" where each rank had all of it."""
    return "; ".join(facts[_LAYOUT] for facts in (fingerprint or {}).values() if _LAYOUT in facts)


def other_layout(saved: str, given: str) -> str:
    """Say what another layout on as many ranks means for the run."""
    return (
        f"the state was laid out as {saved or _WHOLE}, and is {given or _WHOLE} in this start: samples, "
        "values and counters continue; from here on the steps are not to the bit those of the layout before"
    )


def warning(found: list[Difference]) -> str:
    """Write the warning of a resume whose checkpoint was computed under another fingerprint."""
    return (
        "the checkpoint was computed on another machine, or under other settings of it:"
        f"{told(found).rstrip()}\nstate, samples and random state come back to the bit; numbers that are "
        "computed from here on may differ from those of an uninterrupted run"
    )
