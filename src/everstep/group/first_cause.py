"""Which failure came first: that of this rank, or that of another rank, from which this one's follows."""

from __future__ import annotations

from contextlib import suppress

from everstep.contracts.group import Group
from everstep.errors import DisagreementError, GroupError, StoreLostError
from everstep.polling import wait_until

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
    # a disagreement is raised by all ranks at once, and follows from none; without the store nobody can tell
    follows = isinstance(error, _MAY_FOLLOW) and not isinstance(error, DisagreementError | StoreLostError)
    if follows and wait_until(lambda: failure_of_another(group) is not None, WAIT):
        return failure_of_another(group)
    with suppress(GroupError):  # the store is gone, and so nobody can be told
        group.fail(f"{type(error).__name__}: {error}")
    # two ranks may have reported at once: the first one counts
    return failure_of_another(group) if follows else None


def failure_of_another(group: Group) -> str | None:
    """Return the first failure, as "rank 1: REASON", if another rank has one and the store lives."""
    with suppress(GroupError):
        failure = group.failure()
        if failure is not None and failure[0] != group.rank:
            return f"rank {failure[0]}: {failure[1]}"
    return None
