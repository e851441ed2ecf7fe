"""Values that a run has recorded of its steps, and their comparison with those of other executions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.record import RunJournal
from everstep.record.journal_format import bits_float
from everstep.record.journal_reader import Key, comparable_rows
from everstep.record.segment_file import StoredBlock
from everstep.record.step_comparison import Batch, Found, batch_words, row_words
from everstep.record.trail import ABSENT, read_trail, trail_path
from everstep.state.digests import numbers_apart

Place: TypeAlias = tuple[int, str, int]
"""(step, stream, place in the step) of a batch."""

_PHASES = {"step": 1, "tail": 2, "epoch": 3}


class ValueDifference(NamedTuple):
    """Value that two executions of a step do not have in common.

    Attributes:
        step: the step.
        kind: "data", "metric" or "state".
        name: the stream, "PHASE/METRIC", or the path of a leaf of the state.
        was, now: the values in words.
        units: distance in units in the last place; None where there is none.
        order: place within the step, by cause and effect.
    """

    step: int
    kind: str
    name: str
    was: str
    now: str
    units: int | None = None
    order: int = 0

    def __str__(self) -> str:
        far = "" if self.units is None else f" ({self.units:,} units in the last place)"
        return f"step {self.step}, {self.kind} {self.name}: {self.was} and {self.now}{far}"


@dataclass
class RecordedValues:
    """Rows and batch digests of some steps.

    Attributes:
        rows: key -> (bits of the value, number of values folded into it).
        batches: (step, stream, place) -> (pass, digest).
    """

    rows: dict[Key, Found] = field(default_factory=dict)
    batches: dict[Place, Batch] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Names of the metrics, and of the streams whose batches have digests."""
        return {_metric(key) for key in self.rows} | {f"batches of {place[1]}" for place in self.batches}


def recorded_values(run_dir: Path, steps: range) -> RecordedValues:
    """Read what counts of a run's record: the valid rows of some steps, and the newest digests of batches."""
    journal, found = RunJournal(run_dir), RecordedValues()
    for _, items in journal.parts():
        for item in items:
            if isinstance(item, StoredBlock):
                found.rows |= _within(comparable_rows(item.block), steps)
    for segment in journal.segments():  # a later execution counts, as with rows
        found.batches |= _batches(run_dir, segment.number, steps)
    return found


def values_of_start(run_dir: Path, segment: int, steps: range) -> RecordedValues:
    """Read what one start has found in some steps."""
    own = next(each for each in RunJournal(run_dir).segments() if each.number == segment)
    rows: dict[Key, Found] = {}
    for stored in own.blocks:
        rows |= _within(comparable_rows(stored.block), steps)
    return RecordedValues(rows, _batches(run_dir, segment, steps))


def _within(rows: Mapping[Key, Found], steps: range) -> dict[Key, Found]:
    # lines at the head of an epoch that is entered again write no rows
    return {key: row for key, row in rows.items() if key[1] in steps and key[2] != "head"}


def _batches(run_dir: Path, segment: int, steps: range) -> dict[Place, Batch]:
    trail = read_trail(trail_path(run_dir, segment))
    marks = [] if trail is None else trail.marks
    return {
        (mark.step, mark.name, mark.seq): (mark.epoch, mark.value)
        for mark in marks
        if mark.phase == "batch" and mark.step in steps and not mark.flags & ABSENT
    }


def compare_values(
    was: RecordedValues, now: RecordedValues, left_out: Collection[str] = (), *, shared: bool = False
) -> tuple[list[ValueDifference], Counter[str]]:
    """Compare the values of two executions of the same steps.

    Args:
        left_out: phases of services that were left out of one of them.
        shared: compare only metrics and streams that both have.

    Returns:
        The differences, first first; and the number of equal values by kind.
    """
    names = [{(key[2], key[3]) for key in each.rows} for each in (was, now)]
    common = names[0] & names[1]
    differing: list[ValueDifference] = []
    equal: Counter[str] = Counter()
    for key in was.rows.keys() | now.rows.keys():
        if key[2] in left_out or (shared and (key[2], key[3]) not in common):
            continue
        old, new = was.rows.get(key), now.rows.get(key)
        if old == new:
            equal[_metric(key)] += 1
        else:
            differing.append(_of_row(key, old, new))
    for place in _compared(was.batches, now.batches, shared=shared):
        before, after = was.batches.get(place), now.batches.get(place)
        if before == after:
            equal["batch digests"] += 1
        else:
            differing.append(_of_batch(place, before, after))
    return sorted(differing, key=lambda each: (each.step, each.order, each.name)), equal


def _compared(was: Mapping[Place, Any], now: Mapping[Place, Any], *, shared: bool) -> Iterator[Place]:
    """Yield the places of batches in the steps that both have: a trail may have let go of whole steps."""
    steps = {place[0] for place in was} & {place[0] for place in now}
    streams = {place[1] for place in was} & {place[1] for place in now}
    for place in was.keys() | now.keys():
        if place[0] in steps and (place[1] in streams or not shared):
            yield place


def _metric(key: Key) -> str:
    return key[3] if key[2] == "step" else f"{key[2]}/{key[3]}"


def _of_row(key: Key, old: Found | None, new: Found | None) -> ValueDifference:
    units = None
    if old is not None and new is not None and old[1] == new[1]:
        units = numbers_apart(bits_float(old[0]), bits_float(new[0]))
    order = _PHASES.get(key[2], 4) * 10
    return ValueDifference(key[1], "metric", _metric(key), *row_words(old, new), units, order)


def _of_batch(place: Place, old: Batch | None, new: Batch | None) -> ValueDifference:
    step, stream, number = place
    name = stream if number == 0 else f"{stream}, batch {number + 1} of the step"
    return ValueDifference(step, "data", name, *batch_words(old, new))


def state_differences(lines: Iterable[Mapping[str, Any]]) -> Iterator[ValueDifference]:
    """Yield what differs between checkpoints and the state of an execution, from its lines "state"."""
    for line in lines:
        for path, units in line["differing"]:
            was = f"the state in {line['name']}"
            yield ValueDifference(line["step"], "state", path, was, "that of the replay", units, 50)


def counted(equal: Mapping[str, int]) -> str:
    """Format counts, such as "40 of loss, 40 of batch digests"; "nothing" if nothing was counted."""
    return ", ".join(f"{count:,} of {what}" for what, count in sorted(equal.items()) if count) or "nothing"
