"""Kill a training script from outside, start it again, until it ends: is it the run that was never killed?

A campaign is a series of chains.  A chain is one run: started, killed, started again ..., and compared at
its end with the undisturbed run of the same scenario.  What a chain does is drawn from (seed, scenario,
chain number) alone, so that one kill can be aimed again (the machine's timing is its own).
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from everstep.checkpoint import CheckpointName
from everstep.proof.compare import compare_runs
from law_support import diary
from law_support.forkserver import ForkServer, Victim

CLASSES = ("start-up", "body", "commit", "tail", "shutdown")
STEPS_ON = 20
"""Most steps that a start makes before a kill that is aimed at the body of an epoch."""
_CLASS_OF = {"opening": "start-up", "over": "shutdown"}


@dataclass(frozen=True)
class Scenario:
    """A victim and its options; `cold`: each start is a fresh interpreter, else most are forked."""

    name: str
    arguments: tuple[str, ...] = ()
    script: str = "victim"
    cold: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """Where it can be killed: a Supervisor's loop has no tail."""
        return tuple(name for name in CLASSES if name != "tail" or self.door != "Supervisor")

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
    scenario.name: scenario
    for scenario in (
        Scenario("arrays, early stop", ("--patience", "1", "--epochs", "8")),
        Scenario("loader", ("--data", "loader")),
        Scenario("loader, 2 workers", ("--data", "loader", "--workers", "2")),
        Scenario("accumulation", ("--accumulate", "3", "--every", "4", "--data", "loader")),
        Scenario("plain DataLoader", ("--data", "plain", "--evaluate", "bare")),
        Scenario("plain DataLoader, 2 workers", ("--data", "plain", "--workers", "2")),
        Scenario("plain DataLoader, own generator", ("--data", "plain", "--generator")),
        Scenario("data with its own state", ("--data", "own")),
        Scenario("StatefulDataLoader", ("--data", "stateful")),
        Scenario(
            "prefetch, bare evaluation", ("--data", "prefetch", "--evaluate", "bare", "--patience", "9")
        ),
        Scenario("Supervisor", ("--door", "supervisor", "--data", "loader", "--accumulate", "2")),
        Scenario("Supervisor, plain DataLoader", ("--door", "supervisor", "--data", "plain")),
        Scenario("Trainer, loader", ("--door", "trainer", "--data", "loader", "--patience", "2")),
        Scenario(
            "Trainer, every service",
            ("--door", "trainer", "--data", "loader", "--patience", "9", "--bad", "7", "--everything"),
        ),
        Scenario("Supervisor, NumPy", script="victim_numpy", cold=True),
    )
}


class Aim(NamedTuple):
    """When to kill: `fraction` of the undisturbed wall time, or within a phase, its `nth` time."""

    phase: str | None
    fraction: float
    nth: int = 1


class Kill(NamedTuple):
    """One kill: where it was aimed and where it struck; it counts after a scheduled checkpoint."""

    chain: int
    aim: Aim
    struck: str
    step: int
    counted: bool


@dataclass
class Timing:
    """Seconds of the undisturbed run: all of it, and each phase once."""

    total: float
    phase: dict[str, float]

    @classmethod
    def of(cls, entries: list[diary.Entry], began: float) -> Timing:
        phases: dict[str, list[float]] = {"start-up": [_first(entries, "body") - began]}
        for entry, after in itertools.pairwise(entries):
            phases.setdefault(entry.phase, []).append(after.time - entry.time)
        means = {phase: sum(times) / len(times) for phase, times in phases.items() if phase != "opening"}
        return cls(entries[-1].time - began, {**means, "start-up": phases["start-up"][0]})

    def learn(self, entries: list[diary.Entry], began: float) -> None:
        """Keep the shortest times: while others use the machine, a start may take ten times as long."""
        first = next((entry for entry in entries if entry.phase == "body"), None)
        if first is None:
            return
        self.phase["start-up"] = min(self.phase["start-up"], first.time - began)
        if first.step == 1 and entries[-1].phase == "over":
            self.total = min(self.total, entries[-1].time - began)


