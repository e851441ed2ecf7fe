"""`drill`: run a script twice undisturbed, then strike it at every hazard and start it again."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from everstep.arguments import integer, number
from everstep.drill.divergence import DrillDivergence, Undisturbed
from everstep.drill.processes import owned_folder
from everstep.drill.program import Program, ProgramStart, Strike, command
from everstep.drill.report import (
    CHANCE,
    DrillReport,
    Ordeal,
    Verdict,
    draw_timeline,
    executed_again,
    positions,
    struck_at,
    summaries,
    where,
    window,
)
from everstep.drill.strike_plans import Landmarks, aim, chosen, most_telling_first
from everstep.drilled import LIMIT, SEED
from everstep.errors import ConfigError, DrillError, EverstepError
from everstep.record import RunDir
from everstep.record.trust import key_file

LAST_STARTS = 3
"""Most starts of a program after the last strike, in which it must come to its end."""

ATTEMPTS = 3
"""Number of tries for a hazard that comes too late."""

PARTS = 16
"""Part of the budget after which the first run is left, if no number of steps is given: one in so many."""

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
    budget: float | None = None,
    max_steps: int | None = None,
    fail_fast: bool = False,
    keep: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DrillReport:
    """Kill a training script at every hazard, resume it each time, and compare with a run never killed.

    The script runs as it is, in processes of its own, in the current directory.  Its run directories,
    relative and absolute, are moved below a folder of the drill by EVERSTEP_ROOT; all other files are
    written where the script always writes them, and the report names them.

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
        budget: seconds that the drill may take, more than 0; None for no limit.  On one rank and without
            `max_steps`, runs are left after the steps that fit into a sixteenth.
        max_steps: step at which the drill leaves each run, 1 or more; None: runs go on to their end.
        fail_fast: end at the first resume that differs or fails.
        keep: a folder that does not exist yet, for run directories and logs; None: they are deleted.
        say: called with the lines of the report as they come.

    Raises:
        ConfigError: an argument is wrong.
        DrillError: the script fails undisturbed, opens no run, or takes longer than `timeout`; or the
            budget ends before anything is struck.
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
    budget = number("budget", budget, of="seconds", none="for no limit")
    names = chosen(hazards, ranks)
    if keep is not None and Path(keep).exists():
        raise ConfigError(f"{Path(keep).resolve()} exists; give --keep a folder that can be made")
    with owned_folder("everstep-drill-") if keep is None else nullcontext(Path(keep).resolve()) as folder:
        arguments = (path, tuple(args), ranks, kills, seed, timeout, budget, max_steps, fail_fast)
        campaign = _Drill(*arguments, folder, keep is not None, say)
        return campaign.run(names if budget is None else most_telling_first(names))


