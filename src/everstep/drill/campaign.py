"""`drill`: run a script twice undisturbed, then strike it at every hazard and start it again.

Each hazard plans the strikes at a program, one strike for each start.  On several ranks it strikes one of
them, chosen with equal chances, unless its name says whom.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from everstep.arguments import integer, number
from everstep.drill.processes import last_lines, owned_folder
from everstep.drill.program import ALL_RANKS, TORCHRUN, Program, Strike, command, first_divergence
from everstep.drill.report import CHANCE, DrillReport, KillResult, StartSummary, bars, struck_at
from everstep.errors import ConfigError, DrillError, EverstepError, nearest
from everstep.record import Difference, RunDir
from everstep.unattended import LIMIT, SEED

LAST_STARTS = 3
"""Most starts of a program after the last strike, in which it must come to its end."""

ATTEMPTS = 3
"""Number of tries for a hazard that comes too late."""

SAVES = 4
"""Number of checkpoints that the drill adds to a run that it leaves early."""


class Campaign(ABC):
    """Programs of one drill: undisturbed ones, then some that are struck one by one; and the report."""

    def __init__(self, report: DrillReport, folder: Path, timeout: float, keep: bool) -> None:
        self.report, self.folder, self.timeout, self.keep = report, folder, timeout, keep

    @abstractmethod
    def strike(self, name: str, aimed: Any) -> KillResult:
        """Strike a program, and start it again until it ends."""

    def run(
        self, strikes: Iterable[tuple[str, Any]], deadline: float, say: Callable[[str], None]
    ) -> DrillReport:
        """Strike a program for each (hazard, what is aimed) until the deadline."""
        report = self.report
        say(report.header())
        for name, aimed in strikes:
            if report.nondeterminism is None:
                late = time.monotonic() > deadline
                report.results.append(KillResult(name, "no time") if late else self.strike(name, aimed))
                say(report.results[-1].line)
        say(f"\n{report.verdict()}")
        return report

    def require_sound(self, status: int, log: Path) -> None:
        """Refuse a program that fails undisturbed."""
        if status:
            problem = f"{self.report.script} ended with status {status} without a kill; make it run first"
            raise DrillError(f"{problem}:\n{last_lines(log)}")

    def result(
        self,
        name: str,
        starts: list[StartSummary],
        steps_of_starts: list[list[int]],
        hits: list[bool],
        log: Path,
        divergence: Difference | None,
        struck: str,
    ) -> KillResult:
        """Return the result of a program, by the steps that each start did and whether it was struck."""
        times = Counter(step for steps in steps_of_starts for step in steps)
        repeats = times - Counter([*times])
        self.report.steps_again |= set(repeats)
        status = starts[-1].status
        return KillResult(
            name,
            "failed" if status else "differs" if divergence else "exact" if any(hits) else "not hit",
            strikes=sum(hits),
            struck=struck,
            again=repeats.total(),
            timeline=bars(self.report.steps, zip(steps_of_starts, hits, strict=True)),
            starts=starts,
            divergence=None if status else divergence,
            message=f"status {status}\n{last_lines(log)}" if status else "",
        )


def deadline_after(budget: float | None) -> float:
    """Return the time, of `time.monotonic`, after which a drill of `budget` minutes strikes no more."""
    minutes = number("budget", budget, of="minutes", none="for no limit")
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def drill(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    ranks: int = 1,
    kills: int = 3,
    seed: int = 0,
    hazards: Sequence[str] = (),
    timeout: float = 600.0,
    budget: float | None = None,
    max_steps: int | None = None,
    keep: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DrillReport:
    """Kill a training script at every hazard, resume it each time, and compare with a run never killed.

    The script runs as it is, in processes of its own, in the current directory.  Its run directories,
    relative and absolute, are moved below a folder of the drill by EVERSTEP_ROOT; all other files are
    written where the script always writes them.

    Args:
        script: the file; it opens one or more `Supervisor` or `TrainLoop` runs.  A config file (.yaml) is
            trained by `everstep train`.
        args: arguments of the script.
        ranks: number of processes that train together, 1 or more; torchrun starts several, on this machine.
        kills: number of kills at random instants, 0 or more; each other hazard strikes once.
        seed: seed of all that is drawn: instants, steps, operations.
        hazards: the hazards to try (`everstep.drill.HAZARDS`, on several ranks `RANK_HAZARDS`); empty for
            all.
        timeout: seconds that a start may take, more than 0.
        budget: minutes after which nothing more is struck, more than 0; None: no limit.
        max_steps: step at which the drill leaves each run, 1 or more; None: runs go on to their end.
        keep: a folder that does not exist yet, for run directories and logs; None: they are deleted.
        say: called with the lines of the report as they come.

    Raises:
        DrillError: the script fails undisturbed, opens no run, or takes longer than `timeout`.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give the path of a Python script")
    if path.suffix == ".ipynb":
        raise ConfigError(f"{path} is a notebook: make a script of it: jupyter nbconvert --to script {path}")
    kills, ranks = integer("kills", kills, 0), integer("ranks", ranks, 1)
    max_steps = integer("max_steps", max_steps, none="for no limit")
    timeout, deadline = number("timeout", timeout, of="seconds"), deadline_after(budget)
    turns = [
        (name, turn)
        for name in choose_hazards(hazards, ranks)
        for turn in range(kills if name == "random instant" else 1)
    ]
    report = DrillReport(str(path), [*args], seed, runs=[], steps=0, seconds=0.0, ranks=ranks)
    with owned_folder("everstep-drill-", None if keep is None else Path(keep)) as folder:
        campaign = _ScriptCampaign(report, folder, timeout, keep is not None)
        campaign.begin(max_steps)
        return campaign.run(turns, deadline, say)


