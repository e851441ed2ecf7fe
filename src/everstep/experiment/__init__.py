"""Fourth door: typed configs, and the experiments that they describe (extra `experiment`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.experiment.calls import Call as Call
    from everstep.experiment.config import ExperimentConfig as ExperimentConfig
    from everstep.experiment.config import Resolved as Resolved
    from everstep.experiment.config import as_yaml as as_yaml
    from everstep.experiment.config import resolve as resolve
    from everstep.experiment.experiment import Experiment as Experiment
    from everstep.experiment.open_experiment import open_config as open_config
    from everstep.experiment.open_experiment import open_run as open_run

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__)
