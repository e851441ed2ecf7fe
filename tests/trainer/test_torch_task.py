"""`everstep.torch.Task`: what it does to gradients, precision and averages is what it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

import everstep
from everstep.errors import ConfigError, MetricError
from everstep.proof.compare import compare_runs
from tiny_runs import Boom, rows

X = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(dim=1)


class Linear(everstep.torch.Task):
    """A linear layer with plain SGD: an update shows its gradient."""

    def build_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.0), torch.nn.Linear(8, 3))

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def forward(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        return {"loss": cross_entropy(self.model(x), y)}


def train(run_dir: Path, task: Linear, batch: int = 4, **arguments: Any) -> Linear:
    lines: list[str] = []
    streams = {
        "train": everstep.data.arrays(X, Y, batch_size=batch),
        "valid": everstep.data.arrays(X[:7], Y[:7], batch_size=4),
    }
    services = [*arguments.pop("services", ()), everstep.Console(sink=lines.append)]
    options = {"seed": 3, "max_epoch": 1, **arguments}
    everstep.Trainer(task, streams, run_dir, services=services, **options).run_training()
    return task


def weights(task: Linear) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in task.model.parameters()])


def values(run_dir: Path, name: str, phase: str = "step") -> list[float]:
    return [float.fromhex(row[5]) for row in rows(run_dir, phase) if row[3] == name]


def test_it_is_the_hand_written_loop_to_the_bit(tmp_path: Path) -> None:
    task = train(tmp_path / "door", Linear(), max_epoch=2)
    torch.manual_seed(3)
    hand = Linear()
    hand.build()
    data = everstep.data.arrays(X, Y, batch_size=4)
    with everstep.TrainLoop(tmp_path / "hand", hand.state(), max_epoch=2, seed=3) as loop:
        for _ in loop.iter_epochs():
            for _, (x, y) in loop.iter_steps(data):
                loss = cross_entropy(hand.model(x), y)
                hand.optimizer.zero_grad()
                loss.backward()
                hand.optimizer.step()
                loop.collect_metrics(loss=loss)
    assert torch.equal(weights(task), weights(hand))
    assert rows(tmp_path / "door", "step") == rows(tmp_path / "hand", "step")


def test_accumulation_is_the_mean_over_the_elements_also_in_a_short_last_window(tmp_path: Path) -> None:
    small = train(tmp_path / "small", Linear(accumulate=3), batch=4)  # 4 4 4 | 4 4 2
    large = train(tmp_path / "large", Linear(), batch=12)  # 12 | 10
    assert (weights(small) - weights(large)).abs().max() < 1e-6
    short = train(tmp_path / "short", Linear(accumulate=2), batch=8)  # 8 8 | 6
    whole = train(tmp_path / "whole", Linear(), batch=16)  # 16 | 6
    assert (weights(short) - weights(whole)).abs().max() < 1e-6


def test_elements_may_be_other_than_samples(tmp_path: Path) -> None:
    class Masked(Linear):
        def forward(self, batch: Any) -> Mapping[str, Any]:
            x, y = batch
            kept = y != 0
            return {"loss": cross_entropy(self.model(x)[kept], y[kept])}

        def elements(self, batch: Any) -> float:
            return float((batch[1] != 0).sum())

    small = train(tmp_path / "small", Masked(accumulate=6), batch=4)
    large = train(tmp_path / "large", Masked(), batch=22)
    assert (weights(small) - weights(large)).abs().max() < 1e-6


@pytest.mark.parametrize("clip", ["value", "norm", "global_norm"])
def test_clipping_limits_what_it_says_and_the_norm_before_is_recorded(tmp_path: Path, clip: str) -> None:
    class Steep(Linear):
        def forward(self, batch: Any) -> Mapping[str, Any]:
            return {"loss": 100 * super().forward(batch)["loss"]}

    before = Steep()
    torch.manual_seed(0)
    task = Steep(clip=everstep.torch.Clip(**{clip: 0.5}))
    task.model = before.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    start = [p.detach().clone() for p in task.model.parameters()]
    train(tmp_path / "run", task, max_step=1)
    moved = [(p.detach() - s) / -0.1 for p, s in zip(task.model.parameters(), start, strict=True)]
    found = {
        "value": max(float(m.abs().max()) for m in moved),
        "norm": max(float(m.norm()) for m in moved),
        "global_norm": float(torch.cat([m.flatten() for m in moved]).norm()),
    }
    assert found[clip] == pytest.approx(0.5, rel=1e-3)
    (norm,) = values(tmp_path / "run", "grad_norm")
    assert norm > 5


def test_only_what_matches_is_trained(tmp_path: Path) -> None:
    task = Linear(trainable=r"^2\.")
    task.model = Linear().build_model()
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    train(tmp_path / "run", task)
    changed = {name for name, p in task.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"2.weight", "2.bias"}
    with pytest.raises(ConfigError, match="found in no parameter's name; known: 0"):
        train(tmp_path / "other", Linear(trainable="encoder"))


def test_a_schedule_steps_with_the_updates(tmp_path: Path) -> None:
    class Scheduled(Linear):
        def build_scheduler(self, optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    task = train(tmp_path / "run", Scheduled(accumulate=3))
    assert task.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2


def test_an_overflowed_step_counts_and_its_update_does_not(tmp_path: Path) -> None:
    class Overflowing(Linear):
        calls = 0

        def forward(self, batch: Any) -> Mapping[str, Any]:
            self.calls += 1
            loss = super().forward(batch)["loss"].float()
            return {"loss": loss * 1e38 if self.calls == 3 else loss}

    task = Overflowing(autocast=torch.float16, ema=0.5)
    streams = {"train": everstep.data.arrays(X, Y, batch_size=4)}
    door = everstep.Trainer(task, streams, tmp_path / "run", max_epoch=1, seed=3)
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch()
            assert (loop.step, loop.updates) == (6, 5)
    assert weights(task).isfinite().all()


def test_an_evaluation_is_of_the_average_and_gives_the_weights_back(tmp_path: Path) -> None:
    class Watching(Linear):
        fails = False

        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            assert not torch.is_grad_enabled() and not self.model.training
            if self.fails:
                raise Boom
            return super().eval_step(batch)

    task = train(tmp_path / "run", Watching(ema=0.9))
    live, before = task.model, weights(task)
    with task.evaluating():
        average = weights(task)
        expected = float(cross_entropy(task.model(X[:7]), Y[:7]))
    assert not torch.equal(average, before)
    (found,) = values(tmp_path / "run", "valid/loss", "eval/valid")
    assert found == pytest.approx(expected, abs=1e-6)
    task.fails = True
    door = everstep.Trainer(task, {"valid": [(X, Y)]}, tmp_path / "run", seed=3)
    with pytest.raises(Boom):
        door.evaluate("valid")
    assert task.model is live and live.training and torch.equal(weights(task), before)


@pytest.mark.parametrize("every", [1, 4])
def test_all_of_it_resumes_to_the_bit(tmp_path: Path, every: int) -> None:
    class Everything(Linear):
        crash = 0
        calls = 0

        def build_scheduler(self, optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

        def forward(self, batch: Any) -> Mapping[str, Any]:
            self.calls += 1
            if self.calls == self.crash:
                raise Boom
            x, y = batch
            return super().forward((x + 0.1 * torch.randn(x.shape), y))

    def start(run_dir: Path, crash: int = 0, every: int = 100) -> Everything:
        task = Everything(
            accumulate=4, autocast=torch.float16, ema=0.8, clip=everstep.torch.Clip(global_norm=1.0)
        )
        task.crash = crash
        checkpoints = everstep.Checkpoints(everstep.Every(steps=every))
        train(run_dir, task, max_epoch=2, services=[checkpoints])
        return task

    calls = start(tmp_path / "straight").calls
    for crash in range(1, calls + 1, 3):
        with pytest.raises(Boom):
            start(tmp_path / str(crash), crash, every)
        start(tmp_path / str(crash), 0, every)
        assert compare_runs(tmp_path / "straight", tmp_path / str(crash)) == [], crash


def test_a_gan_with_two_optimizers_is_a_step_of_its_own(tmp_path: Path) -> None:
    class GAN(everstep.Task):
        def __init__(self) -> None:
            torch.manual_seed(4)
            self.maker, self.judge = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
            self.make = torch.optim.Adam(self.maker.parameters())
            self.judgement = torch.optim.Adam(self.judge.parameters())

        def state(self) -> Mapping[str, Any]:
            return {name: getattr(self, name) for name in ("maker", "judge", "make", "judgement")}

        def train_step(self, batch: Any) -> Mapping[str, Any]:
            (x,) = batch
            made = self.maker(torch.randn(len(x), 2))
            judged = self.judge(torch.cat([x, made.detach()]))
            wanted = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
            judge_loss = mse_loss(judged, wanted)
            self.judgement.zero_grad()
            judge_loss.backward()
            self.judgement.step()
            maker_loss = mse_loss(self.judge(made), torch.ones(len(x), 1))
            self.make.zero_grad()
            maker_loss.backward()
            self.make.step()
            return {"judge_loss": judge_loss, "maker_loss": maker_loss}

    def start(run_dir: Path, steps: int) -> None:
        data = {"train": everstep.data.arrays(X, batch_size=5, shuffle=True)}
        everstep.Trainer(GAN(), data, run_dir, seed=1, max_epoch=2).train(steps)

    start(tmp_path / "run", 3)
    start(tmp_path / "run", 10)
    start(tmp_path / "straight", 10)
    assert rows(tmp_path / "run", "step") == rows(tmp_path / "straight", "step")


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exactly one of value, norm, global_norm"):
        everstep.torch.Clip(value=1.0, norm=1.0)
    with pytest.raises(ConfigError, match="did you mean 'accumulate'"):
        Linear(accumulation=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="give a decay between 0 and 1"):
        Linear(ema=1.5)
    with pytest.raises(ConfigError, match="give torch"):
        Linear(autocast=torch.float64)

    class Lossless(Linear):
        def forward(self, batch: Any) -> Mapping[str, Any]:
            return {"cost": torch.ones(())}

    with pytest.raises(MetricError, match="return a mapping with the loss"):
        train(tmp_path / "run", Lossless())
