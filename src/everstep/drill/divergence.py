"""First difference between two chains of starts of a program: the place and the component."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, TypeAlias

from everstep.drill.program import Program, WitnessLine
from everstep.proof.compare import compare_runs
from everstep.record import ABSENT, Difference, Row, first_difference

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
Rows: TypeAlias = dict[tuple[int, int, str, str, int], Row]
"""(epoch, step, phase, name, seq) -> row."""

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
        return {run: rows_by_key(self.program.journal(run).rows()) for run in self.program.runs}

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
            found += differing_rows(self.rows[run], other.journal(run).rows(valid=False), run)
        if not found:  # the ends can differ even if all steps are the same
            for run in other.runs:
                ends = compare_runs(self.program.root / run, other.root / run)
                found += [one._replace(run=run) for one in ends]
        return first_difference(found, self.program.runs)


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


def rows_by_key(rows: Iterable[Row]) -> Rows:
    """Map rows that do not depend on the clock by their keys."""
    return {_key(row): row for row in rows if not row.wall}


def differing_rows(expected: Rows, rows: Iterable[Row], run: str = "") -> Iterator[Difference]:
    """Yield the rows that differ, or are new."""
    for row in rows:
        was = expected.get(_key(row))
        if row.wall or (was is not None and _bits(row) == _bits(was)):
            continue
        in_service = row.phase.startswith("eval/")
        component, name = ("service", row.phase.removeprefix("eval/")) if in_service else ("loss", row.name)
        if was is None:
            component, name = "journal", f"row {name}"
        # the head of an epoch lies before its first step
        step, place = row.step, row.phase if row.phase in ("step", "tail") else "epoch"
        if row.phase == "head":
            step, place = step + 1, "before"
        values = ABSENT if was is None else _value(was, row), _value(row, was)
        yield Difference(component, name, *values, step, row.epoch, place, run)


def _key(row: Row) -> tuple[int, int, str, str, int]:
    return row.epoch, row.step, row.phase, row.name, row.seq


def _bits(row: Row) -> bytes:
    return struct.pack(">dq", row.value, row.count)


def _value(row: Row, other: Row | None) -> str:
    same_value = other is not None and row.value == other.value
    return f"{row.value!r} (of {row.count} values)" if same_value else repr(row.value)


def as_json(difference: Difference | None) -> dict[str, Any] | None:
    """Convert a difference to a dictionary for JSON."""
    if difference is None:
        return None
    return {**difference._asdict(), "where": difference.where, "cause": cause(difference)}
