"""`drill`: run a script twice undisturbed, then strike it at every hazard and start it again."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from everstep.arguments import integer, number
from everstep.drill.divergence import DrillDivergence, Undisturbed
from everstep.drill.program import Program, ProgramStart, Strike, command
from everstep.drill.report import DrillReport, Ordeal, StartSummary, Verdict
from everstep.drill.strike_plans import Landmarks, aim, chosen
from everstep.drill.timeline import draw_timeline, executed_again, positions
from everstep.errors import ConfigError, DrillError, EverstepError
from everstep.record import RunDir

LAST_STARTS = 3
"""Most starts of a program after the last strike, in which it must come to its end."""

ATTEMPTS = 3
"""Number of tries for a hazard that comes too late."""


def drill(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    ranks: int = 1,
    kills: int = 3,
    seed: int = 0,
    hazards: Sequence[str] = (),
    timeout: float = 600.0,
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
        keep: a folder that does not exist yet, for run directories and logs; None: they are deleted.
        say: called with the lines of the report as they come.

    Raises:
        ConfigError: an argument is wrong.
        DrillError: the script fails undisturbed, opens no run, or takes longer than `timeout`.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give the path of a Python script")
    kills, ranks = integer("kills", kills, 0), integer("ranks", ranks, 1)
    timeout = number("timeout", timeout, of="seconds")
    names = chosen(hazards, ranks)
    folder = Path(tempfile.mkdtemp(prefix="everstep-drill-") if keep is None else keep).resolve()
    if keep is not None and folder.exists():
        raise ConfigError(f"{folder} exists; give --keep a folder that can be made")
    try:
        made = _Drill(path, tuple(args), ranks, folder, keep is not None, kills, seed, timeout, say)
        return made.run(names)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


class _Drill:
    def __init__(
        self,
        script: Path,
        args: tuple[str, ...],
        ranks: int,
        folder: Path,
        keep: bool,
        kills: int,
        seed: int,
        timeout: float,
        say: Callable[[str], None],
    ) -> None:
        self.script, self.args, self.ranks, self.folder, self.keep = script, args, ranks, folder, keep
        self.kills, self.seed, self.timeout, self.say = kills, seed, timeout, say
        self.number = 0

    def run(self, names: list[str]) -> DrillReport:
        """Run the program twice undisturbed, then try each hazard."""
        trace = self.folder / ("trace" if self.ranks == 1 else "trace-{rank}")
        first, second = self.program("undisturbed-1"), self.program("undisturbed-2")
        for program in (first, second):
            self.require_sound(program, program.start(trace=trace if program is second else None))
        undisturbed = Undisturbed(first)
        start = second.starts[0]
        points = [
            Path(str(trace).replace("{rank}", str(rank))).read_text().split() for rank in range(self.ranks)
        ]
        landmarks = [Landmarks(start.of_rank(rank), passed) for rank, passed in enumerate(points)]
        report = DrillReport(
            script=str(self.script),
            args=list(self.args),
            seed=self.seed,
            runs=[f"/{run}" for run in first.runs],
            steps=landmarks[0].steps,
            seconds=start.seconds,
            ranks=self.ranks,
            nondeterminism=first_divergence(undisturbed, second),
            seeded=all(RunDir.open(first.root / run, create=False).facts["seed_given"] for run in first.runs),
        )
        self.say(report.header())
        if report.nondeterminism is None:
            for name in names:
                for turn in range(self.kills if name == "random instant" else 1):
                    report.ordeals.append(self.ordeal(name, turn, undisturbed, landmarks))
                    self.say(report.ordeals[-1].line)
        self.say(f"\n{report.verdict()}")
        return report

    def program(self, name: str) -> Program:
        line = command(self.script, self.args, self.ranks)
        return Program(line, self.folder / name, self.timeout, self.ranks)

    def require_sound(self, program: Program, start: ProgramStart) -> None:
        """Refuse a script that cannot be drilled."""
        if start.status:
            raise DrillError(
                f"{self.script} ended with status {start.status} although nobody struck it; make it run "
                f"before it is drilled:\n{start.tail}"
            )
        if not program.runs:
            raise DrillError(
                f"{self.script} opened no run; drill a script that uses everstep.Supervisor or TrainLoop"
            )
        if not any(record.at == "step" for record in start.records):
            raise DrillError(f"{self.script} completed no step; give it arguments with which it trains")
        seen = {record.rank for record in start.witnessed}
        if len(seen) < self.ranks:
            raise DrillError(
                f"{self.script} trains on {len(seen)} of {self.ranks} ranks; open the run on each of them: "
                "everstep.torch.parallel(model), and no `if rank == 0` around the loop"
            )

    def ordeal(
        self, hazard: str, turn: int, undisturbed: Undisturbed, landmarks: Sequence[Landmarks]
    ) -> Ordeal:
        """Strike a program and start it again until it ends; take another program if no strike hit."""
        draw = Random(f"{self.seed}/{hazard}/{turn}")
        for _ in range(ATTEMPTS):
            strikes = aim(hazard, landmarks, draw)
            if not strikes:
                return Ordeal(hazard, "no such place")
            found = self.attempt(hazard, strikes, undisturbed)
            if found.verdict != "not hit":
                break
        return found

    def attempt(self, hazard: str, strikes: list[Strike], undisturbed: Undisturbed) -> Ordeal:
        self.number += 1
        program = self.program(f"{self.number:02d}-{hazard.replace(' ', '-')}")
        hit = 0
        for strike in strikes:
            if not program.start(strike).status:
                break
            hit += 1
        while program.starts[-1].status and len(program.starts) < hit + LAST_STARTS:
            program.start()
        judged = self.judged(hazard, hit, program, undisturbed)
        if not self.keep:
            shutil.rmtree(program.folder, ignore_errors=True)
        return judged

    def judged(self, hazard: str, hit: int, program: Program, undisturbed: Undisturbed) -> Ordeal:
        place = positions(undisturbed)
        last = program.starts[-1]
        divergence = None if last.status else first_divergence(undisturbed, program)
        verdict: Verdict = "failed" if last.status else "differs" if divergence else "exact"
        return Ordeal(
            hazard,
            "not hit" if verdict == "exact" and not hit else verdict,
            struck=_struck(program.starts[:hit]),
            again=executed_again(program.starts, place),
            timeline=draw_timeline(program.starts, place),
            starts=_summaries(program),
            divergence=divergence,
            message=f"status {last.status}\n{last.tail}" if last.status else "",
        )


def first_divergence(undisturbed: Undisturbed, program: Program) -> DrillDivergence | None:
    """Find the first divergence as `Undisturbed` does; a run that cannot be read counts as a divergence."""
    try:
        return undisturbed.first_divergence(program)
    except EverstepError as error:
        return DrillDivergence("journal", str(error), "", "end", 0, 0, "a whole run", "damaged")


def _struck(starts: list[ProgramStart]) -> str:
    """Describe the first strike, and count the later ones."""
    if not starts:
        return ""
    more = f", and {len(starts) - 1} more" if len(starts) > 1 else ""
    target = "" if starts[0].strike is None else starts[0].strike.target
    return f"{target} {_where(starts[0])}{_operation(starts[0])}{more}".lstrip()


def _where(start: ProgramStart) -> str:
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
    name = start.strike.spec.split(" then ")[-1].split(":")[1]
    if start.strike.target:  # a rank's name leaves less space
        name = name.removeprefix("checkpoint.")
    return "" if name.startswith("witness.") else f", {_NAMES.get(name, name)}"


_NAMES = {"loop.tail": "tail begins", "loop.tail_end": "tail ends", "loop.exit": "block ends"}


def _summaries(program: Program) -> list[StartSummary]:
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
