"""Count of optimizers' updates, and search for gradients that are still to be used."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from everstep.backends.torch.model_wrappers import named_parameters
from everstep.backends.torch.optimizers import layers
from everstep.backends.torch.sharded import (
    fsdp_modules,
    is_sharded,
    layout,
    load_window,
    local,
    reshard,
    unmade_sums,
    window,
)
from everstep.backends.torch.virtual_shards import require_saved
from everstep.contracts.state import BASE, Declaration
from everstep.errors import RestoreError

_SENTINELS = 4
_ref = weakref.ref
_owned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers in the states of all open loops: those of another run are not strangers."""

_RECOMPUTED = {
    LambdaLR: ("lr",),
    CosineAnnealingWarmRestarts: ("lr",),
    OneCycleLR: ("lr", "momentum", "betas"),
    CyclicLR: ("lr", "momentum", "betas"),
}
"""Options that a scheduler computes from the step alone; other schedulers change the present value."""


class TorchUpdateCounter:
    """Watch that counts the steps of the state's optimizers through one hook on all optimizers.

    An optimizer belongs to the state if it is an entry, stands in a dict or list that is an entry, or is an
    attribute of an entry whose `state_dict` saves an optimizer.  A fused optimizer under a gradient scaler
    skips an overflowed step on the device; such a step is counted.

    Gradients need saving while they are still to be used.  They are used up if the optimizer has stepped with
    them, no backward pass came after (the gradients are the same objects, unchanged), and the program makes
    new gradients for each update, as `zero_grad()` does.  If the same objects ever served two updates (zeroed
    in place, now and then, or never), gradients are always saved.  Which of the two a program does is known
    at its second update, and is saved, too.

    Attributes:
        updates: number of steps that the state's optimizers have made.
        optimizers: number of the state's optimizers.
        outside: finds changed modules that the state does not save.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.updates = 0
        self._objects = objects
        pairs = list(flatten(objects))
        self._layers = {name: layers(optimizer) for name, optimizer in optimizers(pairs)}
        self._own = {name: _Watched(inner) for name, (*_, inner) in self._layers.items()}
        self.optimizers = len(self._own)
        scalers = [value for _, value in pairs if isinstance(value, torch.amp.GradScaler)]
        self._scales = [(scaler, scaler.get_scale()) for scaler in scalers if scaler.is_enabled()]
        self._by_id = {id(watched.optimizer): watched for watched in self._own.values()}
        self._models = [(n, v) for n, v in pairs if isinstance(v, (Module, Tensor))]
        modules = (value for _, value in self._models if isinstance(value, Module))
        self._fsdp = [value for value in modules if fsdp_modules(value)]
        """Models whose parameters are other objects while a forward pass has gathered them."""
        self.outside = TorchUnsavedObjects(objects, self._parameters)
        self._strangers: dict[str, None] = {}
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Optimizers of arrays outside the state; true if `strangers` was asked after they first stepped."""
        for watched in self._own.values():
            self._seen.update(v for v in vars(watched.optimizer).values() if isinstance(v, Optimizer))
        _owned.update(watched.optimizer for watched in self._own.values())
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._by_id.get(id(optimizer))
        if watched is not None:
            self.updates += 1
            watched.stepped()
        elif optimizer in _owned:  # of another open loop
            return
        elif optimizer not in self._seen:
            self._seen.add(optimizer)
            self._meet(optimizer)
        elif self._others.get(optimizer):
            self._strangers[f"{type(optimizer).__name__} of arrays that are not in the state"] = None

    def _meet(self, optimizer: Optimizer) -> None:
        names = {id(p): f"{owner}/{key}" for owner, key, p in self._parameters()}
        theirs = [names[id(p)] for p in _parameters(optimizer) if id(p) in names]
        if theirs:
            some = ", ".join(theirs[:3]) + (" ..." if len(theirs) > 3 else "")
            self._strangers[
                f"{type(optimizer).__name__} that steps {len(theirs)} of the state's arrays ({some})"
            ] = None
        else:
            self._others[optimizer] = False

    def left_out(self) -> bool:
        """Whether an update was left out because its gradients were not finite; waits for the device."""
        around = any(getattr(layer, "left_out", False) for found in self._layers.values() for layer in found)
        return around or any(scaler.get_scale() < before for scaler, before in self._scales)

    def strangers(self) -> list[str]:
        """List descriptions of the optimizers that the state lacks, and on which training depends.

        Such an optimizer stepped the state's parameters; or it stepped other arrays both before and after the
        last call of this method.  (An optimizer that is made, used and dropped inside a step does not count.)
        """
        for optimizer in self._others:
            self._others[optimizer] = True
        return list(self._strangers)

    def unsaved(self, user: Mapping[str, Any]) -> list[str]:
        """List descriptions of the parameters that the state's optimizers step, and that the state lacks.

        A user's own object may save copies of parameters: a copy is recognised by its shape alone.
        """
        stepped = [p for watched in self._own.values() for p in _parameters(watched.optimizer)]
        require_saved((value for _, value in flatten(self._objects)), stepped)
        saved = {0}  # address of tensors without elements: there is nothing to save
        copies: Counter[tuple[int, ...]] = Counter()
        for name, value in self._objects.items():
            tensors = list(_tensors(user[name]))
            # Compared by storage: a tied parameter may be saved under another name.
            saved.update(map(_place, tensors))
            if isinstance(value, Module):
                saved.update(
                    _place(parameter)
                    for key, parameter in named_parameters(value)
                    if key in user[name] or key in user[name].get(BASE, ())
                )
            elif not isinstance(value, Tensor | Optimizer | dict | list | torch.Generator):
                copies.update(tuple(tensor.shape) for tensor in tensors)
        found = []
        for owner, watched in self._own.items():
            for index, parameter in enumerate(_parameters(watched.optimizer)):
                shape = tuple(parameter.shape)
                if _place(parameter) in saved:
                    continue
                if copies[shape] > 0:
                    copies[shape] -= 1
                else:
                    found.append(f"parameter {index} {shape} of {owner!r}")
        return found

    def unscheduled(self) -> list[str]:
        """Names of the optimizers for which a scheduler was made that is not part of the state."""
        driven = {id(optimizer) for _, value in flatten(self._objects) for optimizer in _driven(value)}
        return [
            name
            for name, found in self._layers.items()  # torch's schedulers leave this mark
            if any(hasattr(layer.step, "_wrapped_by_lr_sched") for layer in found)
            and not any(id(layer) in driven for layer in found)
        ]

    def recomputing(self, owner: str, option: str) -> list[str]:
        """List descriptions of the schedulers that overwrite an option without reading it."""
        return [
            f"{type(part).__name__} {name!r}"
            for name, value in flatten(self._objects)
            for part in [value, *(_own(value, "_schedulers") or ())]
            if _own(part, "optimizer") is self._objects.get(owner)
            and option in next((sets for kind, sets in _RECOMPUTED.items() if isinstance(part, kind)), ())
        ]

    def gradients(self) -> Any:
        """Return the gradients that are still to be used, and whether optimizers reuse theirs.

        The key of a parameter is its index in its optimizer, or its name in a model if no optimizer of the
        state has it.  Returns None if there is nothing to save.
        """
        tree: dict[str, Any] = {}
        summed: dict[str, Any] = {}
        """By the same keys, the dimensions of the mesh over which a gradient is still to be summed."""
        used_up = {owner for owner, watched in self._own.items() if watched.used_up()}
        for owner, key, parameter in self._parameters():
            grad = parameter.grad
            if grad is not None and owner not in used_up:
                tree.setdefault(owner, {})[key] = local(grad) if is_sharded(grad) else grad
                if (sums := unmade_sums(grad, parameter)) is not None:
                    summed.setdefault(owner, {})[key] = sums
        reused = {  # after a resume nobody holds gradients that were not saved
            owner: [watched.reused, watched.held() if owner not in used_up else False]
            for owner, watched in self._own.items()
        }
        found: dict[str, Any] = {"grad": tree, "reused": reused} if tree or reused else {}
        if summed:
            found["summed"] = summed
        if self._fsdp and (opened := window(self._fsdp)):
            found["window"] = opened
        return found or None

    def load_gradients(self, tree: Any) -> None:
        """Set each parameter's gradient to the saved one, or to None."""
        tree = tree or {"grad": {}, "reused": {}}
        saved = {(owner, key): grad for owner, grads in tree["grad"].items() for key, grad in grads.items()}
        summed = tree.get("summed", {})
        for owner, key, parameter in self._parameters():
            grad = saved.pop((owner, key), None)
            # A copy: the program changes gradients in place.
            sums = summed.get(owner, {}).get(key, ())
            copied: Any = None if grad is None else grad.to(parameter.device, copy=True)
            placed = copied is not None and is_sharded(parameter)
            parameter.grad = layout(parameter).tensor(copied, sums) if placed else copied
        for owner, watched in self._own.items():
            watched.resume(*tree["reused"].get(owner, (None, None)))
        load_window(self._fsdp, tree.get("window", {}))
        if saved:
            names = [f"{owner}/{key}" for owner, key in saved]
            raise RestoreError("saved gradients belong to no parameter", unexpected=names)

    def _parameters(self) -> Iterable[tuple[str, int | str, Tensor]]:
        """Return (entry, index or name, parameter), each parameter once; those of optimizers come first."""
        for sharded in self._fsdp:
            reshard(sharded)
        found: dict[int, tuple[str, int | str, Tensor]] = {}
        for owner, watched in self._own.items():
            for index, parameter in enumerate(_parameters(watched.optimizer)):
                found.setdefault(id(parameter), (owner, index, parameter))
        for owner, model in self._models:
            parameters = [(0, model)] if isinstance(model, Tensor) else named_parameters(model)
            for name, parameter in parameters:
                found.setdefault(id(parameter), (owner, name, parameter))
        return found.values()

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()
        for watched in self._own.values():
            _owned.discard(watched.optimizer)


