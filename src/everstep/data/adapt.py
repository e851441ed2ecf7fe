"""Adapter from a user's data to a `Stream` (`as_stream`), and description of a stream (`describe`)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from everstep.arguments import checked_keywords, valid_name
from everstep.contracts.data import Stream
from everstep.data.adapters import IterableStream, SequenceStream, accessors, is_stateful
from everstep.data.other_libraries import class_names, refusal
from everstep.errors import ConfigError, DataError

# By name, so that nothing is imported for data that does not need it.
_LOADERS = {"torch.utils.data.dataloader.DataLoader": "everstep.backends.torch.user_dataloader"}
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"


def as_stream(data: Any) -> Stream:
    """Make a stream over `data`, by the first of these rules that fits.

    1. A `Stream` is used as it is.
    2. A torch `DataLoader` or torchdata's `StatefulDataLoader` is used as the user made it.
    3. A sequence of batches (list, tuple, range) is resumed by index.
    4. Any other iterable is resumed by drawing its batches again; data of libraries whose state is known to
       tell its place, and what `stateful` declares, by that state.
    """
    if isinstance(data, Stream):
        return data
    # Refused before the adapters, which would use the state_dict of data that cannot tell its position.
    if (told := refusal(data)) is not None:
        raise DataError(told)
    if (adapter := _loader_adapter(data)) is not None:
        return cast(Stream, importlib.import_module(adapter).DataLoaderStream(data))
    if (remedy := _refusal(data)) is not None:
        raise DataError(f"{type(data).__name__} {data!r:.60} does not give batches; {remedy}")
    if isinstance(data, Sequence) and not is_stateful(data):
        return SequenceStream(data)
    return IterableStream(data)


@checked_keywords
def stateful(data: Iterable[Any]) -> Stream:
    """Make a stream that reaches its place by the data's own state, at once; you assert that this is right.

    If the state leaves something out (a shuffle buffer, a generator), a resume is not exact.  `everstep
    check` tries it on copies.

    Args:
        data: has `state_dict` and `load_state_dict`; or its iterators have these, or `get_state` and
            `set_state`.
    """
    if _loader_adapter(data) is not None:
        return as_stream(data)  # the state of a StatefulDataLoader is used anyway, any other has no state
    if not is_stateful(data) and isinstance(data, Iterator):
        accessors(data, f"data ({type(data).__name__})")
    return IterableStream(data, "state")


def named(streams: Any) -> Mapping[str, Any]:
    if not isinstance(streams, Mapping):
        raise ConfigError(
            f"streams is a {type(streams).__name__}; give names to data, as in "
            '{"train": train, "valid": valid}'
        )
    for name in streams:
        valid_name("stream", name)
    return streams


def describe(stream: Stream, seed: int) -> dict[str, Any]:
    """Describe what decides a stream's batches in a run of this seed, as JSON values; at least its type."""
    own = stream.describe(seed)
    return {"kind": stream.kind} if own is None else own


def _loader_adapter(data: Any) -> str | None:
    names = class_names(data)
    if is_stateful(data) and _STATEFUL not in names:
        return None  # the loader knows its own state; the adapter would have to guess it
    return next((_LOADERS[name] for name in names if name in _LOADERS), None)


def _refusal(data: Any) -> str | None:
    """Say what to give instead of an object that Python iterates but that is surely a mistake."""
    if isinstance(data, str | bytes | bytearray | os.PathLike):
        return "give a list of batches, or an object whose __iter__ reads the file"
    if isinstance(data, Mapping):
        return "give its arrays: everstep.data.arrays(*data.values(), batch_size=...)"
    if isinstance(data, type):
        return f"give an object: {data.__name__}(...)"
    if hasattr(data, "shape"):
        return "give everstep.data.arrays(data, batch_size=...), or list(data) if its rows are batches"
    if hasattr(data, "__iter__"):
        return None
    if hasattr(data, "__getitem__"):
        return "give everstep.data.loader(data, batch_size=...), which makes batches of its samples"
    if callable(getattr(data, "open", None)):
        return f"if it is a stream of your own, derive {type(data).__name__} from everstep.data.Stream"
    if callable(data):
        return "call it: give what it returns, if that can be iterated"
    if inside := [name for name, value in getattr(data, "__dict__", {}).items() if _loader_adapter(value)]:
        return f"give the DataLoader inside it, its attribute {inside[0]!r}"
    return "give everstep.data.arrays(...), everstep.data.loader(...), a list, or any iterable of batches"
