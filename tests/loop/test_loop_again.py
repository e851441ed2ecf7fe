"""What runs again after a resume: the lines at an epoch's head, and an epoch's last step for its tail."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every
from everstep.errors import Interrupted
from everstep.proof.compare import compare_runs
from gate import share


class Killed(Exception):
    """Stands for a kill: nothing is saved after it."""


def tail_of_loop_variables(
    run: Path, at: tuple[str, int] | None, strike: Callable[[], None], data: Any
) -> None:
    """A script as many are written: the tail uses what the step loop assigned."""
    state = {"w": np.zeros(3)}
    services = [everstep.Checkpoints(Every(steps=2) | Every(epochs=1))]
    with everstep.TrainLoop(run, state, max_epoch=3, services=services, seed=1) as loop:
        for epoch in loop.iter_epochs():
            for step, (x,) in loop.iter_steps(data):
                loss = float(((state["w"] - x) ** 2).sum())
                state["w"] *= 0.9
                state["w"] += 0.1 * x.mean(0) + 0.01 * np.random.rand(3)
                if at == ("step", step):
                    strike()
            loop.collect_metrics(last_loss=loss, last_step=step)
            if at == ("tail", epoch):
                strike()
            loop.collect_metrics(after=loss)


def kill() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("strike", [kill, terminate])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 6])
@pytest.mark.parametrize("place", ["step", "tail"])
def test_names_of_the_step_loop_exist_in_the_tail(
    tmp_path: Path, strike: Callable[[], None], batch_size: int, place: str
) -> None:
    data = everstep.data.arrays(np.arange(18.0).reshape(6, 3), batch_size=batch_size, shuffle=True)
    np.random.seed(3)
    tail_of_loop_variables(tmp_path / "straight", None, kill, data)
    last = 3 if place == "tail" else 3 * 6 // batch_size
    for at in share(range(1, last + 1), 3):
        np.random.seed(3)
        run = tmp_path / f"{at}"
        with pytest.raises((Killed, Interrupted)):
            tail_of_loop_variables(run, (place, at), strike, data)
        tail_of_loop_variables(run, None, kill, data)
        assert compare_runs(tmp_path / "straight", run) == [], at


def test_a_limit_inside_a_pass_knows_its_last_step_too(tmp_path: Path) -> None:
    data = everstep.data.arrays(np.arange(18.0).reshape(6, 3), batch_size=1)

    def train(run: Path, max_step: int, strike: bool = False) -> list[int]:
        seen = []
        with everstep.TrainLoop(run, {"w": np.zeros(3)}, max_step=max_step, seed=1) as loop:
            for _ in loop.iter_epochs():
                for step, _batch in loop.iter_steps(data):
                    seen.append(step)
                if strike:
                    terminate()
                loop.collect_metrics(last=step)
        return seen

    train(tmp_path / "straight", 4)
    with pytest.raises(Interrupted):
        train(tmp_path / "run", 4, strike=True)
    assert train(tmp_path / "run", 4) == [4]
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []


def program_with_a_head(run: Path, stop_at: int | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = list(range(6))
    state = {"model": model, "optimizer": optimizer, "order": order}
    services = [everstep.Checkpoints(Every(steps=1))]
    with everstep.TrainLoop(run, state, max_epoch=3, services=services, seed=1) as loop:
        for _ in loop.iter_epochs():
            for group in optimizer.param_groups:  # everything here is done again by a resume ...
                group["lr"] *= 0.9
            with torch.no_grad():
                model.weight += 0.1 * torch.randn(1, 3)
            order.append(order.pop(0))
            optimizer.zero_grad()
            for step, (x,) in loop.iter_steps(
                everstep.data.arrays(np.ones((6, 3), np.float32), batch_size=2)
            ):
                model(torch.from_numpy(x)).sum().backward()
                if step % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if step == stop_at:
                    raise Killed


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("stop_at", range(1, 10))
def test_what_the_head_of_an_epoch_does_to_the_state_is_not_done_twice(tmp_path: Path, stop_at: int) -> None:
    program_with_a_head(tmp_path / "straight", None)
    with pytest.raises(Killed):
        program_with_a_head(tmp_path / "run", stop_at)
    program_with_a_head(tmp_path / "run", None)
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []


class Endless:
    """Data that keeps its position and does not know its length."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < 4:
            self.place += 1
            yield self.place
        self.place = 0

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


