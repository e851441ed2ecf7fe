"""Import paths: `module:name`.  Needs no pydantic, so that an `Experiment` of functions needs none."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import Any

from everstep.errors import ConfigError, nearest

_MOST_NAMES = 20
"""Most names that a message lists if a module lacks the requested name."""


def imported(path: str) -> Any:
    module, colon, names = path.partition(":")
    if not (colon and module and names):
        raise ConfigError(f"{path!r} is not an import path; give module:name, as in torch.optim:AdamW")
    try:
        value: Any = importlib.import_module(module)
    except Exception as error:  # an import runs the module's code, which may raise anything
        raise ConfigError(
            f"{path!r}: importing {module} failed with {type(error).__name__}: {error}; correct the path, or "
            "put the module beside the config file or where Python finds it"
        ) from error
    for name in names.split("."):
        if not hasattr(value, name):
            known = [n for n in dir(value) if not n.startswith("_") and callable(getattr(value, n, None))]
            if len(known) > _MOST_NAMES:
                known = get_close_matches(name, known, n=_MOST_NAMES, cutoff=0.5)
            raise ConfigError(f"{path!r}: there is no {name!r} in {module}; {nearest(name, known)}")
        value = getattr(value, name)
    return value
