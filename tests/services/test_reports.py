"""Services that tell: `LogVariables`, `FinalValues`, `Throughput`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crashing import check_crashes, collecting

import everstep
from everstep import Every
from everstep.record import RunJournal
from everstep.services import FinalValues, LogVariables, Throughput
from everstep.testing import ManualClock
from tiny_runs import Boom, Tiny, boom_at, rows


def printed(tiny: Tiny, word: str) -> list[str]:
    return [line for line in tiny.lines if word in line]


# ------------------------------------------------------------------------------ LogVariables


def test_it_prints_what_was_asked_for_on_its_own_schedule(tmp_path: Path) -> None:
    services = [LogVariables(["valid_*"]), LogVariables(["mine"], every=Every(steps=2), name="mine")]
    tiny = Tiny(tmp_path / "run", max_epoch=2, services=services, show_eta=False)

    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=0.5 / epoch, valid_accuracy=0.75)
        loop.print_logs()

    tiny.train(lambda loop, step: loop.collect_metrics(mine=step), tail)
    assert printed(tiny, "] valid loss") == [
        "[Epoch 1/2, Step 4] valid loss: 0.5; valid accuracy: 0.75",
        "[Epoch 2/2, Step 8] valid loss: 0.25; valid accuracy: 0.75",
    ]
    assert printed(tiny, "] mine") == [
        "[Epoch 1/2, Step 2] mine: 1.5 (±0.5)",
        "[Epoch 1/2, Step 4] mine: 3.5 (±0.5)",
        "[Epoch 2/2, Step 6] mine: 5.5 (±0.5)",
        "[Epoch 2/2, Step 8] mine: 7.5 (±0.5)",
    ]


def test_what_is_left_at_the_end_and_the_window_over_a_resume(tmp_path: Path) -> None:
    def program() -> Tiny:
        return Tiny(tmp_path / "run", max_epoch=1, services=[LogVariables(["mine"], every=Every(steps=3))])

    def inside(loop: Any, step: int) -> None:
        loop.collect_metrics(mine=step)
        if step == 2:
            loop.make_checkpoint()

    def crashing(loop: Any, step: int) -> None:
        inside(loop, step)
        boom_at(3)(loop, step)

    with pytest.raises(Boom):
        program().train(crashing)
    tiny = program().train(inside)
    assert tiny.loop.ending.resumed_from == "step-00000002"
    assert [line.partition("] ")[2] for line in printed(tiny, "] mine")] == ["mine: 2 (±0.816497)", "mine: 4"]


# ------------------------------------------------------------------------------- FinalValues


def test_values_computed_at_the_end_are_in_the_record(tmp_path: Path) -> None:
    final = FinalValues(lambda: {"norm": float(tiny.w @ tiny.w)})
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=[final])
    tiny.train()
    assert final.values == {"norm": float(tiny.w @ tiny.w)}
    assert [row for row in rows(tmp_path / "run") if row[3] == "norm"] == [
        (1, 4, "eval/final values", "norm", 0, final.values["norm"].hex(), 1)
    ]


def test_they_come_at_a_clean_end_only_and_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, float]:
        calls.append(1)
        return {"calls": 1.0}

    with pytest.raises(Boom):
        Tiny(tmp_path / "run", max_epoch=1, services=[FinalValues(compute)]).train(boom_at(2))
    assert calls == []
    Tiny(tmp_path / "run", max_epoch=1, services=[FinalValues(compute)]).train()
    assert calls == [1]


def test_a_function_that_fails_costs_the_training_nothing(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=[FinalValues(lambda: {"a": 1 / 0})]).train()
    assert tiny.loop.ending.finished
    assert "ZeroDivisionError" in tiny.loop.ending.warnings[0]


# -------------------------------------------------------------------------------- Throughput


class Slow:
    """Four batches, each of which takes a second."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[int]:
        for number in range(4):
            self.clock.advance(1.0)
            yield number


def test_speed_and_shares_in_a_train_loop(tmp_path: Path) -> None:
    clock = ManualClock()

    def service(boundary: everstep.Boundary) -> None:
        clock.advance(0.5)

    speed = Throughput(32, every=Every(epochs=1))
    lines: list[str] = []
    console = everstep.Console(sink=lines.append)
    loop = everstep.TrainLoop(tmp_path / "run", max_epoch=2, services=[speed, console], clock=clock)
    loop.on(everstep.Moment.AFTER_STEP, service, every=2)
    with loop:
        for _ in loop.iter_epochs():
            for _step, _batch in loop.iter_steps(Slow(clock)):
                clock.advance(2.0)
            with loop.evaluation():
                clock.advance(7.0)
    found = {row.name: row for row in RunJournal(tmp_path / "run").rows() if row.epoch == 2}
    assert all(row.wall for row in found.values())
    assert {name: row.value for name, row in found.items()} == {
        "steps_per_second": 4 / 20,
        "samples_per_second": 32 * 4 / 20,
        "data_share": 4 / 20,
        "step_share": 8 / 20,
        "evaluation_share": 7 / 20,
        "services_share": 1 / 20,
    }


def test_speed_and_shares_in_a_supervisor(tmp_path: Path) -> None:
    clock = ManualClock()
    speed = Throughput(every=Every(steps=5))
    with everstep.Supervisor(tmp_path / "run", services=[speed], max_step=10, clock=clock) as sv:
        batches = sv.stream(everstep.data.replay(Slow(clock)))
        while not sv.should_stop():
            next(batches)
            clock.advance(3.0)
            sv.advance()
    found = {row.name: row.value for row in RunJournal(tmp_path / "run").rows()}
    assert found["steps_per_second"] == 0.25
    assert found["data_share"] == 0.25
    assert found["step_share"] == 0.75


# ----------------------------------------------------------------------------------- the laws


@pytest.mark.campaign("long", gate="share")
def test_they_change_nothing_after_any_crash(tmp_path: Path) -> None:
    def services() -> list[everstep.Service]:
        return [LogVariables(), FinalValues(lambda: {"one": 1.0}), Throughput(2, every=Every(steps=2))]

    check_crashes(tmp_path, services, collecting("valid_loss", [1.0]), max_epoch=2)
