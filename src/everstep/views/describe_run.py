"""Everything about a run except its rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from everstep.errors import CheckpointError
from everstep.index.location import is_run
from everstep.index.run_facts import FACTS
from everstep.index.run_queries import newest_facts, rollbacks, starts, summaries
from everstep.index.sql_tables import stored
from everstep.labels import NAMES as LABELS
from everstep.record import evaluations, failures
from everstep.redaction import without_credentials
from everstep.views.checkpoint_tables import asked_for, best_weights, checkpoints_of, newest_digest
from everstep.views.find_run import Found


def describe(connection: Connection, found: Found, *, steps: bool = True) -> dict[str, Any]:
    """Return everything about a run except its rows, as JSON.

    Args:
        steps: whether to summarise the metrics of single steps, too, which takes time per row.
    """
    recorded = without_credentials(newest_facts(connection, [found.id]).get(found.id, {}))
    problems = stored(found.facts["problems"], list)
    checkpoints, best = [], []
    there = not found.is_gone and is_run(found.path)
    if there:
        try:
            checkpoints, best = asked_for(checkpoints_of(found.path)), best_weights(found.path)
        except CheckpointError as error:
            problems.append(str(error))
    return {
        **{name: found.facts[name] for name in FACTS},
        "facts": {name: value for name, value in recorded.items() if name not in LABELS},
        "tags": recorded.get("tags", []),
        "note": recorded.get("note", ""),
        "segments": starts(connection, found.id),
        "rollbacks": [
            {
                **one._asdict(),
                "batches": [batch._asdict() for batch in one.batches],
                "quarantined": len(one.batches),
            }
            for one in rollbacks(connection, found.id)
        ],
        "digest": newest_digest(checkpoints),
        "checkpoints": checkpoints,
        "best": best,
        "evaluations": [one._asdict() for one in evaluations(found.path)] if there else [],
        "failures": [one._asdict() for one in failures(found.path)] if there else [],
        "problems": problems,
        "metrics": summaries(connection, found.id, steps=steps),
    }
