"""Divergence: the first step, and the first component, at which two runs part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from everstep.checkpoint import Checkpoint, CheckpointName, Store, read_checkpoint
from everstep.drill.divergence import Rows, differing_lines, differing_rows, lines_by_place
from everstep.errors import ReplayError
from everstep.record import Difference, RunJournal, first_difference, read_trail, trail_path
from everstep.record.segment_file import step_of
from everstep.record.step_comparison import Batch, batch_words
from everstep.record.trail import ABSENT
from everstep.replaying.execution import Executed, execute
from everstep.replaying.recorded_program import program_of
from everstep.replaying.run_copy import can_begin_anew, copy_run, last_step, origin
from everstep.replaying.verify import counted
from everstep.services.replayed import differing_leaves
from everstep.state import Encoded


class Subject(NamedTuple):
    """One of the two sides; `given` is its script with arguments, in place of those recorded."""

    name: str
    run_dir: Path
    given: tuple[str, ...] = ()


@dataclass
class DivergeReport:
    """Result of comparing two sides.

    Attributes:
        a, b: the run directories.
        equal: number of recorded values that are equal, by kind.
        recorded: first recorded value that differs; None if none does.
        executed: first part of a step that differs as both execute it again; None if that was not possible,
            or found nothing.
        last_equal: newest checkpoint before the first recorded difference whose states are equal in both; ""
            if there is none.
        notes: what else was found, in sentences.
    """

    a: str
    b: str
    equal: dict[str, int] = field(default_factory=dict)
    recorded: Difference | None = None
    executed: Difference | None = None
    last_equal: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether there was anything to compare."""
        return self.recorded is not None or any(self.equal.values())

    @property
    def first(self) -> Difference | None:
        """First difference; None if the sides are equal in all that both have recorded."""
        return self.executed or self.recorded

    def __str__(self) -> str:
        lines = [f"A {self.a}", f"B {self.b}", f"recorded: equal values: {counted(self.equal)}"]
        if self.recorded is not None:
            lines.append(f"recorded: the first that differs: {_in_words(self.recorded)}")
            lines.append(f"recorded: {self.last_equal or 'none'} is the last equal checkpoint")
        lines += self.notes
        if self.first is not None:
            return "\n".join([*lines, f"differ: {_in_words(self.first)}"])
        if self.compared:
            return "\n".join([*lines, "equal in all that both have recorded"])
        return "\n".join([*lines, "not comparable: they have recorded nothing in common"])

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        found = {"recorded": self.recorded, "executed": self.executed, "first": self.first}
        return {**vars(self), **{name: one and one._asdict() for name, one in found.items()}}


def _in_words(one: Difference) -> str:
    return f"{one}: {one.expected} in A, {one.actual} in B"


# ------------------------------------------------------------------------------------ what is recorded


def compare_recorded(a: Path, b: Path) -> DivergeReport:
    """Compare what two runs have recorded: metrics, batch digests, states in checkpoints."""
    report = DivergeReport(str(a), str(b))
    origins = origin(a), origin(b)
    first = 1 + max(map(step_of, origins))
    ends = last_step(a), last_step(b)
    steps = range(first, min(ends) + 1)
    for side, began in zip("AB", origins, strict=True):
        if began:
            report.notes.append(f"{side} began with {began} of another run: compared from step {first} on")
    if ends[0] != ends[1]:
        report.notes.append(f"A has {ends[0]} steps and B {ends[1]}: the first {min(ends)} are compared")
    equal: Counter[str] = Counter()
    found = [*_of_rows(a, b, steps, equal), *_of_batches(a, b, steps, equal)]
    one, other = Store(a), Store(b)
    alike: list[CheckpointName] = []
    for name in sorted({facts.name for facts in one.facts()} & {facts.name for facts in other.facts()}):
        if (difference := _of_states(one, other, name)) is not None:
            found.append(difference)
            break
        alike.append(name)
        equal["state of a checkpoint"] += 1
    report.equal = dict(equal)
    report.recorded = first_difference(found)
    before = [name for name in alike if report.recorded is not None and name.step < report.recorded.step]
    report.last_equal = str(before[-1]) if before else ""
    return report


def _of_rows(a: Path, b: Path, steps: range, equal: Counter[str]) -> Iterator[Difference]:
    """Compare the rows of the metrics that both have."""
    rows = [_rows(run_dir, steps) for run_dir in (a, b)]
    names = [{key[2:4] for key in each} for each in rows]
    one, other = ({key: row for key, row in each.items() if key[2:4] in names[0] & names[1]} for each in rows)
    for key, row in other.items():
        different = list(differing_rows(one, [(key, row)]))
        yield from different
        if not different:
            equal[key[3] if key[2] == "step" else f"{key[2]}/{key[3]}"] += 1


def _rows(run_dir: Path, steps: range) -> Rows:
    rows = RunJournal(run_dir).comparable()
    # lines at the head of an epoch that is entered again write no rows
    return {key: value for key, value in rows if key[1] in steps and key[2] != "head"}


