"""Entries for torch's own objects: saved, checked and restored to the bit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from everstep.backends.torch import attributes, options
from everstep.backends.torch.optimizers import Around, innermost, layers
from everstep.backends.torch.sharded import refuse_sharded
from everstep.contracts.state import BESIDE, Entry, Mismatch
from everstep.errors import RestoreError, StateError

_METADATA = "_metadata"
"""Where a module's tree keeps the versions of its submodules, as torch's own state_dict does."""
_BUFFERS = "_buffers"
"""Where it keeps the buffers that its state_dict leaves out: training may change those too."""
_FLAGS = "_flags"
"""Where it keeps which submodules were in evaluation mode and which parameters were frozen."""
_ATTRIBUTES = "_attributes"
"""Where it keeps the plain attributes of submodules that training has changed."""


def make_entry(value: Any) -> Entry | None:
    """The entry for a module, optimizer, scheduler, scaler, tensor or generator; None for anything else.

    Raises:
        StateError: a lazy module that has not seen a batch yet.
    """
    if isinstance(value, torch.nn.Module):
        return ModuleEntry(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerEntry(value)
    if isinstance(value, LRScheduler):
        return SchedulerEntry(value)
    if isinstance(value, torch.amp.GradScaler):
        return ScalerEntry(value)
    if isinstance(value, Tensor):
        return TensorEntry(value)
    if isinstance(value, torch.Generator):
        return GeneratorEntry(value)
    return None


class ModuleEntry(Entry):
    """A module: its `state_dict`, the buffers and plain attributes that this leaves out, and its flags.

    A program that makes the module with other flags than it did before means it: those stay.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        # what torch.compile wraps is saved without the wrapper, so that either restores the other
        self.module: torch.nn.Module = getattr(module, "_orig_mod", module)
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            refuse_sharded(tensor, repr(name))
            if is_lazy(tensor):
                raise StateError(
                    f"{name!r} of a lazy module has no shape yet: run one batch through the model first"
                )
        self._made = _flags(self.module)

    def save(self) -> Any:
        """Names to tensors, and what is no part of torch's own state_dict under names of its own."""
        state = self.module.state_dict()
        tree = dict(state)
        plain = {"version": 1}
        versions = {name: about for name, about in _metadata(state).items() if about != plain}
        if versions:
            tree[_METADATA] = versions
        if buffers := {name: b for name, b in self.module.named_buffers() if name not in state}:
            tree[_BUFFERS] = buffers
        if changed := attributes.save(self.module):
            tree[_ATTRIBUTES] = changed
        return {**tree, _FLAGS: {"made": self._made, "now": _flags(self.module)}}

    def check(self, tree: Any) -> Mismatch:
        """Names, shapes and dtypes."""
        return self.expects()(tree)

    def expects(self) -> Callable[[Any], Mismatch]:
        """The names, shapes and dtypes of now."""
        kind = type(self.module).__name__
        live = {name: _shape(value) for name, value in self.module.state_dict().items()}
        foreign = attributes.foreign(self.module)

        def check(tree: Any) -> Mismatch:
            if not isinstance(tree, dict):
                return Mismatch([], [], [f"a {type(tree).__name__} -> a {kind}"])
            saved = {name: _shape(value) for name, value in tree.items() if name not in BESIDE}
            return Mismatch(
                [name for name in live if name not in saved],
                [name for name in saved if name not in live] + foreign(tree.get(_ATTRIBUTES, {})),
                [f"{n} {saved[n]} -> {live[n]}" for n in live if n in saved and saved[n] != live[n]],
            )

        return check

    def load(self, tree: Any) -> None:
        """Copy into the live tensors."""
        _refuse(self.check(tree))
        state = OrderedDict((name, value) for name, value in tree.items() if name not in BESIDE)
        metadata = {name: {"version": 1} for name in _metadata(self.module.state_dict())}
        state._metadata = metadata | tree.get(_METADATA, {})  # type: ignore[attr-defined]
        self.module.load_state_dict(state)
        for name, saved in tree.get(_BUFFERS, {}).items():
            self._load_buffer(name, saved)
        attributes.load(self.module, tree.get(_ATTRIBUTES, {}))
        if (flags := tree.get(_FLAGS)) and flags["made"] == self._made:
            for name, module in self.module.named_modules():
                module.training = name not in flags["now"]["evaluating"]
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_(name not in flags["now"]["frozen"])

    def _load_buffer(self, name: str, saved: Tensor) -> None:
        """Load in place where the shape fits; a cache that has grown is replaced."""
        owner, _, key = name.rpartition(".")
        buffers = dict(self.module.named_buffers())
        if name in buffers and _shape(buffers[name]) == _shape(saved):
            buffers[name].copy_(saved)
        elif name in buffers:
            setattr(self.module.get_submodule(owner), key, saved.to(buffers[name].device))

    def enter(self) -> None:
        """Note the plain attributes."""
        attributes.enter(self.module)

    def leave(self) -> None:
        """Note what training made of them."""
        attributes.leave(self.module)

    def guarded(self, path: tuple[Any, ...]) -> bool:
        """Parameters; a buffer may be a mask with -inf."""
        owner, _, name = str(path[0]).rpartition(".")
        try:
            return name in self.module.get_submodule(owner)._parameters
        except AttributeError:
            return False