class _Watched:
    """Optimizer of the state, with marks of the gradients of its last step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.sentinels: list[Tensor] = []
        self.sharded = any(map(is_sharded, _parameters(optimizer)))
        self.marks: list[tuple[weakref.ref[Tensor], int] | None] = []
        self.reused: bool | None = None
        """Whether two updates in a row ever used the same gradient objects; None before the second."""
        self.gone = False
        """Whether the last update was made before a resume, so that its gradients are gone."""

    def stepped(self) -> None:
        """Mark the sentinels' gradients by weak references: an address alone may be used again."""
        last = self.marks[0] if self.marks else None
        marks: list[tuple[weakref.ref[Tensor], int] | None] = []
        # each update comes here: one loop, without the calls of `held` and `holds`
        for parameter in self.sentinels:
            grad = parameter.grad
            if self.sharded and grad is not None:
                grad = self._inner(grad)
            marks.append(None if grad is None else (_ref(grad), grad._version))
        if not self.reused:
            if last is not None:
                now = marks[0]
                self.reused = now is not None and now[0]() is last[0]()
            elif self.gone:
                self.reused = False
        self.marks, self.gone = marks, False
        if not any(marks) and self._choose():
            self.stepped()

    def holds(self) -> bool:
        """Whether the gradients are still the objects of the last update."""
        last = self.marks[0] if self.marks else None
        grad = self.sentinels[0].grad if last is not None else None
        return (
            last is not None
            and grad is not None
            and last[0]() is (self._inner(grad) if self.sharded else grad)
        )

    def held(self) -> bool | None:
        """Whether the gradients are still the objects of the last update; None before the first update."""
        begun = self.gone or (bool(self.marks) and self.marks[0] is not None)
        return self.holds() if begun else None

    def resume(self, reused: bool | None, held: bool | None) -> None:
        """Take over the saved facts; restored gradients count as still to be used."""
        self.reused, self.marks, self.gone = reused, [], held is False
        if held and self._choose():
            self.marks = [
                (weakref.ref(self._inner(p.grad)), -1) for p in self.sentinels if p.grad is not None
            ]

    def _inner(self, gradient: Tensor) -> Tensor:
        """Return the tensor that has the elements: `fully_shard` adds to this one, past the DTensor."""
        return gradient._local_tensor if is_sharded(gradient) else gradient  # type: ignore[attr-defined]

    def _choose(self) -> bool:
        """Choose some parameters with a gradient, spread evenly over all; False if none has a gradient."""
        having = [p for p in _parameters(self.optimizer) if p.grad is not None]
        places = {round((len(having) - 1) * i / (_SENTINELS - 1)) for i in range(_SENTINELS)}
        self.sentinels = [having[place] for place in sorted(places)] if having else []
        return bool(having)

    def used_up(self) -> bool:
        """Whether the gradients are unchanged since the last step, and the next step makes new ones."""
        if self.reused is not False:
            return False
        for parameter, mark in zip(self.sentinels, self.marks, strict=False):
            grad = parameter.grad
            if self.sharded and grad is not None:
                grad = self._inner(grad)
            if mark is None:
                if grad is not None:
                    return False
            elif grad is None or mark[0]() is not grad or grad._version != mark[1]:
                return False
        return any(self.marks)


