"""First difference between two chains of starts of a program: the place and the component."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from everstep.drill.program import Program, WitnessLine
from everstep.proof.compare import ABSENT, compare_runs
from everstep.record import WARNED, Row

COMPONENTS = (
    "samples",
    "random state",
    "loss",
    "weights",
    "optimizer",
    "state",
    "service",
    "journal",
)
"""Components of a step, in the order of cause and effect."""

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

_FROM_OUTSIDE = ("random state", "loss", "weights", "optimizer", "state")
"""Components that differ by what the state lacks, or by a kernel that was chosen otherwise."""

_Key: TypeAlias = tuple[str, int, str, int, int]
_KINDS = {"samples": "samples", "random": "random state", "weights": "weights", "optimizer": "optimizer"}
_PLACES = {"enter": -1, "before": 0, "step": 1, "tail": 2, "epoch": 3, "end": 4}
_WHERE = {
    "enter": "before the first step",
    "before": "as step {step} begins",
    "step": "step {step}",
    "tail": "in the tail of epoch {epoch} (step {step})",
    "epoch": "at the end of epoch {epoch} (step {step})",
    "end": "at the end of the run",
}


@dataclass(frozen=True)
class DrillDivergence:
    """First difference between two programs.

    Attributes:
        component: member of `COMPONENTS`.
        name: name of the stream, source of random numbers, metric, state entry or service.
        run: the run directory, relative to the root.
        place: "enter", "before", "step", "tail", "epoch" or "end".
        epoch, step: counters at that place; 0 at "end".
        expected, found: values or digests, in a few words.
        note: a cause that was seen; "" if the cause is only likely.
        rank: the first rank that differs; 0 is the writer, and the only one on one process.
    """

    component: str
    name: str
    run: str
    place: str
    epoch: int
    step: int
    expected: str
    found: str
    note: str = ""
    rank: int = 0

    @property
    def cause(self) -> str:
        """Likely cause and remedy, for people."""
        return self.note or CAUSES[self.component]

    @property
    def where(self) -> str:
        """Place of the difference, for people."""
        return _WHERE[self.place].format(step=self.step, epoch=self.epoch)

    def __str__(self) -> str:
        on = f" on rank {self.rank}" if self.rank else ""
        return f"{self.component} ({self.name}) {self.where}{on}"

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON."""
        return {**asdict(self), "where": self.where, "cause": self.cause}

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Sort key: by place, then from cause to effect, then by rank."""
        place = _PLACES[self.place]
        step = 1 << 62 if self.place == "end" else self.step
        return -1 if place < 0 else self.epoch, step, place, COMPONENTS.index(self.component), self.rank


class Undisturbed:
    """Undisturbed program, with its records and rows by key."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def records(self) -> dict[_Key, WitnessLine]:
        """Lines of the witness, by (run, rank, place, epoch, step)."""
        return {_key(record): record for start in self.program.starts for record in start.witnessed}

    @cached_property
    def rows(self) -> dict[str, dict[tuple[Any, ...], Row]]:
        """Valid rows of each run, by key."""
        return {
            run: {_row_key(row): row for row in self.program.journal(run).rows() if not row.wall}
            for run in self.program.runs
        }

    def first_divergence(self, other: Program) -> DrillDivergence | None:
        """Find the place where `other` first differs from this program; None if its runs ended the same."""
        found = [*self._of_runs(other), *self._of_records(other)]
        for run in other.runs:
            if run in self.program.runs:
                found += self._of_rows(other, run)
        if not found:
            for run in other.runs:
                found += self._of_ends(other, run)
        first = min(found, key=self._order, default=None)
        if first is None or first.note or first.component not in _FROM_OUTSIDE:
            return first
        return replace(first, note="; ".join(self._warned(first.run)))

    def _warned(self, run: str) -> list[str]:
        """Return what the run itself warned of: a likelier cause than those that every program may have."""
        if run not in self.program.runs:
            return []
        return [str(event.data["message"]) for event in self.program.journal(run).events(WARNED, valid=False)]

    def _order(self, one: DrillDivergence) -> tuple[int, ...]:
        """Sort key: runs in the order in which the program opens them, then as `DrillDivergence.order`."""
        runs = self.program.runs
        return runs.index(one.run) if one.run in runs else len(runs), *one.order

    def _of_runs(self, other: Program) -> Iterator[DrillDivergence]:
        for run in set(self.program.runs) ^ set(other.runs):
            here = run in self.program.runs
            seen = ("there", ABSENT) if here else (ABSENT, "there")
            yield DrillDivergence("journal", "the run itself", run, "end", 0, 0, *seen)

    def _of_records(self, other: Program) -> Iterator[DrillDivergence]:
        for number, start in enumerate(other.starts):
            previous: dict[int, WitnessLine] = {}
            for record in start.witnessed:
                before = previous.get(record.rank)
                previous[record.rank] = record
                expected = self.records.get(_key(record))
                if expected is None:
                    if record.at == "step":
                        yield _divergence("journal", "a step that was not there", record, ABSENT, "there")
                elif record.at != "enter" or number == 0:
                    # A later start enters with the state of a checkpoint, the one of step 0 included: that
                    # has the changes made by the lines between `with` and the loop.
                    yield from _of_parts(expected, record, before)

    def _of_rows(self, other: Program, run: str) -> Iterator[DrillDivergence]:
        """Compare all rows that were ever written, also those superseded later."""
        expected = self.rows[run]
        for row in other.journal(run).rows(valid=False):
            was = expected.get(_row_key(row))
            if row.wall or (was is not None and _bits(row) == _bits(was)):
                continue
            component, name = _of_row(row)
            place = row.phase if row.phase in ("step", "tail") else "epoch"
            place = "before" if row.phase == "head" else place
            if was is None:
                component, name = "journal", f"row {name}"
            values = (ABSENT if was is None else _value(was, row), _value(row, was))
            yield DrillDivergence(component, name, run, place, row.epoch, row.step, *values)

    def _of_ends(self, other: Program, run: str) -> Iterator[DrillDivergence]:
        """Compare the ends of a run, which can differ even if all steps are the same."""
        for path, expected, found in compare_runs(self.program.root / run, other.root / run):
            rank, path = _of_rank(path)
            component, name = _of_path(path)
            yield DrillDivergence(component, name, run, "end", 0, 0, expected, found, rank=rank)


