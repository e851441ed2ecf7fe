"""The one place where a path that a user gives becomes one of ours."""

from __future__ import annotations

import os
from pathlib import Path

from everstep.errors import ConfigError


def user_path(path: object, argument: str) -> Path:
    """The path, with a leading "~" as the user's home.

    Args:
        argument: what the path was given as, for the message.

    Raises:
        ConfigError: it is no path, or the home of no known user.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes) or not os.fspath(path):
        raise ConfigError(f'{argument}={path!r} is no path; give one, as in {argument}="runs/first"')
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{argument}={str(path)!r}: {error}; give the path without '~'") from error
