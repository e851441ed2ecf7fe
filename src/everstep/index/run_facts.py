"""Names of what an index tells of a run, without the index: help texts show them, too."""

from __future__ import annotations

GONE = "gone"
"""Status of a run whose directory was moved or deleted."""

STATUSES = ("running", "finished", "stopped", "failed", "killed", GONE)
"""All statuses."""

FACTS = (
    *("name", "status", "reason", "step", "epoch", "created", "started", "heartbeat", "seed", "path"),
    "diverged",
)
"""Facts of every run; `diverged` is the step of the first divergence that nobody has accepted, or None."""

SHOWN = ("name", "status", "step", "epoch", "started")
"""Facts in a list of runs, unless a person chooses others."""

COUNTS = ("starts", "kills", "verified")
"""Columns that are counted over all starts of a run: `index.computed_columns`."""

TEXTS = ("name", "status", "reason", "path")
"""Facts that are strings; the others are numbers."""
