"""`Best` of a TrainLoop's watched metric: from the services, or a new one."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.contracts.services import Service
from everstep.errors import ConfigError
from everstep.services.best import Best, direction
from everstep.services.judges import EarlyStop


def with_best(watch: str | tuple[str, str] | None, services: list[Service]) -> list[Service]:
    """Return the services, with the `Best` of the watched metric before every other `Best`."""
    bests = [service for service in services if isinstance(service, Best)]
    if watch is None:
        return services if bests else [*services, _default_best(services)]
    if isinstance(watch, str):
        metric, mode = watch, None
    elif isinstance(watch, tuple) and len(watch) == 2:
        metric, mode = watch
    else:
        raise ConfigError(f'watch={watch!r}: give a name, or a pair as in watch=("valid_acc", "max")')
    found = next((best for best in bests if best.metric == metric), None)
    if found is None:
        direction(metric, mode, f'give watch=("{metric}", "min") or "max"')
        found = Best(metric, mode)
    elif mode not in (None, found.mode):
        raise ConfigError(f"watch={watch!r} and {found!r} with mode={found.mode!r}: give one of the two")
    return [found, *(service for service in services if service is not found)]


def _default_best(services: Sequence[Service]) -> Best:
    """Make the `Best` of the metric that stops the run, else of "valid_loss"."""
    stopper = next((s for s in services if isinstance(s, EarlyStop)), None)
    metric, mode = ("valid_loss", None) if stopper is None else (stopper.metric, stopper.mode)
    best = Best(metric, mode, save=False)
    best.watches = ()  # nobody asked for it
    return best
