"""Import paths, `module:name`: what they mean, and trust in those that a run's record names.

Needs no pydantic, so that an `Experiment` of functions needs none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from everstep.errors import ConfigError, TrustError, nearest, some
from everstep.record import RunDir
from everstep.record.trust import TRUST_VARIABLE

CALL = "call"
"""The key of an import path in a config; the keys beside it are arguments."""

_MOST_NAMES = 20
"""Most names that a message lists if a module lacks the requested name."""
_kept_out: list[Path] = []
"""Folders out of which nothing is imported by an import path, also not through a link or a package."""


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


_PATH = re.compile(r"[\w.]+:[\w.]+")
_MOST_LISTED = 8
"""Most import paths that a message lists."""


def admit(run_dir: Path, tree: Any, reason: str, trust: bool, facts: Mapping[str, Any]) -> tuple[Path, ...]:
    """Print which code a run's record names, and refuse it unless it is this user's.

    Called before the import.  From then on this process finds modules in the code's folders that `facts`
    have, which are returned, and imports nothing that a record names out of the run directory.  `reason`:
    why the code does not count as this user's; "" if it does.  `trust`: the user said to use it all the same.
    """
    entries, home = facts.get("code"), run_dir.resolve()
    folders = [Path(each) for each in entries if isinstance(each, str)] if isinstance(entries, list) else []
    code = tuple(folder for folder in folders if not folder.resolve().is_relative_to(home))
    run = RunDir.open(run_dir, create=False).id
    names = list(dict.fromkeys(_names(tree)))
    source = ", ".join(map(repr, map(str, code))) or "where Python finds it"
    use = f"imported and called: {some(names, _MOST_LISTED)}, from {source}"
    if reason and not trust:
        raise TrustError(
            f"the record of {run} in {run_dir} names code that would be {use}. It does not count as yours: "
            f"{reason}. Look at it: everstep config RUN. If you trust whoever made it, pass --trust, or set "
            f"{TRUST_VARIABLE}=1 (docs/guide/trust.md)"
        )
    print(f"note: for the run {run} is {use}", file=sys.stderr)
    _kept_out.append(home)
    # An empty entry of sys.path is the working directory.
    sys.path[:] = [each for each in sys.path if not _is_kept_out(each or os.curdir)]
    findable(code)
    return code


def findable(folders: Iterable[Path]) -> None:
    """Let Python find modules in some folders, as it finds those beside a script."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def _names(tree: Any) -> Iterator[str]:
    """Yield the import paths in a config, at any depth, as printable strings."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            path = str(value if key == CALL else key)
            if key == CALL or _PATH.fullmatch(path):
                yield path if path.isprintable() else ascii(path)
            yield from _names(value if key != CALL else None)
    elif isinstance(tree, list):
        for each in tree:
            yield from _names(each)
    elif isinstance(tree, str) and _PATH.fullmatch(tree):
        yield tree
