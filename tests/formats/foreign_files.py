"""Weights of one model, as other programs write them, by their own libraries."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as distributed


def net(seed: int = 0, out: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, out), torch.nn.BatchNorm1d(out))
    model[0].bias.data = model[0].bias.data.to(torch.bfloat16)
    return model


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(a, b) and a.dtype == b.dtype for (name, a), (again, b) in pairs)


def as_safetensors(model: torch.nn.Module, path: Path) -> Path:
    safetensors.torch.save_file(model.state_dict(), path / "weights.safetensors")
    return path / "weights.safetensors"


def as_shards(model: torch.nn.Module, path: Path) -> Path:
    """A folder as Hugging Face's libraries write it, with two shards."""
    state, weight_map = model.state_dict(), {}
    for number, part in enumerate(("0.", "1."), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        shard = {name: tensor for name, tensor in state.items() if name.startswith(part)}
        safetensors.torch.save_file(shard, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def as_folder(model: torch.nn.Module, path: Path) -> Path:
    safetensors.torch.save_file(model.state_dict(), path / "model.safetensors")
    return path


def as_torch(model: torch.nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path / "weights.pt")
    return path / "weights.pt"


def as_old_torch(model: torch.nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path / "weights.pt", _use_new_zipfile_serialization=False)
    return path / "weights.pt"


def as_distributed(model: torch.nn.Module, path: Path) -> Path:
    return distributed_folder(model.state_dict(), path)


def distributed_folder(state: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        distributed.save(state, checkpoint_id=path, no_dist=True)
    return path


FLAT: dict[str, Callable[[torch.nn.Module, Path], Path]] = {
    "safetensors": as_safetensors,
    "shards": as_shards,
    "folder": as_folder,
    "torch.save": as_torch,
    "torch.save, as before 1.6": as_old_torch,
    "torch.distributed.checkpoint": as_distributed,
}
"""Writers of a model's state_dict alone."""
