"""Import paths: `module:name`.  Needs no pydantic, so that an `Experiment` of functions needs none."""

from __future__ import annotations

import importlib.util
import os
import sys
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from everstep.errors import ConfigError, nearest

_MOST_NAMES = 20
"""Most names that a message lists if a module lacks the requested name."""
_kept_out: list[Path] = []
"""Folders out of which nothing is imported by an import path."""


def keep_out(folder: Path) -> None:
    """Import no later import path out of a folder, also not through a link or a package."""
    _kept_out.append(folder)
    # An empty entry of sys.path is the working directory.
    sys.path[:] = [each for each in sys.path if not _is_kept_out(each or os.curdir)]


def _is_kept_out(place: str) -> bool:
    real = Path(os.path.realpath(place))
    return any(real.is_relative_to(folder) for folder in _kept_out)


def imported(path: str) -> Any:
    module, colon, names = path.partition(":")
    if not (colon and module and names):
        raise ConfigError(f"{path!r} is not an import path; give module:name, as in torch.optim:AdamW")
    try:
        # Each package before what is in it: looking for a module imports its package.
        for package in accumulate(module.split("."), "{}.{}".format):
            _require_allowed(package)
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


def _require_allowed(module: str) -> None:
    spec = None if module in sys.modules else importlib.util.find_spec(module)
    if spec is not None:
        for place in (spec.origin if spec.has_location else "", *(spec.submodule_search_locations or ())):
            if place and _is_kept_out(place):
                raise ImportError(f"no code is imported from a run directory, {place}; move it elsewhere")
