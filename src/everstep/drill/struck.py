"""What befell the starts of a program: where each was struck, how it ended, what differs, what it wrote."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from everstep.drill.divergence import DrillDivergence, Undisturbed
from everstep.drill.program import Program, ProgramStart, Strike
from everstep.drill.report import StartSummary
from everstep.errors import EverstepError
from everstep.record.trust import key_file


def struck_at(starts: list[ProgramStart]) -> str:
    """Describe the first strike of these starts, and count the later ones."""
    if not starts:
        return ""
    more = f", and {len(starts) - 1} more" if len(starts) > 1 else ""
    target = "" if starts[0].strike is None else starts[0].strike.target
    return f"{target} {where(starts[0])}{_operation(starts[0])}{more}".lstrip()


def where(start: ProgramStart) -> str:
    """Name the place at which a start ended: its last complete step, or what came before or after."""
    strike = start.strike or Strike()
    records = [record for record in start.of_rank(strike.rank) if record.at != "before"]
    killed = start.status == -signal.SIGKILL
    if not killed:  # the run was closed in order, so that the exit says nothing about the place
        records = [record for record in records if record.at != "exit"]
    if not records or records[-1].at == "enter":
        return "start-up"
    last = records[-1]
    if last.at == "exit":
        return "shutdown"
    return f"{'after' if last.at == 'epoch' else 'at'} step {last.step}"


def _operation(start: ProgramStart) -> str:
    """Name the operation at which a start was killed, or that failed; "" if there is none."""
    if start.strike is None or not start.strike.spec or start.status > 128:
        return ""
    name = start.strike.point
    if start.strike.target:  # a rank's name leaves less space
        name = name.removeprefix("checkpoint.")
    return "" if name.startswith("witness.") else f", {_NAMES.get(name, name)}"


_NAMES = {"loop.tail": "tail begins", "loop.tail_end": "tail ends", "loop.exit": "block ends"}


_AT_ITS_NAME = ("start-up", "commit", "tail", "shutdown")
"""Hazards that strike at a point of the window that has their name."""


def window(start: ProgramStart, hazard: str, where: str) -> str:
    """Name the window in which a start was struck."""
    if hazard in _AT_ITS_NAME:
        return hazard
    point = "" if start.strike is None else start.strike.point
    if hazard == "head":
        return "tail" if point == "loop.tail_end" else "head"
    if where in ("start-up", "shutdown"):
        return where
    return "commit" if point.startswith("checkpoint.") else "step"


def summaries(program: Program) -> list[StartSummary]:
    """Describe each start by the journals and its witness; a start that wrote no segment by the witness."""
    segments = [
        (event.time, event.data, [e.data["report"] for e in segment.events if e.kind == "verified"])
        for run in program.runs
        for segment in program.journal(run).segments()
        for event in segment.events
        if event.kind == "segment"
    ]
    found = []
    for start in program.starts:
        within = [one for one in segments if start.began <= one[0] <= start.began + start.seconds]
        resumed = [data["facts"]["resumed_from"] for _, data, _ in within]
        found.append(
            StartSummary(
                strike=None if start.strike is None else str(start.strike),
                status=start.status,
                seconds=round(start.seconds, 3),
                resumed_from=[name for name in resumed if name is not None],
                steps=sum(record.at == "step" for record in start.records),
                said=[report for _, _, reports in within for report in reports],
            )
        )
    return found


def run_left_early(program: Program) -> str | None:
    """Return the run that the drill's limit has ended; nothing else interrupts with status 0."""
    for run in program.runs:
        if any(event.data["status"] == 0 for event in program.journal(run).events("interrupted")):
            return run
    return None


def last_step(program: Program, run: str) -> int:
    """Return the last step of a run that the last start has completed."""
    return max(record.step for record in program.starts[-1].records if record.run == run)


def first_divergence(undisturbed: Undisturbed, program: Program) -> DrillDivergence | None:
    """Find the first divergence as `Undisturbed` does; a run that cannot be read counts as a divergence."""
    try:
        return undisturbed.first_divergence(program)
    except EverstepError as error:
        return DrillDivergence("journal", str(error), "", "end", 0, 0, "a whole run", "damaged")


def outside(paths: Iterable[str], drill: Path) -> list[str]:
    """Return those paths that are files outside the drill's folder; relative if below the current one."""
    here = os.getcwd() + os.sep
    found = {
        path.removeprefix(here)
        for path in map(os.path.normpath, paths)
        if path != str(key_file())  # everstep's own
        and not path.startswith(("/proc/", "/sys/", f"{drill}{os.sep}"))
        and "__pycache__" not in path
        and os.path.isfile(path)
    }
    return sorted(found)
