"""Count of optimizers' updates, and search for gradients that are still to be used."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from numbers import Number
from typing import Any, TypeAlias

import torch
import xxhash
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, LRScheduler, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from everstep.backends.numpy import WHOLE
from everstep.backends.torch import given_values, sharded
from everstep.backends.torch.model_wrappers import (
    address,
    alive_modules,
    bare,
    contents,
    flatten,
    inside,
    model_parameters,
    models_of,
    named_parameters,
    optimizers,
    stepped_by,
    stepped_parameters,
)
from everstep.backends.torch.optimizers import Around, layers
from everstep.backends.torch.tensor_memory import can_fill, digest_small
from everstep.backends.torch.virtual_shards import require_saved
from everstep.contracts.state import BASE, KINDS
from everstep.errors import RestoreError

_SENTINELS = 4
_MARK = "_wrapped_by_lr_sched"
_known_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers in the states of all open loops, and those inside: those of another run are not strangers."""
_open_counters: weakref.WeakSet[TorchUpdateCounter] = weakref.WeakSet()

_RECOMPUTED = {
    LambdaLR: ("lr",),
    CosineAnnealingWarmRestarts: ("lr",),
    OneCycleLR: ("lr", "momentum", "betas"),
    CyclicLR: ("lr", "momentum", "betas"),
}
"""Options that a scheduler computes from the step alone; other schedulers change the present value."""


