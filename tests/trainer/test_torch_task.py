"""`everstep.torch.Task`: what it does to gradients, precision and averages is what it says."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import everstep
from everstep.backends.torch.task import Average
from everstep.errors import ConfigError
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from everstep.torch import Clip
from tiny_runs import Boom, resumed, rows
from tiny_task import Notes

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


class Halving(Linear):
    """Its learning rate is halved at each update."""

    scheduler_interval = "update"
    built = 0

    def build(self) -> None:
        self.built += 1
        super().build()

    def build_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def train(run_dir: Path, task: Linear, batch: int = 4, **arguments: Any) -> Linear:
    valid = everstep.data.arrays(X[:7], Y[:7], batch_size=4)
    streams = {"train": everstep.data.arrays(X, Y, batch_size=batch), "valid": valid}
    services = [*arguments.pop("services", ()), everstep.services.Console(sink=lambda line: None)]
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


@pytest.mark.parametrize("clip", ["value", "norm", "global_norm"])
def test_clipping_limits_what_it_says_and_the_norm_before_is_recorded(tmp_path: Path, clip: str) -> None:
    class Steep(Linear):
        def forward(self, batch: Any) -> Mapping[str, Any]:
            return {"loss": 100 * super().forward(batch)["loss"]}

    before = Steep()
    torch.manual_seed(0)
    task = Steep(clip=Clip(**{clip: 0.5}))
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


def test_accumulation_is_the_mean_over_the_elements_also_in_a_short_last_window(tmp_path: Path) -> None:
    for window, parts, whole in ((3, 4, 12), (2, 8, 16)):  # 4 4 4 | 4 4 2 and 12 | 10; 8 8 | 6 and 16 | 6
        small = train(tmp_path / f"small{parts}", Linear(accumulate=window), batch=parts)
        large = train(tmp_path / f"large{parts}", Linear(), batch=whole)
        assert (weights(small) - weights(large)).abs().max() < 1e-6


def test_the_mean_of_tokens_that_are_not_padding_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Token losses: batches of equal sizes with unequal numbers of tokens."""
    lengths = torch.tensor([1, 6, 2, 5, 3, 6, 1, 1, 4, 6, 2])
    tokens = torch.randint(3, (11, 6), generator=torch.Generator().manual_seed(2))
    tokens[torch.arange(6) >= lengths[:, None]] = -1

    class Tokens(Linear):
        def build_model(self) -> Any:
            return torch.nn.Embedding(11, 18)

        def forward(self, batch: Any) -> Mapping[str, Any]:
            ids, wanted = batch
            scores = self.model(ids).unflatten(-1, (6, 3))
            return {"loss": cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=-1)}

        def elements(self, batch: Any) -> float:
            return float((batch[1] >= 0).sum())

    def run(name: str, batch: int, **arguments: Any) -> tuple[torch.Tensor, list[float]]:
        task = Tokens(**arguments)
        data = {"train": everstep.data.arrays(torch.arange(11), tokens, batch_size=batch)}
        everstep.Trainer(task, data, tmp_path / name, max_epoch=2, seed=3).run_training()
        losses = "window_loss" if arguments else "loss"
        found = [row for row in rows(tmp_path / name) if row[2] in ("step", "tail") and row[3] == losses]
        return weights(task), [float.fromhex(row[5]) for row in sorted(found, key=lambda row: row[1])]

    small, small_losses = run("small", 2, accumulate=4)  # 2 2 2 2 | 2 1
    large, large_losses = run("large", 8)  # 8 | 3
    assert (small - large).abs().max() < 1e-6
    assert small_losses == pytest.approx(large_losses, abs=1e-6) and len(large_losses) == 4


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
    assert values(tmp_path / "run", "overflowed") == [0, 0, 1, 0, 0, 0]


def test_a_scaled_update_waits_for_the_device_once() -> None:
    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    task = Linear(autocast=torch.float16, accumulate=2)
    task.build()
    for reads in (0, 1, 0, 1):
        task.backward(task.forward((X, Y))["loss"], 22)
        with Reads() as found:
            task.update()
        assert found.count == reads


def test_nothing_of_a_step_waits_for_the_device() -> None:
    """The meta device has no values: who wants to read one fails."""

    class Everything(Halving):
        def build_optimizer(self, model: Any) -> Any:
            return torch.optim.AdamW(model.parameters())

        def elements(self, batch: Any) -> Any:
            return batch[1].to("meta").sum()

    for clip in (Clip(value=1.0), Clip(norm=1.0), Clip(global_norm=1.0)):
        task = Everything(device="meta", accumulate=2, clip=clip, ema=0.9)
        task.build()
        for _ in range(5):
            metrics = task.train_step((X, Y))
        assert set(task.train_loop_end() or ()) == {"grad_norm", "window_loss"}
        with pytest.raises(RuntimeError, match="meta"):
            metrics["loss"].item()


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_batch_goes_to_the_device_however_it_is_nested() -> None:
    task = Linear(device="meta")
    packed = torch.nn.utils.rnn.pack_sequence([X[:3], X[:2]])
    batch = {"pair": Pair(X, [Y, "text", 3]), "more": ((X,), {"deep": Y}), "packed": packed, "none": None}
    moved = task.to_device(batch)
    assert type(moved["pair"]) is Pair and moved["pair"].second[1:] == ["text", 3] and moved["none"] is None
    parts = [moved["pair"].first, moved["pair"].second[0], moved["more"][0][0], moved["more"][1]["deep"]]
    assert [part.device.type for part in [*parts, moved["packed"].data]] == ["meta"] * 5
    assert Linear().to_device(batch) is batch


