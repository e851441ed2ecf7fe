"""`check_group`: a check of a group against its contract, by real or simulated processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from everstep.contracts.group import Group
from everstep.errors import DisagreementError, GroupError, MissingRankError, PeerFailedError
from everstep.testing import nothing_left

_LATE = 0.4
"""Seconds by which the last rank is late."""
_SETTLE = 5.0
"""Seconds after which connections that other ranks have closed must be gone."""
_REQUESTS = 100
_VALUES: tuple[Any, ...] = (
    None, True, 0, -7, 2**40, 0.1, "", "é\n", [], [1, [2, None]], {"a": {"b": [0.5]}}, "x" * 100_000,
)  # fmt: skip


def check_group(make_group: Callable[[], Group]) -> None:
    """Check a group against its contract; every process of the group calls this, started by its launcher.

    1. Ranks are numbered from 0 to size - 1, and rank 0 alone is the writer.
    2. `gather` returns the values of all ranks in their order, and JSON values come as they went.
    3. `share`, `any`, `agree` and `barrier` do what they say; a difference is an error on every rank, and
       the group goes on after it.
    4. A rank that does not come is an error on all others, which names the rank, within the time limit.
    5. A rank at another operation, and a failure that a rank reports, are errors on all others.
    6. What went wrong in one group does not reach the next one, over the same store.
    7. Threads of a rank make short requests of its store at the same time.
    8. `close` may be called twice and leaves no thread, file or handler.

    Args:
        make_group: joins the group; called several times, once all have left the group before.

    Raises:
        AssertionError: says what is broken.
    """
    make_group().close()  # what is set up once in a process stays
    with nothing_left(settle=_SETTLE):  # once for all: another rank may have joined the next group already
        for check in _CHECKS:
            _check(check, make_group())
        _check(_check_values, make_group())


def _check(check: Callable[[Group], None], group: Group) -> None:
    try:
        check(group)
    finally:
        group.close()
        group.close()


def _check_values(group: Group) -> None:
    ranks = group.gather(group.rank, "the ranks")
    assert ranks == list(range(group.size)), f"gather must return values in the order of ranks, not {ranks}"
    writers = group.gather(group.writer, "the writers")
    assert writers == [rank == 0 for rank in ranks], f"rank 0 alone is the writer, not {writers}"
    for value in _VALUES:
        got = group.gather([group.rank, value], "a value")
        assert got == [[rank, value] for rank in ranks], f"{value!r:.80} came back as {got!r:.200}"
    for number in range(50):  # long enough for a rank to be ahead
        got = group.gather(number, "a number")
        assert got == [number] * group.size, f"gather number {number} returned {got}"


def _check_operations(group: Group) -> None:
    last = group.rank == group.size - 1
    assert group.share(group.rank, "a choice") == 0, "share must return the value of the writer"
    assert group.any(last, "a wish") is True, "any must be true if one rank's value is"
    assert group.any(False, "a wish") is False, "any must be false if no rank's value is true"
    assert group.agree({"a": [1, 2.5]}, "a config") == {"a": [1, 2.5]}, "agree must return the value"
    if group.size > 1:
        error = _raised(DisagreementError, lambda: group.agree(last, "the config"))
        expected = (group.size - 1,)
        assert group.size == 2 or error.ranks == expected, (
            f"{expected} differ, but the error names {error.ranks}"
        )
        assert "the config" in str(error), f"an error must name what differs: {error}"
    began = time.monotonic()
    if last:
        time.sleep(_LATE)
    group.barrier("a late rank")
    waited = time.monotonic() - began
    assert waited >= 0.9 * _LATE, f"a barrier let a rank pass after {waited:.2f} s, before the last rank came"


def _check_absence(group: Group) -> None:
    """The last rank does not come to a barrier; it leaves when the others have noticed."""
    group.barrier("all are here")
    if group.size == 1:
        return
    if group.rank == group.size - 1:
        time.sleep(3 * _LATE)
        return
    began = time.monotonic()
    error = _raised(MissingRankError, lambda: group.barrier("an absent rank", limit=_LATE))
    waited = time.monotonic() - began
    assert waited < _LATE + 2, f"a barrier of {_LATE} s took {waited:.1f} s to end without its last rank"
    assert error.ranks == (group.size - 1,), (
        f"rank {group.size - 1} did not come, but {error.ranks} are named"
    )
    assert "an absent rank" in str(error), f"an error must name the operation: {error}"
    _raised(GroupError, lambda: group.barrier("after an error"))


def _check_failure(group: Group) -> None:
    group.barrier("all are here")
    if group.size == 1:
        return
    if group.rank == group.size - 1:
        group.fail("a disk is full")
        time.sleep(4 * _LATE)
        return
    error = _raised(PeerFailedError, lambda: group.barrier("a failed rank", limit=60))
    assert error.ranks == (group.size - 1,) and "a disk is full" in str(error), (
        f"rank {group.size - 1} has failed as a disk is full, but the error says: {error}"
    )


def _check_order(group: Group) -> None:
    if group.size > 1:
        what = "a place" if group.writer else "another place"
        error = _raised(DisagreementError, lambda: group.barrier(what))
        assert "another place" in str(error), f"an error must name the operations: {error}"


def _check_threads(group: Group) -> None:
    if group.store is None:
        return
    store, wrong = group.store.below("threads/"), []

    def use(name: str) -> None:
        for number in range(_REQUESTS):
            store.set(name, str(number))
            if store.get([name]) != [str(number)] or store.has([f"{name}/absent"]):
                wrong.append(f"{name} at {number}")

    threads = [threading.Thread(target=use, args=(f"{group.rank}/{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"threads that use the store at the same time got each other's answers: {wrong[:3]}"
    group.barrier("all threads have ended")


_CHECKS = (_check_values, _check_operations, _check_absence, _check_failure, _check_order, _check_threads)


def _raised(kind: type[GroupError], call: Callable[[], object]) -> Any:
    try:
        call()
    except kind as error:
        return error.with_traceback(None)  # its frames hold connections
    raise AssertionError(f"no {kind.__name__} was raised")
