"""The strikes: what happens to the program, when, and how each is judged."""

from __future__ import annotations

import math
import random
import resource
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verdicts
from starts import Program, Running, Start, Strike, files

from faults import DAMAGES, LEAST, LIMIT, damage, small_disk

MID_EPOCH, IN_SAVE, TERM, INT = "killed in mid-epoch", "killed in a save", "SIGTERM", "Ctrl-C"
FULL, CHAIN = "full disk", "three kills in a row"
KINDS = (MID_EPOCH, IN_SAVE, CHAIN, TERM, INT, FULL, *DAMAGES)

TRIES = 5
"""How often a strike is repeated that came after the program's end."""
LATE = 0.005
"""Most seconds between the line of a step and a kill in mid-epoch, so that kills strike all over a step."""
SHORTEST_SAVE = 0.005
"""Least seconds within which a kill in a save comes after the first change of a file."""


class CannotBeJudged(Exception):
    """Undisturbed, the program does not repeat itself, or does not follow the protocol."""


@dataclass
class Struck:
    """A strike, and what became of the run.

    Attributes:
        kind: one of `KINDS`.
        index: its number among those of the kind; with the seed it repeats the strike.
        plan: what was done to the run.
        outcome: one of `verdicts.MEANING`.
        struck_after: the last step of the (last) start that was struck.
        struck_status: exit status of that start; negative: the signal.
        resumed_after: the step after which the last start went on.
        steps_again: steps that it executed again.
        difference: the first difference.
        used_too_often, used_too_seldom: samples, over the whole training.
        words: last line of output where a start ended with an error.
        then: outcome of the next start, where the outcome is that of the struck one.
    """

    kind: str
    index: int
    plan: str
    outcome: str
    struck_after: int = 0
    struck_status: int | None = None
    resumed_after: int | None = None
    steps_again: int = 0
    difference: verdicts.Difference | None = None
    used_too_often: int = 0
    used_too_seldom: int = 0
    words: str = ""
    then: str = ""


