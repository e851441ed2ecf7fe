"""Trust in the code that a run's record names; no module is imported out of a run directory."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from everstep.errors import TrustError
from everstep.experiment.config_layers import CALL
from everstep.record.trust import TRUST_VARIABLE

_PATH = re.compile(r"[\w.]+:[\w.]+")
_TOLD = 8
"""Most names that a message lists."""


def admit(run_dir: Path, run: str, tree: Any, code: Sequence[Path], why: str, trust: bool) -> None:
    """Print which code a run's record names, and refuse it unless it is this user's.

    Called before the import.  From then on this process imports nothing out of the run directory.

    Args:
        run: the run's id.
        tree: the config that names the code.
        code: the folders in which the code lies.
        why: reason, in words, for which the code does not count as this user's; "" if it does.
        trust: whether the user said to use the code all the same.
    """
    where = ", ".join(map(repr, map(str, code))) or "where Python finds it"
    names = list(dict.fromkeys(_names(tree)))
    told = ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")
    if why and not trust:
        raise TrustError(
            f"the record of {run} in {run_dir} names code that would be imported and called: {told}, from "
            f"{where}. It does not count as yours: {why}. Look at it: everstep config RUN. If you trust "
            f"whoever made it, pass --trust, or set {TRUST_VARIABLE}=1 (docs/guide/trust.md)"
        )
    print(f"note: for the run {run} is imported and called: {told}, from {where}", file=sys.stderr)
    _outside.keep_out(run_dir)


def _names(tree: Any) -> Iterator[str]:
    """Yield the import paths in a config, at any depth, as printable strings."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == CALL or _PATH.fullmatch(str(key)):
                yield _plain(str(value if key == CALL else key))
            yield from _names(value if key != CALL else None)
    elif isinstance(tree, list):
        for each in tree:
            yield from _names(each)
    elif isinstance(tree, str) and _PATH.fullmatch(tree):
        yield tree


def _plain(text: str) -> str:
    return text if text.isprintable() else ascii(text)


class _Outside(importlib.abc.MetaPathFinder):
    """Finder that returns what the other finders find, and refuses modules in some folders."""

    def __init__(self) -> None:
        self._folders: list[Path] = []

    def keep_out(self, folder: Path) -> None:
        """Refuse every later import out of a folder."""
        folder = folder.resolve()
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
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._require_outside(spec)
                return spec
        return None

    def _require_outside(self, spec: importlib.machinery.ModuleSpec) -> None:
        places = [spec.origin] if spec.has_location and spec.origin else []
        for place in (*places, *(spec.submodule_search_locations or ())):
            if self._in(place):
                raise ImportError(
                    f"the module {spec.name} lies in a run directory, {place}; no code is imported from "
                    "there: move the module elsewhere, if it is yours",
                    name=spec.name,
                )

    def _in(self, place: str) -> bool:
        # A link must not lead into a run directory either.
        real = Path(os.path.realpath(place))
        return any(real.is_relative_to(folder) for folder in self._folders)


_outside = _Outside()


def code_of(facts: Mapping[str, Any], run_dir: Path) -> tuple[Path, ...]:
    """Code folders that a start has recorded, without those in the run directory."""
    given, home = facts.get("code"), run_dir.resolve()
    found = [Path(each) for each in given if isinstance(each, str)] if isinstance(given, list) else []
    return tuple(folder for folder in found if not folder.resolve().is_relative_to(home))
