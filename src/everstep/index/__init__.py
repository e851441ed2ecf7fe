"""Index over many runs: a replica of their journals that can be searched.

The journals are the truth.  The index is shipped from them, can be deleted at any time, and is made again
by `everstep sync`.  Only the modules that need SQLAlchemy import it; a training process imports it in a
thread, after the first step.
"""

from __future__ import annotations

from everstep.errors import EverstepError, RunIndexError

GONE = "gone"
"""Status of a run whose directory was moved or deleted."""
STATUSES = ("running", "finished", "stopped", "failed", "killed", GONE)

FACTS = (
    *("name", "status", "reason", "step", "epoch", "created", "started", "heartbeat", "seed", "path"),
    *("duration", "diverged", "starts", "kills", "verified"),
)
"""Facts of every run; `duration` is the seconds in which its starts were alive; `diverged` the step of the
first divergence that nobody has accepted, or None; `verified` the worst of its resumes, None without one."""
SHOWN = ("name", "status", "step", "epoch", "started")
"""Facts in a list of runs, unless a person chooses others."""


class IndexBusyError(RunIndexError):
    """Another process is writing; nothing is lost, and a later try is early enough."""


class UnwritableIndexError(RunIndexError):
    """The index cannot be written here, for its permissions or the disk; reading may work."""


class RefusedError(EverstepError):
    """A run has a value that is too long or too large for the database; the index itself is sound."""