def _key(record: WitnessLine) -> _Key:
    return record.run, record.rank, record.at, record.epoch, record.step


def _of_parts(
    expected: WitnessLine, found: WitnessLine, before: WitnessLine | None
) -> Iterator[DrillDivergence]:
    last: set[str] = set()
    """Parts that were looked at as the step before was complete."""
    if before is not None and (before.at, found.at, before.epoch) == ("step", "before", found.epoch):
        last = set(before.parts)
    for part in expected.parts.keys() & found.parts.keys():
        if expected.parts[part] != found.parts[part]:
            digests = (expected.parts[part][:8], found.parts[part][:8])
            divergence = _divergence(*_of_part(part), found, *digests)
            yield replace(divergence, note=TOUCHED) if part in last else divergence


def _of_part(part: str) -> tuple[str, str]:
    kind, _, name = part.partition("/")
    return _KINDS.get(kind, "state"), name


def _divergence(component: str, name: str, at: WitnessLine, expected: str, found: str) -> DrillDivergence:
    return DrillDivergence(component, name, at.run, at.at, at.epoch, at.step, expected, found, rank=at.rank)


def _row_key(row: Row) -> tuple[Any, ...]:
    return row.epoch, row.step, row.phase, row.name, row.seq


def _bits(row: Row) -> bytes:
    return struct.pack(">dq", row.value, row.count)


def _value(row: Row, other: Row | None) -> str:
    same_value = other is not None and row.value == other.value
    return f"{row.value!r} (of {row.count} values)" if same_value else repr(row.value)


def _of_row(row: Row) -> tuple[str, str]:
    if row.phase.startswith("eval/"):
        return "service", row.phase.removeprefix("eval/")
    return "loss", row.name


def _of_rank(path: str) -> tuple[int, str]:
    """Return the rank that a path of `compare_runs` speaks of, and the path within the rank."""
    head, _, rest = path.partition("/")
    return (int(head.removeprefix("rank ")), rest) if head.startswith("rank ") else (0, path)


def _of_path(path: str) -> tuple[str, str]:
    """Return the component of a path of `compare_runs`, and the name in it."""
    kind, _, rest = path.partition("/")
    branch, _, name = rest.partition("/")
    name = name.removesuffix("#") or path
    if kind == "best":
        return "service", f"best {rest}"
    if kind != "leaf" or branch == "progress":
        return "journal", path
    if branch == "services":
        return "service", name.partition("/")[0]
    if branch == "streams":
        return "samples", name.partition("/")[0]
    if branch == "rng":
        return "random state", name
    return ("optimizer" if branch == "gradients" else "state"), name
