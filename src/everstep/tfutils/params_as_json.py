"""Parameters as JSON, and back: functions are recorded by import path, with their origin."""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.arguments import plain
from everstep.contracts.state import Json
from everstep.errors import ConfigError
from everstep.experiment.code_trust import admit, code_of
from everstep.experiment.config_layers import CALL
from everstep.experiment.import_paths import imported
from everstep.experiment.open_experiment import findable
from everstep.record import RunDir, RunJournal, to_read
from everstep.record.provenance import git_facts
from everstep.record.trust import distrust
from everstep.redaction import without_credentials

_ABOUT = ("source", "version", "commit", "dirty")
"""Keys of a function's origin, beside its import path under `CALL`."""
_PATTERN = {"regex", "flags"}


class ParamsRecord:
    """Tree of parameters as JSON.

    Args:
        tree: dictionaries, lists, values of JSON, paths, regular expressions, functions and classes.  Tuples
            are recorded as lists, and paths as strings.
        git: whether to ask git for the commits of functions outside packages with a version.

    Attributes:
        tree: the parameters as JSON values.
        about: dotted paths of the origins of functions.
        code: folders of the functions that belong to no package with a version.

    Raises:
        ConfigError: a value has another type, or looks like the record of a function or regular expression;
            names its place.
    """

    def __init__(self, tree: Mapping[str, Any], *, git: bool = True) -> None:
        self.about: list[str] = []
        self.code: list[Path] = []
        self._git = git
        self._commits: dict[Path, dict[str, Json]] = {}
        self.tree: dict[str, Json] = self._json(dict(tree), "")  # type: ignore[assignment]

    def _json(self, value: Any, place: str) -> Json:
        if isinstance(value, numbers.Integral):  # not floats: NumPy's may compute otherwise than Python's
            value = plain(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{place} is {value}, which JSON lacks; give None, or a string")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        if isinstance(value, list | tuple):
            return [self._json(part, f"{place}.{at}") for at, part in enumerate(value)]
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
            return {"regex": value.pattern, "flags": value.flags}
        if callable(value) and hasattr(value, "__qualname__"):
            return self._function(value, place)
        raise ConfigError(
            f"{place} is {value!r:.80}, which cannot be recorded; give numbers, strings, lists and "
            "dictionaries, and functions or classes of a module with their arguments beside them"
        )

    def _mapping(self, value: Mapping[Any, Any], place: str) -> dict[str, Json]:
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(
                    f"{place} has the key {name!r}, which is not a string; give strings as keys"
                )
        if _is_function(value) or _is_pattern(value):
            raise ConfigError(
                f"{place} has the keys {', '.join(value)}, by which a function or a regular expression is "
                "recorded; give that itself, or other keys"
            )
        return {k: self._json(part, f"{place}.{k}" if place else k) for k, part in value.items()}

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
                found |= self._commit(folder)
        self.about += [f"{place}.{name}" for name in _ABOUT]
        return found

    def _commit(self, folder: Path) -> dict[str, Json]:
        if folder not in self._commits:
            facts = git_facts(folder) or {}
            self._commits[folder] = {name: facts[name] for name in ("commit", "dirty") if name in facts}
        return self._commits[folder]


def _is_function(tree: Mapping[str, Any]) -> bool:
    return CALL in tree and tree.keys() <= {CALL, *_ABOUT}


def _is_pattern(tree: Mapping[str, Any]) -> bool:
    return tree.keys() == _PATTERN


def restored(tree: Any, place: str = "") -> Any:
    """Turn the JSON of a `ParamsRecord` into parameters again.

    Raises:
        ConfigError: a function is not found by its import path.
    """
    if isinstance(tree, Mapping) and _is_function(tree):
        if "<" in str(tree[CALL]):
            raise ConfigError(
                f"{place} was {tree[CALL]}, made inside another function, where it cannot be found again; "
                "define it at the top level of its module"
            )
        return imported(str(tree[CALL]))
    if isinstance(tree, Mapping) and _is_pattern(tree):
        return re.compile(str(tree["regex"]), tree["flags"])
    if isinstance(tree, Mapping):
        return {k: restored(part, f"{place}.{k}" if place else str(k)) for k, part in tree.items()}
    if isinstance(tree, list):
        return [restored(part, f"{place}.{at}") for at, part in enumerate(tree)]
    return tree


def recorded_params(run_dir: str | Path, *, trust: bool = False) -> dict[str, Any]:
    """Return the parameters that a run's newest start recorded; `train_from_params` makes the run again.

        params = everstep.experiment.recorded_params("runs/digits/basic")
        everstep.train_from_params(**params)

    Args:
        trust: import the code that the run names, even if the run is not marked as this user's:
        docs/guide/trust.md.

    Raises:
        TrustError: the run does not count as this user's, and `trust` is not given.
        ConfigError: `train_from_params` did not make the run, or a function is not found by its import path.
    """
    run_dir = to_read(run_dir)
    start = RunJournal(run_dir).newest_start()
    facts: dict[str, Any] = {} if start is None else start.data.get("facts", {})
    tree = without_credentials(facts.get("config") or {})
    if not isinstance(tree, dict) or "model_params" not in tree:
        raise ConfigError(
            f"the run in {run_dir} was not made by train_from_params; start it by its own program"
        )
    code = code_of(facts, run_dir)
    admit(run_dir, RunDir.open(run_dir, create=False).id, tree, code, distrust(run_dir, facts), trust)
    findable(code)
    found: dict[str, Any] = restored(tree)
    return found
