"""`everstep report`"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep.cli.common_options import complete_run, index_option
from everstep.cli.find_run import find_all
from everstep.cli.output import say
from everstep.display.cells import size
from everstep.durable import write_whole
from everstep.errors import ConfigError
from everstep.untrusted_files import open_regular

if TYPE_CHECKING:
    from everstep.views.find_run import Found

_LISTED = 3
"""Most names in a title."""


@click.command("report")
@click.argument("runs", nargs=-1, required=True, shell_complete=complete_run)
@click.option(
    "-o",
    "--out",
    default="report.html",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, which ends in .html; an earlier report there is replaced.",
)
@click.option("--title", help="Headline of the report; default: the names of the runs.")
@click.option(
    "--points",
    default=1000,
    show_default=True,
    type=click.IntRange(10, 100_000),
    help="Most points of a line; all lines together have at most 100,000.",
)
@index_option
def command(runs: tuple[str, ...], out: Path, title: str | None, points: int, index: str | None) -> None:
    """Write RUNS as one HTML file, to send, to attach, to keep: charts, timeline, images, config, log.

    A browser opens the file from disk; nothing is loaded from a network or a server.  The file verifies the
    SHA-256 of its data and shows the result; this command prints the same digest.  Equal runs give equal
    files, but for the time in the headline (SOURCE_DATE_EPOCH sets this time).

    The file has what the runs recorded of themselves: also names of machines, paths, command lines, the log.
    """
    from importlib.metadata import version

    from everstep.ui.report_data import report_data
    from everstep.ui.report_page import report_page

    _require_free(out)
    found = _once(find_all(runs, index))
    data = report_data([name for name, _ in found], [run for _, run in found], points)
    headline = title or _title([run["name"] for run in data["runs"]])
    page, digest = report_page(data, headline, version("everstep"), _now())
    try:
        write_whole(out.absolute(), page, "report")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; give another file") from None
    say(f"{out}: {len(found)} run{'s' * (len(found) > 1)}, {size(len(page))}, SHA-256 of the data {digest}")


def _require_free(out: Path) -> None:
    """Refuse to replace a file that is not a report."""
    from everstep.ui.report_page import BEGIN

    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {str(out)!r}: give a file that ends in .html")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}; make it first")
    if os.path.lexists(out):
        try:
            with open_regular(out) as file:
                is_ours = file.read(len(BEGIN)) == BEGIN
        except OSError as error:
            raise ConfigError(f"{out} cannot be replaced ({error.strerror}); give another file") from None
        if not is_ours:
            raise ConfigError(f"{out} is not a report of everstep, and stays; give another file")


def _once(found: list[Found]) -> list[tuple[str, Found]]:
    """Return each run once, with its path; a run that is gone may have the path of another one."""
    each = {(str(run.facts["path"]), str(run.facts["name"])): run for run in found}
    return [(path, run) for (path, _), run in each.items()]


def _title(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} runs: {', '.join(names[:_LISTED])}{more}"


def _now() -> float:
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ConfigError(f"SOURCE_DATE_EPOCH is seconds since 1970, an integer; change {text!r}")
    return float(text) if text else time.time()
