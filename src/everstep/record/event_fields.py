"""Types of the fields of each kind of event: an event of other types is damaged, and nobody reads it.

Whatever everstep writes fits.  A kind
or a field that is not named here may hold anything that JSON can hold: the reason of a stop is any value that
a program gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeGuard

from everstep.untrusted_files import is_count

DIVERGED = "diverged"
"""Kind of an event: steps that were executed again gave different results."""
CHOSEN, ACCEPTED, ROLLBACK = "chosen", "accepted", "rollback"
"""Decisions: a person chose another checkpoint or configuration; accepted a divergence; the run goes back."""

_LONGEST = 1e11
"""Most seconds of a time: 3,000 years."""

DEEPEST = 200
"""Most levels of lists and objects in an event: deeper ones exhaust the stack of whoever reads them."""

Test: TypeAlias = Callable[[Any], bool]


def misfit(kind: str, data: Mapping[str, Any]) -> str:
    """Say which field of an event has a wrong type, or is missing; "" if all fit."""
    what = data.get("what") if kind == "decision" else None
    return _misfit(_DECISIONS.get(str(what), {}) if what is not None else _KINDS.get(kind, {}), data)


def _misfit(fields: Mapping[str, Test], data: Mapping[str, Any]) -> str:
    for called, fits in fields.items():
        name = called.removesuffix("?")
        if name not in data and name == called:
            return f"{name!r} is missing"
        if name in data and not fits(data[name]):
            return f"{name!r} is {_short(data[name])}"
    return ""


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


# ------------------------------------------------------------------------------------------- types


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -1 << 63 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_seconds(value: Any) -> bool:
    return _is_number(value) and -_LONGEST < value < _LONGEST


def _is_or_none(fits: Test, value: Any) -> bool:
    return value is None or fits(value)


def _is_list_of(fits: Test, value: Any) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_object_of(fields: Mapping[str, Test], value: Any) -> bool:
    return isinstance(value, dict) and not _misfit(fields, value)


def _is_position(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_one_of(*values: str) -> Test:
    return lambda value: isinstance(value, str) and value in values


# ------------------------------------------------------------------------------------------ fields

_Fields: TypeAlias = dict[str, Test]
"""Name of a field -> whether a value fits; a name that ends in "?" may be missing."""

_PLACE: _Fields = {"step?": is_count, "epoch?": is_count}

_FACTS: _Fields = {
    "resumed_from?": partial(_is_or_none, _is_text),
    "resume?": partial(_is_or_none, _is_text),
    "ranks?": is_count,
    "ranks_before?": is_count,
}

_BATCH: _Fields = {
    "stream": _is_text,
    "pass_index": is_count,
    "batch_index": is_count,
    "samples?": partial(_is_or_none, partial(_is_list_of, _is_integer)),
}

_PICTURE: _Fields = {"file": _is_text, "height?": is_count, "width?": is_count, "channels?": is_count}

_HISTOGRAM: _Fields = {
    **dict.fromkeys(("min?", "max?", "num?", "sum?", "sum_squares?"), _is_number),
    **dict.fromkeys(("bucket_limit?", "bucket?"), partial(_is_list_of, _is_number)),
}

_KINDS: dict[str, _Fields] = {
    "segment": {
        "facts": partial(_is_object_of, _FACTS),
        "run?": partial(_is_or_none, _is_text),
        "parent?": partial(_is_or_none, _is_position),
    },
    "checkpoint": {"name": _is_text, "bytes": is_count},
    "cadence": dict.fromkeys(("seconds", "wait", "slower", "duration"), _is_seconds),
    "progress": _PLACE,
    "times": {
        "epoch?": is_count,
        "steps?": partial(_is_list_of, is_count),
        "seconds?": _is_seconds,
        "data_wait?": _is_seconds,
    },
    "ended": _PLACE,
    "interrupted": {"status?": _is_integer, **_PLACE},
    "closed": {"status": _is_one_of("finished", "stopped", "failed", "killed"), **_PLACE},
    "verified": {"report?": _is_text, "steps?": is_count},
    DIVERGED: {"step": is_count, **dict.fromkeys(("component?", "old?", "new?", "report?"), _is_text)},
    "head": {"stream": _is_text, "step": is_count, "given": _is_list, "touched": _is_flag},
    "evaluation": {
        **dict.fromkeys(("stream", "checkpoint", "digest"), _is_text),
        **dict.fromkeys(("step", "epoch"), is_count),
        "num_steps": _is_integer,  # -1: all
        "time": _is_seconds,
    },
    "intermediate": {
        "validation": _is_text,
        "batch": is_count,
        "file": _is_text,
    },
    "summary": {
        "name": _is_text,
        "step": is_count,
        "text?": _is_text,
        "image?": partial(_is_object_of, _PICTURE),
        "histogram?": partial(_is_object_of, _HISTOGRAM),
    },
}

_DECISIONS: dict[str, _Fields] = {
    CHOSEN: {"step": is_count, "why?": _is_text},
    ACCEPTED: {"step": is_count},
    ROLLBACK: {
        "number": is_count,
        "step": is_count,
        "reason": _is_text,
        "first": is_count,
        "checkpoint": _is_text,
        "batches": partial(_is_list_of, partial(_is_object_of, _BATCH)),
    },
}
