"""PyTorch, as `everstep.torch`.  Importing this room imports no torch; using one of its names does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.backends.torch.task import Clip as Clip
    from everstep.backends.torch.task import Task as Task

_NAMES = ("Clip", "Task")
__all__ = [*_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        from everstep.errors import nearest

        raise AttributeError(f"module 'everstep.torch' has no attribute {name!r}; {nearest(name, _NAMES)}")
    return getattr(importlib.import_module("everstep.backends.torch.task"), name)
