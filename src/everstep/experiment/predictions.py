"""Files of predictions, and batches for a person to look at."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from everstep.data import as_stream
from everstep.durable import write_whole
from everstep.errors import ConfigError, DataError, nearest
from everstep.experiment.experiment import Experiment

_KINDS = (".npy", ".npz", ".jsonl")


def check(path: Path, overwrite: bool = False) -> None:
    """Refuse a file that cannot be written."""
    if path.suffix not in _KINDS:
        raise ConfigError(f"{path} ends in {path.suffix!r}; {nearest(path.suffix, _KINDS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.absolute().parent} is not a folder; make the folder, or give another file")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; give another file, or --overwrite")


def write(path: Path, predictions: Iterable[Any]) -> int:
    """Write predictions into one file, whole or not at all; returns the number of samples.

    `predictions`: for each batch an array or tensor, or name to array, of shape (samples, ...).
    """
    parts: dict[str, list[Any]] = {}
    for number, batch in enumerate(predictions, 1):
        columns = batch if isinstance(batch, Mapping) else {"predictions": batch}
        columns = {str(name): np.atleast_1d(as_array(value)) for name, value in columns.items()}
        if number > 1 and parts.keys() != columns.keys():
            message = f"batch {number} has the predictions {[*columns]}, and the first batch {[*parts]}"
            raise DataError(f"{message}; return the same names for each batch")
        for name, array in columns.items():
            parts.setdefault(name, []).append(array)
    if not parts:
        raise DataError("the stream gave no batch to predict; give it data")
    try:
        arrays = {name: np.concatenate(pieces) for name, pieces in parts.items()}
        (samples,) = {len(array) for array in arrays.values()}
    except ValueError as error:
        shapes = {name: [piece.shape for piece in pieces[:3]] for name, pieces in parts.items()}
        message = f"the predictions do not fit together: {shapes}; return arrays of shape (samples, ...)"
        raise DataError(message) from error
    for name, array in arrays.items():
        if array.dtype.hasobject or (path.suffix == ".jsonl" and array.dtype.kind not in "biufU"):
            raise DataError(f"{name!r} is {array.dtype}, no type of {path.suffix}; return numbers or strings")
    if path.suffix == ".npy" and len(arrays) > 1:
        raise DataError(f"there are predictions named {', '.join(arrays)}; give a .npz or .jsonl file")
    write_whole(path, {".npy": _npy, ".npz": npz, ".jsonl": _lines}[path.suffix](arrays), "predictions")
    return samples


def _npy(arrays: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    (array,) = arrays.values()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def npz(arrays: Mapping[str, Any]) -> bytes:
    """Make a .npz file of arrays with any names (`numpy.savez` takes some names for its own arguments)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy")  # without the time of day: equal arrays give equal bytes
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getvalue()


def as_array(value: Any) -> Any:
    """Convert a number, array or tensor to a NumPy array."""
    if hasattr(value, "detach"):  # a tensor, on whatever device
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _lines(arrays: Mapping[str, Any]) -> bytes:
    """Write a line of JSON for each sample; nan, inf and -inf become strings, as in output of `--json`."""
    columns = []
    for array in arrays.values():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            array = np.where(np.isfinite(array), array.astype(object), array.astype(str))
        columns.append(array.tolist())
    rows = (dict(zip(arrays, values, strict=True)) for values in zip(*columns, strict=True))
    lines = (row["predictions"] if row.keys() == {"predictions"} else row for row in rows)
    return "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines).encode()


_SHOWN = 6
"""Number of first values shown of each array."""


def batches(experiment: Experiment, name: str) -> Iterator[Any]:
    """Yield the batches of a stream's first pass as training would get them; only that stream is made."""
    stream = as_stream(experiment.stream(name))
    with closing(stream.open(name, 0, seed=experiment.seed or 0)) as cursor:
        yield from cursor


def describe_batch(batch: Any, name: str = "") -> Iterator[str]:
    """Yield a line for each array of a batch: its place, type, shape and first values."""
    if isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from describe_batch(part, f"{name}[{key!r}]")
    elif isinstance(batch, tuple | list) and batch and not isinstance(batch[0], int | float | str):
        for at, part in enumerate(batch):
            yield from describe_batch(part, f"{name}[{at}]")
    elif hasattr(batch, "shape") and hasattr(batch, "dtype"):
        shape = ", ".join(map(str, batch.shape))
        values = batch.reshape(-1)[:_SHOWN].tolist()
        first = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
        more = ", …" if len(values) == _SHOWN else ""
        yield f"{name or 'batch'}: {batch.dtype} ({shape})  {first}{more}"
    else:
        yield f"{name or 'batch'}: {type(batch).__name__} {repr(batch)[:60]}"
