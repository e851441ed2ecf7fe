"""What a person gets wrong in a task: each a clear error with the remedy, and nothing lost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

import everstep
from everstep.errors import ConfigError, EverstepError, MetricError, StateError, UsageError
from everstep.proof.compare import compare_runs
from everstep.torch import Clip
from tiny_runs import Boom
from tiny_task import TinyTask, trainer

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
    services = [everstep.services.Console(sink=lambda line: None), *arguments.pop("services", ())]
    return everstep.Trainer(task, streams, run_dir, services=services, seed=3, max_epoch=2, **arguments)


def refused(run_dir: Path, task: everstep.Task, error: type[EverstepError], match: str) -> None:
    with pytest.raises(error, match=match):
        door(run_dir, task).run_training()


def but(kind: type, *given: Any, **members: Any) -> Any:
    """A task of a kind with some other members; a value stands for a method that returns it."""
    methods = {n: m if callable(m) else lambda *_, m=m: m for n, m in members.items()}
    return type("Wrong", (kind,), methods)(*given)


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
        message = rf"Wrong\.{theirs} is not called by a Trainer; name it {ours}$"
        refused(tmp_path, but(base, **{theirs: None}), ConfigError, message)
    both = but(TinyTask, **{theirs: None, ours: lambda self, given: given})
    assert trainer(tmp_path, both).task is both


# ------------------------------------------------------------------------------ what steps return


PLACES = ("train_step", "train_loop_end", "eval_step", "eval_end")


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("low", r"metric 'x' is 'low', a str: collect one real number"),
        (torch.ones(2), r"metric 'x': .*shape \(2,\).*\.mean\(\)"),
        (torch.ones((), dtype=torch.complex64), r"metric 'x': .*take the real part if it is complex"),
        (np.ones(3), r"metric 'x': .*shape \(3,\).*\.mean\(\)"),
        (None, r"metric 'x' is None, a NoneType"),
    ],
)
def test_a_metric_that_is_not_a_number(tmp_path: Path, value: Any, message: str) -> None:
    for where in PLACES:
        task = but(TinyTask, **{where: lambda *_: {"x": value}})
        with pytest.raises(MetricError, match=message):
            trainer(tmp_path / where, task).run_training()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("where", PLACES)
def test_a_step_that_returns_no_mapping(tmp_path: Path, where: str) -> None:
    for returned, message in (
        (0.5, rf"Wrong\.{where} returned 0\.5; return a mapping of names"),
        ({"": 1.0}, "metric name '': give a string, not empty"),
        ({1: 1.0}, "metric name 1: give a string, not empty"),
    ):
        with pytest.raises(MetricError, match=message):
            trainer(tmp_path, but(TinyTask, **{where: returned})).run_training()


def test_statistics_of_what_is_no_number(tmp_path: Path) -> None:
    services = [everstep.Evaluate("valid", stats={"loss": ["q50"]})]
    for value in (None, 1j, 10**400):
        with pytest.raises(MetricError, match="metric 'loss'"):
            trainer(tmp_path, but(TinyTask, eval_step={"loss": value}), services=services).run_training()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("value", [-3, 0, float("nan"), None, "x", 10**400])
def test_a_batch_without_a_size(tmp_path: Path, value: Any) -> None:
    with pytest.raises(MetricError, match=rf"Wrong\.batch_size returned {value!r}; return how many samples"):
        trainer(tmp_path / "size", but(TinyTask, batch_size=value)).run_training()
    counting = but(Fit, elements=value, __init__=lambda self: Fit.__init__(self, accumulate=2))
    refused(tmp_path / "elements", counting, MetricError, rf"Wrong\.elements returned {value!r}; .* above 0")


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

    def everything(task: Any) -> str:
        numpy = [np.asarray(part).tolist() for part in np.random.get_state()]
        drawn = random.getstate(), numpy, torch.get_rng_state().tolist()
        arrays = [v.tolist() for name in ("model", "ema") for v in task.state()[name].state_dict().values()]
        return repr((drawn, arrays, [module.training for module in task.model.modules()], id(task.model)))

    def start(name: str, fails: int) -> None:
        task = Failing(ema=0.9, clip=Clip(value=0.5))
        one = door(tmp_path / name, task)
        one.train(3)
        before = everything(task)
        task.batches, task.fails = 0, fails
        if fails:
            with pytest.raises(Boom):
                one.evaluate("valid")
        task.fails = 0
        assert everything(task) == before
        one.run_training()

    start("straight", 0)
    for fails in (1, 3):
        start(str(fails), fails)
        assert compare_runs(tmp_path / "straight", tmp_path / str(fails)) == []


# --------------------------------------------------------------------------- refusals of all kinds


class Bare(everstep.torch.Task):
    model = torch.nn.Linear(3, 1)


class Second(Fit):
    """Has a second optimizer, which its state lacks."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        metrics = super().train_step(batch)
        self.model(batch[0]).square().mean().backward()
        self.other.step()
        return metrics

    def build(self) -> None:
        super().build()
        self.other = torch.optim.SGD(self.model.parameters(), lr=0.1)


