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

from everstep.errors import ConfigError, EverstepError, nearest
from everstep.experiment.config import resolve
from everstep.experiment.config_layers import Place, assignment, dotted, layered
from everstep.experiment.experiment_config import ExperimentConfig
from everstep.experiment.open_experiment import findable
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
        """The settings as `resolve` takes them: a number is read as a number, a string as a string."""
        return [_override(path, value) for path, value in self.settings.items()]


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
        given = [*self.overrides, *(_override(path, value) for path, value in settings.items())]
        resolved = resolve(ExperimentConfig, self.files, given, profile=self.profile)
        config = resolved.config
        base = self.run_dir or Path(config.run_dir or f"runs/{config.name or Path(self.files[-1]).stem}")
        # Sorted: the same settings are the same trial, whatever the order of the options was.
        sorted_settings = dict(sorted(settings.items()))
        name = _name(sorted_settings, self._words(sorted_settings))
        # `.` and `..` have no name to extend: the run directory lies inside.
        if base.name in ("", ".."):
            return Trial(settings, base / name, base.resolve().name, resolved.tree)
        return Trial(settings, base.parent / f"{base.name}-{name}", base.name, resolved.tree)

    def _words(self, settings: Iterable[str]) -> list[str]:
        """Words for the settings in a name: the last key if the config has it only once, else the path."""
        last = Counter(place[-1] for place in self._places)
        last.update(field.name for field in dataclasses.fields(ExperimentConfig))
        keys = [tuple(path.split(".")) for path in settings]
        return [key[-1] if key in self._places and last[key[-1]] == 1 else dotted(key) for key in keys]

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
    base: Base,
    *,
    grid: Iterable[str] = (),
    draws: Iterable[str] = (),
    count: int = 10,
    seed: int = 0,
) -> list[Trial]:
    """List a sweep's trials, one for each draw and combination; every config is checked.

    The same arguments, in any order, give the same trials: a run directory is named by its settings, so
    that a sweep that was interrupted, or has got more values, continues with the trials that are missing.
    Some trials may be equal: see `distinct`.

    Args:
        grid: "PATH=[VALUE, ...]" each, in YAML; all combinations of the values are trained.
        draws: "PATH=[VALUE, ...]" or "PATH={low: 1e-4, high: 1e-1, log: true}" each, to draw from.
        count: number of draws; each draw is combined with every combination.
        seed: seed of the draws.
    """
    listed = [_axis("--grid", text) for text in grid]
    drawn = [_space("--random", text) for text in draws]
    _require_once([*listed, *drawn])
    axes, spaces = dict(listed), dict(sorted(drawn))  # sorted, as each draw takes the next random numbers
    if not axes and not spaces:
        raise ConfigError("nothing varies; give --grid PATH=[VALUE, ...] or --random PATH=[VALUE, ...]")
    spaces = fitting(base, spaces, {path: values[0] for path, values in axes.items()})
    source, found = random.Random(seed), []
    for _ in range(count if spaces else 1):
        draw = {
            path: space.draw(source) if isinstance(space, Between) else source.choice(space)
            for path, space in spaces.items()
        }
        for values in itertools.product(*axes.values()):
            found.append(base.trial(dict(zip(axes, values, strict=True)) | draw))
    return found


def distinct(found: Iterable[Trial]) -> list[Trial]:
    """Leave out repeated trials: settings that are drawn twice are trained once."""
    return list({trial.run_dir: trial for trial in found}.values())


def spaces(texts: Iterable[str]) -> dict[str, Space]:
    """Read the spaces of `--optuna`: "PATH=[VALUE, ...]" or "PATH={low: A, high: B, log: true}" each."""
    given = [_space("--optuna", text) for text in texts]
    _require_once(given)
    return dict(sorted(given))


def _require_once(given: Sequence[tuple[str, Any]]) -> None:
    for path, count in Counter(path for path, _ in given).items():
        if count > 1:
            raise ConfigError(f"{path} varies twice; give all of its values in one option")


def fitting(
    base: Base, spaces: Mapping[str, Space], others: Mapping[str, Any] | None = None
) -> dict[str, Space]:
    """Turn ranges of integers into ranges of floats where the config's type is a float."""
    first = dict(others or {}) | {
        path: space.low if isinstance(space, Between) else space[0] for path, space in spaces.items()
    }

    def fitted(path: str, space: Space) -> Space:
        if not isinstance(space, Between) or not space.whole:
            return space
        fractions = base.takes({**first, path: space.low + 0.5})
        # An argument without a type takes fractions, too, but may be a count: it keeps its integers.
        anything = base.takes({**first, path: "text"})
        return Between(float(space.low), float(space.high), space.log) if fractions > anything else space

    return {path: fitted(path, space) for path, space in spaces.items()}


