"""Distances in units in the last place are counts of floating-point numbers."""

from __future__ import annotations

import numpy as np
import pytest

from everstep.state.digests import last_places, numbers_apart

TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, 1e-7, -3.5])
def test_n_neighbours_further_is_n(name: str, start: float) -> None:
    kind = TYPES[name]
    a = b = kind(start)
    for count in range(1, 5):
        b = np.nextafter(b, kind(np.inf))
        found = [last_places(x.tobytes(), y.tobytes(), name) for x, y in ((a, b), (b, a))]
        assert found == [count, count]


def test_the_largest_distance_of_an_array_counts_also_across_zero_and_to_the_other_end() -> None:
    a = np.array([1, 2, 3], np.float32)
    b = np.nextafter(np.nextafter(a, np.float32(9)), np.float32([9, 9, 0]))
    assert last_places(a.tobytes(), b.tobytes(), "F32") == 2
    assert last_places(a.tobytes(), a.tobytes(), "F32") == 0
    tiny, ends = np.float64(5e-324), np.finfo(np.float64)
    assert last_places((-tiny).tobytes(), tiny.tobytes(), "F64") == 2
    assert last_places(np.float64(-0.0).tobytes(), np.float64(0.0).tobytes(), "F64") == 0
    assert last_places(ends.min.tobytes(), ends.max.tobytes(), "F64") == 2 * (0x7FEFFFFFFFFFFFFF)


def test_what_has_no_distance() -> None:
    one, nan = (np.float32(each).tobytes() for each in (1, np.nan))
    for a, b, name in ((one, nan, "F32"), (one, one + one, "F32"), (one, one, "I32")):
        assert last_places(a, b, name) is None


def test_numbers_of_32_bits_are_counted_in_these() -> None:
    a = np.float32(0.1)
    assert numbers_apart(float(a), float(np.nextafter(a, np.float32(1)))) == 1
    for wide in (0.1, 1e300):
        assert numbers_apart(wide, float(np.nextafter(wide, np.inf))) == 1
