"""What a person gets wrong in a task: each a clear error with the remedy, and nothing lost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_task import TinyTask, trainer
from torch.nn.functional import mse_loss

import everstep
from everstep.errors import ConfigError, EverstepError, MetricError, StateError, UsageError
from everstep.proof.compare import compare_runs
from everstep.torch import Clip
from tiny_runs import Boom

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


class Fit(everstep.torch.Task):
    """A layer with dropout to a sum."""

    def build_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(3, 1))

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.1)

    def forward(self, batch: Any) -> Mapping[str, Any]:
        (x,) = batch
        return {"loss": mse_loss(self.model(x)[:, 0], x.sum(1))}


def door(run_dir: Path, task: everstep.Task, **arguments: Any) -> everstep.Trainer:
    streams = {name: everstep.data.arrays(X, batch_size=4) for name in ("train", "valid")}
    services = [everstep.Console(sink=lambda line: None), *arguments.pop("services", ())]
    return everstep.Trainer(task, streams, run_dir, services=services, seed=3, max_epoch=2, **arguments)


def refused(run_dir: Path, task: everstep.Task, error: type[EverstepError], match: str) -> None:
    with pytest.raises(error, match=match):
        door(run_dir, task).run_training()


# ------------------------------------------------------------------------------- what state lacks


class Leaving(Fit):
    """Its state leaves something out."""

    out = ""

    def build_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def state(self) -> Mapping[str, Any]:
        return {name: part for name, part in super().state().items() if name != self.out}


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("optimizer", r"Adam that steps 2 of the state's arrays \(model/1\.weight, .*\) is not part of the"),
        ("model", r"does not save what its optimizers step: parameter 0 \(1, 3\) of 'optimizer'.*add the"),
        ("scheduler", r"a scheduler was made for the learning rate of 'optimizer'.*add it, as in"),
        ("scaler", r"the state of Leaving lacks its 'scaler', .*return \{\*\*super\(\)\.state\(\), \.\.\.\}"),
        ("ema", r"the state of Leaving lacks its 'ema'"),
    ],
)
def test_a_state_that_lacks_what_training_uses(tmp_path: Path, out: str, message: str) -> None:
    for clip in (None, Clip(norm=1.0)):
        task = Leaving(clip=clip, ema=0.9, autocast=torch.float16)
        task.out = out
        refused(tmp_path / str(clip), task, StateError, message)


def test_a_second_optimizer_that_the_state_lacks(tmp_path: Path) -> None:
    class Second(Fit):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            metrics = super().train_step(batch)
            self.model(batch[0]).square().mean().backward()
            self.other.step()
            self.other.zero_grad()
            return metrics

        def build(self) -> None:
            super().build()
            self.other = torch.optim.SGD(self.model.parameters(), lr=0.1)

    refused(
        tmp_path, Second(), StateError, r"SGD that steps 2 of the state's arrays .* is not part of the state"
    )


def test_an_optimizer_that_never_steps(tmp_path: Path) -> None:
    class Idle(Fit):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            return self.forward(batch)

    refused(
        tmp_path, Idle(), EverstepError, r"no optimizer of the state made an update; call optimizer\.step"
    )


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_optimizers_that_are_no_dictionary(tmp_path: Path, kind: type) -> None:
    class Several(Fit):
        def build_optimizer(self, model: Any) -> Any:
            return kind([super().build_optimizer(model), "a scheduler"])

    message = rf"Several\.build_optimizer returned a {kind.__name__}: return the optimizer alone, a scheduler"
    refused(tmp_path, Several(), ConfigError, message)


# ------------------------------------------------------------------------------- names of others


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("training_step", "train_step"),
        ("validation_step", "eval_step"),
        ("predict_step", "inference_step"),
        ("configure_optimizers", "build_optimizer"),
    ],
)
def test_methods_by_the_names_of_other_libraries(tmp_path: Path, theirs: str, ours: str) -> None:
    for base in (everstep.Task, everstep.torch.Task):
        task = type("Ported", (base,), {theirs: lambda self, batch, index: None})()
        refused(tmp_path, task, ConfigError, rf"Ported\.{theirs} is not called by a Trainer; name it {ours}$")
    both = type("Both", (TinyTask,), {theirs: None, ours: lambda self, given: given})()
    assert trainer(tmp_path, both).task is both


def test_attributes_by_the_names_of_other_libraries(tmp_path: Path) -> None:
    fit = trainer(tmp_path)
    with pytest.raises(AttributeError, match=r"no attribute 'fit'; it is trainer\.run_training\(\)$"):
        fit.fit  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'run_trainig'; did you mean 'run_training'\?$"):
        fit.run_trainig  # noqa: B018
    assert not hasattr(fit, "nothing_like_it")
    with pytest.raises(AttributeError, match=r"'LogVariables'; it is everstep\.services\.LogVariables$"):
        everstep.LogVariables  # noqa: B018
    with pytest.raises(AttributeError, match=r"'Evaluate'; it is everstep\.Evaluate$"):
        everstep.services.Evaluate  # noqa: B018
    with pytest.raises(AttributeError, match=r"'Plateu'; did you mean 'Plateau'\? known: Annealing, "):
        everstep.services.Plateu  # noqa: B018


def test_predictions_of_a_stream_that_is_not_there_are_refused_at_once(tmp_path: Path) -> None:
    door = trainer(tmp_path)
    with pytest.raises(ConfigError, match=r"no stream is named 'tset'; .*known: test, train, valid"):
        door.predict("tset")


# ------------------------------------------------------------------------------ what steps return


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"forward returned None; return a mapping with the loss, a tensor"),
        (torch.ones(()), r"forward returned tensor\(1\.\); return a mapping"),
        ({"cost": torch.ones(())}, r"forward returned .*cost.*return a mapping with the loss"),
        ({"loss": 1.0}, r"forward returned .*return a mapping with the loss, a tensor"),
        ({"loss": torch.ones(4)}, r"has the shape \(4,\): return its mean, loss\.mean\(\)"),
        ({"loss": torch.ones(())}, r"depends on no parameter that is trained: compute it from self\.model"),
    ],
)
def test_a_forward_without_a_loss(tmp_path: Path, returned: Any, message: str) -> None:
    class Wrong(Fit):
        def forward(self, batch: Any) -> Any:
            return returned

    refused(tmp_path, Wrong(), MetricError, message)


NO_NUMBERS = [
    ("low", r"metric 'x' is 'low', a str: collect one real number"),
    (torch.ones(2), r"metric 'x': .*shape \(2,\).*\.mean\(\)"),
    (torch.ones((), dtype=torch.complex64), r"metric 'x': .*take the real part if it is complex"),
    (np.ones(3), r"metric 'x': .*reduce it"),
    (None, r"metric 'x' is None, a NoneType"),
]


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(("value", "message"), NO_NUMBERS)
def test_a_metric_that_is_not_a_number(tmp_path: Path, value: Any, message: str) -> None:
    class Wrong(Fit):
        where = ""

        def train_step(self, batch: Any) -> Mapping[str, Any]:
            return {**super().train_step(batch), **self.more("train_step")}

        def train_loop_end(self) -> Mapping[str, Any] | None:
            return {**(super().train_loop_end() or {}), **self.more("train_loop_end")}

        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {**super().eval_step(batch), **self.more("eval_step")}

        def eval_end(self, state: Any) -> Mapping[str, Any]:
            return self.more("eval_end")

        def more(self, here: str) -> Mapping[str, Any]:
            return {"x": value} if here == self.where else {}

    for where in ("train_step", "train_loop_end", "eval_step", "eval_end"):
        task = Wrong()
        task.where = where
        refused(tmp_path / where, task, MetricError, message)


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("where", ["train_step", "train_loop_end", "eval_step", "eval_end"])
def test_a_step_that_returns_no_mapping(tmp_path: Path, where: str) -> None:
    task = TinyTask()
    setattr(task, where, lambda *_: 0.5)
    with pytest.raises(MetricError, match=rf"TinyTask\.{where} returned 0\.5; return a mapping of names"):
        trainer(tmp_path, task).run_training()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("name", ["", 1])
@pytest.mark.parametrize("where", ["train_step", "train_loop_end", "eval_step", "eval_end"])
def test_a_metric_without_a_name(tmp_path: Path, where: str, name: Any) -> None:
    task = TinyTask()
    setattr(task, where, lambda *_: {name: 1.0})
    with pytest.raises(MetricError, match=rf"metric name {name!r}: give a string, not empty"):
        trainer(tmp_path, task).run_training()


@pytest.mark.parametrize("value", [None, 1j, 10**400])
def test_statistics_of_what_is_no_number(tmp_path: Path, value: Any) -> None:
    task = TinyTask()
    setattr(task, "eval_step", lambda _: {"loss": value})  # noqa: B010
    with pytest.raises(MetricError, match="metric 'loss'"):
        trainer(tmp_path, task, services=[everstep.Evaluate("valid", stats={"loss": ["q50"]})]).run_training()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("value", [-3, 0, float("nan"), None, "x", 10**400])
def test_a_batch_without_a_size(tmp_path: Path, value: Any) -> None:
    task = TinyTask()
    setattr(task, "batch_size", lambda _: value)  # noqa: B010
    with pytest.raises(
        MetricError, match=rf"TinyTask\.batch_size returned {value!r}; return how many samples"
    ):
        trainer(tmp_path / "size", task).run_training()
    counting = Fit(accumulate=2)
    setattr(counting, "elements", lambda _: value)  # noqa: B010
    refused(tmp_path / "elements", counting, MetricError, rf"Fit\.elements returned {value!r}; .* above 0")


# --------------------------------------------------------------------------------------- around


def test_an_evaluation_that_raises_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """Average, modes, random state and weights, at any of its batches; and the training goes on."""

    class Failing(Fit):
        fails = 0
        batches = 0

        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            random.random(), np.random.random(), torch.rand(3)  # what it draws is its own affair
            self.model[1].train()
            self.batches += 1
            if self.batches == self.fails:
                raise Boom
            return super().eval_step(batch)

    def start(name: str, fails: int) -> None:
        task = Failing(ema=0.9, clip=Clip(value=0.5))
        one = door(tmp_path / name, task)
        one.train(3)
        live, modes = task.model, [m.training for m in task.model.modules()]
        before = {f"{name}/{k}": v.clone() for name in ("model", "ema") for k, v in tensors(task, name)}
        drawn = randomness()
        task.batches, task.fails = 0, fails
        if fails:
            with pytest.raises(Boom):
                one.evaluate("valid")
        task.fails = 0
        assert task.model is live and [m.training for m in task.model.modules()] == modes
        assert randomness() == drawn
        after = {f"{name}/{k}": v for name in ("model", "ema") for k, v in tensors(task, name)}
        assert all(torch.equal(after[key], value) for key, value in before.items())
        one.run_training()

    start("straight", 0)
    for fails in (1, 2, 3):
        start(str(fails), fails)
        assert compare_runs(tmp_path / "straight", tmp_path / str(fails)) == []


def randomness() -> str:
    numpy = [np.asarray(part).tolist() for part in np.random.get_state()]
    return repr((random.getstate(), numpy, torch.get_rng_state().tolist()))


def tensors(task: everstep.Task, name: str) -> Any:
    return task.state()[name].state_dict().items()


def test_training_in_an_evaluation_is_refused(tmp_path: Path) -> None:
    class Training(Fit):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            with torch.enable_grad():
                return self.train_step(batch)

    refused(
        tmp_path,
        Training(),
        UsageError,
        r"stepped while stream 'valid' was evaluated.* leave optimizer\.step",
    )


def test_a_task_without_its_parts_says_which(tmp_path: Path) -> None:
    class Bare(everstep.torch.Task):
        pass

    with pytest.raises(ConfigError, match=r"return a torch\.nn\.Module from build_model"):
        door(tmp_path, Bare())
    task = Bare()
    task.model = torch.nn.Linear(3, 1)
    refused(tmp_path / "forward", task, ConfigError, "Bare has no forward; give it one")

    class Unoptimized(Fit):
        def build_optimizer(self, model: Any) -> Any:
            return None

    refused(tmp_path / "none", Unoptimized(), ConfigError, r"optimizer of Unoptimized is None: return one")


# ----------------------------------------------------------------------------- what is asked of it


@pytest.mark.parametrize("value", ["no", 5, None])
def test_evaluations_neither_wanted_nor_scheduled(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"evaluate={value!r}: give True, False or a schedule"):
        trainer(tmp_path).run_training(evaluate=value)


def test_options_that_torch_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainable='\(' is not a regular expression \(missing \)"):
        Fit(trainable="(")
    with pytest.raises(ConfigError, match="device='bogus' is not a device of torch; give"):
        Fit(device="bogus")
    with pytest.raises(ConfigError, match=r"device='cuda:99' cannot be used here \(.*\).* or \"cpu\""):
        door(tmp_path, Fit(device="cuda:99"))
