"""Task that a tree of parameters describes."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from everstep.contracts.tasks import Task
from everstep.errors import ConfigError, nearest
from everstep.tfutils.params_schema import Model, Training, Validation

RESERVED = ("loss", "learning_rate", "optimizer", "__grads__")
"""Names that a target may not have."""


class ParamsTask(Task):
    """Task of `train_from_params` and `test_from_params`; a `train_loop` gets it as its argument.

    Args:
        model: makes the model.
        validations: validations by name.
        example: the `inputs` of the function that makes the model.
        training: the tree to train by; None in a test, which trains nothing.
        global_step: the step from which the learning rate counts.

    Attributes:
        model, optimizer: objects that the functions of the tree made.
    """

    def __init__(
        self,
        model: Model,
        validations: Mapping[str, Validation],
        example: Mapping[str, Any],
        *,
        training: Training | None = None,
        global_step: int = 0,
    ) -> None:
        self._make, self._validations, self._example, self._training = model, validations, example, training
        self._counted = {"global_step": global_step}
        self._rate: float | None = None
        """Learning rate of the current step; None if the tree has none."""
        self._torch: Any = None

    # -------------------------------------------------------------------------------- building

    def build_model(self) -> Any:
        training = self._training
        model = self._make(inputs=self._example, train=training is not None)
        if "torch" in sys.modules:
            kit: Any = importlib.import_module("everstep.backends.torch.tfutils")
            self._torch = kit if kit.is_model(model) else None
        own_step = self._torch is not None or training is None or training.train_params.train_loop is not None
        if not callable(model) or not (own_step or hasattr(model, "train_step")):
            raise ConfigError(
                f"model_params.func returned {model!r:.80}; return a torch.nn.Module, or an object that "
                "can be called with a batch and has train_step(inputs, learning_rate), state_dict and "
                "load_state_dict"
            )
        return model

    def build_optimizer(self, model: Any) -> Any:
        tree = self._training
        if tree is None:
            return None
        for name in ("loss_params", "optimizer_params"):
            given = getattr(tree, name)
            if self._torch is None and given is not None:
                raise ConfigError(f"{name}: a {type(model).__name__} trains itself; leave it out")
            if self._torch is not None and given is None and tree.train_params.train_loop is None:
                raise ConfigError(f"{name} is missing; give it: a torch model needs it")
        params = tree.optimizer_params
        if params is None:
            return None
        # The rate of step 0, wherever the training begins: given options are compared at each resume.
        rate = {} if (lr := self._rate_of(0)) is None else {"lr": lr}
        how = {"inner": params.optimizer_class, "clip": params.clip, "names": params.trainable_names}
        return self._torch.optimizer(model, params.optimizer, params.arguments | rate, **how)

    def state(self) -> Mapping[str, Any]:
        """Return the model, the optimizer if there is one, and the step that decides the learning rate."""
        trained = {} if self._training is None else {"global_step": self._counted}
        return {**super().state(), **trained}

    # -------------------------------------------------------------------------------- the steps

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Convert a batch to the inputs of the model.

        Raises:
            ConfigError: the batch is not a dictionary.
        """
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a batch of the data is a {type(batch).__name__}; let data_params.func return data whose "
                "batches are dictionaries, or a dictionary of arrays"
            )
        return dict(batch) if self._torch is None else self._torch.inputs(batch, self.model)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        assert self._training is not None
        inputs, self._rate = self.inputs(batch), self._rate_of(self._counted["global_step"])
        if self._rate is not None and self.optimizer is not None:
            self._torch.set_lr(self.optimizer, self._rate)
        loop = self._training.train_params.train_loop
        found: Mapping[str, Any] = self.step(inputs) if loop is None else loop(self, inputs)
        self._counted["global_step"] += 1
        return found if self._rate is None else {**found, "learning_rate": self._rate}

    def _rate_of(self, step: int) -> float | None:
        assert self._training is not None
        rate = self._training.learning_rate_params
        return None if rate is None else float(rate(global_step=step))

    def step(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make an update, as without a `train_loop`; a `train_loop` may call this method."""
        assert self._training is not None
        if self._torch is None:
            return {**self.model.train_step(inputs, learning_rate=self._rate), **self._also(inputs)}
        size = self._training.train_params.minibatch_size
        found: Mapping[str, Any] = self._torch.train(self.optimizer, self.loss, inputs, size)
        return found

    def loss(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss of a batch or minibatch, and the targets of `train_params`."""
        given = None if self._training is None else self._training.loss_params
        if given is None:
            raise ConfigError("loss_params is missing; give it, or leave task.loss() out of your train_loop")
        names = given.pred_targets
        labels = [_named(inputs, name) for name in ([names] if isinstance(names, str) else names)]
        outputs = self.model(inputs)
        loss = given.loss_func(outputs, *labels, **given.loss_func_kwargs)
        aggregate = given.agg_func
        loss = self._torch.mean(loss) if aggregate is None else aggregate(loss, **given.agg_func_kwargs)
        return {"loss": loss, **self._also(inputs, outputs)}

    def _also(self, inputs: Mapping[str, Any], outputs: Any = None) -> dict[str, Any]:
        """Return the targets of `train_params`."""
        assert self._training is not None
        targets = self._training.train_params.targets
        if targets is None:
            return {}
        found = targets(inputs, self.model(inputs) if outputs is None else outputs)
        for name in found:
            if name in RESERVED:
                raise ConfigError(f"train_params.targets: {name!r} is taken; give that target another name")
            _require_number(name, found[name])
        return dict(found)

    # ------------------------------------------------------------------------------- evaluation

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        name, given = batch
        inputs = self.inputs(given)
        found: Mapping[str, Any] = self._validations[name].targets(inputs, self.model(inputs))
        return found

    def batch_size(self, batch: Any) -> float:
        return super().batch_size(batch[1] if isinstance(batch, tuple) else batch)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with nullcontext() if self._torch is None else self._torch.without_gradients():
            yield


def _require_number(name: str, value: Any) -> None:
    """Refuse an array: its mean would be another value than the target."""
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise ConfigError(
            f"train_params.targets: {name!r} is an array of shape {shape}, and a training step records "
            "numbers; return its mean, or another number of it. Arrays are kept of validations: return it "
            "from validation_params' targets, with an agg_func, or save_intermediate_freq of test_from_params"
        )


def _named(inputs: Mapping[str, Any], name: str) -> Any:
    if name not in inputs:
        raise ConfigError(f"loss_params.pred_targets: a batch has no {name!r}; {nearest(name, inputs)}")
    return inputs[name]
