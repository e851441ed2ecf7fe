"""The numpy backend: scalars, seeding, what it says of itself."""

from typing import Any

import numpy as np
import pytest

from everstep.backends import get
from everstep.contracts.state import Backend
from everstep.errors import MetricError

NUMPY = get("numpy")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.1), 0.10000000149011612),
        (np.float16(2), 2.0),
        (np.int64(-3), -3.0),
        (np.bool_(True), 1.0),
        (np.uint64(2**53), 2.0**53),
        (np.longdouble(1.5), 1.5),
        (np.array(1.5), 1.5),
        (np.array([[2]]), 2.0),
        (np.array(1.5, ">f4"), 1.5),
    ],
)
def test_scalar(value: Any, expected: float) -> None:
    kept = NUMPY.scalar(value)
    assert type(kept) is float and kept == expected
    assert NUMPY.read_scalars([kept, kept]) == [expected] * 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros(2), r"shape \(2,\).*\.mean\(\)"),
        (np.zeros(0), r"shape \(0,\)"),
        (np.complex64(1), "complex64"),
        (np.str_("a"), "<U1"),
        (np.datetime64("2026"), "datetime64"),
        (np.ma.masked, "masked MaskedConstant"),
        (np.ma.masked_invalid([np.nan]), "masked MaskedArray"),
    ],
)
def test_what_is_not_one_real_number_is_refused(value: Any, says: str) -> None:
    with pytest.raises(MetricError, match=says):
        NUMPY.scalar(value)


def test_seed_accepts_seeds_of_any_width() -> None:
    before = NUMPY.random_state()
    NUMPY.seed(2**40 + 7)
    drawn = np.random.rand()
    NUMPY.seed(7)
    assert drawn == np.random.rand()
    NUMPY.set_random_state(before)


def test_parameters_lists_arrays_and_nothing_is_watched() -> None:
    objects = {"w": np.zeros((2, 3)), "config": {"a": np.zeros(1)}}
    assert NUMPY.parameters(objects) == [("w", (2, 3), True)]
    assert NUMPY.update_counter(objects) is None
    assert NUMPY.entry(objects["config"]) is None
    assert NUMPY.describe() == {"numpy": np.__version__}
    with NUMPY.evaluation_mode(objects):
        pass


def test_it_is_a_backend() -> None:
    backend: Backend = NUMPY
    assert backend.name == "numpy"
