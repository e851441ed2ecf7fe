"""`everstep runs`"""

from __future__ import annotations

import click

from everstep.cli.finding import as_it_stands, index_option, json_option, open_index
from everstep.cli.output import print_json, print_table
from everstep.index.filters import ordered, parse, where
from everstep.index.queries import FACTS, all_runs

COLUMNS = ("name", "status", "step", "epoch", "started")


@click.command("runs")
@click.argument("conditions", nargs=-1)
@click.option("--sort", metavar="NAME", help="Sort by a fact or metric; -NAME: the largest first.")
@click.option("--columns", metavar="A,B,...", help=f"What to show; default {','.join(COLUMNS)}.")
@click.option("--limit", type=click.IntRange(min=1), help="Show the first so many.")
@index_option
@json_option
def command(
    conditions: tuple[str, ...],
    sort: str | None,
    columns: str | None,
    limit: int | None,
    index: str | None,
    as_json: bool,
) -> None:
    """List runs, the newest start last.

    CONDITIONS are comparisons that must all hold: 'valid_loss<0.3' status=finished.  A name is a fact
    (name, status, step, epoch, created, started, heartbeat, seed, path, reason), a metric, whose last
    value counts (valid_loss, or step/loss for one phase), or a path into what was recorded of the newest
    start (git.commit, packages.torch).  A run's name is meant without its six digits, too: name=digits.
    Status is running, finished, stopped, failed, killed, or gone (its directory is not there any more).
    """
    asked = parse(" ".join(conditions))
    shown = [part.strip() for part in columns.split(",") if part.strip()] if columns else list(COLUMNS)
    by = sort.removeprefix("-") if sort else None
    wanted = [condition.name for condition in asked] + shown + ([by] if by else [])
    database = open_index(index)
    with database.read() as connection:
        found = where([as_it_stands(database, run) for run in all_runs(connection, wanted)], asked)
    if by and sort:
        found = ordered(found, by, sort.startswith("-"))
    found = found[:limit]
    if not columns:
        shown += [name for name in dict.fromkeys(wanted) if name not in shown]
    if as_json:
        keys = shown if columns else [*FACTS, *(name for name in shown if name not in FACTS)]
        print_json([{key: run.get(key) for key in keys} for run in found])
    elif found:
        print_table(found, shown)
    else:
        click.echo(f"no run matches {' '.join(conditions)}" if conditions else "there are no runs")
