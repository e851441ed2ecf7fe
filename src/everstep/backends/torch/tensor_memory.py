"""Elements of CPU tensors, read by their address.

`Tensor.numpy()` is not used: it takes eight times as long as the address, and it marks the tensor's memory as
fixed, so that the program could not `resize_()` its own batch any more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everstep.backends.numpy import WHOLE, layout_number, small_digest
from everstep.backends.torch.older_torch import FLOAT8

_PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose memory holds their elements; a subclass may keep them elsewhere."""
_INTEGERS = {torch.bfloat16: "int16"} | dict.fromkeys(FLOAT8, "uint8")
_SAME = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
_NUMPY = {dtype: np.dtype(str(dtype).removeprefix("torch.")) for dtype in _SAME} | {
    dtype: np.dtype(name) for dtype, name in _INTEGERS.items()
}
"""NumPy's element type for each of torch's; integers of the same size where NumPy has none."""


_Span: TypeAlias = tuple[Callable[[int], Any] | None, int]
"""(maker of the buffer at an address, `layout_number`) of small tensors; no maker: use `host_view`."""
_SPANS: dict[tuple[torch.dtype, torch.Size], _Span] = {}
_MOST_SPANS = 1024


def digest_small(arrays: Sequence[Any], seed: int) -> tuple[int, int]:
    """Fold the elements of small, contiguous, plain CPU tensors into a digest.

    Each step comes here with its batch: all is done in one loop.
    """
    done = 0
    try:
        for tensor in arrays:
            if type(tensor) not in _PLAIN:
                break
            layout = (tensor.dtype, tensor.shape)
            at, number = _SPANS.get(layout) or _span(*layout)
            if at is None or not (tensor.is_cpu and tensor.is_contiguous()):
                break
            # after is_cpu: elsewhere this is an address on a device
            if not (address := tensor.data_ptr()):
                break
            seed = small_digest(at(address), seed ^ number)
            done += 1
    except RuntimeError:  # sparse, nested ...
        pass
    return seed, done


def _span(dtype: torch.dtype, shape: torch.Size) -> _Span:
    size = shape.numel() * dtype.itemsize
    # conjugated numbers are not what their memory says
    small = 0 < size <= WHOLE and dtype in _NUMPY and not dtype.is_complex
    number = layout_number(_NUMPY[dtype], tuple(shape)) if small else None
    span: _Span = (None, 0) if number is None else ((ctypes.c_char * size).from_address, number)
    if len(_SPANS) >= _MOST_SPANS:  # texts of many lengths
        _SPANS.clear()
    _SPANS[dtype, shape] = span
    return span


def host_view(array: Any) -> NDArray[Any] | None:
    """View a plain dense CPU tensor as an array, without a copy; else None.

    Elements of bfloat16 and 8-bit floats are shown as integers.
    """
    if type(array) not in _PLAIN or not array.is_cpu or (dtype := _NUMPY.get(array.dtype)) is None:
        return None
    try:
        if array.is_conj() or array.is_neg():  # the memory has other values
            return None
        if not (address := array.data_ptr()):
            return np.empty(array.shape, dtype) if array.numel() == 0 else None
        return np.asarray(_Memory(address, tuple(array.shape), array.stride(), dtype))
    except RuntimeError:  # sparse, nested ...
        return None


class _Memory:
    """Description of an array's memory, as NumPy asks for it."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": shape,
            "strides": tuple(stride * dtype.itemsize for stride in strides),
            "data": (address, True),  # not to be written
        }
