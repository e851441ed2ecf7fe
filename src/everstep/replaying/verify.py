"""Verification of steps: they are executed again, and every recorded value must be found again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.checkpoint import Store
from everstep.errors import ConfigError
from everstep.record import Difference, RunJournal, first_difference
from everstep.replaying.execution import Executed, RunCopy, can_begin_anew, execute, last_step
from everstep.replaying.recorded_program import RecordedProgram


@dataclass
class Verification:
    """Result of executing steps of a run again.

    Attributes:
        origin: checkpoint from which they were executed.
        equal: number of values that were found again, by kind.
        difference: the first value that was not found again, of a number of `differing` ones.
        shown: the batch and the metrics of one step, where they were asked for.
        notes: warnings.
    """

    run: str
    first: int
    last: int
    origin: str
    seconds: float
    equal: dict[str, int]
    difference: Difference | None
    differing: int
    shown: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether each recorded value was found again, and there is one."""
        return self.difference is None and any(self.equal.values())

    def __str__(self) -> str:
        lines = []
        if self.shown:
            lines = [f"batch of step {self.last}:", self.shown["batch"], f"metrics of step {self.last}:"]
            lines += [f"  {name} {value!r}" for name, value in self.shown["metrics"].items()]
        lines.append(
            f"steps {self.first} to {self.last} executed again from {self.origin}, in {self.seconds:.1f} s"
        )
        lines.append(f"  equal values: {counted(self.equal)}")
        if (first := self.difference) is not None:
            lines.append(f"  first: {first}: {first.expected} recorded, {first.actual} here")
            lines.append(f"not verified: {self.differing} of these values differ from the record")
        elif self.verified:
            lines.append("verified: every recorded value was found again")
        else:
            lines.append("not verified: nothing is recorded of these steps that can be compared")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        difference = self.difference and self.difference._asdict()
        return {**vars(self), "verified": self.verified, "difference": difference}


def counted(equal: Mapping[str, int]) -> str:
    """Format counts, such as "40 of batch digest, 40 of loss"; "nothing" if nothing was counted."""
    return ", ".join(f"{count:,} of {what}" for what, count in sorted(equal.items()) if count) or "nothing"


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
) -> Verification:
    """Execute steps of a run again, and compare every value that the run has recorded of them.

    Args:
        shown: step whose batch and metrics are shown; 0: none.
    """
    copy, last = RunCopy(run_dir, folder, steps[0] - 1, opened_as), steps[-1]
    names = [facts.name for facts in Store(run_dir).facts() if copy.step < facts.name.step <= last]
    began = time.monotonic()
    executed = execute(program, copy, last, states=[*map(str, names)], shown=shown)
    seconds = time.monotonic() - began
    left = executed.last("left")
    equal, differing = Counter(left["equal"]), left["differing"]
    differences = [] if executed.difference is None else [executed.difference]
    for line in executed.lines:
        if line["at"] == "state" and (paths := line["differing"]):
            differing += len(paths)
            values = f"that in {line['name']}", "another"
            differences.append(Difference("state", paths[0], *values, line["step"], place="epoch"))
        elif line["at"] == "state":
            equal["state of a checkpoint"] += 1
    return Verification(
        str(run_dir),
        copy.step + 1,
        last,
        copy.origin,
        round(seconds, 3),
        dict(equal),
        first_difference(differences),
        differing,
        _shown(executed, shown) if shown else {},
        [*copy.notes, *program.notes, *executed.warnings],
    )


def _shown(executed: Executed, step: int) -> dict[str, Any]:
    """Return the batch and the metrics of a step, as it was executed again."""
    journal = RunJournal(executed.copy.place)
    newest = max(segment.number for segment in journal.segments())
    rows = [row for row in journal.rows(valid=False) if (row.segment, row.step) == (newest, step)]
    metrics = {row.name if row.phase == "step" else f"{row.phase}/{row.name}": row.value for row in rows}
    return {"batch": executed.last("batch").get("batch", "none"), "metrics": metrics}
