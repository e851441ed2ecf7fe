"""`everstep.torch.Task`: task of a loss; with devices, precision, accumulation, clipping, averages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map

from everstep.arguments import checked_keywords, integer, number, positive
from everstep.backends.torch.model_wrappers import bare, flatten, layers
from everstep.backends.torch.optimizers import (
    Around,
    Clip,
    ClipOptimizer,
    MinibatchOptimizer,
    ScaledOptimizer,
)
from everstep.backends.torch.parallel import Ranks, open_group
from everstep.backends.torch.parallel import parallel as parallel_model
from everstep.backends.torch.sharded import is_sharded
from everstep.backends.torch.virtual_shards import VirtualShards
from everstep.contracts import tasks
from everstep.errors import ConfigError, MetricError, StateError

_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Average(AveragedModel):
    """Exponential average of a model's weights; torch's own would wait for the device."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Add the weights to the average; the first update copies them, and buffers and integers always."""
        copied = list(zip(self.module.buffers(), model.buffers(), strict=True))
        averaged = list[tuple[Any, Any]]()
        for pair in zip(self.module.parameters(), model.parameters(), strict=True):
            (averaged if pair[0].is_floating_point() or pair[0].is_complex() else copied).append(pair)
        if self.n_averaged and averaged:  # a tensor on the CPU, so that reading it waits for no device
            averages, weights = map(list, zip(*averaged, strict=True))
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
        else:
            copied += averaged
        for our, their in copied:
            our.copy_(their)
        self.n_averaged += 1


