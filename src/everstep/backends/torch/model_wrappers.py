"""Parts of the state's objects, and their names without what wrappers add (`module.` of DDP, `_orig_mod.`).

A checkpoint has the names of the bare model, so that one process, several processes and a compiled model load
each other's checkpoints.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import compress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from everstep.backends.torch.sharded import local, reshard
from everstep.contracts.state import Declaration

T = TypeVar("T")


def _shell(module: Module) -> str:
    """Name under which a wrapper holds the module inside; "" for a module that is not a wrapper."""
    if isinstance(module, DataParallel | DistributedDataParallel):
        return "module"
    return "_orig_mod" if "_orig_mod" in module._modules else ""


def layers(module: Module) -> Iterator[Module]:
    """Yield the wrappers of a module, from the outermost, and at last the bare module."""
    while shell := _shell(module):
        yield module
        module = getattr(module, shell)
    yield module


def bare(module: Module) -> Module:
    """Return the module inside its wrappers."""
    return list(layers(module))[-1]


def named_parameters(module: Module) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters with their bare names."""
    names = BareNames(module)
    for name, parameter in bare(module).named_parameters():
        yield names.bare(name), parameter


class BareNames:
    """Both names of each part of a model: the *bare* name, and the *live* one, with what wrappers inside add.

    Parts are parameters, buffers and submodules.  The wrappers around the whole model count in neither name.
    """

    def __init__(self, module: Module) -> None:
        self._root = bare(module)
        wrapped = [
            f"{path}.{shell}".removeprefix(".")
            for path, inner in self._root.named_modules(remove_duplicate=False)
            if (shell := _shell(inner))
        ]
        self._inside = sorted(wrapped, key=len, reverse=True)
        """Paths of the modules in wrappers; the deepest first, so that the paths of others stay right."""

    def bare(self, name: str) -> str:
        """Return the bare name of a live one."""
        for path in self._inside:
            if f"{name}.".startswith(f"{path}."):
                name = (path.rpartition(".")[0] + name[len(path) :]).removeprefix(".")
        return name

    def live(self, saved: str) -> str:
        """Return the live name of a saved one, which is itself where no part has it."""
        return self._parts.get(saved, saved) if self._inside else saved

    @cached_property
    def _parts(self) -> dict[str, str]:
        """Live names by bare names; the path of a wrapper is that of the module inside."""
        root = self._root
        paths = [p for p, inner in root.named_modules(remove_duplicate=False) if not _shell(inner)]
        buffers = [name for name, _ in root.named_buffers(remove_duplicate=False)]
        return {self.bare(name): name for name in (*root.state_dict(), *buffers, *paths)}