class TorchUpdateCounter:
    """Watch that counts the steps of the state's optimizers through one hook on all optimizers.

    A fused optimizer under a gradient scaler skips an overflowed step on the device; that step is counted.

    Gradients need saving while they are still to be used.  They are used up if the optimizer has stepped with
    them, no backward pass came after (the gradients are the same objects, unchanged), and the program makes
    new gradients for each update, as `zero_grad()` does.  If the same objects ever served two updates (zeroed
    in place, now and then, or never), gradients are always saved.  Which of the two a program does is known
    at its second update, and is saved, too.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.updates = 0
        self._objects = objects
        self._watches: dict[str, _Watch] = {}
        self._find_optimizers()
        scalers = [value for _, value in flatten(objects) if isinstance(value, GradScaler)]
        self._scales = [(scaler, scaler.get_scale()) for scaler in scalers if scaler.is_enabled()]
        self._fsdp = [model for model in models_of(objects) if sharded.fsdp_modules(model)]
        """Models whose parameters are other objects while a forward pass has gathered them."""
        self.outside = TorchUnsavedObjects(objects, self._parameters)
        self._holders: dict[str, int] = {}
        """Most references to each optimizer with a scheduler, when `unscheduled` was called."""
        self._schedulers: weakref.WeakValueDictionary[int, LRScheduler] = weakref.WeakValueDictionary()
        """Schedulers that were alive then, by identity."""
        self._strangers: dict[str, None] = {}
        self._others: weakref.WeakKeyDictionary[Optimizer, bool | None] = weakref.WeakKeyDictionary()
        """Optimizers outside the state: None if they step its arrays, else whether `strangers` was asked
        after they first stepped."""
        _open_counters.add(self)
        self._hook = register_optimizer_step_post_hook(self._note_step)

    def _find_optimizers(self) -> None:
        """Find the optimizers of the state; again later, as an object of the state may make another one."""
        self._layers = {name: layers(optimizer) for name, optimizer in optimizers(self._objects)}
        innermost, old = {name: inner for name, (*_, inner) in self._layers.items()}, self._watches
        inner = {n: [v for v in vars(o).values() if isinstance(v, Optimizer)] for n, o in innermost.items()}
        same = {name: one for name, one in old.items() if one.optimizer is innermost.get(name)}
        self._watches = {name: same.get(name) or _Watch(each) for name, each in innermost.items()}
        self.optimizers = len(self._watches)
        # one inside that has the same groups may make the updates, by SAM's second_step(), say
        self._by_id = {
            id(each): watched
            for name, watched in reversed(self._watches.items())  # of two with one optimizer the first counts
            for each in (*inner[name], watched.optimizer)
            if each.param_groups is watched.optimizer.param_groups
        }
        # also those around them, whose steps torch tells of, too
        self._own_optimizers = [*chain.from_iterable((*self._layers.values(), *inner.values()))]
        _known_optimizers.update(self._own_optimizers)

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._by_id.get(id(optimizer))
        if watched is not None:
            is_inner, was_inner = optimizer is not watched.optimizer, watched.was_inner
            watched.was_inner = is_inner
            if is_inner or not was_inner:  # else it is the end of the step of which the inner one is a part
                self.updates += 1
                watched.note_step()
        elif optimizer not in _known_optimizers:
            self._note_outside_step(optimizer)

    def _note_outside_step(self, optimizer: Optimizer) -> None:
        kind = type(optimizer).__name__
        if optimizer in self._others:
            if self._others[optimizer]:
                self._strangers[f"{kind} of arrays that are not in the state"] = None
            return
        self._find_optimizers()
        if optimizer in _known_optimizers:
            return self._note_step(optimizer, (), {})
        names = {id(p): f"{owner}/{key}" for owner, key, p in self._parameters()}
        targets = [names[id(p)] for p in stepped_by(optimizer) if id(p) in names]
        self._others[optimizer] = None if targets else False
        if targets:
            some = ", ".join(targets[:3]) + (" ..." if len(targets) > 3 else "")
            self._strangers[f"{kind} that steps {len(targets)} of the state's arrays ({some})"] = None

    def digest(self) -> int | None:
        # chosen anew each time, by what the step has: a program may freeze some, or change the groups
        stepped = [[p for p in stepped_by(w.optimizer) if p.requires_grad] for w in self._watches.values()]
        small = [[p for p in some if p.nbytes <= WHOLE] for some in stepped]
        # a bias may not show what a weight does
        digested = [pick(some, key=Tensor.numel) for some in small if some for pick in (min, max)]
        digest, count = digest_small(digested, 0)
        return digest if digested and count == len(digested) else None

    def left_out(self) -> bool:
        """Whether an update was left out because its gradients were not finite; waits for the device."""
        around = [layer for chain in self._layers.values() for layer in chain if isinstance(layer, Around)]
        return any(layer.left_out for layer in around) or any(s.get_scale() < old for s, old in self._scales)

    def strangers(self) -> list[str]:
        """List descriptions of the optimizers that the state lacks, and on which training depends.

        Such an optimizer stepped the state's parameters; or it stepped other arrays both before and after the
        last call of this method: one that is made, used and dropped inside a step does not count.
        """
        for optimizer in [each for each, was_asked in self._others.items() if was_asked is False]:
            self._others[optimizer] = True
        return list(self._strangers)

    def unsaved(self, user: Mapping[str, Any]) -> list[str]:
        """List descriptions of the parameters that the state's optimizers step, and that the state lacks.

        A user's own object may save copies of parameters: a copy is recognised by its shape alone.
        """
        stepped = [*stepped_parameters(self._objects)]
        require_saved((value for _, value in flatten(self._objects)), (each for *_, each in stepped))
        saved = {0}  # address of tensors without elements: there is nothing to save
        copies: Counter[tuple[int, ...]] = Counter()
        for name, value in self._objects.items():
            tensors = [each for each in given_values.arrays(user[name]) if isinstance(each, Tensor)]
            # Compared by storage: a tied parameter may be saved under another name.
            saved.update(map(address, tensors))
            if isinstance(value, Module):
                named = {*user[name], *user[name].get(BASE, ())}
                saved.update(address(p) for key, p in named_parameters(value) if key in named)
            elif not isinstance(value, Tensor | Optimizer | dict | list | torch.Generator):
                copies.update(tuple(tensor.shape) for tensor in tensors)
        missing = []
        for owner, index, parameter in stepped:
            shape = tuple(parameter.shape)
            if address(parameter) in saved:
                continue
            if copies[shape] > 0:
                copies[shape] -= 1
            else:
                missing.append(f"parameter {index} {shape} of {owner!r}")
        return missing

    def unscheduled(self) -> list[str]:
        # torch's schedulers leave this mark, and hold their optimizer: the search is made where one is new
        marked = [n for n, chain in self._layers.items() if any(hasattr(each.step, _MARK) for each in chain)]
        holders = {name: sum(map(sys.getrefcount, self._layers[name])) for name in marked}
        grown = {name: count for name, count in holders.items() if count > self._holders.get(name, 0)}
        if not grown:
            return []
        parts = [each for _, value in flatten(self._objects) for each in contents(value)]
        driven = {id(_attribute(p, "optimizer")) for p in parts if not isinstance(p, Module | Optimizer)}
        alive = [each for each in alive_modules(LRScheduler) if isinstance(each, LRScheduler)]
        saved = {*map(id, parts), *self._schedulers}
        later = {id(_attribute(each, "optimizer")) for each in alive if id(each) not in saved}
        self._schedulers.update({id(each): each for each in alive})
        new, chains = grown.keys() - self._holders.keys(), {n: {*map(id, self._layers[n])} for n in grown}
        self._holders |= grown
        return [n for n, chain in chains.items() if (not driven & chain if n in new else later & chain)]

    def recomputing(self, owner: str, option: str) -> list[str]:
        return [
            f"{type(part).__name__} {name!r}"
            for name, value in flatten(self._objects)
            for part in [value, *(_attribute(value, "_schedulers") or ())]
            if _attribute(part, "optimizer") is self._objects.get(owner)
            and option in next((sets for kind, sets in _RECOMPUTED.items() if isinstance(part, kind)), ())
        ]

    def gradients(self) -> Any:
        """Return the gradients that are still to be used, and whether optimizers reuse theirs.

        The key of a parameter is its name in a model, or its index in its optimizer if no model of the
        state has it.  Returns None if there is nothing to save.
        """
        tree, summed = dict[str, Any](), dict[str, Any]()  # by entry and key
        used_up = {owner for owner, watched in self._watches.items() if watched.used_up()}
        for owner, key, parameter in self._parameters():
            grad = parameter.grad
            if grad is not None and owner not in used_up:
                tree.setdefault(owner, {})[key] = sharded.local(grad) if sharded.is_sharded(grad) else grad
                if (sums := sharded.unmade_sums(grad, parameter)) is not None:
                    summed.setdefault(owner, {})[key] = sums
        reused = {  # after a resume nobody holds gradients that were not saved
            owner: [watched.reused, watched.holds_last_gradients() if owner not in used_up else False]
            for owner, watched in self._watches.items()
        }
        saved: dict[str, Any] = {"grad": tree, "reused": reused} if tree or reused else {}
        if summed:
            saved["summed"] = summed
        if self._fsdp and (opened := sharded.window(self._fsdp)):
            saved["window"] = opened
        return saved or None

    def load_gradients(self, tree: Any) -> None:
        self._find_optimizers()
        tree = tree or {"grad": {}, "reused": {}}
        saved = {(owner, key): grad for owner, grads in tree["grad"].items() for key, grad in grads.items()}
        summed = tree.get("summed", {})
        for owner, key, parameter in self._parameters():
            grad = saved.pop((owner, key), None)
            if grad is not None:
                grad = grad.to(parameter.device, copy=True)  # the program changes gradients in place
                if sharded.is_sharded(parameter):
                    grad = sharded.layout(parameter).tensor(grad, summed.get(owner, {}).get(key, ()))
            live = parameter.grad
            if live is not None and live.grad_fn is None and can_fill(live, grad):
                live.detach().copy_(grad.detach())  # it may be a view of one tensor that has all gradients
            else:
                parameter.grad = grad
        for owner, watched in self._watches.items():
            watched.resume(*tree["reused"].get(owner, (None, None)))
        sharded.load_window(self._fsdp, tree.get("window", {}))
        if saved:
            names = [f"{owner}/{key}" for owner, key in saved]
            raise RestoreError("saved gradients belong to no parameter", unexpected=names)

    def _parameters(self) -> Iterable[tuple[str, int | str, Tensor]]:
        """Return (entry, name or index, parameter), each parameter once; those of optimizers come first."""
        models = list(model_parameters(self._objects))  # first: it puts away what a forward pass has gathered
        names = {id(p): f"{owner}.{name}" if name else owner for owner, name, p in reversed(models)}
        first: dict[int, tuple[str, int | str, Tensor]] = {}
        for owner, watched in self._watches.items():
            for index, parameter in enumerate(stepped_by(watched.optimizer)):
                first.setdefault(id(parameter), (owner, names.get(id(parameter), index), parameter))
        for owner, name, parameter in models:
            first.setdefault(id(parameter), (owner, name or 0, parameter))
        return first.values()

    def close(self) -> None:
        self._hook.remove()
        _known_optimizers.difference_update(self._own_optimizers)
        _open_counters.discard(self)


_Mark: TypeAlias = tuple[weakref.ref[Tensor], int] | None
"""A gradient and its count of changes; weak, as it must not live on, and an address may be used again."""


class _Watch:
    """Optimizer of the state, with marks of the gradients of its last step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.sentinels: list[Tensor] = []
        self.sharded = any(map(sharded.is_sharded, stepped_by(optimizer)))
        self.marks: list[_Mark] = []
        self.was_inner = False
        """Whether the last step was that of an optimizer inside this one."""
        self.reused: bool | None = None
        """Whether two updates in a row ever used the same gradient objects; None before the second."""
        self.gradients_gone = False
        """Whether the last update was made before a resume, so that its gradients are gone."""
        self._updates = 0
        self._all_marks: list[_Mark] = []
        """Marks of all gradients; empty unless the update was the 1st, 2nd, 4th, 8th ... of the start."""

    def _marks_of(self, parameters: list[Tensor]) -> list[_Mark]:
        """Mark the gradients of some parameters as they are; each update comes here with the sentinels."""
        marks: list[_Mark] = []
        for parameter in parameters:
            grad = parameter.grad
            if self.sharded and grad is not None and sharded.is_sharded(grad):
                grad = grad._local_tensor  # type: ignore[attr-defined]  # `fully_shard` adds to this one
            marks.append(None if grad is None else (weakref.ref(grad), grad._version))
        return marks

    def note_step(self) -> None:
        """Mark the gradients with which the optimizer has stepped."""
        last, marks = self.marks[0] if self.marks else None, self._marks_of(self.sentinels)
        self._updates += 1
        if not self.reused:
            if last is not None:
                self.reused = marks[0] is not None and marks[0][0]() is last[0]()
            elif self.gradients_gone:
                self.reused = False
            # now and then all are compared: a program may zero some gradients of an optimizer, and sum others
            if self._all_marks:
                present = self._marks_of(stepped_by(self.optimizer))
                if any(a and b and a[0]() is b[0]() for a, b in zip(self._all_marks, present, strict=False)):
                    self.reused = True
            is_looked_at = self._updates & (self._updates - 1) == 0
            self._all_marks = self._marks_of(stepped_by(self.optimizer)) if is_looked_at else []
        if not (marks and marks[0]) and self._choose_sentinels():  # the first update, or one of others
            marks = self._marks_of(self.sentinels)
        self.marks, self.gradients_gone = marks, False

    def holds_last_gradients(self) -> bool | None:
        """Whether the gradients are still the objects of the last update; None before the first update."""
        last = self.marks[0] if self.marks else None
        if last is None:
            return False if self.gradients_gone else None
        present = self._marks_of(self.sentinels)[0]
        return present is not None and present[0]() is last[0]()

    def resume(self, reused: bool | None, held: bool | None) -> None:
        """Take over the saved facts; restored gradients count as still to be used."""
        self.reused, self.marks, self.gradients_gone = reused, [], held is False
        if held and self._choose_sentinels():
            self.marks = [mark and (mark[0], -1) for mark in self._marks_of(self.sentinels)]

    def _choose_sentinels(self) -> bool:
        """Choose some parameters with a gradient, spread evenly over all; False if none has a gradient."""
        candidates = [p for p in stepped_by(self.optimizer) if p.grad is not None]
        places = {round((len(candidates) - 1) * i / (_SENTINELS - 1)) for i in range(_SENTINELS)}
        self.sentinels = [candidates[place] for place in sorted(places)] if candidates else []
        return bool(candidates)

    def used_up(self) -> bool:
        """Whether the gradients are unchanged since the last step, and the next step makes new ones."""
        if self.reused is not False or not any(self.marks):
            return False
        return all(
            mark is last is None
            or (mark is not None and last is not None and mark[0]() is last[0]() and mark[1] == last[1])
            for mark, last in zip(self._marks_of(self.sentinels), self.marks, strict=True)
        )


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute that an object or its class has; None without it.

    A wrapper's `__getattr__` is not asked: gymnasium's warns of each name that it hands on.
    """
    exists = name in getattr(value, "__dict__", ()) or hasattr(type(value), name)
    return getattr(value, name) if exists else None


# ------------------------------------------------ what training changes and nothing saves
#
# After a resume inside an epoch a module outside the state, a metric, say, lacks the steps before, and the
# epoch's tail reads other values from it.  No step reads it, so a comparison of steps cannot notice that.

_FIRST_LOOK = 3
"""Step of a start after which objects are searched: the first steps may still make some."""
_MOST = 2_000
"""Number of values inside attributes that are looked at, and of items of a container 100."""
_FOREIGN = {"torch", "everstep", *sys.stdlib_module_names}
"""Packages whose objects are not looked into: what they change has nothing to do with a step."""


class TorchUnsavedObjects:
    """Finder of what steps change and nothing saves, asked after each of the first steps of a start.

    Looked at are modules and scalers outside the state, and the attributes of the task, of the state's
    modules and of optimizers with a class of their own: objects of other classes in them are not saved.
    """

    def __init__(
        self, objects: Mapping[str, Any], parameters: Callable[[], Iterable[tuple[Any, Any, Tensor]]]
    ) -> None:
        self._objects, self._parameters = objects, parameters
        self._looks = self._epoch = 0
        self._task: Any = None
        self._task_is_saved = False
        self._outside: list[weakref.ref[Any]] = []
        """Modules and scalers that share nothing with the state."""
        self._marks: dict[tuple[str, int], Any] | None = None
        """Marks of values by their paths, and a number where paths are equal; None before the first look."""

    def watch(self, task: Any, *, saved: bool) -> None:
        self._task, self._task_is_saved = task, saved

    def changed(self, epoch: int) -> list[str]:
        """List what the last step has changed, each once: paths of attributes, else classes of modules.

        A change between two epochs counts as made by no step.
        """
        self._looks += 1
        if self._looks == _FIRST_LOOK:
            self._outside = list(map(weakref.ref, self._find_outside()))
            self._marks = self._take_marks()
        old, in_epoch, self._epoch = self._marks, epoch == self._epoch, epoch
        self.skip()
        if not old or not self._marks or not in_epoch:
            return []
        now, is_same = self._marks, given_values.is_same_mark
        changed = (key[0] for key, mark in now.items() if key in old and not is_same(old[key], mark))
        return list(dict.fromkeys(changed))

    def skip(self) -> None:
        if self._marks is not None:
            self._marks = self._take_marks()

    def _take_marks(self) -> dict[tuple[str, int], Any]:
        seen = self._find_state_ids()
        leaves = islice(self._leaves(seen, 100), _MOST)
        marks = {(path, 0): given_values.mark_of(value) for path, value, _ in leaves}
        of_task = {} if self._task is None else given_values.attributes(self._task)
        names = {id(value): name for name, value in of_task.items()}
        for reference in self._outside:
            if (root := reference()) is not None and id(root) not in seen:
                marks[names.get(id(root), type(root).__name__), id(root)] = _number_marks(root)
        return marks

    def numbers(self) -> dict[str, Any]:
        models = [(name, value) for name, value in flatten(self._objects) if isinstance(value, Module)]
        kinds = {f"{name}.{KINDS}": _kinds_in(model) for name, model in models}
        leaves = self._leaves(self._find_state_ids(), 0)
        return kinds | {path: value for path, value, owner in leaves if _is_number(path, value, owner)}

    def _leaves(self, seen: set[int], most: int) -> Iterator[tuple[str, Any, Any]]:
        """Yield (path, value, owner) of all that attributes hold and nothing saves."""
        for where, owner, saved in self._owners():
            for name, value in given_values.attributes(owner).items():
                if not (saved and given_values.is_saveable(value)):
                    leaves = _leaves(where + name, value, owner, seen, most)
                    yield from (each for each in leaves if not each[0].endswith(("time", "timer")))

    def _find_state_ids(self) -> set[int]:
        parts = (part for each in contents(self._objects) for part in _parts(each))
        return {id(part) for part in parts if type(part) not in given_values.SCALARS}

    def _owners(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield the beginning of a path, an object, and whether what can be saved of its attributes is."""
        if self._task is not None:
            yield "", self._task, self._task_is_saved
        for name, value in flatten(self._objects):
            if isinstance(value, Module):
                for path, module in given_values.owners(value):
                    yield f"{name}.{path}.".replace("..", "."), module, True
            elif isinstance(value, Optimizer):
                yield from ((f"{name}.", layer, True) for layer in layers(value) if not _is_foreign(layer))

    def _find_outside(self) -> list[Module | GradScaler]:
        """List the outermost modules and the scalers that share nothing with the state of an open run."""
        ids_in_states = (counter.outside._find_state_ids() for counter in _open_counters)
        state_ids = {id(parameter) for *_, parameter in self._parameters()}.union(*ids_in_states)
        others = [each for each in alive_modules(GradScaler) if id(each) not in state_ids]
        inner = {id(part) for each in others for part in _parts(each) if part is not each}
        return [
            each for each in others if id(each) not in inner and state_ids.isdisjoint(map(id, _parts(each)))
        ]


