"""Facts about data of other libraries, by class names: where a `state_dict` is not the whole place."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

from everstep.contracts.data import Share
from everstep.errors import DataError

_ACCELERATE = "accelerate.data_loader.DataLoaderAdapter"
_HUGGING_FACE = "datasets.iterable_dataset.IterableDataset"
_BUFFERED = "datasets.iterable_dataset.BufferShuffledExamplesIterable"


def class_names(data: Any) -> list[str]:
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(data).__mro__]


def refuse_prepared(data: Any) -> None:
    """Refuse a loader of accelerate's, which cannot tell its place in spite of its `state_dict`."""
    if _ACCELERATE in class_names(data):
        raise DataError(
            f"a {type(data).__name__} that accelerate has prepared reads a batch ahead and cannot say its "
            "place; prepare the model and the optimizer only, give the loop the DataLoader itself, and bring "
            "each batch to accelerator.device with accelerate.utils.send_to_device"
        )


def declared_ranks(data: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks for which data says that it splits itself; else None.

    By attributes `rank` and `num_replicas`, as of torch's `DistributedSampler`, or as Hugging Face's.
    """
    if is_hugging_face(data) and (node := data._distributed) is not None:
        return node.rank, node.world_size
    rank, size = getattr(data, "rank", None), getattr(data, "num_replicas", None)
    return (rank, size) if isinstance(rank, int) and isinstance(size, int) else None


def require_ranks(data: Any, share: Share) -> None:
    """Require that data says that it splits itself as `share` does."""
    kind, part = type(data).__name__, declared_ranks(data)
    if part is None:
        raise DataError(
            f"a {kind} does not say that it splits itself, so each of {share.size} ranks would be handed the "
            "same batches; use everstep.data.arrays, everstep.data.loader or a DataLoader with a "
            "DistributedSampler, or give it the attributes num_replicas and rank if it hands out one rank's "
            "part, as many batches as any other rank's"
        )
    if part != (share.rank, share.size):
        raise DataError(
            f"a {kind} hands out the part of rank {part[0]} of {part[1]}, and this is rank {share.rank} of "
            f"{share.size}; make it with num_replicas={share.size} and rank={share.rank}"
        )


def is_hugging_face(data: Any) -> bool:
    """Whether data is Hugging Face's `IterableDataset`.

    Each pass begins at its start, so its state after a pass does not matter.  Its `state_dict` counts from
    where it was opened last, in nested chunks: it holds, beside the place, how the place was reached.
    """
    return _HUGGING_FACE in class_names(data)


def takes_count(data: Any) -> bool:
    """Whether the data's `state_dict` takes the number of samples used (MosaicML's streaming datasets)."""
    try:
        return {"num_samples", "from_beginning"} <= set(inspect.signature(data.state_dict).parameters)
    except (AttributeError, TypeError, ValueError):
        return False


def knows_its_place(data: Any) -> bool:
    """Whether the state of data, or of its iterators, is known to be the whole place in a pass."""
    if is_hugging_face(data):
        return not shuffle_buffers(data)
    return takes_count(data) or any(
        name.split(".")[0] in ("grain", "torchdata") for name in class_names(data)
    )


def ends_when_asked(data: Any) -> bool:
    """Whether a state at the end of a pass makes the next one empty (MosaicML's datasets and loader)."""
    return takes_count(data) or "streaming.base.dataloader.StreamingDataLoader" in class_names(data)


def begin_anew(data: Any) -> None:
    """Make a pass begin at the start: in the same epoch, Hugging Face's begins where it was resumed."""
    if is_hugging_face(data):
        data._starting_state_dict = None


def shuffle_buffers(data: Any) -> dict[str, str]:
    """Describe the `shuffle(...)` buffers of a Hugging Face `IterableDataset`; its state lacks them.

    The digests are of the generators' states, which differ at each start without a seed.
    """
    parts = _parts(getattr(data, "_ex_iterable", None))
    buffers = [part for part in parts if _BUFFERED in class_names(part)]
    states = [hashlib.sha256(repr(each.generator.bit_generator.state).encode()) for each in buffers]
    return {
        f"shuffle.{number}": f"{buffer.buffer_size} samples, generator {state.hexdigest()[:8]}"
        for number, (buffer, state) in enumerate(zip(buffers, states, strict=True))
    }


def _parts(iterable: Any) -> Iterator[Any]:
    if iterable is not None:
        yield iterable
        for inner in [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]:
            yield from _parts(inner)
