"""Names of a model's parts without what wrappers add: `module.` of DDP, `_orig_mod.` of torch.compile.

A checkpoint has the names of the bare model, so that one process, several processes and a compiled model load
each other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from torch.nn import Module, Parameter
from torch.nn.parallel import DataParallel, DistributedDataParallel


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
        found = [
            f"{path}.{shell}".removeprefix(".")
            for path, inner in self._root.named_modules(remove_duplicate=False)
            if (shell := _shell(inner))
        ]
        self._inside = sorted(found, key=len, reverse=True)
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
        modules = {path: inner for path, inner in root.named_modules(remove_duplicate=False)}
        paths = [path for path, inner in modules.items() if not _shell(inner)]
        buffers = [name for name, _ in root.named_buffers(remove_duplicate=False)]
        return {self.bare(name): name for name in (*root.state_dict(), *buffers, *paths)}
