"""Types of the fields of each kind of event: an event of other types is damaged, and nobody reads it.

Whatever everstep writes fits.  A kind or a field that is not named here may hold anything that JSON can hold:
the reason of a stop is any value that a program gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from everstep.untrusted_files import is_count

DIVERGED = "diverged"
"""Kind of an event: steps that were executed again gave different results."""
WARNED = "warned once"
"""Kind of an event: a warning that each run gives once."""
CHOSEN, ACCEPTED, ROLLBACK = "chosen", "accepted", "rollback"
"""Decisions: a person chose another checkpoint or configuration; accepted a divergence; the run goes back."""

_LONGEST = 1e11
"""Most seconds of a time: 3,000 years."""

DEEPEST = 200
"""Most levels of lists and objects in an event: deeper ones exhaust the stack of whoever reads them."""

Type: TypeAlias = "str | list[Type] | set[str] | Mapping[str, Type]"
"""Type of a value: a name in `_TESTS`; "NAME or none"; a list of a type; one of some texts; an object.

A field of an object whose name ends in "?" may be missing; further fields may hold anything.
"""


def misfit(kind: str, data: Mapping[str, Any]) -> str:
    """Say which field of an event has a wrong type, or is missing; "" if all fit."""
    what = data.get("what") if kind == "decision" else None
    return _misfit(_DECISIONS.get(str(what), {}) if what is not None else _KINDS.get(kind, {}), data)


def _misfit(fields: Mapping[str, Type], data: Mapping[str, Any]) -> str:
    for field, type_ in fields.items():
        name = field.removesuffix("?")
        if name not in data and name == field:
            return f"{name!r} is missing"
        if name in data and not _fits(type_, data[name]):
            return f"{name!r} is {_short(data[name])}"
    return ""


def _fits(type_: Type, value: Any) -> bool:
    if isinstance(type_, str):
        name, or_none, _ = type_.partition(" or none")
        return (bool(or_none) and value is None) or _TESTS[name](value)
    if isinstance(type_, list):
        return isinstance(value, list) and all(_fits(type_[0], each) for each in value)
    if isinstance(type_, set):
        return isinstance(value, str) and value in type_
    return isinstance(value, dict) and not _misfit(type_, value)


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
    is_long = isinstance(value, int) and not isinstance(value, bool) and not _is_integer(value)
    return "an integer of more than 64 bits" if is_long else f"{value!r:.60}"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 << 63 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


_TESTS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "list": lambda value: isinstance(value, list),
    "integer": _is_integer,
    "number": _is_number,
    "count": is_count,
    "seconds": lambda value: _is_number(value) and -_LONGEST < value < _LONGEST,
    "integers": lambda value: isinstance(value, list) and all(map(_is_integer, value)),
    "position": lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_count, value)),
}

_PLACE: dict[str, Type] = {"step?": "count", "epoch?": "count"}

_KINDS: dict[str, dict[str, Type]] = {
    "segment": {
        "facts": {
            **dict.fromkeys(("resumed_from?", "resume?"), "text or none"),
            **dict.fromkeys(("ranks?", "ranks_before?"), "count"),
        },
        "run?": "text or none",
        "parent?": "position or none",
    },
    "checkpoint": {"name": "text", "bytes": "count"},
    "cadence": dict.fromkeys(("seconds", "wait", "slower", "duration"), "seconds"),
    "progress": _PLACE,
    "times": {"epoch?": "count", "steps?": ["count"], "seconds?": "seconds", "data_wait?": "seconds"},
    "ended": _PLACE,
    "interrupted": {"status?": "integer", **_PLACE},
    "closed": {"status": {"finished", "stopped", "failed", "killed"}, **_PLACE},
    "verified": {"report?": "text", "steps?": "count"},
    WARNED: {"message": "text"},
    DIVERGED: {"step": "count", **dict.fromkeys(("component?", "old?", "new?", "report?"), "text")},
    "head": {"stream": "text", "step": "count", "given": "list", "touched": "flag"},
    "intermediate": {"validation": "text", "batch": "count", "file": "text"},
    "summary": {
        "name": "text",
        "step": "count",
        "text?": "text",
        "image?": {"file": "text", **dict.fromkeys(("height?", "width?", "channels?"), "count")},
        "histogram?": {
            **dict.fromkeys(("min?", "max?", "num?", "sum?", "sum_squares?"), "number"),
            "bucket_limit?": ["number"],
            "bucket?": ["number"],
        },
    },
}

_BATCH: dict[str, Type] = {
    "stream": "text",
    "pass_index": "count",
    "batch_index": "count",
    "samples?": "integers or none",
}

_DECISIONS: dict[str, dict[str, Type]] = {
    CHOSEN: {"step": "count", "why?": "text"},
    ACCEPTED: {"step": "count"},
    ROLLBACK: {
        **dict.fromkeys(("number", "step", "first"), "count"),
        **dict.fromkeys(("reason", "checkpoint"), "text"),
        "batches": [_BATCH],
    },
}