class Noisy(Linear):
    """With dropout; it may crash in a step."""

    crash = 0
    calls = 0

    def build_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))

    def forward(self, batch: Any) -> Mapping[str, Any]:
        self.calls += 1
        if self.calls == self.crash:
            raise Boom
        return super().forward(batch)


@pytest.mark.campaign("long")
def test_a_compiled_model_is_the_model_and_resumes_to_the_bit(tmp_path: Path) -> None:
    def start(run_dir: Path, crash: int = 0, **arguments: Any) -> Noisy:
        task = Noisy(ema=0.9, **arguments)
        task.crash = crash
        train(run_dir, task, services=[everstep.Checkpoints(everstep.Every(steps=2))])
        return task

    compiled = {"compile": {"backend": "aot_eager"}}
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    straight, _ = resumed(tmp_path, partial(start, **compiled), 4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    plain = start(tmp_path / "plain")
    assert (weights(straight) - weights(plain)).abs().max() < 1e-6
    losses = values(tmp_path / "plain", "loss")
    assert values(tmp_path / "whole", "loss") == pytest.approx(losses, abs=1e-6)
    start(tmp_path / "plain", **compiled)  # a run may go on compiled, or not
    assert straight.state().keys() == plain.state().keys()


BY_EPOCH, BY_UPDATE = [0.1, 0.1, 0.05, 0.05, 0.025, 0.025], [0.1 * 0.5**n for n in range(6)]


@pytest.mark.parametrize(("interval", "rates"), [("epoch", BY_EPOCH), ("update", BY_UPDATE)])
def test_a_schedule_counts_as_said_and_rates_are_recorded(tmp_path: Path, interval: Any, rates: Any) -> None:
    """As Lightning's `interval`: counting another thing trains with a rate of 1e-14."""
    data = {"train": everstep.data.arrays(X, Y, batch_size=len(X) // 2)}
    lines: list[str] = []
    for epochs in (1, 3):  # also over a resume
        task = Halving()
        task.scheduler_interval = interval
        console = everstep.services.Console(sink=lines.append)
        everstep.Trainer(task, data, tmp_path, max_epoch=epochs, seed=1, services=[console]).run_training()
    assert task.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * rates[-1])
    assert RunJournal(tmp_path).series("lr", "step")[1] == pytest.approx(rates)
    assert f"lr: {rates[-1]:.3g}" in [line for line in lines if "[Epoch 3/3" in line][-1].split("; ")


def test_a_smoke_test_leaves_the_schedule_and_the_average_alone_and_builds_once(tmp_path: Path) -> None:
    task, streams = Halving(ema=0.5, clip=Clip(norm=1.0)), {"train": [(X, Y)], "valid": [(X, Y)]}
    door = everstep.Trainer(task, streams, tmp_path / "run", seed=3, max_epoch=1)
    before = {name: id(part) for name, part in task.state().items()}
    door.smoke_test()
    assert {name: id(part) for name, part in task.state().items()} == before
    assert task.scheduler.last_epoch == 0 and task.optimizer.param_groups[0]["lr"] == 0.1
    door.run_training()
    assert task.optimizer.param_groups[0]["lr"] == 0.05
    everstep.Trainer(task, streams, tmp_path / "other", seed=3)
    assert task.built == 1


def test_frozen_integers_of_a_model_are_no_part_of_the_average() -> None:
    model = torch.nn.Linear(2, 2)
    model.scale = torch.nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
    average = Average(model, 0.5)
    model.scale.data += 1  # as one that is loaded after the average was made
    for _ in range(2):
        average.update_parameters(model)
        model.weight.data += 2
    assert torch.equal(average.module.scale, model.scale)
    torch.testing.assert_close(average.module.weight, model.weight - 3)


def test_an_evaluation_is_of_the_average_and_gives_the_weights_back(tmp_path: Path) -> None:
    class Watching(Linear):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            assert not torch.is_grad_enabled() and not self.model.training
            return super().eval_step(batch)

    task = train(tmp_path / "run", Watching(ema=0.9))
    live, before = task.model, weights(task)
    with task.evaluating():
        assert not torch.is_grad_enabled()
        average = weights(task)
        expected = float(cross_entropy(task.model(X[:7]), Y[:7]))
    assert not torch.equal(average, before)
    (found,) = values(tmp_path / "run", "valid/loss", "eval/valid")
    assert found == pytest.approx(expected, abs=1e-6)
    assert task.model is live and live.training and torch.equal(weights(task), before)


# -------------------- what a step keeps on the task
class Env:
    def __init__(self) -> None:
        self.return_queue: deque[float] = deque(maxlen=4)
        self.seconds_time = 0.0


class Part:
    def __init__(self) -> None:
        self.notes = {"seen": 0}


class Drawn(torch.nn.Linear):
    """Draws from a generator of its own, and holds an object that no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.generator = torch.Generator().manual_seed(5)
        self.envs = (Env(),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.envs[0].return_queue.append(1.0)
        return super().forward(x + torch.randn(4, generator=self.generator))


class Ahead(torch.optim.Optimizer):
    """Keeps slow weights and a count in attributes, and calls an optimizer with a state of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups
        self.count = 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.data.copy_(slow.lerp_(p.detach(), 0.5))


class Keeping(Linear):
    """Each step reads what the steps before have left on the task."""

    def __init__(self, crash: int = 0) -> None:
        super().__init__()
        self.crash, self.calls = crash, Notes()
        self.envs = [Env()]
        self.average, self.center = 0.0, torch.zeros(4)
        self.losses: list[float] = []
        self.draws = np.random.RandomState(3)
        self.part = Part()

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "notes": self.part.notes}  # so that they are not named

    def build_model(self) -> Any:
        return Drawn()

    def build_optimizer(self, model: Any) -> Any:
        optimizer = Ahead(model.parameters())
        self.groups, self.moments = optimizer.param_groups, optimizer.state  # the state saves what is in them
        return optimizer

    def forward(self, batch: Any) -> Mapping[str, Any]:
        self.groups[0]["lr"] *= 0.9
        self.calls.append(1)
        if len(self.calls) == self.crash:
            raise Boom
        x, y = batch
        loss = cross_entropy(self.model(x + self.center + self.draws.normal()), y)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.center = 0.9 * self.center + 0.1 * x.mean(0)
        self.losses.append(loss.item())
        self.envs[0].return_queue.append(self.average)
        self.envs[0].seconds_time += 1.0
        self.part.notes["seen"] += 1
        return {"loss": loss * (1 + self.average + sum(self.losses))}


def test_what_steps_keep_on_task_module_and_optimizer_survives_or_is_named_once(tmp_path: Path) -> None:
    def start(run_dir: Path, crash: int) -> tuple[str, ...]:
        services = [everstep.Checkpoints(everstep.Every(steps=2))]
        streams = {"train": everstep.data.arrays(X, Y, batch_size=2)}
        door = everstep.Trainer(Keeping(crash), streams, run_dir, services=services, max_epoch=1, seed=3)
        return door.run_training().warnings

    (said,), again = resumed(tmp_path, start, 8)
    assert said.startswith("envs[0].return_queue, model.envs[0].return_queue: ") and "Keeping.state" in said
    assert again == ()  # the first start has named it


# -------------------- task again
class Failing(Linear):
    """The update of number `fails` raises, once, after the gradients were unscaled and clipped."""

    def __init__(self, fails: int, **given: Any) -> None:
        super().__init__(**given)
        self.fails, self.updates = Notes([fails]), Notes()

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().build_optimizer(model)
        optimizer.register_step_pre_hook(self.count)
        return optimizer

    def count(self, *_: Any) -> None:
        self.updates.append(1)
        if len(self.updates) in self.fails:
            self.fails.clear()
            raise Boom


SETTINGS = [{"accumulate": 3, "clip": Clip(global_norm=1.0)}, {"autocast": torch.float16}]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("given", SETTINGS, ids=["window", "float16"])
def test_the_same_objects_go_on_after_an_error_as_new_ones(tmp_path: Path, given: Any) -> None:
    def start(name: str, task: Failing) -> None:
        train(tmp_path / name, task, services=[everstep.Checkpoints(everstep.Every(steps=3))])

    for name, new in (("anew", True), ("same", False)):
        task = Failing(2, **given)
        with pytest.raises(Boom):
            start(name, task)
        start(name, Failing(0, **given) if new else task)
    assert compare_runs(tmp_path / "anew", tmp_path / "same") == []


def test_an_epoch_whose_updates_are_all_left_out_is_no_error(tmp_path: Path) -> None:
    """By the scale of float16, which begins high; and by clipping, where gradients are not finite."""

    class Loud(Failing):
        steps = 0

        def forward(self, batch: Any) -> Mapping[str, Any]:
            self.steps += 1
            loss = super().forward(batch)["loss"].float()
            if self._clip is None:
                return {"loss": 1e3 * loss}
            return {"loss": loss + (0.0 if self.steps > 6 else 1e38) * self.model[2].bias.sum()}

    train(tmp_path / "scaled", task := Loud(0, autocast=torch.float16))
    assert len(task.updates) < len(values(tmp_path / "scaled", "overflowed")) == 6
    train(tmp_path / "run", task := Loud(0, clip=Clip(global_norm=1.0)), default_services=False, max_epoch=2)
    assert len(task.updates) == 6
