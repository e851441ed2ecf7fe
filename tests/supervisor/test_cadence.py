"""`Auto`: the time between saves follows from what they cost, and is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep import Auto, Every
from everstep.errors import ConfigError
from everstep.experiment.calls import schedule
from everstep.supervisor.saving.writing import Writing
from everstep.testing import ManualClock
from tiny_runs import events


class Slow:
    """Weights that take some seconds of a clock to copy."""

    def __init__(self, clock: ManualClock, wait: float) -> None:
        self.w, self._clock, self._wait = np.zeros(3), clock, wait

    def state_dict(self) -> dict[str, Any]:
        self._clock.advance(self._wait)
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = state["w"]


def train(run: Path, every: Any, wait: float = 0.0, steps: int = 400, step: float = 1.0) -> list[int]:
    """Steps of `step` seconds each; returns the steps of the checkpoints."""
    clock = ManualClock()
    saves = everstep.Checkpoints(every, keep_last=None)
    with everstep.Supervisor(
        run, {"slow": Slow(clock, wait)}, max_step=steps, services=[saves], seed=1, clock=clock
    ) as sv:
        while not sv.should_stop():
            clock.advance(step)
            sv.advance()
            sv._engine.saver._writer.wait_idle()  # which takes no time of this clock
    return [int(event["name"].rpartition("-")[2]) for event in events(run, "checkpoint")]


def test_what_a_save_costs_decides_when_the_next_one_comes(tmp_path: Path) -> None:
    found = train(tmp_path / "run", "auto", wait=0.5)
    costs = events(tmp_path / "run", "cadence")
    assert [each["wait"] for each in costs[:3]] == [0.5, 0.5, 0.5]
    assert costs[-1]["seconds"] == 0.5 / 0.02 and set(np.diff(found)[-5:-1]) == {25}, (found, costs)
    # all saves together took their share of the time
    assert sum(each["wait"] for each in costs) < 0.025 * 400
    assert "saves: one each 25 s; the newest cost 0.5 s" in (tmp_path / "run/logs/run.log").read_text()


def test_what_may_be_lost_counts_the_step_that_a_save_waits_for(tmp_path: Path) -> None:
    found = train(tmp_path / "run", Auto(share=0.001, lose_at_most=30), wait=0.5, steps=8, step=20.0)
    assert found == list(range(9)), "every 30 s would lose two steps"


def test_after_a_save_that_has_failed_the_next_one_comes_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writing.write
    failed: list[int] = []

    def once(self: Writing, snapshot: Any, *rest: Any) -> Any:
        if snapshot.name.step > 100 and not failed:
            failed.append(snapshot.name.step)
            raise OSError(5, "Input/output error")
        return write(self, snapshot, *rest)

    monkeypatch.setattr(Writing, "write", once)
    found = train(tmp_path / "run", Auto(share=0.01), wait=0.5, steps=250)
    after = next(step for step in found if step > failed[0])
    assert failed[0] - max(step for step in found if step < failed[0]) >= 50 and after - failed[0] <= 12


def test_beside_another_schedule(tmp_path: Path) -> None:
    found = train(tmp_path / "run", Auto() | Every(steps=17), steps=50)
    assert found == [0, 10, 17, 27, 34, 44, 50], "ten seconds after each save, whoever asked for it"


def test_the_middle_of_the_newest_costs_counts() -> None:
    auto = Auto(share=0.1)
    assert [auto.learn(cost, 0.0, 0.0) for cost in (30.0, 2.0, 40.0, 2.0)] == [300.0, 20.0, 300.0, 20.0]
    assert auto.learn(2.0, 50.0, 0.0) == 50.0, "the next save would wait for this one"
    assert Auto(lose_at_most=60).learn(9.0, 50.0, 1.0) == 50.0
    assert Auto(lose_at_most=60).learn(9.0, 20.0, 0.0) == 40.0, "what is being written is not safe"
    assert Auto(lose_at_most=60).learn(9.0, 20.0, 15.0) == 25.0, "a save comes at the end of a step"
    assert Auto(lose_at_most=5).next_time() == 5.0


def test_by_name_in_a_config() -> None:
    assert schedule("auto") == Auto() != Auto(share=0.01)
    assert schedule({"auto": {"lose_at_most": 60}}) == Auto(lose_at_most=60)
    for wrong in ({"auto": 3}, {"auto": None}, {"auto": {}, "steps": 3}, "Auto"):
        with pytest.raises(ConfigError, match=r"is not a schedule; give .*auto, {auto: {share: 0.02"):
            schedule(wrong)
