"""Configuration of a run: recorded with each start, kept in each checkpoint, compared at a resume."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from everstep import backends
from everstep.arguments import plain
from everstep.contracts.services import Service
from everstep.contracts.state import Json
from everstep.errors import ChangedError, ConfigError, nearest
from everstep.record import facts as run_facts
from everstep.record.provenance import as_json
from everstep.redaction import redacted

NONE = "none"
"""Stands for a value that one of the two sides lacks."""
_MISSING = object()

FREE = frozenset(
    {
        *("epochs", "max_epoch", "max_epochs", "num_epochs", "steps", "max_step", "max_steps", "num_steps"),
        *("max_time", "time_limit", "workers", "num_workers", "prefetch", "prefetch_factor", "pin_memory"),
        *("resume", "verbose", "log_every", "log_interval"),
    }
)
"""Settings of a program that change no bit of the steps that are made, by their usual names: limits, and how
data is loaded.  What follows from them (the length of a schedule) is compared on its own."""


@dataclass(frozen=True)
class Configuration:
    """A run's configuration.

    Attributes:
        tree: a dictionary of JSON values, without credentials; queries find them as
            `config.NAME`.
        free: dotted paths of values that may change without touching the training: shown, and used as given.
        code: folders of the program: recorded, with the git state of the first; none: the script's folder.
        defaults: dotted paths of the program's defaults: the record of an earlier program may lack them
            without being another configuration.
        sections: names of dictionaries in the tree whose keys are settings, like the keys of the tree: a
            missing setting is None.
    """

    tree: Mapping[str, Json]
    free: tuple[str, ...] = ()
    code: tuple[Path, ...] = ()
    defaults: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", redacted(self.tree))  # so it is compared as it is recorded

    @classmethod
    def of(cls, given: Any, free: Iterable[str] = ()) -> Configuration | None:
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"config={given!r}: give a dictionary, as vars(parser.parse_args()) is one")
        tree = {str(name): _json(value, f"config[{name!r}]") for name, value in given.items()}
        free = [free] if isinstance(free, str) else list(free)
        if unknown := [name for name in free if name.split(".")[0] not in tree]:
            raise ConfigError(
                f"config_free={free}: config has no {unknown[0]!r}; {nearest(unknown[0], tree)}"
            )
        return cls(tree, (*free, *(FREE & tree.keys())))

    def facts(self, seed: int, services: Iterable[Service]) -> dict[str, Any]:
        """Provenance of a start, or an evaluation (`everstep.record.facts`), with its services."""
        services = list(services)
        frameworks = {backend.name: backend.describe() for backend in backends.active()}
        observers = {s.name: s.config() for s in services if not s.controller}
        shown = {name: redacted(as_json(config)) for name, config in observers.items() if config is not None}
        return {
            **run_facts(sys.argv, self.tree, seed, frameworks, next(iter(self.code), None)),
            "services": list(map(repr, services)),
            "observers": shown,
        }

    def is_free(self, path: str) -> bool:
        """Whether a change at a dotted path touches no step of the training."""
        return _below(path, self.free)

    def changes(self, stored: Mapping[str, Json]) -> list[Difference]:
        """List the `differences` from a stored tree, without those of a default that is not stored."""
        listed = differences(redacted(stored), self.tree, self.sections)
        return [each for each in listed if each.stored != NONE or not _below(each.path, self.defaults)]


def _below(path: str, places: Iterable[str]) -> bool:
    """Whether a dotted path is one of `places`, or inside one of them."""
    return any(path == place or path.startswith(f"{place}.") for place in places)


class Difference(NamedTuple):
    """A value that differs from the stored one; where it is `free`, nobody has to choose between the two."""

    path: str
    stored: object
    given: object
    free: bool = False

    def __str__(self) -> str:
        return f"{self.path}: stored {self.stored}, given {self.given}"


def told(differences: Iterable[Difference]) -> str:
    """Write differences to follow a colon: a single one in the line, several in lines of their own."""
    lines = list(map(str, differences))
    return f" {lines[0]}. " if len(lines) == 1 else "".join(f"\n  {line}" for line in lines) + "\n"


def refusal(run_dir: Path, differences: Iterable[Difference]) -> ChangedError:
    """Make the error for given values that differ from the run's, where nobody has chosen between them."""
    return ChangedError(
        f"this differs from the run in {run_dir}:{told(differences)}",
        'Give what is stored, or pass on_change="override" to continue with what is given, or use another '
        "directory for another run",
    )


def differences(
    stored: Mapping[str, Json], given: Mapping[str, Json], sections: Collection[str] = ()
) -> list[Difference]:
    """List the places in which two trees differ, by dotted path; `NONE` where one tree lacks the value.

    Types count, too: 1, 1.0, true and "1" are four different values.
    """

    def compare(old: Any, new: Any, place: tuple[object, ...]) -> Iterator[Difference]:
        before, now = _parts(old, new), _parts(new, old)
        if before is None or now is None or not (before or now):
            if (was := _shown(old)) != (is_now := _shown(new)):
                yield Difference(".".join(map(_name, place)), was, is_now)
            return
        are_settings = not place or (len(place) == 1 and place[0] in sections)
        for name in {**before, **now}:
            both = before.get(name, _MISSING), now.get(name, _MISSING)
            if not (are_settings and all(value is None or value is _MISSING for value in both)):
                yield from compare(*both, (*place, name))

    return list(compare(stored, given, ()))


def _parts(value: Any, other: Any) -> Mapping[Any, Any] | None:
    """Return the items of a dictionary or list to compare, if the other value is of that type or missing."""
    if isinstance(value, Mapping) and (other is _MISSING or isinstance(other, Mapping)):
        return value
    if isinstance(value, list) and (other is _MISSING or isinstance(other, list)):
        return dict(enumerate(value))
    return {} if value is _MISSING and isinstance(other, Mapping | list) else None


def _name(part: object) -> str:
    return _shown(part) if "." in str(part) else str(part)


def _shown(value: object) -> str:
    return NONE if value is _MISSING else json.dumps(value, ensure_ascii=False, default=str)


def _json(value: Any, where: str) -> Json:
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} is {value}, which JSON lacks; give None or a string")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _json(part, f"{where}[{name!r}]") for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part, f"{where}[{at}]") for at, part in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    raise ConfigError(f"{where} is {value!r}; give numbers, strings, and lists and dictionaries of them")
