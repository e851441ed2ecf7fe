"""Formats of runs that can be imported, and the search for runs in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.errors import ConfigError

if TYPE_CHECKING:
    from everstep.importing.foreign_run import ForeignRun

FORMATS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb-offline": "wandb_offline"}
"""Name of a format -> module that reads it: `sources(path, say)` yields the place of each run, and the
function that reads it into a `ForeignRun`."""


def found(format: str, path: Path, say: Callable[[str], None]) -> Iterator[ForeignRun]:
    """Find and read the runs of another program, one at a time; nothing there is changed.

    Args:
        format: a name of `FORMATS`.
        path: a file or folder, searched with all folders below.
        say: told of each file that cannot be read, and why; the others are read.
    """
    from everstep.importing.foreign_run import ForeignRun

    count = 0
    for source, read in import_module(f"{__package__}.{FORMATS[format]}").sources(path, say):
        run = ForeignRun(format, source)
        try:
            read(run)
        except Exception as error:  # a file may hold anything, and must not stop the others
            how = "read up to its damage" if run.key else "left out"
            say(f"{source} is {how}: {type(error).__name__}: {error}")
        if run.key:
            count += 1
            yield run
    if not count:
        raise ConfigError(f"no run of {format} in {path}; give the folder into which it has recorded")
