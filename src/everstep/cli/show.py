"""`everstep show`"""

from __future__ import annotations

from typing import Any

import click
from sqlalchemy import Connection

from everstep.cli.checkpoint_tables import (
    BEST,
    asked_for,
    best_values,
    best_weights,
    checkpoints_of,
    digest_of,
)
from everstep.cli.common_options import index_option, json_option, run_argument
from everstep.cli.find_run import Found, find
from everstep.cli.output import cell, in_line, print_json, print_table, say, status_of
from everstep.index.run_queries import FACTS, GONE, metric_rows, rollbacks, starts, summaries
from everstep.index.shipping import is_run
from everstep.record import Rollback, evaluations, failures

_METRIC = ("phase", "name", "rows", "last", "step", "smallest", "largest", "best", "best_step")
_START = ("number", "started", "from", "status", "step", "reason")
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


def describe(connection: Connection, found: Found) -> dict[str, Any]:
    """Return everything about a run except its rows, as JSON."""
    begun = starts(connection, found.id)
    best = best_values(connection, found.id)
    metrics = [
        {
            **one._asdict(),
            **dict(zip(("best", "best_step"), best.get((one.phase, one.name), ()), strict=False)),
        }
        for one in summaries(connection, found.id)
    ]
    return {
        **{name: found.facts[name] for name in FACTS},
        "facts": begun[-1]["facts"] if begun else {},
        "segments": [
            _start(start, found.facts["status"] if start is begun[-1] else "killed") for start in begun
        ],
        "metrics": metrics,
        "rollbacks": [_rollback(one) for one in rollbacks(connection, found.id)],
        "digest": None if found.is_gone else digest_of(found.path),
        "checkpoints": [] if found.is_gone else asked_for(checkpoints_of(found.path)),
        "best": [] if found.is_gone else best_weights(found.path),
        "evaluations": _evaluations(found),
        "failures": [] if found.is_gone else [one._asdict() for one in failures(found.path)],
        "problems": [problem for start in begun for problem in start["problems"]]
        + [start["torn"] for start in begun if start["torn"]],
    }


def _evaluations(found: Found) -> list[dict[str, Any]]:
    there = not found.is_gone and is_run(found.path)
    return [one._asdict() for one in evaluations(found.path)] if there else []


def _rollback(one: Rollback) -> dict[str, Any]:
    return {**one._asdict(), "batches": [b._asdict() for b in one.batches], "quarantined": len(one.batches)}


def _start(start: dict[str, Any], silent: str) -> dict[str, Any]:
    """Return a start of the run; `silent` is its status if it did not record how it ended."""
    told = {name: value for name, value in start.items() if name != "facts"}
    return {"from": start["facts"].get("resumed_from"), **told, "status": start["status"] or silent}


def _digest(run: dict[str, Any]) -> str | None:
    newest = next((one for one in reversed(run["checkpoints"]) if one["whole"]), None)
    mixed = newest is not None and not newest["one_fingerprint"]
    return f"{run['digest']} (computed on more than one kind of machine)" if mixed else run["digest"]


def _print(run: dict[str, Any]) -> None:
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
        "command": " ".join(map(str, facts.get("argv", []))),
        "code": " ".join(
            [str(git.get("commit") or "")[:12], git.get("branch") or "", "dirty" if git.get("dirty") else ""]
        ).strip(),
        "machine": f"{facts.get('host', '-')}, Python {facts.get('python', '-')}",
    }
    for name, value in lines.items():
        if value not in ("", None):
            say(f"  {name:10} {in_line(str(value))}")
    _section("starts", run["segments"], _START)
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
