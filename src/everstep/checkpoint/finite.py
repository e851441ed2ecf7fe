"""Search for NaN and infinity in the bytes of an array."""

from __future__ import annotations

from typing import Any

import numpy as np

from everstep.checkpoint.array_file import chunks
from everstep.contracts.state import HostArray

_NON_FINITE: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000, 0x7F80_0000),
    "C64": (np.uint32, 0x7F80_0000, 0x7F80_0000),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),  # no infinity, one NaN per sign
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),  # the one NaN is "minus zero"
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
}
"""Type, mask and pattern by dtype: an element is NaN or infinite if its bits & mask == pattern."""


def finite(array: HostArray) -> bool:
    """Whether all elements are finite, of complex numbers both parts; looks at the bytes, chunk by chunk."""
    name = str(array.extra.get("dtype", "")).removeprefix("torch.") if array.dtype == "U8" else ""
    rule = _NON_FINITE.get("F16" if name == "complex32" else array.dtype)
    pieces = chunks(array.data.data)
    if rule is not None:
        kind, mask, pattern = rule
        return not any(((np.frombuffer(c, kind) & kind(mask)) == kind(pattern)).any() for c in pieces)
    wide = _numpy_float(name)
    return wide is None or all(np.isfinite(np.frombuffer(c, wide)).all() for c in pieces)


def _numpy_float(name: str) -> np.dtype[Any] | None:
    """Return NumPy's float or complex dtype of that name; None for other names."""
    try:
        dtype = np.dtype(name or "u1")
    except (TypeError, ValueError):
        return None
    return dtype if dtype.kind in "fc" else None
