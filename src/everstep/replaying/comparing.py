"""Comparison of steps that are executed again: with the record of their run, or with another run.

`verify` executes steps of a run again, and every recorded value must be found again; `diverge` finds the
first step, and the first component, at which two runs part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from everstep.checkpoint import CheckpointName, Store, read_checkpoint
from everstep.drill.program import by_place, differing_digests
from everstep.errors import ConfigError, ReplayError
from everstep.proof.compare import differing_rows
from everstep.record import Difference, RunJournal, first_difference, rank_trails, read_trail
from everstep.record.journal_format import step_of
from everstep.record.step_comparison import BatchDigest, batch_words
from everstep.replaying.execution import (
    Executed,
    RecordedProgram,
    RunCopy,
    can_begin_anew,
    execute,
    last_step,
    origin,
    program_of,
)
from everstep.services.replayed import differing_leaves


@dataclass
class Comparison:
    """What two executions, the `sides`, have in common: counts of equal values by kind, and what differs.

    What was compared, and how, is in `about` in lines, and in `facts` for JSON.
    """

    about: list[str]
    sides: tuple[str, str]
    facts: dict[str, Any]
    steps: range
    equal: Counter[str] = field(default_factory=Counter)
    first: Difference | None = None
    differing: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether there was anything to compare."""
        return self.first is not None or any(self.equal.values())

    @property
    def verified(self) -> bool:
        """Whether something was compared, and all of it is equal."""
        return self.compared and self.first is None

    def described(self, one: Difference) -> str:
        return f"{one}: {one.expected} {self.sides[0]}, {one.actual} {self.sides[1]}"

    def __str__(self) -> str:
        counts = [f"{count:,} of {what}" for what, count in sorted(self.equal.items()) if count]
        if self.verified and self.equal["batch digest"] < len(self.steps):
            counts.append(f"and not each of the {len(self.steps):,} steps has a batch digest on record")
        end = "not comparable: nothing is recorded that can be compared"
        if self.first is not None:
            more = f" ({self.differing} values differ)" if self.differing > 1 else ""
            end = f"differ: {self.described(self.first)}{more}"
        elif self.compared:
            end = "verified: all recorded values are equal"
        return "\n".join([*self.about, f"equal values: {', '.join(counts) or 'none'}", end])

    def as_json(self) -> dict[str, Any]:
        first = self.first and self.first._asdict()
        counts = {"equal": self.equal, "differing": self.differing}
        return {**self.facts, "about": self.about, **counts, "first": first, "notes": self.notes}


def parse_steps(text: str, run_dir: Path) -> range:
    """Parse "A:B", both inclusive; without A from the first that can be replayed, without B to the last."""
    first, colon, last = text.partition(":")
    ends = [first, last if colon else first]
    if not all(each == "" or each.isdigit() for each in ends):
        raise ConfigError(f"steps {text}: give steps as A:B, such as 40:80, or : for all that is possible")
    known, facts = last_step(run_dir), Store(run_dir).facts()
    oldest = 1 if can_begin_anew(run_dir) or not facts else facts[0].name.step + 1
    begin = int(ends[0]) if ends[0] else oldest
    end = min(int(ends[1]), known) if ends[1] else known
    if not 1 <= begin <= end:
        raise ConfigError(f"steps {text}: {run_dir} has the steps 1 to {known}; give steps among them")
    return range(begin, end + 1)


