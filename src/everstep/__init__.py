"""everstep: training loops whose runs survive anything, to the bit.

Every public name is exported here, and imported only when it is used: `import everstep` itself loads no
framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.drilled import note_files
from everstep.lazy import exports
from everstep.unattended import tell_of_errors

if TYPE_CHECKING:
    from everstep import (
        data as data,
        drill as drill,
        errors as errors,
        experiment as experiment,
        record as record,
        schedule as schedule,
        services as services,
        testing as testing,
        torch as torch,
    )
    from everstep.contracts.data import Cursor as Cursor, Stream as Stream
    from everstep.contracts.services import (
        Boundary as Boundary,
        Interrupt as Interrupt,
        Moment as Moment,
        Outcome as Outcome,
        Save as Save,
        Service as Service,
        SetValue as SetValue,
        Stage as Stage,
        Stop as Stop,
    )
    from everstep.contracts.state import Stateful as Stateful
    from everstep.contracts.tasks import Task as Task
    from everstep.experiment.experiment import Experiment as Experiment
    from everstep.index.query import query as query
    from everstep.loop import TrainLoop as TrainLoop
    from everstep.metrics import MetricFormatter as MetricFormatter, TimesFirst as TimesFirst
    from everstep.proof.audit import audit as audit
    from everstep.record import Evaluation as Evaluation, evaluations as evaluations
    from everstep.replaying import replay as replay
    from everstep.schedule import At as At, Auto as Auto, Every as Every, Never as Never
    from everstep.services.best import Best as Best
    from everstep.services.checkpoints import Checkpoints as Checkpoints
    from everstep.services.console import Console as Console
    from everstep.services.judges import EarlyStop as EarlyStop
    from everstep.services.export import export as export
    from everstep.services.evaluate import Evaluate as Evaluate
    from everstep.services.judges import NaNGuard as NaNGuard
    from everstep.services.recovery import Recovery as Recovery
    from everstep.services.judges import StopAfter as StopAfter
    from everstep.state import PerRank as PerRank, Slot as Slot
    from everstep.supervisor import (
        BestRecord as BestRecord,
        Ending as Ending,
        InitFrom as InitFrom,
        Loaded as Loaded,
        Supervisor as Supervisor,
        best as best,
        load as load,
        recovering as recovering,
    )
    from everstep.tfutils.runs import (
        test_from_params as test_from_params,
        train_from_params as train_from_params,
    )
    from everstep.trainer import MultiRun as MultiRun, Trainer as Trainer
    from everstep.views.notebook import compare as compare, show as show

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__, beside="everstep.services")

tell_of_errors()
note_files()

__version__ = "0.1.0"
