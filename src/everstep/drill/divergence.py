"""First difference between two executions of a program: the place and the component."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from everstep.drill.program import Program, StepDigests
from everstep.proof.compare import compare_runs, differing_rows
from everstep.record import ABSENT, WARNED, Difference, first_difference

CAUSES = {
    "samples": "the data reads something that is not in the state: a generator of its own, the clock, the "
    "order of a set. Give the generator to state=, or draw in everstep.data.loader, which keys it",
    "random state": "more, fewer or other random numbers were drawn: something draws between the resume "
    "point and here that did not draw before, or is seeded by the program in the loop",
    "loss": "the value is computed from something that is not in state=: a counter, an average of the "
    "weights, a generator of its own, a cache",
    "weights": "samples, random state and loss are equal, so the update reads a value that is kept between "
    "steps outside state=: a counter or a learning rate in a variable, a schedule, a momentum, an average",
    "optimizer": "a value that is not in state= changes its settings or moments: a counter that sets the "
    "rate",
    "state": "samples, random state and metrics are equal, so the lines that change it read a value that is "
    "kept between steps outside state=: a counter in a global variable, an average made by hand (EMA), a "
    "generator of its own. Put it into state=; everstep.Slot holds a number",
    "service": "the service decides by a value that its state_dict() does not return",
    "journal": "a row is missing, twice or new: the script collects it or not by a value that is not in "
    "state=",
}
"""Likely causes of a resume that differs."""

_FROM_OUTSIDE = ("random state", "loss", "weights", "optimizer", "state")
"""Components that differ by what the state lacks, or by a kernel that was chosen otherwise."""
Digests: TypeAlias = dict[tuple[str, int, str, int, int], StepDigests]
"""Digests by their places."""


def cause(difference: Difference) -> str:
    """Return the likely cause and the remedy, for people."""
    return difference.note or CAUSES[difference.component]


class Undisturbed:
    """Undisturbed program, with which others are compared."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._digests = by_place(record for start in program.starts for record in start.witnessed)

    def first_divergence(self, other: Program) -> Difference | None:
        """Find the place where `other` first differs from this program; None if its runs ended the same."""
        runs, differences = self.program.runs, list[Difference]()
        for run in {*runs} ^ {*other.runs}:
            values = ("there", ABSENT) if run in runs else (ABSENT, "there")
            differences.append(Difference("journal", "the run itself", *values, place="end", run=run))
        for number, start in enumerate(other.starts):
            # a later start enters with the state of a checkpoint, the one of step 0 included: that has the
            # changes made by the lines between `with` and the loop
            differences += differing_digests(self._digests, start.witnessed, enters=number == 0)
        common = [run for run in other.runs if run in runs]
        for run in common:  # all rows that were ever written, also those superseded later
            expected = dict(self.program.journal(run).comparable())
            differences += differing_rows(expected, other.journal(run).comparable(valid=False), run)
        if not differences:  # the ends can differ even if all steps are the same
            for run in common:
                ends = compare_runs(self.program.root / run, other.root / run)
                differences += [one._replace(run=run) for one in ends]
        first = first_difference(differences, runs)
        if first is None or first.component not in _FROM_OUTSIDE or first.run not in runs:
            return first
        # what the run itself has warned of is a likelier cause than those that every program may have
        warned = self.program.journal(first.run).events(WARNED, valid=False)
        return first._replace(note="; ".join(str(event.data["message"]) for event in warned))


def by_place(records: Iterable[StepDigests]) -> Digests:
    return {record.place: record for record in records}


def differing_digests(
    expected: Digests, records: Iterable[StepDigests], *, enters: bool = True
) -> Iterator[Difference]:
    """Yield the parts that differ.

    Args:
        enters: whether the state at the entry is compared.
    """
    for record in records:
        was = expected.get(record.place)
        where = (record.step, record.epoch, record.at, record.run, record.rank)
        if was is None and record.at == "step":
            yield Difference("journal", "a step that was not there", ABSENT, "there", *where)
        elif was is not None and (record.at != "enter" or enters):
            for part in was.parts.keys() & record.parts.keys():
                expected_digest, digest = was.parts[part][:8], record.parts[part][:8]
                if was.parts[part] != record.parts[part]:
                    kind, _, name = part.partition("/")
                    component = {"random": "random state"}.get(kind, kind)
                    yield Difference(component, name, expected_digest, digest, *where)
