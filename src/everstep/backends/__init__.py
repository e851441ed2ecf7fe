"""Frameworks that are in use, and the framework that an array belongs to.

NumPy is always there; any other framework counts as in use once the program has imported it, so that
everstep itself never imports a framework that the program does not use.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from everstep.contracts.state import Backend
from everstep.errors import ConfigError, nearest, to_install

_HOMES = {"numpy": "everstep.backends.numpy", "torch": "everstep.backends.torch.backend"}
_loaded: dict[str, Backend] = {}
_by_type: dict[type, Backend | None] = {}


def active() -> list[Backend]:
    """List the backends of the frameworks that this process has imported, NumPy first."""
    return [get(name) for name in _HOMES if name == "numpy" or name in sys.modules]


def get(name: str) -> Backend:
    """Return the backend called `name`; imports its framework."""
    backend = _loaded.get(name)
    if backend is None:
        if name not in _HOMES:
            raise ConfigError(f"no backend is called {name!r}: {nearest(name, _HOMES)}")
        try:
            module = importlib.import_module(_HOMES[name])
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ConfigError(f"{name} is not installed: {to_install(name)}") from error
        backend = _loaded[name] = module.BACKEND
    return backend


def torch_files() -> Any:
    """Return the module that reads and writes PyTorch's own files; imports PyTorch."""
    return importlib.import_module("everstep.backends.torch.saved_files")


def of(value: Any) -> Backend | None:
    """Return the backend with the type of `value` among its array types; None for other types."""
    kind = type(value)
    if kind not in _by_type:
        _by_type[kind] = next((b for b in active() if issubclass(kind, b.array_types)), None)
    return _by_type[kind]
