"""YAML files and overrides, merged in order; every value keeps the file and line of its origin."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from everstep.errors import ConfigError, alike

Place = tuple[str | int, ...]
"""Keys of mappings and indices of lists, from the root of a tree to a value."""

CALL = "call"
"""The key of an import path; the keys beside it are arguments."""


MOST_VALUES = 100_000
"""Most values of a file or override, each alias counted in full: nine lines may stand for a billion."""


@dataclass
class Layers:
    """A tree of JSON values, with the origin of each.

    Attributes:
        tree: dictionaries with string keys, lists, and other values of JSON.
        origins: place to "FILE, line N", or to the override.
        whole: place whose value replaces the value below entirely, even if both are mappings.
    """

    tree: Any = field(default_factory=dict)
    origins: dict[Place, str] = field(default_factory=dict)
    whole: Place | None = None

    def origin(self, place: Place) -> str:
        """Return the origin of the value at a place, or of the nearest value around it; "" without either."""
        for end in range(len(place), -1, -1):
            if place[:end] in self.origins:
                return self.origins[place[:end]]
        return ""

    def lay(self, other: Layers) -> None:
        """Lay another tree over this one: mappings are merged key by key, other values replaced.

        A mapping with another `call` replaces the whole mapping: the old arguments were for another function.
        A mapping of indices to values, laid over a list, changes those elements.
        """
        self.tree = self._laid(self.tree, other.tree, other, ())

    def _laid(self, old: Any, new: Any, other: Layers, at: Place) -> Any:
        merge = isinstance(new, Mapping) and at != other.whole
        if merge and isinstance(old, list) and new and all(map(str.isdecimal, new)):
            laid = list(old)
            for key, value in new.items():
                if int(key) >= len(old):
                    raise ConfigError(
                        f"{other.origin((*at, key))}: {dotted(at)} has {len(old)} entries, but no entry "
                        f"{key}; give a number from 0 to {len(old) - 1}"
                    )
                laid[int(key)] = self._laid(
                    old[int(key)], value, _renumbered(other, at, key), (*at, int(key))
                )
            return laid
        if merge and isinstance(old, Mapping) and not _another_call(old, new):
            return dict(old) | {
                key: self._laid(old.get(key), value, other, (*at, key)) for key, value in new.items()
            }
        # A value that is replaced takes the origins inside it along.
        self.origins = {p: o for p, o in self.origins.items() if p[: len(at)] != at} | {
            p: o for p, o in other.origins.items() if p[: len(at)] == at
        }
        return new


def _another_call(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return CALL in new and old.get(CALL) != new[CALL]


def _renumbered(layers: Layers, at: Place, key: str) -> Layers:
    """Return the layers with the index that `key` writes in place of `key` itself."""
    below, end = (*at, key), len(at) + 1

    def moved(place: Place) -> Place:
        return (*at, int(key), *place[end:]) if place[:end] == below else place

    whole = None if layers.whole is None else moved(layers.whole)
    return Layers(layers.tree, {moved(place): o for place, o in layers.origins.items()}, whole)


def dotted(place: Place) -> str:
    """Write a place as an override does, with dots."""
    return ".".join(map(str, place))


def layered(files: Iterable[str | Path], overrides: Iterable[str] = ()) -> Layers:
    """Lay files over each other, later over earlier, and the overrides over all files.

    Args:
        overrides: PATH=VALUE each, where PATH has dots and VALUE is YAML, as in "optimizer.lr=1e-3"; VALUE
            replaces the old value entirely.
    """
    layers = Layers()
    for file in files:
        if Path(file).suffix == ".py":
            raise ConfigError(
                f"{file} is a Python script, and this command takes a config: give a YAML file that names "
                "your task (docs/guide/experiment.md); a script is started by python, or by everstep run"
            )
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = [str(each) for end in ("yaml", "yml") for each in Path(file).parent.glob(f"*.{end}")]
            hint = alike(str(Path(file)), known) if isinstance(error, FileNotFoundError) else ""
            raise ConfigError(f"{file} cannot be read ({error}); {hint}give a YAML file") from error
        layer = parsed(text, str(file))
        if layer.tree is None:
            continue
        if not isinstance(layer.tree, dict):
            raise ConfigError(f"{file} holds {layer.tree!r}; give keys and values, as in  seed: 7")
        layers.lay(layer)
    for override in overrides:
        layers.lay(_overriding(override))
    return layers


def _overriding(text: str) -> Layers:
    keys, given = assignment(text, f"override {text!r}")
    tree = given.tree
    for key in reversed(keys):
        tree = {key: tree}
    places = [keys[:end] for end in range(1, len(keys))] + [(*keys, *place) for place in given.origins]
    return Layers(tree, dict.fromkeys(places, f"override {text!r}"), whole=keys)


def assignment(text: str, name: str) -> tuple[tuple[str, ...], Layers]:
    """Split "PATH=VALUE" into keys and value."""
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{text!r} is not an override; give PATH=VALUE, as in optimizer.lr=0.1")
    if not value.strip():
        raise ConfigError(
            f"{name}: the value is missing; give a value: null for none, '\"\"' for an empty string"
        )
    return keys, parsed(value, name)


def parsed(text: str, name: str) -> Layers:
    """Read a YAML string (YAML 1.2: 1e-3 is a number, and `on` is a string)."""
    layers = Layers()
    try:
        loaded = YAML(typ="rt", pure=True).load(StringIO(text))
        layers.tree = _plain(loaded, (), 1, name, layers.origins)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        what = (error.problem or "this is not YAML").partition(" with value")[0]
        raise ConfigError(f"{name}{line}: {what}; correct the YAML there") from None
    except YAMLError as error:
        raise ConfigError(f"{name}: {error}; correct the YAML there") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply; give fewer levels") from None
    except ConfigError:
        raise
    except ValueError as error:  # a number of more digits than Python reads
        raise ConfigError(f"{name}: {error}; give a shorter number") from None
    return layers


def _plain(value: Any, place: Place, line: int, name: str, origins: dict[Place, str]) -> Any:
    """Convert a loaded value to plain Python types, and note the origin of each part."""
    if len(origins) >= MOST_VALUES:
        raise ConfigError(
            f"{name}, line {line}: there are more than {MOST_VALUES:,} values, with each alias written out; "
            "give fewer, or a path to a file of data"
        )
    origins[place] = f"{name}, line {line}"
    if isinstance(value, Mapping | list):
        # Keys that a merge (<<) brought have no line of their own.
        lines = getattr(getattr(value, "lc", None), "data", None) or {}
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        plain: dict[Any, Any] = {}
        for key, part in parts:
            at = lines[key][0] + 1 if key in lines else line
            if isinstance(value, Mapping) and not isinstance(key, str):
                raise ConfigError(f"{name}, line {at}: the key {key!r} is not a string; put it in quotes")
            key = str(key) if isinstance(value, Mapping) else key
            plain[key] = _plain(part, (*place, key), at, name, origins)
        return plain if isinstance(value, Mapping) else list(plain.values())
    where = f"{name}, line {line}" + (f": {dotted(place)}" if place else "")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} is not a number of JSON; give null, or a finite number")
    # Before the numbers: a bool is an int.
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        # The loader's ScalarBoolean is an int that is not a bool.
        if isinstance(value, kind):
            return bool(value) if type(value).__name__ == "ScalarBoolean" else kind(value)
    if isinstance(value, datetime.date):
        return str(value)
    raise ConfigError(
        f"{where}: {str(value)[:80]} is a {type(value).__name__}; give numbers, strings, lists and mappings"
    )


def as_yaml(tree: Any) -> str:
    """Write a tree as YAML that reads back as the same tree.

    Args:
        tree: mappings, lists, strings, numbers, booleans and None.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 100
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()