class _ScriptCampaign(Campaign):
    _count = 0
    """Number of programs that were struck."""

    def begin(self, max_steps: int | None) -> None:
        """Run two programs undisturbed."""
        report = self.report
        drawn_seed = Random(f"{report.seed}/seed of a run").getrandbits(31)
        self.env = {SEED: str(drawn_seed)}
        if max_steps is not None:
            # the script may save later: no kill would be followed by a resume
            self.env[LIMIT] = json.dumps({"steps": max_steps, "save_every": max(1, max_steps // SAVES)})
        first, second = self._run_undisturbed(1), self._run_undisturbed(2)
        self.points = [(second.folder / f"trace-{rank}").read_text().split() for rank in range(report.ranks)]
        records = second.starts[0].records
        self.seconds = records[-1].time - records[0].time
        self.undisturbed = first
        self.place = {step: number for number, step in enumerate(first.starts[0].steps, 1)}
        report.runs = [f"/{run}" for run in first.runs]
        report.steps, report.seconds = len(self.place), second.starts[0].seconds
        seeds = [RunDir.open(first.root / run, create=False).seed for run in first.runs]
        report.seeded = drawn_seed not in seeds
        stops = [event.data for run in first.runs for event in first.journal(run).events("interrupted")]
        if any(data["status"] == 0 for data in stops):  # nothing but the drill's limit does that
            report.cut = max_steps
        report.nondeterminism = self._difference(second)

    def _program(self, name: str) -> Program:
        report = self.report
        line = command(Path(report.script), tuple(report.args), report.ranks)
        return Program(line, self.folder / name, self.timeout, report.ranks, env=self.env)

    def _run_undisturbed(self, number: int) -> Program:
        """Start a program undisturbed, and refuse a script that cannot be drilled."""
        program = self._program(f"undisturbed-{number}")
        start = program.start(trace=program.folder / "trace-{rank}")
        script, ranks = self.report.script, self.report.ranks
        self.require_sound(start.status, start.log)
        if not program.runs:
            raise DrillError(f"{script} opened no run; give one that uses everstep.Supervisor or TrainLoop")
        if not start.steps:
            raise DrillError(f"{script} completed no step; give it arguments with which it trains")
        count = len({record.rank for record in start.witnessed})
        if count < ranks:
            raise DrillError(
                f"{script} trains on {count} of {ranks} ranks; open the run on each, not `if rank == 0`"
            )
        return program

    def _difference(self, program: Program) -> Difference | None:
        """Find the first divergence; a run that cannot be read counts as one."""
        try:
            return first_divergence(self.undisturbed, program)
        except EverstepError as error:
            return Difference("journal", str(error), "a whole run", "damaged", place="end")

    def strike(self, name: str, aimed: int) -> KillResult:
        """Strike a program for the `aimed`-th time; take another program if no strike hit."""
        draw = Random(f"{self.report.seed}/{name}/{aimed}")
        for _ in range(ATTEMPTS):
            strikes = aim(name, self.points, self.seconds, draw)
            if not strikes:
                return KillResult(name, "no such place")
            result = self._attempt(name, strikes)
            if result.verdict != "not hit":
                break
        return result

    def _attempt(self, name: str, strikes: list[Strike]) -> KillResult:
        self._count += 1
        program = self._program(f"{self._count:02d}-{name.replace(' ', '-')}")
        starts, hit = program.starts, 0
        for strike in strikes:
            if not program.start(strike).status:
                break
            hit += 1
        while starts[-1].status and len(starts) < hit + LAST_STARTS:
            program.start()
        divergence = None if starts[-1].status else self._difference(program)
        if divergence is not None and self.report.undisturbed == 2:
            # once more undisturbed, before the state is blamed for what may be chance
            third = self._run_undisturbed(3)
            self.report.undisturbed = 3
            if (first := self._difference(third)) is not None:
                self.report.nondeterminism = first._replace(note=CHANCE)
        steps = [[self.place[step] for step in start.steps if step in self.place] for start in starts]
        hits = [start.strike is not None and start.status != 0 for start in starts]
        summaries = [StartSummary.of(start) for start in starts]
        struck = struck_at(starts[0]) if hit else ""
        result = self.result(name, summaries, steps, hits, starts[-1].log, divergence, struck)
        if not self.keep:
            shutil.rmtree(program.folder, ignore_errors=True)
        return result


# ------------------------------------------------------------------------- where a hazard strikes

Points: TypeAlias = Sequence[str]
"""The hazards that a rank of an undisturbed start passed, in order."""
Plan: TypeAlias = Callable[[Points, Random], list[str]]
"""Chooses a hazard for each start, as `everstep.hazard` has it; none if the program has no such place."""

STEP = "witness.step"


def _later(points: Points, *names: str) -> list[int]:
    """List the points (by their indices) whose names begin so, after the first step."""
    start = points.index(STEP)
    return [i for i, name in enumerate(points) if i > start and name.startswith(names)]


def _followed(points: Points, name: str, others: Sequence[str]) -> list[str]:
    """List what comes next, among points of this name and of other ones, after each point of this name."""
    sequence = [each for each in points if each == name or each in others]
    return [following for each, following in pairwise([*sequence, ""]) if each == name]


def _kill_at(points: Points, indices: Sequence[int], draw: Random) -> list[str]:
    if not indices:
        return []
    at = draw.choice(indices)
    return [f"kill:{points[at]}:{points[: at + 1].count(points[at])}"]


def _after(*names: str) -> Plan:
    return lambda points, draw: _kill_at(points, _later(points, *names), draw)


def _at_step(action: str) -> Plan:
    return lambda points, draw: [f"{action}:{draw.randint(1, points.count(STEP))}"]


def _last_step(points: Points, draw: Random) -> list[str]:
    after = _followed(points, STEP, ("witness.epoch", "witness.exit"))
    return [f"kill:{STEP}:{draw.choice([n for n, name in enumerate(after, 1) if name != STEP])}"]


def _head(points: Points, draw: Random) -> list[str]:
    """Strike in the tail by SIGTERM, so that the epoch's end is saved; kill the next start in the head."""
    after = _followed(points, "loop.tail_end", (STEP, "loop.exit"))
    tails = [n for n, name in enumerate(after, 1) if name == STEP]
    return [f"SIGTERM:loop.tail_end:{draw.choice(tails)}", "kill:witness.before:1"] if tails else []


def _shutdown(points: Points, draw: Random) -> list[str]:
    end = len(points) - 1 - points[::-1].index("loop.exit")
    return _kill_at(points, range(end, len(points)), draw)


def _resume(points: Points, draw: Random) -> list[str]:
    """Kill in the first half, or once a checkpoint of a step is there; then kill the resumes."""
    steps = points.count(STEP)
    first_saved = points[: next(iter(_later(points, "checkpoint.rename")), len(points))].count(STEP) + 1
    half = max(1, steps // 2)
    first = draw.randint(first_saved, steps) if half < first_saved <= steps else draw.randint(1, half)
    places = [f"{STEP}:{first}", "journal.create:1", "witness.enter:1", f"{STEP}:1"]
    return [f"kill:{place}" for place in places if place.partition(":")[0] in points]


def _signal_then_kill(points: Points, draw: Random) -> list[str]:
    step = draw.randint(1, points.count(STEP))
    names = ("checkpoint.mkdir", "checkpoint.write", "checkpoint.fsync", "checkpoint.rename")
    name = draw.choice([name for name in names if name in points])
    return [f"SIGTERM:{STEP}:{step} then kill:{name}:1"]


def _disk_full(points: Points, draw: Random) -> list[str]:
    start = points.index(STEP)
    before, after = (part.count("checkpoint.write") for part in (points[:start], points[start:]))
    return [f"ENOSPC:checkpoint.write:{before + draw.randint(1, max(1, after))}-1000000000"]


def _message(points: Points, draw: Random) -> list[str]:
    """Kill at a message of a commit; each kind of message with equal chances: there are more of some."""
    messages = _later(points, "checkpoint.tell_", "checkpoint.heard_", "checkpoint.verdict")
    kinds = sorted({points[i] for i in messages})
    return _after(draw.choice(kinds))(points, draw) if kinds else []


HAZARDS: dict[str, Plan | None] = {
    "random instant": None,
    "start-up": lambda points, draw: _kill_at(points, range(points.index(STEP)), draw),
    "commit": _after("checkpoint."),
    "tail": _after("loop.tail"),
    "last step": _last_step,
    "head": _head,
    "shutdown": _shutdown,
    "resume": _resume,
    "SIGTERM": _at_step("SIGTERM:witness.step"),
    "SIGINT": _at_step("SIGINT:witness.step"),
    "SIGTERM+SIGKILL": _signal_then_kill,
    "disk full": _disk_full,
}
"""Hazards by name; None: a kill at an instant."""

RANK_HAZARDS: dict[str, Plan | None] = {
    **HAZARDS,
    ALL_RANKS: None,
    TORCHRUN: None,
    "writer's commit": _message,
    "another's commit": _message,
    # as it begins a step: the others wait for it in the step's collectives
    "collective": _at_step("kill:witness.before"),
}
"""Hazards of a script on several ranks."""


def aim(hazard: str, ranks: Sequence[Points], seconds: float, draw: Random) -> list[Strike]:
    """Plan the strikes of a hazard, by what each rank of an undisturbed start passed in a number of seconds.

    None if the program has no such place (a Supervisor has no tail).
    """
    rank, target = 0, ""
    if hazard in (ALL_RANKS, TORCHRUN):
        target = hazard
    elif len(ranks) > 1:
        first = 1 if hazard == "another's commit" else 0
        rank = 0 if hazard == "writer's commit" else draw.randrange(first, len(ranks))
        target = f"rank {rank}"
    plan = RANK_HAZARDS[hazard]
    if plan is None:
        return [Strike(seconds=draw.uniform(0, seconds), target=target)]
    return [Strike(spec, target=target) for spec in plan(ranks[rank], draw)]


def choose_hazards(names: Iterable[str], ranks: int = 1) -> list[str]:
    """Return the hazards that a user named; all of them if none is named."""
    names, known = list(names), list(HAZARDS if ranks == 1 else RANK_HAZARDS)
    for name in names:
        if name not in known:
            hint = "it needs --ranks 2 or more" if name in RANK_HAZARDS else nearest(name, known)
            raise ConfigError(f"no hazard {name!r}; {hint}")
    return names or known