def without(part: str) -> Any:
    """A task whose state lacks what the training uses."""
    options: dict[str, Any] = {"clip": Clip(norm=1), "ema": 0.9, "autocast": torch.float16}
    return but(
        Fit,
        build_scheduler=lambda self, optimizer: StepLR(optimizer, 1),
        state=lambda self: {name: each for name, each in Fit.state(self).items() if name != part},
        __init__=lambda self: Fit.__init__(self, scheduler_interval="update", **options),
    )


LACKS = {
    "optimizer": r"Adam that steps 2 of the state's arrays \(model/1\.weight, .*\) is not part of the",
    "model": r"does not save what its optimizers step: parameter 0 \(1, 3\) of 'optimizer'.*add the",
    "scheduler": r"scheduler was made for the learning rate of 'optimizer'.*as in .*'scheduler': scheduler",
    "scaler": r"the state of Wrong lacks its 'scaler', .*return \{\*\*super\(\)\.state\(\), \.\.\.\}",
    "ema": r"the state of Wrong lacks its 'ema'",
}
NO_LOSS: dict[str, Any] = {
    r"forward returned None; return \{.loss.: loss, \.\.\.\} with the loss as a tensor": None,
    r"forward returned .*cost.*with the loss as a tensor": {"cost": torch.ones(())},
    r"forward returned .*with the loss as a tensor": {"loss": 1.0},
    r"has the shape \(4,\): return its mean, loss\.mean\(\)": {"loss": torch.ones(4)},
    r"depends on no parameter that is trained: compute it from self\.model": {"loss": torch.ones(())},
}


def inherited(name: str, change: Any) -> Any:
    return lambda self, *given: change(getattr(Fit, name)(self, *given))


TASKS: dict[str, tuple[Any, type[EverstepError], str]] = {
    **{f"no {part}": (partial(without, part), StateError, message) for part, message in LACKS.items()},
    **{
        f"no loss: {message}": (
            partial(but, Fit, forward=lambda *_, returned=returned: returned),
            *(MetricError, message),
        )
        for message, returned in NO_LOSS.items()
    },
    "a second optimizer": (Second, StateError, r"SGD that steps 2 of the state's arrays .* is not part of"),
    "never steps": (
        lambda: but(Fit, train_step=lambda self, batch: self.forward(batch)),
        *(EverstepError, r"no optimizer of the state made an update; call optimizer\.step"),
    ),
    "several in a list": (
        lambda: but(Fit, build_optimizer=inherited("build_optimizer", lambda made: [made, "a scheduler"])),
        *(ConfigError, r"Wrong\.build_optimizer returned a list: return the optimizer, a scheduler"),
    ),
    "trains in an evaluation": (
        lambda: but(Fit, eval_step=torch.enable_grad()(lambda self, batch: self.train_step(batch))),
        *(UsageError, r"stepped while stream 'valid' was evaluated"),
    ),
    "no model made": (
        lambda: but(everstep.torch.Task),
        *(ConfigError, r"return a torch\.nn\.Module from build_model"),
    ),
    "no forward": (Bare, ConfigError, "Bare has no forward; give it one"),
    "no optimizer made": (
        lambda: but(Fit, build_optimizer=lambda self, model: None),
        *(ConfigError, r"optimizer of Wrong is None: return one"),
    ),
    "no train_step": (everstep.Task, ConfigError, "Task has no train_step; give the class one"),
    "no task": (object, ConfigError, r"derived from everstep\.Task"),
    "no such device": (
        lambda: Fit(device="cuda:99"),
        *(ConfigError, r"device='cuda:99' cannot be used here \(.*\).* or \"cpu\""),
    ),
    "updates or epochs": (
        lambda: but(Fit, build_scheduler=lambda self, optimizer: StepLR(optimizer, 3)),
        *(ConfigError, r"StepLR of build_scheduler.*scheduler_interval = \"epoch\""),
    ),
    "plateau": (
        lambda: but(
            Fit, build_scheduler=lambda self, optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        ),
        *(ConfigError, r"services\.Plateau"),
    ),
    "several and clip": (
        lambda: but(
            Fit,
            build_optimizer=inherited("build_optimizer", lambda made: {"a": made, "b": made}),
            __init__=lambda self: Fit.__init__(self, clip=Clip(norm=1.0), accumulate=2),
        ),
        *(ConfigError, r"Wrong: .* cannot be used with clip and accumulate"),
    ),
    "several": (
        lambda: but(Fit, build_optimizer=inherited("build_optimizer", lambda made: {"a": made, "b": made})),
        *(ConfigError, "write a train_step that steps yours"),
    ),
}


