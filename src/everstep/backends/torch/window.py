"""Gradients of a window of accumulation under `fully_shard`, which no parameter shows.

With `set_requires_gradient_sync(False)` a backward pass leaves each rank the gradients of its own samples,
of whole parameters; with `set_requires_all_reduce(False)` those that only a part of the ranks have summed.
torch keeps both beside the parameters, until the pass that ends the window reduces them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from everstep.backends.torch.sharded import is_sharded, local, param_groups
from everstep.errors import RestoreError, StateError


def window(models: Iterable[Module]) -> dict[str, Tensor]:
    """Return the gradients of open windows, by the place of what has them; empty outside a window."""
    found: dict[str, Tensor] = {}
    for place, group in _groups(models):
        if group._partial_reduce_output is not None:
            found[place] = group._partial_reduce_output
        for index, parameter in enumerate(group.fsdp_params):
            if (gradient := _gradient(parameter)) is not None:
                found[f"{place}.{index}"] = _held(parameter, gradient)
    return found


def load_window(models: Iterable[Module], saved: dict[str, Tensor]) -> None:
    """Give back what `window` returned; what is not there is cleared.

    Raises:
        RestoreError: the saved gradients belong to nothing.
    """
    rest = dict(saved)
    for place, group in _groups(models):
        group._partial_reduce_output = _copied(rest.pop(place, None), group.device)
        for index, parameter in enumerate(group.fsdp_params):
            gradient = _copied(rest.pop(f"{place}.{index}", None), group.device)
            if getattr(parameter, "_unsharded_param", None) is not None:
                parameter._unsharded_param.grad = None
            if gradient is not None and parameter.is_dtensor:
                gradient = _as_gathered(parameter, gradient)
            # where a pass of another dtype leaves its sum; the next pass adds to it, in the same order
            parameter.unsharded_accumulated_grad = gradient
    if rest:
        raise RestoreError(
            "saved gradients of an open window belong to no parameter: shard the model as before",
            unexpected=list(rest),
        )


def _groups(models: Iterable[Module]) -> Iterable[tuple[str, Any]]:
    for number, model in enumerate(models):
        for index, group in enumerate(param_groups(model)):
            yield f"{number}.{index}", group


def _gradient(parameter: Any) -> Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:
        summed: Tensor = parameter.unsharded_accumulated_grad
        return summed
    gathered = getattr(parameter, "_unsharded_param", None)
    return None if gathered is None else gathered.grad


def _held(parameter: Any, gradient: Tensor) -> Tensor:
    """Return what this process holds of a gradient.

    Raises:
        StateError: under tensor parallelism it is laid out otherwise than its parameter.
    """
    if not is_sharded(gradient):
        return gradient
    spec = parameter._unsharded_dtensor_spec
    if tuple(gradient.placements) != tuple(spec.placements):  # type: ignore[attr-defined]
        raise StateError(
            f"the gradient of {parameter._param_fqn!r} in an open window is not laid out as its parameter, "
            "so it cannot be saved: save where no window is open, as with Checkpoints(Every(steps=...))"
        )
    return local(gradient)


def _as_gathered(parameter: Any, gradient: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    spec = parameter._unsharded_dtensor_spec
    return DTensor.from_local(
        gradient, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def _copied(gradient: Tensor | None, device: Any) -> Tensor | None:
    return None if gradient is None else gradient.to(device, copy=True)
