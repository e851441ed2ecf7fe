"""Earlier executions of the steps that a start executes again, read from the journal and the trails.

If a step has several executions, the first execution counts, so that a second start cannot hide a
difference.  An execution that was superseded on purpose (by a rollback, by a checkpoint or a configuration
that a person chose, by an accepted divergence) is not compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from everstep.record.journal_format import Position, bits_float, float_bits
from everstep.record.journal_reader import Key, RunJournal
from everstep.record.trail import ABSENT, FOLDED, Mark, TrailContent, read_trail, trail_path

Found = tuple[int, int]
"""(bits of a value, count of the values folded into it)."""


@dataclass
class EarlierSteps:
    """Record of the steps after a checkpoint, as earlier executions found them.

    Attributes:
        first: the checkpoint's step.
        last: the last step that was complete; `first` if none was.
        rows: metrics by key; None where a metric was collected and its value is not known.
        batches: by step, (stream, place in the step) -> (pass, digest); the digest is None where the batch
            gave nothing to digest.
        ends: (stream, pass) -> the last step that drew from the stream when the pass ended.
        lasts: (stream, pass) -> the last step that read from the pass.
        copies: (step, "PHASE/PART") -> digest of a part of the state in a snapshot.
        traced: steps that a trail records in full, as far as values were on the host.
        names: metrics that any step of the run has collected.
        set_aside: the last step of executions that are not compared with; 0 if all are.
        why: reasons why they are not.
    """

    first: int
    last: int = 0
    rows: dict[Key, Found | None] = field(default_factory=dict)
    batches: dict[int, dict[tuple[str, int], tuple[int, int | None]]] = field(default_factory=dict)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    lasts: dict[tuple[str, int], int] = field(default_factory=dict)
    copies: dict[tuple[int, str], int] = field(default_factory=dict)
    traced: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    set_aside: int = 0
    why: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last = max(self.last, self.first)

    def leave_out(self, last: int, why: str) -> None:
        """Take note that executions until a step are not compared with, and why."""
        self.set_aside = max(self.set_aside, last)
        # steps that are compared with other executions are not spoken of
        if last > self.first and why not in self.why:
            self.why.append(why)


def read_earlier_steps(
    journal: RunJournal, position: Position | None, step: int, *, tail: bool = False, rank: int = 0
) -> EarlierSteps:
    """Collect the earlier results of the steps that a start from `step` will execute again.

    Args:
        position: the end of the journal as the checkpoint knows it.
        tail: whether the start also repeats the tail of an epoch that ends with `step`.
        rank: the rank whose trails are read.
    """
    found = EarlierSteps(step)
    superseded = journal.superseded(position)
    left = journal.left_choices(position)
    for segment in journal.segments():
        if segment.number in left:
            continue
        end, why = journal.compared_until(segment.number, step, left)
        _add_rows(found, superseded.get(segment.number, {}), end, why)
        trail = read_trail(trail_path(journal.run_dir, segment.number, rank))
        if trail is not None:
            _add_trail(found, trail, end, why, step if tail else step + 1)
    found.names |= journal.step_metrics()
    return found


def _add_rows(found: EarlierSteps, rows: dict[Key, Found], end: float, why: str) -> None:
    for key, row in rows.items():
        _, step, phase, _, _ = key
        in_step = phase == "step"
        if found.first + in_step <= step < end and phase != "head" and not (in_step and step in found.traced):
            found.rows.setdefault(key, row)
            if in_step:
                found.last = max(found.last, step)
        elif in_step and step >= end:
            found.leave_out(step, why)


def _add_trail(found: EarlierSteps, trail: TrailContent, end: float, why: str, begin: int) -> None:
    # Steps that an older trail has are left out: the first execution counts.
    new = set(range(max(found.first, trail.whole) + 1, int(min(trail.last + 1, end)))) - found.traced
    for mark in trail.marks:
        if mark.phase == "batch" and mark.step in new:
            digest = None if mark.flags & ABSENT else mark.value
            found.batches.setdefault(mark.step, {})[mark.name, mark.seq] = (mark.epoch, digest)
            found.lasts[mark.name, mark.epoch] = max(mark.step, found.lasts.get((mark.name, mark.epoch), 0))
        elif mark.phase == "pass" and begin <= mark.step < end:
            found.ends.setdefault((mark.name, mark.epoch), mark.step)
        elif mark.phase == "copy" and found.first < mark.step < end:
            found.copies.setdefault((mark.step, mark.name), mark.value)
    for key, row in _folded(trail.marks):
        _, step, phase, name, _ = key
        if phase == "step":
            found.names.add(name)
        if step in new if phase == "step" else begin <= step < end and phase != "head":
            if row is None:
                found.rows.setdefault(key, None)
            elif found.rows.get(key) is None:
                found.rows[key] = row
    if trail.last >= end:
        found.leave_out(trail.last, why)
    found.traced |= new
    found.last = max(found.last, *new, 0)


def _folded(marks: list[Mark]) -> Iterator[tuple[Key, Found | None]]:
    """Yield the metrics among the marks; a step's values are folded as the collector folds them."""
    sums: dict[Key, tuple[float, int]] = {}
    rows: dict[Key, Found | None] = {}
    for mark in marks:
        if mark.phase in ("batch", "pass", "copy"):
            continue
        key = (mark.epoch, mark.step, mark.phase, mark.name, mark.seq)
        if mark.flags & ABSENT:
            rows[key] = None
            sums.pop(key, None)
        elif mark.phase != "step" or mark.flags & FOLDED:
            rows[key] = (mark.value, mark.count)
        elif key not in rows or key in sums:
            total, count = bits_float(mark.value), mark.count
            if key in sums:
                total, count = sums[key][0] + total, sums[key][1] + count
            sums[key] = (total, count)
            rows[key] = (float_bits([total / count])[0] if count > 1 else mark.value, count)
    return iter(rows.items())
