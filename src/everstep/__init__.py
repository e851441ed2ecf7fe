"""everstep: training loops whose runs survive anything, to the bit.

Every public name is exported here, and imported only when it is used: `import everstep` itself loads no
framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports
from everstep.unattended import tell_of_errors

if TYPE_CHECKING:
    from everstep import (
        compat as compat,
        data as data,
        drill as drill,
        errors as errors,
        experiment as experiment,
        record as record,
        runs as runs,
        schedule as schedule,
        services as services,
        supervisor as supervisor,
        testing as testing,
        torch as torch,
        trainer as trainer,
    )
    from everstep.contracts.services import (
        Boundary as Boundary,
        Outcome as Outcome,
        Save as Save,
        Service as Service,
        Stop as Stop,
    )
    from everstep.contracts.tasks import Task as Task
    from everstep.experiment.experiment import Experiment as Experiment
    from everstep.index.query import query as query
    from everstep.loop import TrainLoop as TrainLoop
    from everstep.schedule import At as At, Auto as Auto, Every as Every, Never as Never
    from everstep.services.best import Best as Best
    from everstep.services.checkpoints import Checkpoints as Checkpoints
    from everstep.services.evaluate import Evaluate as Evaluate
    from everstep.services.export import export as export
    from everstep.services.judges import EarlyStop as EarlyStop
    from everstep.state import PerRank as PerRank, Slot as Slot
    from everstep.supervisor import (
        InitFrom as InitFrom,
        Supervisor as Supervisor,
        load as load,
        recovering as recovering,
    )
    from everstep.trainer import Trainer as Trainer

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__, beside="everstep.services")

tell_of_errors()

__version__ = "0.1.0"
