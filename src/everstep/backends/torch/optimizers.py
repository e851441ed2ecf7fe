"""Optimizers that wrap an optimizer and change gradients before it steps: clip, scale, accumulate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from everstep.arguments import checked_init, checked_keywords, integer, number
from everstep.backends.torch.model_wrappers import stepped_by
from everstep.backends.torch.parallel import Ranks
from everstep.backends.torch.sharded import by_mesh, gathered, local
from everstep.errors import ConfigError


@checked_init
@dataclass(frozen=True)
class Clip:
    """Limit of gradients before an update; exactly one of the three is given, and is more than 0.

    Args:
        value: limits each element to the range -value to value.
        norm: largest 2-norm of each parameter's gradient.
        global_norm: largest 2-norm of all gradients together.
    """

    value: float | None = None
    norm: float | None = None
    global_norm: float | None = None

    def __post_init__(self) -> None:
        limits = self._limits()
        if len(limits) != 1:
            raise ConfigError(f"Clip() takes exactly one of value, norm, global_norm; got {limits}; give one")
        for name, limit in limits.items():
            object.__setattr__(self, name, number(name, limit))

    def _limits(self) -> dict[str, float]:
        return {name: limit for name, limit in vars(self).items() if limit is not None}

    def __repr__(self) -> str:
        return f"Clip({', '.join(f'{name}={limit}' for name, limit in self._limits().items())})"

    def apply(self, parameters: list[Tensor]) -> Tensor:
        """Clip the gradients in place; returns their global 2-norm before clipping, on their device."""
        utils, alike = torch.nn.utils, by_mesh(parameters)  # torch takes tensors of one mesh at a time
        norms = [gathered(get_total_norm([p.grad for p in some if p.grad is not None])) for some in alike]
        total: Tensor = norms[0] if norms else torch.tensor(0.0)
        if len(norms) > 1:
            total = torch.linalg.vector_norm(torch.stack([norm.to(total.device) for norm in norms]))
        for some in alike:
            if self.global_norm is not None:
                utils.clip_grads_with_norm_(some, self.global_norm, total)
            elif self.value is not None:
                utils.clip_grad_value_(some, self.value)
        for parameter in parameters if self.norm is not None else ():
            utils.clip_grad_norm_([parameter], self.norm)  # type: ignore[arg-type]
        return total


class Around(Optimizer):
    """Wrapper around an optimizer.

    Schedulers and the state see the wrapped optimizer: the wrapper has its groups, state and hooks, and only
    a step of the wrapped optimizer counts as an update.
    """

    left_out = False
    """Whether an update that was due was ever left out."""
    _step_supports_amp_scaling = False
    """False, so that a scaler unscales before the step: inside a fused optimizer that would come too late."""

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"{type(self).__name__}({optimizer!r:.60}): give an optimizer, as in SGD(...)")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"{type(self).__name__}(LBFGS): it makes gradients several times in a step, by its closure; "
                "limit or add them up in the closure, and use LBFGS itself"
            )
        # No super().__init__(): groups, state and hooks are those of the wrapped optimizer.
        self.optimizer = optimizer
        self._metrics: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own has the groups alone; a `step` that a scheduler has put here is that of this object
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._metrics = {}
        self.optimizer.load_state_dict(state_dict)

    def options(self) -> dict[str, str]:
        return {}

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last `step`, only once; without an update there may be none."""
        inner = self.optimizer.metrics() if isinstance(self.optimizer, Around) else {}
        own, self._metrics = self._metrics, {}
        return {**inner, **own}

    def __repr__(self) -> str:
        own = "".join(f", {name}={text}" for name, text in self.options().items())
        return f"{type(self).__name__}({self.optimizer!r}{own})"


def layers(optimizer: Optimizer) -> list[Optimizer]:
    """List an optimizer, the optimizer that it wraps, and so on to the innermost.

    A wrapper of another library (accelerate's) holds the wrapped one as `optimizer` and has the same groups.
    """
    listed = [optimizer]
    while isinstance(inner := getattr(listed[-1], "optimizer", None), Optimizer):
        if inner.param_groups is not optimizer.param_groups or inner in listed:
            break
        listed.append(inner)
    return listed


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the innermost wrapped optimizer, which steps the parameters."""
    return layers(optimizer)[-1]


class ClipOptimizer(Around):
    """Wrapper that limits gradients before an optimizer steps with them.  Carries on tfutils' ClipOptimizer.

        optimizer = ClipOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), Clip(global_norm=1.0))

    Gradients whose norm is NaN or infinite are not used: on the CPU no update is made; on another device,
    whose norm is not waited for, the update is made with gradients of 0.  (tfutils applied them unclipped.)
    `metrics()` has the norm before clipping as "grad_norm": collect it, and the NaN guard names that step.

    Args:
        optimizer: any torch optimizer.
        clip: the limit; default, as in tfutils: each element to the range -1 to 1.
    """

    @checked_keywords
    def __init__(self, optimizer: Optimizer, clip: Clip = Clip(value=1.0)) -> None:
        super().__init__(optimizer)
        if not isinstance(clip, Clip):
            raise ConfigError(f"clip={clip!r}: give Clip(value=...), Clip(norm=...) or Clip(global_norm=...)")
        self.clip = clip

    def options(self) -> dict[str, str]:
        return {"clip": repr(self.clip)}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, then step, unless the gradients are not finite; returns the closure's loss."""
        loss = _called(closure)
        parameters = _with_gradient(self)
        norm = self.clip.apply(parameters)
        self._metrics = {"grad_norm": norm}
        finite = norm.isfinite()
        # Asking whether the norm is finite would wait for the device: there, gradients become 0.
        if not finite.is_cpu:
            for parameter in parameters:
                assert parameter.grad is not None
                local(parameter.grad).masked_fill_(~finite.to(parameter.device), 0.0)
        elif not finite:
            self.left_out = True
            return loss
        self.optimizer.step()
        return loss


