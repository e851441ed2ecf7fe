"""`drill`: run a script twice undisturbed, then strike it at every hazard and start it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from everstep.arguments import integer, number
from everstep.drill.divergence import Undisturbed
from everstep.drill.processes import owned_folder
from everstep.drill.program import Program, ProgramStart, Strike, command
from everstep.drill.report import (
    CHANCE,
    DrillReport,
    KillResult,
    Verdict,
    draw_timeline,
    executed_again,
    positions,
    struck_at,
    summaries,
)
from everstep.drill.strike_plans import Landmarks, aim, chosen
from everstep.errors import ConfigError, DrillError, EverstepError
from everstep.record import Difference, RunDir
from everstep.unattended import LIMIT, SEED

LAST_STARTS = 3
"""Most starts of a program after the last strike, in which it must come to its end."""

ATTEMPTS = 3
"""Number of tries for a hazard that comes too late."""

SAVES = 4
"""Number of checkpoints that the drill adds to a run that it leaves before the script has saved."""


def drill(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    ranks: int = 1,
    kills: int = 3,
    seed: int = 0,
    hazards: Sequence[str] = (),
    timeout: float = 600.0,
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
        max_steps: step at which the drill leaves each run, 1 or more; None: runs go on to their end.
        keep: a folder that does not exist yet, for run directories and logs; None: they are deleted.
        say: called with the lines of the report as they come.

    Raises:
        ConfigError: an argument is wrong.
        DrillError: the script fails undisturbed, opens no run, or takes longer than `timeout`.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give the path of a Python script")
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"{path} is a notebook, and a drill starts a script again and again: write the script by "
            f"`jupyter nbconvert --to script {path}`, and drill {path.with_suffix('.py')}"
        )
    kills, ranks = integer("kills", kills, 0), integer("ranks", ranks, 1)
    max_steps = integer("max_steps", max_steps, none="for no limit")
    timeout = number("timeout", timeout, of="seconds")
    names = chosen(hazards, ranks)
    if keep is not None and Path(keep).exists():
        raise ConfigError(f"{Path(keep).resolve()} exists; give --keep a folder that can be made")
    with owned_folder("everstep-drill-") if keep is None else nullcontext(Path(keep).resolve()) as folder:
        arguments = (path, tuple(args), ranks, seed, timeout, folder, keep is not None)
        return _Drill(*arguments).run(names, kills, max_steps, say)


@dataclass
class _Drill:
    """Arguments of `drill`, checked, and what the drill has found so far."""

    script: Path
    args: tuple[str, ...]
    ranks: int
    seed: int
    timeout: float
    folder: Path
    keep: bool
    number: int = 0

    def run(
        self, names: list[str], kills: int, max_steps: int | None, say: Callable[[str], None]
    ) -> DrillReport:
        """Run the program twice undisturbed, then try each hazard."""
        self.limit: dict[str, Any] = {} if max_steps is None else {"steps": max_steps}
        """Arguments of `everstep.services.witness.DrillLimit`."""
        self.drawn_seed = Random(f"{self.seed}/seed of a run").getrandbits(31)
        """Seed of the runs that are given none."""
        first = self.program("undisturbed-1")
        self._undisturbed(first)
        cut = max_steps if _was_left_early(first) else None
        if cut is not None and not self._landmarks(first)[0].first_saved:
            # else no kill is followed by a resume from a later checkpoint than that of step 0
            self.limit["save_every"] = max(1, cut // SAVES)
        second = self.program("undisturbed-2")
        start = self._undisturbed(second)
        self.landmarks = self._landmarks(second)
        self.undisturbed = Undisturbed(first)
        self.place = positions(self.undisturbed)
        self.report = report = DrillReport(
            script=str(self.script),
            args=list(self.args),
            seed=self.seed,
            runs=[f"/{run}" for run in first.runs],
            steps=self.landmarks[0].steps,
            seconds=start.seconds,
            ranks=self.ranks,
            seeded=all(
                RunDir.open(first.root / run, create=False).seed != self.drawn_seed for run in first.runs
            ),
            cut=cut,
            save_every=self.limit.get("save_every"),
        )
        report.nondeterminism = self._difference(second)
        say(report.header())
        for name in names:
            for turn in range(kills if name == "random instant" else 1):
                if report.nondeterminism is None:
                    report.results.append(self._try(name, turn))
                    say(report.results[-1].line)
        say(f"\n{report.verdict()}")
        return report

    # ------------------------------------------------------------------------------ undisturbed

    def _landmarks(self, program: Program) -> list[Landmarks]:
        """Return the landmarks of each rank of an undisturbed start."""
        traces = [str(_trace(program)).replace("{rank}", str(rank)) for rank in range(program.ranks)]
        return [
            Landmarks(program.starts[0].of_rank(rank), Path(trace).read_text().split())
            for rank, trace in enumerate(traces)
        ]

    def program(self, name: str) -> Program:
        """Make a program, with the limits and the seed that all programs of this drill have."""
        env = {SEED: str(self.drawn_seed)} | ({LIMIT: json.dumps(self.limit)} if self.limit else {})
        line = command(self.script, self.args, self.ranks)
        return Program(line, self.folder / name, self.timeout, self.ranks, env=env)

    def _undisturbed(self, program: Program) -> ProgramStart:
        """Start a program undisturbed, and refuse a script that cannot be drilled."""
        start = program.start(trace=_trace(program))
        script, ranks = self.script, self.ranks
        if start.status:
            raise DrillError(
                f"{script} ended with status {start.status} without a kill; make it run before it is "
                f"drilled:\n{start.tail}"
            )
        if not program.runs:
            raise DrillError(
                f"{script} opened no run; drill a script that uses everstep.Supervisor or TrainLoop"
            )
        if not any(record.at == "step" for record in start.records):
            raise DrillError(f"{script} completed no step; give it arguments with which it trains")
        seen = {record.rank for record in start.witnessed}
        if len(seen) < ranks:
            raise DrillError(
                f"{script} trains on {len(seen)} of {ranks} ranks; open the run on each of them: "
                "everstep.torch.parallel(model), and no `if rank == 0` around the loop"
            )
        return start

    def _difference(self, program: Program) -> Difference | None:
        """Find the first divergence; a run that cannot be read counts as one."""
        try:
            return self.undisturbed.first_divergence(program)
        except EverstepError as error:
            return Difference("journal", str(error), "a whole run", "damaged", place="end")

    # ------------------------------------------------------------------------------ the hazards

    def _try(self, hazard: str, turn: int) -> KillResult:
        """Strike a program and start it again until it ends; take another program if no strike hit."""
        if not aim(hazard, self.landmarks, Random(0)):
            return KillResult(hazard, "no such place")
        draw = Random(f"{self.seed}/{hazard}/{turn}")
        for _ in range(ATTEMPTS):
            result = self._attempt(hazard, aim(hazard, self.landmarks, draw))
            if result.verdict != "not hit":
                break
        return result

    def _attempt(self, hazard: str, strikes: list[Strike]) -> KillResult:
        self.number += 1
        program = self.program(f"{self.number:02d}-{hazard.replace(' ', '-')}")
        hit = 0
        for strike in strikes:
            if not program.start(strike).status:
                break
            hit += 1
        while program.starts[-1].status and len(program.starts) < hit + LAST_STARTS:
            program.start()
        judged = self._judged(hazard, hit, program)
        if not self.keep:
            shutil.rmtree(program.folder, ignore_errors=True)
        return judged

    def _judged(self, hazard: str, hit: int, program: Program) -> KillResult:
        last = program.starts[-1]
        divergence = None if last.status else self._difference(program)
        if divergence is not None:
            self._exclude_chance()
        verdict: Verdict = "failed" if last.status else "differs" if divergence else "exact"
        again = executed_again(program.starts, self.place)
        self.report.steps_again |= set(again)
        return KillResult(
            hazard,
            "not hit" if verdict == "exact" and not hit else verdict,
            strikes=hit,
            struck=struck_at(program.starts[:hit]),
            again=again.total(),
            timeline=draw_timeline(program.starts, self.place),
            starts=summaries(program),
            divergence=divergence,
            message=f"status {last.status}\n{last.tail}" if last.status else "",
        )

    def _exclude_chance(self) -> None:
        """Run once more undisturbed before the state is blamed for what may be chance."""
        report = self.report
        if report.undisturbed > 2:
            return
        third = self.program("undisturbed-3")
        self._undisturbed(third)
        report.undisturbed += 1
        if (first := self._difference(third)) is not None:
            report.nondeterminism = first._replace(note=CHANCE)


def _trace(program: Program) -> Path:
    return program.folder / ("trace" if program.ranks == 1 else "trace-{rank}")


def _was_left_early(program: Program) -> bool:
    """Whether the drill's limit has ended a run; nothing else interrupts with status 0."""
    return any(
        event.data["status"] == 0
        for run in program.runs
        for event in program.journal(run).events("interrupted")
    )
