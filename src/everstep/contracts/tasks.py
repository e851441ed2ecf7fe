"""Steps of a `Trainer`: a `Task`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from everstep.errors import ConfigError


class Task:
    """Your steps, for a `Trainer`.  Subclass it; training needs only `train_step`.

    A task knows no framework.  The idea comes from the tasks of Model Garden and Orbit.

    Attributes:
        model: the result of `build_model`; or assign a model yourself, then none is built.
        optimizer: the result of `build_optimizer`, or your own, likewise.
        epoch: number of the epoch, from 1, set by the Trainer before `train_loop_begin` and the same after a
            resume; 0 before the first one.
        is_built: whether a Trainer has called `build`; no other Trainer calls it again.
        batch_weight: factor for the mean over the batch of `train_step`, set before that call.  With it the
            mean over ranks is the mean over all samples, where ranks have unequal numbers of them.
        applies_weight: whether `train_step` multiplies its loss by `batch_weight`.  Then a Trainer on several
            ranks splits batches that do not divide among them; else these are an error, without `uneven=`.
    """

    model: Any = None
    optimizer: Any = None
    epoch = 0
    is_built = False
    batch_weight = 1.0
    applies_weight = False

    def build(
        self, *, model: Callable[[], Any] | None = None, optimizer: Callable[[Any], Any] | None = None
    ) -> None:
        """Make the model and the optimizer, if missing; called once, however many Trainers the task has.

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
        """Map names to all objects that training changes.  Default: the model and the optimizer.

        Numbers, strings, arrays, containers of these, and generators in attributes of the task are saved
        without being named here, where torch is used on one process.
        """
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {name: part for name, part in parts.items() if part is not None}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Train on one batch; return metrics, one real number each (a tensor may stay on its device)."""
        raise _lacks(self, "train_step")

    def train_loop_begin(self) -> None:
        """Prepare the steps of `epoch`; called again for an epoch that a resume enters again."""

    def train_loop_end(self) -> Mapping[str, Any] | None:
        """End an epoch, after its steps; may return metrics of the epoch."""
        return None

    def next_train_inputs(self, batches: Iterator[Any]) -> Any:
        """Return the next argument of `train_step`; may draw several batches, or raise `StopIteration`."""
        return next(batches)

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Look at one batch, in evaluation mode.

        Returns:
            Names to values.  Numbers are averaged over the evaluation, weighted by `batch_size`;
            other values (arrays of each sample's values, say) are for `eval_reduce`.
        """
        raise _lacks(self, "eval_step")

    def batch_size(self, batch: Any) -> float:
        """Count the samples in a batch: the weight of its metrics in the mean.

        A number above 0.  Default: the length of the batch, or of its first part if the batch is a tuple,
        list or mapping; an object without a length is one sample.
        """
        count = counted(batch)
        return 1.0 if count is None else float(count)

    def eval_begin(self) -> Any:
        """Begin an evaluation; return the first state for `eval_reduce`."""
        return None

    def eval_reduce(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        """Take in one batch; return the new state.

        Args:
            state: the state after the batch before, or the result of `eval_begin`.
            outputs: the result of `eval_step` and the logs of `next_eval_inputs`.
        """
        return state

    def eval_end(self, state: Any) -> Mapping[str, Any] | None:
        """End an evaluation; return metrics of the last state, instead of means of the same name."""
        return None

    def next_eval_inputs(self, batches: Iterator[Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the next argument of `eval_step`, and logs (file names, ids) that the step does not need.

        The logs are merged with the step's result, for `eval_reduce`.
        """
        return next(batches), {}

    def inference_step(self, batch: Any) -> Any:
        """Return the predictions for one batch, in evaluation mode."""
        raise _lacks(self, "inference_step")

    def evaluating(self) -> AbstractContextManager[object]:
        """Return a context for each evaluation and prediction; it undoes its changes, even after an error."""
        return nullcontext()


def counted(batch: Any) -> int | None:
    """Return the length of a batch, or of its first part; None where that has no length."""
    while isinstance(batch, tuple | list | Mapping) and batch:
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    try:
        return len(batch)
    except TypeError:
        return None


def _lacks(task: Task, method: str) -> ConfigError:
    return ConfigError(
        f"{type(task).__name__} has no {method}; give the class one: def {method}(self, batch): ..."
    )
