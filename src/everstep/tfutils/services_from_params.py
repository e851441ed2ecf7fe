"""Services that a tree of parameters describes."""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint import CheckpointName, Store
from everstep.contracts.services import Boundary, Moment, RunView, Service
from everstep.schedule import Every
from everstep.services.checkpoints import Checkpoints, Index
from everstep.services.evaluate import Evaluate
from everstep.services.judges import LossBound, NaNGuard
from everstep.tfutils.checkpoint_from_params import index_of
from everstep.tfutils.params_schema import Training, Validation


def services_of(tree: Training) -> list[Service]:
    """Make the guards, evaluations, checkpoints and index of a training."""
    save, training = tree.save_params, tree.train_params
    cache, permanent = save.cache_filters_freq, save.save_filters_freq
    services: list[Service] = [NaNGuard(), Index(index_of(save, "save_params"))]
    if training.thres_loss is not None:
        services.append(LossBound("loss", bound=training.thres_loss))
    every, first = Every(steps=save.save_valid_freq), training.validate_first
    for name, validation in tree.validation_params.items():
        services.append(evaluation(name, validation, every, validate_first=first))
    services.append(
        Checkpoints(
            Every(steps=cache) | Every(steps=permanent),
            keep_last=save.cache_max_num,
            keep_every=Every(steps=permanent),
        )
    )
    services.append(_Written(Every(steps=save.save_metrics_freq)))
    if save.save_initial_filters:
        services.append(_InitialFilters())
    return services


def evaluation(
    name: str, one: Validation, every: Every | None = None, *, validate_first: bool = False
) -> Evaluate:
    """Make the service that a validation describes."""
    return Evaluate(
        name,
        every,
        num_steps=one.num_steps or -1,
        validate_first=validate_first,
        agg_func=one.agg_func,
        online_agg_func=one.online_agg_func,
    )


class _Written(Service):
    """Service that hands the rows of the record to the operating system, at its schedule."""

    isolate = False
    window = "none"

    def __init__(self, every: Every) -> None:
        super().__init__("save_metrics_freq", every)
        self._run: RunView | None = None

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        assert self._run is not None
        self._run.flush()


class _InitialFilters(Service):
    """Service that pins the checkpoint of step 0."""

    isolate = False
    window = "none"
    moments = frozenset({Moment.AFTER_CHECKPOINT})

    def __init__(self) -> None:
        super().__init__("save_initial_filters")
        self._run: RunView | None = None

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        assert self._run is not None
        store = Store(Path(self._run.run_dir))
        name = CheckpointName.parse(boundary.payload)
        if name == CheckpointName(0, 0) and name not in store.pins() and name in store.names():
            store.pin(name)
