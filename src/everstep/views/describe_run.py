"""Everything about a run except its rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from everstep.errors import CheckpointError
from everstep.index.readers import is_run
from everstep.index.run_facts import FACTS
from everstep.index.run_queries import rollbacks, starts, summaries
from everstep.labels import NAMES as LABELS
from everstep.record import Rollback, evaluations, failures
from everstep.views.checkpoint_tables import (
    asked_for,
    best_values,
    best_weights,
    checkpoints_of,
    newest_digest,
)
from everstep.views.find_run import Found
from everstep.views.starts_of_run import starts_of


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
