"""What a person gets wrong in a task: each a clear error with the remedy, and nothing lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
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
from everstep.services import Moment
from everstep.torch import Clip
from tiny_runs import Boom
from tiny_task import Own, TinyTask, in_epochs, trainer

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
    for name, value in members.items():
        if not callable(value) and not isinstance(value, property):
            members[name] = lambda *_, value=value: value
    return type("Wrong", (kind,), members)(*given)


# ------------------------------------------------------------------------------- names of others
THEIRS = {"training_step": "train_step", "validation_step": "eval_step", "predict_step": "inference_step"}
THEIRS["configure_optimizers"] = "build_optimizer"


@pytest.mark.parametrize(("theirs", "ours"), THEIRS.items())
def test_methods_by_the_names_of_other_libraries(tmp_path: Path, theirs: str, ours: str) -> None:
    for base in (everstep.Task, everstep.torch.Task):
        message = rf"Wrong\.{theirs} is not called by a Trainer; name it {ours}$"
        refused(tmp_path, but(base, **{theirs: None}), ConfigError, message)
    both = but(TinyTask, **{theirs: None, ours: lambda self, given: given})
    assert trainer(tmp_path, both).task is both


# ------------------------------------------------------------------------------ what steps return
PLACES = ("train_step", "train_loop_end", "eval_step", "eval_end")


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(("value", "message"), [
    ("low", r"metric 'x' is 'low', a str: collect one real number"),
    (torch.ones(2), r"metric 'x': .*shape \(2,\).*\.mean\(\)"),
    (torch.ones((), dtype=torch.complex64), r"metric 'x': .*take the real part if it is complex"),
    (np.ones(3), r"metric 'x': .*shape \(3,\).*\.mean\(\)"),
    (None, r"metric 'x' is None, a NoneType"),
])  # fmt: skip
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


def test_an_evaluation_of_what_is_no_number(tmp_path: Path) -> None:
    def run(value: Any, **how: Any) -> pytest.ExceptionInfo[MetricError]:
        services, task = [everstep.Evaluate("valid", **how)], but(TinyTask, eval_step={"loss": value})
        with pytest.raises(MetricError) as raised:
            trainer(tmp_path, task, services=services).run_training()
        return raised

    for value in (None, 1j, 10**400):
        run(value, stats={"loss": ["q50"]}).match("metric 'loss'")
    run(1.0, agg_func=lambda results: 3).match(r"Evaluate\.agg_func returned 3; return a mapping")
    assert "write that method; or for Evaluate's stats=" in str(run(np.ones(2)).value.__notes__)


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


def optimizers(change: Any, **more: Any) -> Any:
    """A task with another optimizer than Fit's, made of that one."""
    return but(Fit, build_optimizer=lambda self, model: change(Fit.build_optimizer(self, model)), **more)


def twice(optimizer: Any) -> Any:
    return {"a": optimizer, "b": optimizer}


@torch.enable_grad()
def trains(task: Any, batch: Any) -> Any:
    return task.train_step(batch)


def with_scheduler(kind: Any) -> Any:
    return but(Fit, build_scheduler=lambda self, optimizer: kind(optimizer))


TASKS: list[tuple[type[EverstepError], str, Callable[[], Any]]] = [
    *((StateError, message, partial(without, part)) for part, message in LACKS.items()),
    *((MetricError, message, partial(but, Fit, forward=lambda *_, r=r: r)) for message, r in NO_LOSS.items()),
    (StateError, r"SGD that steps 2 of the state's arrays .* is not part of", Second),
    (EverstepError, "no optimizer of the state made an update", lambda: but(Fit, train_step=Fit.forward)),
    (ConfigError, r"Wrong\.build_optimizer returned a list", lambda: optimizers(lambda one: [one, "more"])),
    (UsageError, r"stepped while stream 'valid' was evaluated", lambda: but(Fit, eval_step=trains)),
    (UsageError, r"Wrong\.next_eval_inputs returned a int; return \(inputs, logs\)",
     lambda: but(Fit, next_eval_inputs=3)),
    (ConfigError, r"return a torch\.nn\.Module from build_model", lambda: but(everstep.torch.Task)),
    (ConfigError, "Bare has no forward; give it one", Bare),
    (ConfigError, "optimizer of Wrong is None: return one", lambda: optimizers(lambda one: None)),
    (ConfigError, "Task has no train_step; give the class one", everstep.Task),
    (ConfigError, r"derived from everstep\.Task", object),
    (ConfigError, r"'cuda:99' cannot be used here \(.*\).* or \"cpu\"", lambda: Fit(device="cuda:99")),
    (ConfigError, r'scheduler_interval = "epoch"', lambda: with_scheduler(partial(StepLR, step_size=3))),
    (ConfigError, r"services\.Plateau", lambda: with_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau)),
    (ConfigError, r"Wrong: .* cannot be used with clip and accumulate",
     lambda: optimizers(twice, __init__=lambda me: Fit.__init__(me, clip=Clip(norm=1.0), accumulate=2))),
    (ConfigError, "write a train_step that steps yours", lambda: optimizers(twice)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "make"), TASKS)
