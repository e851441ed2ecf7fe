"""Import paths: `module:name`."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import Any

from everstep.errors import ConfigError, nearest

_TOLD = 20
"""Most names that a message lists if a module lacks the requested name."""


def imported(path: str) -> Any:
    """Import the object that an import path names."""
    module, colon, names = path.partition(":")
    if not colon or not module or not names:
        raise ConfigError(f"{path!r} is not an import path; give module:name, as in torch.optim:AdamW")
    try:
        found = _module(module)
    # An import runs the module's code, which may raise anything.
    except Exception as error:
        raise ConfigError(
            f"{path!r}: importing {module} failed with {type(error).__name__}: {error}; correct the path, or "
            "put the module beside the config file or where Python finds it"
        ) from error
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            known = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n, None))]
            if len(known) > _TOLD:
                known = get_close_matches(name, known, n=_TOLD, cutoff=0.5)
            raise ConfigError(f"{path!r}: there is no {name!r} in {module}; {nearest(name, known)}") from None
    return found


def _module(name: str) -> Any:
    """Import a module; if it is missing, take its parent's attribute of that name, as `everstep.torch`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        above, _, last = name.rpartition(".")
        if error.name != name or not above or not hasattr(_module(above), last):
            raise
        return getattr(_module(above), last)
