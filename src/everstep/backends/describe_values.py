"""Strings for the values that a program gives, to be compared at a resume: plain values, arrays, functions.

A function is described by what it does: its code, the arguments that are bound to it, and the values
outside it that the code reads (`args.epochs`, `CONFIG["warmup"]`, a variable around a closure).  For an
object that is called, every attribute counts; for an object that is only read, the attributes that are
read.  A function of an installed package is described by its name.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import xxhash

from everstep import backends
from everstep.errors import StateError

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_CODE = re.compile(r"[0-9a-f]{16} \(Python (\d+\.\d+)\)")
_UNKNOWN = "not compared, "
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OPAQUE = object()
_WIDEST = 400
"""Most characters of a string; a longer string is compared by its digest."""

_MANY = 100
"""Most parts of a container that are described singly; plain values may be any number."""

_Texts: TypeAlias = Iterator[tuple[str, str]]
_Above: TypeAlias = frozenset[Any]


def described(value: Any, name: str) -> dict[str, str]:
    """Describe a value by strings: "schedule", and for its parts names such as "schedule.total_steps"."""
    return dict(_described(value, name, frozenset()))


def is_unknown(text: object) -> bool:
    """Whether a string of `described` stands for a value that cannot be compared."""
    return isinstance(text, str) and text.startswith(_UNKNOWN)


def other_python(stored: object, given: object) -> bool:
    """Whether two strings are code compiled by two versions of Python, which cannot be compared."""
    versions = {match[1] for text in (stored, given) if (match := _CODE.fullmatch(str(text)))}
    return len(versions) == 2


def _described(value: Any, name: str, above: _Above) -> _Texts:
    """Yield names and strings; `above`: the objects around `value`, at which recursion ends."""
    plain = _plain(value)
    if plain is not _OPAQUE:
        text = repr(plain)
        yield name, text if len(text) <= _WIDEST else f"digest {_digest(text)}"
    elif isinstance(value, Mapping | list | tuple) and len(value) > _MANY:
        yield name, f"{_UNKNOWN}{len(value)} objects in a {type(value).__name__}"
    elif isinstance(value, Mapping | list | tuple):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _described(part, f"{name}.{key}", above)
    elif isinstance(value, functools.partial):
        yield from _described(value.func, name, above)
        for at, part in enumerate(value.args):
            yield from _described(part, f"{name}.{at}", above)
        for key, part in value.keywords.items():
            yield from _described(part, f"{name}.{key}", above)
    elif isinstance(value, types.FunctionType):
        yield from _function(value, name, above)
    elif isinstance(value, types.MethodType):
        function: Any = value.__func__
        yield from _function(function, name, above, value.__self__)
    elif isinstance(value, type | types.BuiltinFunctionType):
        yield name, _full_name(value)
    else:
        yield from _object(value, name, above)


def _plain(value: Any) -> Any:
    """Turn plain values, also in lists and dictionaries, into values to compare; `_OPAQUE` for others."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        value = [[key, value[key]] for key in sorted(value, key=_rank)]
    if isinstance(value, set | frozenset):
        value = sorted(value, key=_rank)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _OPAQUE if any(item is _OPAQUE for item in items) else items
    if isinstance(value, bool | int | float | complex | str | bytes | range | enum.Enum | None):
        return str(value) if isinstance(value, enum.Enum) else value
    return _array(value)


def _rank(key: Any) -> tuple[bool, float, str]:
    """Sort key for keys: numbers by their value, before all others."""
    return (False, key, "") if isinstance(key, int | float) else (True, 0.0, repr(key))


def _array(value: Any) -> Any:
    backend = backends.of(value)
    if backend is None:
        return _OPAQUE
    try:
        host = backend.to_host(value, None)
    except StateError:  # no dense array
        return _OPAQUE
    return value.tolist() if host.data.nbytes <= _WIDEST else _digest(host.data.tobytes())


def _digest(data: str | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data.encode() if isinstance(data, str) else data)


def _object(value: Any, name: str, above: _Above) -> _Texts:
    """Describe an object that can be called by its class and attributes.

    Other objects are not compared, nor those with a `state_dict`, which training changes.
    """
    call: Any = inspect.getattr_static(type(value), "__call__", None)
    if not isinstance(call, types.FunctionType) or hasattr(value, "state_dict"):
        yield name, f"{_UNKNOWN}an object of {_full_name(type(value))}"
        return
    yield name, _full_name(type(value))
    if id(value) not in above:
        above |= {id(value)}
        yield from _code(call, name, above)
        for key, part in sorted(getattr(value, "__dict__", {}).items()):
            yield from _described(part, f"{name}.{key}", above)