def test_where_the_last_step_cannot_be_known_the_error_says_what_happened(tmp_path: Path) -> None:
    def train(strike: bool) -> None:
        saves = everstep.Checkpoints(Every(steps=4))
        with everstep.TrainLoop(tmp_path / "run", {"w": [1]}, max_epoch=2, services=[saves]) as loop:
            for _ in loop.iter_epochs():
                for _step, batch in loop.iter_steps(Endless()):
                    last = batch
                if strike:
                    raise Killed
                loop.collect_metrics(last=last)

    with pytest.raises(Killed):
        train(strike=True)
    with pytest.raises(NameError) as caught:
        train(strike=False)
    assert "a value before the loop" in caught.value.__notes__[0]


def measured(run: Path, *, save: bool, values: tuple[float, ...]) -> everstep.TrainLoop:
    best = everstep.Best("valid_loss", save=save)
    with everstep.TrainLoop(run, {"w": np.zeros(2)}, max_epoch=len(values), services=[best]) as loop:
        for epoch in loop.iter_epochs():
            for _ in loop.iter_steps([1, 2]):
                pass
            loop.collect_metrics(valid_loss=values[epoch - 1])
    return loop


def test_the_best_names_no_weights_that_are_not_its_own(tmp_path: Path) -> None:
    loop = measured(tmp_path / "run", save=True, values=(3.0, 2.0))
    assert loop.best is not None and loop.best.path is not None and loop.best.path.endswith("step-00000004")
    loop = measured(tmp_path / "run", save=False, values=(3.0, 2.0, 1.0))
    assert loop.best is not None and (loop.best.value, loop.best.path) == (1.0, None)


def test_weights_that_were_trained_on_since_the_measurement_are_not_kept_as_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with everstep.TrainLoop(tmp_path / "run", {"w": np.zeros(2)}, max_epoch=1, watch="valid_loss") as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1, 2]):
                pass
            loop.collect_metrics(valid_loss=1.0)
            for _ in loop.iter_steps([1, 2], "more"):
                pass
    assert loop.best is not None and (loop.best.value, loop.best.path) == (1.0, None)
    assert "measured at step 2 and its weights were trained on until step 4" in capsys.readouterr().out


