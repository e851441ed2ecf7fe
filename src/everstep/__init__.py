"""everstep: training loops whose runs survive anything, to the bit.

Everything public is imported from here, and only when it is used: `import everstep` itself loads no
framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from everstep.index.asking import query as query
    from everstep.experiment.from_params import (
        test_from_params as test_from_params,
        train_from_params as train_from_params,
    )
    from everstep.loop import TrainLoop as TrainLoop
    from everstep.metrics import MetricFormatter as MetricFormatter
    from everstep.record import Evaluation as Evaluation, evaluations as evaluations
    from everstep.schedule import At as At, Every as Every, Never as Never
    from everstep.services.best import Best as Best
    from everstep.services.checkpoints import Checkpoints as Checkpoints
    from everstep.services.console import Console as Console
    from everstep.services.early_stop import EarlyStop as EarlyStop
    from everstep.services.evaluate import Evaluate as Evaluate
    from everstep.services.nan_guard import NaNGuard as NaNGuard
    from everstep.services.recovery import Recovery as Recovery
    from everstep.services.stop_after import StopAfter as StopAfter
    from everstep.state import Slot as Slot
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
    from everstep.trainer import MultiRun as MultiRun, Trainer as Trainer

_HOMES = {
    "contracts.data": ("Cursor", "Stream"),
    "contracts.services": (
        "Boundary",
        "Interrupt",
        "Moment",
        "Outcome",
        "Save",
        "Service",
        "SetValue",
        "Stage",
        "Stop",
    ),
    "contracts.state": ("Stateful",),
    "contracts.tasks": ("Task",),
    "experiment.experiment": ("Experiment",),
    "index.asking": ("query",),
    "experiment.from_params": ("test_from_params", "train_from_params"),
    "loop": ("TrainLoop",),
    "metrics": ("MetricFormatter",),
    "record": ("Evaluation", "evaluations"),
    "schedule": ("At", "Every", "Never"),
    "services.best": ("Best",),
    "services.checkpoints": ("Checkpoints",),
    "services.console": ("Console",),
    "services.early_stop": ("EarlyStop",),
    "services.evaluate": ("Evaluate",),
    "services.nan_guard": ("NaNGuard",),
    "services.recovery": ("Recovery",),
    "services.stop_after": ("StopAfter",),
    "state": ("Slot",),
    "supervisor": ("BestRecord", "Ending", "InitFrom", "Loaded", "Supervisor", "best", "load", "recovering"),
    "trainer": ("MultiRun", "Trainer"),
}
_NAMES = {name: f"everstep.{home}" for home, names in _HOMES.items() for name in names}
_ROOMS = {
    "data": "everstep.data",
    "drill": "everstep.drill",
    "errors": "everstep.errors",
    "experiment": "everstep.experiment",
    "record": "everstep.record",
    "schedule": "everstep.schedule",
    "services": "everstep.services",
    "testing": "everstep.testing",
    "torch": "everstep.torch",
}

__version__ = "0.1.0"
__all__ = list(_NAMES)
"""The names; not the rooms, so that `from everstep import *` takes no `data` from a program."""


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _ROOMS:
        value = importlib.import_module(_ROOMS[name])
    else:
        from everstep import services
        from everstep.errors import nearest

        there = name in services.__all__
        hint = f"it is everstep.services.{name}" if there else nearest(name, [*_NAMES, *_ROOMS])
        raise AttributeError(f"module 'everstep' has no attribute {name!r}; {hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_ROOMS})
