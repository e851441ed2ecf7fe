"""`everstep.torch.Task`: a task that is a loss; with devices, precision, accumulation, clipping, averages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from everstep import contracts
from everstep.errors import ConfigError, MetricError
from everstep.keywords import checked_init, checked_keywords, number, whole


@checked_init
@dataclass(frozen=True)
class Clip:
    """How gradients are limited before an update; exactly one of the three, more than 0.

    Args:
        value: each element to the range -value to value.
        norm: each parameter's gradient to this 2-norm.
        global_norm: all gradients together to this 2-norm.

    Raises:
        ConfigError: none or several are given, or it is not positive.
    """

    value: float | None = None
    norm: float | None = None
    global_norm: float | None = None

    def __post_init__(self) -> None:
        given = {name: limit for name, limit in vars(self).items() if limit is not None}
        if len(given) != 1:
            raise ConfigError(f"Clip() takes exactly one of value, norm, global_norm; got {given}; give one")
        for name, limit in given.items():
            number(name, limit)

    def apply(self, parameters: list[Tensor]) -> Tensor:
        """Clip the gradients in place; returns their global 2-norm before that, on its device."""
        utils = torch.nn.utils
        if self.global_norm is not None:
            return utils.clip_grad_norm_(parameters, self.global_norm)
        total = utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.value is not None:
            utils.clip_grad_value_(parameters, self.value)
        else:
            assert self.norm is not None
            for parameter in parameters:
                utils.clip_grad_norm_([parameter], self.norm)
        return total


class Task(contracts.Task):
    """A task for one model and one optimizer of torch's: write `build_model`, `build_optimizer`, `forward`.

        class Digits(everstep.torch.Task):
            def build_model(self): return Net()
            def build_optimizer(self, model): return torch.optim.Adam(model.parameters())
            def forward(self, batch):
                x, y = batch
                return {"loss": cross_entropy(self.model(x), y)}

    With several optimizers, or a loop of its own inside the step, a task overrides `train_step` (and
    `state`, if it has more objects) and uses what it needs of the rest.

    Args:
        device: where the model and the batches go; None leaves them where they are.
        autocast: torch.bfloat16 or torch.float16 for mixed precision.  With float16 the loss is scaled;
            an update whose gradients overflow is left out, and `updates` stands still.
        accumulate: steps to an update, 1 or more.  The gradient is the mean over the elements of the
            window, however they are spread over its batches; the last window of an epoch may be short.
        clip: how gradients are limited; their norm before that is the metric "grad_norm".
        ema: decay of an average of the weights, in (0, 1), with which the task evaluates and predicts.
        trainable: a regular expression; parameters in whose name it is not found are frozen.
        compile: whether the model is compiled, in place.

    Raises:
        ConfigError: an argument is unknown or out of its range.
    """

    scheduler: Any = None

    @checked_keywords
    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
        clip: Clip | None = None,
        ema: float | None = None,
        trainable: str | None = None,
        compile: bool = False,
    ) -> None:
        self.device = None if device is None else torch.device(device)
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ConfigError(f"autocast={autocast}: give torch.bfloat16, torch.float16 or None")
        if ema is not None and not 0 < number("ema", ema) < 1:
            raise ConfigError(f"ema={ema}: give a decay between 0 and 1, such as 0.999")
        self._autocast, self._clip, self._decay = autocast, clip, ema
        self._accumulate = whole("accumulate", accumulate)
        self._trainable, self._compile = trainable, compile
        self._ema: AveragedModel | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._window = {"steps": 0, "elements": 0.0}
        """Of the accumulation window: the steps made in it, and their elements."""

    # -------------------------------------------------------------------------------- building

    def build(self) -> None:
        """Make the model, place it, freeze what is not trained; then the optimizer and what follows it."""
        if self.model is None:
            self.model = self.build_model()
        if not isinstance(self.model, torch.nn.Module):
            raise ConfigError(f"the model is {self.model!r}: return a torch.nn.Module from build_model")
        if self.device is not None:
            self.model.to(self.device)
        if self._trainable is not None:
            self._freeze(self._trainable)
        if self._compile:
            self.model.compile()
        super().build()
        self.scheduler = self.build_scheduler(self.optimizer)
        if self._autocast is torch.float16:
            self._scaler = torch.amp.GradScaler(self._device_type)
        if self._decay is not None:
            self._ema = _average(self.model, self._decay)

    def build_scheduler(self, optimizer: Any) -> Any:
        """A learning-rate scheduler, stepped after each update; None for none."""
        return None

    def _freeze(self, pattern: str) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"trainable={pattern!r} is found in no parameter's name; known: {', '.join(names)}"
            )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(re.search(pattern, name) is not None)

    def state(self) -> Mapping[str, Any]:
        """The model, the optimizer, and of scheduler, scaler, average and window what there is."""
        more = {"scheduler": self.scheduler, "scaler": self._scaler, "ema": self._ema}
        found = {name: part for name, part in more.items() if part is not None}
        window = {"window": self._window} if self._accumulate > 1 else {}
        return {**super().state(), **found, **window}

    # -------------------------------------------------------------------------------- the steps

    def forward(self, batch: Any) -> Mapping[str, Any]:
        """The metrics of one batch on its device, "loss" among them: a mean over the batch's elements."""
        raise ConfigError(f"{type(self).__name__} has no forward; give it one: def forward(self, batch): ...")

    def elements(self, batch: Any) -> float:
        """Over how many elements a batch's loss is the mean: its weight where gradients accumulate.

        Default: `batch_size`; of a loss per token, return the tokens that are not padding.
        """
        return self.batch_size(batch)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """One forward and backward pass, and an update where the accumulation window ends."""
        batch = self.to_device(batch)
        with self.precision():
            metrics = self.forward(batch)
        loss = _loss(self, metrics)
        if self._accumulate > 1:
            count = self.elements(batch)
            self._window["steps"] += 1
            self._window["elements"] += count
            loss = loss * count
        torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))
        if self._accumulate > 1 and self._window["steps"] < self._accumulate:
            return metrics
        norm = self._update()
        return metrics if norm is None else {**metrics, "grad_norm": norm}

    def train_loop_end(self) -> Mapping[str, Any] | None:
        """The epoch's last window may be short."""
        if self._window["steps"]:
            self._update()
        return None

    def _update(self) -> Tensor | None:
        """Use the gradients; returns their norm where they are clipped."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        scaler, optimizer = self._scaler, self.optimizer
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self._accumulate > 1:
            torch._foreach_div_([p.grad for p in parameters], self._window["elements"])
            self._window.update(steps=0, elements=0.0)
        norm = None if self._clip is None else self._clip.apply(parameters)
        skipped = False
        if scaler is None:
            optimizer.step()
        else:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < before
        optimizer.zero_grad()
        if not skipped:
            if self.scheduler is not None:
                self.scheduler.step()
            if self._ema is not None:
                self._ema.update_parameters(self.model)
        return norm

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """The metrics of `forward`."""
        with self.precision():
            return self.forward(self.to_device(batch))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients; `model` is the average, if there is one."""
        live = self.model
        with torch.no_grad():
            if self._ema is not None:
                self.model = self._ema.module
            try:
                yield
            finally:
                self.model = live

    # ------------------------------------------------------------------------------ for one's own

    def precision(self) -> AbstractContextManager[Any]:
        """The block in which a forward pass belongs: autocast, if asked for."""
        return torch.autocast(self._device_type, self._autocast, enabled=self._autocast is not None)

    def to_device(self, batch: Any) -> Any:
        """A batch with its tensors on the device; tuples, lists and mappings are looked into."""
        if self.device is None:
            return batch
        if isinstance(batch, Tensor):
            return batch.to(self.device, non_blocking=True)
        if isinstance(batch, Mapping):
            return {name: self.to_device(part) for name, part in batch.items()}
        if isinstance(batch, tuple | list):
            parts = [self.to_device(part) for part in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return batch

    @property
    def _device_type(self) -> str:
        first: Tensor = next(self.model.parameters())
        return first.device.type


def _average(model: torch.nn.Module, decay: float) -> AveragedModel:
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=average)


def _loss(task: Task, metrics: Any) -> Tensor:
    loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
    if not isinstance(loss, Tensor):
        raise MetricError(
            f"{type(task).__name__}.forward returned {metrics!r}; return a mapping with the loss, a tensor, "
            'as in {"loss": loss}'
        )
    return loss