class ScaledOptimizer(Around):
    """Wrapper that steps through a gradient scaler, which leaves out updates with overflowed gradients.

    `metrics()` has "overflowed": 1 if the last update was left out, else 0.  If the wrapped optimizer is
    fused, the update is left out on the device, and "overflowed" stays 0.
    """

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        super().__init__(optimizer)
        self.scaler = scaler
        self._stepped = False
        self.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale the gradients, step unless they overflowed, and adapt the scale."""
        loss = _called(closure)
        # scaler.step does not tell whether it made an update: the hook does.
        self._stepped = False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.left_out = self.left_out or not self._stepped
        self._metrics = {"overflowed": float(not self._stepped)}
        return loss


class MinibatchOptimizer(Around):
    """Wrapper that makes an update of several steps, with the mean of their gradients, as in tfutils.

        optimizer = MinibatchOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 4)
        for step, (x, y) in loop.iter_steps(train):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            optimizer.weighted(loss, len(x)).backward()
            optimizer.step()

    `zero_grad` does nothing while a window is open, and the window is part of the state: a resume continues
    inside it.  A window that is short at the end of an epoch stays open, unless `flush` is called.

    On several ranks the mean is that over the elements of all of them.  Only the last step of a window needs
    to average the gradients: the others may run in DistributedDataParallel's `no_sync()` (`ends_window`).

    Args:
        optimizer: any torch optimizer.
        num_minibatches: steps for each update, 1 or more.
    """

    ranks: Ranks | None = None
    """The ranks that train one model with copies of this optimizer; None on one process."""

    @checked_keywords
    def __init__(self, optimizer: Optimizer, num_minibatches: int) -> None:
        super().__init__(optimizer)
        self.num_minibatches = integer("num_minibatches", num_minibatches)
        self._weight: float | Tensor = 1.0
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        """Steps of the open window; the next two belong to that window, too."""
        self._elements: float | Tensor = 0.0
        self._loss: float | Tensor = 0.0
        """Sum of the losses over the elements."""

    def options(self) -> dict[str, str]:
        return {"num_minibatches": str(self.num_minibatches)}

    def weighted(self, loss: Tensor, elements: float | Tensor) -> Tensor:
        """Return the loss times the number of elements whose mean it is; call `backward` on the product.

        Then the gradient of an update is the mean over all elements of its steps, and `metrics()` has the
        mean of their losses as "window_loss".  Without this call, every step has the same weight.
        """
        self._weight = elements
        product = loss * elements
        self._loss = self._loss + product.detach()
        return product

    @property
    def ends_window(self) -> bool:
        """Whether the next `step` ends the window, and makes the update."""
        return self._steps + 1 >= self.num_minibatches

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count a minibatch; the last minibatch of a window makes the update and zeroes the gradients."""
        loss = _called(closure)
        self._steps += 1
        self._elements = self._elements + self._weight
        self._weight = 1.0
        if self._steps >= self.num_minibatches:
            self.flush()
        return loss

    def flush(self) -> None:
        """Make the update of an open window, even if it is short; without an open window, do nothing."""
        if not self._steps:
            return
        elements, loss, has_loss = self._elements, self._loss, isinstance(self._loss, Tensor)
        if self.ranks is not None:
            if self._steps < self.num_minibatches:
                self.ranks.average_gradients(stepped_by(self))
            elements, loss = self.ranks.means([elements, loss])
        # what this process holds of them: torch refuses a mixture of whole and sharded tensors
        gradients = [local(p.grad) for p in _with_gradient(self) if p.grad is not None]
        if gradients:
            # Products with the elements were summed: the division makes the mean over the window.
            torch._foreach_div_(gradients, elements)
        if has_loss:
            self._metrics = {"window_loss": loss / elements}
        self._begin()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self._steps:
            self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        window = {"steps": self._steps, "elements": self._elements, "loss": self._loss}
        return {**self.optimizer.state_dict(), WINDOW: window}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        window = state_dict.get(WINDOW, {"steps": 0, "elements": 0.0, "loss": 0.0})
        self._steps, self._elements, self._loss = window["steps"], window["elements"], window["loss"]
        self._weight = 1.0
        super().load_state_dict({key: part for key, part in state_dict.items() if key != WINDOW})


WINDOW = "window"
"""Key of an open window in a state_dict."""


def _with_gradient(optimizer: Optimizer) -> list[Tensor]:
    return [p for p in stepped_by(optimizer) if p.grad is not None]


def _called(closure: Callable[[], Any] | None) -> Any:
    """Call a closure, which makes the gradients, before a wrapper uses them."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
