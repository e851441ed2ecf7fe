"""A sweep that learns from its trials: Optuna (https://optuna.org) chooses the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everstep.errors import ConfigError
from everstep.experiment.sweep import Base, Between, Space, Trial, fitting
from everstep.record import RunJournal

if TYPE_CHECKING:
    import optuna


class Search:
    """Trials whose settings are chosen by what those before came to.

    The same arguments choose the same settings where the trials before came to the same: a search that is
    begun again goes through what is trained already, and on from there.

    Args:
        base: what the trials have in common.
        spaces: dotted path to what its values are chosen from; at least one.
        metric: the last value of it is what counts.
        maximize: whether the largest is the best; else the smallest.
        seed: of the choices.

    Raises:
        ConfigError: there is nothing to vary, or Optuna is not installed.
    """

    def __init__(
        self, base: Base, spaces: Mapping[str, Space], metric: str, *, maximize: bool = False, seed: int = 0
    ) -> None:
        if not spaces:
            raise ConfigError("nothing varies; give --optuna PATH=[VALUE, ...]")
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(f"{error}; pip install 'everstep[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._base, self._spaces, self.metric = base, fitting(base, spaces), metric
        self._study = optuna.create_study(
            direction="maximize" if maximize else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        )
        self._distributions = {path: _distribution(space) for path, space in self._spaces.items()}
        self._asked: list[tuple[optuna.Trial, Trial]] = []

    def ask(self, count: int) -> list[Trial]:
        """The next trials, some of which may be the same.

        Args:
            count: how many are trained before the next are chosen.

        Raises:
            ConfigError: the config of one would be wrong.
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
        """Let the trials that were asked for last count; one that failed, or came to no number, does not.

        Args:
            finished: run directory to whether its training ended well.

        Returns:
            Run directory to the metric.

        Raises:
            ConfigError: a run that ended well has no such metric; names the nearest.
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
    """The last value of a metric of a run.

    Raises:
        ConfigError: it has none; names the nearest.
    """
    return RunJournal(run_dir).series(metric)[1][-1]


def _distribution(space: Space) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if not isinstance(space, Between):  # by their places: values may be lists, and 1 is not True
        return distributions.CategoricalDistribution(range(len(space)))
    if space.whole:
        return distributions.IntDistribution(int(space.low), int(space.high), log=space.log)
    return distributions.FloatDistribution(space.low, space.high, log=space.log)
