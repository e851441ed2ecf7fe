"""Data and task that a tree of parameters describes."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any

from everstep.compat.tfutils.params import OPTIMIZER, Params, arguments_of, call
from everstep.contracts.data import Cursor, Stream
from everstep.contracts.tasks import Task
from everstep.data import arrays, as_stream
from everstep.data.adapt import describe, is_stream
from everstep.data.adapters import SequenceStream
from everstep.data.wrappers import CursorWrapper, StreamWrapper
from everstep.errors import ConfigError, nearest

_RESERVED = ("loss", "learning_rate", "optimizer", "__grads__")
"""Names that a target may not have."""


def data_of(params: Params, place: str, *, shuffle: bool) -> Any:
    """Make the data that `data_params` describe.

    A dictionary of arrays is divided into batches.  In training they are shuffled with a seed of their own,
    so that models with different seeds can share the data.
    """
    data = call(params)
    if not isinstance(data, Mapping):
        return data
    if "batch_size" not in params:
        raise ConfigError(f"{place}.batch_size is missing; give the number of samples in a batch")
    if not data:
        raise ConfigError(f"{place}.func returned an empty dictionary; return arrays by name")
    stream = arrays(*data.values(), batch_size=params["batch_size"], shuffle=shuffle, seed=0)
    return Named(tuple(data), stream)


class Named(StreamWrapper):
    """Stream of batches as dictionaries of arrays."""

    # what the run is handed is not what the stream inside draws
    source, replayed, draws_again = Stream.source, None, False

    def __init__(self, names: tuple[str, ...], stream: Stream) -> None:
        super().__init__(stream)
        self._names = names

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _NamedCursor(self._names, self.stream.open(purpose, pass_index, position, seed=seed))

    def describe(self, seed: int) -> dict[str, Any]:
        return {**describe(self.stream, seed), "names": list(self._names)}


class _NamedCursor(CursorWrapper):
    def __init__(self, names: tuple[str, ...], cursor: Cursor) -> None:
        super().__init__(cursor)
        self._names = names

    def __next__(self) -> dict[str, Any]:
        return dict(zip(self._names, next(self.cursor), strict=True))


class Example(Mapping[str, Any]):
    """Batch that shows the shapes of the data, read when a model first looks at it."""

    def __init__(self, data: Any, seed: int) -> None:
        self._data, self._seed = data, seed
        self._read: Mapping[str, Any] | None = None

    @property
    def _batch(self) -> Mapping[str, Any]:
        if self._read is None:
            stream = as_stream(self._data)
            if not is_stream(self._data) and not isinstance(stream, SequenceStream):
                raise ConfigError(
                    "model_params.func looks at its inputs, and to read one of a "
                    f"{type(self._data).__name__} would take it from the training; give sizes as arguments"
                )
            with closing(stream.open("example", 0, seed=self._seed)) as batches:
                self._read = next(batches)
        return self._read

    def __getitem__(self, name: str) -> Any:
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


class ParamsTask(Task):
    """Task of `train_from_params` and `test_from_params`; a `train_loop` gets it as its argument.

    Args:
        tree: the checked parameters; a test's have no `train_params`.
        example: the `inputs` of the function that makes the model.
        global_step: the step from which the learning rate counts.

    Attributes:
        model, optimizer: objects that the functions of the tree made.
    """

    def __init__(self, tree: Params, example: Mapping[str, Any], global_step: int = 0) -> None:
        self._tree, self._example = tree, example
        self._train: Params = tree.get("train_params") or {}
        self._counted = {"global_step": global_step}
        self._rate: float | None = None
        """Learning rate of the current step; None if the tree has none."""
        self._torch: Any = None

    def build_model(self) -> Any:
        model = call(self._tree["model_params"], inputs=self._example, train=bool(self._train))
        if "torch" in sys.modules:
            kit: Any = importlib.import_module("everstep.backends.torch.tfutils")
            self._torch = kit if kit.is_model(model) else None
        steps_itself = self._torch is None and self._train and self._train["train_loop"] is None
        if not callable(model) or (steps_itself and not hasattr(model, "train_step")):
            raise ConfigError(
                f"model_params.func returned {model!r:.80}; return a torch.nn.Module, or an object that "
                "can be called with a batch and has train_step(inputs, learning_rate), state_dict and "
                "load_state_dict"
            )
        return model

    def build_optimizer(self, model: Any) -> Any:
        if not self._train:
            return None
        for name in ("loss_params", "optimizer_params"):
            if self._torch is None and self._tree[name] is not None:
                raise ConfigError(f"{name}: a {type(model).__name__} trains itself; leave it out")
            if self._torch is not None and self._tree[name] is None and self._train["train_loop"] is None:
                raise ConfigError(f"{name} is missing; give it: a torch model needs it")
        params = self._tree["optimizer_params"]
        if params is None:
            return None
        # The rate of step 0, wherever the training begins: given options are compared at each resume.
        rate = {} if (lr := self._rate_of(0)) is None else {"lr": lr}
        how = {"inner": params["optimizer_class"], "clip": params["clip"], "names": params["trainable_names"]}
        arguments = arguments_of(params, OPTIMIZER) | rate
        return self._torch.optimizer(model, params["optimizer"], arguments, **how)

    def state(self) -> Mapping[str, Any]:
        """Return the model, the optimizer if there is one, and the step that decides the learning rate."""
        return {**super().state(), **({"global_step": self._counted} if self._train else {})}

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Convert a batch to the inputs of the model."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a batch of the data is a {type(batch).__name__}; let data_params.func return data whose "
                "batches are dictionaries, or a dictionary of arrays"
            )
        return dict(batch) if self._torch is None else self._torch.inputs(batch, self.model)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        inputs, self._rate = self.inputs(batch), self._rate_of(self._counted["global_step"])
        if self._rate is not None and self.optimizer is not None:
            self._torch.set_lr(self.optimizer, self._rate)
        loop = self._train["train_loop"]
        metrics: Mapping[str, Any] = self.step(inputs) if loop is None else call(loop, self, inputs)
        self._counted["global_step"] += 1
        return metrics if self._rate is None else {**metrics, "learning_rate": self._rate}

    def _rate_of(self, step: int) -> float | None:
        rate = self._tree["learning_rate_params"]
        return None if rate is None else float(call(rate, global_step=step))

    def step(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make an update, as without a `train_loop`; a `train_loop` may call this method."""
        if self._torch is None:
            return {**self.model.train_step(inputs, learning_rate=self._rate), **self._targets(inputs)}
        size = self._train["minibatch_size"]
        metrics: Mapping[str, Any] = self._torch.train(self.optimizer, self.loss, inputs, size)
        return metrics

    def loss(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss of a batch or minibatch, and the targets of `train_params`."""
        params = self._tree.get("loss_params")
        if params is None:
            raise ConfigError("loss_params is missing; give it, or leave task.loss() out of your train_loop")
        names = params["pred_targets"]
        names = [names] if isinstance(names, str) else names
        for name in names:
            if name not in inputs:
                raise ConfigError(
                    f"loss_params.pred_targets: a batch has no {name!r}; {nearest(name, inputs)}"
                )
        outputs = self.model(inputs)
        labels = (inputs[name] for name in names)
        loss = params["loss_func"](outputs, *labels, **params["loss_func_kwargs"])
        if params["agg_func"] is None:
            loss = self._torch.mean(loss)
        else:
            loss = params["agg_func"](loss, **params["agg_func_kwargs"])
        return {"loss": loss, **self._targets(inputs, outputs)}

    def _targets(self, inputs: Mapping[str, Any], outputs: Any = None) -> dict[str, Any]:
        """Return the targets of `train_params`."""
        targets = self._train["targets"]
        if targets is None:
            return {}
        metrics = call(targets, inputs, self.model(inputs) if outputs is None else outputs)
        for name, value in metrics.items():
            if name in _RESERVED:
                raise ConfigError(f"train_params.targets: {name!r} is taken; give that target another name")
            shape = tuple(getattr(value, "shape", ()))
            if math.prod(shape) != 1:  # its mean would be another value than the target
                raise ConfigError(
                    f"train_params.targets: {name!r} is an array of shape {shape}, and a training step "
                    "records numbers; return its mean, or another number of it. Arrays are kept of "
                    "validations: return it from validation_params' targets, with an agg_func, or "
                    "save_intermediate_freq of test_from_params"
                )
        return dict(metrics)

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        name, batch = batch
        inputs = self.inputs(batch)
        validation = self._tree["validation_params"][name]
        metrics: Mapping[str, Any] = call(validation["targets"], inputs, self.model(inputs))
        return metrics

    def batch_size(self, batch: Any) -> float:
        return super().batch_size(batch[1] if isinstance(batch, tuple) else batch)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with nullcontext() if self._torch is None else self._torch.without_gradients():
            yield
