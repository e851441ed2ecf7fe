"""Verification of steps: they are executed again, and every recorded value must be found again."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.checkpoint import Store
from everstep.errors import ConfigError
from everstep.record import Difference, RunJournal, first_difference
from everstep.replaying.execution import Executed, RunCopy, can_begin_anew, execute, last_step
from everstep.replaying.recorded_program import RecordedProgram


@dataclass
class Comparison:
    """What two executions of the same steps have in common, and the first value that differs.

    Attributes:
        about: what was compared and how, in lines.
        sides: words for the two executions.
        facts: what was compared, for JSON.
        equal: number of equal values, by kind.
        differing: number of values that differ; `first` is the first of them.
        notes: warnings.
    """

    about: list[str]
    sides: tuple[str, str]
    facts: dict[str, Any]
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

    def words(self, one: Difference) -> str:
        return f"{one}: {one.expected} {self.sides[0]}, {one.actual} {self.sides[1]}"

    def __str__(self) -> str:
        counts = [f"{count:,} of {what}" for what, count in sorted(self.equal.items()) if count]
        end = "not comparable: nothing is recorded that can be compared"
        if self.first is not None:
            more = f" ({self.differing} values differ)" if self.differing > 1 else ""
            end = f"differ: {self.words(self.first)}{more}"
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
    report = Comparison([about], ("recorded", "here"), facts)
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
        batch, metrics = executed.last("batch").get("batch", "none"), _metrics(executed, shown)
        facts["shown"] = {"batch": batch, "metrics": metrics}
        lines = [f"  {name} {value!r}" for name, value in metrics.items()]
        report.about[:0] = [f"batch of step {shown}:", batch, f"metrics of step {shown}:", *lines]
    return report


def _metrics(executed: Executed, step: int) -> dict[str, float]:
    journal = RunJournal(executed.copy.place)
    newest = max(segment.number for segment in journal.segments())
    rows = [row for row in journal.rows(valid=False) if (row.segment, row.step) == (newest, step)]
    return {row.name if row.phase == "step" else f"{row.phase}/{row.name}": row.value for row in rows}
