"""YAML files and overrides, laid over each other; every value keeps the file and line of its origin."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from everstep.errors import ConfigError, alike
from everstep.experiment.import_paths import CALL

Place = tuple[str | int, ...]
"""Keys of mappings and indices of lists, from the root of a tree to a value."""

MOST_VALUES = 100_000
"""Most values of a file or override, each alias counted in full: nine lines may stand for a billion."""


def dotted(place: Place) -> str:
    """Write a place as an override does, with dots."""
    return ".".join(map(str, place))


@dataclass
class Layers:
    """A tree of JSON values, with the origin of each: place to "FILE, line N", or to the override."""

    tree: Any = field(default_factory=dict)
    origins: dict[Place, str] = field(default_factory=dict)

    def origin(self, place: Place) -> str:
        """Return the origin of the value at a place, or of the nearest value around it; "" without either."""
        around = (place[:end] for end in range(len(place), -1, -1))
        return next((self.origins[each] for each in around if each in self.origins), "")

    def lay(self, other: Layers) -> None:
        """Lay another tree over this one: mappings are merged key by key, other values replaced.

        A mapping with another `call` replaces the whole mapping: the old arguments were for another function.
        """
        self.tree = _merge(self.tree, other.tree)
        self.origins |= other.origins  # origins of values that are gone are never asked for

    def override(self, text: str) -> None:
        """Replace the value that "PATH=VALUE" names; PATH may have indices of lists."""
        origin = f"override {text!r}"
        keys, value = assignment(text, origin)
        self.tree = self._replace(self.tree, (), keys, value, origin)

    def _replace(self, old: Any, place: Place, keys: Sequence[str], new: Layers, origin: str) -> Any:
        if place:
            self.origins.setdefault(place, origin)
        if not keys:
            self.origins |= {(*place, *inside): origin for inside in new.origins}
            return new.tree
        key, *rest = keys
        if isinstance(old, list) and key.lstrip("-").isdecimal():
            if not key.isdecimal() or (at := int(key)) >= len(old):
                entries = f"{dotted(place)} has {len(old)} entries, but no entry {key}"
                numbers = f"a number from 0 to {len(old) - 1}" if old else "the whole list"
                raise ConfigError(f"{origin}: {entries}; give {numbers}")
            return [*old[:at], self._replace(old[at], (*place, at), rest, new, origin), *old[at + 1 :]]
        old = old if isinstance(old, Mapping) else {}
        if key == CALL and not rest and old.get(CALL) != new.tree:
            old = {}  # arguments of another function
        return {**old, key: self._replace(old.get(key), (*place, key), rest, new, origin)}


def _merge(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    if CALL in new and old.get(CALL) != new[CALL]:
        return new
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def layered(files: Iterable[str | Path], overrides: Iterable[str] = (), base: Any = None) -> Layers:
    """Lay files over `base`, later over earlier, and over all files the overrides, "PATH=VALUE" each."""
    layers = Layers() if base is None else Layers(base, {(): "the stored config"})
    for file in map(Path, files):
        if file.suffix == ".py":
            raise ConfigError(
                f"{file} is a Python script, and this command takes a config: give a YAML file that names "
                "your task (docs/guide/experiment.md); a script is started by python, or by everstep run"
            )
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = [str(each) for end in ("yaml", "yml") for each in file.parent.glob(f"*.{end}")]
            hint = alike(str(file), known) if isinstance(error, FileNotFoundError) else ""
            raise ConfigError(f"{file} cannot be read ({error}); {hint}give a YAML file") from error
        layer = parsed(text, str(file))
        if not isinstance(layer.tree, dict | None):
            raise ConfigError(f"{file} holds {layer.tree!r}; give keys and values, as in  seed: 7")
        if layer.tree is not None:
            layers.lay(layer)
    for override in overrides:
        layers.override(override)
    return layers


def assignment(text: str, name: str) -> tuple[tuple[str, ...], Layers]:
    """Split "PATH=VALUE" into keys and value."""
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{text!r} is not an override; give PATH=VALUE, as in optimizer.lr=0.1")
    if not value.strip():
        raise ConfigError(f"{name}: the value is missing; give null for none, '\"\"' for an empty string")
    return keys, parsed(value, name)


def parsed(text: str, name: str) -> Layers:
    """Read a YAML string (YAML 1.2: 1e-3 is a number, and `on` is a string)."""
    layers = Layers()
    try:
        layers.tree = _plain(YAML(typ="rt", pure=True).load(StringIO(text)), (), 1, name, layers.origins)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply; give fewer levels") from None
    except (YAMLError, ValueError) as error:  # ValueError: a number of more digits than Python reads
        place, problem = name, str(error)
        if isinstance(error, MarkedYAMLError):
            place += "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
            problem = (error.problem or "this is not YAML").partition(" with value")[0]
        raise ConfigError(f"{place}: {problem}; correct the YAML there") from None
    return layers


def _plain(value: Any, place: Place, line: int, name: str, origins: dict[Place, str]) -> Any:
    """Convert a loaded value to plain Python types, and note the origin of each part."""
    origin = origins[place] = f"{name}, line {line}"
    if len(origins) > MOST_VALUES:
        raise ConfigError(
            f"{origin}: there are more than {MOST_VALUES:,} values, with each alias written out; give fewer"
        )
    # Keys that a merge (<<) brought have no line of their own.
    lines = getattr(getattr(value, "lc", None), "data", None) or {}

    def inside(key: Any, part: Any) -> Any:
        return _plain(part, (*place, key), lines[key][0] + 1 if key in lines else line, name, origins)

    if isinstance(value, list):
        return [inside(at, part) for at, part in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{origin}: the key {key!r} is not a string; put it in quotes")
        return {str(key): inside(key, part) for key, part in value.items()}
    origin += f": {dotted(place)}" if place else ""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{origin}: {value} is not a number of JSON; give null, or a finite number")
    for kind, kinds in _KINDS.items():
        if isinstance(value, kinds):
            return kind(value)
    if value is None:
        return None
    raise ConfigError(f"{origin}: {str(value)[:80]} is a {type(value).__name__}; give a value of JSON")


_KINDS: dict[type, Any] = {bool: bool | ScalarBoolean, int: int, float: float, str: str | datetime.date}
"""Plain types -> the loader's; a bool is an int, too, so it comes first."""


def as_yaml(tree: Any) -> str:
    """Write `tree` (mappings, lists, strings, numbers, booleans, None) as YAML that reads back as it."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 100
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()
