"""Distance between floating-point numbers, in units in the last place of their own type."""

from __future__ import annotations

import numpy as np

_INTEGERS = {"F64": np.int64, "F32": np.int32, "F16": np.int16, "BF16": np.int16}
"""Types of the integers that have the bits of a floating-point type, by safetensors' name of that type."""


def last_places(a: bytes, b: bytes, dtype: str) -> int | None:
    """Return the largest distance between elements at one place, as the number of floats between them plus 1.

    Args:
        a, b: the elements of two arrays of one type and shape.
        dtype: safetensors' name of their type.

    Returns:
        0 where all elements are equal (-0.0 equals 0.0); None where the type is not a floating-point type,
        the lengths differ, or a NaN stands for a number.
    """
    kind = _INTEGERS.get(dtype)
    if kind is None or len(a) != len(b):
        return None
    x, y = np.frombuffer(a, kind), np.frombuffer(b, kind)
    unequal = x != y
    first, second = _ordered(x[unequal]), _ordered(y[unequal])
    largest = int(_ordered(np.array([_INFINITY[dtype]], kind))[0])
    if (np.abs(np.concatenate([first, second])) > largest).any():
        return None
    # as unsigned numbers, because the distance of two 64-bit integers may have 64 bits
    apart = np.where(first > second, first, second).view(np.uint64) - np.minimum(first, second).view(
        np.uint64
    )
    return int(apart.max(initial=0))


def numbers_apart(a: float, b: float) -> int | None:
    """Return the distance of two numbers: in units of 32 bits, where both are numbers of that type."""
    with np.errstate(over="ignore"):  # a larger number is not one of 32 bits, and nobody need be warned
        single = all(float(np.float32(each)) == each for each in (a, b))
    kind, name = (np.float32, "F32") if single else (np.float64, "F64")
    return last_places(kind(a).tobytes(), kind(b).tobytes(), name)


_INFINITY = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Map the bits of floats to integers in the order of the floats."""
    wide = bits.astype(np.int64)
    return np.where(wide < 0, int(np.iinfo(bits.dtype).min) - wide, wide)
