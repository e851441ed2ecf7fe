"""The steps of a `Trainer`: a `Task`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from everstep.errors import ConfigError


class Task:
    """Your steps, for a `Trainer`.  Subclass it; only `train_step` must be there to train.

    It knows no framework.  Carries on the tasks of Model Garden and Orbit.

    Attributes:
        model: what `build_model` returned; or assign it yourself, then nothing is built.
        optimizer: the same of `build_optimizer`.
        is_built: whether a Trainer has called `build`, which no other one does again.
    """

    model: Any = None
    optimizer: Any = None
    is_built = False

    def build(
        self, *, model: Callable[[], Any] | None = None, optimizer: Callable[[Any], Any] | None = None
    ) -> None:
        """Make what is not there yet; called once, however many Trainers the task has.

        Args:
            model: makes the model, instead of `build_model`.
            optimizer: makes the optimizer of the model, instead of `build_optimizer`.
        """
        if self.model is None:
            self.model = (model or self.build_model)()
        if self.optimizer is None:
            self.optimizer = (optimizer or self.build_optimizer)(self.model)

    def build_model(self) -> Any:
        """Make the model.  Where the Trainer has a seed, random numbers drawn here follow from it."""
        return None

    def build_optimizer(self, model: Any) -> Any:
        """Make the optimizer of `model`."""
        return None

    def initialize(self) -> None:
        """Start from other weights than `build_model` made; called only where the run has no checkpoint."""

    def state(self) -> Mapping[str, Any]:
        """Name to object: everything that training changes.  Default: the model and the optimizer."""
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {name: part for name, part in parts.items() if part is not None}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Train on one batch; returns metrics, one real number each (a tensor may stay on its device)."""
        raise _lacks(self, "train_step")

    def train_loop_begin(self) -> None:
        """Before the steps of each epoch; of one that a resume enters again, again."""

    def train_loop_end(self) -> Mapping[str, Any] | None:
        """After them; may return metrics of the epoch."""
        return None

    def next_train_inputs(self, batches: Iterator[Any]) -> Any:
        """What the next `train_step` gets; may draw several batches, or end the pass by `StopIteration`."""
        return next(batches)

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Look at one batch, in evaluation mode.

        Returns:
            Names to values.  Numbers are averaged over the evaluation, weighted by `batch_size`;
            others (arrays of each sample's values, say) are for `eval_reduce`.
        """
        raise _lacks(self, "eval_step")

    def batch_size(self, batch: Any) -> float:
        """How many samples a batch has: the weight of its metrics in the mean.

        A number above 0.  Default: the length of the batch, or of its first part if it is a tuple, list or
        mapping; what has no length is one sample.
        """
        while isinstance(batch, tuple | list | Mapping) and batch:
            batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
        try:
            return float(len(batch))
        except TypeError:
            return 1.0

    def eval_begin(self) -> Any:
        """Before an evaluation: the state that `eval_reduce` is first called with."""
        return None

    def eval_reduce(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        """Take in one batch: what `eval_step` returned and the logs of `next_eval_inputs`; the new state."""
        return state

    def eval_end(self, state: Any) -> Mapping[str, Any] | None:
        """After an evaluation: metrics made of the last state, instead of means of the same name."""
        return None

    def next_eval_inputs(self, batches: Iterator[Any]) -> tuple[Any, Mapping[str, Any]]:
        """What the next `eval_step` gets, and logs (file names, ids) that it does not need.

        The logs are merged with what the step returns, for `eval_reduce`.
        """
        return next(batches), {}

    def inference_step(self, batch: Any) -> Any:
        """The predictions for one batch, in evaluation mode."""
        raise _lacks(self, "inference_step")

    def evaluating(self) -> AbstractContextManager[object]:
        """Surrounds each evaluation and prediction; what it changes it puts back, also after an error."""
        return nullcontext()


def _lacks(task: Task, method: str) -> ConfigError:
    return ConfigError(f"{type(task).__name__} has no {method}; give it one: def {method}(self, batch): ...")
