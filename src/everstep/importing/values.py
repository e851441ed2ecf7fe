"""Values of other programs' records."""

from __future__ import annotations

import json
import math
from typing import Any

_LARGEST = (1 << 63) - 1


def plain(text: str) -> Any:
    """Return the number, list, ... that a program has written as a string; the string where it is none.

    Settings are compared as numbers then: `everstep runs "config.lr < 0.1"`.
    """
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def as_step(value: Any) -> int:
    """Return a step as an integer of 64 bits.

    Raises:
        ValueError: it is not a number, or too large.
    """
    number = float(value)
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise ValueError(f"{value!r} is not a step")
    return int(value)
