"""Verification of steps: they are executed again, and every recorded value must be found again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.checkpoint import Store
from everstep.errors import ConfigError, ReplayError
from everstep.record import RunJournal
from everstep.record.journal_format import bits_float
from everstep.record.journal_reader import Key, comparable_rows
from everstep.record.segment_file import StoredBlock
from everstep.record.step_comparison import Batch, Found, batch_words, row_words
from everstep.record.trail import ABSENT, read_trail, trail_path
from everstep.replaying.execution import Executed, execute, plan_for
from everstep.replaying.recorded_program import RecordedProgram
from everstep.replaying.run_copy import RunCopy, can_begin_anew, copy_run, last_step
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


# ----------------------------------------------------------------------------------- the verification


@dataclass
class Verification:
    """Result of executing steps again.

    Attributes:
        run: the run directory.
        first, last: the steps that were compared.
        origin: checkpoint from which they were executed.
        seconds: duration of the execution.
        equal: number of values that were found again, by kind.
        differences: values that were not found again, the first step first.
        states: names of the checkpoints whose states were compared.
        notes: warnings.
    """

    run: str
    first: int
    last: int
    origin: str
    seconds: float
    equal: dict[str, int] = field(default_factory=dict)
    differences: list[ValueDifference] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether each recorded value was found again, and there is one."""
        return not self.differences and any(self.equal.values())

    def __str__(self) -> str:
        lines = [
            f"steps {self.first} to {self.last} executed again from {self.origin}, in {self.seconds:.1f} s",
            f"  equal values: {counted(self.equal)}",
        ]
        steps = f"steps {self.first} to {self.last}"
        if self.verified:
            return "\n".join([*lines, f"verified: {steps} found every recorded value again"])
        if not self.differences:
            return "\n".join([*lines, f"not verified: of {steps} nothing is recorded that can be compared"])
        shown = [f"  differs: {each}" for each in self.differences[:5]]
        if len(self.differences) > 5:
            shown.append(f"  and {len(self.differences) - 5:,} more values")
        verdict = f"not verified: step {self.differences[0].step} is the first that differs from the record"
        return "\n".join([*lines, *shown, verdict])

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {
            **vars(self),
            "verified": self.verified,
            "differences": [each._asdict() for each in self.differences],
        }


def asked_steps(text: str, run_dir: Path) -> range:
    """Parse "A:B", both inclusive; without A from the first that can be replayed, without B to the last."""
    first, colon, last = text.partition(":")
    ends = [first, last if colon else first]
    if not all(each == "" or each.isdigit() for each in ends):
        raise ConfigError(f"--verify {text}: give steps as A:B, such as 40:80, or : for all that is possible")
    known = last_step(run_dir)
    begin = int(ends[0]) if ends[0] else first_step(run_dir)
    end = min(int(ends[1]), known) if ends[1] else known
    if not 1 <= begin <= end:
        raise ConfigError(f"--verify {text}: {run_dir} has the steps 1 to {known}; give steps among them")
    return range(begin, end + 1)


def first_step(run_dir: Path) -> int:
    """Return the first step that can be executed again."""
    facts = Store(run_dir).facts()
    if can_begin_anew(run_dir) or not facts:
        return 1
    return facts[0].name.step + 1


def verify(
    run_dir: Path,
    steps: range,
    program: RecordedProgram,
    folder: Path,
    opened_as: Path | None = None,
) -> Verification:
    """Execute steps of a run again, and compare every value that the run has recorded of them."""
    copy = copy_run(run_dir, folder, steps[0] - 1, opened_as)
    names = [
        str(each.name) for each in Store(copy.run_dir).facts() if copy.step < each.name.step <= steps[-1]
    ]
    began = time.monotonic()
    executed = execute(program, copy, plan_for(copy, steps[-1], states=names))
    seconds = time.monotonic() - began
    if executed.status:
        raise ReplayError(f"the program ended with status {executed.status}:\n{executed.log[-2000:]}")
    was, now = recorded_values(copy.run_dir, steps), replayed_values(copy, steps)
    differences, equal = compare_values(was, now, left_out(copy.run_dir, executed))
    lines = [line for line in executed.found if line["at"] == "state" and line["step"] >= steps[0] - 1]
    differences += state_differences(lines)
    alike = Counter({"states of checkpoints": sum(not line["differing"] for line in lines)})
    notes = [*copy.notes, *program.notes, *executed.warnings]
    return Verification(
        str(copy.run_dir),
        steps[0],
        steps[-1],
        copy.origin,
        round(seconds, 3),
        dict(equal + alike),
        sorted(differences, key=lambda each: (each.step, each.order, each.name)),
        [line["name"] for line in lines],
        notes,
    )


def replayed_values(copy: RunCopy, steps: range) -> Any:
    """Read what the execution in a copy has found."""
    newest = max(segment.number for segment in RunJournal(copy.place).segments())
    return values_of_start(copy.place, newest, steps)


def left_out(run_dir: Path, executed: Executed) -> Sequence[str]:
    """Phases of the services that report, which a replay leaves out."""
    opened = executed.told("opened") or {}
    return [f"eval/{name}" for name in opened.get("left_out", ())]
