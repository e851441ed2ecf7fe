"""Compiled models in the state: kernels that depend on the shapes of the batches before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from everstep.backends.torch.model_wrappers import alive_modules, models_of


@contextmanager
def shapes_watched(objects: Mapping[str, Any], warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, once of each, of compiled models in the state for which the shape of a batch matters later.

    Unless shapes are static, torch compiles a kernel for any shape when a second shape comes, and uses it for
    the first shape, too, from then on; a resumed process begins with the static one.  Of static kernels it
    makes a limited number, and runs further shapes uncompiled.  Either way the bits of a step depend on the
    shapes that this process has seen.
    """
    with ExitStack() as stack:
        ours = {id(part) for model in models_of(objects) for part in model.modules()}
        if ours and "torch._dynamo" in sys.modules:  # else nothing is compiled
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
