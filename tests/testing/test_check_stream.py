"""The suite for streams finds each planted fault.  That everstep's own streams pass is tested beside them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from everstep import data
from everstep.testing import check_stream


class Numbers:
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


class NumbersCursor:
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


class DependsOnWhereItWasOpened(Numbers):
    def batch(self, cursor: NumbersCursor) -> Any:
        return cursor.at - cursor.opened_at


class DrawsFromTheGlobals(Numbers):
    """Right as long as it is not restarted: one draw at the start of a pass is not drawn again."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        cursor = super().open(purpose, pass_index, position, seed=seed)
        cursor.seed = int(np.random.randint(2**31))
        return cursor


class RemembersPasses(Numbers):
    """Its second pass depends on its first, which a new process has not seen."""

    def __init__(self) -> None:
        self.passes = 0

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        self.passes += 1
        return super().open(purpose, self.passes, position, seed=seed)


class CountsAskedPositions(Numbers):
    def left(self, cursor: NumbersCursor) -> int | None:
        return None

    def batch(self, cursor: NumbersCursor) -> Any:
        return cursor.asked if isinstance(cursor, Asked) else None

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        return Asked(self, pass_index, position or 0, seed)


class Asked(NumbersCursor):
    asked = 0

    def position(self) -> Any:
        self.asked += 1
        return self.at


class SaysTooMany(Numbers):
    def left(self, cursor: NumbersCursor) -> int | None:
        return self.length


class Empty(Numbers):
    length = 0


class IgnoresThePosition(Numbers):
    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        return super().open(purpose, pass_index, None, seed=seed)


class BeginsAgain(Numbers):
    """Asked again after the end, it starts the pass over."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> NumbersCursor:
        return Restarting(self, pass_index, position or 0, seed)


class Restarting(NumbersCursor):
    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.at = 0
            raise


class LeavesAThread(Numbers):
    done = threading.Event()

    def close(self) -> None:
        self.done.clear()
        threading.Thread(target=self.done.wait, daemon=True, name="everstep-leaked").start()


FAULTS: list[tuple[type[Numbers], str]] = [
    (DependsOnWhereItWasOpened, "resumed at pass 0, after 1 batches: pass 0: batch 0 from there differs"),
    (DrawsFromTheGlobals, "differs"),
    (RemembersPasses, "resumed at pass 1"),
    (CountsAskedPositions, "asking for positions"),
    (SaysTooMany, r"remaining\(\) said 5 batches"),
    (Empty, "gave no batch"),
    (IgnoresThePosition, "says that it stands at 0"),
    (BeginsAgain, "after the end"),
    (LeavesAThread, "threads .*everstep-leaked"),
]


def test_a_correct_stream_passes() -> None:
    check_stream(Numbers)


class CannotTell(Numbers):
    def left(self, cursor: NumbersCursor) -> int | None:
        return None


def test_a_stream_that_cannot_tell_what_is_left_passes_with_a_sentence(capsys: Any) -> None:
    check_stream(Numbers)
    assert "remaining()" not in capsys.readouterr().out
    check_stream(CannotTell)
    assert "no remaining()" in capsys.readouterr().out


def test_a_stream_instead_of_a_function_is_told() -> None:
    with pytest.raises(AssertionError, match=r"give a function, as in check_stream\(lambda: Numbers"):
        check_stream(Numbers())  # type: ignore[arg-type]


def test_prefetching_it_passes() -> None:
    check_stream(lambda: data.prefetch(Numbers(), buffer=2))


@pytest.mark.parametrize(("kind", "message"), FAULTS, ids=[kind.__name__ for kind, _ in FAULTS])
def test_each_fault_is_found(kind: type[Numbers], message: str) -> None:
    try:
        with pytest.raises(AssertionError, match=message):
            check_stream(kind)
    finally:
        LeavesAThread.done.set()
