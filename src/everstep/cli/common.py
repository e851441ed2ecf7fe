"""What several commands share: options, the runs that are meant, output, and signals."""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.display.cells import TIMES, cell, in_line, is_number_column, shown

if TYPE_CHECKING:
    from everstep.index.database import Database
    from everstep.views.describe_run import Found

COUNT = click.IntRange(min=1)
PATH = click.Path(path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def command(interspersed: bool = True, **more: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function `NAME_command`; its docstring is the help.

    Its options and arguments are the defaults of the function's parameters, and `more` for its `**options`.
    """

    def make(function: Callable[..., None]) -> click.Command:
        parameters = inspect.signature(function).parameters.values()
        declared = {each.name: each.default for each in parameters if each.kind != each.VAR_KEYWORD} | more
        return click.Command(
            function.__name__.removesuffix("_command"),
            callback=function,
            params=[make_parameter(name) for name, make_parameter in declared.items()],
            help=inspect.getdoc(function),
            context_settings={"allow_interspersed_args": interspersed},
        )

    return make


def option(value: Any, help: str, names: str = "", **more: Any) -> Any:
    """Declare an option by its type, or a word for its value; `names`: other names than the parameter's."""
    kind = "metavar" if isinstance(value, str) else "type"

    def make(name: str) -> click.Parameter:
        flags = names or f"--{name.replace('_', '-')}"
        return click.Option([name, *flags.split()], help=help, **{kind: value}, **more)

    return make


def flag(help: str, names: str = "") -> Any:
    """Declare an option without a value."""
    return option(None, help, names, is_flag=True)


def argument(metavar: str | None = None, **more: Any) -> Any:
    return lambda name: click.Argument([name], metavar=metavar, **more)


RUN = argument()
RUNS = argument(nargs=-1, required=True)
CONFIG = argument("FILE... [PATH=VALUE...]", nargs=-1)
OVERRIDES = argument("[PATH=VALUE...]", nargs=-1)
INDEX = option("PATH|URL", "Index: a file, a folder of runs with one, or postgresql://USER@HOST/DATABASE.")
JSON = flag("Print JSON.", "--json")
JSON_FILE = option(PATH, "File for the result, as JSON.", "--json")
KEEP = option(PATH, "New folder to keep what is made in.")
WHERE = option("JSON", "Filter in MongoDB's language; see docs/guide/queries.md.", "--where")
TRUST = flag("Import and call the code that the run names, though the run is not marked as yours.")
PROFILE = option("NAME", "Profile of the config to apply.")
WEIGHTS = option("best|best/METRIC|CHECKPOINT", "Weights, or a path; default: the newest checkpoint.")
TRAINING = {
    "on_change": option(
        click.Choice(["error", "keep", "override", "fork"]),
        "If this config and that of the run differ in what changes training: error refuses, keep resumes "
        "with the run's config, override resumes with this one, fork continues with this one in a new run.",
        default="error",
    ),
    "strict_git": flag("Refuse code that is not committed and pushed."),
    "skip_check": flag("Do not check git."),
    "trust": TRUST,
}
"""Options of `train`, `resume` and `sweep`."""
SCHEDULE = option(str, "Schedule of the Experiment to run.", default="train")
DRY_RUN = flag("Make all objects, but train nothing and leave no files.")


def find(text: str, index: str | None) -> Found:
    """Find the run that RUN means; `index` is what --index names."""
    return find_all([text], index)[0]


def find_all(texts: Sequence[str], index: str | None, *, exactly: bool = False) -> list[Found]:
    """Find runs as `everstep.views.describe_run.find_all` does; print faults as notes."""
    from everstep.views.describe_run import find_all

    return find_all(texts, index, note, exactly=exactly)


def index_with(run_dir: Path, index: str | None) -> Database | None:
    """Return the index to which a run is shipped, which may not exist; None if it is off."""
    from everstep.index import query
    from everstep.index.database import Database
    from everstep.index.location import index_of

    place = index_of(run_dir) if index is None else query.index_place(index)
    return None if place is None else Database(place)


def status_of(run: Mapping[str, Any]) -> str:
    """Return the status of a run, with the step of its divergence if it has diverged."""
    diverged = run.get("diverged")
    return str(run["status"]) if diverged is None else f"{run['status']}, diverged at {diverged}"


def say(text: str = "", *, err: bool = False) -> None:
    """Print lines for people."""
    click.echo(shown(text), err=err)


def note(problems: Iterable[str]) -> None:
    """Print the faults of journals, and other notes, to stderr."""
    from everstep.redaction import redacted

    for problem in problems:
        say(f"note: {in_line(redacted(problem))}", err=True)


def print_json(value: Any) -> None:
    """Print strict JSON: "nan", "inf" and "-inf" are strings, which every language can read back."""
    from everstep.display.cells import with_leaves

    def strict(leaf: Any) -> Any:
        return str(leaf) if isinstance(leaf, float) and not math.isfinite(leaf) else leaf

    click.echo(json.dumps(with_leaves(value, strict), indent=1))


_NARROWEST = 8
"""Characters that a string keeps at least in a table that is too wide."""


def print_table(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], indent: str = "", widest: int = sys.maxsize
) -> None:
    """Print rows in columns, all but the first of at most `widest` characters and as a terminal has room.

    Strings that are too long lose their middle.
    """
    rows = list(rows)
    cells = [[cell(name, row.get(name)) for name in columns] for row in rows]
    lines = [[in_line(name) for name in columns], *cells]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    widths[1:] = [min(width, widest) for width in widths[1:]]
    is_number = [is_number_column(name, rows) for name in columns]
    floors = [
        max((len(line[at]) for line in cells if is_number[at] or name in TIMES), default=_NARROWEST)
        for at, name in enumerate(columns)
    ]
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        room = shutil.get_terminal_size().columns - len(indent) - 2 * (len(columns) - 1)
        while sum(widths) > room and (wide := [at for at, width in enumerate(widths) if width > floors[at]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
    for line in lines:
        padded = []
        for text, width, is_right in zip(line, widths, is_number, strict=True):
            if len(text) > width:
                text = f"{text[: width // 2]}…{text[width // 2 + 1 - width :]}"
            padded.append(text.rjust(width) if is_right else text.ljust(width))
        say((indent + "  ".join(padded)).rstrip())


ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a training to save and to end."""

DIVERGED = 5
"""Exit status of a run that has diverged."""
_STATUS = {0: "finished", 3: "out of time", 4: "requirement not met", DIVERGED: "diverged"}


def leave_in_order() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that it ends what it has started."""

    def leave(number: int, frame: object) -> None:
        for other in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, leave)


def in_words(status: int) -> str:
    """Say how a training ended, from its exit status; -N is signal N, and so is 128 + N, as in shells."""
    with suppress(ValueError):  # the status is not a signal's
        number = signal.Signals(-status if status < 0 else status - 128)
        return f"{'stopped' if status > 0 and number in ASKING else 'killed'} by {number.name}"
    return _STATUS.get(status, "failed")
