"""`everstep runs`"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from everstep.cli.common_options import index_option, json_option, where_option
from everstep.cli.output import note, print_json, print_table, say, status_of
from everstep.index.run_facts import FACTS, SHOWN


@click.command("runs")
@click.argument("conditions", nargs=-1)
@where_option
@click.option("--sort", metavar="NAME", help="Fact or metric to sort by; -NAME for the largest first.")
@click.option("--columns", metavar="A,B,...", help=f"Columns to show; default: {','.join(SHOWN)}.")
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
    step/loss for one phase; its last value is compared), best/ and a metric for its best value, a setting
    as the script gave it by config= (config.lr), or another path into the record of the newest start
    (git.commit, packages.torch); tags=WORD finds the runs with that tag, and `note` is a run's note.
    starts, kills and verified tell how often a run was started and killed, and whether its resumes were
    verified.  name=digits finds runs of that name, with or without the six digits; a word alone finds the
    names that contain it.  The status is running, finished, stopped, failed, killed, or gone (the directory
    does not exist any more).  The column ranks, the number of ranks of the newest start, is there where a run
    has several.
    """
    from everstep.cli.search_runs import search
    from everstep.index.filters import ordered

    shown = [part.strip() for part in columns.split(",") if part.strip()] if columns else list(SHOWN)
    by = sort.removeprefix("-") if sort else None
    searched = search(index, conditions, filter_text, [*shown, *([by] if by else [])])
    found = searched.runs
    if by and sort:
        found = ordered(found, by, sort.startswith("-"))
    found = found[:limit]
    note(searched.notes)
    if not columns:
        if any(run.get("ranks", 1) > 1 for run in found):
            shown.append("ranks")
        shown += [name for name in dict.fromkeys(searched.names) if name not in shown]
    found = [{**run, **_tags(run)} for run in found]
    if as_json:
        keys = shown if columns else list(dict.fromkeys([*FACTS, "ranks", *shown]))
        print_json([{key: run.get(key) for key in keys} for run in found])
    elif found:
        print_table([{**run, "status": status_of(run), **_in_a_cell(run)} for run in found], shown)
    else:
        said = " ".join([*conditions, *([filter_text] if filter_text else [])])
        why = f" ({searched.why_none})" if searched.why_none else ""
        say(f"no run matches {said}{why}" if said else "there are no runs")


def _tags(run: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tags of a run as a list; queries give a list as JSON."""
    try:
        tags = json.loads(run.get("tags", ""))
    except (TypeError, ValueError):  # a metric of that name
        return {}
    return {"tags": tags} if isinstance(tags, list) else {}


def _in_a_cell(run: Mapping[str, Any]) -> dict[str, str]:
    return {"tags": " ".join(map(str, run["tags"]))} if isinstance(run.get("tags"), list) else {}
