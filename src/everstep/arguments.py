"""Checks of arguments: a known keyword, an integer, a number in its range."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from everstep.errors import ConfigError, MetricError, nearest

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
N = TypeVar("N")


_ELSEWHERE = {
    "callbacks": "services",
    "hooks": "services",
    "loggers": "services",
    "logger": "services",
    "patience": "services",
    "monitor": "metric",
    "variables": "metrics",
    "path": "run_dir",
    "ckpt_path": "resume",
    "model": "state",
    "optimizer": "state",
    "iterations": "max_step",
    "max_iterations": "max_step",
    "time_limit": "max_time",
    "max_seconds": "max_time",
    "warm_start": "init_from",
}
"""Names in other libraries, each with our name, where the nearest of our names would be a wrong hint."""


def _keywords(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}
    for parameter in parameters:  # as in `**options: Unpack[RunOptions]`
        if options := re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation)):
            names |= function.__globals__[options[1]].__annotations__.keys()
    return names


def _hint(name: str, known: set[str]) -> str:
    equivalent = _ELSEWHERE.get(name)
    return nearest(equivalent if equivalent in known else name, known)


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a call with an unknown keyword raise `ConfigError` with the nearest name."""
    method = function.__name__ == "__init__"
    known = _keywords(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                owner = type(args[0]).__name__ if method else function.__name__
                raise ConfigError(f"{owner}() has no argument {name!r}; {_hint(name, known)}")
        return function(*args, **kwargs)

    call.known_keywords = known  # type: ignore[attr-defined]
    return call


def checked_init(cls: C) -> C:
    """Apply `checked_keywords` to the `__init__` of a class that does not write its own (a dataclass)."""
    cls.__init__ = checked_keywords(cls.__init__)  # type: ignore[misc]
    return cls


def plain(value: Any) -> Any:
    """Convert a number of another library, such as NumPy, to Python's own; other values stay as they are."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def integer(name: str, value: N, least: int | None = 1, *, none: str = "") -> N:
    """Return an integer of `least` or more, NumPy's too; `none` is the meaning of an allowed None."""
    value = plain(value)
    is_valid = isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
    if not (is_valid or (none and value is None)):
        phrase = "an integer" + ("" if least is None else f", {least} or more")
        raise ConfigError(f"{name}={value!r}: give {phrase}{_or_none(none)}")
    return value


def flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: give True or False")
    return value


def number(name: str, value: N, *, of: str = "", zero: bool = False, none: str = "") -> N:
    """Return a number of more than 0 as an int or a float, with `zero` of 0 or more.

    `of` is its unit, in the plural, and `none` the meaning of an allowed None.
    """
    value = plain(value)
    real = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = real and (value >= 0 if zero else value > 0)  # type: ignore[operator]  # which NaN is not
    if not (is_valid or (none and value is None)):
        phrase = ("a number" if zero else "a positive number") + (f" of {of}" if of else "")
        raise ConfigError(f"{name}={value!r}: give {phrase}{', 0 or more' if zero else ''}{_or_none(none)}")
    return value


def real(name: str, value: N, *, none: str = "") -> N:
    """Return any number but NaN, as an int or a float; `none` is the meaning of an allowed None."""
    value = plain(value)
    if not ((type(value) in (int, float) and value == value) or (none and value is None)):
        raise ConfigError(f"{name}={value!r}: give a number{_or_none(none)}")
    return value


def valid_name(kind: str, value: str) -> str:
    """Return a name of a part of the state: a string that is not empty and has no "/"."""
    if not isinstance(value, str) or not value or "/" in value:
        raise ConfigError(f"{kind} name {value!r}: give a string without '/', not empty")
    return value


def positive(value: Any, returned: str, remedy: str) -> float:
    """Return a user's value as a float; it must be finite and above 0; `returned` names the user's method."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of many elements
        number = math.nan
    if not 0 < number < math.inf:
        raise MetricError(f"{returned} returned {value!r}; return {remedy}, a finite number above 0")
    return number


def _or_none(meaning: str) -> str:
    return f", or None {meaning}" if meaning else ""
