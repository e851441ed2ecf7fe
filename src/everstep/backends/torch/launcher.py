"""Variables by which a launcher such as torchrun tells a process its place among several."""

from __future__ import annotations

import os

from everstep.errors import ConfigError


def launched(name: str) -> str:
    """Return a variable that launchers such as torchrun set.

    Raises:
        ConfigError: the variable is not set.
    """
    value = os.environ.get(name)
    if not value:
        raise ConfigError(
            f"{name} is not set in one of several processes: set it as torchrun does, or start with torchrun"
        )
    return value


def launched_number(name: str) -> int:
    """Return such a variable as a number, 0 or more.

    Raises:
        ConfigError: the variable is not set, or not a number.
    """
    value = launched(name)
    if not value.isdecimal():
        raise ConfigError(f"{name}={value!r} is not a number: set it as torchrun does")
    return int(value)