def _function(function: Any, name: str, above: _Above, owner: Any = _OPAQUE) -> _Texts:
    """Describe a function; `owner`: the object whose method the function is."""
    if _is_installed(function):
        yield name, _full_name(function)
    elif (id(function), id(owner)) not in above:
        yield name, function.__name__
        yield from _code(function, name, above | {(id(function), id(owner))}, owner)


def _code(function: Any, name: str, above: _Above, owner: Any = _OPAQUE) -> _Texts:
    if _is_installed(function):
        return
    code = function.__code__
    yield f"code of {name}", f"{_digest(repr(_texts_of(code, function.__doc__)))} (Python {_PYTHON})"
    last = code.co_argcount
    defaults = function.__defaults__ or ()
    known = dict(zip(code.co_varnames[last - len(defaults) : last], defaults, strict=True))
    for key, value in {**known, **(function.__kwdefaults__ or {}), **_reads(function, owner)}.items():
        yield from _described(value, f"{name}.{key}", above)


def _texts_of(code: types.CodeType, doc: str | None = None) -> list[Any]:
    """List what code does, without the names of its own variables, its lines and its docstring."""
    constants = [
        _texts_of(each)
        if isinstance(each, types.CodeType)
        else repr(sorted(each, key=repr) if isinstance(each, frozenset) else each)
        for each in code.co_consts
        if doc is None or each is not doc
    ]
    return [code.co_code.hex(), constants, code.co_names]


# ------------------------------------------------------------------------ what a function reads


def _reads(function: types.FunctionType, owner: Any) -> dict[str, Any]:
    """Values outside a function that its code reads, by the expression that reads them."""
    around = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    known = {key: cell.cell_contents for key, cell in around.items() if _is_set(cell)}
    if owner is not _OPAQUE:
        known[function.__code__.co_varnames[0]] = owner
    found: dict[str, Any] = {}
    for code in _with_inner(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for at, step in enumerate(steps):
            scope = function.__globals__ if step.opname == "LOAD_GLOBAL" else known
            if step.opname.startswith(("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST")):
                name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
                if name in scope:
                    path, value = _followed(name, scope[name], steps[at + 1 :])
                    if not _is_named(value):
                        found[path] = value
    return found


def _followed(path: str, value: Any, steps: list[dis.Instruction]) -> tuple[str, Any]:
    """Follow the attributes and keys that are taken next."""
    while steps:
        if steps[0].opname in ("LOAD_ATTR", "LOAD_METHOD"):
            key, width = steps[0].argval, 1
            inner = _attribute(value, key)
        elif len(steps) > 1 and steps[0].opname == "LOAD_CONST" and _takes_item(steps[1]):
            key, width = steps[0].argval, 2
            inner = _item(value, key)
        else:
            break
        if inner is _OPAQUE:
            break
        path, value, steps = f"{path}.{key}", inner, steps[width:]
    return path, value


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without calling any code of the object to find it."""
    found = inspect.getattr_static(value, name, _OPAQUE)
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, types.MemberDescriptorType):
        return getattr(value, name, _OPAQUE)
    if isinstance(found, types.FunctionType) and not isinstance(value, types.ModuleType):
        return types.MethodType(found, value)
    return _OPAQUE if isinstance(found, types.MethodDescriptorType) else found


def _item(value: Any, key: Any) -> Any:
    try:
        return value[key] if isinstance(value, dict | list | tuple) else _OPAQUE
    except (LookupError, TypeError):
        return _OPAQUE


def _takes_item(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _is_named(value: Any) -> bool:
    """Whether the name alone describes a value: a module, a class, or a function of a package."""
    if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType | np.ufunc):
        return True
    return isinstance(value, types.FunctionType | types.MethodType) and _is_installed(value)


def _is_installed(function: Any) -> bool:
    return bool(function.__code__.co_filename.startswith(_INSTALLED))


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _with_inner(each)


def _full_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}".removeprefix("__main__.").removeprefix("builtins.")