def flatten(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for the state's objects; those inside dicts and lists are named "entry/key"."""
    for name, value in objects.items():
        value = value.value if isinstance(value, Declaration) else value
        if isinstance(value, dict):
            yield from flatten({f"{name}/{key}": item for key, item in value.items()})
        elif isinstance(value, list):
            yield from flatten({f"{name}/{i}": item for i, item in enumerate(value)})
        else:
            yield name, value


def _driven(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the attribute `optimizer` of an object, and of the objects that it holds."""
    if depth == 0 or isinstance(value, Module | Optimizer | Tensor):
        return
    yield _own(value, "optimizer")
    inside = value if isinstance(value, list | tuple) else getattr(value, "__dict__", value)
    if isinstance(inside, dict):
        inside = list(inside.values())
    if isinstance(inside, list | tuple):
        for each in inside:
            yield from _driven(each, depth - 1)


def _own(value: Any, name: str) -> Any:
    """Return an attribute that an object or its class has; None without it.

    A wrapper's `__getattr__` is not asked: gymnasium's warns of each name that it hands on.
    """
    there = name in getattr(value, "__dict__", ()) or hasattr(type(value), name)
    return getattr(value, name) if there else None


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(item)


def _place(tensor: Tensor) -> int:
    """Return a tensor's address in memory."""
    return local(tensor).untyped_storage().data_ptr()


def optimizers(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Optimizer]]:
    for name, value in pairs:
        if isinstance(value, Optimizer):
            yield name, value
        elif not isinstance(value, Module) and hasattr(value, "state_dict"):
            held = [(k, v) for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, Optimizer)]
            if held and _saves_optimizer(value.state_dict()):
                yield from ((f"{name}.{attribute}", optimizer) for attribute, optimizer in held)


