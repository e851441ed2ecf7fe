"""Weights that a program without everstep has written: a file, or a folder of shards."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from everstep.contracts.state import Unread
from everstep.formats import distributed, safetensors_file
from everstep.formats.safetensors_file import inside, refuse, unreadable
from everstep.untrusted_files import open_regular, parse_json, read_regular

DISTRIBUTED = "torch.distributed.checkpoint"
"""Kind of a folder whose chunks are read, and found to be damaged, when they are needed."""
_INDEX = ".index.json"
_LARGEST_INDEX = 100_000_000
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = tuple(f"{name}{_INDEX}" for name in _WHOLE)


class Foreign(NamedTuple):
    """Weights as another program has written them, not read yet."""

    path: Path
    kind: str
    tree: dict[str, Any]
    """Names to arrays (`Unread`), or the names of branches to such trees and plain values."""


def open_foreign(path: Path, say: Callable[[str], None]) -> Foreign | None:
    """Open weights of another program; None where a path is neither a file nor a folder of weights.

    Read are a safetensors file, a file of torch.save (weights only), a folder as Hugging Face writes it
    (one file, or shards with an index), and a folder of torch.distributed.checkpoint (tensors only).  Only
    headers are read now, and files of torch.save as a whole, to compare their checksums.  Nothing in a file
    is run.
    """
    if (path / distributed.METADATA).exists():
        tree, others = distributed.open_folder(path)
        if others:
            some = ", ".join(others[:5])
            say(f"{path}: {len(others)} values that are not tensors are pickles, and are not read: {some}")
        return Foreign(path, DISTRIBUTED, tree)
    files = [path / name for name in (*_INDICES, *_WHOLE)] if path.is_dir() else [path]
    for file in files:
        if file.exists() and file.name.endswith(_INDEX):
            return Foreign(path, "shards with an index", _open_shards(file))
        if file.exists():
            return Foreign(path, *_open_file(file))
    return None


def _open_file(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError as error:
        unreadable(path, error)
    if start[8:] == b"{":
        return "safetensors", dict(safetensors_file.open_file(path))
    if not start.startswith((b"PK\x03\x04", b"\x80")):
        refuse(path, "is neither a safetensors file nor a file of torch.save", remedy="give one of these")
    tree = importlib.import_module("everstep.backends.torch.saved_files").read_saved(path, str(path))
    if isinstance(tree, Unread):
        return "torch.save", {"": tree}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        remedy = "save a dictionary, as model.state_dict() is"
        refuse(path, f"has a {type(tree).__name__} without names", remedy=remedy)
    return "torch.save", tree


def _open_shards(index: Path) -> dict[str, Any]:
    try:
        weight_map = parse_json(read_regular(index, _LARGEST_INDEX))["weight_map"]
        names: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            names.setdefault(file, set()).add(name)
    except OSError as error:
        unreadable(index, error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(index, f'is not an index with a "weight_map" of names to files ({error!r:.200})', error)
    found: dict[str, Any] = {}
    for file, expected in names.items():
        path = inside(index.parent, file, index)
        _, arrays = _open_file(path)
        if odd := sorted(expected ^ arrays.keys()):
            which = "lacks" if odd[0] in expected else "has, beside what the index names,"
            refuse(path, f"{which} {', '.join(odd[:3])}: the shards and {index.name} are of different models")
        found |= arrays
    return {name: found[name] for name in weight_map}
