"""Stamps: the claim that the elements of an array have not changed since the array was stamped.

A snapshot copies the whole state.  An array with a stamp is copied once: the copy keeps the stamp, and is
left alone at a later snapshot while the array has the same stamp.  A stamp is an object of its own, made
anew each time and compared by identity.  So a copy proves by itself what it holds: there is no mark of
"clean" that another loop, a failed save or a restore could leave behind.

Who stamps an array owns all ways to write to it, and takes the stamp away at each write.  A copy, a view or a
pickled form of the array has no stamp.

EVERSTEP_CHECK_STAMPS=1 (or `everstep.testing.stamps_checked`) compares each such copy with the live array at
each snapshot; it is for tests.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

known: dict[int, tuple[weakref.ref[Any], object]] = {}
"""By the array's id: the array, and its stamp."""

checking = os.environ.get("EVERSTEP_CHECK_STAMPS", "0") != "0"
"""Whether each copy that is left alone is compared with the live array."""


def stamp(array: Any) -> None:
    """Claim that the elements of an array stay as they are until `unstamp`; a stamp that it has stays."""
    if stamp_of(array) is None:
        key = id(array)
        # the id may be another array's once this array is gone
        known[key] = (weakref.ref(array, lambda _: known.pop(key, None)), object())


def unstamp(array: Any) -> None:
    """Take the stamp away: the elements have changed, or may have."""
    known.pop(id(array), None)


def stamp_of(array: Any) -> object | None:
    """Return the stamp of an array; None if it has none."""
    found = known.get(id(array))
    return None if found is None or found[0]() is not array else found[1]
