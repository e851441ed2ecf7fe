"""Self-verifying resume: steps that are executed again must give the rows that they gave before."""

from __future__ import annotations

import struct
from typing import NamedTuple

from everstep.record.frames import Block
from everstep.record.reading import Key, comparable_rows


class Difference(NamedTuple):
    """A row that came out otherwise: (bits of the value, count) before and now."""

    epoch: int
    step: int
    phase: str
    name: str
    old: tuple[int, int]
    new: tuple[int, int]


class Replay:
    """Compares new rows, bit for bit, with those that a resume superseded.

    Head rows are never compared: in an epoch that is entered again they are not written.

    Args:
        expected: what `RunJournal.superseded_after` returned.

    Attributes:
        equal: rows that came out equal.
        differing: rows that did not.
        difference: the one of these with the lowest epoch and step.
        done: True when nothing is left to compare.
    """

    def __init__(self, expected: dict[Key, tuple[int, int]]) -> None:
        self._expected = {key: row for key, row in expected.items() if key[2] != "head"}
        self._last = max((key[1] for key in self._expected), default=-1)
        self._beyond: set[tuple[str, str]] = set()
        self._steps: set[int] = set()
        self.equal = 0
        self.differing = 0
        self.difference: Difference | None = None
        self.done = not self._expected

    def check(self, block: Block) -> None:
        """Compare the rows of a new block with those of the same keys, if there are any."""
        if self.done:
            return
        for key, new in comparable_rows(block).items():
            old = self._expected.pop(key, None)
            if old is not None:
                self._compare(key, old, new)
        self.done = not self._expected or self._passed(block)

    def _compare(self, key: Key, old: tuple[int, int], new: tuple[int, int]) -> None:
        epoch, step, phase, name, _ = key
        self._steps.add(step)
        if old == new:
            self.equal += 1
            return
        self.differing += 1
        if self.difference is None or (epoch, step) < self.difference[:2]:
            self.difference = Difference(epoch, step, phase, name, old, new)

    def _passed(self, block: Block) -> bool:
        """Whether a metric went beyond the last step for the second time: the first time, blocks of
        other metrics with rows to compare may still follow."""
        if max(block.steps, default=-1) <= self._last:
            return False
        series = (block.phase, block.name)
        passed = series in self._beyond
        self._beyond.add(series)
        return passed

    def report(self) -> str:
        """What came of it, in one line."""
        if self.difference is not None:
            _, step, _, name, old, new = self.difference
            total = self.equal + self.differing
            what = f"step {step} {name} was {_show(old, new)} and is {_show(new, old)} now"
            return f"resume differs: {what} ({self.differing} of {total} rows differ)"
        if not self.equal:
            return "nothing to verify"
        steps = len(self._steps)
        return f"resume verified: {steps} step{'s' * (steps != 1)} executed again, all equal"

    def advice(self) -> str:
        """What may be at fault where rows differ, and how to find it."""
        return (
            "the same steps gave other numbers: something that they read is not in state= (a counter, a "
            "learning rate or an average in a variable, a generator of your own), the data depends on the "
            "clock or on the order of a set, or a kernel is not deterministic. `everstep drill SCRIPT` names "
            "the component"
        )


def _show(row: tuple[int, int], other: tuple[int, int]) -> str:
    bits, count = row
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))
    text = repr(value)
    if value != value:
        text += f" (bits {bits:016x})"
    return text if count == other[1] else f"{text} (of {count} values)"
