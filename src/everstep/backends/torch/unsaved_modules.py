"""Search for modules that training changes and that the state does not save: a metric, averaged weights.

After a resume inside an epoch such a module lacks the steps before, and the epoch's tail reads other values
from it.  No step reads the module, so a comparison of steps cannot notice that.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

_FIRST = 3
"""Step of a start after which modules are searched: the first steps may still make some."""


class TorchUnsavedObjects:
    """Finder of changed modules outside the state, asked after each of the first steps of a start.

    Args:
        objects: the objects of the state by name; modules that they hold count as saved.
        parameters: yields (entry, name, tensor) of the state's parameters.
    """

    def __init__(
        self, objects: Mapping[str, Any], parameters: Callable[[], Iterable[tuple[Any, Any, Tensor]]]
    ) -> None:
        self._objects, self._parameters = objects, parameters
        self._looks = 0
        self._epoch = 0
        self._marks: list[tuple[weakref.ref[Module], Any]] = []

    def changed(self, epoch: int) -> list[str]:
        """List the classes of the modules that the last step has changed, each once.

        Args:
            epoch: epoch of this step; a change between two epochs counts as made by no step.
        """
        self._looks += 1
        if self._looks == _FIRST:
            self._marks = [(weakref.ref(root), _mark(root)) for root in self._outside()]
        same, self._epoch = epoch == self._epoch, epoch
        moved = self._moved()
        return list(dict.fromkeys(type(root).__name__ for root in moved)) if same else []

    def skip(self) -> None:
        """Count the changes until now as made by no step."""
        self._moved()

    def _moved(self) -> list[Module]:
        old, self._marks = self._marks, []
        moved = []
        for reference, mark in old:
            if (root := reference()) is not None:
                self._marks.append((reference, now := _mark(root)))
                if now != mark:
                    moved.append(root)
        return moved

    def _outside(self) -> list[Module]:
        """List the outermost modules of this process that share no module and no array with the state."""
        ours = {id(part) for root in _held(self._objects) for part in _parts(root)}
        ours |= {id(parameter) for *_, parameter in self._parameters()}
        others = [each for each in alive_modules() if id(each) not in ours]
        inner = {id(part) for each in others for part in each.modules() if part is not each}
        outermost = (each for each in others if id(each) not in inner)
        return [each for each in outermost if ours.isdisjoint(map(id, _parts(each)))]


def _held(value: Any, depth: int = 4) -> Iterator[Module]:
    if isinstance(value, Module):
        yield value
    elif depth:
        inside = value if isinstance(value, dict | list | tuple) else getattr(value, "__dict__", ())
        for each in inside.values() if isinstance(inside, dict) else inside:
            yield from _held(each, depth - 1)


def alive_modules() -> Iterable[Module]:
    """List every module of this process; the filter is in C, as there may be a million other objects."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Module)}
    found = compress(objects, map(kinds.__contains__, map(type, objects)))
    return [each for each in found if "_modules" in vars(each)]  # not in the middle of being made


class Holders:
    """Finder of the modules that hold others: a model of which the state has the adapters alone."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[list[weakref.ref[Module]], list[weakref.ref[Module]]]] = {}
        """By the ids of modules: these, and the outermost modules around them."""

    def of(self, models: list[Module]) -> list[Module]:
        """List the modules around some modules; searched once for the same modules."""
        key = tuple(map(id, models))
        known, around = self._found.get(key, ([], []))
        if not models or [each() for each in known] != models:
            inside = set(key)
            holders = [
                module
                for module in (alive_modules() if models else ())
                if id(module) not in inside and not inside.isdisjoint(map(id, module.modules()))
            ]
            known, around = [weakref.ref(each) for each in models], [weakref.ref(each) for each in holders]
            self._found = {key: (known, around)}
        return [module for each in around if (module := each()) is not None]


def _parts(root: Module) -> Iterator[Any]:
    yield from root.modules()
    yield from root.parameters()
    yield from root.buffers()


def _mark(root: Module) -> list[Any]:
    """Mark a module's arrays and numbers, to tell later whether they have changed; no element is read."""
    return [
        (name, id(value), _version(value)) if isinstance(value, Tensor) else (name, value)
        for part in root.modules()
        for held in (vars(part), part._parameters, part._buffers)
        for name, value in held.items()
        if isinstance(value, Tensor) or type(value) in (int, float)
    ]


def _version(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version