def verify(
    run_dir: Path,
    steps: range,
    program: RecordedProgram,
    folder: Path,
    opened_as: Path | None = None,
    *,
    shown: int = 0,
) -> Comparison:
    """Execute steps of a run again, show one, and compare every value that the run has recorded of them."""
    copy, last = RunCopy(run_dir, folder, steps[0] - 1, opened_as), steps[-1]
    names = [facts.name for facts in Store(run_dir).facts() if copy.step < facts.name.step <= last]
    began = time.monotonic()
    executed = execute(program, copy, last, states=[*map(str, names)], shown=shown)
    seconds = round(time.monotonic() - began, 3)
    facts = {"run": str(run_dir), "steps": [copy.step + 1, last], "origin": copy.origin, "seconds": seconds}
    about = f"steps {copy.step + 1} to {last} executed again from {copy.origin}, in {seconds:.1f} s"
    report = Comparison([about], ("recorded", "here"), facts, range(copy.step + 1, last + 1))
    report.notes = [*copy.notes, *program.notes, *executed.warnings]
    left = executed.last("left")
    report.equal, report.differing = Counter(left["equal"]), left["differing"]
    differences = [] if executed.difference is None else [executed.difference]
    for line in executed.lines:
        if line["at"] == "state" and (paths := line["differing"]):
            report.differing += len(paths)
            values = f"that in {line['name']}", "another"
            differences.append(Difference("state", paths[0], *values, line["step"], place="epoch"))
        elif line["at"] == "state":
            report.equal["state of a checkpoint"] += 1
    report.first = first_difference(differences)
    if shown:
        batch, journal = executed.last("batch").get("batch", "none"), RunJournal(executed.copy.place)
        here = (max(segment.number for segment in journal.segments()), shown)
        rows = [row for row in journal.rows(valid=False) if (row.segment, row.step) == here]
        metrics = {row.name if row.phase == "step" else f"{row.phase}/{row.name}": row.value for row in rows}
        facts["shown"] = {"batch": batch, "metrics": metrics}
        lines = [f"  {name} {value!r}" for name, value in metrics.items()]
        report.about[:0] = [f"batch of step {shown}:", batch, f"metrics of step {shown}:", *lines]
    return report


class Subject(NamedTuple):
    """One of the two sides; `given` is its script with arguments, in place of those recorded."""

    name: str
    run_dir: Path
    given: tuple[str, ...] = ()


def compare_recorded(a: Path, b: Path) -> Comparison:
    """Compare what two runs have recorded: metrics, batch digests, states in checkpoints."""
    facts: dict[str, Any] = {"a": str(a), "b": str(b), "recorded": None, "executed": None, "last_equal": ""}
    origins, ends = (origin(a), origin(b)), (last_step(a), last_step(b))
    steps = range(1 + max(map(step_of, origins)), min(ends) + 1)
    report = Comparison([f"A {a}", f"B {b}"], ("in A", "in B"), facts, steps)
    for side, began in zip("AB", origins, strict=True):
        if began:
            report.about.append(
                f"{side} began with {began} of another run: compared from step {steps.start} on"
            )
    if ends[0] != ends[1]:
        report.about.append(f"A has {ends[0]} steps and B {ends[1]}: the first {min(ends)} are compared")
    differences = [*_of_rows(a, b, steps, report.equal), *_of_batches(a, b, steps, report.equal)]
    one, other, alike = Store(a), Store(b), list[CheckpointName]()
    for name in sorted({facts.name for facts in one.facts()} & {facts.name for facts in other.facts()}):
        if (difference := _of_states(one, other, name)) is not None:
            differences.append(difference)
            break
        alike.append(name)
        report.equal["state of a checkpoint"] += 1
    report.first = first = first_difference(differences)
    if first is not None:
        facts["recorded"] = first._asdict()
        facts["last_equal"] = str(max((name for name in alike if name.step < first.step), default=""))
        report.about.append(f"the first recorded value that differs: {report.described(first)}")
        report.about.append(f"the last equal checkpoint: {facts['last_equal'] or 'none'}")
    return report


def _of_rows(a: Path, b: Path, steps: range, equal: Counter[str]) -> Iterator[Difference]:
    # lines at the head of an epoch that is entered again write no rows
    one, other = (
        {key: row for key, row in RunJournal(run).comparable() if key[1] in steps and key[2] != "head"}
        for run in (a, b)
    )
    names = {key[2:4] for key in one} & {key[2:4] for key in other}
    rows = {key: row for key, row in other.items() if key[2:4] in names}
    yield from differing_rows(one, rows.items())
    for key, row in rows.items():
        if one.get(key) == row:
            equal[key[3] if key[2] == "step" else f"{key[2]}/{key[3]}"] += 1


