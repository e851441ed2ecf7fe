"""Verification of steps: they are executed again, and every recorded value must be found again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.checkpoint import Store
from everstep.errors import ConfigError, ReplayError
from everstep.record import RunJournal
from everstep.replaying.execution import Executed, execute, plan_for
from everstep.replaying.recorded_program import RecordedProgram
from everstep.replaying.recorded_values import (
    ValueDifference,
    compare_values,
    counted,
    recorded_values,
    state_differences,
    values_of_start,
)
from everstep.replaying.run_copy import RunCopy, can_begin_anew, copy_run, last_step


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
