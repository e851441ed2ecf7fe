"""Trust in the code that a run's record names; no module is imported out of a run directory."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from everstep.errors import TrustError
from everstep.experiment.config_layers import CALL
from everstep.record import RunDir
from everstep.record.trust import TRUST_VARIABLE

_PATH = re.compile(r"[\w.]+:[\w.]+")
_MOST_NAMES = 8
"""Most names that a message lists."""


def admit(run_dir: Path, tree: Any, why: str, trust: bool, facts: Mapping[str, Any]) -> tuple[Path, ...]:
    """Print which code a run's record names, and refuse it unless it is this user's.

    Called before the import.  From then on this process finds modules in the code's folders that `facts`
    have, and imports nothing out of the run directory.

    Args:
        why: reason, in words, for which the code does not count as this user's; "" if it does.
        trust: whether the user said to use the code all the same.

    Returns:
        The folders of the code, without those in the run directory.
    """
    recorded, home = facts.get("code"), run_dir.resolve()
    folders = [Path(each) for each in recorded if isinstance(each, str)] if isinstance(recorded, list) else []
    code = tuple(folder for folder in folders if not folder.resolve().is_relative_to(home))
    run = RunDir.open(run_dir, create=False).id
    names = list(dict.fromkeys(_names(tree)))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    where = ", ".join(map(repr, map(str, code))) or "where Python finds it"
    what = f"imported and called: {', '.join(names[:_MOST_NAMES])}{more}, from {where}"
    if why and not trust:
        raise TrustError(
            f"the record of {run} in {run_dir} names code that would be {what}. It does not count as yours: "
            f"{why}. Look at it: everstep config RUN. If you trust whoever made it, pass --trust, or set "
            f"{TRUST_VARIABLE}=1 (docs/guide/trust.md)"
        )
    print(f"note: for the run {run} is {what}", file=sys.stderr)
    _outside.keep_out(home)
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


class _Outside(importlib.abc.MetaPathFinder):
    """Finder that returns what the other finders find, and refuses modules in some folders."""

    def __init__(self) -> None:
        self._folders: list[Path] = []

    def keep_out(self, folder: Path) -> None:
        """Refuse every later import out of a folder."""
        if folder not in self._folders:
            self._folders.append(folder)
        # An empty entry of sys.path is the working directory.
        sys.path[:] = [each for each in sys.path if not self._in(each or os.curdir)]
        if self not in sys.meta_path:
            # First of all finders: one that came before would import without asking this one.
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            origin = [spec.origin] if spec.has_location and spec.origin else []
            for place in (*origin, *(spec.submodule_search_locations or ())):
                if self._in(place):
                    raise ImportError(
                        f"the module {fullname} lies in a run directory, {place}; no code is imported from "
                        "there: move the module elsewhere, if it is yours",
                        name=fullname,
                    )
        return spec

    def _in(self, place: str) -> bool:
        # A link must not lead into a run directory either.
        real = Path(os.path.realpath(place))
        return any(real.is_relative_to(folder) for folder in self._folders)


_outside = _Outside()
