"""Everything about a run except its rows; where each of its starts ended, how its resume was verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from everstep.errors import CheckpointError
from everstep.index.readers import id_at, is_run
from everstep.index.run_facts import FACTS
from everstep.index.run_queries import badges, best_values, rollbacks, starts, summaries
from everstep.index.shipping import is_here
from everstep.index.sql_tables import runs
from everstep.labels import NAMES as LABELS
from everstep.record import Rollback, evaluations, failures, newest_step
from everstep.record.badges import Badge, Start, judged
from everstep.record.segment_file import step_of
from everstep.views.checkpoint_tables import (
    asked_for,
    best_weights,
    checkpoints_of,
    newest_digest,
)
from everstep.views.find_run import Found


def describe(connection: Connection, found: Found) -> dict[str, Any]:
    """Return everything about a run except its rows, as JSON."""
    best = best_values(connection, found.id)
    metrics = [
        {
            **one._asdict(),
            **dict(zip(("best", "best_step"), best.get((one.phase, one.name), ()), strict=False)),
        }
        for one in summaries(connection, found.id)
    ]
    return {**without_metrics(connection, found), "metrics": metrics}


def without_metrics(connection: Connection, found: Found) -> dict[str, Any]:
    """Return everything about a run except its rows and what is computed from all of them, as JSON."""
    begun, told = starts(connection, found.id), starts_of(connection, found)
    problems = [problem for start in begun for problem in start["problems"]]
    problems += [start["torn"] for start in begun if start["torn"]]
    kept, best = _on_disk(found, problems)
    return {
        **{name: found.facts[name] for name in FACTS},
        **_facts_and_labels(begun),
        "segments": told,
        "rollbacks": [_rollback(one) for one in rollbacks(connection, found.id)],
        "digest": newest_digest(kept),
        "checkpoints": kept,
        "best": best,
        "evaluations": _evaluations(found),
        "failures": [] if found.is_gone else [one._asdict() for one in failures(found.path)],
        "problems": problems,
    }


def _on_disk(found: Found, problems: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a run's checkpoints and best weights; adds to `problems` why they cannot be listed."""
    if found.is_gone:
        return [], []
    try:
        return asked_for(checkpoints_of(found.path)), best_weights(found.path)
    except CheckpointError as error:
        problems.append(str(error))
        return [], []


def _facts_and_labels(begun: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of the newest start, and the labels, which the index keeps among them."""
    facts = begun[-1]["facts"] if begun else {}
    own = {name: value for name, value in facts.items() if name not in LABELS}
    return {"facts": own, "tags": facts.get("tags", []), "note": facts.get("note", "")}


def _evaluations(found: Found) -> list[dict[str, Any]]:
    there = not found.is_gone and is_run(found.path)
    return [one._asdict() for one in evaluations(found.path)] if there else []


def _rollback(one: Rollback) -> dict[str, Any]:
    return {**one._asdict(), "batches": [b._asdict() for b in one.batches], "quarantined": len(one.batches)}


# ---------------------------------------------------------------------------------- its starts


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
