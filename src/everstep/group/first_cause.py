"""Which failure came first: that of this rank, or that of another rank, from which this one's follows."""

from __future__ import annotations

from contextlib import suppress

from everstep.contracts.group import Group
from everstep.errors import GroupError
from everstep.group.polling import wait_until

WAIT = 2.0
"""Seconds in which the loss of a rank is reported, after a collective has failed of it."""
_MAY_FOLLOW = (RuntimeError, ConnectionError)
"""Classes of the errors by which collectives end (gloo, nccl), and operations of the group."""


def report(group: Group, error: BaseException) -> str | None:
    """Report that this rank fails by `error`, unless that follows from the failure of another rank.

    A collective ends with "Connection closed by peer" in the moment in which a rank dies, before anybody has
    said which one.  So where the error may come from a collective, this waits for up to `WAIT` seconds.

    Returns:
        the first failure, as "rank 1: REASON", if `error` follows from it; None: `error` is the first cause.
    """
    if group.size == 1:
        return None
    follows = isinstance(error, _MAY_FOLLOW)
    with suppress(GroupError):  # a store that is lost knows of nobody's failure
        if follows:
            wait_until(lambda: _of_another(group) is not None, WAIT)
            if found := _of_another(group):
                return found
        group.fail(f"{type(error).__name__}: {error}")
        if follows:  # two ranks may have reported at once: the first one counts
            return _of_another(group)
    return None


def _of_another(group: Group) -> str | None:
    failure = group.failure()
    return None if failure is None or failure[0] == group.rank else f"rank {failure[0]}: {failure[1]}"
