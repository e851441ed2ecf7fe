"""`StoreGroup`: the operations of a group, over any key-value store.

Keys, all below a prefix that no other group has ever had (see `_rendezvous`):

    N/R      what rank R brings to operation N: [its name, value]
    N/all    the list of all that, made by the writer
    failed   [rank, reason] of the first failure
    left/R   rank R has left
    ended/R  the program of rank R has ended
    bell/R   something has happened that a thread of rank R has to handle, which waits for this key

The writer collects and publishes, so an operation costs the store O(size) requests and values.  (In torch's
`elastic.utils.store.get_all` each rank reads all values, O(size²), and the keys stay.)  Each rank deletes its
keys of operation N when it begins N + 2: it has then left N + 1, which every rank entered after reading N.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from everstep.contracts.group import LIMIT, Group, KeyValueStore, named
from everstep.errors import DisagreementError, GroupError, MissingRankError, PeerFailedError, StoreLostError
from everstep.polling import wait_until

LEAVING = 10.0
"""Seconds for which the writer waits at the end for the others to leave: its process may host the store."""
LINGER = 2.0
"""The same after an error."""


class StoreGroup(Group):
    """A group over a connection to a key-value store; to make one is to meet all other ranks.

    Attributes:
        bells: the key of each rank that wakes the rank's threads.
        count: number of the operation that this rank is at, or was last.
        operation: the operation in which this rank waits; "" in none.
    """

    store: KeyValueStore

    def __init__(self, rank: int, size: int, store: KeyValueStore, limit: float = LIMIT) -> None:
        session = _rendezvous(store, rank, size, limit)
        super().__init__(rank, size, store.below(f"{session}/"), limit)
        global _last_group
        if _last_group is None:
            atexit.register(_note_end)
        _last_group = self.store, rank, size, os.getpid()
        self.bells = [f"bell/{other}" for other in range(size)]
        self.count, self.operation = 0, ""
        self._broken: str | None = None
        self._closed = False

    def gather(self, value: Any, what: str) -> list[Any]:
        if self._broken is not None:
            raise GroupError(f"{what!r} cannot begin, as {self._broken}; leave the run and start it again")
        self._broken = f"the operation {what!r} before it did not end"  # also where Ctrl-C ends it
        self.count, self.operation = self.count + 1, what
        answers = self._exchange(json.dumps([what, value]), what)
        places = [place for place, _ in answers]
        if any(place != what for place in places):
            raise DisagreementError(
                f"the processes are at different places: {_by_place(places)}; use the loop in the same way "
                "on all ranks, not below a condition that only some of them meet",
                ranks=[rank for rank, place in enumerate(places) if place != places[0]],
            )
        self._broken, self.operation = None, ""
        return [value for _, value in answers]

    def _exchange(self, value: str, what: str) -> list[Any]:
        keys = [f"{self.count}/{rank}" for rank in range(self.size)]
        store, result = self.store, f"{self.count}/all"
        self._forget(self.count - 2)
        store.set(keys[self.rank], value)
        if not self.writer:
            self.await_keys([result], what, keys)
            return list(json.loads(*store.get([result])))
        self.await_keys(keys, what, keys)
        text = f"[{','.join(store.get(keys))}]"
        store.set(result, text)
        return list(json.loads(text))

    def _forget(self, count: int) -> None:
        if count > 0:
            self.store.delete(f"{count}/{self.rank}")
            if self.writer:
                self.store.delete(f"{count}/all")

    def await_keys(
        self, keys: list[str], what: str, of_ranks: list[str], ended: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until keys exist, or `ended`; an error names the ranks whose keys among `of_ranks` do not."""
        exist = wait_until(
            lambda: ended() or self.store.has(keys), self.limit, look=lambda: require_no_failure(self)
        )
        if not exist:
            require_no_failure(self)
            raise _missing(what, self.limit, self.rank, [self.store.has([key]) for key in of_ranks])

    def fail(self, reason: str, rank: int | None = None) -> None:
        failed_rank = self.rank if rank is None else rank
        self.store.set_once("failed", json.dumps([failed_rank, reason]))
        self.store.set_all(self.bells, "")

    def failure(self) -> tuple[int, str] | None:
        if not self.store.has(["failed"]):
            return None
        rank, reason = json.loads(*self.store.get(["failed"]))
        return int(rank), str(reason)

    def abandon(self, reason: str) -> None:
        """Begin no further operation ("cannot begin, as REASON"), and wait for nobody at `close`."""
        self._broken = reason

    def close(self) -> None:
        """Leave the group; the writer leaves last, as its process may host the store."""
        if self._closed:
            return
        self._closed = True
        left_keys = [f"left/{rank}" for rank in range(1, self.size)]
        with suppress(GroupError):  # the others are gone, or the store: there is nobody left to wait for
            if self.writer:
                # also after an error: the others have still to read of it
                limit = LEAVING if self._broken is None else LINGER
                wait_until(lambda: self.store.has(left_keys), limit)
            else:
                self.store.set(f"left/{self.rank}", "")
        self._broken = "the group is closed"
        del self.store


