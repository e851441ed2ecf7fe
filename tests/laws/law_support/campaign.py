"""Kill a training script from outside, start it again, until it ends: is it the run that was never killed?

A campaign is a series of chains.  A chain is one run: started, killed, started again ..., and compared at
its end with the undisturbed run of the same scenario.  What a chain does is drawn from (seed, scenario,
chain number) alone, so that one kill can be aimed again (the machine's timing is its own).
"""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from everstep.checkpoint import CheckpointName
from everstep.proof.compare import compare_runs
from law_support import diary
from law_support.forkserver import ForkServer, Victim

AIMS = (
    "any", "start-up", "start-up", "commit", "any", "start-up", "any", "commit", "any", "tail", "shutdown",
)  # fmt: skip
"""What the kills of a chain are aimed at; "any" is one of its next lines in the diary."""
STEP = 0.006
"""Seconds of a step, most of them slept; other short phases take about as long."""
_CLASS_OF = {"opening": "start-up", "over": "shutdown"}


@dataclass(frozen=True)
class Scenario:
    """A victim and its options; `cold`: each start is a fresh interpreter, else most are forked."""

    name: str
    arguments: tuple[str, ...] = ()
    script: str = "victim"
    cold: bool = False

    @property
    def door(self) -> str:
        """The class through which it trains."""
        of = {"supervisor": "Supervisor", "trainer": "Trainer"}
        named = [of[word] for word in self.arguments if word in of]
        return "Supervisor" if self.script == "victim_numpy" else (*named, "TrainLoop")[0]

    @property
    def steps_per_epoch(self) -> int:
        """Batches of 8: of 128 samples, or of 96 in the program that has NumPy alone."""
        return 12 if self.script == "victim_numpy" else 16


SCENARIOS = {
    scenario.name: scenario for scenario in (
        Scenario("arrays, early stop", ("--patience", "1", "--epochs", "8")),
        Scenario("loader", ("--data", "loader")),
        Scenario("loader, 2 workers", ("--data", "loader", "--workers", "2")),
        Scenario("accumulation", ("--accumulate", "3", "--every", "4", "--data", "loader")),
        Scenario("plain DataLoader", ("--data", "plain", "--evaluate", "bare")),
        Scenario("plain DataLoader, 2 workers", ("--data", "plain", "--workers", "2")),
        Scenario("plain DataLoader, own generator", ("--data", "plain", "--generator")),
        Scenario("data with its own state", ("--data", "own")),
        Scenario("StatefulDataLoader", ("--data", "stateful")),
        Scenario("prefetch, bare evaluation",
                 ("--data", "prefetch", "--evaluate", "bare", "--patience", "9")),
        Scenario("Supervisor", ("--door", "supervisor", "--data", "loader", "--accumulate", "2")),
        Scenario("Supervisor, plain DataLoader", ("--door", "supervisor", "--data", "plain")),
        Scenario("Trainer, loader", ("--door", "trainer", "--data", "loader", "--patience", "2")),
        Scenario("Trainer, every service",
                 ("--door", "trainer", "--data", "loader", "--patience", "9", "--bad", "7", "--everything")),
        Scenario("Supervisor, NumPy", script="victim_numpy", cold=True),
    )
}  # fmt: skip


class Kill(NamedTuple):
    """One kill: in which phase it struck, and at which step; it counts after a scheduled checkpoint."""

    chain: int
    struck: str
    step: int
    counted: bool


