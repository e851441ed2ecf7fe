"""Sweep whose settings Optuna (https://optuna.org) chooses by the results of earlier trials."""

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
    """Trials whose settings are chosen by the results of the trials before.

    The same arguments and the same earlier results choose the same settings: a search that is started again
    repeats the choices of the trained trials, and continues after them.

    Args:
        base: the part that all trials have in common.
        spaces: dotted path to the space of its values; at least one.
        metric: metric whose last value is a trial's result.
        maximize: whether the largest result is the best; else the smallest.
        seed: seed of the choices.

    Raises:
        ConfigError: there is nothing to vary, or Optuna is not installed.
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

        Raises:
            ConfigError: the config of a trial would be wrong.
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
    """Return the last value of a run's metric.

    Raises:
        ConfigError: the run has no such metric; names the nearest.
    """
    return RunJournal(run_dir).series(metric)[1][-1]


def _distribution(space: Space) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    # Values are chosen by their indices: they may be lists, and 1 differs from True.
    if not isinstance(space, Between):
        return distributions.CategoricalDistribution(range(len(space)))
    if space.whole:
        return distributions.IntDistribution(int(space.low), int(space.high), log=space.log)
    return distributions.FloatDistribution(space.low, space.high, log=space.log)