def _axis(option: str, text: str) -> tuple[str, list[Any]]:
    keys, given = assignment(text, f"{option} {text!r}")
    if not isinstance(given.tree, list) or not given.tree:
        raise ConfigError(f"{option} {text!r}: {given.tree!r} is not a list of values; give [VALUE, ...]")
    return dotted(keys), given.tree


def _space(option: str, text: str) -> tuple[str, Space]:
    keys, given = assignment(text, f"{option} {text!r}")
    if not isinstance(given.tree, dict):
        return _axis(option, text)
    known = ("low", "high", "log")
    for name in given.tree:
        if name not in known:
            raise ConfigError(f"{option} {text!r}: a range has no {name!r}; {nearest(name, known)}")
    low, high, log = (given.tree.get(name, False) for name in known)
    if any(isinstance(end, bool) or not isinstance(end, int | float) for end in (low, high)):
        raise ConfigError(f"{option} {text!r}: give a range as {{low: 1e-4, high: 1e-1, log: true}}")
    if not isinstance(log, bool) or not -math.inf < low < high < math.inf or (log and low <= 0):
        raise ConfigError(f"{option} {text!r}: give numbers with low < high, and low > 0 with log: true")
    return dotted(keys), Between(low, high, log)


def _override(path: str, value: Any) -> str:
    return f"{path}={_json(value)}"


def _json(value: Any) -> str:
    """Write a value so that YAML reads back the same value of the same type."""
    return json.dumps(value, ensure_ascii=False)


def _name(settings: Mapping[str, Any], words: Sequence[str]) -> str:
    """Name the settings for a folder; with a digest if the name alone would be ambiguous."""
    told = "-".join(f"{word}-{value}" for word, value in zip(words, settings.values(), strict=True))
    plain = re.sub(r"[^\w.+-]+", "_", told)
    # whether the string form of each value belongs to no other value
    clear = all(
        not isinstance(value, str) or (value.isalpha() and value not in ("True", "False", "None"))
        for value in settings.values()
    )
    if plain == told and len(told) <= _LONGEST and clear:
        return plain
    exact = _json(dict(sorted(settings.items())))
    return f"{plain[:_LONGEST]}-{xxhash.xxh3_64_hexdigest(exact.encode())[:6]}"


# ----------------------------------------------------------------------------------------- Optuna


class Search:
    """Trials whose settings are chosen by the results of the trials before.

    The same arguments and the same earlier results choose the same settings: a search that is started again
    repeats the choices of the trained trials, and continues after them.

    Args:
        spaces: dotted path to the space of its values; at least one.
        metric: metric whose last value is a trial's result.
        maximize: whether the largest result is the best; else the smallest.
    """

    def __init__(
        self, base: Base, spaces: Mapping[str, Space], metric: str, *, maximize: bool = False, seed: int = 0
    ) -> None:
        if not spaces:
            raise ConfigError("nothing varies; give --optuna PATH=[VALUE, ...]")
        # Optuna is an extra, imported only when it is used.
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(f"{error}; pip install 'everstep[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._base, self._spaces, self.metric = base, fitting(base, spaces), metric
        self._study = optuna.create_study(
            direction="maximize" if maximize else "minimize",
            # Trials that train at the same time are kept apart.
            sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        )
        self._distributions = {path: _distribution(space) for path, space in self._spaces.items()}
        self._asked: list[tuple[optuna.Trial, Trial]] = []

    def ask(self, count: int) -> list[Trial]:
        """Choose the next trials; some of them may be equal.

        Args:
            count: number of trials to train before the next ones are chosen.
        """
        asked = [self._study.ask(self._distributions) for _ in range(count)]
        self._asked = [(each, self._base.trial(self._settings(each.params))) for each in asked]
        return [trial for _, trial in self._asked]

    def _settings(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        return {
            path: chosen[path] if isinstance(space, Between) else space[chosen[path]]
            for path, space in self._spaces.items()
        }

    def tell(self, finished: Mapping[str, bool]) -> dict[str, float]:
        """Report the results of the trials that `ask` chose last; a failure or nan does not count.

        Args:
            finished: run directory to whether its training ended well.

        Returns:
            Run directory to the result; nan for a failed trial.
        """
        import optuna

        found = {}
        for asked, trial in self._asked:
            path = str(trial.run_dir)
            value = last_value(path, self.metric) if finished[path] else math.nan
            found[path] = value
            if math.isnan(value):
                self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
            else:
                self._study.tell(asked, value)
        return found


def last_value(run_dir: str, metric: str) -> float:
    """Return the last value of a run's metric."""
    return RunJournal(run_dir).series(metric)[1][-1]


def _distribution(space: Space) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    # Values are chosen by their indices: they may be lists, and 1 differs from True.
    if not isinstance(space, Between):
        return distributions.CategoricalDistribution(range(len(space)))
    if space.whole:
        return distributions.IntDistribution(int(space.low), int(space.high), log=space.log)
    return distributions.FloatDistribution(space.low, space.high, log=space.log)
