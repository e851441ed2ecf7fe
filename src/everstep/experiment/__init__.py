"""The fourth door: typed configs, and experiments that are run by them (extra `experiment`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.experiment.calls import Call as Call
    from everstep.experiment.config import Resolved as Resolved
    from everstep.experiment.config import as_yaml as as_yaml
    from everstep.experiment.config import resolve as resolve
    from everstep.experiment.experiment import Experiment as Experiment
    from everstep.experiment.from_params import recorded_params as recorded_params
    from everstep.experiment.from_params import test_from_params as test_from_params
    from everstep.experiment.from_params import train_from_params as train_from_params
    from everstep.experiment.opening import open_config as open_config
    from everstep.experiment.opening import open_run as open_run
    from everstep.experiment.schema import ExperimentConfig as ExperimentConfig
    from everstep.experiment.tested import intermediate_results as intermediate_results

_HOMES = {
    "calls": ("Call",),
    "config": ("Resolved", "as_yaml", "resolve"),
    "experiment": ("Experiment",),
    "from_params": ("recorded_params", "test_from_params", "train_from_params"),
    "opening": ("open_config", "open_run"),
    "schema": ("ExperimentConfig",),
    "tested": ("intermediate_results",),
}
_NAMES = {name: f"everstep.experiment.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [*_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        from everstep.errors import nearest

        raise AttributeError(
            f"module 'everstep.experiment' has no attribute {name!r}; {nearest(name, __all__)}"
        )
    return getattr(importlib.import_module(_NAMES[name]), name)
