"""First difference between two chains of starts of a program: the place and the component."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, TypeAlias

from everstep.drill.program import Program, WitnessLine
from everstep.proof.compare import compare_runs
from everstep.record import ABSENT, WARNED, Difference, first_difference
from everstep.record.journal_reader import Key, Value
from everstep.record.step_comparison import row_words

CAUSES = {
    "samples": "the data reads something that is not in the state: a generator of its own, the clock, the "
    "order of a set. Give the generator to state=, or draw in everstep.data.loader, which keys it",
    "random state": "more, fewer or other random numbers were drawn: something draws between the resume "
    "point and here that did not draw before, or is seeded by the program in the loop",
    "loss": "the value is computed from something that is not in state=: a counter, an average of the "
    "weights, a generator of its own, a cache",
    "weights": "samples, random state and loss are equal, so the update reads a value that is not in "
    "state=: a learning rate in a variable, a schedule, a momentum",
    "optimizer": "a value that is not in state= changes its settings or moments: a counter that sets the "
    "rate",
    "state": "a value that is not in state= changes it: a counter in a variable, a generator of its own",
    "service": "the service decides by a value that its state_dict() does not return",
    "journal": "a row is missing, twice or new: the script collects it or not by a value that is not in "
    "state=",
}
"""Likely causes of a resume that differs."""

TOUCHED = (
    "it changed between two steps, where no line of the loop runs: a thread, or the data, writes into it. "
    "Change the state in the loop"
)

Lines: TypeAlias = dict[tuple[str, int, str, int, int], WitnessLine]
"""(run, rank, place, epoch, step) -> what a witness has seen there."""
Rows: TypeAlias = dict[Key, Value]

_FROM_OUTSIDE = ("random state", "loss", "weights", "optimizer", "state")
"""Components that differ by what the state lacks, or by a kernel that was chosen otherwise."""
_KINDS = {"samples": "samples", "random": "random state", "weights": "weights", "optimizer": "optimizer"}


def cause(difference: Difference) -> str:
    """Return the likely cause and the remedy, for people."""
    return difference.note or CAUSES[difference.component]


class Undisturbed:
    """Undisturbed program, with its lines and rows by key."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def lines(self) -> Lines:
        return lines_by_place(line for start in self.program.starts for line in start.witnessed)

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """Valid rows of each run."""
        return {run: dict(self.program.journal(run).comparable()) for run in self.program.runs}

    def first_divergence(self, other: Program) -> Difference | None:
        """Find the place where `other` first differs from this program; None if its runs ended the same."""
        found: list[Difference] = []
        for run in set(self.program.runs) ^ set(other.runs):
            seen = ("there", ABSENT) if run in self.program.runs else (ABSENT, "there")
            found.append(Difference("journal", "the run itself", *seen, place="end", run=run))
        for number, start in enumerate(other.starts):
            # a later start enters with the state of a checkpoint, the one of step 0 included: that has the
            # changes made by the lines between `with` and the loop
            found += differing_lines(self.lines, start.witnessed, enters=number == 0)
        runs = [run for run in other.runs if run in self.program.runs]
        for run in runs:  # all rows that were ever written, also those superseded later
            found += differing_rows(self.rows[run], other.journal(run).comparable(valid=False), run)
        if not found:  # the ends can differ even if all steps are the same
            for run in other.runs:
                ends = compare_runs(self.program.root / run, other.root / run)
                found += [one._replace(run=run) for one in ends]
        first = first_difference(found, self.program.runs)
        if first is None or first.note or first.component not in _FROM_OUTSIDE:
            return first
        return first._replace(note="; ".join(self._warned(first.run)))

    def _warned(self, run: str) -> list[str]:
        """Return what the run itself warned of: a likelier cause than those that every program may have."""
        if run not in self.program.runs:
            return []
        return [str(event.data["message"]) for event in self.program.journal(run).events(WARNED, valid=False)]


def lines_by_place(lines: Iterable[WitnessLine]) -> Lines:
    """Map lines of a witness by their places."""
    return {line.place: line for line in lines}


def differing_lines(
    expected: Lines, lines: Iterable[WitnessLine], *, enters: bool = True
) -> Iterator[Difference]:
    """Yield the parts that differ between lines of a witness.

    Args:
        enters: whether the state at the entry is compared.
    """
    previous: dict[int, WitnessLine] = {}
    for line in lines:
        before = previous.get(line.rank)
        previous[line.rank] = line
        was = expected.get(line.place)
        where = (line.step, line.epoch, line.at, line.run, line.rank)
        if was is None:
            if line.at == "step":
                yield Difference("journal", "a step that was not there", ABSENT, "there", *where)
        elif line.at != "enter" or enters:
            follows = before is not None and (before.at, line.at) == ("step", "before")
            last = before.parts if before is not None and follows and before.epoch == line.epoch else {}
            for part in was.parts.keys() & line.parts.keys():
                if was.parts[part] != line.parts[part]:
                    kind, _, name = part.partition("/")
                    was_digest, digest = was.parts[part][:8], line.parts[part][:8]
                    # it was looked at as the step before was complete
                    note = TOUCHED if part in last else ""
                    component = _KINDS.get(kind, "state")
                    yield Difference(component, name, was_digest, digest, *where, note)


def differing_rows(expected: Rows, rows: Iterable[tuple[Key, Value]], run: str = "") -> Iterator[Difference]:
    """Yield the rows that differ, or are new."""
    for key, value in rows:
        was = expected.get(key)
        if was == value:
            continue
        epoch, step, phase, name, _ = key
        in_service = phase.startswith("eval/")
        component, called = ("service", phase.removeprefix("eval/")) if in_service else ("loss", name)
        if was is None:
            component, called = "journal", f"row {called}"
        # the head of an epoch lies before its first step
        step, place = (step + 1, "before") if phase == "head" else (step, "epoch")
        place = phase if phase in ("step", "tail") else place
        old, new = row_words(was, value)
        yield Difference(component, called, old if was is not None else ABSENT, new, step, epoch, place, run)


def as_json(difference: Difference | None) -> dict[str, Any] | None:
    """Convert a difference to a dictionary for JSON."""
    if difference is None:
        return None
    return {**difference._asdict(), "where": difference.where, "cause": cause(difference)}