def _first(entries: list[diary.Entry], phase: str) -> float:
    return next(entry.time for entry in entries if entry.phase == phase)


@dataclass
class Campaign:
    """The kills of one scenario.

    Attributes:
        folder: where runs, logs and diaries lie; a chain that was exact is deleted.
        phases: what the kills of a chain are aimed at, in order; None is any time.
        kills: all that struck, in order.
    """

    server: ForkServer
    scenario: Scenario
    folder: Path
    seed: int
    phases: tuple[str | None, ...] = (None, "start-up", "commit", "tail", None, "shutdown")
    kills: list[Kill] = field(default_factory=list)

    def prepare(self) -> None:
        """Run the undisturbed run, and time a warm one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("undisturbed", "timed"):
            victim, note, began = self._start(name, 1, cold=name == "undisturbed")
            assert victim.wait(120) == 0, self._log(name).read_text()
        entries = diary.read(note)
        self.timing = Timing.of(entries, began)
        self.steps = max(entry.step for entry in entries)

    def until(
        self,
        uniform: int,
        per_class: int,
        total: int = 0,
        *,
        body: int = 0,
        start_ups: int = 0,
        first: int = 1,
        chains: int = 40,
    ) -> None:
        """Run chains, from number `first` on, until so many kills count.

        Args:
            uniform: at uniformly random times.
            per_class: in each class.
            total: in all.
            body: in the body of an epoch.
            start_ups: one after another, in starts of one run.

        Raises:
            AssertionError: a run was not exact, or `chains` chains were not enough.
        """
        for number in range(first, first + chains):
            self.chain(number)
            struck = self.counts()
            enough = all(struck[name] >= per_class for name in self.scenario.classes)
            enough = enough and struck.total() >= total and struck["body"] >= body
            enough = enough and self.in_a_row("start-up") >= start_ups
            if enough and sum(kill.counted and kill.aim.phase is None for kill in self.kills) >= uniform:
                return
        raise AssertionError(f"{chains} chains did not strike often enough: {self.kills}")

    def counts(self) -> Counter[str]:
        """How many counted kills struck in each class."""
        return Counter(kill.struck for kill in self.kills if kill.counted)

    def report(self, tally: Callable[..., None], note: Callable[[str, object], None]) -> None:
        """Count the kills of the runs, which were exact, and note each for docs/reliability.svg."""
        for phase, n in self.counts().items():
            tally("kills", n, phase=phase, door=self.scenario.door, program=self.scenario.name)
        for _, kills in itertools.groupby(self.kills, lambda kill: kill.chain):
            struck = [[kill.step, kill.struck, kill.counted] for kill in kills]
            steps = {"steps": self.steps, "epoch": self.scenario.steps_per_epoch}
            note("run", {"program": self.scenario.name, **steps, "kills": struck, "ended": "exact"})

    def in_a_row(self, phase: str) -> int:
        """The most kills in one class that followed each other within one chain."""
        runs = itertools.groupby(self.kills, lambda kill: (kill.chain, kill.struck))
        return max((len(list(kills)) for (_, struck), kills in runs if struck == phase), default=0)

    def chain(self, number: int) -> None:
        """One run, killed at each aim it lives to see, then left to end; exact or AssertionError."""
        name = f"chain-{number}"
        aims = list(self.aims(number))
        for start, aim in enumerate(aims, 1):
            victim, note, began = self._start(name, start, cold=start == 2 and number % 4 == 1)
            if not self._wait_for(aim, victim, note, began, self.folder / name):
                break
            victim.kill()
            killed = victim.wait(120) == -signal.SIGKILL
            self.timing.learn(diary.read(note), began)
            if killed:
                struck = self._struck(name, note, victim.pid)
                self.kills.append(Kill(number, aim, struck, self._step(name, note), self._counts(name)))
        else:
            victim, note, began = self._start(name, len(aims) + 1)
        status = victim.wait(120)
        self.timing.learn(diary.read(note), began)
        self._require_exact(name, status)

    def aims(self, number: int) -> Iterator[Aim]:
        """Uniform in wall time, and in between aimed at the phases that are short."""
        draw = random.Random(f"{self.seed}/{self.scenario.name}/{number}")
        for phase in self.phases:
            if phase is None or phase in self.scenario.classes:
                yield Aim(phase, draw.random(), draw.randint(1, STEPS_ON if phase == "body" else 2))

    # ------------------------------------------------------------------------------ one kill

    def _start(self, name: str, start: int, cold: bool = False) -> tuple[Victim, Path, float]:
        cold = cold or self.scenario.cold
        note = self.folder / f"{name}.{start}.diary"
        arguments = [
            str(self.folder / name),
            "--diary",
            str(note),
            "--sleep",
            "0.004",
            *self.scenario.arguments,
        ]
        began = time.monotonic()
        return self.server.start(self.scenario.script, arguments, self._log(name), cold=cold), note, began

    def _wait_for(self, aim: Aim, victim: Victim, note: Path, began: float, run_dir: Path) -> bool:
        """Wait until the aim has come; False if the victim ended before."""
        if aim.phase is None:
            time.sleep(max(0.0, began + aim.fraction * self.timing.total - time.monotonic()))
        elif aim.phase == "start-up":
            time.sleep(aim.fraction * self.timing.phase["start-up"])
        else:
            while not self._in_phase(aim, note, run_dir, victim.pid):
                if victim.poll() is not None:
                    return False
                time.sleep(0.0005)
            time.sleep(aim.fraction * self.timing.phase.get(aim.phase, 0.001))
        return victim.poll() is None

    def _in_phase(self, aim: Aim, note: Path, run_dir: Path, pid: int) -> bool:
        if aim.phase == "commit":
            past = sum(entry.phase == "body" for entry in diary.read(note)) > 10 * aim.fraction
            return past and _committing(run_dir, pid)
        return sum(entry.phase == aim.phase for entry in diary.read(note)) >= aim.nth

    def _struck(self, name: str, note: Path, pid: int) -> str:
        if _committing(self.folder / name, pid):
            return "commit"
        phase = diary.phase_of(note)
        return _CLASS_OF.get(phase, phase)

    def _step(self, name: str, note: Path) -> int:
        """The last step that the start has begun, else the one from which it goes on."""
        return max((entry.step for entry in diary.read(note)), default=0) or self._committed(name)

    def _counts(self, name: str) -> bool:
        """Whether a scheduled checkpoint was committed by now."""
        return self._committed(name) > 0

    def _committed(self, name: str) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        folder = self.folder / name / "checkpoints"
        names = filter(CheckpointName.matches, os.listdir(folder) if folder.exists() else [])
        return max((CheckpointName.parse(each).step for each in names), default=0)

    # ------------------------------------------------------------------------------ the verdict

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _require_exact(self, name: str, status: int) -> None:
        log = self._log(name).read_text()
        different = compare_runs(self.folder / "undisturbed", self.folder / name) if status == 0 else []
        told = [line for line in log.splitlines() if "resume differs" in line or "warning:" in line]
        if status or different or told:
            what = "\n".join(map(str, (*different[:20], *told)))
            kills = "\n".join(str(kill) for kill in self.kills if f"chain-{kill.chain}" == name)
            raise AssertionError(
                f"{self.scenario.name!r}, seed {self.seed}, {name} in {self.folder}: status {status}, "
                f"{len(different)} differences\n{what}\n{kills}\n{log[-4000:]}"
            )
        shutil.rmtree(self.folder / name)


def _committing(run_dir: Path, pid: int) -> bool:
    """Whether process `pid` has begun to write a checkpoint, or best weights, and not ended."""
    return any(run_dir.glob(f"checkpoints/.tmp-*-{pid}")) or any(run_dir.glob(f"best/*/.tmp-*-{pid}"))