def test_a_task_that_cannot_train(tmp_path: Path, error: Any, message: str, make: Callable[[], Any]) -> None:
    refused(tmp_path, make(), error, message)


def counting(where: str) -> Any:
    """A task that counts in the attribute that has the number of its epoch."""

    def count(self: Any) -> None:
        self.epoch += 1

    return but(TinyTask, **{where: count})


def ran(task: Any = None, **evaluate: Any) -> None:
    services = [everstep.Evaluate("valid", **evaluate)] if evaluate else []
    trainer(Path("ran"), task, services=services).run_training()


BOTH = [everstep.Evaluate("valid"), everstep.Evaluate("valid", name="a")]
OPTIONS: list[tuple[Any, str]] = [
    (lambda: ran(counting("train_loop_begin")), "Wrong has set its attribute epoch to 2 in epoch 1"),
    (lambda: ran(counting("train_loop_end")), "Wrong has set its attribute epoch to 2 in epoch 1"),
    (lambda: ran(but(TinyTask, epoch=property(len))), r"Wrong\.epoch is a property that no Trainer can set"),
    (lambda: ran(stats={"loss": ["quantile"]}), "there is no statistic 'quantile'"),
    (lambda: ran(stats={"los": ["std"]}), "'los', which eval_step did not return; did you mean 'loss'"),
    (lambda: trainer(Path("run"), services=BOTH), r"'valid' and 'a' both evaluate stream 'valid'.* \| "),
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
    (lambda: everstep.TrainLoop("loop", services=BOTH[:1]).__enter__(), "give the service to a Trainer's"),
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


APART = "keeps its own place in the data and would lose it; give a second one"
KEEPING: tuple[Any, ...] = (Own, lambda: ((np.array([i]),) for i in range(5)))
LASTING = partial(torch.utils.data.DataLoader, [1.0], num_workers=1, persistent_workers=True)


@pytest.mark.parametrize("make", [*KEEPING, LASTING])
def test_what_keeps_its_own_place_is_not_trained_on_and_evaluated_at_once(tmp_path: Path, make: Any) -> None:
    data = make()
    for evaluated in (data, everstep.data.checked(data)):
        with pytest.raises(ConfigError, match=APART):
            trainer(tmp_path / "run", streams={"train": data, "valid": evaluated})


USES: list[tuple[type[EverstepError], str, Callable[..., object]]] = [
    (ConfigError, APART, lambda door, data, loop: door.epoch(["extra"], [data])),
    (ConfigError, APART, lambda door, data, loop: door.epoch([data], ["extra"])),
    (ConfigError, APART, lambda door, data, loop: [door.epoch("extra"), next(door.predict(data))]),
    (ConfigError, APART, lambda door, data, loop: [door.evaluate("extra", 1), door.epoch([data])]),
    (ConfigError, "two .* called 'train2'", lambda door, *_: door.epoch(["train", [(1,)], "train2"])),
    (ConfigError, "an epoch are a .*; give a list", lambda door, data, loop: door.epoch(data)),
    (ConfigError, "stream name 'valid/more': give a", lambda door, *_: door.epoch({}, {"valid/more": [1]})),
    (UsageError, "call it before", lambda door, *_: door.smoke_test()),
    (UsageError, "call it in another process", lambda door, *_: door.watch()),
    (UsageError, "leave its with block before", lambda door, *_: door.open().__enter__()),
    (MetricError, "of an evaluation and of the", lambda door, _, loop: own(door, loop)),
    (UsageError, "observer", lambda door, _, loop: [loop.on(Moment.AFTER_EVAL_STEP, stop), door.epoch()]),
]


def own(door: Any, loop: Any) -> None:
    loop.collect_metrics({"valid/loss": 1.0})
    door.epoch("train", "valid")


def stop(boundary: Any) -> everstep.Outcome:
    return everstep.Outcome(actions=(everstep.Stop("me too"),))


@pytest.mark.parametrize("make", KEEPING)
def test_what_a_program_of_ones_own_may_not_do_in_its_loop(tmp_path: Path, make: Any) -> None:
    for number, (error, message, use) in enumerate(USES):
        data = make()
        door = trainer(tmp_path / str(number), streams={"extra": data, "train2": [1]})
        with pytest.raises(error, match=message):
            in_epochs(door, partial(use, door, data))