def flatten(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for the state's objects; those inside dicts and lists are named "entry/key"."""
    for name, value in objects.items():
        value = value.value if isinstance(value, Declaration) else value
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from flatten({f"{name}/{key}": item for key, item in items})
        else:
            yield name, value


def inside(value: Any) -> Iterable[tuple[str, Any]]:
    """Return what an object holds in containers ("[key]") or attributes (".name"), with its place."""
    if isinstance(value, Module | Optimizer | Tensor):
        return ()
    if isinstance(value, dict):
        return [(f"[{key!r}]", each) for key, each in list(value.items())]
    if isinstance(value, list | tuple | set | deque):
        return [(f"[{number}]", each) for number, each in enumerate(list(value))]
    return [(f".{name}", each) for name, each in list(getattr(value, "__dict__", {}).items())]


def contents(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield an object, and the objects that it holds in attributes and containers, down to a depth."""
    yield value
    if depth:
        for _, each in inside(value):
            yield from contents(each, depth - 1)


def models_of(objects: Mapping[str, Any]) -> list[Module]:
    """List the models among the state's objects."""
    return [value for _, value in flatten(objects) if isinstance(value, Module)]


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among some objects, and the parameters and buffers of the modules."""
    for value in values:
        if isinstance(value, Module):
            yield from value.parameters()
            yield from value.buffers()
        elif isinstance(value, Tensor):
            yield value


def address(array: Any) -> int:
    """Return the address of a tensor's or a NumPy array's memory; 0 without one."""
    if isinstance(array, Tensor):
        return local(array).untyped_storage().data_ptr()
    return address(array.base) if isinstance(array.base, np.ndarray) else int(array.ctypes.data)


def optimizers(objects: Mapping[str, Any]) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers that the state saves: as entries, and as attributes of entries."""
    for name, value in flatten(objects):
        if isinstance(value, Optimizer):
            yield name, value
        elif not isinstance(value, Module) and hasattr(value, "state_dict"):
            items = [(k, v) for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, Optimizer)]
            if items and _saves_optimizer(value.state_dict()):
                yield from ((f"{name}.{attribute}", optimizer) for attribute, optimizer in items)


def _saves_optimizer(tree: Any) -> bool:
    return isinstance(tree, dict) and ("param_groups" in tree or any(map(_saves_optimizer, tree.values())))


def stepped_by(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def stepped_parameters(objects: Mapping[str, Any]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (entry, index, parameter) of the parameters that the state's optimizers step."""
    for owner, optimizer in optimizers(objects):
        yield from ((owner, index, parameter) for index, parameter in enumerate(stepped_by(optimizer)))


def model_parameters(objects: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (entry, bare name, parameter) of the state's models, and its leaf tensors with the name ""."""
    for entry, value in flatten(objects):
        if isinstance(value, Module):
            reshard(value)
            yield from ((entry, name, parameter) for name, parameter in named_parameters(value))
        elif isinstance(value, Tensor) and value.is_leaf:  # a loss, say, has no gradient of its own
            yield entry, "", value


def alive_modules(*others: type[T]) -> list[Module | T]:
    """List every module of this process, and the objects of other kinds."""
    objects = gc.get_objects()  # perhaps a million: the filter is in C
    kinds = {each for each in set(map(type, objects)) if issubclass(each, (Module, *others))}
    listed = compress(objects, map(kinds.__contains__, map(type, objects)))
    # without a module in the middle of being made
    return [each for each in listed if not isinstance(each, Module) or "_modules" in vars(each)]


_around: tuple[list[weakref.ref[Module]], list[weakref.ref[Module]]] = ([], [])
"""Modules that `around` was asked for last, and those that hold them."""


def around(models: list[Module]) -> list[Module]:
    """List the modules that hold some modules: a model of which the state has the adapters alone."""
    global _around
    if [each() for each in _around[0]] != models:
        inside = set(map(id, models))
        others = [each for each in (alive_modules() if models else ()) if id(each) not in inside]
        holders = [each for each in others if not inside.isdisjoint(map(id, each.modules()))]
        _around = list(map(weakref.ref, models)), list(map(weakref.ref, holders))
    return [module for each in _around[1] if (module := each()) is not None]


def _look_again(module: Module, name: str, part: Module | None) -> None:
    """Forget who holds what, when a module is given one of them as a part; torch tells not of `insert`."""
    global _around
    if any(each() is part for references in _around for each in references):
        _around = [], []


register_module_module_registration_hook(_look_again)


@contextmanager
def shapes_watched(objects: Mapping[str, Any], warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, once of each, of compiled models in the state whose kernels follow from the shapes seen before.

    Unless shapes are static, torch compiles a kernel for any shape when a second shape comes, and uses it for
    the first shape, too; of static kernels it makes a limited number, and runs further shapes uncompiled.
    """
    with ExitStack() as stack:
        ids = {id(part) for model in models_of(objects) for part in model.modules()}
        if ids and "torch._dynamo" in sys.modules:  # else nothing is compiled
            for each in alive_modules():
                compiled = isinstance(each, torch._dynamo.OptimizedModule)
                if compiled and not ids.isdisjoint(map(id, each.modules())):
                    hook = _shape_hook(getattr(each.dynamo_ctx, "_dynamic", None) is False, warn)
                    stack.callback(each.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _shape_hook(static: bool, warn: Callable[[str], None]) -> Callable[[Any, Any, Any], None]:
    most = torch._dynamo.config.recompile_limit
    limit, seen = most if static else 1, set[Any]()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        if len(seen) > limit or torch.compiler.is_compiling():
            return
        seen.add(tuple(leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
        if len(seen) > limit:
            warn(
                f"{type(module._orig_mod).__name__} is compiled (torch.compile), and is given batches of "
                f"{len(seen)} shapes, so a resume may give a step other bits; compile it with dynamic=False, "
                f"and pad batches to at most {most} shapes (torch._dynamo.config.recompile_limit)"
            )

    return look