def _saves_optimizer(tree: Any) -> bool:
    return isinstance(tree, dict) and ("param_groups" in tree or any(map(_saves_optimizer, tree.values())))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ------------------------------------------------ modules that training changes and nothing saves
#
# After a resume inside an epoch such a module, a metric, say, lacks the steps before, and the epoch's tail
# reads other values from it.  No step reads it, so a comparison of steps cannot notice that.

_FIRST_LOOK = 3
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
        if self._looks == _FIRST_LOOK:
            self._marks = [(weakref.ref(root), _mark_of(root)) for root in self._outside()]
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
                self._marks.append((reference, now := _mark_of(root)))
                if now != mark:
                    moved.append(root)
        return moved

    def _outside(self) -> list[Module]:
        """List the outermost modules of this process that share no module and no array with the state."""
        ours = {id(part) for root in _modules_in(self._objects) for part in _parts(root)}
        ours |= {id(parameter) for *_, parameter in self._parameters()}
        others = [each for each in alive_modules() if id(each) not in ours]
        inner = {id(part) for each in others for part in each.modules() if part is not each}
        outermost = (each for each in others if id(each) not in inner)
        return [each for each in outermost if ours.isdisjoint(map(id, _parts(each)))]


def _modules_in(value: Any, depth: int = 4) -> Iterator[Module]:
    if isinstance(value, Module):
        yield value
    elif depth:
        inside = value if isinstance(value, dict | list | tuple) else getattr(value, "__dict__", ())
        for each in inside.values() if isinstance(inside, dict) else inside:
            yield from _modules_in(each, depth - 1)


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


def alive_modules() -> Iterable[Module]:
    """List every module of this process; the filter is in C, as there may be a million other objects."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Module)}
    found = compress(objects, map(kinds.__contains__, map(type, objects)))
    return [each for each in found if "_modules" in vars(each)]  # not in the middle of being made


def _parts(root: Module) -> Iterator[Any]:
    yield from root.modules()
    yield from root.parameters()
    yield from root.buffers()


def _mark_of(root: Module) -> list[Any]:
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