def _of_batches(a: Path, b: Path, steps: range, equal: Counter[str]) -> Iterator[Difference]:
    """Compare the digests of batches in the steps that the trails of both have, on each rank."""
    one, other = (_batches(run_dir, steps) for run_dir in (a, b))
    for key in sorted(one.keys() & other.keys()):
        (step, rank, stream, _), old, new = key, one[key], other[key]
        if old == new:
            equal["batch digest"] += 1
        else:
            yield Difference("samples", stream, *batch_words(old, new), step, rank=rank)


def _batches(run_dir: Path, steps: range) -> dict[tuple[int, int, str, int], BatchDigest]:
    """Map (step, rank, stream, place in the step) to what a rank was handed there."""
    batches: dict[tuple[int, int, str, int], BatchDigest] = {}
    for segment in RunJournal(run_dir).segments():  # a later execution counts, as with rows
        for rank, path in rank_trails(run_dir, segment.number).items():
            trail = read_trail(path)
            for mark in () if trail is None else trail.marks:
                if mark.phase == "batch" and mark.step in steps and mark.value is not None:
                    batches[mark.step, rank, mark.name, mark.seq] = (mark.epoch, mark.value)
    return batches


def _of_states(one: Store, other: Store, name: CheckpointName) -> Difference | None:
    # equal states have equal digests: no array is read for them
    digests = {read_checkpoint(each.path(name), select=lambda array: False).digest for each in (one, other)}
    if len(digests) == 1:
        return None
    a, b = one.read(name), other.read(name)
    paths = differing_leaves(a.tree, b.tree)
    values = f"that in {name}", "another"
    return Difference("state", paths[0], *values, name.step, place="epoch") if paths else None


def diverge(a: Subject, b: Subject, folder: Path, *, trust: bool = False) -> Comparison:
    """Find where two runs part: by their records, and then by executing the steps before that again."""
    report = compare_recorded(a.run_dir, b.run_dir)
    if report.first is None:
        return report
    try:
        one, other = (_execute(side, report, report.first, folder / side.name, trust) for side in (a, b))
    except ReplayError as error:
        report.about.append(f"not executed again: {error}")
        return report
    parts = list(differing_digests(by_place(one.witnessed), other.witnessed))
    # entries that are neither weights nor an optimizer may hold settings, long before these act
    parts = [each for each in parts if each.component != "state"] or parts
    steps = range(max(one.copy.step, other.copy.step) + 1, 1 << 62)
    rows = _of_rows(one.copy.place, other.copy.place, steps, Counter())
    first = first_difference([*parts, *rows])
    if first is not None:
        report.first, report.facts["executed"] = first, first._asdict()
        return report
    origins = " and ".join(dict.fromkeys(side.copy.origin for side in (one, other)))
    report.about.append(
        f"executed again from {origins}, both find the same: what differs in the record is not in the "
        "programs as they are now"
    )
    return report


def _execute(side: Subject, report: Comparison, first: Difference, folder: Path, trust: bool) -> Executed:
    """Execute a side again, from the last equal checkpoint to behind the first recorded difference."""
    run_dir, at = side.run_dir, max(first.step, 1)
    program = program_of(run_dir, at, side.given, trust=trust)
    begin = step_of(report.facts["last_equal"]) if report.facts["last_equal"] else at - 1
    # what changes behind a step is seen before the next one
    last = min(at + 1, max(last_step(run_dir), 1))
    executed = execute(program, RunCopy(run_dir, folder / "1", begin), last, witness=True)
    notes = list(program.notes)
    if (why := executed.difference) is not None:
        differs = f"executed again from {executed.copy.origin} it differs from its record ({why})"
        if executed.copy.checkpoint is not None and can_begin_anew(run_dir):
            # a resume that is not exact spoils each execution from a checkpoint
            anew = execute(program, RunCopy(run_dir, folder / "2", begin, anew=True), last, witness=True)
            if anew.difference is None:
                executed = anew
                differs += ", and from its start it does not: a resume of this program is not exact"
        notes.append(differs)
    report.about += [f"{side.name}: {note}" for note in notes]
    return executed
