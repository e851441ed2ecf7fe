"""`everstep show`"""

from __future__ import annotations

from typing import Any

import click

from everstep.cli.common_options import index_option, json_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import print_json, print_table, say, status_of
from everstep.display.cells import cell, in_line
from everstep.index.run_facts import GONE

_METRIC = ("phase", "name", "rows", "last", "step", "smallest", "largest", "best", "best_step")
_START = ("number", "started", "from", "ranks", "status", "step", "verified", "reason")
_EVALUATION = ("stream", "checkpoint", "step", "time", "found")
_FAILURE = ("segment", "rank", "kind", "step", "time", "what", "cause")
_ROLLBACK = ("number", "step", "checkpoint", "quarantined", "reason")
_CHECKPOINT = ("name", "bytes", "created", "pinned", "next")


@click.command("show")
@run_argument
@click.option("--metric", metavar="NAME", help="Print the rows of this metric: NAME, or PHASE/NAME.")
@click.option("--phase", help="Only rows of this phase (head, step, tail, epoch, eval/STREAM).")
@index_option
@json_option
def command(run: str, metric: str | None, phase: str | None, index: str | None, as_json: bool) -> None:
    """Show one RUN: facts, starts, metrics, failures, best weights, checkpoints, and evaluations by other
    programs.

    The tracebacks, and the stacks of a hang, are in the files of RUN/failures.

    If RUN is a directory, only its journal is read: no index is needed, nothing is written.
    """
    from everstep.index.run_queries import metric_rows
    from everstep.views.describe_run import describe

    found = find(run, index)
    with found.database.read() as connection:
        if metric is not None:
            rows = [row._asdict() for row in metric_rows(connection, found.id, metric, phase)]
            if as_json:
                print_json(rows)
            else:
                print_table(rows, ("epoch", "step", "phase", "name", "value"))
            return
        described = describe(connection, found)
    if as_json:
        print_json(described)
    else:
        _print(described)


def _ranks(start: dict[str, Any]) -> str:
    """Say the number of ranks of a start, and that of the checkpoint if it was another."""
    before = f"{start['ranks_before']} -> " if start["ranks_before"] else ""
    return f"{before}{start['ranks'] or '-'}"


def _digest(run: dict[str, Any]) -> str | None:
    newest = next((one for one in reversed(run["checkpoints"]) if one["whole"]), None)
    mixed = newest is not None and not newest["one_fingerprint"]
    told = "computed on more than one kind of machine, number or layout of ranks"
    return f"{run['digest']} ({told})" if mixed else run["digest"]


def _print(run: dict[str, Any]) -> None:
    from everstep.views.checkpoint_tables import BEST

    reason = in_line(f": {run['reason']}") if run["reason"] else ""
    say(f"{in_line(run['name'])}  {status_of(run)}{reason}")
    if run["status"] == GONE:
        say("  its directory is gone: everstep sync FOLDER finds the run in its new place")
    facts = run["facts"]
    git = facts.get("git") or {}
    if run["diverged"] is not None:
        accept = f"everstep accept {run['name']} --divergence {run['diverged']}"
        say(f"  steps that were executed again gave other results: drill the script, or {accept}")
    lines = {
        "directory": run["path"],
        "stands at": f"step {run['step']}" + (f", epoch {run['epoch']}" if run["epoch"] else ""),
        "digest": _digest(run),
        "created": cell("created", run["created"]),
        "last seen": cell("heartbeat", run["heartbeat"]),
        "seed": run["seed"],
        "tags": " ".join(map(str, run["tags"])),
        "note": run["note"],
        "command": " ".join(map(str, facts.get("argv", []))),
        "code": " ".join(
            [str(git.get("commit") or "")[:12], git.get("branch") or "", "dirty" if git.get("dirty") else ""]
        ).strip(),
        "machine": f"{facts.get('host', '-')}, Python {facts.get('python', '-')}",
    }
    for name, value in lines.items():
        if value not in ("", None):
            say(f"  {name:10} {in_line(str(value))}")
    begun = [{**start, "ranks": _ranks(start)} for start in run["segments"]]
    several = any(start["ranks"] not in ("-", "1") for start in begun)
    _section("starts", begun, _START if several else tuple(name for name in _START if name != "ranks"))
    _section("metrics", run["metrics"], _METRIC, spare=("smallest", "largest", "rows", "step"))
    _section("failures", run["failures"], _FAILURE)
    _section("rollbacks", run["rollbacks"], _ROLLBACK)
    _section("checkpoints", run["checkpoints"], _CHECKPOINT)
    _section("best weights", run["best"], BEST)
    for one in run["evaluations"]:
        one["found"] = ", ".join(f"{name} {cell(name, value)}" for name, value in one["metrics"].items())
    _section("evaluations", run["evaluations"], _EVALUATION)


def _section(
    title: str, rows: list[dict[str, Any]], columns: tuple[str, ...], spare: tuple[str, ...] = ()
) -> None:
    if rows:
        say(f"\n{title}")
        print_table(rows, columns, indent="  ", spare=spare)
