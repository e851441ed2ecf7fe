"""Trials of a sweep: the settings that a config is trained with, and the run directories.

The settings are listed or drawn, or Optuna (https://optuna.org) chooses them by earlier results.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from everstep.errors import ConfigError, EverstepError
from everstep.experiment.code_trust import findable
from everstep.experiment.config import resolve
from everstep.experiment.config_layers import Place, assignment, dotted, layered
from everstep.experiment.experiment_config import ExperimentConfig
from everstep.experiment.open_experiment import default_run_dir
from everstep.record import RunJournal, located
from everstep.record.provenance import as_json
from everstep.redaction import without_credentials

if TYPE_CHECKING:
    import optuna

_LONGEST = 100
"""Most characters of a run directory's name that describe the settings."""


@dataclass(frozen=True)
class Trial:
    """Training of a sweep with settings of its own: dotted path to JSON value; `tree` is the whole config."""

    settings: dict[str, Any]
    run_dir: Path
    sweep: str
    tree: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def is_finished(self) -> bool:
        """Whether its run has come to its end with this very config, so that a training would add nothing."""
        try:
            journal = RunJournal(located(self.run_dir))
            recorded = journal.facts().get("config")
            return journal.ended() is not None and recorded == without_credentials(as_json(self.tree))
        except (EverstepError, OSError):
            return False

    @property
    def overrides(self) -> list[str]:
        """The settings as `resolve` takes them."""
        return _overrides(self.settings)


@dataclass(frozen=True)
class Base:
    """The part that all trials have in common; `run_dir` is the beginning of the run directories' names."""

    files: Sequence[str | Path]
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        # As for `open_config`: the config's modules lie beside its files.
        findable(Path(file).absolute().parent for file in self.files)

    def trial(self, settings: dict[str, Any]) -> Trial:
        """Make the trial of some settings; a ConfigError if the config with them would be wrong."""
        overrides = [*self.overrides, *_overrides(settings)]
        resolved = resolve(ExperimentConfig, self.files, overrides, profile=self.profile)
        base = self.run_dir or default_run_dir(resolved.config, self.files)
        # Sorted: the same settings are the same trial, whatever the order of the options was.
        name = self._name(dict(sorted(settings.items())))
        if base.name in ("", ".."):  # no name to extend: the run directory lies inside
            return Trial(settings, base / name, base.resolve().name, resolved.tree)
        return Trial(settings, base.parent / f"{base.name}-{name}", base.name, resolved.tree)

    def _name(self, settings: Mapping[str, Any]) -> str:
        """Name the settings for a folder; with a digest if the name alone would be ambiguous."""
        last = Counter(place[-1] for place in self._places)
        last.update(each.name for each in dataclasses.fields(ExperimentConfig))
        words = []
        for path in settings:  # the last key if the config has it only once, else the path
            keys = tuple(path.split("."))
            words.append(keys[-1] if keys in self._places and last[keys[-1]] == 1 else path)
        written = "-".join(f"{word}-{value}" for word, value in zip(words, settings.values(), strict=True))
        plain = re.sub(r"[^\w.+-]+", "_", written)
        strings = [value for value in settings.values() if isinstance(value, str)]
        # whether the string form of each value belongs to no other value
        clear = all(value.isalpha() and value not in ("True", "False", "None") for value in strings)
        if plain == written and len(plain) <= _LONGEST and clear:
            return plain
        return f"{plain[:_LONGEST]}-{xxhash.xxh3_64_hexdigest(_json(settings).encode())[:6]}"

    @cached_property
    def _places(self) -> set[Place]:
        """Places in the config files and overrides as they are written."""
        return {place for place in layered(self.files, self.overrides).origins if place}

    def takes(self, settings: dict[str, Any]) -> bool:
        """Whether the config with some settings has no mistakes."""
        try:
            self.trial(settings)
        except ConfigError:
            return False
        return True


