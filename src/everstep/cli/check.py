"""`everstep check`"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import click

from everstep.cli.common_options import json_option
from everstep.cli.output import print_json
from everstep.errors import ConfigError, nearest
from everstep.experiment.import_paths import imported


@click.command("check")
@click.argument("spec", metavar="OBJECT")
@click.option(
    "--change",
    metavar="FUNCTION",
    help="Function that changes OBJECT as training does; OBJECT is then checked as state.",
)
@json_option
def command(spec: str, change: str | None, as_json: bool) -> None:
    """Test whether OBJECT comes back from what it saves.  The test works on copies.

    OBJECT is MODULE:NAME or FILE.py:NAME.  It is data (a loader, a dataset, any iterable of batches), or
    state if --change names a function (in the same form) that is called with the object.  A function or
    class is called without arguments.  The module or file is imported.  Exit status 1 if a run could not
    restore OBJECT.
    """
    obj = _named(spec)
    if isinstance(obj, type) or type(obj).__name__ == "function":
        obj = obj()
    from everstep.testing import check

    found = check(obj, None if change is None else _named(change))
    if as_json:
        word = None if found.word is None else found.word._asdict()
        print_json({"kind": found.kind, "word": word, "run": found.run._asdict()})
    else:
        click.echo(f"{spec}: a {type(obj).__name__}, as {found.kind}\n{found}")
    if not found.run.kept:
        sys.exit(1)


def _named(spec: str) -> Any:
    """Import the object that MODULE:NAME or FILE.py:NAME names."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        sys.path.insert(0, "")  # as for python -m
        return imported(spec)
    if not Path(file).is_file():
        raise ConfigError(f"file {file} does not exist; give MODULE:NAME or FILE.py:NAME")
    names = runpy.run_path(file)
    if name not in names:
        raise ConfigError(f"{file} has no {name!r}; {nearest(name, names)}")
    return names[name]
