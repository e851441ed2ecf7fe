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
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import Module

from everstep.data.other_libraries import class_names
from everstep.errors import RestoreError

_OWN = frozenset(vars(Module()))
"""Attributes of every module; `training` and the buffers are saved in other places."""
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_LISTS = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict)
_LARGE = 1 << 20
"""Bytes above which an array is not copied."""
_MANY = 10_000
"""Items of a list or dict with tensors above which changes inside are not seen; another length, or another
object in its place, is seen at any size."""
_NONE = object()
_GROWING = "torchmetrics.wrappers.tracker.MetricTracker"
"""Class whose `increment()` adds a metric."""


class _Given(NamedTuple):
    """Given value of an attribute: its mark, a copy if it is plain, and the marks of large arrays inside."""

    mark: Any
    value: Any
    large: list[tuple[Any, Any]]

    @classmethod
    def of(cls, value: Any, mark: Any) -> Self:
        large = [(each, _mark(each)) for each in _arrays(value) if each.nbytes > _LARGE]
        return cls(mark, _kept(value), large)

    @property
    def is_lost(self) -> bool:
        """Whether a large array, which was not copied, has changed in place."""
        return any(not _same(_mark(array), mark) for array, mark in self.large)


_given: WeakKeyDictionary[Module, dict[str, _Given]] = WeakKeyDictionary()
_left: WeakKeyDictionary[Module, dict[str, Any]] = WeakKeyDictionary()
"""Marks of the values that the last loop left."""


def enter(root: Module) -> None:
    """Note the values that the program has given; called when a loop is entered."""
    for _, module in _keeping(root):
        before, left = _given.get(module, {}), _left.get(module, {})
        marks = _marks(module)
        # a value that is as the last loop left it was not given since: the value before that loop counts
        _given[module] = {
            name: before[name]
            if name in before and name in left and _same(left[name], mark)
            else _Given.of(vars(module)[name], mark)
            for name, mark in marks.items()
        }


def leave(root: Module) -> None:
    """Mark the present values as made by training, not given; called when a loop is left."""
    for _, module in _keeping(root):
        _left[module] = _marks(module)


def save(root: Module) -> dict[str, dict[str, Any]]:
    """Return the plain attributes that differ from their given values, by the names of modules."""
    found = {path: _changed(module) for path, module in _keeping(root)}
    return {path: changed for path, changed in found.items() if changed}


def foreign(root: Module) -> Callable[[Collection[str]], list[str]]:
    """Make a function that lists the saved modules that `root` lacks and that no load makes."""
    modules = {path: _grows(module) for path, module in root.named_modules()}
    grown = tuple(_prefix(path) for path, grows in modules.items() if grows)
    return lambda saved: [path for path in saved if path not in modules and not path.startswith(grown)]


def _grows(module: Module) -> bool:
    return _GROWING in class_names(module)


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _grow(root: Module, saved: Collection[str]) -> None:
    """Let each MetricTracker have as many metrics as it had at the save."""
    for path, module in list(root.named_modules()):
        if _grows(module):
            tracker: Any = module
            numbers = [
                int(rest.partition(".")[0])
                for each in saved
                if each.startswith(_prefix(path)) and (rest := each.removeprefix(_prefix(path)))[:1].isdigit()
            ]
            while len(tracker._modules) <= max(numbers, default=-1):
                tracker.increment()


def load(root: Module, saved: dict[str, dict[str, Any]]) -> None:
    """Undo `save`: restore the saved attributes, and set all others to their given values."""
    # The modules that a tracker makes here are among those that the loop below restores.
    _grow(root, saved)
    for path, module in _keeping(root):
        own, live, given = saved.get(path, {}), vars(module), _given.get(module, {})
        for name in _changed(module).keys() - own.keys() & given.keys():
            if module in _left and given[name].is_lost:
                raise RestoreError(
                    f"{type(module).__name__}.{name} was changed in place by a loop of this process, and is "
                    f"too large ({_LARGE >> 20} MiB or more) to be kept twice: make a new model, or keep "
                    "it in a buffer (register_buffer)"
                )
            if given[name].value is not _NONE:
                live[name] = _kept(given[name].value)
        for name, value in own.items():
            live[name] = _like(live.get(name), copy.deepcopy(value))


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
        if not (name in given and _same(given[name].mark, mark)) and _is_plain(vars(module)[name])
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
    return kind in _SCALARS


def _marks(module: Module) -> dict[str, Any]:
    return {name: _mark(value) for name, value in vars(module).items() if name not in _OWN}


def _mark(value: Any) -> Any:
    """Mark a value, to tell later whether it has changed; no element of a tensor is read."""
    kind = type(value)
    if isinstance(value, Tensor):
        # Inference tensors have no version counter.
        return kind, weakref.ref(value), 0 if value.is_inference() else value._version
    if kind is np.ndarray:
        return kind, _digest(value), value.dtype.str, value.shape
    if kind in _LISTS + _DICTS and len(value) > _MANY:
        return kind, _digest_of_many(value), len(value)
    if kind in _DICTS:
        return kind, [_mark(each) for pair in value.items() for each in pair]
    if kind in _LISTS:
        return kind, [_mark(each) for each in value]
    return kind, value if kind in _SCALARS else id(value)


def _digest(array: Any) -> bytes:
    """Return the bytes of a small array, or a digest of a large one."""
    if array.nbytes <= _LARGE or array.dtype.hasobject:
        found: bytes = array.tobytes()
        return found
    return xxhash.xxh3_128_digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _digest_of_many(items: Any) -> Any:
    """Return a digest of plain values; for others the identity of the container."""
    try:
        return xxhash.xxh3_128_digest(marshal.dumps(items, 2))  # 2: equal values give equal bytes
    except ValueError:
        return id(items)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is not None and a() is b()
    # The type counts: 1 differs from 1.0 and True.
    return type(a) is type(b) and bool(a == b)


def _kept(value: Any) -> Any:
    """Copy a plain value, without its large arrays, which are kept as they are; `_NONE` for other values."""
    if not _is_plain(value):
        return _NONE
    return copy.deepcopy(value, {id(each): each for each in _arrays(value) if each.nbytes > _LARGE})


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, _LISTS + _DICTS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays(item)


def _like(live: Any, saved: Any) -> Any:
    """Move a saved tensor to the device of the live one; other values stay as saved."""
    return saved.to(live.device) if isinstance(saved, Tensor) and isinstance(live, Tensor) else saved
