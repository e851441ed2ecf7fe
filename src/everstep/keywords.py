"""Unknown keyword arguments are errors with the nearest name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from everstep.errors import ConfigError, nearest

P = ParamSpec("P")
R = TypeVar("R")


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a call with an unknown keyword raise `ConfigError` with the nearest name."""
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                owner = function.__qualname__.removesuffix(".__init__")
                raise ConfigError(f"{owner}() has no argument {name!r}; {nearest(name, known)}")
        return function(*args, **kwargs)

    return call
