"""Types of the facts in a manifest's `meta`: a manifest of other types is damaged, and nobody reads it.

Whatever everstep has ever written fits.  A fact may be missing; one that is not named here may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from everstep.untrusted_files import is_count

Test: TypeAlias = Callable[[Any], bool]


def misfits(meta: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the names of the facts whose values have wrong types."""
    told = meta or {}
    yield from (f"meta/{name}" for name, fits in _FACTS.items() if name in told and not fits(told[name]))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return abs(value) < 1 << 63 if type(value) is int else isinstance(value, float) and math.isfinite(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_position(value: Any) -> bool:
    return _is_list_of(is_count)(value) and len(value) == 2


def _is_decision(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], dict) and is_count(value[1])


def _is_list_of(fits: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_object_of(fits: Test) -> Test:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is_or_none(fits: Test) -> Test:
    return lambda value: value is None or fits(value)


_FACTS: dict[str, Test] = {
    "run": _is_or_none(_is_text),
    "controllers": _is_object,
    "options": _is_object_of(_is_object_of(_is_text)),
    "config": _is_or_none(_is_object),
    "journal": _is_or_none(_is_position),
    "metrics": _is_object_of(_is_number),
    "metric_steps": _is_or_none(_is_object_of(is_count)),
    "best": _is_object_of(_is_text),
    "kept": _is_object_of(_is_list_of(_is_text)),
    "open": _is_or_none(_is_list_of(_is_text)),
    "rollbacks": _is_or_none(_is_list_of(_is_decision)),
    "fingerprint": _is_or_none(_is_object_of(_is_object_of(_is_text))),
    "one_fingerprint": _is_flag,
    "data_ranks": _is_or_none(_is_list_of(is_count)),
    "interim": _is_flag,
    "metric": _is_text,
    "value": _is_number,
}
