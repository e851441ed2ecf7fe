"""Entries for torch's own objects: saved, checked and restored to the bit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from everstep.backends.numpy import GeneratorEntry
from everstep.backends.torch import given_values
from everstep.backends.torch.model_wrappers import (
    BareNames,
    address,
    bare,
    contents,
    model_parameters,
    stepped_by,
    tensors_of,
)
from everstep.backends.torch.optimizers import WINDOW, Around, innermost, layers
from everstep.backends.torch.sharded import is_sharded, laid_like, layout, precision, reshard
from everstep.backends.torch.tensor_memory import PLAIN, can_fill, place_of, raise_failure
from everstep.contracts.state import BESIDE, Entry, Mismatch, StateDictEntry, Stateful
from everstep.errors import StateError

_CLASS, _INNER, _NAMES = "class", "inner", "names"
_METADATA = "_metadata"
"""Key of the versions of submodules in a module's tree, as in torch's own state_dict."""
_BUFFERS = "_buffers"
"""Key of the buffers that the state_dict leaves out, and of those that are None: training may change them."""
_FLAGS = "_flags"
"""Key of the names of submodules in evaluation mode and of frozen parameters."""
_LOADERS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
"""Methods of modules that load a state_dict."""
_ATTRIBUTES = "_attributes"
"""Key of the plain attributes of submodules that training has changed."""


def make_entry(value: Any) -> Entry | None:
    """Make the entry of one of torch's objects; None for other values."""
    entry = next((make(value) for kind, make in _ENTRIES.items() if isinstance(value, kind)), None)
    if entry is None and _wraps_scheduler(value):
        return given_values.SchedulerEntry(value)
    return given_values.ScheduleEntry(value) if entry is None and _is_schedule(value) else entry


def _wraps_scheduler(value: Any) -> bool:
    """Whether an object has a scheduler inside, and its state alone: as accelerate's have."""
    inner = getattr(value, "scheduler", None)
    if not isinstance(inner, LRScheduler) or not isinstance(value, Stateful):
        return False
    return bool(value.state_dict().keys() == inner.state_dict().keys())


def _is_schedule(value: Any) -> bool:
    """Whether an object steps an optimizer, or its rate, and has a state: as timm's schedulers do."""
    holds = any(isinstance(each, torch.optim.Optimizer) for each in getattr(value, "__dict__", {}).values())
    is_optimizer = hasattr(value, "param_groups")  # one that wraps another
    return holds and not is_optimizer and isinstance(value, Stateful) and hasattr(value, "step")


