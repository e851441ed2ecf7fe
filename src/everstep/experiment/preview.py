"""Batches and lines about them, for a person to look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from everstep.data import as_stream
from everstep.experiment.experiment import Experiment

_SHOWN = 6
"""Number of first values shown of each array."""


def batches(experiment: Experiment, name: str) -> Iterator[Any]:
    """Yield the batches of a stream's first pass as training would get them; only that stream is made."""
    stream = as_stream(experiment.stream(name))
    with closing(stream.open(name, 0, seed=experiment.seed or 0)) as cursor:
        yield from cursor


def described(batch: Any, name: str = "") -> Iterator[str]:
    """Yield a line for each array of a batch: its place, type, shape and first values."""
    if isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from described(part, f"{name}[{key!r}]")
    elif isinstance(batch, tuple | list) and batch and not isinstance(batch[0], int | float | str):
        for at, part in enumerate(batch):
            yield from described(part, f"{name}[{at}]")
    else:
        yield f"{name or 'batch'}: {_told(batch)}"


def _told(part: Any) -> str:
    if not (hasattr(part, "shape") and hasattr(part, "dtype")):
        text = repr(part)
        return f"{type(part).__name__} {text if len(text) <= 60 else text[:59] + '…'}"
    shape = ", ".join(map(str, part.shape))
    values = part.reshape(-1)[:_SHOWN].tolist()
    first = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
    more = ", …" if len(values) == _SHOWN else ""
    return f"{part.dtype} ({shape})  {first}{more}"
