"""Types of the fields of each kind of event: an event of other types is damaged, and nobody reads it.

Whatever everstep writes fits.  A kind or a field that is not named here may hold anything that JSON can hold:
the reason of a stop is any value that a program gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from everstep.untrusted_files import Count, Seconds, is_integer, misfits

DIVERGED = "diverged"
"""Kind of an event: steps that were executed again gave different results."""
WARNED = "warned once"
"""Kind of an event: a warning that each run gives once."""
CHOSEN, ACCEPTED, ROLLBACK = "chosen", "accepted", "rollback"
"""Decisions: a person chose another checkpoint or configuration; accepted a divergence; the run goes back."""

DEEPEST = 200
"""Most levels of lists and objects in an event: deeper ones exhaust the stack of whoever reads them."""


def misfit(kind: str, data: Mapping[str, Any]) -> str:
    """Say which field of an event has a wrong type, or is missing; "" if all fit."""
    what = data.get("what") if kind == "decision" else None
    fields = _DECISIONS.get(str(what), {}) if what is not None else _KINDS.get(kind, {})
    name = next(misfits(data, fields), None)
    if name is None:
        return ""
    return f"{name!r} is {_short(data[name])}" if name in data else f"{name!r} is missing"


def levels(tree: Any) -> int:
    """Count the levels of lists and objects in a tree of JSON values, whatever their number."""
    found, level = 0, [tree]
    while level := [one for one in level if isinstance(one, dict | list | tuple)]:
        found += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return found


def _short(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    is_long = isinstance(value, int) and not isinstance(value, bool) and not is_integer(value)
    return "an integer of more than 64 bits" if is_long else f"{value!r:.60}"


_PLACE: dict[str, Any] = {"step?": Count, "epoch?": Count}

_KINDS: dict[str, dict[str, Any]] = {
    "segment": {
        "facts": {
            **dict.fromkeys(("resumed_from?", "resume?"), str | None),
            **dict.fromkeys(("ranks?", "ranks_before?"), Count),
        },
        "run?": str | None,
        "parent?": tuple[Count, Count] | None,
    },
    "checkpoint": {"name": str, "bytes": Count},
    "progress": _PLACE,
    "times": {"epoch?": Count, "steps?": list[Count], "seconds?": Seconds, "data_wait?": Seconds},
    "ended": _PLACE,
    "interrupted": {"status?": int, **_PLACE},
    "closed": {"status": Literal["finished", "stopped", "failed", "killed"], **_PLACE},
    "verified": {"report?": str, "steps?": Count},
    WARNED: {"message": str},
    DIVERGED: {"step": Count, **dict.fromkeys(("component?", "old?", "new?", "report?"), str)},
    "head": {"stream": str, "step": Count, "given": list, "touched": bool},
    "intermediate": {"validation": str, "batch": Count, "file": str},
    "summary": {
        "name": str,
        "step": Count,
        "text?": str,
        "image?": {"file": str, **dict.fromkeys(("height?", "width?", "channels?"), Count)},
        "histogram?": {
            **dict.fromkeys(("min?", "max?", "num?", "sum?", "sum_squares?"), float),
            "bucket_limit?": list[float],
            "bucket?": list[float],
        },
    },
}

_BATCH: dict[str, Any] = {
    "stream": str,
    "pass_index": Count,
    "batch_index": Count,
    "samples?": list[int] | None,
}

_DECISIONS: dict[str, dict[str, Any]] = {
    CHOSEN: {"step": Count, "why?": str},
    ACCEPTED: {"step": Count},
    ROLLBACK: {
        **dict.fromkeys(("number", "step", "first"), Count),
        **dict.fromkeys(("reason", "checkpoint"), str),
        "batches": [_BATCH],
    },
}