@dataclass
class Campaign:
    """The kills of one scenario."""

    server: ForkServer
    scenario: Scenario
    folder: Path  # where runs, logs and diaries lie; a chain that was exact is deleted
    seed: int
    kills: list[Kill] = field(default_factory=list)  # all that struck, in order

    def prepare(self) -> None:
        """Run the undisturbed run, and time a start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        victim, note = self._start("undisturbed", 1, cold=True)
        assert victim.wait(120) == 0, self._log("undisturbed").read_text()
        self.lines = len(diary.read(note))
        self.steps = max(entry.step for entry in diary.read(note))
        self.start_up = math.inf
        began = time.monotonic()
        victim, note = self._start("timed", 1)
        assert victim.wait(120) == 0, self._log("timed").read_text()
        self._learn(note, began)

    def _learn(self, note: Path, began: float) -> None:
        """Keep the shortest start-up: while others use the machine, one may take ten times as long."""
        bodies = (entry.time for entry in diary.read(note) if entry.phase == "body")
        self.start_up = min(self.start_up, next(bodies, math.inf) - began)

    def counts(self) -> Counter[str]:
        """How many counted kills struck in each phase."""
        return Counter(kill.struck for kill in self.kills if kill.counted)

    def report(self, tally: Callable[..., None], note: Callable[[str, object], None]) -> None:
        """Count the kills of the runs, which were exact, and note each for docs/reliability.svg."""
        for phase, n in self.counts().items():
            tally("kills", n, phase=phase, door=self.scenario.door, program=self.scenario.name)
        for _, kills in itertools.groupby(self.kills, lambda kill: kill.chain):
            struck = [[kill.step, kill.struck, kill.counted] for kill in kills]
            steps = {"steps": self.steps, "epoch": self.scenario.steps_per_epoch}
            note("run", {"program": self.scenario.name, **steps, "kills": struck, "ended": "exact"})

    def chain(self, number: int) -> None:
        """One run, killed at each aim that it lives to see, then left to end; exact or AssertionError."""
        name, draw = f"chain-{number}", random.Random(f"{self.seed}/{self.scenario.name}/{number}")
        for start, aim in enumerate(AIMS, 1):
            began = time.monotonic()
            victim, note = self._start(name, start, cold=start == 2 and number % 4 == 1)
            line, fraction = draw.randint(1, 1 + self.lines // 5), draw.random()
            if not self._wait_for(aim, line, fraction, victim, note, self.folder / name):
                break
            victim.kill()
            killed = victim.wait(120) == -signal.SIGKILL
            self._learn(note, began)
            if killed:
                committed = self._committed(name)
                step = max((entry.step for entry in diary.read(note)), default=0) or committed
                self.kills.append(Kill(number, self._struck(name, note, victim.pid), step, committed > 0))
        else:
            victim, note = self._start(name, len(AIMS) + 1)
        self._require_exact(name, victim.wait(120))

    def _start(self, name: str, start: int, cold: bool = False) -> tuple[Victim, Path]:
        note = self.folder / f"{name}.{start}.diary"
        arguments = [str(self.folder / name), "--diary", str(note), "--sleep", "0.004"]
        arguments += self.scenario.arguments
        cold = cold or self.scenario.cold
        return self.server.start(self.scenario.script, arguments, self._log(name), cold=cold), note

    def _wait_for(self, aim: str, line: int, fraction: float, victim: Any, note: Path, run_dir: Path) -> bool:
        """Wait until the aim has come; False if the victim ended before."""

        def has_come() -> bool:
            entries = diary.read(note)
            if aim == "commit":
                past = sum(entry.phase == "body" for entry in entries) > 10 * fraction
                return past and _committing(run_dir, victim.pid)
            return len(entries) >= line if aim == "any" else any(entry.phase == aim for entry in entries)

        if aim == "start-up":
            time.sleep(fraction * self.start_up)
        else:
            while not has_come():
                if victim.poll() is not None:
                    return False
                time.sleep(0.0005)
            time.sleep(fraction * STEP * (aim != "commit"))
        return victim.poll() is None

    def _struck(self, name: str, note: Path, pid: int) -> str:
        if _committing(self.folder / name, pid):
            return "commit"
        phase = diary.phase_of(note)
        return _CLASS_OF.get(phase, phase)

    def _committed(self, name: str) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        folder = self.folder / name / "checkpoints"
        names = filter(CheckpointName.matches, os.listdir(folder) if folder.exists() else [])
        return max((CheckpointName.parse(each).step for each in names), default=0)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _require_exact(self, name: str, status: int) -> None:
        log = self._log(name).read_text()
        different = compare_runs(self.folder / "undisturbed", self.folder / name) if status == 0 else []
        told = [line for line in log.splitlines() if "resume differs" in line or "warning:" in line]
        what = "\n".join(map(str, (*different[:20], *told)))
        kills = "\n".join(str(kill) for kill in self.kills if f"chain-{kill.chain}" == name)
        where = f"{self.scenario.name!r}, seed {self.seed}, {name} in {self.folder}: status {status}"
        differences = f"{len(different)} differences\n{what}\n{kills}\n{log[-4000:]}"
        assert not (status or different or told), f"{where}, {differences}"
        shutil.rmtree(self.folder / name)


def _committing(run_dir: Path, pid: int) -> bool:
    """Whether process `pid` has begun to write a checkpoint, or best weights, and not ended."""
    return any(run_dir.glob(f"checkpoints/.tmp-*-{pid}")) or any(run_dir.glob(f"best/*/.tmp-*-{pid}"))
