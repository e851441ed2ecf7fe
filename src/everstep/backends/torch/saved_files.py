"""Files of torch.save, read without running anything in them, and folders of torch.distributed.checkpoint."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor

from everstep.backends.torch.backend import BACKEND
from everstep.backends.torch.backend import dtype_name as _name
from everstep.backends.torch.older_torch import save_alone
from everstep.contracts.state import HostArray, Unread
from everstep.errors import CheckpointError


def read_saved(file: Path | BinaryIO, where: str) -> Any:
    """Return the tree of a torch.save file, with an `Unread` in place of each tensor.

    Args:
        file: path of the file, whose tensors stay on disk until they are read; or the file's content.
        where: place of the file, for messages.

    Raises:
        CheckpointError: the file has other things than tensors and plain values, or is damaged.
    """
    size = file.stat().st_size if isinstance(file, Path) else file.seek(0, 2)
    if not isinstance(file, Path):
        file.seek(0)
    try:
        with warnings.catch_warnings():  # about typed storages and the like: nothing that a reader could mend
            warnings.simplefilter("ignore")
            mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
            tree = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        raise CheckpointError(f"{where} {_refusal(str(error))}") from None
    except Exception as error:  # bytes of anybody: torch's reader raises whatever they lead to
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{where} is damaged, or is not a file of torch.save ({first}); give another copy"
        ) from error
    _require_tree(tree, size, where)
    return _unread(tree, size, where)


def _require_tree(tree: Any, most: int, where: str) -> None:
    """Refuse values that contain themselves, or that a small file shows a great many times."""
    left, count = [tree], 0
    while left:
        value = left.pop()
        count += 1
        if count > most:  # each value of its own takes a byte
            raise CheckpointError(
                f"{where} has a value that contains itself, or is there too often; save model.state_dict()"
            )
        if isinstance(value, Tensor) and value.is_nested:
            raise CheckpointError(f"{where} has a nested tensor; save its parts")
        if isinstance(value, Mapping):
            left.extend(value.values())
        elif type(value) in (list, tuple):
            left.extend(value)


def _refusal(told: str) -> str:
    """Say in a clause why torch did not read a file."""
    found = re.search(r"GLOBAL ([\w.]+)", told)
    if found is None:
        first = told.strip().partition("\n")[0]
        return f"is damaged, or is not a file of torch.save ({first:.200}); give another copy"
    return (
        f"has objects that only code can make ({found[1]}), and is not read: nothing of a file may run here; "
        "load it in the program that wrote it, and save model.state_dict() alone"
    )


def _unread(value: Any, most: int, where: str) -> Any:
    """Return a tree with an `Unread` in place of each tensor.

    Args:
        most: number of bytes of the file; a tensor with more shows some bytes many times.
    """
    if isinstance(value, Tensor):
        if value.numel() * value.element_size() > most:
            raise CheckpointError(
                f"{where} has a tensor of {tuple(value.shape)}, which is larger than the file; save it with "
                ".contiguous()"
            )
        return Unread(_name(value.dtype), tuple(value.shape), lambda: _host(value))
    if isinstance(value, Mapping):
        return type(value)((key, _unread(each, most, where)) for key, each in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_unread(each, most, where) for each in value)
    return value


def _host(tensor: Tensor) -> HostArray:
    host = BACKEND.to_host(tensor.detach(), None)
    return HostArray(host.dtype, host.shape, host.data, host.backend, host.extra)


def dtype_name(name: str) -> str:
    """Return the name of an element type for `Unread`, by torch's own name ("torch.float32")."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no element type {name!r:.100}")
    return _name(found)


def write_distributed(folder: Path, arrays: Mapping[str, HostArray]) -> None:
    """Write arrays by name into a folder for `torch.distributed.checkpoint.load`, and sync the files."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    state = OrderedDict((name, BACKEND.late(_of_host(array))) for name, array in arrays.items())
    with warnings.catch_warnings():  # torch warns that one process saves, which is meant here
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_alone(state, FileSystemWriter(folder))


def _of_host(array: HostArray) -> Unread:
    return Unread(array.extra.get("dtype", array.dtype), array.shape, lambda: array)
