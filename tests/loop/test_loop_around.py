"""What a TrainLoop does around the steps: signals, timers, evaluations, saves that coincide, printing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every
from everstep.checkpoint import read_checkpoint
from everstep.contracts.services import Boundary, Moment, Service
from everstep.errors import Interrupted
from everstep.testing import ManualClock, nothing_left
from tiny_runs import Boom, Tiny, events, rows

# ------------------------------------------------------------------------------------------ signals


def send_at(at: int, number: int) -> Any:
    return lambda loop, count: os.kill(os.getpid(), number) if count == at else None


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 4, 6, 12])
def test_a_signal_in_a_step_loses_no_step(tmp_path: Path, number: int, at: int) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=3).train()
    tiny = Tiny(tmp_path / "run", max_epoch=3)
    with nothing_left(), pytest.raises(Interrupted) as raised:
        tiny.train(inside=send_at(at, number))
    assert raised.value.code == 128 + number
    assert tiny.loop.step == at
    again = Tiny(tmp_path / "run", max_epoch=3).train()
    ends_epoch = at % 4 == 0  # then it runs again, and the tail that follows it
    assert [step for _, step, _ in again.seen] == list(range(at if ends_epoch else at + 1, 13))
    assert again.result() == straight.result()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_signal_in_the_tail_runs_the_tail_again(tmp_path: Path, at: int) -> None:
    tails: list[int] = []

    def tail(loop: Any, epoch: int) -> None:
        tails.append(epoch)
        if tails.count(epoch) == 1 and epoch == at:
            os.kill(os.getpid(), signal.SIGTERM)
        loop.collect_metrics(valid_loss=1.0 / epoch)
        with loop.evaluation():
            np.random.rand()
        loop.print_logs()

    def clean(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=1.0 / epoch)
        loop.print_logs()

    straight = Tiny(tmp_path / "straight", max_epoch=3).train(tail=clean)
    tiny = Tiny(tmp_path / "run", max_epoch=3)
    with pytest.raises(Interrupted, match="SIGTERM"):
        tiny.train(tail=tail)
    again = Tiny(tmp_path / "run", max_epoch=3).train(tail=tail)
    assert tails == sorted([1, 2, 3, at])
    assert again.seen == straight.seen[4 * at - 1 :]
    assert again.result() == straight.result()


def test_a_time_budget_is_noticed_without_any_service_due(tmp_path: Path) -> None:
    """The ticker thread wakes a loop in which nothing else would."""
    loop = everstep.TrainLoop(
        tmp_path / "run",
        max_time=0.05,
        max_step=1 << 40,
        services=[everstep.Console(sink=lambda line: None)],
    )

    def train() -> None:
        with loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps():
                    pass

    with nothing_left(), pytest.raises(Interrupted, match=r"0\.05 s is used up") as raised:
        train()
    assert raised.value.code == 3 and loop.step > 0


class Ticks(Service):
    """Notes the steps at which it ran, and who else lives then."""

    def __init__(self, every: everstep.schedule.Schedule) -> None:
        super().__init__("ticks", every)
        self.ran: list[int] = []
        self.threads: set[str] = set()

    def run(self, boundary: Boundary) -> None:
        self.ran.append(boundary.step)
        self.threads |= {thread.name for thread in threading.enumerate()}


def silent() -> everstep.Console:
    return everstep.Console(sink=lambda line: None)


def supervised(run_dir: Path, clock: Any, ticks: Ticks) -> None:
    with everstep.Supervisor(run_dir, services=[ticks, silent()], clock=clock, max_step=10) as sv:
        sv.stream(None)
        while not sv.should_stop():
            clock.advance(4)
            sv.advance()


def looped(run_dir: Path, clock: Any, ticks: Ticks) -> None:
    tiny = Tiny(run_dir, samples=20, max_epoch=1, clock=clock, services=[ticks])
    tiny.train(inside=lambda loop, step: clock.advance(4))


@pytest.mark.parametrize("door", [supervised, looped])
def test_a_clock_of_ones_own_drives_schedules_in_seconds_by_itself(tmp_path: Path, door: Any) -> None:
    """At the very step at which its time has come: no thread looks at it, and no other service is due."""
    ticks = Ticks(everstep.Every(seconds=10))
    door(tmp_path / "run", ManualClock(), ticks)
    assert ticks.ran[:3] == [3, 6, 9]
    assert "everstep-ticker" not in ticks.threads


def test_a_clock_of_ones_own_that_stands_still_makes_nothing_due(tmp_path: Path) -> None:
    ticks = Ticks(everstep.Every(seconds=10))
    tiny = Tiny(tmp_path / "run", samples=40, max_epoch=1, clock=ManualClock(), services=[ticks])
    tiny.train()
    assert not ticks.ran


# ------------------------------------------------------------------------------------------- timers


def test_waiting_stepping_and_evaluating_sum_to_the_epoch(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow:
        def __iter__(self) -> Any:
            for i in range(4):
                clock.advance(0.5)
                yield i

    lines: list[str] = []
    services = [everstep.Console(sink=lines.append)]
    with everstep.TrainLoop(tmp_path / "run", max_epoch=2, clock=clock, services=services) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps(Slow()):
                clock.advance(2.0)
            with loop.evaluation(), loop.timeit("valid_time"):
                clock.advance(3.0)
            loop.print_logs()
    times = events(tmp_path / "run", "times")
    assert [(t["epoch"], t["steps"], t["seconds"], t["data_wait"]) for t in times] == [
        (1, [1, 4], 13.0, 2.0),
        (2, [5, 8], 13.0, 2.0),
    ]
    assert [line.count("epoch time: 13s; step time: 2s (±0s); valid time: 3s") for line in lines] == [1, 1, 0]


def test_rows_of_timers_are_no_part_of_equality(tmp_path: Path) -> None:
    def tail(loop: Any, epoch: int) -> None:
        with loop.timeit("valid_time"):
            pass

    Tiny(tmp_path / "run", max_epoch=1).train(tail=tail)
    assert {r[3] for r in rows(tmp_path / "run")} == {"loss"}


# -------------------------------------------------------------------------------------- evaluations


class Dropout:
    """A torch program with dropout and a shuffling DataLoader."""

    def __init__(self, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.loader = torch.utils.data.DataLoader(
            torch.arange(24.0).reshape(8, 3),  # type: ignore[arg-type]
            batch_size=2,
            shuffle=True,
        )
        self.loop = everstep.TrainLoop(
            run_dir,
            {"model": self.model, "optimizer": self.optimizer},
            max_epoch=2,
            services=[everstep.Console(sink=lambda line: None)],
        )

    def evaluate(self) -> None:
        with self.loop.evaluation(), torch.no_grad():
            assert not self.model.training
            for batch in self.loader:  # the training data itself
                self.loop.collect_metrics(valid_loss=self.model(batch).mean() + torch.rand(()))
                np.random.rand()

    def train(self, each_step: bool = False, each_epoch: bool = False) -> list[bytes]:
        seen = []
        with self.loop as loop:
            for _ in loop.iter_epochs():
                for _, batch in loop.iter_steps(self.loader):
                    loss = self.model(batch).square().mean()
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    seen.append(batch.numpy().tobytes())
                    if each_step:
                        self.evaluate()
                    assert self.model.training
                if each_epoch:
                    self.evaluate()
        return seen + [p.detach().numpy().tobytes() for p in self.model.parameters()]


def test_evaluating_each_step_on_the_training_data_changes_no_bit(tmp_path: Path) -> None:
    straight = Dropout(tmp_path / "straight").train()
    assert Dropout(tmp_path / "tail").train(each_epoch=True) == straight
    assert Dropout(tmp_path / "steps").train(each_step=True, each_epoch=True) == straight


def test_an_evaluation_that_raises_leaves_modes_and_random_state_as_they_were(tmp_path: Path) -> None:
    program = Dropout(tmp_path / "run")
    program.model[2].eval()

    def evaluate() -> None:
        with program.loop.evaluation():
            torch.rand(()), np.random.rand()
            raise Boom

    with program.loop as loop:
        for _ in loop.iter_epochs():
            before = torch.get_rng_state(), np.random.get_state(legacy=False)
            with pytest.raises(Boom):
                evaluate()
            assert torch.equal(torch.get_rng_state(), before[0])
            assert np.random.get_state(legacy=False)["state"]["pos"] == before[1]["state"]["pos"]  # type: ignore[index]
            assert program.model.training and not program.model[2].training
            break


def test_an_evaluation_that_raises_inside_another_takes_nothing_from_it(tmp_path: Path) -> None:
    found: list[Any] = []

    def raising(loop: Any) -> None:
        with loop.evaluation():
            loop.collect_metrics(inner=2.0)
            raise Boom

    def tail(loop: Any, epoch: int) -> None:
        with loop.evaluation():
            loop.collect_metrics(before=1.0)
            with pytest.raises(Boom):
                raising(loop)
            loop.collect_metrics(after=3.0)

    tiny = Tiny(tmp_path / "run", max_epoch=1)
    tiny.loop.on(Moment.AFTER_EVALUATION, lambda boundary: found.append(boundary.payload))
    tiny.train(tail=tail)
    assert found == [{"before": 1.0, "after": 3.0}]


# ------------------------------------------------------------------------------------ saves, printing


def test_triggers_that_coincide_make_one_file(tmp_path: Path) -> None:
    saves = everstep.Checkpoints(Every(steps=2) | Every(steps=3) | everstep.At(6), keep_last=None)
    tiny = Tiny(tmp_path / "run", max_epoch=2, max_step=6, services=[saves])
    tiny.train(inside=lambda loop, step: loop.make_checkpoint() if step in (3, 6) else None)
    saved = [event["name"] for event in events(tmp_path / "run", "checkpoint")]
    assert saved == [
        "epoch-0000-step-00000000",
        "step-00000002",
        "step-00000003",
        "epoch-0001-step-00000004",
        "epoch-0002-step-00000006",  # what stands in for it, step-00000005, is nobody's
    ]


def test_without_a_console_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with everstep.TrainLoop(tmp_path / "run", max_epoch=1, default_services=False, show_eta=False) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1.0]):
                loop.collect_metrics(loss=0.5)
                loop.println("hello", with_tag=True)
            loop.print_logs()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[Step 1] hello"
    assert out[1].startswith("[Step 1] loss: 0.5; epoch time: ")
    assert out[2] == "ended: max_epoch 1 is reached (step 1, finished)"


def test_the_log_file_has_every_line(tmp_path: Path) -> None:
    Tiny(tmp_path / "run", max_epoch=2).train(tail=lambda loop, epoch: loop.println(f"epoch {epoch} is over"))
    Tiny(tmp_path / "run", max_epoch=3).train(tail=lambda loop, epoch: loop.println(f"epoch {epoch} is over"))
    text = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert [f"epoch {epoch} is over" in text for epoch in (1, 2, 3)] == [True] * 3
    assert text.count("ended: max_epoch") == 2


def test_the_weights_in_a_checkpoint_are_those_of_its_step(tmp_path: Path) -> None:
    """The copy is taken at the boundary; what the steps after it change does not leak in."""
    weights: dict[int, bytes] = {}
    saves = everstep.Checkpoints(Every(steps=1), keep_last=None)
    tiny = Tiny(tmp_path / "run", max_epoch=3, services=[saves])
    tiny.train(inside=lambda loop, step: weights.update({step: tiny.w.tobytes()}))
    for step in range(1, 13):
        name = f"step-{step:08d}" if step % 4 else f"epoch-{step // 4:04d}-step-{step:08d}"
        saved = read_checkpoint(tmp_path / "run" / "checkpoints" / name)
        assert saved.arrays["user/w"].data.tobytes() == weights[step]
