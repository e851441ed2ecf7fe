"""Conversion of paths that a user gives; every such path passes here."""

from __future__ import annotations

import os
from pathlib import Path

from everstep.errors import ConfigError


def user_path(path: object, argument: str) -> Path:
    """Return the path, with a leading "~" as the user's home.

    Args:
        argument: the argument's name, for the message.

    Raises:
        ConfigError: the value is not a path, or names the home of an unknown user.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes) or not os.fspath(path):
        raise ConfigError(f'{argument}={path!r} is not a path; give a path, as in {argument}="runs/first"')
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{argument}={str(path)!r}: {error}; give the path without '~'") from error
