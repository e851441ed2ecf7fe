"""Errors of a save that all ranks raise alike: made of one rank's error, and carried as JSON."""

from __future__ import annotations

import errno
from typing import Any

from everstep.checkpoint.writer import disk_failed
from everstep.contracts.group import Group
from everstep.durable import remedy
from everstep.errors import (
    CheckpointError,
    DivergedRanksError,
    NonFiniteError,
    PeerFailedError,
    RankSaveError,
    RunDirError,
)


def for_all(error: Exception, rank: int) -> Exception:
    """Return the error that all ranks raise where a rank has had `error`."""
    if isinstance(error, RankSaveError | DivergedRanksError):
        return error
    if disk_failed(error):
        return RankSaveError(_number(error), f"rank {rank}: {_told(error)}", ranks=[rank])
    if isinstance(error, NonFiniteError):
        return NonFiniteError(f"rank {rank}: {error}", step=error.step)
    if isinstance(error, CheckpointError):
        return CheckpointError(f"rank {rank}: {error}")
    return PeerFailedError(
        f"rank {rank} has failed in a save ({type(error).__name__}: {error}); see to its output, then start "
        "all ranks again",
        ranks=[rank],
    )


def first_error(group: Group, error: Exception | None, what: str) -> Exception | None:
    """Return the error of the first rank that has one, alike on all ranks; None where no rank has one.

    An error of a disk goes before others.  An operation of the group: `what` names it.
    """
    if group.size == 1:
        return error
    told = group.gather(None if error is None else packed(for_all(error, group.rank)), what)
    found = [unpacked(each) for each in told if each is not None]
    return min(found, key=lambda each: not isinstance(each, RankSaveError), default=None)


def packed(error: Any) -> dict[str, Any]:
    """Return as JSON what `for_all` has made."""
    kind = next(kind for kind in _KINDS if isinstance(error, kind))
    text = error.strerror if isinstance(error, RankSaveError) else str(error)
    facts = {name: getattr(error, name) for name in _KINDS[kind]}
    return {"error": kind.__name__, "text": text, "facts": facts}


def unpacked(told: dict[str, Any]) -> Exception:
    """Make the error again."""
    kind: Any = next(kind for kind in _KINDS if kind.__name__ == told["error"])
    facts = dict(told["facts"])
    numbers = [facts.pop("errno")] if kind is RankSaveError else []
    error: Exception = kind(*numbers, told["text"], **facts)
    return error


_KINDS: dict[type[Exception], tuple[str, ...]] = {
    RankSaveError: ("errno", "ranks"),
    DivergedRanksError: ("name", "ranks"),
    PeerFailedError: ("ranks",),
    NonFiniteError: ("step",),
    CheckpointError: (),
}
"""Classes of such errors, with the attributes that each is made of."""


def _number(error: Exception) -> int:
    return (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM


def _told(error: Exception) -> str:
    """Say what has failed, and what to do."""
    if isinstance(error, RunDirError):
        return f"{error.strerror} ({error.filename})"
    what = str(error.strerror) if isinstance(error, OSError) else f"{type(error).__name__} {error}".strip()
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return f"{what}{where}; {remedy(error)}"
