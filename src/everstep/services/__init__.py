"""All services but the commonest, which are in `everstep`, and what a service of your own is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.contracts.services import Interrupt as Interrupt, Moment as Moment, SetValue as SetValue
    from everstep.contracts.services import Stage as Stage
    from everstep.metrics import MetricFormatter as MetricFormatter, TimesFirst as TimesFirst
    from everstep.services.checkpoints import GlobalStepWaiter as GlobalStepWaiter, Index as Index
    from everstep.services.console import Console as Console, LogVariables as LogVariables
    from everstep.services.export import Dump as Dump, Export as Export
    from everstep.services.judges import Annealing as Annealing, LossBound as LossBound, NaNGuard as NaNGuard
    from everstep.services.judges import OnBest as OnBest, Plateau as Plateau, Require as Require
    from everstep.services.judges import Scheduled as Scheduled, StopAfter as StopAfter, When as When
    from everstep.services.loggers import MLflow as MLflow, Trackio as Trackio, WandB as WandB
    from everstep.services.measure import FinalValues as FinalValues, Profile as Profile
    from everstep.services.measure import System as System, Throughput as Throughput
    from everstep.services.notify import Notify as Notify
    from everstep.services.recovery import HangWatch as HangWatch, Recovery as Recovery, Retry as Retry
    from everstep.services.sink import CSV as CSV, JSONLines as JSONLines, RemoteSink as RemoteSink
    from everstep.services.sink import Sink as Sink
    from everstep.services.tensorboard import Histogram as Histogram, Image as Image
    from everstep.services.tensorboard import TensorBoard as TensorBoard

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__, beside="everstep")
