"""Search for the line that draws random numbers in one program and not in another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from everstep.checkpoint import CheckpointName
from everstep.drill.divergence import DrillDivergence, Undisturbed
from everstep.drill.program import Program, Strike
from everstep.drill.timeline import positions
from everstep.drilled import DRAWS

_ALONE = (
    "{line} draws numbers ({source}) {here}, and does not {there}: whether it draws hangs on a value that is "
    "not in state=, such as a cache, a counter or a first time"
)
_BOTH = (
    "no line draws ({source}) in one run alone; {lines} draws in both, but more, fewer or other numbers: the "
    "number hangs on a value that is not in state=, or the program seeds the generator in the loop"
)
_RESUMED = ("after the resume", "in the run that nobody killed")
_TWO_RUNS = ("in one undisturbed run", "in another")

_Entries: TypeAlias = list[dict[str, str]]
Make: TypeAlias = Callable[[str, Mapping[str, str]], Program]
Start: TypeAlias = Callable[[Program, Strike | None], object]


def resumed_before(program: Program, where: DrillDivergence) -> CheckpointName | None:
    """Return the checkpoint from which that start resumed which differs; None if it began from nothing."""
    place = where.run, where.place, where.epoch, where.step
    passed = [
        start
        for start in program.starts
        if any((each.run, each.at, each.epoch, each.step) == place for each in start.records)
    ]
    names = [
        event.data["facts"]["resumed_from"]
        for start in passed[-1:]
        for event in program.journal(where.run).events("segment", valid=False)
        if start.began <= event.time <= start.began + start.seconds
    ]
    return CheckpointName.parse(names[-1]) if names and names[-1] is not None else None


def line_that_draws(
    where: DrillDivergence, resumed: CheckpointName | None, undisturbed: Undisturbed, make: Make, start: Start
) -> str:
    """Run an undisturbed and a resumed program again, and name the line that draws in one of them alone.

    Args:
        where: a difference of the random state.
        resumed: the checkpoint from which the differing start resumed; None: two undisturbed programs differ.
        make: makes a program of a name, with variables of the environment.
        start: starts a program, with a strike or none.

    Returns:
        The cause in words; "" if no line was found.
    """
    strike = None if resumed is None else _leave_at(resumed, where.run, undisturbed)
    if where.place not in ("step", "epoch") or (resumed is not None and strike is None):
        return ""
    first, second = make("draws-undisturbed", {}), make("draws-again", {})
    if strike is not None:
        start(second, strike)
    found = []
    for program in (first, second):
        file = program.folder / "draws"
        asked = {"path": str(file), "run": f"/{where.run}", "step": where.step, "place": where.place}
        program.env = {**program.env, DRAWS: json.dumps(asked)}
        start(program, None)
        found.append(_entries(file))
    before, after = _since_resume(
        found[0], found[1], at_epoch_end=resumed is not None and resumed.epoch is not None
    )
    return _told(_lines(before, where.name), _lines(after, where.name), where.name, strike is not None)


def _leave_at(resumed: CheckpointName, run: str, undisturbed: Undisturbed) -> Strike | None:
    """Plan the strike after which a start resumes from that checkpoint; None if its place is not known."""
    records = [record for start in undisturbed.program.starts for record in start.records]
    if resumed.epoch:
        ends = [(record.run, record.epoch) for record in records if record.at == "epoch"]
        place = (run, resumed.epoch)
        return Strike(f"SIGTERM:loop.tail_end:{ends.index(place) + 1}") if place in ends else None
    steps = {(where, step): number for (where, _, step), number in positions(undisturbed).items()}
    if resumed.step == 0:
        number = steps.get((run, 1))
        return None if number is None else Strike(f"kill:witness.step:{number}")
    if resumed.step == 1:
        return Strike(f"SIGTERM:witness.enter:{undisturbed.program.runs.index(run) + 1}")
    number = steps.get((run, resumed.step - 1))  # a signal at a boundary counts at the next one
    return None if number is None else Strike(f"SIGTERM:witness.step:{number}")


def _entries(file: Path) -> _Entries:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _since_resume(undisturbed: _Entries, other: _Entries, at_epoch_end: bool) -> tuple[_Entries, _Entries]:
    """Cut both to what follows the place of the resume, if the other was resumed after the trace began."""
    marks = [entry.get("mark") for entry in other]
    begun = marks.index("before") if "before" in marks else len(marks)
    if "restored" not in marks[:begun]:
        return undisturbed, other
    resumed = begun - 1 - marks[:begun][::-1].index("restored")
    closed = [index for index, entry in enumerate(undisturbed) if entry.get("mark") == "epoch"]
    since = closed[0] + 1 if at_epoch_end and closed else 0
    return undisturbed[since:], other[resumed + 1 :]


def _lines(entries: Iterable[dict[str, str]], source: str) -> list[str]:
    return [entry["draw"] for entry in entries if entry.get("source") == source]


def _told(before: list[str], after: list[str], source: str, resumed: bool) -> str:
    here, there = _RESUMED if resumed else _TWO_RUNS
    for one, other, places in ((after, before, (here, there)), (before, after, (there, here))):
        if more := Counter(one) - Counter(other):
            line = next(line for line in one if line in more)
            return _ALONE.format(line=line, source=source, here=places[0], there=places[1])
    lines = " or ".join(dict.fromkeys(before))
    return _BOTH.format(lines=lines, source=source) if lines else ""