def program_with_lines_before(run: Path, stop_at: int | None, generators: dict[str, Any]) -> list[list[int]]:
    """Lines between `with` and the loops that change the state and draw from its generators."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    numpy, python, torch_ = (generators[name] for name in ("numpy", "python", "torch"))
    seen: list[list[int]] = []
    state = {"model": model, "generators": generators, "order": [0, 1, 2]}
    services = [everstep.Checkpoints(Every(steps=2) | Every(epochs=1))]
    with everstep.TrainLoop(run, state, max_epoch=3, services=services, seed=1) as loop:
        torch.nn.init.normal_(model.weight, generator=torch_)
        python.shuffle(state["order"])
        offset = int(numpy.integers(100))
        for _ in loop.iter_epochs():
            permutation = torch.randperm(6, generator=torch_)
            scale = float(numpy.random()) + python.random()
            for step, batch in loop.iter_steps([permutation[i : i + 2] for i in range(0, 6, 2)]):
                with torch.no_grad():
                    model.weight += scale * torch.rand(1, 3, generator=torch_) + offset
                seen.append([step, *batch.tolist(), *state["order"]])
                if step == stop_at:
                    raise Killed
            loop.collect_metrics(weight=float(model.weight.detach().sum()), offset=offset)
    return seen


def fresh_generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(3),
        "numpy": np.random.default_rng(3),
        "python": random.Random(3),
    }


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("stop_at", range(1, 10))
def test_lines_before_the_resume_point_draw_and_change_as_the_first_time(
    tmp_path: Path, stop_at: int
) -> None:
    straight = program_with_lines_before(tmp_path / "straight", None, fresh_generators())
    with pytest.raises(Killed):
        program_with_lines_before(tmp_path / "run", stop_at, fresh_generators())
    resumed = program_with_lines_before(tmp_path / "run", None, fresh_generators())
    assert resumed and resumed == straight[-len(resumed) :]
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []


@pytest.mark.parametrize("stop_at", [3, 4])
def test_lines_before_a_supervisors_loop(tmp_path: Path, stop_at: int) -> None:
    def train(run: Path, stop_at: int | None) -> float:
        state = {"w": np.zeros(2), "generator": np.random.default_rng(5)}
        services = [everstep.Checkpoints(Every(steps=2))]
        with everstep.Supervisor(run, state, max_step=8, services=services, seed=1) as sv:
            state["w"] += state["generator"].random(2)
            batches = sv.stream([1.0, 2.0, 3.0])
            while not sv.should_stop():
                state["w"] *= next(batches) + state["generator"].random()
                if sv.step + 1 == stop_at:
                    raise Killed
                sv.advance(w=float(state["w"].sum()))
        return float(state["w"].sum())

    straight = train(tmp_path / "straight", None)
    with pytest.raises(Killed):
        train(tmp_path / "run", stop_at)
    assert train(tmp_path / "run", None) == straight
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("place", ["tail", "between"])
@pytest.mark.parametrize("second", [1, 2])
def test_two_step_loops_the_second_of_few_steps(tmp_path: Path, second: int, place: str) -> None:
    first_data = everstep.data.arrays(np.arange(6.0), batch_size=2)
    second_data = everstep.data.arrays(np.arange(second + 0.0), batch_size=1)

    def train(run: Path, stop_at: int | None = None) -> None:
        w, b = np.zeros(1), 0.0
        services = [everstep.Checkpoints(Every(steps=1))]
        with everstep.TrainLoop(run, {"w": w}, max_epoch=3, services=services, seed=1) as loop:
            for epoch in loop.iter_epochs():
                for _, (a,) in loop.iter_steps(first_data):
                    w += a.sum()
                loop.print_logs()
                if stop_at == epoch and place == "between":
                    raise Killed
                for _, (b,) in loop.iter_steps(second_data, "second"):
                    w *= 1 + b.sum()
                    loop.collect_metrics(inside=w[0])
                if stop_at == epoch and place == "tail":
                    raise Killed
                loop.collect_metrics(last=b.sum())

    train(tmp_path / "straight")
    for stop_at in (1, 2, 3):
        run = tmp_path / f"{stop_at}"
        with pytest.raises(Killed):
            train(run, stop_at)
        train(run)
        assert compare_runs(tmp_path / "straight", run) == [], stop_at


def test_a_variable_of_a_step_loop_that_a_resume_skips_is_explained(tmp_path: Path) -> None:
    def train(stop_at: int | None = None) -> None:
        with everstep.TrainLoop(
            tmp_path, {"w": [0]}, max_epoch=1, services=[everstep.Checkpoints(Every(steps=1))]
        ) as loop:
            for _ in loop.iter_epochs():
                for _, batch in loop.iter_steps([1, 2]):
                    first = batch
                for step, _ in loop.iter_steps([1, 2, 3], "second"):
                    if step == stop_at:
                        raise Killed
                loop.collect_metrics(first=first)

    with pytest.raises(Killed):
        train(5)
    with pytest.raises(NameError) as caught:
        train()
    assert "resumed after step 4" in caught.value.__notes__[0]


@pytest.mark.parametrize("stop_at", range(2, 12, 3))
def test_lines_printed_at_the_head_are_not_printed_again(tmp_path: Path, stop_at: int) -> None:
    def train(run: Path, strike: int | None) -> list[str]:
        lines: list[str] = []
        services = [everstep.Checkpoints(Every(steps=1)), everstep.Console(sink=lines.append)]
        data = everstep.data.arrays(np.arange(6.0), batch_size=1)
        with everstep.TrainLoop(run, {"w": [0]}, max_epoch=2, services=services, show_eta=False) as loop:
            for epoch in loop.iter_epochs():
                loop.collect_metrics(head=float(epoch))
                loop.print_logs()
                for step, (x,) in loop.iter_steps(data):
                    loop.collect_metrics(loss=x[0])
                    if step == strike:
                        raise Killed
                loop.print_logs()
        return [line.split("epoch time")[0].split("; step_time")[0] for line in lines if "loss: " in line]

    straight = train(tmp_path / "straight", None)
    with pytest.raises(Killed):
        train(tmp_path / "run", stop_at)
    resumed = train(tmp_path / "run", None)
    assert resumed and [_untimed(line) for line in resumed] == [
        _untimed(s) for s in straight[-len(resumed) :]
    ]


def _untimed(line: str) -> str:
    return line.partition("loss: ")[2].split(" ")[0]
