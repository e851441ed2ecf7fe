"""The starts of a run, as commands and the page tell them: where each ended, how its resume was verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from everstep.index.readers import id_at
from everstep.index.run_queries import badges, starts
from everstep.index.shipping import is_here
from everstep.index.sql_tables import runs
from everstep.record import newest_step
from everstep.record.badges import Badge, Start, judged
from everstep.record.segment_file import step_of
from everstep.views.find_run import Found


def starts_of(connection: Connection, found: Found) -> list[dict[str, Any]]:
    """Return the starts of a run as JSON, the first start first.

    A start has the columns of `segments`, and
        from: the checkpoint from which it resumed; None without one.
        from_step: the step of that checkpoint.
        step: the last complete step that any trace of the start tells: a killed process wrote its last steps
            to its trail, and not to its journal.
        verified: how its resume was verified, in words; None for a start that resumed nothing.
        badge, diverged_at, how: the same as a word, the step of a divergence, and the report of the start.
        again: number of steps that it compared with an earlier execution.
    """
    begun, reported = starts(connection, found.id), badges(connection, found.id)
    told = [_start(start, reported.get(start["number"])) for start in begun]
    if told:
        told[-1]["status"] = told[-1]["status"] or _status(connection, found)
        told[-1]["step"] = max(told[-1]["step"], _step_of_trails(found, told[-1]["number"]))
    for start in told:
        start["status"] = start["status"] or "killed"
    trained = [start for start in told if is_start(start)]
    for start, (step, badge) in zip(trained, judged(map(_known, trained), reported), strict=True):
        start |= {"step": step, **_verified(badge)}
    return [{**_verified(Badge("first")), **start} for start in told]


def _known(start: Mapping[str, Any]) -> Start:
    began = None if start["from"] is None else start["from_step"]
    return Start(start["number"], began, start["step"], start["status"] == "running")


def is_start(told: Mapping[str, Any]) -> bool:
    """Whether a start trained: it was not killed before it began, and is not a person's decision."""
    return told["started"] is not None and told["status"] != "accepted"


def _status(connection: Connection, found: Found) -> str:
    """Return the status of a run whose newest start did not record how it ended."""
    status = str(connection.execute(select(runs.c.status).where(runs.c.id == found.id)).scalar())
    lost = found.is_gone and is_here(found.database, found.facts["host"])
    return "killed" if lost and status == "running" else status


def _start(start: Mapping[str, Any], badge: Badge | None) -> dict[str, Any]:
    told = {name: value for name, value in start.items() if name != "facts"}
    came = start["facts"].get("resumed_from")
    facts = {name: start["facts"].get(name) for name in ("ranks", "ranks_before")}
    return {"from": came, **facts, **told, "from_step": step_of(came), "again": badge.steps if badge else 0}


def _step_of_trails(found: Found, start: int) -> int:
    here = not found.is_gone and id_at(found.facts["path"]) == found.facts["name"]
    return newest_step(found.path, start) if here else 0


def _verified(badge: Badge) -> dict[str, Any]:
    words = None if badge.kind == "first" else str(badge)
    return {"badge": badge.kind, "diverged_at": badge.at, "how": badge.report, "verified": words}
