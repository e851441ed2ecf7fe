"""`everstep runs`"""

from __future__ import annotations

import click

from everstep.cli.common_options import index_option, json_option, where_option
from everstep.cli.output import print_json, print_table, say, status_of
from everstep.cli.search_runs import search
from everstep.index.filters import ordered
from everstep.index.run_queries import FACTS

COLUMNS = ("name", "status", "step", "epoch", "started")


@click.command("runs")
@click.argument("conditions", nargs=-1)
@where_option
@click.option("--sort", metavar="NAME", help="Fact or metric to sort by; -NAME for the largest first.")
@click.option("--columns", metavar="A,B,...", help=f"Columns to show; default: {','.join(COLUMNS)}.")
@click.option("--limit", type=click.IntRange(min=1), help="Show the first N runs.")
@index_option
@json_option
def command(
    conditions: tuple[str, ...],
    filter_text: str | None,
    sort: str | None,
    columns: str | None,
    limit: int | None,
    index: str | None,
    as_json: bool,
) -> None:
    """List runs, the newest start last.

    CONDITIONS are comparisons that must all hold: 'valid_loss<0.3' status=finished.  A name is a fact
    (name, status, step, epoch, created, started, heartbeat, seed, path, reason), a metric (valid_loss, or
    step/loss for one phase; its last value is compared), or a path into the record of the newest start
    (git.commit, packages.torch).  name=digits finds runs of that name, with or without the six digits; the
    beginning of a name is not enough.  The status is running, finished, stopped, failed, killed, or gone (the
    directory does not exist any more).
    """
    shown = [part.strip() for part in columns.split(",") if part.strip()] if columns else list(COLUMNS)
    by = sort.removeprefix("-") if sort else None
    searched = search(index, conditions, filter_text, [*shown, *([by] if by else [])])
    found = searched.runs
    if by and sort:
        found = ordered(found, by, sort.startswith("-"))
    found = found[:limit]
    if not columns:
        shown += [name for name in dict.fromkeys(searched.names) if name not in shown]
    if as_json:
        keys = shown if columns else [*FACTS, *(name for name in shown if name not in FACTS)]
        print_json([{key: run.get(key) for key in keys} for run in found])
    elif found:
        print_table([{**run, "status": status_of(run)} for run in found], shown)
    else:
        said = " ".join([*conditions, *([filter_text] if filter_text else [])])
        say(f"no run matches {said}" if said else "there are no runs")