@dataclass
class Campaign:
    """Strikes on one program.

    Args:
        program: the command and its place.
        save_every: steps between two checkpoints.
        epoch: steps of an epoch.
        seed: from which all strikes are drawn.
    """

    program: Program
    save_every: int
    epoch: int
    seed: int
    undisturbed: Start = field(default_factory=Start)
    save_seconds: float = SHORTEST_SAVE
    run_bytes: int = 0
    largest: int = 0
    disk: str = ""

    # -------------------------------------------------------------------------- the undisturbed runs

    def look_at_it_undisturbed(self) -> None:
        """Run it twice; both must be equal.

        Raises:
            CannotBeJudged: they are not, or the program does not follow the protocol.
        """
        place = self.program.place
        first = self.program.start(place / "undisturbed-1")
        if first.status != 0 or first.end is None or not first.steps:
            told = f"{len(first.steps)} steps and {'an' if first.end is not None else 'no'} end"
            raise CannotBeJudged(f"undisturbed, it ended with status {first.status}, {told}: {first.error}")
        if [step.number for step in first.steps] != [*range(1, len(first.steps) + 1)]:
            raise CannotBeJudged("undisturbed, its steps are not numbered 1, 2, 3 ...")
        if len(first.steps) < 5 * self.save_every:
            raise CannotBeJudged(
                f"it has {len(first.steps)} steps; it needs five times --save-every, or more"
            )
        self.undisturbed = first
        watch = _SaveWatch(place / "undisturbed-2", self.save_every)
        second = self.program.start(place / "undisturbed-2", watch)
        if found := verdicts.first_difference(first, [second]):
            where = "at the end" if found.step is None else f"at step {found.step}"
            raise CannotBeJudged(
                f"two undisturbed runs differ in {found.what} {where}: {found.was}, {found.now}"
            )
        self.save_seconds = max(SHORTEST_SAVE, watch.seconds())
        sizes = [size for size, _ in files(place / "undisturbed-2").values()]
        self.run_bytes, self.largest = sum(sizes), max(sizes, default=0)
        for name in ("undisturbed-1", "undisturbed-2"):
            shutil.rmtree(place / name)
        # ten times as long as undisturbed is hung
        self.program.limit = min(self.program.limit, 30 + 10 * max(first.seconds, second.seconds))

    # -------------------------------------------------------------------------------- the strikes

    def strikes(self, kills: int, only: Sequence[str] = ()) -> Iterator[Struck]:
        """Strike `kills` times in mid-epoch, half as often in saves, and a fifth as often in each other way.

        Args:
            kills: how often.
            only: kinds, or strikes as "KIND:INDEX", that alone are wanted; () for all.
        """
        fifth = max(1, kills // 5)
        counts = {MID_EPOCH: kills, IN_SAVE: math.ceil(kills / 2)} | dict.fromkeys(
            (CHAIN, TERM, INT, FULL), fifth
        )
        ways: dict[str, Callable[[int], Struck]] = {
            MID_EPOCH: self._mid_epoch,
            IN_SAVE: self._in_save,
            CHAIN: self._chain,
            TERM: lambda index: self._signalled(TERM, signal.SIGTERM, index),
            INT: lambda index: self._signalled(INT, signal.SIGINT, index),
            FULL: self._full,
        }
        for kind, count in counts.items():
            for index in range(count):
                if not only or {kind, f"{kind}:{index}"} & {*only}:
                    yield ways[kind](index)
        for index in range(fifth):
            wanted = [kind for kind in DAMAGES if not only or {kind, f"{kind}:{index}"} & {*only}]
            if wanted:
                yield from self._damaged(index, wanted)

    @property
    def _steps(self) -> int:
        return len(self.undisturbed.steps)

    def _random(self, kind: str, index: int) -> random.Random:
        return random.Random(f"{self.seed} {kind} {index}")

    def _step(self, rng: random.Random, last: int) -> int:
        """Draw a step inside an epoch, whose newest checkpoint is no epoch's end, if there are such."""
        first = 2 * self.save_every + 1
        inside = [step for step in range(first, last) if step % self.epoch]
        strict = [step for step in inside if step // self.save_every * self.save_every % self.epoch]
        return rng.choice(strict or inside)

    def _mid_epoch(self, index: int) -> Struck:
        rng = self._random(MID_EPOCH, index)
        for _ in range(TRIES):
            step, late = self._step(rng, self._steps - 2), rng.uniform(0, LATE)
            run = self._run()
            start = self.program.start(run, _killing(step, late))
            if self._was_killed_inside(start):
                return self._resumed(MID_EPOCH, index, f"SIGKILL after step {step}", run, [start])
        return Struck(MID_EPOCH, index, "SIGKILL", verdicts.MISSED)

    def _in_save(self, index: int) -> Struck:
        rng = self._random(IN_SAVE, index)
        for _ in range(TRIES):
            save = rng.randint(2, (self._steps - 1) // self.save_every) * self.save_every
            late = rng.uniform(0, self.save_seconds)
            run = self._run()
            start = self.program.start(run, _killing_save(run, save, late))
            if start.status == -signal.SIGKILL:
                plan = (
                    f"SIGKILL {late * 1000:.1f} ms after the first change of a file from step {save - 1} on"
                )
                return self._resumed(IN_SAVE, index, plan, run, [start])
        return Struck(IN_SAVE, index, "SIGKILL", verdicts.MISSED)

    def _chain(self, index: int) -> Struck:
        rng = self._random(CHAIN, index)
        room = max(self._steps - 3 * self.save_every, 2 * self.save_every + 2)
        for _ in range(TRIES):
            run, starts = self._run(), list[Start]()
            plan = [self._step(rng, room), *(rng.randint(1, self.save_every) for _ in range(2))]
            for steps in plan:
                starts.append(self.program.start(run, _killing(steps, 0.0)))
                if not self._was_killed_inside(starts[-1]):
                    break  # it went on to its end; or a resume crashed, and the next one shows that, too
            last = starts[-1]
            if self._was_killed_inside(last) or self._went_wrong(last):
                told = ", ".join(map(str, plan[: len(starts)]))
                return self._resumed(CHAIN, index, f"SIGKILL after {told} steps of a start", run, starts)
        return Struck(CHAIN, index, "SIGKILL", verdicts.MISSED)

    def _signalled(self, kind: str, number: int, index: int) -> Struck:
        rng = self._random(kind, index)
        for _ in range(TRIES):
            step = self._step(rng, self._steps - 2)
            run = self._run()
            told: list[int] = []
            start = self.program.start(run, _signalling(step, number, told))
            if told:
                found = self._resumed(kind, index, f"{kind} after step {step}", run, [start])
                return self._left(found, start)
        return Struck(kind, index, kind, verdicts.MISSED)

    def _full(self, index: int) -> Struck:
        rng = self._random(FULL, index)
        for number in range(TRIES):
            step = self._step(rng, self._steps - 2 * self.save_every)
            found = self._filled(self.program.place / f"disk-{index}-{number}", index, step)
            if found is not None:
                return found
        return Struck(FULL, index, "a full disk", verdicts.MISSED)

    def _filled(self, place: Path, index: int, step: int) -> Struck | None:
        """Fill a disk from a step on, and judge; None if the program was over before that."""
        room, limit = 4 * self.run_bytes + 16 * 2**20, max(LEAST, 2 * self.undisturbed.trace_bytes)
        with small_disk(place, room, limit) as disk:
            self.disk = disk.how
            plan = f"{disk.how}, full from step {step} on; room again for the next start"
            if disk.how == LIMIT and not (hasattr(resource, "prlimit") and self.largest > limit):
                plan = f"no tmpfs can be mounted, and no file of the run is limited: none has {limit} bytes"
                return Struck(FULL, index, plan, verdicts.NOT_DONE)

            filled: list[int] = []

            def fill(running: Running) -> None:
                if running.wait_for(step):
                    # so that the disk is full at this step, however busy the machine
                    running.send(signal.SIGSTOP)
                    if not running.is_over and running.look() < self._steps:
                        disk.fill(running)
                        filled.append(step)
                    running.send(signal.SIGCONT)

            run = disk.folder / "run"
            start = self.program.start(run, fill)
            disk.free()
            if not filled:
                return None
            return self._left(self._resumed(FULL, index, plan, run, [start]), start)

    def _damaged(self, index: int, kinds: list[str]) -> Iterator[Struck]:
        rng = self._random("damages", index)
        for _ in range(TRIES):
            run = self._run()
            start = self.program.start(run, _killing(self._step(rng, self._steps - 2), 0.0))
            if self._was_killed_inside(start):
                break
        else:
            yield from (Struck(kind, index, "SIGKILL, then damage", verdicts.MISSED) for kind in kinds)
            return
        kept = self.program.place / "kept"
        shutil.copytree(run, kept, symlinks=True)
        alone = self.program.start(run)
        if not any(size for size, _ in files(kept).values()):
            shutil.rmtree(kept)
            yield from (
                Struck(kind, index, "the run has no file to damage", verdicts.NOT_DONE) for kind in kinds
            )
            return
        for kind in kinds:
            shutil.rmtree(run)
            shutil.copytree(kept, run, symlinks=True)
            path, plan = damage(run, kind, self._random(kind, index))
            yield self._resumed(kind, index, plan, run, [start], damaged=path.name, alone=alone)
        shutil.rmtree(kept)
        shutil.rmtree(run)

    # -------------------------------------------------------------------------------- judgement

    def _was_killed_inside(self, start: Start) -> bool:
        """Whether a start was killed before its last step: after it, nothing is left to resume."""
        reached = start.steps[-1].number if start.steps else 0
        return start.status == -signal.SIGKILL and reached < self._steps

    def _went_wrong(self, start: Start) -> bool:
        """Whether a start ended by itself, otherwise than at the end of the training."""
        ended = start.status != -signal.SIGKILL
        return ended and not verdicts.came_to_its_end(self.undisturbed, start)

    def _run(self) -> Path:
        path = self.program.place / "run"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def _resumed(
        self,
        kind: str,
        index: int,
        plan: str,
        run: Path,
        starts: list[Start],
        *,
        damaged: str = "",
        alone: Start | None = None,
    ) -> Struck:
        """Start it once more, undisturbed, and judge."""
        if verdicts.came_to_its_end(self.undisturbed, starts[-1]):  # nobody starts it again
            plan += "; it went on to its end"
            done = starts
        else:
            done = [*starts, self.program.start(run)]
        last = done[-1]
        outcome, difference = verdicts.outcome(self.undisturbed, done, self.save_every, damaged, alone)
        reached = max((step.number for start in starts for step in start.steps), default=0)
        often, seldom = (0, 0) if last.end is None else verdicts.miscounted(self.undisturbed, done)
        if alone is None:
            shutil.rmtree(run, ignore_errors=True)
        return Struck(
            kind,
            index,
            plan,
            outcome,
            struck_after=reached,
            struck_status=starts[-1].status,
            resumed_after=None if done is starts else last.resumed_after,
            steps_again=0 if done is starts or not last.steps else max(0, reached + 1 - last.steps[0].number),
            difference=difference,
            used_too_often=often,
            used_too_seldom=seldom,
            words="" if last.status == 0 else last.error[:300],
        )

    def _left(self, found: Struck, struck: Start) -> Struck:
        """Put the outcome of a start that was struck before that of the next."""
        if struck.status is None:
            found.outcome, found.then = verdicts.HUNG, found.outcome
        elif verdicts.is_left_unfinished(self.undisturbed, struck):
            found.outcome, found.then = verdicts.UNFINISHED, found.outcome
        if struck.status is not None and struck.status > 0 and not found.words:
            found.words = struck.error[:300]
        return found


def _killing(steps: int, late: float) -> Strike:
    def strike(running: Running) -> None:
        if running.wait_for(steps):
            time.sleep(late)
            running.send(signal.SIGKILL)

    return strike


def _signalling(steps: int, number: int, told: list[int]) -> Strike:
    def strike(running: Running) -> None:
        if running.wait_for(steps) and not running.is_over:
            running.send(number)
            told.append(number)

    return strike


def _killing_save(run: Path, save: int, late: float) -> Strike:
    def strike(running: Running) -> None:
        if running.wait_for(save - 1):
            before = files(run)
            if running.wait_until(lambda: files(run) != before):
                time.sleep(late)
                running.send(signal.SIGKILL)

    return strike


class _SaveWatch:
    """Measures how long saves change files, over an undisturbed run."""

    def __init__(self, run: Path, save_every: int) -> None:
        self._run, self._every = run, save_every
        self._changes: dict[int, list[float]] = {}

    def __call__(self, running: Running) -> None:
        before: Any = None
        while not running.is_over:
            done, now = running.look(), files(self._run)
            if before is not None and now != before:
                # a save may come just before the line of its step, or be written while later steps run
                self._changes.setdefault((done + 1) // self._every, []).append(time.monotonic())
            before = now
            time.sleep(0.001)

    def seconds(self) -> float:
        found = [times[-1] - times[0] for number, times in self._changes.items() if number]
        return statistics.median(found) if found else 0.0
