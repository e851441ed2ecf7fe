"""Commands on all runs of an index: `runs`, `sync`, `sql`; and the search that `prune` has, too."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.cli import common as cli
from everstep.display.cells import in_line
from everstep.errors import ConfigError
from everstep.index import FACTS, SHOWN

if TYPE_CHECKING:
    from everstep.index.run_queries import RunColumns


def search(
    index: str | None, conditions: Sequence[str], filter_text: str | None, fields: Sequence[str] = ()
) -> tuple[RunColumns, list[dict[str, Any]], list[str]]:
    """Find runs; return the columns of the index, the runs, and the names in the conditions."""
    from everstep.index.filters import CONTAINS, Group, leaves, parse_json, parse_words
    from everstep.index.query import open_index
    from everstep.index.run_queries import RunColumns

    condition = Group(all, (parse_words(" ".join(conditions)), parse_json(filter_text or "{}")))
    names = [leaf.path for leaf in leaves(condition) if leaf.operator != CONTAINS]
    database, problems = open_index(index)
    cli.note(problems)
    columns = RunColumns(database)
    runs = columns.find(condition, fields)
    columns.add(runs, [*names, *fields])
    return columns, runs, names


@cli.command()
def runs_command(
    conditions: tuple[str, ...] = cli.argument(nargs=-1),
    filter_text: str | None = cli.WHERE,
    sort: str | None = cli.option("NAME", "Fact or metric to sort by; -NAME for the largest first."),
    columns: str | None = cli.option("A,B,...", f"Columns to show; default: {','.join(SHOWN)} and a metric."),
    limit: int | None = cli.option(cli.COUNT, "Show the first N runs."),
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
) -> None:
    """List runs, the newest start last, with the metric that most of them watch, or have.

    What `Throughput` and `System` measure of the machine is never that metric.

    CONDITIONS are comparisons that must all hold: 'valid_loss<0.3' status=finished.  A name is a fact
    (name, status, step, epoch, created, started, heartbeat, seed, path, reason), a metric (valid_loss, or
    step/loss for one phase; its last value is compared), best/ and a metric for its best value, a setting
    as the script gave it by config= (config.lr), or another path into the record of the newest start
    (git.commit, packages.torch); tags=WORD finds the runs with that tag, and `note` is a run's note.
    duration is the seconds in which its starts were alive (duration>3600).  starts, kills and verified tell
    how often a run was started and killed, and whether its resumes were verified.  A word alone finds the
    names that contain it.  The status is running, finished, stopped, failed, killed, or gone (the directory
    does not exist any more).
    """
    from everstep.index.filters import ordered
    from everstep.index.location import is_run

    headers = [part.strip() for part in (columns or ",".join(SHOWN)).split(",") if part.strip()]
    by = (sort or "").removeprefix("-")
    table, runs, names = search(index, conditions, filter_text, [*headers, by] if by else headers)
    metric = None if columns or as_json else table.telling_metric()
    if metric is not None and {metric, f"best/{metric}"}.isdisjoint([*names, by]):
        names.insert(0, metric)
    table.add(runs, [*names, "ranks"])
    runs = ordered(runs, by, str(sort).startswith("-"))[:limit] if by else runs[:limit]
    if not columns:
        more = ["ranks"] * any(run.get("ranks", 1) > 1 for run in runs) + names + [by] * bool(by)
        headers += [name for name in dict.fromkeys(more) if name not in headers]
    for run in runs:
        if isinstance(tags := run.get("tags"), str):  # not a metric of that name
            run["tags"] = json.loads(tags) if as_json else " ".join(map(str, json.loads(tags)))
    if as_json:
        keys = headers if columns else list(dict.fromkeys([*FACTS, "ranks", *headers]))
        cli.print_json([{key: run.get(key) for key in keys} for run in runs])
    elif runs:
        cli.print_table([{**run, "status": cli.status_of(run)} for run in runs], headers)
    else:
        query = " ".join([*conditions, *([filter_text] if filter_text else [])])
        cli.say(f"no run matches {query}" if query else "there are no runs")
        for word in filter(os.path.isdir, conditions):
            command = "show" if is_run(Path(word)) else "runs --index"
            cli.note([f"{word} is a folder, not a condition: everstep {command} {shlex.quote(word)}"])


@cli.command()
def sync_command(
    folders: tuple[Path, ...] = cli.argument(nargs=-1, type=cli.FOLDER),
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
) -> None:
    """Update the index from the journals, or make it.

    FOLDERS are run directories or folders of them.  Default: the folder of the index; for a database ./runs,
    or else the current folder.  A run that was moved gets its new path.  Runs of this machine below FOLDERS
    whose directories are gone are removed from the index.  Damage in a journal is reported with its place,
    and the rest is indexed.
    """
    from everstep.index.database import Database
    from everstep.index.location import runs_of
    from everstep.index.query import index_place
    from everstep.index.shipping import forget_gone, sync

    place = index_place(index)
    database, folders = Database(place), folders or (runs_of(place),)
    shipped = sync(database, folders)
    forgotten = forget_gone(database, folders)
    if as_json:
        counts = {"index": database.name, "runs": shipped.runs, "rows": shipped.rows}
        cli.print_json({**counts, "forgotten": list(forgotten), "problems": shipped.problems})
        return
    cli.note(shipped.problems)
    nowhere = "" if shipped.runs else "; runs are looked for in these folders and directly below them"
    cli.say(f"{database.name}: {shipped.runs} runs, {shipped.rows} new rows{nowhere}")
    for name, folder in forgotten.items():
        cli.say(f"forgotten: {in_line(name)}, whose directory {in_line(folder)} is gone")


@cli.command()
def sql_command(
    statement: str = cli.argument(), index: str | None = cli.INDEX, as_json: bool = cli.JSON
) -> None:
    """Ask the index by a SELECT; nothing can be changed.

    \b
      everstep sql "select name, status, step from runs where kills > 0"
      everstep sql "select run, step, value from evaluations where name = 'valid_loss'"

    Tables: runs, segments (starts), facts (the record of a run's newest start, as JSON), series, metrics,
    checkpoints, events.  Views: valid_metrics has the values that no resume superseded, with the names of
    runs and metrics; evaluations those measured outside steps.  Times are seconds since 1970, NaN is NULL.
    """
    from sqlalchemy.exc import DBAPIError

    from everstep.index.query import open_index

    database, problems = open_index(index)
    cli.note(problems)
    with database.read() as connection:
        try:
            result = connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
            rows = [dict(row) for row in result.mappings()] if result.returns_rows else None
        except DBAPIError as error:
            message = f"the index {database.name} does not take this statement: {error.orig}"
            raise ConfigError(message) from None
    if rows is None:
        raise ConfigError(f"{statement!r} returns no rows; give a SELECT")
    cells: list[dict[str, Any]] = [
        {name: f"{len(value)} bytes" if isinstance(value, bytes) else value for name, value in row.items()}
        for row in rows
    ]
    cli.print_json(cells) if as_json else cli.print_table(cells, list(result.keys()))