@dataclass(frozen=True)
class Between:
    """Range of numbers to draw from, both ends included; integers if both ends are (but see `fitting`).

    With `log`, logarithms are drawn uniformly.
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether integers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, source: random.Random) -> float:
        if self.whole and not self.log:
            return source.randint(int(self.low), int(self.high))
        if not self.log:
            return source.uniform(self.low, self.high)
        drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        # Rounding in exp and log may lead just outside the range.
        drawn = min(max(drawn, self.low), self.high)
        return round(drawn) if self.whole else drawn


Space: TypeAlias = "Sequence[Any] | Between"
"""Values to choose from, or a range."""


def trials(
    base: Base, *, grid: Iterable[str] = (), draws: Iterable[str] = (), count: int = 10, seed: int = 0
) -> list[Trial]:
    """List a sweep's trials, one for each draw and combination; every config is checked.

    The same arguments, in any order, give the same trials, and a run directory is named by its settings: so
    an interrupted sweep continues with the trials that are missing.  Draws may be equal: see `distinct`.

    Args:
        grid: "PATH=[VALUE, ...]" each, in YAML; all combinations of the values are trained.
        draws: "PATH=[VALUE, ...]" or "PATH={low: 1e-4, high: 1e-1, log: true}" each, to draw from.
    """
    axes: dict[str, Any] = spaces(grid, "--grid", ranges=False)
    drawn = spaces(draws, "--random")
    for path in axes.keys() & drawn.keys():
        raise ConfigError(f"{path} varies twice; give all of its values in one option")
    if not axes and not drawn:
        raise ConfigError("nothing varies; give --grid PATH=[VALUE, ...] or --random PATH=[VALUE, ...]")
    # Sorted, because each draw takes the next random numbers.
    drawn = fitting(base, dict(sorted(drawn.items())), {path: values[0] for path, values in axes.items()})
    source, made = random.Random(seed), []
    for _ in range(count if drawn else 1):
        draw = {
            path: space.draw(source) if isinstance(space, Between) else source.choice(space)
            for path, space in drawn.items()
        }
        for values in itertools.product(*axes.values()):
            made.append(base.trial(dict(zip(axes, values, strict=True)) | draw))
    return made


def distinct(trials: Iterable[Trial]) -> list[Trial]:
    """Leave out repeated trials: settings that are drawn twice are trained once."""
    return list({trial.run_dir: trial for trial in trials}.values())


def spaces(texts: Iterable[str], option: str = "--optuna", ranges: bool = True) -> dict[str, Space]:
    """Read what varies: "PATH=[VALUE, ...]", or "PATH={low: A, high: B, log: true}" with `ranges`."""
    spaces: dict[str, Space] = {}
    for text in texts:
        keys, value = assignment(text, f"{option} {text!r}")
        if (path := dotted(keys)) in spaces:
            raise ConfigError(f"{path} varies twice; give all of its values in one option")
        if isinstance(value.tree, list) and value.tree:
            spaces[path] = value.tree
        elif ranges and isinstance(value.tree, dict):
            spaces[path] = _range(f"{option} {text!r}", value.tree)
        else:
            raise ConfigError(f"{option} {text!r}: {value.tree!r} is not a list of values; give [VALUE, ...]")
    return spaces


def _range(what: str, ends: Mapping[str, Any]) -> Between:
    low, high, log = (ends.get(name, False) for name in ("low", "high", "log"))
    numbers = all(type(end) in (int, float) for end in (low, high))
    known = type(log) is bool and ends.keys() <= {"low", "high", "log"}
    if not (numbers and known and -math.inf < low < high < math.inf) or (log and low <= 0):
        raise ConfigError(
            f"{what}: give a range as {{low: 1e-4, high: 1e-1, log: true}}, low < high, and low > 0 with "
            "log: true"
        )
    return Between(low, high, log)


def fitting(base: Base, spaces: Mapping[str, Space], others: Mapping[str, Any]) -> dict[str, Space]:
    """Turn ranges of integers into ranges of floats where the config's type is a float."""
    first = {path: space.low if isinstance(space, Between) else space[0] for path, space in spaces.items()}
    fitted = dict(spaces)
    for path, space in spaces.items():
        if isinstance(space, Between) and space.whole:
            fractions = base.takes({**others, **first, path: space.low + 0.5})
            # An argument without a type takes fractions, too, but may be a count: it keeps its integers.
            if fractions and not base.takes({**others, **first, path: "text"}):
                fitted[path] = Between(float(space.low), float(space.high), space.log)
    return fitted


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{path}={_json(value)}" for path, value in settings.items()]


def _json(value: Any) -> str:
    """Write a value so that YAML reads back the same value of the same type."""
    return json.dumps(value, ensure_ascii=False)


class Search:
    """Trials whose settings are chosen by the results of the trials before.

    The same arguments and the same earlier results choose the same settings: a search that is started again
    repeats the choices of the trained trials, and continues after them.  A trial's result is the last value
    of `metric`.
    """

    def __init__(
        self, base: Base, spaces: Mapping[str, Space], metric: str, *, maximize: bool = False, seed: int = 0
    ) -> None:
        if not spaces:
            raise ConfigError("nothing varies; give --optuna PATH=[VALUE, ...]")
        try:
            import optuna  # an extra, imported only when it is used
        except ImportError as error:
            raise ConfigError(f"{error}; pip install 'everstep[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._base, self._spaces, self.metric = base, fitting(base, dict(sorted(spaces.items())), {}), metric
        self._study = optuna.create_study(
            direction="maximize" if maximize else "minimize",
            # Trials that train at the same time are kept apart.
            sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        )
        self._asked: list[tuple[optuna.Trial, Trial]] = []

    def ask(self, count: int) -> list[Trial]:
        """Choose the next trials, which are trained before the next ones are chosen; some may be equal."""
        self._asked = []
        for _ in range(count):
            asked = self._study.ask()
            settings = {path: _suggested(asked, path, space) for path, space in self._spaces.items()}
            self._asked.append((asked, self._base.trial(settings)))
        return [trial for _, trial in self._asked]

    def tell(self, finished: Mapping[str, bool]) -> None:
        """Report the trials that `ask` chose last: run directory to whether its training ended well."""
        import optuna

        for asked, trial in self._asked:
            path = str(trial.run_dir)
            value = last_value(path, self.metric) if finished[path] else math.nan
            if math.isnan(value):
                self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
            else:
                self._study.tell(asked, value)


def last_value(run_dir: str, metric: str) -> float:
    return RunJournal(run_dir).series(metric)[1][-1]


def _suggested(asked: optuna.Trial, path: str, space: Space) -> Any:
    # Values are chosen by their indices: they may be lists, and 1 differs from True.
    if not isinstance(space, Between):
        return space[asked.suggest_categorical(path, range(len(space)))]
    if space.whole:
        return asked.suggest_int(path, int(space.low), int(space.high), log=space.log)
    return asked.suggest_float(path, space.low, space.high, log=space.log)
