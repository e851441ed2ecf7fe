"""`everstep import`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from everstep.cli.common_options import index_option, json_option
from everstep.cli.output import note, print_json, say
from everstep.display.cells import in_line
from everstep.errors import RunDirError
from everstep.importing.sources import FORMATS, found


@click.command("import")
@click.argument("format", type=click.Choice(list(FORMATS)))
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder for the run directories.",
)
@index_option
@json_option
def command(format: str, path: Path, into: Path, index: str | None, as_json: bool) -> None:
    """Bring runs of TensorBoard, MLflow or W&B (offline) into the index.

    PATH is a file or a folder, searched with all folders below; nothing there is changed.  Brought are
    metrics, settings, times and how each run ended; what is left out, such as images, is counted.  An import
    can be repeated: only what is new is added.
    """
    from everstep.importing.foreign_run import bring
    from everstep.index.database import Database
    from everstep.index.location import FILE, is_said
    from everstep.index.query import index_place
    from everstep.index.shipping import sync

    problems: list[str] = []
    told: list[dict[str, Any]] = []
    failed = False
    for run in found(format, path, problems.append):
        try:
            place, is_new = bring(run, into)
        except RunDirError as error:
            failed = True
            problems.append(f"{in_line(run.name)} is left out: {error}")
            continue
        left = {kind: count for kind, count in run.left_out.items() if count}
        told.append({"run": str(place), "is_new": is_new, "rows": run.rows, "left_out": left})
    home = index_place(index)
    if index is None and not is_said() and isinstance(home, Path) and not home.exists():
        home = into.absolute() / FILE
    shipped = sync(Database(home), [into])
    problems += shipped.problems
    if as_json:
        print_json({"runs": told, "problems": problems})
        sys.exit(failed)
    note(problems)
    for each in told:
        left_out = ", ".join(f"{count} {in_line(kind)}" for kind, count in each["left_out"].items())
        state = "imported" if each["is_new"] else "is there"
        end = f"; left out: {left_out}" if left_out else ""
        say(f"{in_line(each['run'])}: {state}, values: {each['rows']}{end}")
    say(f"runs: {len(told)}, new: {sum(each['is_new'] for each in told)}")
    sys.exit(failed)
