"""Trials of a sweep: the settings that a config is trained with, and the run directories."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from everstep.errors import ConfigError, EverstepError
from everstep.experiment.calls import dotted
from everstep.experiment.config import ExperimentConfig, assignment, resolve
from everstep.experiment.import_paths import findable
from everstep.experiment.open_experiment import default_run_dir
from everstep.record import RunJournal, located
from everstep.record.provenance import as_json
from everstep.redaction import without_credentials

_LONGEST = 100
"""Most characters of a run directory's name that describe the settings."""


@dataclass(frozen=True)
class Trial:
    """Training of a sweep with settings of its own: dotted path to JSON value; `tree` is the whole config."""

    settings: dict[str, Any]
    overrides: list[str]
    """The settings as `resolve` takes them."""
    run_dir: Path
    sweep: str
    tree: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def is_finished(self) -> bool:
        """Whether its run has ended with this very config and no divergence: a training would add nothing."""
        try:
            journal = RunJournal(located(self.run_dir))
            same = journal.facts().get("config") == without_credentials(as_json(self.tree))
            return same and journal.ended() is not None and not journal.divergences()
        except (EverstepError, OSError):
            return False


def _name(settings: Mapping[str, Any]) -> str:
    """Name the settings for a folder; with a digest if the name alone would be ambiguous."""
    text = "-".join(f"{path}-{value}" for path, value in settings.items())
    plain = re.sub(r"[^\w.+-]+", "_", text)
    strings = [value for value in settings.values() if isinstance(value, str)]
    # whether the string form of each value belongs to no other value
    clear = all(value.isalpha() and value not in ("True", "False", "None") for value in strings)
    if plain == text and len(plain) <= _LONGEST and clear:
        return plain
    return f"{plain[:_LONGEST]}-{xxhash.xxh3_64_hexdigest(_json(settings).encode())[:6]}"


def trials(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    grid: Iterable[str] = (),
    draws: Iterable[str] = (),
    count: int = 10,
    seed: int = 0,
    run_dir: Path | None = None,
    profile: str | None = None,
) -> list[Trial]:
    """List a sweep's trials, one for each draw and combination; every config is checked.

    The same arguments, in any order, give the same trials, and a run directory is named by its settings: so
    an interrupted sweep continues with the trials that are missing.  Settings drawn twice are two trials.

    Args:
        grid: "PATH=[VALUE, ...]" each, in YAML; all combinations of the values are trained.
        draws: "PATH=[VALUE, ...]" or "PATH={low: 1e-4, high: 1e-1, log: true}" each, to draw from.
        run_dir: beginning of the run directories' names; None: the config's.
    """
    axes, spaces = _spaces(grid, "--grid", ranges=False), _spaces(draws, "--random", ranges=True)
    for path in axes.keys() & spaces.keys():
        raise ConfigError(f"{path} varies twice; give all of its values in one option")
    if not axes and not spaces:
        raise ConfigError("nothing varies; give --grid PATH=[VALUE, ...] or --random PATH=[VALUE, ...]")
    # As for `open_config`: the config's modules lie beside its files.
    findable(Path(file).absolute().parent for file in files)
    source, listed = random.Random(seed), []
    for _ in range(count if spaces else 1):
        # Sorted, because each draw takes the next random numbers.
        draw = {
            path: space(source) if callable(space) else source.choice(space)
            for path, space in sorted(spaces.items())
        }
        for values in itertools.product(*axes.values()):
            settings = dict(zip(axes, values, strict=True)) | draw
            varied = [f"{path}={_json(value)}" for path, value in settings.items()]
            resolved = resolve(ExperimentConfig, files, [*overrides, *varied], profile=profile)
            base = run_dir or default_run_dir(resolved.config, files)
            # Sorted: the same settings are the same trial, whatever the order of the options was.
            name = _name(dict(sorted(settings.items())))
            if base.name in ("", ".."):  # no name to extend: the run directory lies inside
                place, sweep = base / name, base.resolve().name
            else:
                place, sweep = base.parent / f"{base.name}-{name}", base.name
            listed.append(Trial(settings, varied, place, sweep, resolved.tree))
    return listed


def _spaces(texts: Iterable[str], option: str, *, ranges: bool) -> dict[str, Any]:
    """Read what varies: a list of values, or, with `ranges`, the function that draws from a range."""
    spaces: dict[str, Any] = {}
    for text in texts:
        origin = f"{option} {text!r}"
        keys, value = assignment(text, origin)
        if (path := dotted(keys)) in spaces:
            raise ConfigError(f"{path} varies twice; give all of its values in one option")
        if isinstance(value.tree, list) and value.tree:
            spaces[path] = value.tree
        elif ranges and isinstance(value.tree, dict):
            spaces[path] = _range(origin, value.tree)
        else:
            raise ConfigError(f"{origin}: {value.tree!r} is not a list of values; give [VALUE, ...]")
    return spaces


def _range(name: str, ends: Mapping[str, Any]) -> Callable[[random.Random], Any]:
    """Make the function that draws from a range: an integer if both ends are; with `log` by its logarithm."""
    low, high, log = (ends.get(name, False) for name in ("low", "high", "log"))
    numbers = all(type(end) in (int, float) for end in (low, high))
    known = type(log) is bool and ends.keys() <= {"low", "high", "log"}
    if not (numbers and known and -math.inf < low < high < math.inf) or (log and low <= 0):
        raise ConfigError(f"{name}: give a range, {{low: 1, high: 9, log: true}}, low < high, low > 0 if log")
    is_whole = isinstance(low, int) and isinstance(high, int)

    def draw(source: random.Random) -> Any:
        if not log:
            return source.randint(low, high) if is_whole else source.uniform(low, high)
        value = math.exp(source.uniform(math.log(low), math.log(high)))
        value = min(max(value, low), high)  # rounding in exp and log may lead just outside
        return round(value) if is_whole else value

    return draw


def _json(value: Any) -> str:
    """Write a value so that YAML reads back the same value of the same type."""
    return json.dumps(value, ensure_ascii=False)
