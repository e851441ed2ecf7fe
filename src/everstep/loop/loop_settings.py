"""Checked arguments of a `TrainLoop`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from everstep.arguments import integer
from everstep.contracts.services import Service
from everstep.loop.watched_best import with_best
from everstep.metrics import MetricFormatter
from everstep.supervisor.settings import LoopKind, Settings, listed


class LoopSettings(Settings):
    """Checked arguments of a `TrainLoop`, without its state.

    Args:
        kind: the loop's class.
        others: as for `Settings`; the rest as for `TrainLoop`.
    """

    def __init__(
        self,
        kind: LoopKind,
        run_dir: str | Path,
        *,
        services: Iterable[Service] = (),
        watch: str | tuple[str, str] | None = None,
        steps_per_epoch: int | None = None,
        groups: Sequence[str] = (),
        formatter: MetricFormatter | None = None,
        show_eta: bool = True,
        **others: Any,
    ) -> None:
        super().__init__(kind, run_dir, services=with_best(watch, listed(services)), **others)
        self.steps_per_epoch = integer("steps_per_epoch", steps_per_epoch, none="for no limit")
        self.groups, self.formatter, self.show_eta = tuple(groups), formatter or MetricFormatter(), show_eta