def _is_foreign(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _FOREIGN


def _leaves(
    path: str, value: Any, owner: Any, seen: set[int], most: int, depth: int = 4
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value, owner) of what an object holds in attributes and containers, down to a depth.

    Of a container that is its length, as its items may hold nothing, and what `most` items hold.
    """
    if id(value) in seen:  # the state may hold what a part of the task holds, too
        return
    is_container = isinstance(value, dict | list | tuple | set | deque)
    # of a million items not one is looked at if none is asked for
    if isinstance(value, Tensor | Number) or ((most or not is_container) and given_values.is_saveable(value)):
        yield path, value, owner
        return
    parts: Iterable[tuple[str, Any]] = ()
    if is_container:
        if type(value).__module__ in ("builtins", "collections"):  # no code of the program runs
            yield path, f"{len(value)} items", owner
        parts = islice(inside(value), most) if most else ()
    elif isinstance(value, _Loss):
        values = given_values.attributes(value) | value._buffers
        parts = [(f".{name}", each) for name, each in values.items()]
    elif isinstance(value, Module) or _is_foreign(value):  # modules are looked at by themselves
        return
    else:
        parts = inside(value)
    seen.add(id(value))
    for place, each in parts if depth else ():
        yield from _leaves(path + place, each, value, seen, most, depth - 1)


def _is_number(path: str, value: Any, owner: Any) -> bool:
    """Whether a leaf is a number or a name that an object holds, or an array of a loss.

    A string that is no name (a mode, a phase) is a line for a log, which is written before it is read; other
    arrays may be sums of an evaluation, which the next one resets.
    """
    place, _, name = path.rpartition(".")
    if not place or name.startswith("_"):
        return False
    is_name, is_array = type(value) is str and value.isidentifier(), type(value) is Tensor
    return is_name or (is_array and isinstance(owner, _Loss)) or isinstance(value, Number)


def _kinds_in(model: Module) -> str:
    """Digest the classes of a model's parts in their order; of parts with tensors the state has the names."""
    parts = (
        each for each in model.modules() if not (each._parameters or each._buffers) and bare(each) is each
    )
    names = " ".join(f"{type(each).__module__}.{type(each).__qualname__}" for each in parts)
    return xxhash.xxh3_64_hexdigest(names.encode())


def _parts(root: Any) -> Iterator[Any]:
    yield root
    if isinstance(root, Module):
        yield from (*root.modules(), *root.parameters(), *root.buffers())
    if isinstance(root, Optimizer):
        yield from (root.state, root.param_groups, *root.param_groups)


def _number_marks(root: Module | GradScaler) -> list[Any]:
    places = [vars(root)]
    if isinstance(root, Module):
        places = [place for part in root.modules() for place in (vars(part), part._parameters, part._buffers)]
    values = (value for place in places for value in place.values())
    return [given_values.mark_of(v) for v in values if isinstance(v, Tensor) or type(v) in (int, float)]
