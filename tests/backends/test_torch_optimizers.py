"""Optimizers around optimizers: what they do to gradients, in every door, over crashes."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import everstep
from everstep.backends.torch.optimizers import layers
from everstep.errors import ConfigError, RestoreError, StateError
from everstep.proof.compare import compare_runs
from everstep.torch import Clip, ClipOptimizer, MinibatchOptimizer
from tiny_runs import Boom, boom_at, quiet, rows, supervised

X = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(dim=1)


def net() -> torch.nn.Linear:
    torch.manual_seed(5)
    return torch.nn.Linear(4, 3)


def sgd(model: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def step(model: Any, optimizer: Any, x: Any, y: Any, *, weighted: bool = False, times: float = 1.0) -> None:
    """As any program does it."""
    loss = times * cross_entropy(model(x), y)
    optimizer.zero_grad()
    (optimizer.weighted(loss, len(x)) if weighted else loss).backward()
    optimizer.step()


def test_unequal_minibatches_count_by_their_elements_also_in_a_short_window() -> None:
    small, large = net(), net()
    optimizer = MinibatchOptimizer(sgd(small), 3)
    losses = []
    for ends in ((0, 7), (7, 9), (9, 10), (10, 15), (15, 22)):
        step(small, optimizer, X[slice(*ends)], Y[slice(*ends)], weighted=True)
        losses += [float(loss) for loss in optimizer.metrics().values()]
    optimizer.flush()
    losses += [float(loss) for loss in optimizer.metrics().values()]
    optimizer.flush()
    whole = sgd(large)
    for ends in ((0, 10), (10, 22)):
        expected = cross_entropy(large(X[slice(*ends)]), Y[slice(*ends)]).item()
        assert losses.pop(0) == pytest.approx(expected, abs=1e-6)
        step(large, whole, X[slice(*ends)], Y[slice(*ends)])
    assert not losses and optimizer.metrics() == {}
    assert (weights(small) - weights(large)).abs().max() < 1e-6


def test_as_in_tfutils_each_element_is_limited_to_one_by_default() -> None:
    model, hand = net(), net()
    optimizer = ClipOptimizer(sgd(model))
    step(model, optimizer, X, Y, times=100.0)
    (100.0 * cross_entropy(hand(X), Y)).backward()
    norm = torch.cat([p.grad.flatten() for p in hand.parameters() if p.grad is not None]).norm()
    assert float(optimizer.metrics()["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    torch.nn.utils.clip_grad_value_(hand.parameters(), 1.0)
    sgd(hand).step()
    assert torch.equal(weights(model), weights(hand))


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("clip", [Clip(value=1.0), Clip(norm=1.0), Clip(global_norm=1.0)], ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gradients_without_a_finite_norm_are_not_applied(tmp_path: Path, clip: Clip, bad: float) -> None:
    model = net()
    optimizer = ClipOptimizer(torch.optim.AdamW(model.parameters()), clip)
    moments: list[Any] = []
    state = {"model": model, "optimizer": optimizer}

    def each(sv: Any) -> Any:
        before = weights(model)
        step(model, optimizer, X, Y, times=bad if sv.step == 1 else 1.0)
        assert torch.equal(weights(model), before) == (sv.step == 1)
        moments.append(optimizer.state[model.weight]["exp_avg"].clone())
        return optimizer.metrics()

    sv = supervised(quiet(tmp_path, state, max_step=3, default_services=False), each)
    assert (sv.step, sv.updates) == (3, 2)
    assert torch.equal(moments[0], moments[1])
    (_, norm, _) = [float.fromhex(row[5]) for row in rows(tmp_path)]
    assert not math.isfinite(norm)


def test_a_scheduler_and_a_scaler_take_it_for_the_optimizer_it_is() -> None:
    model, hand = net(), net()
    optimizer = ClipOptimizer(torch.optim.AdamW(model.parameters(), fused=True), Clip(global_norm=0.01))
    plain = torch.optim.AdamW(hand.parameters(), fused=True)
    for each, own in ((optimizer, model), (plain, hand)):
        schedule = torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            scaler.scale(cross_entropy(own(X), Y)).backward()
            if each is plain:
                scaler.unscale_(plain)
                torch.nn.utils.clip_grad_norm_(hand.parameters(), 0.01)
            scaler.step(each)
            scaler.update()
            each.zero_grad()
            schedule.step()
    assert torch.equal(weights(model), weights(hand))
    pickle.loads(pickle.dumps(optimizer)).step(), copy.deepcopy(optimizer).step()  # which have their own step
    assert torch.equal(weights(model), weights(hand))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3 * 0.5**3]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(plain.param_groups) == 1 and len(optimizer.optimizer.param_groups) == 2
    assert repr(optimizer).startswith("ClipOptimizer(AdamW") and "Clip(global_norm=0.01)" in repr(optimizer)


class Program:
    """Dropout-like noise, a window of 3, clipping, a schedule of the updates; it may crash in a step."""

    def __init__(self, crash: int = 0) -> None:
        self.crash, self.calls = crash, 0
        self.model = net()
        self.optimizer = MinibatchOptimizer(
            ClipOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.05), Clip(global_norm=0.5)), 3
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self, batch: Any) -> dict[str, Any]:
        self.calls += 1
        x, y = batch
        loss = cross_entropy(self.model(x + 0.1 * torch.randn(x.shape)), y)
        self.optimizer.zero_grad()
        self.optimizer.weighted(loss, len(x)).backward()
        if self.calls == self.crash:
            raise Boom
        self.optimizer.step()
        found = self.optimizer.metrics()
        if found:
            self.schedule.step()
        return {"loss": loss, **found}


def test_a_crash_in_a_window_changes_nothing(tmp_path: Path) -> None:
    def start(name: str, crash: int = 0) -> int:
        program, saves = Program(crash), everstep.Checkpoints(everstep.Every(steps=1))
        with quiet(tmp_path / name, program.state(), seed=3, services=[saves]) as sv:
            batches = sv.stream(everstep.data.arrays(X, Y, batch_size=4, shuffle=True), passes=2)
            while not sv.should_stop():
                sv.advance(**program.step(next(batches)))
            return sv.updates

    assert start("straight") == 4
    for crash in (2, 4, 9):
        with pytest.raises(Boom):
            start(str(crash), crash)
        assert start(str(crash)) == 4
        assert compare_runs(tmp_path / "straight", tmp_path / str(crash)) == [], crash


def test_the_rate_is_set_and_options_are_compared_as_those_of_the_optimizer(tmp_path: Path) -> None:
    def start(clip: float, crash: int = 0, **arguments: Any) -> None:
        model = net()
        optimizer = ClipOptimizer(sgd(model), Clip(value=clip))
        falling = everstep.services.Scheduled("optimizer.lr", lambda step: 0.1 / (1 + step))
        services = [falling, everstep.Checkpoints(everstep.Every(steps=1))]
        state = {"model": model, "optimizer": optimizer}

        def each(sv: Any) -> None:
            assert optimizer.param_groups[0]["lr"] == 0.1 / (2 + sv.step)
            step(model, optimizer, X, Y)
            boom_at(crash)(sv, sv.step + 1)

        supervised(quiet(tmp_path, state, max_step=6, services=services, **arguments), each)

    with pytest.raises(Boom):
        start(1.0, crash=3)
    with pytest.raises(ConfigError, match=r"clip: stored Clip\(value=1\.0\), given Clip\(value=2"):
        start(2.0)
    start(2.0, on_change="override")


def test_an_optimizer_that_holds_itself_is_one_layer() -> None:
    optimizer: Any = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.optimizer = optimizer
    assert layers(optimizer) == [optimizer]
    clipped = ClipOptimizer(optimizer)
    assert layers(clipped) == [clipped, optimizer]


@pytest.mark.parametrize("made_for", ["outermost", "innermost"])
def test_a_schedule_that_the_state_lacks_is_an_error(tmp_path: Path, made_for: str) -> None:
    model = net()
    inner = sgd(model)
    optimizer = ClipOptimizer(inner)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer if made_for == "outermost" else inner, 1)
    state = {"model": model, "optimizer": optimizer}
    each = lambda sv: step(model, optimizer, X, Y)  # noqa: E731
    with pytest.raises(StateError, match="a scheduler was made for the learning rate of 'optimizer'"):
        supervised(quiet(tmp_path / "without", state, max_step=1), each)
    supervised(quiet(tmp_path / "with", {**state, "schedule": schedule}, max_step=1), each)


class Phases:
    """Holds an optimizer, and another one in each phase; no argument is a number."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.begin(1)

    def begin(self, phase: int) -> None:
        self.phase = phase
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1 / phase)

    def step(self, x: Any, y: Any) -> None:
        step(self.model, self.optimizer, x, y)

    def state_dict(self) -> dict[str, Any]:
        return {"phase": self.phase, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin(state["phase"])
        self.optimizer.load_state_dict(state["optimizer"])


def test_an_object_of_the_state_may_make_its_optimizer_anew(tmp_path: Path) -> None:
    def start(name: str, last: int) -> Any:
        model = net()
        phases = Phases(model)

        def each(sv: Any) -> None:
            phases.begin(2) if sv.step == 2 else None
            phases.step(X, Y)

        sv = quiet(tmp_path / name, {"model": model, "phases": phases}, max_step=last, seed=0)
        return supervised(sv, each)

    whole = start("whole", 6)
    start("parts", 4)
    assert start("parts", 6).ending.digest == whole.ending.digest
    assert whole.updates == 6


@pytest.mark.parametrize("saved", [False, True])
def test_a_schedule_that_is_made_in_the_loop_is_named_once(tmp_path: Path, saved: bool) -> None:
    model, schedules = net(), list[Any]()
    optimizer = sgd(model)
    first = {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2)} if saved else {}

    def each(sv: Any) -> None:
        if sv.step == 1:
            schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        step(model, optimizer, X, Y)
        for schedule in schedules:
            schedule.step()

    state = {"model": model, "optimizer": optimizer, **first}
    ending = supervised(quiet(tmp_path, state, max_step=4), each).ending
    (warning,) = ending.warnings
    assert "a scheduler was made in the loop for the learning rate of 'optimizer'" in warning


@pytest.mark.parametrize("change", ["a group", "a move", "an exchange"])
def test_groups_that_change_in_the_loop_are_named_before_a_resume_refuses_them(
    tmp_path: Path, change: str
) -> None:
    def start(last: int) -> Any:
        model = torch.nn.ModuleDict({"used": net(), "later": net()})
        weight, bias = model["used"].parameters()
        optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], lr=0.1)
        one, two = optimizer.param_groups

        def each(sv: Any) -> None:
            if sv.step == 1 and change == "a group":
                optimizer.add_param_group({"params": model["later"].parameters()})
            elif sv.step == 1:
                one["params"], two["params"] = (
                    ([], [weight, bias]) if change == "a move" else ([bias], [weight])
                )
            step(model["used"], optimizer, X, Y)

        return supervised(
            quiet(tmp_path, {"model": model, "optimizer": optimizer}, max_step=last), each
        ).ending

    (warning,) = start(3).warnings
    assert "'optimizer': its parts are not those that it had" in warning and "requires_grad_" in warning
    with pytest.raises(RestoreError):
        start(4)
