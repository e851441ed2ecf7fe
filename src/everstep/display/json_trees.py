"""Trees of JSON values, copied with other leaves: for strict JSON, and for strings that are safe to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def with_leaves(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy a tree; `leaf` gives the new value for each leaf, and for each key as a string."""
    if isinstance(tree, Mapping):
        return {leaf(str(key)): with_leaves(item, leaf) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [with_leaves(item, leaf) for item in tree]
    return leaf(tree)


def finite(value: Any) -> Any:
    """Return "NaN", "Infinity" or "-Infinity" for a number that JSON lacks; other values stay as they are."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
