"""What the page shows of one run besides its curves: its starts, how each resume was verified."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select

from everstep.index.database import Database
from everstep.index.readers import id_at
from everstep.index.run_facts import GONE
from everstep.index.run_queries import metric_names, newest_facts
from everstep.index.shipping import is_here
from everstep.index.sql_tables import events, runs, segments, stored
from everstep.record import misfit
from everstep.record.segment_file import step_of
from everstep.record.trust import MARKS
from everstep.ui.run_files import kind_of
from everstep.ui.runs_table import leaves, run_id, shown
from everstep.views.checkpoint_tables import best_values
from everstep.views.describe_run import without_metrics
from everstep.views.find_run import Found
from everstep.views.progress import pace, seconds_left, whole_steps
from everstep.views.starts_of_run import is_start

_ENDS = {
    "finished": "finished",
    "stopped": "signal",
    "failed": "error",
    "killed": "killed",
    "running": "running",
}
"""Status of a start -> its end in the timeline."""


def one_run(
    database: Database, run: Mapping[str, Any], looks: Sequence[tuple[float, int]] = ()
) -> dict[str, Any]:
    """Return what the page shows of a run, as JSON.

    Args:
        run: a row of the table `runs`, whose status is `GONE` without its directory.
        looks: (time, step) at which a running run was seen, for its pace.
    """
    # The directory of another machine's run may be another run here.
    there = is_here(database, run["host"]) and id_at(run["path"]) == run["name"]
    found = Found(database, {**run, "status": run["status"] if there else GONE})
    with database.read() as connection:
        told = without_metrics(connection, found)
        measured = best_values(connection, run["id"])
        noted = list(_events(connection, run["id"]))
        parent = _parent(connection, told["facts"])
        streams = sorted(metric_names(connection, run["id"]))
        whole = whole_steps(connection, run["id"], told["facts"])
    rate = pace(looks) if run["status"] == "running" else 0.0
    facts, config = told["facts"], told["facts"].get("config")
    best = [
        {"metric": f"{phase}/{name}", "value": shown(value), "step": step}
        for (phase, name), (value, step) in measured.items()
    ]
    answer = {
        "id": run_id(run),
        **{name: run[name] for name in ("name", "status", "reason", "created", "seed", "diverged")},
        "heartbeat": None if run["heartbeat"] is None else max(0.0, time.time() - run["heartbeat"]),
        "experiment": config.get("name") if isinstance(config, dict) else None,
        "directory": run["path"],
        "host": run["host"],
        "steps": run["step"],
        "whole": whole,
        "rate": rate or None,
        "left": seconds_left(run["step"], whole, rate),
        "epoch": run["epoch"],
        "parent": None if parent is None else run_id(parent[0]),
        "config": config,
        "config_changed": [] if parent is None else _changed(config, parent[1]),
        "code": {
            name: facts.get(name) for name in ("git", "argv", "cwd", "packages", "services") if name in facts
        },
        "machine": {
            name: facts.get(name)
            for name in ("host", "platform", "python", "fingerprint", "backends", "ranks")
            if name in facts
        },
        "checkpoints": [_checkpoint(one, best) for one in told["checkpoints"]],
        "best": best,
        "best_weights": told["best"],
        "tags": told["tags"],
        "note": told["note"],
        "times": _times(noted),
        "starts": [_start(start) for start in told["segments"] if is_start(start)],
        "rollbacks": [
            {
                "at": one["step"],
                "to": step_of(one["checkpoint"]),
                "why": one["reason"],
                "start": one["segment"],
                "quarantined": one["quarantined"],
            }
            for one in told["rollbacks"]
        ],
        "streams": [
            {"stream": stream, "metrics": [name for phase, name in streams if phase == stream]}
            for stream in dict.fromkeys(phase for phase, _ in streams)
        ],
        "summaries": _summaries(noted),
        "evaluations": told["evaluations"],
        "failures": told["failures"],
        "problems": told["problems"],
    }
    return answer


def _events(connection: Connection, run: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in their order, superseded events included: `valid` is false for these."""
    found = connection.execute(
        select(events.c.segment, events.c.kind, events.c.data, events.c.offset < segments.c.valid_to)
        .join(segments, (segments.c.run == events.c.run) & (segments.c.number == events.c.segment))
        .where(events.c.run == run, events.c.kind.in_(("times", "summary")))
        .order_by(events.c.segment, events.c.offset)
    )
    for segment, kind, text, valid in found:
        if not misfit(kind, data := stored(text)):
            yield {"segment": segment, "kind": kind, "data": data, "valid": bool(valid)}


def _start(start: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "start": start["number"],
        "began": start["started"],
        "ended": None if start["status"] == "running" else start["last"],
        "to_step": start["step"],
        "end": _ENDS.get(start["status"], start["status"]),
        "why": start["reason"] or "",
        **{name: start[name] for name in ("from_step", "badge", "diverged_at", "how", "ranks", "again")},
    }


def _checkpoint(one: Mapping[str, Any], best: list[dict[str, Any]]) -> dict[str, Any]:
    names = (
        "name",
        "step",
        "epoch",
        "bytes",
        "created",
        "pinned",
        "next",
        "whole",
        "problem",
        "digest",
    )
    told = {name: one[name] for name in names if name in one}
    return {
        "bytes": None,
        **told,
        "best": ", ".join(each["metric"] for each in best if each["step"] == one["step"]),
    }


def _times(noted: list[dict[str, Any]]) -> dict[str, float]:
    """Return where the time of the valid epochs went, in seconds."""
    found = [event["data"] for event in noted if event["kind"] == "times" and event["valid"]]
    waited = sum(one.get("data_wait") or 0.0 for one in found)
    total = sum(one.get("seconds") or 0.0 for one in found)
    return (
        {"waiting for data": waited, "steps, saves and evaluations": max(0.0, total - waited)}
        if found
        else {}
    )


def _parent(connection: Connection, facts: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any] | None:
    """Return the run that a run was forked from, and its configuration; None if the index has none."""
    parent = facts.get("parent")
    name = parent.get("run") if isinstance(parent, dict) else None
    found = connection.execute(select(runs).where(runs.c.name == str(name))).mappings().one_or_none()
    if found is None:
        return None
    facts_of = newest_facts(connection, [found["id"]])
    return dict(found), facts_of.get(found["id"], {}).get("config")


def _changed(here: Any, parent: Any) -> list[dict[str, Any]]:
    mine, theirs = (leaves(one) if isinstance(one, dict) else {} for one in (here, parent))
    return [
        {"name": name, "here": shown(mine.get(name)), "parent": shown(theirs.get(name))}
        for name in dict.fromkeys([*mine, *theirs])
        if mine.get(name) != theirs.get(name) and name not in MARKS
    ]


def _summaries(noted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[int, None]] = {}
    for event in noted:
        data = event["data"]
        if event["kind"] == "summary" and event["valid"]:
            kind = kind_of(data)
            if kind is not None:
                found.setdefault((data["name"], kind), {})[data["step"]] = None
    return [{"name": name, "kind": kind, "steps": list(steps)} for (name, kind), steps in found.items()]
