"""Export of what a run has saved: weights for programs without everstep, from a checkpoint."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everstep.arguments import checked_keywords
from everstep.checkpoint import Checkpoint, find_checkpoint
from everstep.contracts.state import BESIDE, HostArray
from everstep.errors import CheckpointError, ConfigError, NoCheckpointError, nearest
from everstep.formats import byte_count
from everstep.record import to_read, user_path
from everstep.services.export import about_export, description, weights, write_export
from everstep.services.saved_formats import SAVED_FORMATS
from everstep.state import array_name, children, within


class Exported(NamedTuple):
    """Result of an export.

    Attributes:
        folder: the folder with the weights.
        source: the folder of the checkpoint.
        step: step of the run at the save.
        arrays: number of arrays.
    """

    folder: str
    source: str
    step: int
    arrays: int


@checked_keywords
def export(
    source: str | Path,
    folder: str | Path,
    *,
    entry: str = "model",
    format: str = "safetensors",
    max_shard_size: int | str | None = None,
) -> Exported:
    """Write the weights that a run has saved into a folder, for programs without everstep.

        everstep.export("runs/digits/best/valid_loss", "digits-weights", max_shard_size="5GB")

    Names are those of the model's own `state_dict`; of an average of weights, the averaged model is written.
    "safetensors" writes `model.safetensors`, or, where that is larger than `max_shard_size`, shards and
    `model.safetensors.index.json`, as Hugging Face does.  "torch.distributed.checkpoint" writes a folder for
    `torch.distributed.checkpoint.load`.  Only the bytes of this entry are read.

    Args:
        source: a run directory (its newest whole checkpoint), the folder of a checkpoint, or
            `RUN/best/METRIC` (the best weights).
        folder: folder to write, whole or not at all; an earlier export there is replaced.
        entry: name of the state's entry.
        format: "safetensors" or "torch.distributed.checkpoint".
        max_shard_size: most bytes of arrays in a file, as in 500_000_000, "5GB" or "2GiB"; None for one file.

    Raises:
        ConfigError: an argument is wrong, or the folder has something else than an export.
        NoCheckpointError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    target = user_path(folder, "folder")
    most = None if max_shard_size is None else byte_count(max_shard_size)
    if format not in SAVED_FORMATS:
        raise ConfigError(f"export(format={format!r}): {nearest(format, SAVED_FORMATS)}")
    if most is not None and format != "safetensors":
        raise ConfigError(f"export(format={format!r}, max_shard_size=...): leave out the size, or the format")
    if target.exists() and about_export(target) is None:
        raise ConfigError(f"{target} exists and is not an export; give a folder that does not exist")
    checkpoint = _found(user_path(source, "source"), entry)
    arrays = _arrays(checkpoint, entry)
    meta: Any = checkpoint.meta or {}
    about = description(
        arrays,
        {meta["metric"]: meta["value"]} if "metric" in meta else dict(meta.get("metrics", {})),
        run=meta.get("run"),
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        checkpoint=str(checkpoint.name),
        entry=entry,
        format=format,
    )
    contents = weights(arrays, most) if format == "safetensors" else _distributed(arrays)
    write_export(target, contents, about, top=target.parent)
    return Exported(str(target), str(checkpoint.path), checkpoint.step, len(arrays))


def _found(path: Path, entry: str) -> Checkpoint:
    notes: list[str] = []
    found = find_checkpoint(to_read(path), notes.append, interim=False, wanted=within([("user", entry)]))
    for note in notes:
        warnings.warn(note, RuntimeWarning, stacklevel=4)
    if found is None:
        raise NoCheckpointError(
            f"there is no checkpoint yet in {path}; train the run first, or check the path"
        )
    return found


def _distributed(arrays: Mapping[str, HostArray]) -> Callable[[Path], object]:
    writer = importlib.import_module("everstep.backends.torch.saved_files")
    return lambda folder: writer.write_distributed(folder, arrays)


def _arrays(checkpoint: Checkpoint, entry: str) -> dict[str, HostArray]:
    """Return the arrays of an entry by name, as the service `Export` names the arrays of a live object."""
    structure: Any = checkpoint.structure
    entries = children(structure["user"]) or {}
    if entry not in entries:
        raise ConfigError(f"the state of the run has no {entry!r}; {nearest(entry, entries)}")
    whole = array_name(["user", entry])
    names = [name for name in _references(entries[entry]) if not BESIDE & {*name.split("/")}]
    if odd := [name for name in names if name not in checkpoint.arrays]:
        raise CheckpointError(f"{checkpoint.path} lacks the array {odd[0]!r}; choose another checkpoint")
    named = {
        name.removeprefix(f"{whole}/") if name != whole else array_name([]): checkpoint.arrays[name]
        for name in names
    }
    if not named:
        raise ConfigError(f"{entry!r} has no arrays; give another entry: {', '.join(entries)}")
    if "n_averaged" in named:
        return {n.removeprefix("module."): a for n, a in named.items() if n != "n_averaged"}
    return named


def _references(node: Any) -> Iterator[str]:
    """Yield the names of the arrays in an encoded tree, in its order."""
    if isinstance(node, dict) and isinstance(node.get("$array"), str):
        yield node["$array"]
    elif isinstance(node, dict | list):
        for part in node.values() if isinstance(node, dict) else node:
            yield from _references(part)
