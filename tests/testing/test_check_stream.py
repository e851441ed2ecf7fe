"""The suite for streams finds each planted fault.  That everstep's own streams pass is tested beside them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from everstep import data
from everstep.contracts.data import WHOLE, Share
from everstep.testing import check_stream


class Numbers(data.Stream):
    """A correct stream: five batches a pass, each a function of (seed, pass, position)."""

    length = 5

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        return NumbersCursor(self, pass_index, position or 0, seed)

    def batch(self, cursor: NumbersCursor) -> Any:
        return np.random.default_rng([cursor.seed, cursor.pass_index, cursor.at]).random(2)

    def left(self, cursor: NumbersCursor) -> int | None:
        return self.length - cursor.at

    def close(self) -> None:
        pass


class NumbersCursor(data.Cursor):
    def __init__(self, stream: Numbers, pass_index: int, at: int, seed: int) -> None:
        self.stream, self.pass_index, self.at, self.seed = stream, pass_index, at, seed
        self.opened_at = at

    def __iter__(self) -> NumbersCursor:
        return self

    def __next__(self) -> Any:
        if self.at >= self.stream.length:
            raise StopIteration
        batch = self.stream.batch(self)
        self.at += 1
        return batch

    def position(self) -> Any:
        return self.at

    def remaining(self) -> int | None:
        return self.stream.left(self)

    def close(self) -> None:
        self.stream.close()


def changed(cursor: type[NumbersCursor] = NumbersCursor, **attributes: Any) -> type[Numbers]:
    """A stream with other methods, or another cursor."""

    def open(self: Any, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Any:
        return cursor(self, pass_index, position or 0, seed)

    return type("Changed", (Numbers,), {"open": open, **attributes})


def draws_from_the_globals(self: Any, purpose: str, n: int, position: Any = None, *, seed: int) -> Any:
    """Right as long as it is not restarted: one draw at the start of a pass is not drawn again."""
    return NumbersCursor(self, n, position or 0, int(np.random.randint(2**31)))


class RemembersPasses(Numbers):
    """Its second pass depends on its first, which a new process has not seen."""

    def __init__(self) -> None:
        self.passes = 0

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        self.passes += 1
        return super().open(purpose, self.passes, position, seed=seed)


class GoesOn(Numbers):
    """Each pass goes on counting where the pass before ended; a position tells the count."""

    count = 0

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        cursor = NumbersCursor(self, 0, 0, seed)
        if position is not None:
            cursor.at, self.count = position
        cursor.position = lambda: (cursor.at, self.count)  # type: ignore[method-assign]
        return cursor

    def batch(self, cursor: NumbersCursor) -> Any:
        self.count += 1
        return self.count


class Asked(NumbersCursor):
    """Its batches depend on how often it was asked for its position."""

    asked = 0

    def position(self) -> Any:
        self.asked += 1
        return self.at


class Restarting(NumbersCursor):
    """Asked again after the end, it starts the pass over."""

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.at = 0
            raise


class Live(NumbersCursor):
    """Its position is the object that it counts in."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = [self.at]

    def __next__(self) -> Any:
        batch = super().__next__()
        self.count[0] = self.at
        return batch

    def position(self) -> Any:
        return self.count


DONE = threading.Event()


def leave_a_thread(stream: Any) -> None:
    DONE.clear()
    threading.Thread(target=DONE.wait, daemon=True, name="leaked").start()


def unknown(stream: Any, cursor: NumbersCursor) -> int | None:
    return None


class Splitting(Numbers):
    """It can be split; each batch has four samples."""

    length = 3

    def __init__(self, share: Share = WHOLE) -> None:
        self.share = share

    def split(self, share: Share) -> Splitting:
        return type(self)(share)

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        cursor = super().open(purpose, pass_index, position, seed=seed)
        cursor.weight = self.weight()
        return cursor

    def batch(self, cursor: NumbersCursor) -> Any:
        return [10 * cursor.at + place for place in self.share.of(4)[0]]

    def weight(self) -> float:
        return self.share.of(4)[1]


class Overlapping(Splitting):
    def batch(self, cursor: NumbersCursor) -> Any:
        return [10 * cursor.at, 10 * cursor.at + 1] if self.share.size > 1 else super().batch(cursor)


class Unweighted(Splitting):
    def weight(self) -> float:
        return 1.0


class Starving(Splitting):
    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        return super().open(purpose, pass_index, max(position or 0, self.share.rank), seed=seed)


FAULTS: list[tuple[type[Numbers], str]] = [
    (
        changed(batch=lambda stream, cursor: cursor.at - cursor.opened_at),
        "resumed at pass 0, after 1 batches: pass 0: batch 0 from there differs",
    ),
    (changed(open=draws_from_the_globals), "differs"),
    (RemembersPasses, "opened by a new process .*: pass 1"),
    (GoesOn, "opened by a new process .*carries_over = True.*: pass 1: batch 0 from there differs"),
    (changed(Asked, left=unknown, batch=lambda stream, cursor: cursor.asked), "asking for positions"),
    (changed(left=lambda stream, cursor: stream.length), r"remaining\(\) said 5 batches"),
    (changed(length=0), "gave no batch"),
    (changed(Live), r"position\(\) pass 0, after 1 batches changed later: return a copy"),
    (
        changed(open=lambda stream, purpose, n, position=None, *, seed: NumbersCursor(stream, n, 0, seed)),
        "says that it stands at 0",
    ),
    (changed(Restarting), "after the end"),
    (changed(close=leave_a_thread), "threads .*leaked"),
    (Overlapping, "2 ranks, opened after 0 batches: batch 0 from there: the parts of the ranks are not the"),
    (Unweighted, "3 ranks.*the weight is 1.0, 1.5 would make"),
    (Starving, r"2 ranks.*\[3, 2\] batches came instead of 3 each"),
]


@pytest.mark.parametrize(("kind", "message"), FAULTS)
def test_each_fault_is_found(kind: type[Numbers], message: str) -> None:
    try:
        with pytest.raises(AssertionError, match=message):
            check_stream(kind)
    finally:
        DONE.set()


def test_a_correct_stream_passes_and_one_that_cannot_tell_what_is_left_with_a_sentence(capsys: Any) -> None:
    check_stream(Numbers)
    check_stream(lambda: data.prefetch(Numbers(), buffer=2))
    assert "remaining()" not in capsys.readouterr().out
    check_stream(changed(left=unknown))
    check_stream(type("Declared", (GoesOn,), {"carries_over": True}))
    assert "no remaining()" in capsys.readouterr().out
    with pytest.raises(AssertionError, match=r"give a function, as in check_stream\(lambda: Numbers"):
        check_stream(Numbers())  # type: ignore[arg-type]


def test_a_stream_of_ones_own_that_splits() -> None:
    check_stream(Splitting)
    cursor = Splitting().split(Share(1, 3, "weight")).open("train", 0, seed=0)
    assert (list(cursor), cursor.weight) == ([[2], [12], [22]], 0.75)
