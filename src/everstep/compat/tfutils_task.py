"""Data and task that a tree of parameters describes."""

from __future__ import annotations

import importlib
import sys
from collections import UserDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

from everstep.compat.tfutils_params import Function, Tree
from everstep.contracts.data import Stream
from everstep.contracts.tasks import Task
from everstep.data import arrays, as_stream
from everstep.data.adapt import SequenceStream
from everstep.errors import ConfigError, nearest

_RESERVED = ("loss", "learning_rate", "optimizer", "__grads__")
"""Names that a target may not have."""


class ValidationBatch(NamedTuple):
    """Batch of a validation, with the validation's name."""

    name: str
    batch: Any


class Data:
    """The data that `data_params` describe; a dictionary of arrays is divided into batches.

    In training they are shuffled with a seed of their own: models with different seeds can share the data.
    """

    def __init__(self, params: Function, place: str, *, shuffle: bool) -> None:
        self.data: Any = params()
        self.names: tuple[str, ...] | None = None
        """Names of a batch's parts, for a dictionary of arrays."""
        self.example: Mapping[str, Any] = Example(self.data)
        if not isinstance(self.data, Mapping):
            return
        size = getattr(params, "batch_size", None)
        if size is None:
            raise ConfigError(f"{place}.batch_size is missing; give the number of samples in a batch")
        if not self.data:
            raise ConfigError(f"{place}.func returned an empty dictionary; return arrays by name")
        self.names = tuple(self.data)
        self.example = {name: array[:size] for name, array in self.data.items()}
        self.data = arrays(*self.data.values(), batch_size=size, shuffle=shuffle, seed=0)


class Example(UserDict[str, Any]):
    """Batch that shows the shapes of the data, read when a model first looks at it."""

    def __init__(self, source: Any) -> None:
        self._source = source

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        stream = as_stream(self._source)
        if not isinstance(self._source, Stream) and not isinstance(stream, SequenceStream):
            raise ConfigError(
                "model_params.func looks at its inputs, and to read one of a "
                f"{type(self._source).__name__} would take it from the training; give sizes as arguments"
            )
        with closing(stream.open("example", 0, seed=0)) as batches:
            return dict(next(batches))


class ParamsTask(Task):
    """Task of `train_from_params` and `test_from_params`; a `train_loop` gets it as its argument."""

    def __init__(self, tree: Tree, data: Mapping[str, Data], global_step: int = 0) -> None:
        self._tree, self._data, self._train = tree, data, tree.train_params
        self._counted = {"global_step": global_step}
        self._rate: float | None = None
        """Learning rate of the current step; None if the tree has none."""
        self._torch: Any = None

    def build_model(self) -> Any:
        example = next(iter(self._data.values())).example
        model = self._tree.model_params(inputs=example, train=self._train is not None)
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(model, torch.nn.Module):
            self._torch = importlib.import_module("everstep.backends.torch.tfutils")
        steps_itself = self._torch is None and self._train is not None and self._train.train_loop is None
        if not callable(model) or (steps_itself and not hasattr(model, "train_step")):
            raise ConfigError(
                f"model_params.func returned {model!r:.80}; return a torch.nn.Module, or a callable object "
                "with train_step(inputs, learning_rate), state_dict and load_state_dict"
            )
        return model

    def build_optimizer(self, model: Any) -> Any:
        if self._train is None:
            return None
        for name in ("loss_params", "optimizer_params"):
            is_given = getattr(self._tree, name) is not None
            if self._torch is None and is_given:
                raise ConfigError(f"{name}: a {type(model).__name__} trains itself; leave it out")
            if self._torch is not None and not is_given and self._train.train_loop is None:
                raise ConfigError(f"{name} is missing; give it: a torch model needs it")
        if (params := self._tree.optimizer_params) is None:
            return None
        # The rate of step 0, wherever the training begins: given options are compared at each resume.
        rate = {} if (lr := self._rate_of(0)) is None else {"lr": lr}
        how = {"inner": params.optimizer_class, "clip": params.clip, "names": params.trainable_names}
        return self._torch.optimizer(model, params.optimizer, {**(params.model_extra or {}), **rate}, **how)

    def state(self) -> Mapping[str, Any]:
        """Return the model, the optimizer if there is one, and the step that decides the learning rate."""
        return {**super().state(), **({} if self._train is None else {"global_step": self._counted})}

    def _inputs(self, name: str, batch: Any) -> dict[str, Any]:
        if (names := self._data[name].names) is not None:
            batch = dict(zip(names, batch, strict=True))
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a batch is a {type(batch).__name__}; let data_params.func return data of dictionaries"
            )
        return dict(batch) if self._torch is None else self._torch.inputs(batch, self.model)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        assert self._train is not None
        inputs, self._rate = self._inputs("train", batch), self._rate_of(self._counted["global_step"])
        for group in () if self._rate is None or self.optimizer is None else self.optimizer.param_groups:
            group["lr"] = self._rate
        loop = self._train.train_loop
        metrics: Mapping[str, Any] = self.step(inputs) if loop is None else loop(self, inputs)
        self._counted["global_step"] += 1
        return metrics if self._rate is None else {**metrics, "learning_rate": self._rate}

    def _rate_of(self, step: int) -> float | None:
        rate = self._tree.learning_rate_params
        return None if rate is None else float(rate(global_step=step))

    def step(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make an update, as without a `train_loop`; a `train_loop` may call this method."""
        assert self._train is not None
        if self._torch is None:
            return {**self.model.train_step(inputs, learning_rate=self._rate), **self._targets(inputs)}
        size = self._train.minibatch_size
        metrics: Mapping[str, Any] = self._torch.train(self.optimizer, self.loss, inputs, size)
        return metrics

    def loss(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss of a batch or minibatch, and the targets of `train_params`."""
        if (params := self._tree.loss_params) is None:
            raise ConfigError("loss_params is missing; give it, or leave task.loss() out of your train_loop")
        names = [params.pred_targets] if isinstance(params.pred_targets, str) else params.pred_targets
        for name in names:
            if name not in inputs:
                raise ConfigError(f"pred_targets: a batch has no {name!r}; {nearest(name, inputs)}")
        outputs = self.model(inputs)
        loss = params.loss_func(outputs, *(inputs[name] for name in names), **params.loss_func_kwargs)
        mean = self._torch.mean if params.agg_func is None else params.agg_func
        return {"loss": mean(loss, **params.agg_func_kwargs), **self._targets(inputs, outputs)}

    def _targets(self, inputs: Mapping[str, Any], outputs: Any = None) -> dict[str, Any]:
        assert self._train is not None
        if self._train.targets is None:
            return {}
        metrics = self._train.targets(inputs, self.model(inputs) if outputs is None else outputs)
        for name in _RESERVED:
            if name in metrics:
                raise ConfigError(f"train_params.targets: {name!r} is taken; give that target another name")
        return dict(metrics)

    def eval_step(self, batch: ValidationBatch) -> Mapping[str, Any]:
        inputs = self._inputs(*batch)
        metrics: Mapping[str, Any] = self._tree.validation_params[batch.name].targets(
            inputs, self.model(inputs)
        )
        return metrics

    def batch_size(self, batch: Any) -> float:
        return super().batch_size(batch.batch if isinstance(batch, ValidationBatch) else batch)

    def evaluating(self) -> AbstractContextManager[object]:
        return nullcontext() if self._torch is None else sys.modules["torch"].no_grad()