def _of_batches(a: Path, b: Path, steps: range, equal: Counter[str]) -> Iterator[Difference]:
    """Compare the digests of batches in the steps that the trails of both have."""
    one, other = (_batches(run_dir, steps) for run_dir in (a, b))
    for step, stream, seq in sorted(one.keys() & other.keys()):
        was, now = one[step, stream, seq], other[step, stream, seq]
        if was == now:
            equal["batch digest"] += 1
        else:
            yield Difference("samples", stream, *batch_words(was, now), step)


def _batches(run_dir: Path, steps: range) -> dict[tuple[int, str, int], Batch]:
    found: dict[tuple[int, str, int], Batch] = {}
    for segment in RunJournal(run_dir).segments():  # a later execution counts, as with rows
        trail = read_trail(trail_path(run_dir, segment.number))
        for mark in () if trail is None else trail.marks:
            if mark.phase == "batch" and mark.step in steps and not mark.flags & ABSENT:
                found[mark.step, mark.name, mark.seq] = (mark.epoch, mark.value)
    return found


def _of_states(one: Store, other: Store, name: CheckpointName) -> Difference | None:
    # equal states have equal digests: no array is read for them
    digests = {read_checkpoint(each.path(name), wanted=lambda array: False).digest for each in (one, other)}
    if len(digests) == 1:
        return None
    a, b = one.read(name), other.read(name)
    settings = (*_settings_in(a), *_settings_in(b))
    paths = differing_leaves(Encoded(a.structure, a.arrays), Encoded(b.structure, b.arrays))
    # another gamma of a scheduler is among the settings, and changes a step later, or never
    paths = [path for path in paths if not path.startswith(settings)]
    if not paths:
        return None
    return Difference("state", paths[0], f"that in {name}", "another", name.step, place="epoch")


def _settings_in(checkpoint: Checkpoint) -> list[str]:
    """Places of values that are settings: the seed, and entries that are neither weights nor an optimizer."""
    structure: Any = checkpoint.structure
    entries = structure.get("user", {})
    arrays = {path.split("/")[1] for path in checkpoint.arrays if path.startswith("user/")}
    plain = [n for n, tree in entries.items() if n not in arrays and "param_groups" not in str(tree)[:10_000]]
    return ["progress/seed", *(f"user/{name}/" for name in plain)]


# ------------------------------------------------------------------------------------ execution again


def diverge(a: Subject, b: Subject, folder: Path, *, trust: bool = False) -> DivergeReport:
    """Find where two runs part: by their records, and then by executing the steps before that again."""
    report = compare_recorded(a.run_dir, b.run_dir)
    if report.recorded is None:
        return report
    try:
        one, other = (_execute(subject, report, folder / subject.name, trust) for subject in (a, b))
    except ReplayError as error:
        report.notes.append(f"not executed again: {error}")
        return report
    found = list(differing_lines(lines_by_place(one.witnessed), other.witnessed))
    # entries that are neither weights nor an optimizer may hold settings, long before these act
    found = [each for each in found if each.component != "state"] or found
    report.executed = first_difference([*found, *_of_rows_again(one, other)])
    if report.executed is None:
        origins = " and ".join(dict.fromkeys(side.copy.origin for side in (one, other)))
        report.notes.append(
            f"executed again from {origins}, both find the same: what differs in the record is not in the "
            "programs as they are now"
        )
    return report


def _of_rows_again(one: Executed, other: Executed) -> Iterator[Difference]:
    """Compare the rows of two executions again, in the steps that both have executed."""
    steps = range(max(one.copy.step, other.copy.step) + 1, 1 << 62)
    return _of_rows(one.copy.place, other.copy.place, steps, Counter())


def _execute(subject: Subject, report: DivergeReport, folder: Path, trust: bool) -> Executed:
    """Execute a side again, from the last equal checkpoint to behind the first recorded difference."""
    run_dir = subject.run_dir
    assert report.recorded is not None
    at = max(report.recorded.step, 1)
    program = program_of(run_dir, at, subject.given, trust=trust)
    begin = CheckpointName.parse(report.last_equal).step if report.last_equal else at - 1
    # what changes behind a step is seen before the next one
    last = min(at + 1, max(last_step(run_dir), 1))
    executed = execute(program, copy_run(run_dir, folder / "1", begin), last, witness=True)
    report.notes += [f"{subject.name}: {note}" for note in program.notes]
    why = executed.difference
    if why is not None and executed.copy.checkpoint is not None and can_begin_anew(run_dir):
        # a resume that is not exact spoils each execution from a checkpoint
        anew = execute(program, copy_run(run_dir, folder / "2", begin, anew=True), last, witness=True)
        if anew.difference is None:
            report.notes.append(
                f"{subject.name}: executed from {executed.copy.origin} it differs from its record ({why}), "
                "and from its start it does not: a resume of this program is not exact"
            )
            return anew
    if why is not None:
        report.notes.append(
            f"{subject.name}: executed again from {executed.copy.origin} it differs from its record: {why}"
        )
    return executed