class OptimizerEntry(Entry):
    """An optimizer: its class, its groups' options and the state of each parameter.

    One around another is that other one, and has some options and state more.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def save(self) -> Any:
        """Its state_dict, and its class."""
        return {**self.optimizer.state_dict(), _CLASS: self._class}

    @property
    def _class(self) -> str:
        return type(innermost(self.optimizer)).__qualname__

    def check(self, tree: Any) -> Mismatch:
        """The class, the number of groups, and of parameters in each."""
        wanted = ("state", "param_groups", _CLASS)
        missing = [key for key in wanted if not isinstance(tree, dict) or key not in tree]
        if missing:
            return Mismatch(missing, [], [])
        saved = [len(group["params"]) for group in tree["param_groups"]]
        live = [len(group["params"]) for group in self.optimizer.param_groups]
        reshaped = [] if saved == live else [f"parameters per group {saved} -> {live}"]
        if tree[_CLASS] != self._class:
            reshaped.append(f"{tree[_CLASS]} -> {self._class}")
        return Mismatch([], [], reshaped)

    def load(self, tree: Any) -> None:
        """Restore bit for bit: torch's own loading casts moments to their parameter's dtype."""
        _refuse(self.check(tree))
        self.optimizer.load_state_dict({key: part for key, part in tree.items() if key != _CLASS})
        # Its first steps lie behind it: without this, schedulers warn of a wrong order in a resumed tail.
        for layer in layers(self.optimizer):
            layer._opt_called = True  # type: ignore[attr-defined]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, saved in tree["state"].items():
            owner = parameters[index] if isinstance(index, int) else index
            live = self.optimizer.state.get(owner)
            if live is not None:
                live.update(_uncast(live, saved))

    def guarded(self, path: tuple[Any, ...]) -> bool:
        """All state of parameters: moments, momentum buffers."""
        return bool(path) and path[0] == "state"

    def options(self) -> dict[str, str]:
        """The options of its groups; as "1.lr" where there are several."""
        groups = options.given(self.optimizer)
        found = {
            name if len(groups) == 1 else f"{index}.{name}": text
            for index, group in enumerate(groups)
            for name, text in options.of_group(group).items()
        }
        around = [layer.options() for layer in layers(self.optimizer) if isinstance(layer, Around)]
        return {name: text for own in (found, *around) for name, text in own.items()}

    def use_options(self, names: Collection[str]) -> None:
        """Set them; a learning rate that has a schedule is the schedule's."""
        for name in names:
            index, _, key = name.rpartition(".")
            group = self.optimizer.param_groups[int(index or 0)]
            if key == "lr" and "initial_lr" in group:
                key = "initial_lr"
            if key in (made := options.given(self.optimizer)[int(index or 0)]):
                options.put(group, key, made[key])

    def enter(self) -> None:
        """Note the options of the groups."""
        options.enter(self.optimizer)

    def leave(self) -> None:
        """Note what training made of them."""
        options.leave(self.optimizer)


