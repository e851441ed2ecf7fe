"""Data that a tree of parameters describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from everstep.contracts.data import Cursor, Stream
from everstep.data import arrays, as_stream
from everstep.data.adapt import describe, is_stream
from everstep.data.adapters import SequenceStream
from everstep.data.arrays import Arrays
from everstep.data.wrappers import CursorWrapper, StreamWrapper
from everstep.errors import ConfigError
from everstep.tfutils.params_schema import Function
from everstep.trainer.train_inputs import TrainInputs


def data_of(params: Function, place: str, *, shuffle: bool) -> Any:
    """Make the data that `data_params` describe.

    A dictionary of arrays is divided into batches.  In training they are shuffled with a seed of their own,
    so that models with different seeds can share the data.
    """
    made = params()
    if not isinstance(made, Mapping):
        return made
    if "batch_size" not in params.arguments:
        raise ConfigError(f"{place}.batch_size is missing; give the number of samples in a batch")
    if not made:
        raise ConfigError(f"{place}.func returned an empty dictionary; return arrays by name")
    size = params.arguments["batch_size"]
    return Named(tuple(made), arrays(*made.values(), batch_size=size, shuffle=shuffle, seed=0))


def tagged(name: str, data: Any) -> Stream:
    """Make the stream of a validation: each batch comes with the validation's name."""
    return TrainInputs(as_stream(data), lambda batches: (name, next(batches)))


class Named(StreamWrapper):
    """Stream of batches as dictionaries of arrays."""

    stream: Arrays

    def __init__(self, names: tuple[str, ...], stream: Arrays) -> None:
        super().__init__(stream)
        self._names = names

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _NamedCursor(self._names, self.stream.open(purpose, pass_index, position, seed=seed))

    def describe(self, seed: int) -> dict[str, Any]:
        return {**describe(self.stream, seed), "names": list(self._names)}

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self._names, batch, strict=True)) for batch in self.stream)


class _NamedCursor(CursorWrapper):
    def __init__(self, names: tuple[str, ...], cursor: Cursor) -> None:
        super().__init__(cursor)
        self._names = names

    def __next__(self) -> dict[str, Any]:
        return dict(zip(self._names, next(self.cursor), strict=True))


class Example(Mapping[str, Any]):
    """Batch that shows the shapes of the data, read when a model first looks at it.

    Raises:
        ConfigError: at the first look, if reading a batch would take it from the training.
    """

    def __init__(self, data: Any, seed: int) -> None:
        self._data, self._seed = data, seed
        self._found: Mapping[str, Any] | None = None

    @property
    def _batch(self) -> Mapping[str, Any]:
        if self._found is None:
            stream = as_stream(self._data)
            if not is_stream(self._data) and not isinstance(stream, SequenceStream):
                raise ConfigError(
                    "model_params.func looks at its inputs, and to read one of a "
                    f"{type(self._data).__name__} would take it from the training; give sizes as arguments"
                )
            with closing(stream.open("example", 0, seed=self._seed)) as batches:
                self._found = next(batches)
        return self._found

    def __getitem__(self, name: str) -> Any:
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)
