"""Arrays in host memory, as backends show them to whoever computes a digest of their elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

WHOLE = 1 << 16
"""Size in bytes up to which all elements of an array count in its digest: 2 us of a step."""

small_digest: Callable[[Any, int], int] = xxhash.xxh3_64_intdigest
"""(buffer of an array's elements in C order, seed ^ `layout_number`) -> the digest of a small array."""


@lru_cache(maxsize=1024)
def layout_number(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int | None:
    """Digest an element type and a shape; None if elements have bytes beside their values."""
    if dtype.kind not in "biufc" or dtype.char in "gG":  # long doubles have unused bytes
        return None
    return xxhash.xxh3_64_intdigest(f"{dtype.str}{tuple(shape)}".encode())
