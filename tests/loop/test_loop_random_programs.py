"""Programs drawn by chance, interrupted and limited by chance, end as if nothing had happened.

Each seed draws a program (streams, breaks, epochs of fixed size, evaluations, prints, early stop, its
limits) and a history for it: crashes and signals anywhere, other save cadences, lower limits first.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import everstep
from everstep import At, Every, Never
from everstep.errors import Interrupted
from everstep.record import RunJournal
from tiny_runs import Boom, Tiny

CADENCES = [
    None,
    Every(steps=1),
    Every(steps=2),
    Every(steps=3),
    Never(),
    At(2, 7),
    Every(steps=2) | Every(epochs=1),
]


class Program(NamedTuple):
    samples: int
    second: int  # samples of a second stream, 0 for none
    steps_per_epoch: int | None
    leaves: int  # break at steps that are multiples of it, 0 for never
    saves: int  # make_checkpoint at multiples
    prints: int  # print_logs at multiples, and after each epoch
    requests: int | None  # request_stop at this step
    evaluates: bool
    noise: bool  # the tail changes the state and draws random numbers
    patience: int  # of an early stop, 0 for none
    best: bool
    keep_last: int | None

    @classmethod
    def draw(cls, r: random.Random) -> Program:
        return cls(
            samples=r.choice([4, 5, 8]),
            second=r.choice([0, 0, 4, 5]),
            steps_per_epoch=r.choice([None, None, 2, 3, 5]),
            leaves=r.choice([0, 0, 3, 4]),
            saves=r.choice([0, 2, 3]),
            prints=r.choice([0, 2, 3]),
            requests=r.choice([None, None, None, r.randint(1, 14)]),
            evaluates=r.random() < 0.7,
            noise=r.random() < 0.5,
            patience=r.choice([0, 0, 2, 3]),
            best=r.random() < 0.4,
            keep_last=r.choice([None, 1, 2, 3]),
        )

    def start(self, run_dir: Path, limits: dict[str, int], cadence: Any, crash: Crash | None) -> Tiny:
        """Run it once; raises at `crash`."""
        services: list[Any] = [everstep.Checkpoints(cadence, keep_last=self.keep_last)]
        if self.patience:
            services.append(everstep.EarlyStop("valid_loss", patience=self.patience))
        if self.best:
            services.append(everstep.Best("valid_loss"))
        tiny = Tiny(
            run_dir, samples=self.samples, services=services, steps_per_epoch=self.steps_per_epoch, **limits
        )
        streams = [(tiny.data, "train")]
        if self.second:
            streams.append(
                (everstep.data.arrays(np.arange(self.second), batch_size=2, shuffle=True), "second")
            )
        with tiny.loop as loop:
            for epoch in loop.iter_epochs():
                happens(crash, "head", epoch)
                loop.collect_metrics(lr=1.0 / epoch)
                for data, name in streams:
                    for step, (ids,) in loop.iter_steps(data, name):
                        tiny.update(ids)
                        happens(crash, "step", step)
                        self.in_step(loop, step)
                        if self.leaves and step % self.leaves == 0:
                            break
                    loop.collect_metrics(between=float(tiny.w.sum()))
                if self.evaluates:
                    with loop.evaluation():
                        loop.collect_metrics(
                            valid_loss=float(np.cos(loop.step) + 2 + 1e-9 * np.random.rand())
                        )
                happens(crash, "tail", epoch)
                if self.prints:
                    loop.print_logs()
                if self.noise:
                    tiny.w += 0.01 * np.random.standard_normal(3)
                happens(crash, "end", epoch)
        return tiny

    def in_step(self, loop: everstep.TrainLoop, step: int) -> None:
        if self.saves and step % self.saves == 0:
            loop.make_checkpoint()
        if self.prints and step % self.prints == 0:
            loop.print_logs()
        if step == self.requests:
            loop.request_stop("requested")


class Crash(NamedTuple):
    where: str
    number: int
    by_signal: bool


def happens(crash: Crash | None, where: str, number: int) -> None:
    if crash is not None and crash[:2] == (where, number):
        if not crash.by_signal:
            raise Boom
        os.kill(os.getpid(), signal.SIGTERM)


def draw_limits(r: random.Random) -> dict[str, int]:
    limits = {
        name: r.randint(1, high) for name, high in (("max_epoch", 5), ("max_step", 16)) if r.random() < 0.6
    }
    return limits or {"max_epoch": 3}


def draw_crash(r: random.Random, straight: Tiny) -> Crash | None:
    where = r.choice(["step", "step", "step", "head", "tail", "end", None])
    if where is None:
        return None
    return Crash(
        where,
        r.randint(1, max(straight.loop.step if where == "step" else straight.loop.epoch, 1)),
        r.random() < 0.5,
    )


def check(seed: int, folder: Path) -> int:
    """Run a history that the seed draws, and the straight run; return how often it was stopped or crashed."""
    r = random.Random(seed)
    program, limits = Program.draw(r), draw_limits(r)
    straight = program.start(folder / "straight", limits, r.choice(CADENCES), None)
    lower_first = (
        r.random() < 0.3 and program.requests is None and not program.patience and not program.leaves
    )
    ended_early = 0
    for start in range(9):
        now = dict(limits)
        if lower_first and start < 3:
            now = {name: r.randint(1, value) for name, value in limits.items()}
        crash = draw_crash(r, straight) if start < 8 else None
        try:
            tiny = program.start(folder / "run", now, r.choice(CADENCES), crash)
        except (Boom, Interrupted):
            ended_early += 1
            continue
        if now == limits:
            break
    assert tiny.result() == straight.result()
    assert tiny.loop.ending.reason == straight.loop.ending.reason
    assert tiny.loop.best_valid_metric == straight.loop.best_valid_metric
    keys = [
        (x.epoch, x.step, x.phase, x.name, x.seq) for x in RunJournal(folder / "run").rows() if not x.wall
    ]
    assert len(keys) == len(set(keys))
    assert not any("differs" in line for line in tiny.lines)
    return ended_early


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("seed", range(24))
def test_a_random_history_ends_as_the_straight_run(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path)


@pytest.mark.campaign("long")
@pytest.mark.parametrize("seed", range(24, 1024))
def test_many_random_histories_end_as_the_straight_run(tmp_path: Path, seed: int, tally: Any) -> None:
    tally("crashes in process", check(seed, tmp_path), door="TrainLoop")
