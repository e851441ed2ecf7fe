"""What cannot be data, or an argument of data, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from everstep.contracts.data import Share
from everstep.data import arrays, as_stream, checked, loader, prefetch, stateful
from everstep.errors import ConfigError, DataError, NotResumableError

X = np.zeros((11, 2))
SAMPLES = TensorDataset(torch.arange(4))


class Lines:
    def __iter__(self) -> Any:
        return iter(range(3))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: arrays(batch_size=2), DataError, "no array; give it at least one"),
    (lambda: arrays(X, X[:4], batch_size=2), DataError, r"different lengths \[11, 4\]"),
    (lambda: arrays([1, 2], batch_size=2), DataError, "given a list; give NumPy arrays"),
    (lambda: arrays(np.float32(3), batch_size=2), DataError, "given a float32"),
    (lambda: arrays(np.array(3), batch_size=2), DataError, r"an array of shape \(\)"),
    (lambda: arrays(X, batch_size=0), ConfigError, "batch_size=0: give an integer, 1 or more"),
    (lambda: arrays(X, batch_size=1, seed="x"), ConfigError, "seed='x': give an integer, or None"),  # type: ignore[arg-type]
    (lambda: loader(Endless(), 2), DataError, "a Endless, whose samples cannot be fetched by index; give"),
    (lambda: loader(DataLoader(SAMPLES), 2), DataError, "given a DataLoader"),
    (lambda: loader(Unsized(), 2), DataError, "a Unsized without a length; give it __len__"),
    (lambda: loader([], 2), DataError, "0 samples"),
    (lambda: loader(SAMPLES, 0), ConfigError, "batch_size=0"),
    (lambda: loader(SAMPLES, 2, prefetch_factor=3), ValueError, "prefetch_factor"),
    (lambda: prefetch([1], 0), ConfigError, "buffer=0: give an integer, 1 or more"),
    (lambda: prefetch([1], 1.5), ConfigError, "buffer=1.5: give an integer, 1 or more"),  # type: ignore[arg-type]
    (lambda: prefetch(loader(SAMPLES, 2)), ConfigError, "give the loader num_workers=1"),
    (lambda: prefetch(DataLoader(SAMPLES)), ConfigError, "give the DataLoader num_workers=1"),
    (lambda: checked([], empty_batch="warning"), ConfigError, "did you mean 'warn'"),  # type: ignore[arg-type]
    (lambda: checked([], empty_batches="warn"), ConfigError, "did you mean 'empty_batch'"),  # type: ignore[call-arg]
    (lambda: checked([], sources="image"), ConfigError, "sources='image': give a list of keys"),
    (lambda: Share(2, 2), ConfigError, "rank=2, size=2: give a rank"),
    (lambda: Share(0, 2, "weigh"), ConfigError, "did you mean 'weight'"),  # type: ignore[arg-type]
    (lambda: stateful(iter([1])), NotResumableError, "neither state_dict and load_state_dict nor"),
    (lambda: as_stream("digits.npz"), DataError, "str 'digits.npz' does not give batches.* list of batches"),
    (lambda: as_stream({"x": 1}), DataError, r"dict .*everstep\.data\.arrays\(\*data\.values\(\)"),
    (lambda: as_stream(np.ones(3)), DataError, r"ndarray .*everstep\.data\.arrays"),
    (lambda: as_stream(torch.ones(3)), DataError, r"Tensor .*everstep\.data\.arrays"),
    (lambda: as_stream(SAMPLES), DataError, r"TensorDataset .*everstep\.data\.loader"),
    (lambda: as_stream(Lines), DataError, r"type .*give an object: Lines\(\.\.\.\)"),
    (lambda: as_stream(len), DataError, r"builtin_function.*call it"),
    (lambda: as_stream(SimpleNamespace(own=DataLoader(SAMPLES))), DataError, "DataLoader inside it, .*'own'"),
    (lambda: as_stream(None), DataError, r"NoneType None does not give batches.*everstep\.data\.arrays"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_what_is_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_any_object_with_a_length_and_items_can_be_loaded() -> None:
    [x] = next(loader([(torch.tensor(1),)] * 4, 2).open("train", 0, seed=0))
    assert x.tolist() == [1, 1]
