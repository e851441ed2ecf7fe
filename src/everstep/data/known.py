"""What is known of other libraries' data, by the names of its classes: whose `state_dict` does not hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

_ACCELERATE = "accelerate.data_loader.DataLoaderAdapter"
_HUGGING_FACE = "datasets.iterable_dataset.IterableDataset"
_BUFFERED = "datasets.iterable_dataset.BufferShuffledExamplesIterable"


def class_names(data: Any) -> list[str]:
    """The full names of its class and those above."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(data).__mro__]


def refusal(data: Any) -> str | None:
    """Why data that has a `state_dict` cannot say its place all the same, and what to give instead."""
    if _ACCELERATE in class_names(data):
        return (
            f"a {type(data).__name__} that accelerate has prepared reads a batch ahead and cannot say its "
            "place; prepare the model and the optimizer only, give the loop the DataLoader itself, and bring "
            "each batch to accelerator.device with accelerate.utils.send_to_device"
        )
    return None


def begins_anew(data: Any) -> bool:
    """Whether each of its passes begins at its start, so that what a pass leaves behind says nothing."""
    return _HUGGING_FACE in class_names(data)


def depends_on_path(data: Any) -> bool:
    """Whether its `state_dict` says more than the place: also how the place was reached.

    Hugging Face's `IterableDataset` counts from where it was opened last, in nested chunks, so two equal runs
    of which one was resumed would seem to differ.
    """
    return _HUGGING_FACE in class_names(data)


def begin_anew(data: Any) -> None:
    """Before a pass from the start: Hugging Face's would begin where it was resumed, in the same epoch."""
    if begins_anew(data):
        data._starting_state_dict = None


def shuffle_buffers(data: Any) -> dict[str, str]:
    """Of a Hugging Face `IterableDataset` what its `shuffle(...)` does; no state of it holds such buffers.

    Returns:
        Facts for `describe`: the sizes, and where the generators begin, which without a seed is elsewhere at
        each start.  Empty for any other data.
    """
    parts = _parts(getattr(data, "_ex_iterable", None))
    buffers = [part for part in parts if _BUFFERED in class_names(part)]
    return {
        f"shuffle.{number}": f"{buffer.buffer_size} samples, generator {_digest(buffer.generator)}"
        for number, buffer in enumerate(buffers)
    }


def _digest(generator: Any) -> str:
    return hashlib.sha256(repr(generator.bit_generator.state).encode()).hexdigest()[:8]


def _parts(iterable: Any) -> Iterator[Any]:
    if iterable is not None:
        yield iterable
        for inner in [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]:
            yield from _parts(inner)
