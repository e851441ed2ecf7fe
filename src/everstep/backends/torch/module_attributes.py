"""State in plain attributes of modules, optimizers and tasks, which no `state_dict` has.

Examples are a counter, a temperature that falls, a hidden state, and the values that torchmetrics collects:
without them, a resumed training would take another course.  Plain values are numbers, strings, None,
tensors without a graph, NumPy arrays, and lists, tuples, sets, deques and dicts of those; an attribute may
also be a generator of random numbers.  An attribute is saved if it differs from its given value; a setting
that the program changes between two starts is therefore used as given.

The given value is the attribute's value when a loop was entered, unless an earlier loop of the same process
has left that value there.
"""

from __future__ import annotations

import copy
import marshal
import pickle
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from everstep.backends.numpy import set_state_of, state_of
from everstep.contracts.tasks import Task
from everstep.errors import RestoreError

_OWN = {
    Module: frozenset(vars(Module())),
    Optimizer: frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step", "_opt_called"},
    Task: frozenset({"batch_weight"}),
}
"""Attributes of every such object, which are saved in other places or belong to no step."""
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_GENERATOR = "everstep: state of a generator"
"""First item of the pair that is saved for a generator."""
SCALARS = (type(None), bool, int, float, complex, str, bytes)
_LISTS = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict)
_LARGE = 1 << 20
"""Bytes above which an array is not copied."""
_MANY = 10_000
"""Items of a list or dict with tensors above which changes inside are not seen; another length, or another
object in its place, is seen at any size."""
_NOT_PLAIN = object()

_given: WeakKeyDictionary[Any, dict[str, tuple[Any, Any, Any]]] = WeakKeyDictionary()
"""By attribute the mark of its given value, a copy or `_NOT_PLAIN`, and large arrays with their marks."""
_left: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Marks of the values that the last loop left."""


Skip = Callable[[Any], bool]
"""Whether a value is saved in another place."""


def enter(root: Any, skip: Skip = lambda value: False) -> None:
    """Note the values that the program has given; called when a loop is entered."""
    for _, owner in owners(root):
        before, left = _given.get(owner, {}), _left.get(owner, {})
        # a value that is as the last loop left it was not given since: the value before that loop counts
        _given[owner] = {
            name: before[name]
            if name in before and name in left and same(left[name], mark)
            else (mark, *_copied(vars(owner)[name]))
            for name, mark in _marks(owner, skip).items()
        }


def leave(root: Any, skip: Skip = lambda value: False) -> None:
    """Mark the present values as made by training, not given; called when a loop is left."""
    for _, owner in owners(root):
        _left[owner] = _marks(owner, skip)


def save(root: Any, skip: Skip = lambda value: False) -> dict[str, dict[str, Any]]:
    """Return the attributes that differ from their given values, by the names of modules; "" is the root."""
    found = {path: _changed(owner, skip) for path, owner in owners(root)}
    return {path: changed for path, changed in found.items() if changed}


def load(root: Any, saved: dict[str, dict[str, Any]], skip: Skip = lambda value: False) -> None:
    """Undo `save`: restore the saved attributes, and set all others to their given values."""
    for path, owner in owners(root):
        own, live, given = saved.get(path, {}), vars(owner), _given.get(owner, {})
        for name in _changed(owner, skip).keys() - own.keys() & given.keys():
            _, value, large = given[name]
            if any(not same(mark_of(array), mark) for array, mark in large):
                raise RestoreError(
                    f"{type(owner).__name__}.{name} was changed in place by a loop of this process, and is "
                    f"too large ({_LARGE >> 20} MiB or more) to be kept twice: make a new model, or keep "
                    "it in a buffer (register_buffer)"
                )
            if value is not _NOT_PLAIN:
                _restore(owner, name, copy.deepcopy(value, {id(array): array for array, _ in large}))
        for name, value in own.items():
            here, restored = live.get(name), copy.deepcopy(value)
            if isinstance(here, Tensor) and isinstance(restored, Tensor):
                restored = restored.to(here.device)
            _restore(owner, name, restored)


def _restore(owner: Any, name: str, value: Any) -> None:
    if not (isinstance(value, tuple) and len(value) == 2 and value[0] == _GENERATOR):
        vars(owner)[name] = value
        return
    generator = vars(owner).get(name)
    if type(generator) not in GENERATORS:
        raise RestoreError(
            f"{type(owner).__name__}.{name} was a generator when it was saved and is {generator!r:.60}: make "
            "the generator where the object is made, not in a step"
        )
    set_state_of(generator, value[1])


def owners(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects with a class that is not torch's own: torch keeps no state in plain attributes."""
    for path, owner in root.named_modules() if isinstance(root, Module) else [("", root)]:
        if any(cls.__module__.split(".")[0] not in ("torch", "builtins") for cls in type(owner).__mro__):
            yield path, owner


def attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the attributes that its own class may have added to an object."""
    own = next((names for kind, names in _OWN.items() if isinstance(owner, kind)), frozenset())
    yield from ((name, value) for name, value in vars(owner).items() if name not in own)


def _changed(owner: Any, skip: Skip) -> dict[str, Any]:
    given, live = _given.get(owner, {}), vars(owner)
    return {
        name: _as_saved(live[name])
        for name, mark in _marks(owner, skip).items()
        if not (name in given and same(given[name][0], mark)) and is_saveable(live[name])
    }


def is_saveable(value: Any) -> bool:
    """Whether an attribute with this value is saved."""
    return type(value) in GENERATORS or _is_plain(value)


def _as_saved(value: Any) -> Any:
    return (_GENERATOR, state_of(value)) if type(value) in GENERATORS else value


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _LISTS:
        return all(map(_is_plain, value))
    if kind in _DICTS:
        return all(type(key) in (str, int) and _is_plain(item) for key, item in value.items())
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is Tensor:
        odd = value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested
        return not odd and value.grad_fn is None
    return kind in SCALARS


def _copied(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Copy a plain value, without its large arrays, which are kept as they are, each with its mark."""
    if not is_saveable(value):
        return _NOT_PLAIN, []
    value = _as_saved(value)
    large = [each for each in arrays(value) if each.nbytes > _LARGE]
    return copy.deepcopy(value, {id(each): each for each in large}), [(each, mark_of(each)) for each in large]


def arrays(value: Any) -> Iterator[Any]:
    """Yield the arrays of a plain value."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, _LISTS + _DICTS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays(item)


def _marks(owner: Any, skip: Skip) -> dict[str, Any]:
    return {name: mark_of(value) for name, value in attributes(owner) if not skip(value)}


def mark_of(value: Any) -> Any:
    """Mark a value, to tell later by `same` whether it has changed; no element of a tensor is read."""
    kind = type(value)
    if isinstance(value, Tensor):
        # neither has a version counter
        uncounted = is_lazy(value) or value.is_inference()
        return kind, weakref.ref(value), 0 if uncounted else value._version
    if kind is np.ndarray:
        if value.dtype.hasobject:
            return kind, value.tobytes(), value.shape
        elements = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return kind, _digest(elements), value.dtype.str, value.shape
    if kind in GENERATORS:
        state = state_of(value)
        return kind, id(value), bytes(state.numpy()) if isinstance(state, Tensor) else pickle.dumps(state)
    if kind in _LISTS + _DICTS:
        try:
            return kind, _digest(marshal.dumps(value, 2))  # 2: equal values give equal bytes
        except ValueError:  # with arrays, tensors or objects inside
            pass
        if len(value) > _MANY:
            return kind, id(value), len(value)
        inside = [each for pair in value.items() for each in pair] if kind in _DICTS else value
        return kind, [mark_of(each) for each in inside]
    return kind, value if kind in SCALARS else id(value)


def _digest(data: bytes | memoryview) -> bytes:
    """Return few bytes as they are, and a digest of many."""
    return bytes(data) if len(data) <= _LARGE else xxhash.xxh3_128_digest(data)


def same(a: Any, b: Any) -> bool:
    """Whether two marks are of a value that has not changed in between."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is not None and a() is b()
    # The type counts: 1 differs from 1.0 and True.
    return type(a) is type(b) and bool(a == b)
