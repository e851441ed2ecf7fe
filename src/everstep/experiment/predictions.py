"""Predictions as files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everstep.durable import write_whole
from everstep.errors import ConfigError, DataError, nearest

_KINDS = (".npy", ".npz", ".jsonl")


def check(path: Path) -> None:
    """Refuse a file that cannot be written.

    Raises:
        ConfigError: another ending, or no such folder.
    """
    if path.suffix not in _KINDS:
        raise ConfigError(f"{path} ends in {path.suffix!r}; {nearest(path.suffix, _KINDS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.absolute().parent} is no folder; make it, or give another file")


def write(path: Path, predictions: Iterable[Any]) -> int:
    """Write the predictions of batches into one file, whole or not at all; returns how many samples.

    Args:
        predictions: of each batch an array or tensor, or name to array; one row a sample.

    Raises:
        DataError: there are none, or they do not fit together or the file.
    """
    parts: dict[str, list[Any]] = {}
    for batch in predictions:
        for name, array in _named(batch).items():
            parts.setdefault(name, []).append(array)
    if not parts:
        raise DataError("the stream gave no batch to predict; give it data")
    try:
        arrays = {name: np.concatenate(pieces) for name, pieces in parts.items()}
    except ValueError as error:
        raise DataError(
            f"the predictions of the batches do not fit together ({error}); return arrays of shape "
            "(samples, ...) from inference_step"
        ) from error
    write_whole(path, _bytes(path, arrays), "predictions")
    return len(next(iter(arrays.values())))


def _named(batch: Any) -> dict[str, Any]:
    given = batch if isinstance(batch, Mapping) else {"predictions": batch}
    return {str(name): np.atleast_1d(_array(value)) for name, value in given.items()}


def _array(value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor, on whatever device
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _bytes(path: Path, arrays: dict[str, Any]) -> bytes:
    if path.suffix == ".jsonl":
        return "".join(f"{json.dumps(line)}\n" for line in _lines(arrays)).encode()
    buffer = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(buffer, **arrays)
    elif len(arrays) > 1:
        raise DataError(f"there are predictions named {', '.join(arrays)}; give a .npz or .jsonl file")
    else:
        np.save(buffer, next(iter(arrays.values())), allow_pickle=False)
    return buffer.getvalue()


def _lines(arrays: dict[str, Any]) -> Iterator[Any]:
    for values in zip(*(array.tolist() for array in arrays.values()), strict=True):
        line = dict(zip(arrays, values, strict=True))
        yield line["predictions"] if arrays.keys() == {"predictions"} else line
