"""What the page shows of one run besides its curves: its starts, how each resume was verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from everstep.display.cells import finite
from everstep.index.database import Database
from everstep.index.readers import id_at
from everstep.index.run_facts import GONE
from everstep.index.run_queries import best_values, metric_names, newest_facts
from everstep.index.shipping import is_here
from everstep.index.sql_tables import runs
from everstep.record.segment_file import step_of
from everstep.ui.run_files import summaries_of
from everstep.ui.runs_table import differing, heading, plain, run_id, streams_of
from everstep.views.describe_run import is_start, without_metrics
from everstep.views.find_run import Found

_ENDS = {"stopped": "signal", "failed": "error"}
"""Status of a start -> its end in the timeline, where that differs."""


def one_run(database: Database, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a run, as JSON.

    Args:
        run: a row of the table `runs`, whose status is `GONE` without its directory.
    """
    # The directory of another machine's run may be another run here.
    there = is_here(database, run["host"]) and id_at(run["path"]) == run["name"]
    found = Found(database, {**run, "status": run["status"] if there else GONE})
    with database.read() as connection:
        facts = without_metrics(connection, found)
        measured = best_values(connection, run["id"])
        recorded = facts["facts"]
        parent, parent_config = _parent(connection, recorded)
        streams = streams_of(metric_names(connection, run["id"]))
    best = [
        {"metric": f"{phase}/{name}", "value": finite(value), "step": step}
        for (phase, name), (value, step) in measured.items()
    ]
    config = recorded.get("config")
    trees = (plain(tree) if isinstance(tree, dict) else {} for tree in (config, parent_config))
    return {
        **heading(run),
        **{name: run[name] for name in ("reason", "seed", "epoch", "host")},
        "steps": run["step"],
        "experiment": config.get("name") if isinstance(config, dict) else None,
        "directory": run["path"],
        "parent": parent,
        "config": config,
        "config_changed": [] if parent is None else differing([*trees]),
        "code": {
            name: recorded[name]
            for name in ("git", "argv", "cwd", "packages", "services")
            if name in recorded
        },
        "machine": {
            name: recorded[name]
            for name in ("host", "platform", "python", "fingerprint", "backends", "ranks")
            if name in recorded
        },
        "checkpoints": [
            {
                **{name: each.get(name) for name in ("name", "step", "bytes", "pinned", "next", "whole")},
                "problem": each.get("problem"),
                "best": ", ".join(one["metric"] for one in best if one["step"] == each["step"]),
            }
            for each in facts["checkpoints"]
        ],
        "best": best,
        "best_weights": facts["best"],
        **{name: facts[name] for name in ("tags", "note", "evaluations", "failures", "problems")},
        "starts": [_start(start) for start in facts["segments"] if is_start(start)],
        "rollbacks": [
            {
                "at": one["step"],
                "to": step_of(one["checkpoint"]),
                "why": one["reason"],
                "start": one["segment"],
            }
            for one in facts["rollbacks"]
        ],
        "streams": streams,
        "summaries": [
            {"name": name, "kind": kind, "steps": list(steps)}
            for (name, kind), steps in summaries_of(database, run["id"]).items()
        ],
    }


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


def _parent(connection: Connection, facts: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Return the id and the config of the run that a run was forked from; None if the index has none."""
    parent = facts.get("parent")
    name = parent.get("run") if isinstance(parent, dict) else None
    found = connection.execute(select(runs).where(runs.c.name == str(name))).mappings().one_or_none()
    if found is None:
        return None, None
    facts_of = newest_facts(connection, [found["id"]], names=["config"])
    return run_id(dict(found)), facts_of.get(found["id"], {}).get("config")
