"""The suite for backends: both of the house pass, and each rule finds its planted fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from everstep.backends.numpy import NumpyBackend
from everstep.backends.torch.backend import TorchBackend
from everstep.contracts.state import ArrayFacts, Backend, HostArray
from everstep.testing import check_backend

NUMPY_DTYPES = [*"?bBhHiIqQefdFD", ">f4", "M8[s]"]
NUMPY_ARRAYS = [
    *(np.arange(6).astype(dtype).reshape(2, 3) for dtype in NUMPY_DTYPES),
    np.array(2.5),
    np.zeros((0, 3)),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
    np.arange(12.0)[::2],
]


def draw_numpy() -> Any:
    return np.random.rand(3)


def make_numpy() -> dict[str, Any]:
    return {"weights": np.zeros(3), "noise": np.random.default_rng(1), "old": np.random.RandomState(1)}


def update_numpy(state: Mapping[str, Any]) -> None:
    state["weights"][:] += state["noise"].random(3) + state["old"].rand(3) + np.random.rand(3)


TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
TORCH_ARRAYS = [
    *(torch.arange(6.0).reshape(2, 3).to(dtype) for dtype in TORCH_DTYPES),
    torch.tensor(2.5),
    torch.zeros(0, 3),
    torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    torch.nn.Parameter(torch.arange(3.0)),
    torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
    torch.arange(3.0).requires_grad_(),
]


def draw_torch() -> Any:
    return torch.rand(3)


def make_torch() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    model[1].eval()  # a frozen part keeps its own mode
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "noise": torch.Generator().manual_seed(3)}


def accumulate_torch(state: Mapping[str, Any]) -> None:
    batch = torch.rand(5, 3) + torch.rand(5, 3, generator=state["noise"])
    state["model"](batch).square().mean().backward()


def update_torch(state: Mapping[str, Any]) -> None:
    state["optimizer"].zero_grad()
    accumulate_torch(state)
    state["optimizer"].step()


def check_numpy(backend: Backend) -> None:
    check_backend(backend, arrays=NUMPY_ARRAYS, draw=draw_numpy, make=make_numpy, update=update_numpy)


def check_torch(backend: Backend) -> None:
    check_backend(
        backend,
        arrays=TORCH_ARRAYS,
        draw=draw_torch,
        make=make_torch,
        update=update_torch,
        accumulate=accumulate_torch,
    )


def test_numpy_passes() -> None:
    check_numpy(NumpyBackend())


def test_torch_passes() -> None:
    check_torch(TorchBackend())


class LosesADtype(NumpyBackend):
    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        return super().to_host(array.astype(np.float32) if array.dtype == np.float64 else array, reuse)


class ComesBackWider(TorchBackend):
    def from_host(self, host: HostArray) -> Any:
        array = super().from_host(host)
        return array.to(torch.int32) if array.dtype == torch.int16 else array


class LosesABit(NumpyBackend):
    def from_host(self, host: HostArray) -> Any:
        array = super().from_host(host)
        return array + 0 if array.dtype == np.float32 else array  # -0.0 becomes 0.0

    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        return super().to_host(array + 0 if array.dtype == np.float32 else array, reuse)


class InMemoryOrder(NumpyBackend):
    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        host = super().to_host(array, None)
        return dataclasses.replace(host, data=np.frombuffer(array.tobytes("A"), np.uint8).copy())


class SharesMemory(NumpyBackend):
    def from_host(self, host: HostArray) -> Any:
        array = super().from_host(host)
        plain = host.dtype == "F32" and not host.extra
        return host.data.view(np.float32).reshape(host.shape) if plain else array


class TakesCopiesForTheSame(TorchBackend):
    def facts(self, array: Any) -> ArrayFacts:
        return super().facts(array)._replace(place=tuple(array.shape) or None)


class LooksAtRows(NumpyBackend):
    def rows(self, array: Any, order: Any) -> Any:
        return lambda places: array[places]


class ReadsOtherRows(TorchBackend):
    def rows(self, array: Any, order: Any) -> Any:
        return lambda places: array[places.start + 1 : places.stop + 1].clone()


class ForgetsItsBuffer(TorchBackend):
    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        return super().to_host(array, None)


class ConstantRandomState(TorchBackend):
    def set_random_state(self, state: Any) -> None:
        torch.manual_seed(0)


class IgnoresSeeds(NumpyBackend):
    def seed(self, seed: int) -> None:
        np.random.seed(0)


class KeepsAnAlias(NumpyBackend):
    def scalar(self, value: Any) -> Any:
        super().scalar(value)
        return value


class TakesComplex(NumpyBackend):
    def scalar(self, value: Any) -> Any:
        return super().scalar(value.real)


class SumsScalars(NumpyBackend):
    def scalar(self, value: Any) -> Any:
        return float(value.sum())


class NoEntry(TorchBackend):
    def entry(self, value: Any) -> Any:
        return None if isinstance(value, torch.Generator) else super().entry(value)


class TakesForeigners(TorchBackend):
    def entry(self, value: Any) -> Any:
        return super().entry(torch.zeros(1)) if type(value) is object else super().entry(value)


class CountsNothing(TorchBackend):
    def update_counter(self, objects: Mapping[str, Any]) -> Any:
        watch = super().update_counter(objects)
        watch.close()
        return watch


class NeverCloses(TorchBackend):
    def update_counter(self, objects: Mapping[str, Any]) -> Any:
        watch = super().update_counter(objects)
        real = watch.close
        self.closers = [*getattr(self, "closers", []), real]
        watch.close = lambda: None
        return watch


class LosesGradients(TorchBackend):
    def update_counter(self, objects: Mapping[str, Any]) -> Any:
        watch = super().update_counter(objects)
        watch.gradients = lambda: None
        return watch


class StaysInEvaluation(TorchBackend):
    @contextmanager
    def evaluation_mode(self, objects: Mapping[str, Any]) -> Iterator[None]:
        with super().evaluation_mode(objects):
            yield
        objects["model"].train()


TICKS = count()


class DescribesTheMoment(NumpyBackend):
    def fingerprint(self, objects: Mapping[str, Any]) -> dict[str, str]:
        return {"clock": str(next(TICKS))}


class HasNoFingerprint(TorchBackend):
    def fingerprint(self, objects: Mapping[str, Any]) -> dict[str, str]:
        return {}


FAULTS: list[tuple[type[Any], str]] = [
    (LosesADtype, "host bytes|comes back as"),
    (ComesBackWider, "torch.int16.*comes back as a Tensor torch.int32"),
    (LosesABit, "float32.*bits are lost"),
    (InMemoryOrder, "the host bytes read"),
    (SharesMemory, "float32.*shares memory"),
    (TakesCopiesForTheSame, r"facts\(\) gives the place"),
    (LooksAtRows, r"rows\(\) shares memory"),
    (ReadsOtherRows, r"rows\(\) gives"),
    (ForgetsItsBuffer, "must be used again"),
    (ConstantRandomState, "does not bring back"),
    (IgnoresSeeds, "another seed"),
    (KeepsAnAlias, "is read as 4.0"),
    (TakesComplex, "a complex number"),
    (SumsScalars, "two .* elements"),
    (NoEntry, "None for 'noise'"),
    (TakesForeigners, "not the framework's"),
    (CountsNothing, r"counted \[0, 0, 0\]"),
    (NeverCloses, "a closed counter still counts"),
    (LosesGradients, "an open window would be lost"),
    (StaysInEvaluation, "put every mode back"),
    (DescribesTheMoment, "something else the second time"),
    (HasNoFingerprint, "give strings by name"),
]


@pytest.mark.campaign("long", gate=8)
@pytest.mark.parametrize(("kind", "message"), FAULTS, ids=[kind.__name__ for kind, _ in FAULTS])
def test_each_fault_is_found(kind: type[Any], message: str) -> None:
    backend = kind()
    check = check_torch if issubclass(kind, TorchBackend) else check_numpy
    try:
        with pytest.raises(AssertionError, match=message):
            check(backend)
    finally:
        for close in getattr(backend, "closers", []):
            close()
