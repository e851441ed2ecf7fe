"""Entry of a model of which only the trained part is saved, over a base that stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import xxhash
from torch import Tensor

from everstep.backends.torch.backend import BACKEND
from everstep.backends.torch.given_values import version_of
from everstep.backends.torch.model_wrappers import BareNames, bare
from everstep.backends.torch.sharded import refuse_sharded
from everstep.backends.torch.torch_entries import ModuleEntry
from everstep.contracts.state import BASE, Declaration, Entry, Mismatch
from everstep.errors import OTHER_VALUES, ConfigError, StateError

_BUFFERS = "_buffers"
_Mark: TypeAlias = tuple[int, int, int]
_WHOLE = "the digest of a part belongs to one layout; give the model itself in state="


def trainable(model: torch.nn.Module) -> Trainable:
    """Declare that of a model in `state=` only the trained part is saved: adapters over a frozen base.

        state = {"model": everstep.torch.trainable(model), "optimizer": optimizer}

    The trained part is each parameter that requires a gradient, or did so at a save of this run, and all that
    differs from the base: a parameter that was changed in place, a buffer (running means).  Of the rest, the
    base, the checkpoint has the digests.  So the program makes the base before the loop is entered, as
    `from_pretrained` does, and a resume over other values is an error that names them.

    At each save buffers and parameters that have changed by torch's own count are compared with their
    digests.  The writer thread compares all others before it commits: a parameter that was changed past that
    count (`.data`) is an error.

    Args:
        model: the model, also in DistributedDataParallel or compiled; not sharded over processes.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"trainable() takes a torch.nn.Module, got {type(model).__name__}: give the model")
    return Trainable(model)


class Trainable(Declaration):
    """Declaration that `trainable` makes; the program and the loop use the model, never the declaration."""

    def __init__(self, value: torch.nn.Module) -> None:
        self.value = value
        self.trained: set[str] = set()
        """Bare names that are saved from here on."""
        self.base: dict[str, tuple[_Mark, str]] = {}
        """By bare name the base: where it lay, in which version, and its description when first looked at."""
        self.claims: list[tuple[str, Tensor, int, str]] = []
        """Name, tensor, version and description of what the last save claims."""

    def entry(self) -> Entry:
        return TrainableEntry(self)

    def __repr__(self) -> str:
        return f"trainable({type(bare(self.value)).__name__})"


class TrainableEntry(ModuleEntry):
    """Entry of the trained part of a module."""

    def __init__(self, declared: Trainable) -> None:
        super().__init__(declared.value)
        self._notes = declared

    def save(self) -> Any:
        tree = super().save()
        notes, base = self._notes, {}
        notes.claims = []
        for name, tensor in self._parts().items():
            refuse_sharded(tensor, f"in trainable(...) {name!r}", _WHOLE)
            if tensor.requires_grad or (name not in notes.trained and self._differs(name, tensor)):
                notes.trained.add(name)
            if name not in notes.trained:
                base[name] = notes.base[name][1]
                if isinstance(tensor, torch.nn.Parameter):
                    notes.claims.append((name, tensor.detach(), version_of(tensor), base[name]))
        saved = {name: value for name, value in tree.items() if name not in base}
        if _BUFFERS in tree:
            saved[_BUFFERS] = {name: value for name, value in tree[_BUFFERS].items() if name not in base}
        return {**saved, BASE: base}

    def proof(self) -> Callable[[], None]:
        claims = self._notes.claims

        def prove() -> None:
            for name, tensor, version, text in claims:
                # a change that torch has counted since the snapshot is looked at when the next one is taken
                if _described(tensor) != text and version_of(tensor) == version:
                    raise StateError(
                        f"the frozen parameter {name!r} has changed past torch's count of changes, as by "
                        ".data; change it in place under torch.no_grad(), or give the model in state="
                    )

        return prove

    def expects(self) -> Callable[[Any], Mismatch]:
        compare = super().expects()
        return lambda tree: compare(self._whole(tree))

    def check(self, tree: Any) -> Mismatch:
        mismatch = self.expects()(tree)
        parts = self._parts()
        base = tree.get(BASE, {}) if isinstance(tree, Mapping) else {}
        for name, saved in base.items():
            if name in parts and (live := _described(parts[name])) != saved:
                # each is a shape, a dtype and a digest
                same_form = saved.rsplit(" ", 1)[0] == live.rsplit(" ", 1)[0]
                mismatch.reshaped.append(name + (OTHER_VALUES if same_form else f" {saved} -> {live}"))
        return mismatch

    def load(self, tree: Any) -> None:
        self.check(tree).require_none()
        base: dict[str, str] = tree.get(BASE, {})
        super().load(self._whole(tree))
        parts = self._parts()
        self._notes.trained = parts.keys() - base.keys()
        # loading has copied the base onto itself, which torch counts as a change
        self._notes.base |= {name: (_mark(parts[name]), text) for name, text in base.items()}

    def _parts(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by their bare names; what is tied, under each of its names."""
        names = BareNames(self.module)
        parameters = self.module.named_parameters(remove_duplicate=False)
        buffers = self.module.named_buffers(remove_duplicate=False)
        return {names.bare(name): tensor for name, tensor in (*parameters, *buffers)}

    def _whole(self, tree: Any) -> Any:
        """Put the live base into a saved tree, as if it had been saved."""
        if not isinstance(tree, Mapping) or BASE not in tree:
            return tree
        names, parts = BareNames(self.module), self._parts()
        persistent = {names.bare(name) for name in self.module.state_dict()}
        live = {n: parts[n].detach() if n in parts else None for n in tree[BASE]}
        return {
            **{name: value for name, value in tree.items() if name != BASE},
            **{n: value for n, value in live.items() if n in persistent or value is None},
        }

    def _differs(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor differs from the base; what is looked at for the first time is the base."""
        mark, text = self._notes.base.get(name, (None, None))
        # kernels write to buffers (running means) without a count
        if mark == _mark(tensor) and isinstance(tensor, torch.nn.Parameter):
            return False
        now = _described(tensor)
        if text is None or text == now:
            self._notes.base[name] = _mark(tensor), now
            return False
        return True


def _mark(tensor: Tensor) -> _Mark:
    return id(tensor), tensor.data_ptr(), version_of(tensor)


def _described(tensor: Tensor) -> str:
    """Describe a tensor by its shape, element type and the xxh3_128 of its elements in C order."""
    digest = xxhash.xxh3_128_hexdigest(BACKEND.in_place(tensor.detach()).data.data)
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {digest}"
