"""Streams of a Trainer, by name; data that is given in place of a name gets one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from everstep.contracts.data import Cursor, Stream
from everstep.data import adapt, as_stream
from everstep.data.cursor import CursorWrapper, StreamWrapper
from everstep.errors import ConfigError, DataError, nearest

Data = Any
"""A stream, a DataLoader, anything iterable (`everstep.data`)."""

Fetch = Callable[[Iterator[Any]], Any]
"""Function that draws the next inputs of a step from batches."""


class NamedStreams:
    """Streams by name, with the use of each that keeps its own place in the data."""

    def __init__(self, streams: Mapping[str, Data]) -> None:
        self.named = {name: as_stream(data) for name, data in adapt.named(streams).items()}
        self._uses: dict[int, tuple[Any, str, str]] = {}
        """Objects that keep their own place in the data, with their use and their stream's name, by id."""
        self._unnamed: dict[str, tuple[Data, Stream]] | None = None
        """Data given in place of a name, with its stream, by the name that it got; None outside a loop."""
        self._inputs: dict[str, TrainInputs] = {}
        """Streams of inputs, for a task that makes them of several batches, by name; empty outside a loop."""

    @contextmanager
    def in_a_loop(self) -> Iterator[None]:
        """Keep the streams of data without a name in the block, so that they are the same in every epoch."""
        # put back afterwards: data without a name belongs to this loop alone
        uses = dict(self._uses)
        self._unnamed = {}
        try:
            yield
        finally:
            self._uses, self._unnamed = uses, None
            self._inputs.clear()

    def get(self, name: str) -> Stream:
        if name not in self.named:
            raise ConfigError(f"no stream is named {name!r}; {nearest(name, self.named)}")
        return self.named[name]

    def chosen(self, items: Iterable[Any] | str, default: str) -> list[tuple[str, Stream]]:
        """Return (name, stream) of each stream that was given by name, as data, or as name to data."""
        if isinstance(items, Mapping):
            return [(name, self._over(name, data)) for name, data in adapt.named(items).items()]
        if not isinstance(items, str | list | tuple):
            kind = type(items).__name__
            raise ConfigError(f"the streams of an epoch are a {kind}; give a list, a name, or names to data")
        streams: dict[str, Stream] = {}
        for number, each in enumerate([items] if isinstance(items, str) else items, 1):
            name = each if isinstance(each, str) else default if number == 1 else f"{default}{number}"
            stream = self.get(name) if isinstance(each, str) else self._over(name, each)
            if streams.setdefault(name, stream) is not stream:
                raise ConfigError(f"two streams are called {name!r}; give names: {{'train': a, 'more': b}}")
        return list(streams.items())

    def _over(self, name: str, data: Data) -> Stream:
        """Return the stream over data given in place of a name; in a loop the same for the same data."""
        if self._unnamed is None:
            return as_stream(data)
        known = self._unnamed.get(name)
        if known is None or known[0] is not data:
            known = self._unnamed[name] = (data, as_stream(data))
        return known[1]

    def inputs(self, name: str, stream: Stream, fetch: Fetch) -> TrainInputs:
        """Return the stream of inputs that `fetch` makes of a stream; in a loop the same in every epoch."""
        known = self._inputs.get(name)
        if known is None or known.stream is not stream:
            known = self._inputs[name] = TrainInputs(stream, fetch)
        return known

    def require_apart(self, name: str, stream: Stream, use: str) -> None:
        """Refuse a second use of data that keeps its own place: an evaluation would move the training's."""
        place = stream.keeps_place
        if place is None:
            return
        _, its_use, its_name = self._uses.setdefault(id(place), (place, use, name))
        if its_use != use:
            raise ConfigError(
                f"the {use} on stream {name!r} reads the {type(place).__name__} that the {its_use} on "
                f"stream {its_name!r} reads, which keeps its own place in the data and would lose it; "
                "give a second one over the same samples as a stream of its own"
            )


class TrainInputs(StreamWrapper):
    """Stream of the inputs that `fetch` draws from another stream, which keeps the position."""

    # what the run is handed is not what the stream inside draws
    source, replayed = Stream.source, None

    def __init__(self, stream: Stream, fetch: Fetch) -> None:
        super().__init__(stream)
        self._fetch = fetch

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _Cursor(self.stream.open(purpose, pass_index, position, seed=seed), self._fetch)

    def sample_ids(self, purpose: str, pass_index: int, index: int, *, seed: int) -> None:
        """Return None: the task decides how many batches an input takes."""


class _Cursor(CursorWrapper):
    """Cursor of inputs; several batches have no weight if the parts of the ranks differ in size."""

    def __init__(self, cursor: Cursor, fetch: Fetch) -> None:
        super().__init__(cursor)
        self._fetch = fetch

    def remaining(self) -> int | None:
        return None  # the task decides how many batches an input takes

    def __next__(self) -> Any:
        start = self.cursor.done or 0
        inputs = self._fetch(self.cursor)
        drew = (self.cursor.done or 0) - start
        if drew > 1 and self.cursor.weight != 1.0:
            raise DataError(
                f"next_train_inputs drew {drew} batches, and the ranks' parts of the last differ in size; "
                'give uneven="drop", or drop_last=True, with a batch size that their number divides'
            )
        return inputs
