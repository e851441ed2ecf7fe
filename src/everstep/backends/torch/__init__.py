"""PyTorch.  Importing this room imports no torch; asking for one of its names does."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"TorchBackend": "backend", "TorchUpdateWatch": "updates"}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(_HOMES)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
