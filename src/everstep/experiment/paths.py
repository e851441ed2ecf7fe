"""Import paths: `module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from everstep.errors import ConfigError, alike


def imported(path: str) -> Any:
    """What an import path names.

    Raises:
        ConfigError: it has another form, its module cannot be imported, or has no such name.
    """
    module, colon, names = path.partition(":")
    if not colon or not module or not names:
        raise ConfigError(f"{path!r} is no import path; give module:name, as in torch.optim:AdamW")
    try:
        found = _module(module)
    except Exception as error:
        raise ConfigError(
            f"{path!r}: importing {module} failed with {type(error).__name__}: {error}; correct the path, or "
            "put the module beside the config file or where Python finds it"
        ) from error
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            known = [each for each in dir(found) if not each.startswith("_")]
            raise ConfigError(
                f"{path!r}: there is no {name!r} in {module}; {alike(name, known, 0.5) or 'check the name'}"
            ) from None
    return found


def _module(name: str) -> Any:
    """A module, or what its parent has under that name, as `everstep` has `torch`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        above, _, last = name.rpartition(".")
        if error.name != name or not above or not hasattr(_module(above), last):
            raise
        return getattr(_module(above), last)
