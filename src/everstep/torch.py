"""What is for PyTorch users.  Importing it imports no torch; using one of its names does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.backends.torch.optimizers import Clip as Clip
    from everstep.backends.torch.optimizers import ClipOptimizer as ClipOptimizer
    from everstep.backends.torch.optimizers import MinibatchOptimizer as MinibatchOptimizer
    from everstep.backends.torch.task import Task as Task

_AROUND = ("Clip", "ClipOptimizer", "MinibatchOptimizer")
_HOMES = {**dict.fromkeys(_AROUND, "optimizers"), "Task": "task"}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from everstep.errors import nearest

        raise AttributeError(f"module 'everstep.torch' has no attribute {name!r}; {nearest(name, _HOMES)}")
    return getattr(importlib.import_module(f"everstep.backends.torch.{_HOMES[name]}"), name)
