"""`everstep prune`"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.cli.common_options import complete_run, index_option, json_option, where_option
from everstep.cli.find_run import find_all, index_with
from everstep.cli.output import note, print_json, print_table, say
from everstep.errors import RunDirError, RunIndexError
from everstep.index.run_facts import GONE

if TYPE_CHECKING:
    from everstep.index.database import Database

_COLUMNS = ("name", "status", "step", "epoch", "started", "bytes", "path")


@click.command("prune")
@click.argument("chosen", nargs=-1, metavar="RUN...|CONDITION...", shell_complete=complete_run)
@where_option
@click.option("--delete", is_flag=True, help="Delete; without --delete, only list what would be deleted.")
@index_option
@json_option
def command(
    chosen: tuple[str, ...], filter_text: str | None, delete: bool, index: str | None, as_json: bool
) -> None:
    """Delete RUNs, or the runs that fulfil all CONDITIONS (as in `everstep runs`).

    \b
      everstep prune 'epoch<1'                # list what would be deleted
      everstep prune status=failed --delete

    RUN is a directory or a whole name, with or without its six digits; the beginning of a name is not
    enough.

    Only run directories are deleted, each as a whole.  A run that is running stays.  Exit status 1 if a named
    RUN stays.
    """
    conditions = [each for each in chosen if re.search("[<>=]", each) and not Path(each).exists()]
    names = [each for each in chosen if each not in conditions]
    searched = bool(conditions or filter_text)
    if not names and not searched:
        raise click.UsageError("give RUNs, CONDITIONS such as 'epoch<1', or --where JSON")
    if names and searched:
        raise click.UsageError("give RUNs, or CONDITIONS and --where, not both")
    found: Sequence[tuple[Database, Mapping[str, Any]]] = (
        [(run.database, run.facts) for run in find_all(names, index, exactly=True)]
        if names
        else _searched(index, conditions, filter_text)
    )
    rows = [_pruned(database, run, delete, index) for database, run in found]
    stay = [row for row in rows if row["stays"]]
    if as_json:
        print_json(rows)
    else:
        note(f"{row['name']} stays: {row['stays']}" for row in stay)
        _say([row for row in rows if not row["stays"]], delete)
    if stay and names:
        sys.exit(1)


def _searched(
    index: str | None, conditions: Sequence[str], filter_text: str | None
) -> list[tuple[Database, Mapping[str, Any]]]:
    """Find the runs whose directories exist; records of evaluations are deleted with their run."""
    from everstep.cli.search_runs import search

    searched = search(index, conditions, filter_text)
    there = [run for run in searched.runs if run["status"] != GONE]
    return [(searched.database, run) for run in there if Path(run["path"]).name != "evaluations"]


def _pruned(database: Database, run: Mapping[str, Any], delete: bool, index: str | None) -> dict[str, Any]:
    """Delete a run if `delete`; return its row, with the reason if it stays."""
    from everstep.record import remove

    path = Path(run["path"])
    row = {name: run.get(name) for name in _COLUMNS} | {"stays": _why_stays(database, run), "deleted": False}
    if row["stays"]:
        return row
    row["bytes"] = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    if delete:
        try:
            remove(path, run["name"])
        except RunDirError as error:
            return row | {"stays": str(error)}
        row["deleted"] = True
        _forget(database, path, index)
    return row


def _forget(database: Database, path: Path, index: str | None) -> None:
    """Take a deleted run out of the index; a run that was given by its directory was read without it."""
    from everstep.index.shipping import forget_gone

    for place in (database, index_with(path, index)):
        try:
            if place is not None:
                forget_gone(place, [path])
        except RunIndexError as error:
            note([f"the index still has {path}: {error}; everstep sync takes the run out"])


def _why_stays(database: Database, run: Mapping[str, Any]) -> str:
    from everstep.index.shipping import is_here
    from everstep.record import why_stays

    if run["status"] == GONE:
        return "its directory is gone; everstep sync removes it from the index"
    if not is_here(database, run["host"]):
        return f"it is on {run['host']}"
    if run["status"] == "running":
        return "it is running"
    return why_stays(Path(run["path"]), run["name"])


def _say(rows: list[dict[str, Any]], delete: bool) -> None:
    if rows:
        print_table(rows, _COLUMNS)
    gone = f"{len(rows)} run{'s' * (len(rows) != 1)}"
    say(f"{gone} deleted" if delete else f"{gone} would be deleted; pass --delete to delete")
