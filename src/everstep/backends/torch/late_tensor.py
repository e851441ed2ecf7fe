"""Tensors that are read from a file by the operation that needs their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from everstep.contracts.state import Unread


class LateTensor(Tensor):
    """Tensor of a file: its shape and type are known, its elements are read at each operation, and not kept.

    A model's `load_state_dict` copies one tensor after the other, so one array at a time is in memory.
    """

    _reader: Callable[[], Tensor]
    _failure: Exception | None

    @classmethod
    def of(cls, array: Unread, dtype: torch.dtype, read: Callable[[], Tensor]) -> LateTensor:
        """Make the tensor of an array.

        Args:
            read: reads the array, as a tensor with memory of its own.
        """
        made: LateTensor = Tensor._make_wrapper_subclass(cls, array.shape, dtype=dtype)
        made._reader, made._failure = read, None
        return made

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
        """Run an operation on the elements."""
        given = tree_map_only(LateTensor, lambda tensor: tensor._read(), (args, kwargs or {}))
        return func(*given[0], **given[1])


def raise_failure(tensors: Iterable[Any]) -> None:
    """Raise the error at which a tensor could not be read: `load_state_dict` makes a string of errors."""
    for tensor in tensors:
        if isinstance(tensor, LateTensor) and tensor._failure is not None:
            raise tensor._failure from None


def place_of(tensor: Tensor) -> Any:
    """Return what is equal for two tensors with the same elements in memory; None where this is not known."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or not tensor.numel() or tensor.is_meta:
        return None
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
