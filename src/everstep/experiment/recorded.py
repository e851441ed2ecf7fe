"""Parameters as a run records them, and back: functions by import path, with where they come from."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from everstep.contracts import Json
from everstep.errors import ConfigError
from everstep.experiment.paths import imported
from everstep.record.provenance import git_facts

CALL = "call"
"""The key of a function's import path; beside it stand `source`, and `version` or `commit`."""
_ABOUT = ("source", "version", "commit", "dirty")
_PATTERN = "regex"


class Recorded:
    """A tree of parameters as JSON.

    Args:
        tree: dictionaries, lists, values of JSON, functions and classes.
        git: whether to ask git for the commits of functions that no package with a version has.

    Attributes:
        tree: the same as JSON.
        about: the dotted paths of what says where a function comes from.
        code: the folders that functions come from which belong to no package with a version.

    Raises:
        ConfigError: something is none of these; names its place.
    """

    def __init__(self, tree: Mapping[str, Any], *, git: bool = True) -> None:
        self.about: list[str] = []
        self.code: list[Path] = []
        self._git = git
        self.tree: dict[str, Json] = self._json(dict(tree), "")  # type: ignore[assignment]

    def _json(self, value: Any, place: str) -> Json:
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{place} is {value}, which JSON lacks; give None, or a text")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            return {
                str(k): self._json(part, f"{place}.{k}" if place else str(k)) for k, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._json(part, f"{place}.{at}") for at, part in enumerate(value)]
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, re.Pattern):
            return {_PATTERN: value.pattern}
        if callable(value) and hasattr(value, "__qualname__"):
            return self._function(value, place)
        raise ConfigError(
            f"{place} is {value!r:.80}, which cannot be recorded; give numbers, texts, lists and "
            "dictionaries, and functions or classes of a module with their arguments beside them"
        )

    def _function(self, function: Any, place: str) -> dict[str, Json]:
        module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        source = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" and source is not None:
            module = Path(source).stem
        found: dict[str, Json] = {CALL: f"{module}:{function.__qualname__}", "source": source}
        version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", None)
        if isinstance(version, str):
            found["version"] = version
        elif source is not None:
            folder = Path(source).absolute().parents[module.count(".")]
            if folder not in self.code:
                self.code.append(folder)
            if self._git:
                found |= _commit(folder)
        self.about += [f"{place}.{name}" for name in _ABOUT]
        return found


@cache
def _commit(folder: Path) -> dict[str, Json]:
    facts = git_facts(folder) or {}
    return {name: facts[name] for name in ("commit", "dirty") if name in facts}


def restored(tree: Any, place: str = "") -> Any:
    """The inverse of `Recorded`.

    Raises:
        ConfigError: a function is not to be found by its path.
    """
    if isinstance(tree, Mapping) and CALL in tree and tree.keys() <= {CALL, *_ABOUT}:
        if "<" in str(tree[CALL]):
            raise ConfigError(
                f"{place} was {tree[CALL]}, made inside another function, where nobody finds it again; "
                "define it at the top of its module"
            )
        return imported(str(tree[CALL]))
    if isinstance(tree, Mapping) and tree.keys() == {_PATTERN}:
        return re.compile(str(tree[_PATTERN]))
    if isinstance(tree, Mapping):
        return {k: restored(part, f"{place}.{k}" if place else str(k)) for k, part in tree.items()}
    if isinstance(tree, list):
        return [restored(part, f"{place}.{at}") for at, part in enumerate(tree)]
    return tree