class Task(tasks.Task):
    """Task of one torch model and one optimizer: write `build_model`, `build_optimizer` and `forward`.

        class Digits(everstep.torch.Task):
            def build_model(self): return Net()
            def build_optimizer(self, model): return torch.optim.Adam(model.parameters())
            def forward(self, batch):
                x, y = batch
                return {"loss": cross_entropy(self.model(x), y)}

    A task with a step of its own overrides `train_step`, and may call `to_device`, `precision`, `backward`
    and `update`.  A task with several optimizers returns them from `state`, or as a dictionary from
    `build_optimizer`, and steps them itself (examples/gan.py); it wraps them in `ClipOptimizer` and
    `MinibatchOptimizer` itself, as accumulation, clipping, float16, average and schedule are for one.

    Args:
        device: device of the model and the batches; None leaves them where they are.
        autocast: torch.bfloat16 or torch.float16, or the name, for mixed precision.  With float16 the loss is
            scaled, and an update whose gradients overflow is left out, with the metric "overflowed" 1, not 0.
        accumulate: steps for each update, 1 or more.  The gradient is the mean over all elements of the
            window, even if its batches differ in size; "window_loss" is the mean of their losses.  The last
            window of an epoch may be short.
        clip: limit of the gradients, see `ClipOptimizer`; their norm before clipping is the metric
            "grad_norm".
        ema: decay of an average of the weights, in (0, 1), with which the task evaluates and predicts.
        trainable: a regular expression; parameters whose names do not contain a match are frozen.
        compile: whether the model is compiled; or the arguments of `torch.compile` for the model.  Shapes are
            static (`dynamic=False`) unless you say otherwise: a kernel for each shape, in every process.
        parallel: whether several processes (torchrun) train the model together; or the options of
            `everstep.torch.parallel`.  The loss is weighted so that the gradient is that of one process with
            the whole batch.  On one process it changes nothing.
        scheduler_interval: whether the scheduler of `build_scheduler` is stepped after each "update" or after
            each "epoch"; may also be set in the class.  Only `OneCycleLR` and `CyclicLR`, which count
            updates, need no word.
        shards: number of `VirtualShards`, instead of `parallel`: the training has equal bits on 1, 2, 4 ...
            processes.  The loss is a mean over samples, and `forward` runs for each shard.
    """

    scheduler: Any = None
    scheduler_interval: Literal["update", "epoch"] | None = None

    @checked_keywords
    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        autocast: torch.dtype | Literal["bfloat16", "float16"] | None = None,
        accumulate: int = 1,
        clip: Clip | None = None,
        ema: float | None = None,
        trainable: str | None = None,
        compile: bool | Mapping[str, Any] = False,
        parallel: bool | Mapping[str, Any] = False,
        scheduler_interval: Literal["update", "epoch"] | None = None,
        shards: int | None = None,
    ) -> None:
        self.scheduler_interval = scheduler_interval or self.scheduler_interval
        if self.scheduler_interval not in ("update", "epoch", None):
            raise ConfigError(f'scheduler_interval={self.scheduler_interval!r}: give "update" or "epoch"')
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            remedy = 'give "cpu", "cuda", "cuda:1" ...'
            raise ConfigError(f"device={device!r} is not a device of torch; {remedy}") from error
        try:
            re.compile(trainable or "")
        except (re.error, TypeError) as error:
            raise ConfigError(
                f'trainable={trainable!r} is not a regular expression ({error}); give one like r"^head\\."'
            ) from error
        dtype = _PRECISIONS.get(str(autocast).removeprefix("torch."))
        if dtype is None and autocast is not None:
            raise ConfigError(f"autocast={autocast!r}: give torch.bfloat16 or torch.float16, or the name")
        if ema is not None and not 0 < number("ema", ema) < 1:
            raise ConfigError(f"ema={ema}: give a decay between 0 and 1, such as 0.999")
        for name, options in {"compile": compile, "parallel": parallel}.items():
            if not isinstance(options, bool | Mapping):
                raise ConfigError(f"{name}={options!r}: give True, or options in a mapping")
        self._autocast, self._clip, self._decay = dtype, clip, ema
        self._accumulate = integer("accumulate", accumulate)
        self._trainable, self._compile, self._parallel = trainable, compile, parallel
        self._count = None if shards is None else integer("shards", shards)
        self._shards: VirtualShards | None = None
        own_step = type(self).train_step is not Task.train_step
        if shards is not None:
            self._refuse(
                f"shards={shards} divides the batch and averages over ranks, and its loss is the mean over a "
                "shard's samples, so it",
                parallel=parallel is not False,
                accumulate=self._accumulate > 1,
                train_step=own_step,
                elements=type(self).elements is not Task.elements,
            )
        if parallel is not False and not own_step:
            self.applies_weight = True
        self._ranks: Ranks | None = None
        self._no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which a backward pass does not average gradients over ranks."""
        self._ema: Average | None = None
        self._evaluated: Any = None
        """Model that replaces `model` in an evaluation; None for `model` itself."""
        self._scaler: torch.amp.GradScaler | None = None

    def _refuse(self, what: str, **used: bool) -> None:
        if names := [name for name, is_used in used.items() if is_used]:
            kind, names_in_words = type(self).__name__, " and ".join(names)
            raise ConfigError(f"{kind}: {what} cannot be used with {names_in_words}: leave out one of them")

    def build(
        self,
        *,
        model: Callable[[], Any] | None = None,
        optimizer: Callable[[Any], Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
    ) -> None:
        """Make the model, move and freeze its parameters; then make the optimizer and what depends on it.

        Args:
            model, optimizer, scheduler: used instead of `build_model`, `build_optimizer`, `build_scheduler`.
        """
        if not hasattr(self, "_accumulate"):
            name = type(self).__name__
            raise ConfigError(f"{name}.__init__ does not call super().__init__(); do so in its first line")
        if self.model is None:
            self.model = (model or self.build_model)()
        if not isinstance(self.model, torch.nn.Module):
            raise ConfigError(f"the model is {self.model!r}: return a torch.nn.Module from build_model")
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:
                reason = str(error).partition("\n")[0]
                raise ConfigError(
                    f"device={str(self.device)!r} cannot be used here ({reason}); torch finds "
                    f'{torch.accelerator.device_count()} accelerators: give one of them, or "cpu"'
                ) from error
            if self._parallel is not False or self._count is not None:
                open_group(on_cuda=self.device.type == "cuda")  # which chooses this process's device
            self.model.to(self.device)
        if self._trainable is not None:  # before the optimizer is made, which may look at `requires_grad`
            named = list(self.model.named_parameters())
            if not any(re.search(self._trainable, name) for name, _ in named):
                known = ", ".join(name for name, _ in named)
                raise ConfigError(
                    f"trainable={self._trainable!r} is found in no parameter's name; known: {known}"
                )
            for name, parameter in named:
                parameter.requires_grad_(re.search(self._trainable, name) is not None)
        # Before the optimizer and the average are made: all ranks get the weights of rank 0 here.
        wrapped = self._wrapped(self.model)
        super().build(optimizer=optimizer)
        if isinstance(self.optimizer, tuple | list):
            raise ConfigError(
                f"{type(self).__name__}.build_optimizer returned a {type(self.optimizer).__name__}: return "
                'the optimizer, a scheduler from build_scheduler; several as in {"generator": a, "critic": b}'
            )
        if isinstance(self.optimizer, Optimizer):
            self._equip(self.optimizer, scheduler or self.build_scheduler)
        else:
            self._refuse(
                f"a {type(self.optimizer).__name__} from build_optimizer, not one optimizer (put "
                "ClipOptimizer and MinibatchOptimizer around each),",
                clip=self._clip is not None,
                ema=self._decay is not None,
                autocast=self._autocast is torch.float16,
                accumulate=self._accumulate > 1,
            )
        # Last: optimizer and average are made from the plain model, whose names have no prefix.
        self.model = wrapped
        if self._compile is not False:
            # torch's default goes over to kernels for any shape at the second one, and a new process does not
            how = {"dynamic": False, **(self._compile if isinstance(self._compile, Mapping) else {})}
            self.model = torch.compile(self.model, **how)
            if self._ema is not None:
                self._evaluated = torch.compile(self._ema.module, **how)

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model that several processes train together, or else the model itself."""
        if any(map(is_sharded, model.parameters())):  # `build_model` has divided it, and it averages itself
            self._refuse(
                "a model that is sharded (fully_shard), as build_model returns it,",
                ema=self._decay is not None,
                shards=self._count is not None,
                parallel_options=isinstance(self._parallel, Mapping),
            )
            self._ranks = Ranks(next(model.parameters()).device)
            return model
        if self._count is not None:
            self._shards = VirtualShards(model, self._count)
        if self._parallel is False:
            return model
        wrapped = parallel_model(model, **(self._parallel if isinstance(self._parallel, Mapping) else {}))
        if isinstance(wrapped, DistributedDataParallel):
            self._ranks = Ranks(wrapped.device, wrapped.process_group)
            # torch notes in each averaging pass which parameters were used; passes without it confuse that
            if not wrapped.find_unused_parameters and not wrapped.static_graph:
                self._no_sync = wrapped.no_sync
            if self.device is not None:
                self.device = wrapped.device
        return wrapped

    def _equip(self, optimizer: Optimizer, scheduler: Callable[[Any], Any]) -> None:
        # Clipping is innermost: it needs the gradients of a whole window, unscaled.
        if self._clip is not None:
            optimizer = ClipOptimizer(optimizer, self._clip)
        if self._autocast is torch.float16:
            self._scaler = torch.amp.GradScaler(self._device_type)
            optimizer = ScaledOptimizer(optimizer, self._scaler)
        if self._accumulate > 1:
            optimizer = MinibatchOptimizer(optimizer, self._accumulate)
        self.optimizer = optimizer
        self.scheduler = scheduler(optimizer)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "build_scheduler returned a ReduceLROnPlateau, which follows a metric; "
                'give the Trainer services.Plateau("valid/loss", then=SetValue("optimizer.lr", times=0.1))'
            )
        if isinstance(self.scheduler, OneCycleLR | CyclicLR):
            self.scheduler_interval = self.scheduler_interval or "update"
        if self.scheduler is not None and self.scheduler_interval is None:
            raise ConfigError(
                f"the {type(self.scheduler).__name__} of build_scheduler can be stepped after each update or "
                f'each epoch: give class {type(self).__name__} the line scheduler_interval = "epoch"'
            )
        if self._decay is not None:
            self._ema = Average(self.model, self._decay)
            self._evaluated = self._ema.module
        # The hook is the innermost optimizer's: an update that is left out moves no schedule and no average.
        optimizer.register_step_post_hook(self._updated)

    def _updated(self, *_: Any) -> None:
        if self.scheduler is not None and self.scheduler_interval == "update":
            self.scheduler.step()
        if self._ema is not None:
            self._ema.update_parameters(self.model)

    def build_scheduler(self, optimizer: Any) -> Any:
        """Make a learning-rate scheduler, which is stepped as `scheduler_interval` says; None for none.

        The rate of each step, in the optimizer's first group, is the metric "lr".  To follow a metric, use
        the service `Plateau` instead: it changes the rate when the metric is known.
        """
        return None

    def state(self) -> Mapping[str, Any]:
        """Return the model and the optimizer; also scheduler, scaler, average and shards where there are."""
        parts = {
            "model": self.model if self.model is None else bare(self.model),
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self._scaler,
            "ema": self._ema,
            "shards": self._shards,
        }
        return {name: part for name, part in parts.items() if part is not None}

    # -------------------------------------------------------------------------------- the steps

    def forward(self, batch: Any) -> Mapping[str, Any]:
        """Return the metrics of a batch on its device, with "loss": a mean over the batch's elements."""
        raise ConfigError(f"{type(self).__name__} has no forward; give it one: def forward(self, batch): ...")

    def elements(self, batch: Any) -> float | Tensor:
        """Number of elements over which a batch's loss is the mean: its weight when gradients accumulate.

        The batch is given as the stream made it.  Default: `batch_size`; for a loss per token, return the
        number of tokens that are not padding.  The number must be above 0; a tensor on a device is not
        checked.
        """
        return self.batch_size(batch)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Run a forward and a backward pass, and update if the accumulation window ends."""
        if self._shards is not None:
            scale = None if self._scaler is None else self._scaler.scale
            metrics = self._shards.backward(self.to_device(batch), self._forward, scale)
            return {**self.update(), **metrics}
        own_count = self._ranks is not None and type(self).elements is not Task.elements
        count = self._counted(batch) if self._accumulate > 1 or own_count else None
        batch = self.to_device(batch)
        with self.accumulating():
            metrics = self._forward(batch)
            self.backward(metrics["loss"], count)
        return {**self.update(), **metrics}

    def _forward(self, batch: Any) -> Mapping[str, Any]:
        with self.precision():
            metrics = self.forward(batch)
        name = type(self).__name__
        loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
        if not isinstance(loss, Tensor):
            raise MetricError(
                f'{name}.forward returned {metrics!r}; return {{"loss": loss, ...}} with the loss as a tensor'
            )
        if loss.numel() != 1:
            raise MetricError(
                f"the loss of {name}.forward has the shape {tuple(loss.shape)}: return its mean, loss.mean()"
            )
        if not loss.requires_grad:
            raise MetricError(
                f"the loss of {name}.forward depends on no parameter that is trained: compute it from "
                "self.model(...), without detach() or item(), and leave something to be trained"
            )
        return metrics

    def _counted(self, batch: Any) -> float | Tensor:
        count = self.elements(batch)
        # Reading a tensor on another device would wait for it.
        if not isinstance(count, Tensor) or count.device.type == "cpu":
            positive(count, f"{type(self).__name__}.elements", "over how many elements the loss is the mean")
        return count

    def train_loop_begin(self) -> None:
        """Refuse a state that lacks the task's scaler or average."""
        saved_ids = {id(part) for _, part in flatten(self.state())}
        for name, part in {"scaler": self._scaler, "ema": self._ema, "shards": self._shards}.items():
            if part is not None and id(part) not in saved_ids:
                raise StateError(
                    f"the state of {type(self).__name__} lacks its {name!r}, so a resume would begin "
                    "without it; let state() return {**super().state(), ...}"
                )

    def train_loop_end(self) -> Mapping[str, Any] | None:
        """Make the update of the epoch's last window, which may be short, and step a schedule of epochs.

        Returns the metrics of that update; None where nothing is accumulated.
        """
        metrics = None
        if isinstance(self.optimizer, MinibatchOptimizer):
            self.optimizer.flush()
            metrics = self.optimizer.metrics()
        if self.scheduler is not None and self.scheduler_interval == "epoch":
            self.scheduler.step()
        return metrics

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the metrics of `forward`."""
        with self.precision():
            return self.forward(self.to_device(batch))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Turn gradients off in the block, and let `model` be the average if there is one."""
        live = self.model
        # The state has the bare model: a `forward` that asks `self.model.training` asks the wrapper.
        around = [] if live is None else [(each, each.training) for each in list(layers(live))[:-1]]
        with torch.no_grad():
            for wrapper, _ in around:
                wrapper.training = False
            if self._evaluated is not None:
                self.model = self._evaluated
            try:
                yield
            finally:
                self.model = live
                for wrapper, training in around:
                    wrapper.training = training

    # ---------------------------------------------------------------------- for your own train_step

    def precision(self) -> AbstractContextManager[Any]:
        """Return a context for a forward pass, with autocast if asked for."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device_type, self._autocast)

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return a context for a forward and a backward pass, where ranks average only to end a window."""
        optimizer = self.optimizer
        goes_on = isinstance(optimizer, MinibatchOptimizer) and not optimizer.ends_window
        return self._no_sync() if goes_on else nullcontext()

    def backward(self, loss: Tensor, elements: float | Tensor | None = None) -> None:
        """Compute the gradients of a loss, scaled if needed.

        Args:
            elements: how many the loss is the mean of.  On several ranks the gradients are weighted by it;
                without it, by the number of samples.
        """
        if elements is not None and isinstance(self.optimizer, MinibatchOptimizer):
            loss = self.optimizer.weighted(loss, elements)
        elif elements is not None and self._ranks is not None:
            loss = loss * (elements / self._ranks.means([elements])[0])
        elif self.batch_weight != 1.0:
            loss = loss * self.batch_weight
        torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))

    def update(self) -> Mapping[str, Any]:
        """Step the optimizer if the window ends, and clear the gradients; returns metrics of the update."""
        optimizer = self.optimizer
        if not isinstance(optimizer, Optimizer):
            raise self._without_optimizer()
        metrics: dict[str, Any] = {}
        if self.scheduler is not None:
            rate = optimizer.param_groups[0]["lr"]
            metrics["lr"] = rate.clone() if isinstance(rate, Tensor) else rate  # a scheduler fills a tensor
        optimizer.step()
        optimizer.zero_grad()
        return metrics | optimizer.metrics() if isinstance(optimizer, Around) else metrics

    def require_optimizer(self) -> None:
        """Require, before a training, the optimizer that `train_step` steps; another step may need none."""
        if type(self).train_step is Task.train_step and not isinstance(self.optimizer, Optimizer):
            raise self._without_optimizer()

    def _without_optimizer(self) -> ConfigError:
        return ConfigError(
            f"the optimizer of {type(self).__name__} is {self.optimizer!r:.80}: return one of torch's from "
            "build_optimizer, or write a train_step that steps yours"
        )

    def to_device(self, batch: Any) -> Any:
        """Move all of a batch that has a method `to`, also inside tuples, lists and dictionaries."""
        if self.device is None:
            return batch

        def moves(part: Any) -> bool:
            return callable(getattr(part, "to", None))

        def move(part: Any) -> Any:  # pinned memory is copied while the device computes
            return part.to(self.device, non_blocking=True) if moves(part) else part

        return tree_map(move, batch, is_leaf=moves)

    @property
    def _device_type(self) -> str:
        first: Tensor = next(self.model.parameters())
        return first.device.type