class SchedulerEntry(Entry):
    """A learning-rate scheduler of torch's."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def save(self) -> Any:
        """Its state_dict."""
        return self.scheduler.state_dict()

    def load(self, tree: Any) -> None:
        """Hand it the saved state."""
        self.scheduler.load_state_dict(tree)

    def options(self) -> dict[str, str]:
        """Its class and what its constructor was given; of schedulers inside it as "0.T_max"."""
        return options.of_scheduler(self.scheduler, options.given(self.scheduler))

    def in_schedule(self, option: str) -> bool:
        """All but the rates that the schedule begins with."""
        return not option.endswith("base_lrs")

    def use_options(self, names: Collection[str]) -> None:
        """Go on where the schedule, as given, is at this point."""
        if names:
            options.replay(self.scheduler)

    def enter(self) -> None:
        """Note the schedule's beginning."""
        options.enter(self.scheduler)

    def leave(self) -> None:
        """Note how far training brought it."""
        options.leave(self.scheduler)


class ScalerEntry(Entry):
    """A gradient scaler."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def save(self) -> Any:
        """Its state_dict."""
        return self.scaler.state_dict()

    def load(self, tree: Any) -> None:
        """Hand it the saved state; it stands between two steps then, wherever an error has left it."""
        self.scaler.load_state_dict(tree)
        if self.scaler.is_enabled():
            # else gradients of the next step, of the same process, would count as unscaled already
            self.scaler._per_optimizer_states.clear()


class TensorEntry(Entry):
    """A tensor or parameter that is restored in place."""

    def __init__(self, tensor: Tensor) -> None:
        if is_lazy(tensor):
            raise StateError("a lazy parameter has no shape yet: run one batch through the model first")
        if tensor.grad_fn is not None:
            raise StateError("a tensor with a graph cannot be restored in place: save tensor.detach()")
        self.tensor = tensor

    def save(self) -> Any:
        """The tensor, without its gradient."""
        return self.tensor.detach()

    def check(self, tree: Any) -> Mismatch:
        """Its shape and dtype must be the saved ones."""
        saved, live = _shape(tree), _shape(self.tensor)
        return Mismatch([], [], [] if saved == live else [f"{saved} -> {live}"])

    def load(self, tree: Any) -> None:
        """Copy the saved elements into the tensor."""
        _refuse(self.check(tree))
        with torch.no_grad():
            self.tensor.copy_(tree)

    def guarded(self, path: tuple[Any, ...]) -> bool:
        """A tensor given as an entry of its own counts as a parameter."""
        return self.tensor.is_floating_point() or self.tensor.is_complex()


class GeneratorEntry(Entry):
    """A `torch.Generator`, on any device."""

    is_random = True

    def as_seeded(self) -> bool:
        """Whether its state is the one that its seed gives."""
        anew = torch.Generator(self.generator.device).manual_seed(self.generator.initial_seed())
        return torch.equal(anew.get_state(), self.generator.get_state())

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def save(self) -> Any:
        """Its state, a uint8 tensor on the CPU."""
        return self.generator.get_state()

    def check(self, tree: Any) -> Mismatch:
        """The states of CPU and CUDA generators differ in size."""
        saved, live = _shape(tree), _shape(self.generator.get_state())
        return Mismatch([], [], [] if saved == live else [f"generator state {saved} -> {live}"])

    def load(self, tree: Any) -> None:
        """Set its state."""
        _refuse(self.check(tree))
        self.generator.set_state(tree)


_CLASS = "class"


def _metadata(state: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(state, _METADATA, {})
    return found


def _flags(module: torch.nn.Module) -> dict[str, list[str]]:
    return {
        "evaluating": [name for name, inner in module.named_modules() if not inner.training],
        "frozen": [name for name, each in module.named_parameters() if not each.requires_grad],
    }


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "extra state"


def _uncast(live: Any, saved: Any) -> Any:
    """`live` with every tensor that loading cast to another dtype as it was saved."""
    if isinstance(saved, Tensor) and isinstance(live, Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device, copy=True)
    if isinstance(saved, dict) and isinstance(live, dict):
        return {key: _uncast(live.get(key, value), value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)) and len(saved) == len(live):
        return type(saved)(_uncast(a, b) for a, b in zip(live, saved, strict=True))
    return live


def _refuse(found: Mismatch) -> None:
    if any(found):
        raise RestoreError("the saved state does not fit", **found._asdict())
