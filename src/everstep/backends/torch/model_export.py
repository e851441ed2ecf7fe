"""Export of models to programs without everstep, for the service `Export`."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from everstep.backends.torch.model_wrappers import bare
from everstep.errors import ConfigError


def unwrapped(obj: Any) -> Any:
    """Return the model inside an average, a compiled or a parallel model."""
    if isinstance(obj, torch.nn.Module):
        obj = bare(obj)
    return unwrapped(obj.module) if isinstance(obj, AveragedModel) else obj


def require_module(entry: str, obj: Any) -> None:
    """Refuse an object that torch.export cannot take.

    Raises:
        ConfigError: the object is not a module.
    """
    if not isinstance(obj, torch.nn.Module):
        raise ConfigError(
            f"state entry {entry!r} is a {type(obj).__name__}, which torch.export cannot take; give that "
            "of a torch.nn.Module"
        )


def program(model: torch.nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any) -> bytes:
    """Return a file's bytes for `torch.export.load`: the model in evaluation mode, with its weights."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            exported = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes)
        file = io.BytesIO()
        torch.export.save(exported, file)
        return file.getvalue()
    finally:
        for module in training:
            module.training = True
