"""The task that a tree of parameters describes."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from everstep.contracts.tasks import Task
from everstep.errors import ConfigError, nearest
from everstep.tfutils.schema import Params, arguments

RESERVED = ("loss", "learning_rate", "optimizer", "__grads__")
"""What no target may be called."""


class ParamsTask(Task):
    """The task of `train_from_params` and `test_from_params`; a `train_loop` gets it.

    Args:
        params: the resolved tree.
        validations: the resolved `validation_params`.
        example: what the model's function gets as `inputs`.
        train: what it gets as `train`.
        global_step: from which the learning rate counts.

    Attributes:
        model, optimizer: what the functions of the tree made.
    """

    def __init__(
        self,
        params: Params,
        validations: Mapping[str, Params],
        example: Mapping[str, Any],
        *,
        train: bool = True,
        global_step: int = 0,
    ) -> None:
        self._params, self._validations, self._example, self._train = params, validations, example, train
        self._counted = {"global_step": global_step}
        self._torch: Any = None

    # -------------------------------------------------------------------------------- building

    def build_model(self) -> Any:
        call = self._params["model_params"]
        given = {"inputs": self._example, "train": self._train, "seed": call["seed"]}
        model = call["func"](**arguments(call, "seed"), **given)
        if "torch" in sys.modules:
            kit: Any = importlib.import_module("everstep.backends.torch.tfutils")
            self._torch = kit if kit.is_model(model) else None
        own_step = self._torch is not None or not self._train or self._has("train_params", "train_loop")
        if not callable(model) or not (own_step or hasattr(model, "train_step")):
            raise ConfigError(
                f"model_params.func returned {model!r:.80}; return a torch.nn.Module, or an object that "
                "can be called with a batch and has train_step(inputs, learning_rate), state_dict and "
                "load_state_dict"
            )
        return model

    def build_optimizer(self, model: Any) -> Any:
        if not self._train:
            return None
        needed = ("loss_params", "optimizer_params")
        if self._torch is None:
            for name in needed:
                if self._params[name] is not None:
                    raise ConfigError(f"{name}: a {type(model).__name__} trains itself; leave it out")
            return None
        for name in needed:
            if self._params[name] is None and not self._has("train_params", "train_loop"):
                raise ConfigError(f"{name} is missing; give it, a torch model needs it")
        given = self._params["optimizer_params"]
        # Its first rate, whatever step it begins at: what the program gives is compared at each resume.
        return None if given is None else self._torch.optimizer(model, given, self._learning_rate(0))

    def _has(self, section: str, key: str) -> bool:
        return self._params[section] is not None and self._params[section].get(key) is not None

    def state(self) -> Mapping[str, Any]:
        """The model, the optimizer if there is one, and the step that the learning rate is of."""
        return super().state() if not self._train else {**super().state(), "global_step": self._counted}

    # -------------------------------------------------------------------------------- the steps

    def inputs(self, batch: Any) -> dict[str, Any]:
        """A batch as the model gets it.

        Raises:
            ConfigError: it is no dictionary.
        """
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a batch of the data is a {type(batch).__name__}; let data_params.func return data whose "
                "batches are dictionaries, or a dictionary of arrays"
            )
        return dict(batch) if self._torch is None else self._torch.inputs(batch, self.model)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        inputs, lr = self.inputs(batch), self._learning_rate(self._counted["global_step"])
        if lr is not None and self.optimizer is not None:
            self._torch.set_lr(self.optimizer, lr)
        loop = self._params["train_params"]["train_loop"]
        found = self.step(inputs) if loop is None else loop["func"](self, inputs, **arguments(loop))
        self._counted["global_step"] += 1
        return found if lr is None else {**found, "learning_rate": lr}

    def step(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """One update: what happens where `train_params` have no `train_loop`, for one to call."""
        if self._torch is None:
            lr = self._learning_rate(self._counted["global_step"])
            return {**self.model.train_step(inputs, learning_rate=lr), **self._also(inputs)}
        size = self._params["train_params"]["minibatch_size"]
        found: Mapping[str, Any] = self._torch.train(self.optimizer, self.loss, inputs, size)
        return found

    def loss(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The loss of a batch or minibatch, and the targets of `train_params`."""
        given = self._params["loss_params"]
        names = given["pred_targets"]
        labels = [_named(inputs, name) for name in ([names] if isinstance(names, str) else names)]
        outputs = self.model(inputs)
        loss = given["loss_func"](outputs, *labels, **given["loss_func_kwargs"])
        aggregate = given["agg_func"]
        loss = self._torch.mean(loss) if aggregate is None else aggregate(loss, **given["agg_func_kwargs"])
        return {"loss": loss, **self._also(inputs, outputs)}

    def _also(self, inputs: Mapping[str, Any], outputs: Any = None) -> dict[str, Any]:
        """The targets of `train_params`."""
        targets = self._params["train_params"]["targets"]
        if targets is None:
            return {}
        found = targets["func"](
            inputs, self.model(inputs) if outputs is None else outputs, **arguments(targets)
        )
        for name in found:
            if name in RESERVED:
                raise ConfigError(f"train_params.targets: {name!r} is taken; give that target another name")
            _require_number(name, found[name])
        return dict(found)

    def _learning_rate(self, step: int) -> float | None:
        call = self._params["learning_rate_params"]
        return None if call is None else float(call["func"](global_step=step, **arguments(call)))

    # ------------------------------------------------------------------------------- evaluation

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        name, given = batch
        inputs = self.inputs(given)
        targets = self._validations[name]["targets"]
        found: Mapping[str, Any] = targets["func"](inputs, self.model(inputs), **arguments(targets))
        return found

    def batch_size(self, batch: Any) -> float:
        return super().batch_size(batch[1] if isinstance(batch, tuple) else batch)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with nullcontext() if self._torch is None else self._torch.without_gradients():
            yield


def _require_number(name: str, value: Any) -> None:
    """Refuse an array, whose mean would be something else than what the target says."""
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
