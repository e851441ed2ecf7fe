"""What `Trainer.run` does, by its mode's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.errors import ConfigError, nearest
from everstep.keywords import checked_keywords, whole
from everstep.schedule import Every, Schedule
from everstep.supervisor import Ending
from everstep.trainer.watching import Which

if TYPE_CHECKING:
    from everstep.trainer.trainer import Trainer


class RunResult(NamedTuple):
    """What `Trainer.run` came to.

    Attributes:
        ending: how training ended; None of a mode that does not train.
        metrics: what was evaluated last, with each stream's prefix.
    """

    ending: Ending | None
    metrics: dict[str, float]


def run_mode(trainer: Trainer, mode: str, arguments: dict[str, Any]) -> RunResult:
    """See `Trainer.run`."""
    if not isinstance(mode, str) or mode not in _MODES:
        raise ConfigError(f"there is no mode {mode!r}; {nearest(str(mode), _MODES)}")
    return checked_keywords(_MODES[mode])(trainer, **arguments)


def train(trainer: Trainer, /, max_step: int | None = None, evaluate: bool | Schedule = True) -> RunResult:
    return RunResult(trainer.run_training(max_step=max_step, evaluate=evaluate), {})


def evaluate(trainer: Trainer, /) -> RunResult:
    return RunResult(None, trainer.evaluate_all(newest=True))


def train_and_evaluate(trainer: Trainer, /, max_step: int | None = None) -> RunResult:
    return RunResult(trainer.run_training(max_step=max_step, evaluate_end=True), trainer.evaluate_all())


def train_then_evaluate(trainer: Trainer, /, max_step: int | None = None) -> RunResult:
    return RunResult(trainer.run_training(max_step=max_step, evaluate=False), trainer.evaluate_all())


def train_in_iterations(
    trainer: Trainer, /, steps_per_iteration: int | None = None, max_step: int | None = None
) -> RunResult:
    steps_per_iteration = whole("steps_per_iteration", steps_per_iteration, none="for a tenth of max_step")
    limit = max_step or trainer.max_step
    steps = steps_per_iteration or (max(limit // 10, 1) if limit else 1000)
    ending = trainer.run_training(max_step=max_step, evaluate=Every(steps=steps), evaluate_end=True)
    return RunResult(ending, trainer.evaluate_all())


def watch(
    trainer: Trainer,
    /,
    streams: Iterable[str] | str | None = None,
    every: Which = "each",
    throttle: float = 0.0,
    timeout: float | None = 3600.0,
) -> RunResult:
    metrics: dict[str, float] = {}
    for found in trainer.watch(streams, every=every, throttle=throttle, timeout=timeout):
        print(found, flush=True)
        metrics |= found.metrics
    return RunResult(None, metrics)


_MODES: dict[str, Callable[..., RunResult]] = {
    "train": train,
    "eval": evaluate,
    "train_and_eval": train_and_evaluate,
    "train_then_eval": train_then_evaluate,
    "continuous_train_and_eval": train_in_iterations,
    "watch": watch,
    "continuous_eval": watch,
}
