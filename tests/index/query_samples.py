"""Runs put straight into the tables of an index, and what the documents of them are."""

from __future__ import annotations

import json
import math
from typing import Any

from sqlalchemy import Connection, insert

from everstep.index.bulk_insert import insert_rows
from everstep.index.fields import rows_of
from everstep.index.sql_tables import fields, metadata, metrics, runs, segments, series

METRICS = ("valid_loss", "top.5", "x'\"; DROP TABLE runs")


def a_run(config: Any = None, reason: str | None = None, **values: float) -> dict[str, Any]:
    """What `store` takes of a run."""
    return {"recorded": {"config": config or {}}, "metrics": values, "step": 0, "seed": 1, "reason": reason}


def store(connection: Connection, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fill an index with runs; what the documents of them are."""
    for table in reversed(metadata.sorted_tables):
        connection.execute(table.delete())
    expected = []
    for number, one in enumerate(given, 1):
        facts = {"name": f"run{number}", "path": f"/runs/{number}", "status": "finished", "step": one["step"]}
        facts |= {
            "epoch": 0,
            "created": 1.5,
            "started": float(number % 3),
            "heartbeat": None,
            "diverged": None,
        }
        facts |= {"seed": one["seed"], "reason": one["reason"]}
        connection.execute(insert(runs).values(id=number, **facts))
        at = dict.fromkeys((column.name for column in segments.columns), 0)
        at |= {"run": number, "number": 1, "valid_to": 1 << 62, "begun": 1, "started": 1.0, "last": 1.0}
        at |= {"facts": json.dumps(one["recorded"]), "problems": "[]", "torn": None, "parent": None}
        connection.execute(insert(segments).values(**{**at, "status": None, "reason": None}))
        insert_rows(connection, fields, rows_of(number, one["recorded"]))
        for place, (name, value) in enumerate(one["metrics"].items()):
            key = number * 10 + place
            connection.execute(insert(series).values(id=key, run=number, name=name, phase="tail"))
            stored = None if math.isnan(value) else value
            insert_rows(connection, metrics, [(key, 1, 0, row, 1, 1, row, 1, stored, 0) for row in range(2)])
        expected.append({**one["recorded"], **one["metrics"], **facts})
    return sorted(expected, key=lambda document: (document["started"], document["name"]))


def same(value: Any) -> str:
    """A value as text, in which NaN equals itself."""
    return json.dumps(value, sort_keys=True)