class ModuleEntry(Entry):
    """Entry of a module: its `state_dict`, the buffers and plain attributes missing there, and its flags.

    Names are those of the bare model.  Flags are restored only if the program made the module with the same
    flags as before: other flags are meant to change the training, and stay.
    """

    copies = True

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = bare(module)
        reshard(self.module)
        self._sharded = self._sharded_names()
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if is_lazy(tensor):
                raise StateError(
                    f"{name!r} of a lazy module has no shape yet: run one batch through the model first"
                )
        self._refresh_names()
        self._first_flags = self._flags()
        self._places: given_values.Places = lambda: addresses([self.module])

    def relate(self, entries: Mapping[str, Entry]) -> None:
        self._places = places_of(entries)

    @property
    def may_refuse(self) -> bool:  # type: ignore[override]
        """Whether its classes, or hooks, have a part in loading."""
        return any(
            inner._load_state_dict_pre_hooks
            or inner._load_state_dict_post_hooks
            or any(not getattr(type(inner), name).__module__.startswith("torch.") for name in _LOADERS)
            for inner in self.module.modules()
        )

    def options(self) -> dict[str, str]:
        policy = precision(self.module) if self._sharded else ""
        return {"mp_policy": policy} if policy else {}

    def _refresh_names(self) -> BareNames:  # training may add parts
        self._names = BareNames(self.module)
        return self._names

    def _sharded_names(self) -> set[str]:
        return {name for name, parameter in self.module.named_parameters() if is_sharded(parameter)}

    def _require_as_made(self) -> None:
        """Refuse a module that was sharded since the loop was made: its optimizer steps other tensors."""
        reshard(self.module)
        if changed := sorted(self._sharded_names() ^ self._sharded):
            raise StateError(
                f"{changed[0]!r} was sharded after the loop was made (fully_shard, parallelize_module): "
                "shard the model first, then make the optimizer from its parameters, then the loop"
            )

    def layouts(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        names = self._refresh_names()
        yield from (((names.bare(name),), tensor) for name, tensor in self.module.state_dict().items())

    def save(self) -> Any:
        names = self._refresh_names()
        state = self.module.state_dict()
        # by the types, as each call costs every save: plain tensors that were plain need no look
        if self._sharded or not PLAIN.issuperset(map(type, state.values())):
            self._require_as_made()
        tree = {names.bare(name): value for name, value in state.items()}
        plain = {"version": 1}
        versions = {names.bare(name): v for name, v in getattr(state, _METADATA, {}).items() if v != plain}
        if versions:
            tree[_METADATA] = versions
        left_out = {n: b for n, b in self.module.named_buffers() if n not in state} | self._empty_buffers()
        if buffers := {names.bare(name): buffer for name, buffer in left_out.items()}:
            tree[_BUFFERS] = buffers
        if changed := given_values.save_attributes(self.module, self._places):
            tree[_ATTRIBUTES] = {names.bare(path): own for path, own in changed.items()}
        return {**tree, _FLAGS: {**self._made(), "now": _listed(self._flags(), "evaluating", "frozen")}}

    def _made(self) -> dict[str, Any]:
        """Return the flags with which the program made the module, and its empty buffers."""
        flags = given_values.FLAGS.copies(self.module) or self._first_flags
        return {"made": _listed(flags, "evaluating", "frozen"), **_listed(flags, "empty")}

    def _empty_buffers(self) -> dict[str, None]:
        """Return the names of the buffers that are None now."""
        parts = self.module.named_modules()
        own = ((f"{path}.{key}".lstrip("."), b) for path, part in parts for key, b in part._buffers.items())
        return {name: None for name, buffer in own if buffer is None}

    def _flags(self) -> dict[tuple[str, str], bool]:
        """Return (kind, bare name) -> whether a module is evaluating, a parameter frozen, a buffer empty."""
        module, empty = self.module, self._empty_buffers()
        flags = [
            ("evaluating", n, not each.training) for n, each in module.named_modules() if bare(each) is each
        ]
        flags += [("frozen", name, not each.requires_grad) for name, each in module.named_parameters()]
        flags += [("empty", n, n in empty) for n in (*empty, *(n for n, _ in module.named_buffers()))]
        return {(kind, self._names.bare(name)): is_set for kind, name, is_set in flags}

    def check(self, tree: Any) -> Mismatch:
        return self.expects()(tree)

    def expects(self) -> Callable[[Any], Mismatch]:
        kind = type(self.module).__name__
        names = self._refresh_names()
        live = {name: _shape(value) for name, value in self.module.state_dict().items()}
        modules = {path for path, _ in self.module.named_modules()}
        empty = self._empty_buffers()

        def check(tree: Any) -> Mismatch:
            if not isinstance(tree, dict):
                return Mismatch([], [], [f"a {type(tree).__name__} -> a {kind}"])
            saved = {names.live(name): _shape(value) for name, value in tree.items() if name not in BESIDE}
            owners = map(names.live, tree.get(_ATTRIBUTES, {}))
            differing = [n for n in live if n in saved and saved[n] != live[n] and not self._resizes(n)]
            # training fills and empties buffers; those that the program makes otherwise now do not fit
            changed = {*tree.get(_FLAGS, {}).get("empty", ())} ^ {*self._made()["empty"]}
            emptied = {
                names.live(name)
                for name, buffer in tree.get(_BUFFERS, {}).items()
                if buffer is None and name not in changed
            }
            fit = {*live, *(name for name in empty if names.bare(name) not in changed)}
            return Mismatch(
                [names.bare(name) for name in live if name not in saved and name not in emptied],
                [name for name in saved if name not in fit] + [m for m in owners if m not in modules],
                [f"{names.bare(n)} {saved[n]} -> {live[n]}" for n in differing],
            )

        return check

    def _resizes(self, name: str) -> bool:
        """Whether a buffer's owner loads it in any shape: observers of quantization do so."""
        owner, _, key = name.rpartition(".")
        module = self.module.get_submodule(owner)
        has_own = type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
        return has_own and not given_values.is_layer(module) and key in module._buffers

    def load(self, tree: Any) -> None:
        self._require_as_made()
        self.check(tree).require_none()
        names = self._refresh_names()
        live = {names.live(name): value for name, value in tree.items() if name not in BESIDE}
        buffers = {names.live(name): value for name, value in tree.get(_BUFFERS, {}).items()}
        empty = self._empty_buffers()
        for name, value in (buffers | {name: live[name] for name in empty if name in live}).items():
            self._load_buffer(name, value)  # first those that are None here, or were: the others have places
        present = self.module.state_dict()
        state = OrderedDict((name, laid_like(present.get(name), value)) for name, value in live.items())
        metadata = {name: {"version": 1} for name in getattr(present, _METADATA, {})}
        metadata |= {names.live(name): about for name, about in tree.get(_METADATA, {}).items()}
        state._metadata = metadata  # type: ignore[attr-defined]
        try:
            self.module.load_state_dict(state)
        except RuntimeError:
            raise_failure(state.values())
            raise
        attributes = {names.live(path): own for path, own in tree.get(_ATTRIBUTES, {}).items()}
        given_values.load_attributes(self.module, attributes, self._places)
        if (flags := tree.get(_FLAGS)) and flags["made"] == self._made()["made"]:
            for name, module in self.module.named_modules():
                module.training = names.bare(name) not in flags["now"]["evaluating"]
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_(names.bare(name) not in flags["now"]["frozen"])

    def _load_buffer(self, name: str, saved: Tensor | None) -> None:
        """Load a buffer in place if the shape fits; one that has grown, as a cache does, is replaced."""
        path, _, key = name.rpartition(".")
        try:
            owner = self.module.get_submodule(path)
        except AttributeError:  # a part that this program has no more
            return
        live = owner._buffers.get(key)
        if saved is not None and live is not None and _shape(live) == _shape(saved):
            live.detach().copy_(saved.detach())  # detached: the buffer gets no gradient's graph
        elif key in owner._buffers and saved is None:
            owner._buffers[key] = None
        elif key in owner._buffers and saved is not None:
            beside = live if live is not None else next(tensors_of([owner, self.module]), saved)
            live = owner._buffers[key] = saved.detach().to(beside.device, copy=True)
        if live is not None and saved is not None and live.is_leaf:
            live.requires_grad_(saved.requires_grad)  # which a step may have set

    def enter(self, run: str | None = None) -> None:
        given_values.enter_attributes(self.module)
        if run is not None:
            given_values.enter_flags(self.module, self._flags(), run)

    def leave(self) -> None:
        given_values.leave_attributes(self.module)
        given_values.FLAGS.leave(self.module, self._flags())

    def guarded(self, path: tuple[Any, ...]) -> bool:
        owner, _, name = self._names.live(str(path[0])).rpartition(".")
        try:
            return name in self.module.get_submodule(owner)._parameters
        except AttributeError:
            return False


def _listed(flags: Mapping[tuple[str, str], bool], *kinds: str) -> dict[str, list[str]]:
    """Return the names of each kind whose flag is set."""
    return {kind: [name for (each, name), on in flags.items() if on and each == kind] for kind in kinds}


class OptimizerEntry(given_values.OptionsEntry):
    """Entry of an optimizer: class, options of groups, state of each parameter, attributes of its own class.

    A wrapper has the class and state of the wrapped optimizer, and also options and state of its own.
    torch's state knows a parameter by its number.  Saved are also the names that the state's models have for
    the parameters: where the program lists them in another order, they get the saved one.
    """

    # each rank counts the elements of its own parts of the batches
    rank_keys = (WINDOW,)
    on_growth = (
        "make all groups before the loop opens, frozen (requires_grad_) or with lr=0 until their epoch"
    )

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        try:
            keys = optimizer.state_dict().keys()
        except RuntimeError as error:
            raise StateError(
                f"the state_dict() of {type(optimizer).__name__} raised {error!r}; an optimizer of which "
                "each rank has a part (ZeroRedundancyOptimizer) cannot be saved: use fully_shard, as "
                "examples/fsdp.py does"
            ) from error
        if lacks := sorted({"state", "param_groups"} - keys):
            raise StateError(
                f"the state_dict of {type(optimizer).__name__} has no {' and no '.join(map(repr, lacks))}, "
                "so no resume could load it: give the optimizer inside it, and beside it what this one adds"
            )
        self._sharded = any(map(is_sharded, stepped_by(self.obj)))
        self._models: dict[str, torch.nn.Module] = {}
        self._places: given_values.Places = lambda: addresses(stepped_by(self.obj))

    def relate(self, entries: Mapping[str, Entry]) -> None:
        self._places = places_of(entries)
        self._models = {name: each.module for name, each in entries.items() if isinstance(each, ModuleEntry)}

    def _names(self) -> list[str]:
        """Return the names of the parameters in the state's models; [] unless each has one of its own.

        They are looked up at each call: training may give a parameter another place in its model.
        """
        in_models = reversed([*model_parameters(self._models)])  # of two models that share it, the first one
        names = {id(parameter): f"{entry}/{name}" for entry, name, parameter in in_models}
        stepped = list(map(id, stepped_by(self.obj)))
        found = [names[number] for number in stepped if number in names]
        return found if len(found) == len(stepped) else []

    def save(self) -> Any:
        if self._sharded:
            self._require_restorable()
        tree = {**self.obj.state_dict(), _CLASS: self._class}
        if names := self._names():
            tree[_NAMES] = names
        saved = [(n, given_values.save_attributes(layer, self._places)) for n, layer in self._layers()]
        if own := {number: attributes[""] for number, attributes in saved if attributes}:
            tree[_ATTRIBUTES] = own
        if inner := {name: each.state_dict() for name, each in self._inner()}:
            tree[_INNER] = inner
        return tree

    def _layers(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        """Yield the optimizer and those that it wraps, numbered from the innermost; none of our own."""
        for number, layer in enumerate(reversed(layers(self.obj))):
            if not isinstance(layer, Around):
                yield str(number), layer

    def _inner(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        """Yield the optimizers that an optimizer's own class calls, as SAM and Lookahead do."""
        for number, layer in self._layers():
            for name, value in vars(layer).items():
                if isinstance(value, torch.optim.Optimizer) and value not in layers(self.obj):
                    yield f"{number}.{name}", value

    def layouts(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        yield from ((("state", index), parameter) for index, parameter in enumerate(stepped_by(self.obj)))

    def _require_restorable(self) -> None:
        """Refuse state of a sharded parameter that is held otherwise than the parameter."""
        for index, parameter in enumerate(stepped_by(self.obj)):
            for name, value in self.obj.state.get(parameter, {}).items():
                if is_sharded(value) and not (is_sharded(parameter) and layout(value) == layout(parameter)):
                    raise StateError(
                        f"{self._class} keeps {name!r} of parameter {index} as {tuple(value.shape)} with "
                        f"placements {value.placements}, which is not the layout of its parameter; use an "
                        "optimizer such as AdamW"
                    )

    @property
    def _class(self) -> str:
        return type(innermost(self.obj)).__qualname__

    def check(self, tree: Any) -> Mismatch:
        return self.expects()(tree)

    def expects(self) -> Callable[[Any], Mismatch]:
        live = [len(group["params"]) for group in self.obj.param_groups]
        names = self._names()

        def check(tree: Any) -> Mismatch:
            required = ("state", "param_groups", _CLASS)
            missing = [key for key in required if not isinstance(tree, dict) or key not in tree]
            if missing:
                return Mismatch(missing, [], [])
            saved = [len(group["params"]) for group in tree["param_groups"]]
            reshaped = [] if saved == live else [f"parameters per group {saved} -> {live}"]
            if tree[_CLASS] != self._class:
                reshaped.append(f"{tree[_CLASS]} -> {self._class}")
            if not reshaped and (order := _order(names, tree)) is not None:
                groups = [number for number, count in enumerate(live) for _ in range(count)]
                states = [each if isinstance(each, dict) else {"": [each]} for each in tree["state"].values()]
                values = [tree.get(_ATTRIBUTES), *(value for state in states for value in state.values())]
                # one tensor for all parameters, as LBFGS has in lists, has their order inside
                is_bound = self._sharded or any(isinstance(value, dict | list) for value in values)
                moved = [
                    n for n, old in enumerate(order) if n != old and (is_bound or groups[n] != groups[old])
                ]
                reshaped += [f"{names[n]} is parameter {n}, and was parameter {order[n]}" for n in moved[:3]]
            return Mismatch([], [], reshaped)

        return check

    def load(self, tree: Any) -> None:
        self.check(tree).require_none()
        if (order := _order(self._names(), tree)) is not None:
            # what goes through the parameters, as a norm of all gradients does, has the bits of their order
            old_indices = iter(order)
            for group in self.obj.param_groups:
                places = [next(old_indices) for _ in group["params"]]
                for key in group.keys() & {"params", "param_names"}:
                    pairs = zip(places, group[key], strict=True)
                    group[key][:] = [each for _, each in sorted(pairs, key=itemgetter(0))]
        parameters = stepped_by(self.obj)
        tree = {**tree, "state": {index: _laid(parameters, index, s) for index, s in tree["state"].items()}}
        beside = (_CLASS, _ATTRIBUTES, _INNER, _NAMES)
        inner = dict(self._inner())
        with _same_objects([*layers(self.obj), *inner.values()], self._places):
            self.obj.load_state_dict({key: part for key, part in tree.items() if key not in beside})
            for name in inner.keys() & tree.get(_INNER, {}):
                inner[name].load_state_dict(tree[_INNER][name])
            for index, saved in tree["state"].items():
                owner = parameters[index] if isinstance(index, int) else index
                if isinstance(live := self.obj.state.get(owner), dict):
                    live.update(_uncast(live, saved))
                elif live is not None:  # by a name of its own, as MADGRAD has the number of updates
                    self.obj.state[owner] = _uncast(live, saved)
        for number, layer in self._layers():
            attributes = {"": tree.get(_ATTRIBUTES, {}).get(number, {})}
            given_values.load_attributes(layer, attributes, self._places)
        # The optimizer has stepped before the resume: without this mark schedulers warn of a wrong order.
        for layer in layers(self.obj):
            layer._opt_called = True  # type: ignore[attr-defined]

    def enter(self, run: str | None = None) -> None:
        super().enter(run)
        for _, layer in self._layers():
            given_values.enter_attributes(layer)

    def leave(self) -> None:
        super().leave()
        for _, layer in self._layers():
            given_values.leave_attributes(layer)

    def guarded(self, path: tuple[Any, ...]) -> bool:
        return bool(path) and path[0] == "state"

    def options(self) -> dict[str, str]:
        around = [layer.options() for layer in layers(self.obj) if isinstance(layer, Around)]
        return {name: text for own in (super().options(), *around) for name, text in own.items()}

    def use_options(self, names: Collection[str]) -> None:
        options = given_values.given_options(self.obj)
        for name in names:
            index, _, key = name.rpartition(".")
            group = self.obj.param_groups[int(index or 0)]
            key = "initial_lr" if key == "lr" and "initial_lr" in group else key
            if (name := f"{int(index or 0)}.{key}") in options:
                given_values.set_option(group, key, options[name])


@contextmanager
def _same_objects(optimizers: Iterable[torch.optim.Optimizer], places: given_values.Places) -> Iterator[None]:
    """Let a load fill the groups and the state that optimizers have: it makes new ones, as torch does.

    The program, or an optimizer around these, may hold them: `groups = optimizer.param_groups`, a rate in a
    tensor, which a compiled step reads, one tensor of which all moments are views.
    """
    own = [each for each in optimizers if vars(each).keys() >= {"param_groups", "state"}]
    held = [(each, each.param_groups, [*each.param_groups], each.state) for each in own]
    of_models, filled = places(), dict[Any, Tensor]()  # the models load their own memory
    yield
    for optimizer, group_list, groups, state in held:
        _fill(state, optimizer.state, of_models, filled)
        for live, loaded in zip(groups, optimizer.param_groups, strict=True):
            _fill(live, loaded, of_models, filled)
        group_list[:] = groups
        optimizer.param_groups, optimizer.state = group_list, state


def _fill(
    live: dict[Any, Any], loaded: dict[Any, Any], of_models: Collection[int], filled: dict[Any, Tensor]
) -> None:
    """Give a dictionary the contents of another one; its tensors get the elements, and are `filled`."""
    contents = dict(loaded)
    for key, value in live.items():
        new: Any = contents.get(key)
        if isinstance(value, dict) and isinstance(new, dict):
            _fill(value, new, of_models, filled)
            contents[key] = value
        elif can_fill(value, new) and address(value) not in of_models:
            if (first := filled.setdefault(place_of(value), new)) is new:
                value.detach().copy_(new)
            if first is new or torch.equal(first, new):  # else the run had two where the constructor made one
                contents[key] = value
    live.clear()
    live.update(contents)


def _order(names: list[str], tree: Any) -> list[int] | None:
    """Return the saved number of each parameter; None if it is the same, or other names were saved."""
    saved = tree.get(_NAMES, [])
    if names == saved or set(names) != set(saved) or len(names) != len(saved):
        return None
    numbers = {name: number for number, name in enumerate(saved)}
    return [numbers[name] for name in names]


class ScalerEntry(StateDictEntry):
    def load(self, tree: Any) -> None:
        super().load(tree)
        if self.obj.is_enabled():
            # Without this, the gradients of the next step in this process would count as unscaled already.
            self.obj._per_optimizer_states.clear()


class TensorEntry(Entry):
    """Entry of a tensor or parameter; restored in place."""

    may_refuse = False

    def __init__(self, tensor: Tensor) -> None:
        if is_lazy(tensor):
            raise StateError("a lazy parameter has no shape yet: run one batch through the model first")
        if tensor.grad_fn is not None:
            raise StateError("a tensor with a graph cannot be restored in place: save tensor.detach()")
        self.tensor = tensor

    def save(self) -> Any:
        return self.tensor.detach()

    def layouts(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        yield (), self.tensor

    def check(self, tree: Any) -> Mismatch:
        saved, live = _shape(tree), _shape(self.tensor)
        return Mismatch([], [], [] if saved == live else [f"{saved} -> {live}"])

    def load(self, tree: Any) -> None:
        self.check(tree).require_none()
        with torch.no_grad():
            self.tensor.copy_(laid_like(self.tensor, tree))

    def guarded(self, path: tuple[Any, ...]) -> bool:
        return self.tensor.is_floating_point() or self.tensor.is_complex()


class TorchGeneratorEntry(GeneratorEntry):
    """Entry of a `torch.Generator` on any device."""

    def as_seeded(self) -> bool:
        """Whether the state is the one that the seed gives."""
        anew = torch.Generator(self.generator.device).manual_seed(self.generator.initial_seed())
        return torch.equal(anew.get_state(), self.generator.get_state())

    def form(self, tree: Any) -> str:
        """Name the size: the states of CPU and CUDA generators differ there."""
        return f"generator state {_shape(tree)}"


class AttributesEntry(Entry):
    """Entry of the attributes that training changes on an object that is no part of the state, as a task is.

    What the state's `objects` have, or what lies in the memory of their tensors, is left to the state.
    """

    def __init__(self, owner: Any, objects: Mapping[str, Any]) -> None:
        self._owner, self._objects = owner, objects
        self._shared: list[Any] = []
        """Attributes that the state has."""
        self._places: set[int] = set()
        """Addresses of the state's tensors."""

    def skips(self, value: Any) -> bool:
        """Whether the state saves the value of an attribute."""
        is_shared = any(value is each for each in self._shared)
        return is_shared or not self._places.isdisjoint(addresses(given_values.arrays(value)))

    def save(self) -> Any:
        return given_values.save_attributes(self._owner, lambda: self._places, self.skips).get("", {})

    def load(self, tree: Any) -> None:
        given_values.load_attributes(self._owner, {"": tree}, lambda: self._places, self.skips)

    def enter(self, run: str | None = None) -> None:
        parts = list(contents(self._objects))
        ids = {id(each) for each in parts if type(each) not in given_values.SCALARS}
        values = given_values.attributes(self._owner).values()
        self._shared = [each for each in values if id(each) in ids]
        self._places = addresses(parts)
        given_values.enter_attributes(self._owner, self.skips)

    def leave(self) -> None:
        given_values.leave_attributes(self._owner, self.skips)


_ENTRIES: dict[type, Callable[[Any], Entry]] = {
    torch.nn.Module: ModuleEntry,
    torch.optim.Optimizer: OptimizerEntry,
    LRScheduler: given_values.SchedulerEntry,
    torch.amp.GradScaler: ScalerEntry,
    Tensor: TensorEntry,
    torch.Generator: TorchGeneratorEntry,
}


def addresses(values: Iterable[Any]) -> set[int]:
    """Return the addresses of the memory of tensors, and of the parameters and buffers of modules."""
    return {address(each) for each in tensors_of(values) if each.layout is torch.strided} - {0}


def places_of(entries: Mapping[str, Entry]) -> given_values.Places:
    """Return the function that returns the addresses of the models and tensors of the state."""
    objects = [each.module for each in entries.values() if isinstance(each, ModuleEntry)]
    tensors = [each.tensor for each in entries.values() if isinstance(each, TensorEntry)]
    return lambda: addresses([*objects, *tensors])


def _laid(parameters: Sequence[Tensor], index: Any, saved: Any) -> Any:
    if not isinstance(index, int) or not isinstance(saved, dict) or not is_sharded(parameters[index]):
        return saved
    return {name: laid_like(parameters[index], value) for name, value in saved.items()}


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "extra state"


def _uncast(live: Any, saved: Any) -> Any:
    """Return `live` with the saved tensor in place of each one that loading has cast to another dtype."""
    if isinstance(saved, Tensor) and isinstance(live, Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device, copy=True)
    if isinstance(saved, dict) and isinstance(live, dict):
        return {key: _uncast(live.get(key, value), value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)) and len(saved) == len(live):
        return type(saved)(_uncast(a, b) for a, b in zip(live, saved, strict=True))
    return live
