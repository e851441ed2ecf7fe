"""Optional services; the common ones are in `everstep`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.services.condition import OnBest as OnBest
    from everstep.services.dump import Dump as Dump
    from everstep.services.export import Export as Export
    from everstep.services.final_values import FinalValues as FinalValues
    from everstep.services.hang_watch import HangWatch as HangWatch
    from everstep.services.index import Index as Index
    from everstep.services.log_variables import LogVariables as LogVariables
    from everstep.services.loss_bound import LossBound as LossBound
    from everstep.services.notify import Notify as Notify
    from everstep.services.plateau import Plateau as Plateau
    from everstep.services.profile import Profile as Profile
    from everstep.services.progress_bar import ProgressBar as ProgressBar
    from everstep.services.require import Require as Require
    from everstep.services.retry import Retry as Retry
    from everstep.services.scheduled import Annealing as Annealing, Scheduled as Scheduled
    from everstep.services.sink import Sink as Sink
    from everstep.services.system import System as System
    from everstep.services.tables import CSV as CSV, JSONLines as JSONLines
    from everstep.services.tensorboard import (
        Histogram as Histogram,
        Image as Image,
        TensorBoard as TensorBoard,
    )
    from everstep.services.throughput import Throughput as Throughput
    from everstep.services.wait import GlobalStepWaiter as GlobalStepWaiter
    from everstep.services.when import When as When

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(
        __name__,
        {
            "everstep.services.condition": ("OnBest",),
            "everstep.services.dump": ("Dump",),
            "everstep.services.export": ("Export",),
            "everstep.services.final_values": ("FinalValues",),
            "everstep.services.hang_watch": ("HangWatch",),
            "everstep.services.index": ("Index",),
            "everstep.services.log_variables": ("LogVariables",),
            "everstep.services.loss_bound": ("LossBound",),
            "everstep.services.notify": ("Notify",),
            "everstep.services.plateau": ("Plateau",),
            "everstep.services.profile": ("Profile",),
            "everstep.services.progress_bar": ("ProgressBar",),
            "everstep.services.require": ("Require",),
            "everstep.services.retry": ("Retry",),
            "everstep.services.scheduled": ("Annealing", "Scheduled"),
            "everstep.services.sink": ("Sink",),
            "everstep.services.system": ("System",),
            "everstep.services.tables": ("CSV", "JSONLines"),
            "everstep.services.tensorboard": ("Histogram", "Image", "TensorBoard"),
            "everstep.services.throughput": ("Throughput",),
            "everstep.services.wait": ("GlobalStepWaiter",),
            "everstep.services.when": ("When",),
        },
        beside="everstep",
    )