def require_no_failure(group: Group) -> None:
    """Raise the failure that another rank has reported, if any."""
    failure = group.failure()
    if failure is not None and failure[0] != group.rank:
        rank, reason = failure
        raise PeerFailedError(
            f"rank {rank} has failed: {reason}; check its output, then start all ranks again", ranks=[rank]
        )


def _missing(what: str, limit: float, rank: int, present: list[bool]) -> MissingRankError:
    absent = [other for other, is_present in enumerate(present) if not is_present]
    if absent:
        text = f"{named(absent)} did not reach {what!r} within {limit:g} s"
    else:
        text = f"all ranks reached {what!r}, but too late for an answer within {limit:g} s"
    return MissingRankError(
        f"{text}, where rank {rank} of {len(present)} waited; check their output, or raise "
        "EVERSTEP_GROUP_LIMIT (seconds)",
        ranks=absent,
    )


def _by_place(places: list[str]) -> str:
    ranks = {place: [rank for rank, other in enumerate(places) if other == place] for place in places}
    return ", ".join(f"{named(members)} at {place!r}" for place, members in ranks.items())


def _rendezvous(store: KeyValueStore, rank: int, size: int, limit: float) -> str:
    """Find the others, and a prefix for keys that only those who are here now know.

    A store outlives the processes: torchrun starts all ranks again over the same one, and with the same
    restart count where nodes came or left.  So a key that is found may be an old one.  The writer calls with
    a token that it has just drawn; each rank answers with that token and a token of its own; a list of tokens
    by the writer is right for the rank that finds its own in it.
    """
    token, answered_call = secrets.token_hex(8), ""

    def have_met() -> bool:
        nonlocal answered_call
        if rank == 0:
            return all(_tokens(store, token, size))
        call, session = _get(store, ["call", "session"])
        if call and call != answered_call:
            answered_call = call
            store.set(f"answer/{rank}", json.dumps([call, token]))
        return bool(session) and token in json.loads(session)

    if rank == 0:
        store.set("call", token)
    if not wait_until(have_met, limit, look=_require_running):
        raise _missing("the opening of the group", limit, rank, _present_ranks(store, token, rank, size))
    if rank == 0:
        store.set("session", json.dumps([token, *_tokens(store, token, size)]))
        return token
    return str(json.loads(*store.get(["session"]))[0])


def _tokens(store: KeyValueStore, call: str, size: int) -> list[str]:
    """Return the tokens of all ranks but the writer, "" for those that have not answered this call."""
    answers = _get(store, [f"answer/{rank}" for rank in range(1, size)])
    pairs = [json.loads(answer) if answer else ["", ""] for answer in answers]
    return [token if answered == call else "" for answered, token in pairs]


def _present_ranks(store: KeyValueStore, token: str, rank: int, size: int) -> list[bool]:
    """Tell for each rank whether it has come, as far as `rank` can know."""
    if rank == 0:
        return [True, *map(bool, _tokens(store, token, size))]
    call, session = _get(store, ["call", "session"])
    if not call or (session and json.loads(session)[0] == call):  # no call, or that of an earlier group
        return [False, *[True] * (size - 1)]
    return [True, *map(bool, _tokens(store, call, size))]


def _get(store: KeyValueStore, keys: list[str]) -> list[str]:
    if store.has(keys):
        return store.get(keys)
    return [store.get([key])[0] if store.has([key]) else "" for key in keys]


_last_group: tuple[KeyValueStore, int, int, int] | None = None
"""Store, rank, size and process number in the group that this process joined last.

At its end it says there that it has ended: a rank that calls `trainer.evaluate()` alone, after the training,
would wait for the others for its whole limit.
"""


def _require_running() -> None:
    """Refuse to wait for a rank that was in the group before, and whose program has ended."""
    if _last_group is None:
        return
    store, own, size, _ = _last_group
    if ended := [rank for rank in range(size) if rank != own and store.has([f"ended/{rank}"])]:
        raise DisagreementError(
            f"the program of {named(ended)} has ended, and rank {own} waits to meet all ranks again; "
            "call train(), evaluate() and the like on all ranks alike, not below a condition that only some "
            "of them meet (if rank == 0: ...)",
            ranks=ended,
        )


def _note_end() -> None:
    if _last_group is None:
        return
    store, rank, _, process = _last_group
    if process == os.getpid():  # a forked child has not ended the rank
        with suppress(GroupError):  # the store is gone: so are the others
            store.set(f"ended/{rank}", "")


# --------------------------------------------------------------------------------- the first cause

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