@dataclass
class _Drill:
    """Arguments of `drill`, checked, and what the drill has found so far."""

    script: Path
    args: tuple[str, ...]
    ranks: int
    kills: int
    seed: int
    timeout: float
    budget: float | None
    max_steps: int | None
    fail_fast: bool
    folder: Path
    keep: bool
    say: Callable[[str], None]
    number: int = 0

    def __post_init__(self) -> None:
        budget = float("inf") if self.budget is None else self.budget
        self.ends = time.monotonic() + budget - min(1.0, budget / 20)  # the rest is for the verdict
        self.limit: dict[str, Any] = {} if self.max_steps is None else {"steps": self.max_steps}
        """Arguments of `everstep.services.witness.DrillLimit`."""
        self.drawn_seed = Random(f"{self.seed}/seed of a run").getrandbits(31)
        """Seed of the runs that are given none."""

    def run(self, names: list[str]) -> DrillReport:
        """Run the program twice undisturbed, then try each hazard."""
        first, written = self._first()
        cut = None if (left := run_left_early(first)) is None else last_step(first, left)
        if cut is not None and not self._landmarks(first)[0].first_saved:
            # else no kill is followed by a resume from a later checkpoint than that of step 0
            self.limit["save_every"] = max(1, cut // SAVES)
        second = self.program("undisturbed-2")
        start = self._undisturbed(second)
        self._require_sound(second, start)
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
            budget=self.budget,
            outside=written,
        )
        report.nondeterminism = self._difference(second)
        self.say(report.header())
        for name in names:
            for turn in range(self.kills if name == "random instant" else 1):
                if report.nondeterminism is None:
                    self._try(name, turn)
        self._require_struck()
        self.say(f"\n{report.verdict()}")
        return report

    # ------------------------------------------------------------------------------ undisturbed

    def _first(self) -> tuple[Program, list[str]]:
        """Run the first program; list the files that it writes outside its run directories."""
        by_time = self.budget is not None and self.max_steps is None and self.ranks == 1
        if by_time:
            assert self.budget is not None
            self.limit = {"seconds": self.budget / PARTS}
        first = self.program("undisturbed-1")
        start = self._undisturbed(first)
        self._require_sound(first, start)
        if by_time:
            left = run_left_early(first)
            self.limit = {} if left is None else {"steps": last_step(first, left), "run": f"/{left}"}
        return first, outside(start.wrote, self.folder)

    def _landmarks(self, program: Program) -> list[Landmarks]:
        """Return the landmarks of each rank of an undisturbed start."""
        start = program.starts[0]
        traces = [Path(str(_trace(program)).replace("{rank}", str(rank))) for rank in range(program.ranks)]
        return [
            Landmarks(start.of_rank(rank), trace.read_text().split()) for rank, trace in enumerate(traces)
        ]

    def _undisturbed(self, program: Program) -> ProgramStart:
        try:
            return self._start(program, trace=_trace(program))
        except DrillError:
            if self._left() > 0:
                raise
            raise DrillError(
                f"the budget of {self.budget:g} s ended before two undisturbed runs were complete; give "
                "more, or let each run be shorter by --max-steps"
            ) from None

    def program(self, name: str) -> Program:
        """Make a program, with the limits and the seed that all programs of this drill have."""
        line = command(self.script, self.args, self.ranks)
        limit = {LIMIT: json.dumps(self.limit)} if self.limit else {}
        env = {SEED: str(self.drawn_seed), **limit}
        return Program(line, self.folder / name, self.timeout, self.ranks, env=env)

    def _start(
        self, program: Program, strike: Strike | None = None, trace: Path | None = None
    ) -> ProgramStart:
        """Start a program, for as long as the budget lasts."""
        program.timeout = max(0.0, min(self.timeout, self._left()))
        return program.start(strike, trace)

    def _left(self) -> float:
        """Seconds of the budget that are left."""
        return self.ends - time.monotonic()

    def _require_sound(self, program: Program, start: ProgramStart) -> None:
        """Refuse a script that cannot be drilled."""
        script, ranks = self.script, self.ranks
        if start.status:
            raise DrillError(
                f"{script} ended with status {start.status} although nobody struck it; make it run "
                f"before it is drilled:\n{start.tail}"
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

    def _difference(self, program: Program) -> DrillDivergence | None:
        return first_divergence(self.undisturbed, program)

    # ------------------------------------------------------------------------------ the hazards

    def _try(self, hazard: str, turn: int) -> None:
        """Try a hazard, unless the budget is used up or the drill ends at the first failure."""
        report = self.report
        if not aim(hazard, self.landmarks, Random(0)):
            tried = Ordeal(hazard, "no such place")
        elif self.fail_fast and any(one.verdict in ("differs", "failed") for one in report.ordeals):
            tried = Ordeal(hazard, "not reached", message="the drill ended at the first failure")
        elif self._left() < report.seconds:
            tried = self._out_of_budget(hazard)
        else:
            tried = self._ordeal(hazard, turn)
        report.ordeals.append(tried)
        if tried.verdict != "not reached":
            self.say(tried.line)

    def _out_of_budget(self, hazard: str) -> Ordeal:
        return Ordeal(hazard, "not reached", message=f"the budget of {self.budget:g} s was used up")

    def _require_struck(self) -> None:
        """Refuse to say anything of a script where the budget ended before anything was struck."""
        report = self.report
        verdicts = {one.verdict for one in report.ordeals}
        if "not reached" in verdicts and verdicts <= {"not reached", "no such place"}:
            raise DrillError(
                f"the budget of {self.budget:g} s ended before anything was struck: an undisturbed run "
                f"takes {report.seconds:.1f} s, and a struck one at least that; give more, or let each run "
                "be shorter by --max-steps"
            )

    def _ordeal(self, hazard: str, turn: int) -> Ordeal:
        """Strike a program and start it again until it ends; take another program if no strike hit."""
        draw = Random(f"{self.seed}/{hazard}/{turn}")
        for _ in range(ATTEMPTS):
            try:
                found = self._attempt(hazard, aim(hazard, self.landmarks, draw))
            except DrillError:
                if self._left() > 0:
                    raise
                return self._out_of_budget(hazard)
            if found.verdict != "not hit":
                break
        return found

    def _attempt(self, hazard: str, strikes: list[Strike]) -> Ordeal:
        self.number += 1
        program = self.program(f"{self.number:02d}-{hazard.replace(' ', '-')}")
        hit = 0
        for strike in strikes:
            if not self._start(program, strike).status:
                break
            hit += 1
        while program.starts[-1].status and len(program.starts) < hit + LAST_STARTS:
            self._start(program)
        judged = self._judged(hazard, hit, program)
        if not self.keep:
            shutil.rmtree(program.folder, ignore_errors=True)
        return judged

    def _judged(self, hazard: str, hit: int, program: Program) -> Ordeal:
        last = program.starts[-1]
        divergence = None if last.status else self._difference(program)
        if divergence is not None:
            self._exclude_chance()
        verdict: Verdict = "failed" if last.status else "differs" if divergence else "exact"
        again = executed_again(program.starts, self.place)
        self.report.steps_again |= set(again)
        return Ordeal(
            hazard,
            "not hit" if verdict == "exact" and not hit else verdict,
            struck=struck_at(program.starts[:hit]),
            again=again.total(),
            timeline=draw_timeline(program.starts, self.place),
            starts=summaries(program),
            divergence=divergence,
            message=f"status {last.status}\n{last.tail}" if last.status else "",
            windows=[window(start, hazard, where(start)) for start in program.starts[:hit]],
        )

    def _exclude_chance(self) -> None:
        """Run once more undisturbed before the state is blamed for what may be chance."""
        report = self.report
        if report.undisturbed > 2 or self._left() < report.seconds:
            return
        third = self.program("undisturbed-3")
        try:
            ended = self._undisturbed(third)
        except DrillError:  # without the answer, what was found stands
            return
        if ended.status:
            return
        report.undisturbed += 1
        if (first := self._difference(third)) is not None:
            report.nondeterminism = replace(first, note=CHANCE)


def _trace(program: Program) -> Path:
    return program.folder / ("trace" if program.ranks == 1 else "trace-{rank}")


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
