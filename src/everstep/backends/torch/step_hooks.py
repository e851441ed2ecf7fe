"""Hooks inside steps: what models of the state are given, and what optimizers are about to use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from everstep.backends.torch.model_wrappers import (
    alive_modules,
    flatten,
    model_parameters,
    models_of,
    optimizers,
)
from everstep.backends.torch.optimizers import innermost

Seen = Callable[[str, str, Any], None]
"""(kind of part, name, tree): kinds are "input", "weights", "pull", "gradient" and "optimizer"."""


class TorchStepHooks:
    """Tells the parts of steps that are seen only inside them.

    Args:
        objects: the live objects of the state, by name.
        seen: called with the input and the weights of a model before each of its forward passes, with the
            gradient of its output ("pull": what a loss asks of the model) in each backward pass, and with
            gradients, options and moments before each step of an optimizer.
    """

    def __init__(self, objects: Mapping[str, Any], seen: Seen) -> None:
        self._seen = seen
        self._optimizers = {id(innermost(optimizer)): name for name, optimizer in optimizers(objects)}
        self._names = {id(p): (name, key) for name, key, p in model_parameters(objects) if key}
        models = [(name, value) for name, value in flatten(objects) if isinstance(value, torch.nn.Module)]
        self._handles = [register_optimizer_step_pre_hook(self._update)]
        # not for all modules at once: a compiled model would be compiled otherwise, and have other bits
        self._handles += [model.register_forward_pre_hook(_before(name, seen)) for name, model in models]
        self._handles += [model.register_forward_hook(_behind(name, seen)) for name, model in models]

    def _update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        name = self._optimizers.get(id(optimizer))
        if name is None:
            return
        trees: dict[str, dict[str, Any]] = {"gradient": {}, "moments": {}}
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                owner, key = self._names.get(id(parameter), (f"group {number}", str(place)))
                if parameter.grad is not None:
                    trees["gradient"].setdefault(owner, {})[key] = parameter.grad
                trees["moments"].setdefault(owner, {})[key] = dict(optimizer.state.get(parameter, {}))
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._seen("gradient", name, trees["gradient"])
        self._seen("optimizer", name, {"options": options, "moments": trees["moments"]})

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _before(name: str, seen: Seen) -> Callable[[torch.nn.Module, Any], None]:
    """Make the hook of a model: a function, which a deep copy of the model does not copy."""

    def told(module: torch.nn.Module, args: Any) -> None:
        seen("input", name, list(args))
        seen("weights", name, dict(module.state_dict()))

    return told


def _behind(name: str, seen: Seen) -> Callable[[torch.nn.Module, Any, Any], None]:
    """Make the hook that asks for the gradients of a model's output."""

    def pulled(gradient: torch.Tensor) -> None:
        seen("pull", name, gradient)

    def told(module: torch.nn.Module, args: Any, output: Any) -> None:
        for part in tree_leaves(output):
            if isinstance(part, torch.Tensor) and part.requires_grad:
                part.register_hook(pulled)  # type: ignore[no-untyped-call]

    return told


@contextmanager
def shapes_watched(objects: Mapping[str, Any], warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, once of each, of compiled models in the state for which the shape of a batch matters later.

    Unless shapes are static, torch compiles a kernel for any shape when a second shape comes, and uses it for
    the first shape, too, from then on; a resumed process begins with the static one.  Of static kernels it
    makes a limited number, and runs further shapes uncompiled.  Either way the bits of a step depend on the
    shapes that this process has seen.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            ours = {id(part) for model in models_of(objects) for part in model.modules()}
            compiled = [each for each in alive_modules() if isinstance(each, torch._dynamo.OptimizedModule)]
            for each in compiled:
                if not ours.isdisjoint(map(id, each.modules())):
                    hook = _shape_hook(getattr(each.dynamo_ctx, "_dynamic", None) is False, warn)
                    stack.callback(each.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


_SHAPES = {
    False: (
        "two shapes: at the second one torch goes over to kernels for any shape, and a new process begins "
        "again with one for the first",
        "compile it with dynamic=False",
    ),
    True: (
        "more shapes than torch compiles: it runs the further ones uncompiled, and in a new process those "
        "are others",
        "pad batches to a few shapes, or raise torch._dynamo.config.recompile_limit",
    ),
}
"""What happens to a model with dynamic and with static shapes, and the remedy."""


def _shape_hook(static: bool, warn: Callable[[str], None]) -> Callable[[Any, Any, Any], None]:
    limit = torch._dynamo.config.recompile_limit if static else 1
    seen: set[Any] = set()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        if len(seen) > limit or torch.compiler.is_compiling():
            return
        leaves = tree_leaves((args, kwargs))
        seen.add(tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)))
        if len(seen) > limit:
            what, remedy = _SHAPES[static]
            warn(
                f"{type(module._orig_mod).__name__} is compiled (torch.compile), and is given batches of "
                f"{what}: so after a resume the same step may have other bits; {remedy}"
            )

    return look
