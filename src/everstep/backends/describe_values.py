"""Strings for the values that a program gives, to be compared at a resume: plain values, arrays, functions.

A function is described by its name and its source text; one of an installed package by its name.  What its
closure or its module holds is not part of it: that belongs into `config`.
"""

from __future__ import annotations

import enum
import functools
import inspect
import io
import sysconfig
import tokenize
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from everstep import backends
from everstep.errors import StateError

_UNKNOWN = "not compared, "
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OPAQUE = object()
_WIDEST = 400
"""Most characters of a string; a longer string is compared by its digest."""
_MANY = 100
"""Most parts of a container that are described singly; plain values may be any number."""
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def described(value: Any, name: str) -> dict[str, str]:
    """Describe a value by strings: "schedule", and for its parts names such as "schedule.total_steps"."""
    return dict(_described(value, name))


def is_unknown(text: object) -> bool:
    """Whether a string of `described` stands for a value that cannot be compared."""
    return isinstance(text, str) and text.startswith(_UNKNOWN)


def _described(value: Any, name: str) -> Iterator[tuple[str, str]]:
    plain = _plain(value)
    if plain is not _OPAQUE:
        text = repr(plain)
        yield name, text if len(text) <= _WIDEST else f"digest {_digest(text)}"
    elif isinstance(value, Mapping | list | tuple):
        if len(value) > _MANY:
            yield name, f"{_UNKNOWN}{len(value)} objects in a {type(value).__name__}"
            return
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _described(part, f"{name}.{key}")
    elif isinstance(value, functools.partial):
        yield from _described(value.func, name)
        for key, part in [*enumerate(value.args), *value.keywords.items()]:
            yield from _described(part, f"{name}.{key}")
    elif isinstance(value, types.FunctionType | types.MethodType):
        yield from _function(value, name)
    elif isinstance(value, type | types.BuiltinFunctionType):
        yield name, _full_name(value)
    else:
        yield from _object(value, name)


def _plain(value: Any) -> Any:
    """Turn plain values, also in lists and dictionaries, into values to compare; `_OPAQUE` for others."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Mapping):
        value = [[key, value[key]] for key in sorted(value, key=_rank)]
    if isinstance(value, set | frozenset):
        value = sorted(value, key=_rank)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _OPAQUE if any(item is _OPAQUE for item in items) else items
    if isinstance(value, bool | int | float | complex | str | bytes | range | enum.Enum | None):
        return str(value) if isinstance(value, enum.Enum) else value
    if (backend := backends.of(value)) is None:
        return _OPAQUE
    try:
        data = backend.to_host(value, None).data
    except StateError:  # no dense array
        return _OPAQUE
    return value.tolist() if data.nbytes <= _WIDEST else _digest(data.tobytes())


def _rank(key: Any) -> tuple[bool, float, str]:
    """Sort key for keys: numbers by their value, before all others."""
    return (False, key, "") if isinstance(key, int | float) else (True, 0.0, repr(key))


def _digest(data: str | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data.encode() if isinstance(data, str) else data)


def _function(function: Any, name: str) -> Iterator[tuple[str, str]]:
    if function.__code__.co_filename.startswith(_INSTALLED):
        yield name, _full_name(function)
        return
    yield name, function.__qualname__.rpartition("<locals>.")[2]
    yield f"code of {name}", _source(function)
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield from _described(parameter.default, f"{name}.{key}")


def _source(function: Any) -> str:
    try:
        source = inspect.getsource(function)
        if function.__name__ == "<lambda>":
            source = _lambda_source(function.__code__, inspect.findsource(function)[0]) or source
    except (OSError, TypeError):
        return f"{_UNKNOWN}the source of {function.__qualname__} is not known"
    try:
        tokens = [*tokenize.generate_tokens(io.StringIO(source.strip()).readline)]
    except (tokenize.TokenError, IndentationError):  # a lambda in the middle of a statement
        return _digest("".join(source.split()))
    return _digest("".join(token.string for token in tokens if token.type not in _LAYOUT))


def _lambda_source(code: types.CodeType, lines: list[str]) -> str:
    """Return parameters and body of a lambda, whose lines may have others; "" if Python has no places."""
    # lines from 1, columns in bytes; the first instruction has a place without a character
    positions: Any = [each for each in code.co_positions() if None not in each]
    places = [((a, b), (c, d)) for a, c, b, d in positions if (a, b) < (c, d)]
    if not places:
        return ""
    (first, begin), (last, end) = min(each[0] for each in places), max(each[1] for each in places)
    head, body = ("".join(lines[first - 1 : stop]).encode() for stop in (last - 1, last))
    return f"{', '.join(code.co_varnames[: code.co_argcount])}: {body[begin : len(head) + end].decode()}"


def _object(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Describe an object that can be called by its class, its code and its plain attributes.

    Other objects are not compared, nor those with a `state_dict`, which training changes.
    """
    call: Any = inspect.getattr_static(type(value), "__call__", None)
    if not isinstance(call, types.FunctionType) or hasattr(value, "state_dict"):
        yield name, f"{_UNKNOWN}an object of {_full_name(type(value))}"
        return
    yield name, _full_name(type(value))
    if not call.__code__.co_filename.startswith(_INSTALLED):
        yield f"code of {name}", _source(type(value))
    for key, part in sorted(getattr(value, "__dict__", {}).items()):
        if isinstance(part, _FUNCTIONS) or _plain(part) is not _OPAQUE:
            yield from _described(part, f"{name}.{key}")
        else:
            yield f"{name}.{key}", f"{_UNKNOWN}an object of {_full_name(type(part))}"


def _full_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}".removeprefix("__main__.").removeprefix("builtins.")
