"""Elements of CPU tensors, read where they are; tensors of a file, read by the operation that needs them.

`Tensor.numpy()` is not used: it marks the tensor's memory as fixed, so that the program could not `resize_()`
its own batch any more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from everstep.backends.numpy import WHOLE, layout_number, small_digest
from everstep.contracts.state import Unread

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types whose memory holds their elements; a subclass may keep them elsewhere."""
NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""safetensors' names of torch's element types; any other is kept as bytes with torch's own name."""
_INTEGERS = {
    torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}  # fmt: skip
"""Integers of the same size, where NumPy has none of torch's types."""
_NUMPY = {
    dtype: np.dtype(str(_INTEGERS.get(dtype, dtype)).removeprefix("torch."))
    for dtype in (*NAMES, torch.complex128)
}
"""The element type that NumPy reads, for each of torch's."""


def digest_small(arrays: Sequence[Any], seed: int) -> tuple[int, int]:
    """Fold the elements of small, contiguous, plain CPU tensors into a digest; each step comes here."""
    done = 0
    try:
        for tensor in arrays:
            if type(tensor) not in PLAIN:
                break
            at, number = _span(tensor.dtype, tensor.shape)
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


@lru_cache(maxsize=1024)
def _span(dtype: torch.dtype, shape: torch.Size) -> tuple[Callable[[int], Any] | None, int]:
    """Return the maker of the buffer at an address, None for one that is not small; and `layout_number`."""
    size = shape.numel() * dtype.itemsize
    # conjugated numbers are not what their memory says
    small = 0 < size <= WHOLE and dtype in _NUMPY and not dtype.is_complex
    number = layout_number(_NUMPY[dtype], tuple(shape)) if small else None
    return (None, 0) if number is None else ((ctypes.c_char * size).from_address, number)


def host_view(array: Any) -> NDArray[Any] | None:
    """View a dense CPU tensor as an array, without a copy; else None.

    Elements of bfloat16 and 8-bit floats are shown as integers.
    """
    if type(array) not in PLAIN:
        if getattr(type(array), "__torch_dispatch__", None) is not Tensor.__torch_dispatch__:
            return None  # it may keep its elements elsewhere
        with torch._C.DisableTorchFunctionSubclass():  # no code of its class runs: MONAI's, torchvision's
            array = array.as_subclass(Tensor)
    if not array.is_cpu or array.dtype not in _NUMPY or array.is_neg():
        return None
    try:
        whole = _INTEGERS.get(array.dtype)
        elements = array.detach()
        return np.from_dlpack(elements if whole is None else elements.view(whole))
    except (RuntimeError, BufferError):  # sparse, nested, conjugated: the memory has other values
        return None


class LateTensor(Tensor):
    """Tensor of a file: its shape and type are known, its elements are read at each operation, and not kept.

    A model's `load_state_dict` copies one tensor after the other, so one array at a time is in memory.
    """

    _reader: Callable[[], Tensor]
    _failure: Exception | None

    @classmethod
    def of(cls, array: Unread, dtype: torch.dtype, read: Callable[[], Tensor]) -> LateTensor:
        tensor: LateTensor = Tensor._make_wrapper_subclass(cls, array.shape, dtype=dtype)
        tensor._reader, tensor._failure = read, None
        return tensor

    def _read(self) -> Tensor:
        try:
            return self._reader()
        except Exception as error:
            self._failure = error
            raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = tree_map_only(LateTensor, lambda tensor: tensor._read(), (args, kwargs or {}))
        return func(*arguments[0], **arguments[1])


def raise_failure(tensors: Iterable[Any]) -> None:
    """Raise the error at which a tensor could not be read: `load_state_dict` makes a string of errors."""
    for tensor in tensors:
        if isinstance(tensor, LateTensor) and tensor._failure is not None:
            raise tensor._failure from None


def place_of(tensor: Tensor) -> Any:
    """Return what is equal for two tensors with the same elements in memory; None where this is not known."""
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided
    if not plain or not tensor.numel() or tensor.is_meta:
        return None
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def can_fill(live: Any, loaded: Any) -> bool:
    """Whether one tensor can be written to another one, and is there what it was, laid out as it was."""
    if not (isinstance(live, Tensor) and isinstance(loaded, Tensor)) or live.is_inference():
        return False
    forms = [(place[0], *place[2:]) for place in map(place_of, (live, loaded)) if place]
    return len(forms) == 2 and forms[0] == forms[1]
