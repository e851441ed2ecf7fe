"""Stream of batches of arrays in memory (`arrays`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from everstep import backends
from everstep.arguments import checked_keywords
from everstep.data.cursor import SampledCursor, SampledStream
from everstep.data.order import Plan, Sampling
from everstep.errors import DataError


@checked_keywords
def arrays(
    *arrays: Any, batch_size: int, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
) -> Arrays:
    """Make a stream of batches from arrays in memory; it resumes anywhere, to the bit, at no cost.

    The stream has a length (batches in a pass).  It can be iterated directly, as for an evaluation: each
    time the same pass, and no run's position changes.

    Each batch is a tuple with one part per array, for a single array too: `for [x] in ...`.  Parts
    are copies: changing a batch never changes the data.

    Args:
        *arrays: NumPy arrays or torch tensors of shape (samples, ...), all with the same number of samples.
        batch_size: samples in a batch, on all ranks together; the last batch may be smaller.
        shuffle: draw a new order each pass, a pure function of (seed, purpose, pass).
        seed: seed of the order; None takes the run's seed.
        drop_last: leave out a last batch that is smaller.
    """
    if not arrays:
        raise DataError(
            "arrays() was given no array; give it at least one, as in arrays(x, y, batch_size=64)"
        )
    lengths = [_length(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise DataError(f"the arrays have different lengths {lengths}; give arrays with as many samples each")
    return Arrays(arrays, Sampling("arrays", lengths[0], batch_size, shuffle, seed, drop_last))


def _length(array: Any) -> int:
    known = backends.of(array) is not None and not isinstance(array, np.generic)
    if not known or not array.shape:
        what = f"an array of shape {tuple(array.shape)}" if known else f"a {type(array).__name__}"
        raise DataError(
            f"arrays() was given {what}; give NumPy arrays or torch tensors of shape (samples, ...), "
            "as numpy.asarray(...) makes them"
        )
    return int(array.shape[0])


class Arrays(SampledStream):
    def __init__(self, arrays: tuple[Any, ...], sampling: Sampling) -> None:
        super().__init__(sampling)
        self._arrays = self.contents = arrays

    def _open(self, plan: Plan, first: int) -> SampledCursor:
        return SampledCursor(plan, _batches(self._arrays, plan, first), first)

    def describe(self, seed: int) -> dict[str, Any]:
        return {**super().describe(seed), "arrays": len(self._arrays)}

    def __repr__(self) -> str:
        return f"arrays({len(self._arrays)} of {self._sampling.length} samples)"


def _batches(arrays: tuple[Any, ...], plan: Plan, start: int) -> Iterator[tuple[Any, ...]]:
    # `_length` has refused what belongs to no backend
    readers = [backends.of(array).rows(array, plan.order) for array in arrays]  # type: ignore[union-attr]
    for batch in range(start, len(plan)):
        part = plan.part(batch)
        # A list first: while a tuple grows in prefetch's thread, gc.get_objects() in another would break it.
        yield tuple([read(part) for read in readers])
