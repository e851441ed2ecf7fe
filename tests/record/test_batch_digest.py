"""Equal batches have equal digests, whatever way they came."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from everstep.record import batch_digest


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", "?"])
@pytest.mark.parametrize("count", [1, 9, 5000, 40_000])
def test_how_an_array_lies_in_memory_makes_no_difference(dtype: str, count: int) -> None:
    values = np.random.default_rng(count).integers(0, 2, (count, 6)).astype(dtype)
    for strided in (values[:, ::2], values.T, values[::-1]):
        from_worker = pickle.loads(pickle.dumps(strided))
        found = batch_digest(strided, 0)
        assert found == batch_digest(from_worker, 0) == batch_digest(np.ascontiguousarray(strided), 0)
        assert found is not None


@pytest.mark.parametrize("count", [10, 5000, 400_000])
@pytest.mark.parametrize("contiguous", [True, False])
def test_values_at_either_end_and_many_between_count(count: int, contiguous: bool) -> None:
    values = np.zeros(2 * count, np.float32)[:: 1 if contiguous else 2]
    before = batch_digest(values, 0)
    for at in (0, -1, slice(count // 3, count // 2)):
        changed = values.copy()
        changed[at] = 1.0
        assert batch_digest(changed, 0) != before


def test_equal_dicts_are_equal_in_any_order() -> None:
    """As where keys were taken out of a set of texts: another order in each process."""
    assert batch_digest({"x": 1, "y": 2}, 0) == batch_digest({"y": 2, "x": 1}, 0)
    assert batch_digest({"x": 1, "y": 2}, 0) != batch_digest({"y": 1, "x": 2}, 0)
