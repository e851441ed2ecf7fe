"""State in plain attributes of modules, which torch's `state_dict` leaves out.

Examples are a counter, a temperature that falls, a hidden state, and the values that torchmetrics collects:
without them, a resumed training would take another course.  Plain values are numbers, strings, None,
tensors without a graph, NumPy arrays, and lists, tuples, sets, deques and dicts of those.  An attribute is
saved if it differs from its given value; a setting that the program changes between two starts is therefore
used as given.

The given value is the attribute's value when a loop was entered, unless an earlier loop of the same process
has left that value there.
"""

from __future__ import annotations

import copy
import marshal
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from everstep.errors import RestoreError

_OWN = frozenset(vars(Module()))
"""Attributes of every module; `training` and the buffers are saved in other places."""
SCALARS = (type(None), bool, int, float, complex, str, bytes)
_LISTS = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict)
_LARGE = 1 << 20
"""Bytes above which an array is not copied."""
_MANY = 10_000
"""Items of a list or dict with tensors above which changes inside are not seen; another length, or another
object in its place, is seen at any size."""
_NOT_PLAIN = object()

_given: WeakKeyDictionary[Module, dict[str, tuple[Any, Any, Any]]] = WeakKeyDictionary()
"""By attribute the mark of its given value, a copy or `_NOT_PLAIN`, and large arrays with their marks."""
_left: WeakKeyDictionary[Module, dict[str, Any]] = WeakKeyDictionary()
"""Marks of the values that the last loop left."""


def enter(root: Module) -> None:
    """Note the values that the program has given; called when a loop is entered."""
    for _, module in _keeping(root):
        before, left = _given.get(module, {}), _left.get(module, {})
        # a value that is as the last loop left it was not given since: the value before that loop counts
        _given[module] = {
            name: before[name]
            if name in before and name in left and same(left[name], mark)
            else (mark, *_copied(vars(module)[name]))
            for name, mark in _marks(module).items()
        }


def leave(root: Module) -> None:
    """Mark the present values as made by training, not given; called when a loop is left."""
    for _, module in _keeping(root):
        _left[module] = _marks(module)


def save(root: Module) -> dict[str, dict[str, Any]]:
    """Return the plain attributes that differ from their given values, by the names of modules."""
    found = {path: _changed(module) for path, module in _keeping(root)}
    return {path: changed for path, changed in found.items() if changed}


def load(root: Module, saved: dict[str, dict[str, Any]]) -> None:
    """Undo `save`: restore the saved attributes, and set all others to their given values."""
    for path, module in _keeping(root):
        own, live, given = saved.get(path, {}), vars(module), _given.get(module, {})
        for name in _changed(module).keys() - own.keys() & given.keys():
            _, value, large = given[name]
            if any(not same(mark_of(array), mark) for array, mark in large):
                raise RestoreError(
                    f"{type(module).__name__}.{name} was changed in place by a loop of this process, and is "
                    f"too large ({_LARGE >> 20} MiB or more) to be kept twice: make a new model, or keep "
                    "it in a buffer (register_buffer)"
                )
            if value is not _NOT_PLAIN:
                live[name] = copy.deepcopy(value, {id(array): array for array, _ in large})
        for name, value in own.items():
            here, restored = live.get(name), copy.deepcopy(value)
            if isinstance(here, Tensor) and isinstance(restored, Tensor):
                restored = restored.to(here.device)
            live[name] = restored


def _keeping(root: Module) -> Iterator[tuple[str, Module]]:
    """Yield the modules with a class that is not torch's own: torch keeps no state in plain attributes."""
    for path, module in root.named_modules():
        if any(cls.__module__.split(".")[0] not in ("torch", "builtins") for cls in type(module).__mro__):
            yield path, module


def _changed(module: Module) -> dict[str, Any]:
    given = _given.get(module, {})
    return {
        name: vars(module)[name]
        for name, mark in _marks(module).items()
        if not (name in given and same(given[name][0], mark)) and _is_plain(vars(module)[name])
    }


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
    if not _is_plain(value):
        return _NOT_PLAIN, []
    large = [each for each in _arrays(value) if each.nbytes > _LARGE]
    return copy.deepcopy(value, {id(each): each for each in large}), [(each, mark_of(each)) for each in large]


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, _LISTS + _DICTS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays(item)


def _marks(module: Module) -> dict[str, Any]:
    return {name: mark_of(value) for name, value in vars(module).items() if name not in _OWN}


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
