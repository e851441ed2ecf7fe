"""Services that not every run has; the others are in `everstep`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.services.condition import OnBest as OnBest
    from everstep.services.dump import Dump as Dump
    from everstep.services.export import Export as Export
    from everstep.services.final_values import FinalValues as FinalValues
    from everstep.services.index import Index as Index
    from everstep.services.log_variables import LogVariables as LogVariables
    from everstep.services.loss_bound import LossBound as LossBound
    from everstep.services.plateau import Plateau as Plateau
    from everstep.services.profile import Profile as Profile
    from everstep.services.progress_bar import ProgressBar as ProgressBar
    from everstep.services.require import Require as Require
    from everstep.services.retry import Retry as Retry
    from everstep.services.scheduled import Annealing as Annealing, Scheduled as Scheduled
    from everstep.services.tables import CSV as CSV, JSONLines as JSONLines
    from everstep.services.tensorboard import (
        Histogram as Histogram,
        Image as Image,
        TensorBoard as TensorBoard,
    )
    from everstep.services.throughput import Throughput as Throughput
    from everstep.services.wait import GlobalStepWaiter as GlobalStepWaiter
    from everstep.services.when import When as When

_HOMES = {
    "condition": ("OnBest",),
    "dump": ("Dump",),
    "export": ("Export",),
    "final_values": ("FinalValues",),
    "index": ("Index",),
    "log_variables": ("LogVariables",),
    "loss_bound": ("LossBound",),
    "plateau": ("Plateau",),
    "profile": ("Profile",),
    "progress_bar": ("ProgressBar",),
    "require": ("Require",),
    "retry": ("Retry",),
    "scheduled": ("Annealing", "Scheduled"),
    "tables": ("CSV", "JSONLines"),
    "tensorboard": ("Histogram", "Image", "TensorBoard"),
    "throughput": ("Throughput",),
    "wait": ("GlobalStepWaiter",),
    "when": ("When",),
}
_NAMES = {name: f"everstep.services.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [*_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        from everstep.errors import nearest

        raise AttributeError(
            f"module 'everstep.services' has no attribute {name!r}; {nearest(name, __all__)}; in everstep "
            "itself: Best, Checkpoints, Console, EarlyStop, Evaluate, NaNGuard, Recovery, StopAfter"
        )
    return getattr(importlib.import_module(_NAMES[name]), name)
