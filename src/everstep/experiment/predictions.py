"""Files of predictions, and batches for a person to look at."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

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
    """Write the predictions of all batches into one file, whole or not at all; returns the number of samples.

    Args:
        predictions: for each batch an array or tensor, or name to array, of shape (samples, ...).
    """
    parts: dict[str, list[Any]] = {}
    for number, batch in enumerate(predictions):
        named = _named(batch)
        for name in parts.keys() ^ named.keys() if number else ():
            which = "the first batch" if name in named else f"batch {number + 1}"
            raise DataError(f"{which} has no prediction {name!r}; return the same names for each batch")
        for name, array in named.items():
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
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(
            f"the predictions are of different numbers of samples: {told}; return one row per sample"
        )
    write_whole(path, _bytes(path, arrays), "predictions")
    return next(iter(lengths.values()))


def npz(arrays: Mapping[str, Any]) -> bytes:
    """Make a .npz file of arrays with any names (`numpy.savez` takes some names for its own arguments)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy")  # without the time of day: equal arrays give equal bytes
            with archive.open(member, "w", force_zip64=True) as file:
                _save(file, name, array)
    return buffer.getvalue()


def _save(file: IO[bytes], name: str, array: Any) -> None:
    if array.dtype.hasobject:
        raise DataError(f"{name!r} holds Python objects ({array.dtype}); return numbers or strings")
    np.lib.format.write_array(file, array, allow_pickle=False)


def _named(batch: Any) -> dict[str, Any]:
    given = batch if isinstance(batch, Mapping) else {"predictions": batch}
    return {str(name): np.atleast_1d(_array(value)) for name, value in given.items()}


def _array(value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor, on whatever device
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _bytes(path: Path, arrays: dict[str, Any]) -> bytes:
    if path.suffix == ".jsonl":
        return "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in _lines(arrays)).encode()
    if path.suffix == ".npz":
        return npz(arrays)
    if len(arrays) > 1:
        raise DataError(f"there are predictions named {', '.join(arrays)}; give a .npz or .jsonl file")
    ((name, array),) = arrays.items()
    buffer = io.BytesIO()
    _save(buffer, name, array)
    return buffer.getvalue()


def _lines(arrays: dict[str, Any]) -> Iterator[Any]:
    for name, array in arrays.items():
        if array.dtype.kind not in "biufU":
            raise DataError(f"{name!r} is {array.dtype}, which JSON lacks; return numbers or strings")
    for values in zip(*(_listed(array) for array in arrays.values()), strict=True):
        line = dict(zip(arrays, values, strict=True))
        yield line["predictions"] if arrays.keys() == {"predictions"} else line


def _listed(array: Any) -> Any:
    """Convert an array to lists; nan, inf and -inf become strings, as in the output of `--json`."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        array = np.where(np.isfinite(array), array.astype(object), array.astype(str))
    return array.tolist()


# ------------------------------------------------------------------------------- batches to look at

_SHOWN = 6
"""Number of first values shown of each array."""


def batches(experiment: Experiment, name: str) -> Iterator[Any]:
    """Yield the batches of a stream's first pass as training would get them; only that stream is made."""
    stream = as_stream(experiment.stream(name))
    with closing(stream.open(name, 0, seed=experiment.seed or 0)) as cursor:
        yield from cursor


def described(batch: Any, name: str = "") -> Iterator[str]:
    """Yield a line for each array of a batch: its place, type, shape and first values."""
    if isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from described(part, f"{name}[{key!r}]")
    elif isinstance(batch, tuple | list) and batch and not isinstance(batch[0], int | float | str):
        for at, part in enumerate(batch):
            yield from described(part, f"{name}[{at}]")
    else:
        yield f"{name or 'batch'}: {_told(batch)}"


def _told(part: Any) -> str:
    if not (hasattr(part, "shape") and hasattr(part, "dtype")):
        text = repr(part)
        return f"{type(part).__name__} {text if len(text) <= 60 else text[:59] + '…'}"
    shape = ", ".join(map(str, part.shape))
    values = part.reshape(-1)[:_SHOWN].tolist()
    first = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
    more = ", …" if len(values) == _SHOWN else ""
    return f"{part.dtype} ({shape})  {first}{more}"