@pytest.mark.parametrize("kind", TASKS)
def test_a_task_that_cannot_train(tmp_path: Path, kind: str) -> None:
    task, error, message = TASKS[kind]
    refused(tmp_path, task(), error, message)


OPTIONS: list[tuple[Any, str]] = [
    (lambda: Clip(value=1.0, norm=1.0), "exactly one of value, norm, global_norm"),
    (lambda: Fit(accumulation=2), "did you mean 'accumulate'"),  # type: ignore[call-arg]
    (lambda: Fit(ema=1.5), "give a decay between 0 and 1"),
    (lambda: Fit(scheduler_interval="step"), 'scheduler_interval=\'step\': give "update" or "epoch"'),
    (lambda: Fit(autocast=torch.float64), "give torch"),
    (lambda: Fit(autocast="half"), "autocast='half': give torch"),  # type: ignore[arg-type]
    (lambda: Fit(compile="inductor"), "compile='inductor': give True, or options in a mapping"),  # type: ignore[arg-type]
    (lambda: Fit(parallel=2), "parallel=2: give True, or options"),  # type: ignore[arg-type]
    (lambda: Fit(trainable="("), r"trainable='\(' is not a regular expression \(missing \)"),
    (lambda: Fit(device="bogus"), "device='bogus' is not a device of torch; give"),
    (lambda: trainer(Path("run"), services=[everstep.Evaluate("vald")]), "did you mean 'valid'"),
    (lambda: trainer(Path("run"), max_epochs=3), "did you mean 'max_epoch'"),
    (lambda: trainer(Path("run"), state={}), r"Trainer\(\) has no argument 'state'"),
    (lambda: everstep.Trainer(TinyTask(), [1], "run"), "give names to data"),  # type: ignore[arg-type]
    (lambda: everstep.Trainer(TinyTask(), {}, "none").run_training(), "no stream is named 'train'"),
    (lambda: everstep.Evaluate("valid", num_steps=0), "num_steps=0: give an integer"),
    (
        lambda: everstep.TrainLoop("loop", services=[everstep.Evaluate("valid")]).__enter__(),
        "give the service to a Trainer's services=",
    ),
    (lambda: trainer(Path("run")).run_training(evaluate="no"), "evaluate='no': give True, False or a sched"),
    (lambda: trainer(Path("run")).predict("tset"), "no stream is named 'tset'; .*known: test, train, valid"),
    (lambda: trainer(Path("run")).watch(every="newst"), "did you mean 'newest'"),  # type: ignore[arg-type]
    (lambda: trainer(Path("run")).watch("vald"), "did you mean 'valid'"),
    (lambda: trainer(Path("run")).watch(time_out=3), "did you mean 'timeout'"),  # type: ignore[call-arg]
    (lambda: trainer(Path("run")).watch(throttle=-1), "throttle=-1"),
]


def test_options_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call, message in OPTIONS:
        with pytest.raises(ConfigError, match=message):
            call()
    assert not Path("run", "checkpoints").exists()
