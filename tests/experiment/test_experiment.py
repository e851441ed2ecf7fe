"""`Experiment`: nothing at construction, every schedule, and what to do where a config changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_experiment
import torch
from tiny_experiment import TinyTask, noise, numbers, write

import everstep
from everstep.checkpoint import Store, read_checkpoint
from everstep.errors import ChangedError, ConfigError, DataError, NoCheckpointError, RestoreError, UsageError
from everstep.experiment import Call, ExperimentConfig, open_config, open_run, resolve
from everstep.experiment.config import TrainerConfig
from everstep.experiment.experiment import SCHEDULES
from everstep.experiment.open_experiment import Configured
from everstep.experiment.predictions import write as write_predictions
from everstep.record import RunDir, RunJournal
from everstep.supervisor.settings import LoopOptions


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path)


def experiment(**arguments: Any) -> everstep.Experiment:
    arguments = {"max_epoch": 2, "seed": 7, "skip_check": True, **arguments}
    return everstep.Experiment(TinyTask, lambda: numbers(8, shuffle=True), numbers, "runs/a", **arguments)


def opened(file: Path, *overrides: str, **arguments: Any) -> Configured:
    return open_config(file, overrides, skip_check=True, **arguments)


def evaluated_at(run_dir: str) -> list[int]:
    return RunJournal(run_dir).series("valid/loss", "eval/valid")[0]


# -------------------------------------------------------------------------------------- when
def test_nothing_is_called_at_construction() -> None:
    made: list[str] = []

    def fails() -> Any:
        made.append("called")
        raise AssertionError

    everstep.Experiment(fails, fails, {"valid": fails}, "runs/a", services=[fails], seed=7)
    everstep.Experiment("nowhere:Task", "nowhere:train")
    assert not made and not Path("runs").exists()


def test_what_is_made_follows_from_the_seed() -> None:
    made = [experiment(seed=seed, skip_check=True).trainer for seed in (7, 7, 8)]
    first, again, other = (trainer.task.model.tolist() for trainer in made)
    assert first == again != other
    drawn = [everstep.Experiment(TinyTask, noise, seed=7).stream("train") for _ in range(2)]
    assert [list(b[0]) for b in drawn[0]] == [list(b[0]) for b in drawn[1]]
    both = everstep.Experiment(TinyTask, noise, noise, seed=7)
    train, valid = ([list(b[0]) for b in both.stream(name)] for name in ("train", "valid"))
    assert train == [list(b[0]) for b in drawn[0]] != valid


# --------------------------------------------------------------------------------- schedules
def test_every_schedule_has_a_name() -> None:
    assert all(callable(getattr(everstep.Experiment, name)) for name in SCHEDULES)
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "experiment.md").read_text()
    table = guide.partition("| schedule |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)", table, re.MULTILINE)) == sorted(SCHEDULES)


def test_train_is_the_trainer_and_goes_on_and_evaluate_needs_a_checkpoint() -> None:
    experiment().run("test")
    with pytest.raises(NoCheckpointError):
        experiment().evaluate()
    assert not Path("runs").exists()
    assert experiment(max_epoch=1).train().ending.step == 4
    assert experiment().train().ending.resumed_from == "epoch-0001-step-00000004"
    streams = {"train": numbers(8, shuffle=True), "valid": numbers()}
    other = everstep.Trainer(TinyTask(), streams, "runs/b", max_epoch=2, seed=7)
    assert experiment().train().ending.digest == other.run_training().digest
    found = experiment().evaluate().metrics
    assert found["valid/loss"] == RunJournal("runs/a").series("valid/loss", "eval/valid")[1][-1]


@pytest.mark.parametrize(
    ("frequency", "steps"), [(None, [4, 8]), (3, [3, 6, 8]), (0, [8])], ids=["own", "every 3", "at the end"]
)
def test_train_and_evaluate_evaluates_no_checkpoint_twice(frequency: int | None, steps: list[int]) -> None:
    result = experiment().run("train_and_evaluate", min_eval_frequency=frequency)
    apart = [found.step for found in everstep.runs.evaluations("runs/a")]
    assert evaluated_at("runs/a") == steps and result.metrics.keys() == {"valid/loss"}
    assert experiment().train_and_evaluate(frequency).metrics == result.metrics
    assert apart == [] == everstep.runs.evaluations("runs/a"), "an earlier start's loop has found it"


def test_continuous_train_and_eval_goes_on_with_the_data() -> None:
    interrupted, plain = experiment(), experiment()
    assert interrupted.continuous_train_and_eval(3).ending is not None
    assert evaluated_at("runs/a") == [3, 6, 8]
    assert not everstep.runs.evaluations("runs/a")  # the end was evaluated in the loop
    plain.run_dir = "runs/b"
    plain.train()
    assert interrupted.trainer.task.model.tolist() == plain.trainer.task.model.tolist()


# --------------------------------------------------------------------------- from a config file
def test_the_recorded_config_makes_the_run_again(file: Path) -> None:
    first = opened(file, "optimizer.lr=1e-2", run_dir="runs/first").train().ending
    recorded = open_run("runs/first", skip_check=True)
    tree = recorded.tree
    assert tree["optimizer"] == {"call": "tiny_experiment:Momentum", "lr": 0.01, "decay": 0.9}
    assert recorded._code == (file.parent,)
    assert resolve(ExperimentConfig, base=tree).tree == tree
    Path("again.yaml").write_text(everstep.experiment.as_yaml(tree))
    assert opened(Path("again.yaml"), run_dir="runs/again").train().ending.digest == first.digest
    assert open_run("runs/first", ["trainer.max_epoch=4"], skip_check=True).train().ending.step == 16


def test_a_config_has_the_options_of_a_trainer_that_a_file_can_say(file: Path, capsys: Any) -> None:
    python_only = {"clock", "config", "config_free", "formatter", "init_fn", "local_init_fn", "ready", "seed"}
    of_one_start = {"on_change", "resume"}
    keys = {each.name for each in fields(TrainerConfig)}
    assert keys == LoopOptions.__annotations__.keys() - python_only - of_one_start
    options = ["uneven=drop", "data_ranks=1", "groups=[w]", "show_eta=false"]
    made = opened(file, *(f"trainer.{option}" for option in options))
    assert "ETA" not in (made.train(), capsys.readouterr())[1].out
    assert made.trainer._options["uneven"] == "drop"
    assert "ETA" in (opened(file, run_dir="runs/b").train(), capsys.readouterr())[1].out
    opened(file, "trainer.groups=[momentum]", "trainer.uneven=drop", "trainer.data_ranks=1").train()
    with pytest.raises(ChangedError, match=r"config\.trainer\.uneven"):
        opened(file, "trainer.max_epoch=4").train()


class Tagged(TinyTask):
    """A task of which a program names the run by its time."""

    def __init__(self, tag: str) -> None:
        super().__init__()


class Line(everstep.torch.Task):
    """A task whose model, optimizer and scheduler the config has."""

    def forward(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0].reshape(-1, 1).to(torch.float32)).square().mean()}


def tensors() -> Any:
    return everstep.data.arrays(torch.arange(8.0), batch_size=2)


class Wide(Line):
    """A task with arguments of its own, which hands on the others."""

    def __init__(self, width: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.width = width

    def build_model(self) -> Any:
        return torch.nn.Linear(1, self.width)

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("task", ["Line", "Wide"])
def test_every_option_of_a_torch_task_may_be_the_configs(tmp_path: Path, task: str) -> None:
    options = (
        "device: cpu, autocast: bfloat16, accumulate: 2, clip: {global_norm: 1}, ema: 0.9, "
        "trainable: weight, compile: {backend: eager}, scheduler_interval: update"
    )
    file = tmp_path / "line.yaml"
    file.write_text(
        f"""
task: {{call: '{__name__}:{task}', {options}}}
model: {{call: torch.nn:Linear, in_features: 1, out_features: 1}}
optimizer: {{call: torch.optim:AdamW, lr: 0.5, betas: [0.5, 0.9]}}
scheduler: {{call: torch.optim.lr_scheduler:StepLR, step_size: 1, gamma: 0.5}}
streams: {{train: '{__name__}:tensors', valid: '{__name__}:tensors'}}
services: [{{Evaluate: {{stats: {{loss: [std]}}, every: {{at: [2, 4]}}}}}}]
trainer: {{max_step: 4}}
seed: 7
"""
    )
    made = opened(file)
    made.train()
    journal = RunJournal("runs/line")
    assert {"window_loss", "grad_norm"} <= {row.name for row in journal.rows()}
    assert journal.series("valid/loss/std", "eval/valid")[0] == [2, 4]
    found = made.trainer.task
    (group,) = found.optimizer.param_groups
    assert (group["initial_lr"], group["lr"], group["betas"]) == (0.5, 0.125, (0.5, 0.9))
    with found.precision():
        assert found.model(torch.ones(1, 1)).dtype is torch.bfloat16
    assert not found.model.bias.requires_grad and found.device == torch.device("cpu")
    assert {"model", "optimizer", "ema"} <= found.state().keys()
    for wrong, said in {
        "autocast=half": "task.autocast: 'half' is a string; give 'bfloat16' or 'float16'",
        "clip={global_nrm: 1}": "task.clip.global_nrm: unknown key 'global_nrm'; did you mean 'global_norm'",
        "clip={norm: -1}": "norm=-1.0: give a positive number",
        "accumulate=two": "task.accumulate: 'two' is a string; give an integer",
        "compile=3": "task.compile: 3 is an integer; give",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            opened(file, f"task.{wrong}")


def test_weights_to_start_from(file: Path) -> None:
    opened(file, run_dir="runs/first").train()
    for given in ("runs/first", "{path: runs/first, include: ^w$, on_missing: skip}"):
        warm = opened(file, f"trainer.init_from={given}", "trainer.max_epoch=null", run_dir="runs/warm")
        with warm.trainer.open() as loop:
            assert warm.trainer.task.model.tolist() == everstep_weights("runs/first") and loop.step == 0
        shutil.rmtree("runs/warm")


def test_the_best_of_a_project_is_found_and_loaded(file: Path) -> None:
    """By metric and by config; "best valid/loss of project X"."""
    services = "services=[Evaluate, {Best: {metric: valid/loss, mode: min}}]"
    for name, project, scale in (("a", "x", 1.0), ("b", "x", 2.0), ("c", "y", 2.0)):
        change = (services, f"project={project}", f"task.scale={scale}", "trainer.max_epoch=1")
        opened(file, *change, run_dir=f"runs/{name}").train()
    runs = {run["name"]: run["path"] for run in everstep.query("runs", {"config.project": "x"}, index="runs")}
    assert sorted(Path(path).name for path in runs.values()) == ["a", "b"]
    best = min((everstep.runs.best(run)["valid/loss"] for run in runs.values()), key=lambda best: best.value)
    where = {"name": "valid/loss", "run": {"$in": [*runs]}}
    (found,) = everstep.query("evaluations", where, sort="value", limit=1, index="runs")
    assert (found["value"], found["step"]) == (best.value, best.step) and best.path is not None
    assert everstep_weights(best.path) == everstep_weights(f"{runs[found['run']]}/best/valid/loss")


def everstep_weights(run_dir: str) -> list[float]:
    state = {"w": np.zeros(3)}
    everstep.load(run_dir, state)
    weights: list[float] = state["w"].tolist()
    return weights


class Deaf(TinyTask):
    """A task whose own `build` takes nothing."""

    def build(self) -> None:  # type: ignore[override]
        super().build()


class Early(TinyTask):
    """A task with an optimizer, which the config's would not replace."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = self.build_optimizer(self.build_model())


def refuses(parameters: Any, **options: Any) -> Any:
    raise TypeError("unexpected keyword")


def test_an_error_of_what_a_config_calls_names_the_call(file: Path) -> None:
    with pytest.raises(TypeError) as raised:
        _ = opened(file, f"optimizer={{call: {__name__}:refuses, lrr: 1}}").trainer
    assert raised.value.__notes__ == [f"in the config's call of {__name__}:refuses with lrr"]


def test_what_makes_the_optimizer_is_an_argument_of_the_tasks_build(file: Path) -> None:
    assert opened(file, f"task={__name__}:Deaf", "optimizer=null").trainer.task.optimizer.lr == 0.1
    task = opened(file, "optimizer.lr=0.3").trainer.task
    assert task.optimizer.lr == 0.3 and "build_optimizer" not in vars(task)  # nothing is put onto it


def bare(**given: Any) -> everstep.Experiment:
    return everstep.Experiment(**{"task": TinyTask, "train_stream_fn": numbers, **given})


def of_own_program(file: Path) -> None:
    everstep.Trainer(TinyTask(), {"train": numbers()}, "runs/own", max_step=1).run_training()
    open_run("runs/own")


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda file: bare(task=TinyTask()), "task is .*give a function that makes it"),
    (lambda file: bare(train_stream_fn=[1, 2]), r"stream 'train' is \[1, 2\]; give a function"),
    (lambda file: bare(max_epochs=3), "no argument 'max_epochs'; did you mean 'max_epoch'"),
    (lambda file: bare(seed=-1), "seed=-1: give an integer"),
    (lambda file: bare(strict_git=True, skip_check=True), "contradict each other"),
    (lambda file: experiment().run("trian"), "no schedule 'trian'; did you mean 'train'"),
    (
        lambda file: experiment().run("train_and_evaluate", min_eval_freq=3),
        "no argument 'min_eval_freq'; did you mean 'min_eval_frequency'",
    ),
    (lambda f: opened(f, "schedules={trian: {}}"), "there is no schedule 'trian'; did you mean 'train'"),
    (lambda f: opened(f, "schedules={test: {freq: 2}}").run("test"), "has no argument 'freq'"),
    (lambda file: opened(file, "streams={trian: 'builtins:dict'}"), "'train'.* is missing.*mean 'trian'"),
    (lambda file: opened(file, "trainer.init_from={pth: a}"), r"InitFrom\(\) has no argument 'pth'; did you"),
    (
        lambda file: opened(file, "scheduler={call: tiny_experiment:numbers}").trainer,
        "scheduler in the config: TinyTask has no build_scheduler",
    ),
    (lambda f: opened(f, f"task={__name__}:Deaf").trainer, r"no argument 'optimizer' of build\(\); leave"),
    (
        lambda f: opened(f, f"task={__name__}:Early").trainer,
        "optimizer in the config: Early has made one in __i",
    ),
    (lambda f: opened(f, "task=builtins:dict").trainer, "{} is not a Task"),
    (lambda f: opened(f, "services=[Interrupt]"), "no service 'Interrupt'"),
    (lambda f: opened(f, "services=[Stag]"), "no service 'Stag'; known: Best"),
    (
        lambda f: Call("torch.optim:AdamW", {"lr": torch.ones(1)}).completed(),
        r"tensor\(\[1.\]\) is nothing that",
    ),
    (of_own_program, "has no config of an experiment"),
]


def test_what_cannot_be_right_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match=r"is in no git repository.*commit and push first"):
        open_config(file, strict_git=True).train()
    assert not Path("runs").exists()
    for call, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            call(file)


# ------------------------------------------------------------------------------ a changed config
def test_a_changed_config_is_refused_with_a_table(file: Path) -> None:
    opened(file).train()
    with pytest.raises(ChangedError) as raised:
        opened(file, "optimizer.lr=0.2", "task.scale=2.0", "trainer.max_epoch=4").train()
    lines = raised.value.differences.splitlines()[1:]
    changed = ["config.task.scale: stored 1.0, given 2.0", "config.optimizer.lr: stored 0.1, given 0.2"]
    assert lines == [f"  {each}" for each in changed]


def test_a_whole_number_for_a_float_is_that_float(file: Path) -> None:
    opened(file, "optimizer.lr=1", "trainer.max_epoch=1").train()
    assert opened(file, "optimizer.lr=1.0").train().ending.step == 12


def test_a_check_takes_the_time_in_a_name_as_a_start_does(file: Path) -> None:
    now, before = datetime.now(), datetime.now() - timedelta(hours=5)
    tags = [f"task={{call: '{__name__}:Tagged', tag: {at:run-%Y%m%d-%H%M}}}" for at in (before, now)]
    opened(file, tags[0], "trainer.max_epoch=1").train()
    assert "task.tag" in opened(file, tags[1]).check("train")
    assert opened(file, tags[1]).train().ending.step == 12


def test_a_changed_default_is_a_change_if_recorded(file: Path, capsys: Any, monkeypatch: Any) -> None:
    with monkeypatch.context() as before:
        before.setattr(Call, "completed", lambda self, *_: self)  # as runs were recorded before
        opened(file, "trainer.max_epoch=1").train()
    assert "decay" not in RunJournal("runs/tiny").facts()["config"]["optimizer"]
    capsys.readouterr()
    opened(file, "trainer.max_epoch=2").train()
    said = capsys.readouterr().out
    assert "used as given: config.trainer.max_epoch: stored 1, given 2\n" in said
    assert opened(file, on_change="fork").run_dir == Path("runs/tiny")
    monkeypatch.setattr(tiny_experiment.Momentum.__init__, "__defaults__", (0.1, 0.8))
    with pytest.raises(ChangedError, match=r"config\.optimizer\.decay: stored 0\.9, given 0\.8"):
        opened(file).train()
    assert open_run("runs/tiny", skip_check=True).trainer.task.optimizer.decay == 0.9


def test_keep_goes_on_with_the_stored_config(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(file).train()
    kept = opened(file, "optimizer.lr=0.2", "trainer.max_epoch=4", on_change="keep").train().ending
    assert "kept as stored: config.optimizer.lr: stored 0.1, given 0.2" in capsys.readouterr().out
    undisturbed = opened(file, "trainer.max_epoch=4", run_dir="runs/other").train().ending
    assert kept.step == 16 and kept.digest == undisturbed.digest


def test_override_goes_on_with_the_given_config(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = opened(file).train().ending
    # a start without a step leaves the record as it is
    again = opened(file, "optimizer.lr=0.2", "seed=8", on_change="override").train().ending
    said = capsys.readouterr().out
    assert again.digest == first.digest and "neither used nor recorded:\n" in said
    assert "config.optimizer.lr: stored 0.1, given 0.2" in said and "used as given" not in said
    facts = RunJournal("runs/tiny").facts()
    assert (facts["config"]["optimizer"]["lr"], facts["config"]["seed"], facts["seed"]) == (0.1, 7, 7)
    changed = ["optimizer.lr=0.2", "trainer.max_epoch=4"]
    now = opened(file, *changed, on_change="override").train().ending
    assert "config.optimizer.lr: stored 0.1, given 0.2" in capsys.readouterr().out
    assert now.step == 16 and now.digest != first.digest
    assert opened(file, *changed).train().ending.digest == now.digest  # it is the run's now


def test_what_a_start_changed_that_saved_nothing_is_not_the_runs(file: Path, capsys: Any) -> None:
    first = opened(file, "trainer.max_epoch=1").train().ending
    changed = opened(file, "optimizer.lr=0.2", "project=p", on_change="override")
    changed.trainer.task.train_step = None
    with pytest.raises(TypeError):
        changed.train()
    assert RunJournal("runs/tiny").facts()["config"]["optimizer"]["lr"] == 0.2
    found = open_run("runs/tiny", ["trainer.max_epoch=3"], skip_check=True)
    assert (
        "what it changed is left out: config.optimizer.lr: stored 0.1, given 0.2" in capsys.readouterr().err
    )
    assert (found.config.optimizer.arguments["lr"], found.config.project) == (0.1, None)
    assert found.train().ending.resumed_from is not None
    assert first.step == 4 and open_run("runs/tiny").tree == found.tree


def test_fork_leaves_the_run_alone_and_is_one_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = opened(file, "trainer.max_epoch=1").train().ending
    assert opened(file, "trainer.max_epoch=1", on_change="fork").run_dir == Path("runs/tiny")
    changed = ["optimizer.lr=0.2", "trainer.max_epoch=2"]
    experiment = opened(file, *changed, on_change="fork")
    forked = experiment.train().ending
    assert experiment.train().ending.digest == forked.digest
    said = capsys.readouterr().out
    assert said.count("forked from") == 1
    assert "into runs/tiny-fork-1: config.optimizer.lr: stored 0.1, given 0.2" in said
    facts = RunDir.open("runs/tiny-fork-1", create=False).facts
    assert facts["parent"]["run"] == RunDir.open("runs/tiny", create=False).id
    assert facts["parent"]["checkpoint"] == "epoch-0001-step-00000004" and forked.step == 8
    start, *_ = RunJournal("runs/tiny-fork-1").events("segment")
    assert start.data["facts"]["parent"] == facts["parent"]
    again = opened(file, *changed, on_change="fork").train().ending  # the same line goes on with the fork
    assert again.digest == forked.digest and not Path("runs/tiny-fork-2").exists()
    assert open_run("runs/tiny-fork-1", skip_check=True).train().ending.digest == forked.digest
    other = opened(file, "optimizer.lr=0.3", "trainer.max_epoch=2", on_change="fork").train().ending
    assert Path("runs/tiny-fork-2").exists() and other.digest != forked.digest
    assert opened(file, "trainer.max_epoch=1").train().ending.digest == parent.digest


def test_what_controls_the_training_is_kept_or_forked_too(file: Path, capsys: Any) -> None:
    stopper = "services=[Evaluate, {{EarlyStop: {{metric: valid/loss, patience: {}}}}}]"
    opened(file, stopper.format(5)).train()
    with pytest.raises(ChangedError, match="patience"):
        opened(file, stopper.format(6)).train()
    kept = opened(file, stopper.format(6).replace("[", "[{Throughput: {samples: 2}}, "), on_change="keep")
    kept.train()
    assert "services.0.EarlyStop.patience: stored 5, given 6" in capsys.readouterr().out
    assert [each.name for each in kept.config.services] == ["Evaluate", "EarlyStop"]
    assert kept.config.services[-1].arguments["patience"] == 5
    forked = opened(file, stopper.format(6), "trainer.max_epoch=4", on_change="fork")
    assert forked.train().ending.step == 16 and str(forked.run_dir) == "runs/tiny-fork-1"


FORKED = ("optimizer.lr=0.2", "trainer.max_epoch=2")


def fork_made(file: Path) -> Path:
    """Train an epoch, and make the directory of a fork of it, and nothing more; where the fork begins."""
    opened(file, "trainer.max_epoch=1").train()
    opened(file, *FORKED, on_change="fork")._to_train()
    return Path("runs/tiny/checkpoints/epoch-0001-step-00000004")


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_fork_that_was_killed_at_once_begins_again(file: Path, copied: bool, by_name: bool) -> None:
    """Also where the copy of its parent's checkpoint was committed, and nothing of its own."""
    parent, fork = fork_made(file), Path("runs/tiny-fork-1")
    if copied:
        store = Store(fork, 1, print, RunDir.open(fork, create=False).id)
        store.adopt(read_checkpoint(parent), journal=None, rollbacks=[])
    again: dict[str, Any] = {"run_dir": fork} if by_name else {"on_change": "fork"}
    resumed = opened(file, *FORKED, **again).train().ending
    assert (resumed.resumed_from, resumed.step) == (parent.name, 8)
    assert opened(file, *FORKED, **again).train().ending.digest == resumed.digest
    assert not Path("runs/tiny-fork-2").exists()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_fork_that_saved_nothing_keeps_its_beginning(file: Path, deleted: bool) -> None:
    parent = fork_made(file)
    opened(file, "trainer.max_epoch=2").train()
    if deleted:
        shutil.rmtree(parent)
    again = opened(file, *FORKED, on_change="fork")
    again.train()
    began = RunDir.open(again.run_dir, create=False).facts["parent"]["checkpoint"]
    wanted = "epoch-0002-step-00000008" if deleted else parent.name
    assert (Path(again.run_dir).name, began) == (f"tiny-fork-{1 + deleted}", wanted)
    first, *_ = RunJournal(again.run_dir).events("segment")
    assert began in str(first.data)


def test_a_fork_goes_on_inside_the_epoch_that_a_limit_cut_short(file: Path) -> None:
    services = "services=[{Checkpoints: {every: {steps: 1}, keep_last: 9}}]"
    opened(file, services, "trainer.max_step=6").train()
    assert Path("runs/tiny/checkpoints/epoch-0002-step-00000006").exists()
    forked = opened(file, "optimizer.lr=0.2", services, on_change="fork").train().ending
    assert (forked.step, forked.resumed_from) == (12, "step-00000005")


def test_a_fork_whose_beginning_is_gone_says_how_to_fork_again(file: Path) -> None:
    shutil.rmtree(fork_made(file))
    with pytest.raises(NoCheckpointError, match=r"saved nothing, and the checkpoint .* is gone.*fork again"):
        opened(file, *FORKED, run_dir="runs/tiny-fork-1")


def test_the_config_is_compared_before_the_shapes_and_what_fits_nothing_is_not_forked(file: Path) -> None:
    opened(file, "trainer.max_epoch=1").train()
    wide = "task.width=4"
    with pytest.raises(ChangedError, match=r"config\.task\.width: stored 3, given 4") as raised:
        opened(file, wide).train()
    assert isinstance(raised.value.__cause__, RestoreError)
    for on_change in ("override", "fork"):
        with pytest.raises(RestoreError, match=r"reshaped .*w"):
            opened(file, wide, on_change=on_change).train()
    assert [path.name for path in Path("runs").iterdir() if path.is_dir()] == ["tiny"]


def test_a_check_says_what_a_training_would_and_leaves_nothing(file: Path) -> None:
    assert opened(file, "optimizer.lr=0.2").check("train") == "" and not Path("runs").exists()
    opened(file, "trainer.max_epoch=1").train()
    before = sorted(Path("runs").rglob("*"))
    with pytest.raises(ChangedError, match=r"config\.optimizer\.lr: stored 0\.1, given 0\.2"):
        opened(file, "optimizer.lr=0.2").check("train")
    said = opened(file, "optimizer.lr=0.2", on_change="override").check("train")
    assert "used as given:\n" in said and "config.trainer.max_epoch: stored 1, given 3" in said
    assert "kept as stored" in opened(file, "optimizer.lr=0.2", on_change="keep").check("train")
    assert "into runs/tiny-fork-1" in opened(file, "optimizer.lr=0.2", on_change="fork").check("train")
    assert opened(file, "optimizer.lr=0.2").check("evaluate") == ""
    assert sorted(Path("runs").rglob("*")) == before
    model = "model={call: torch.nn:Linear, in_features: 1, out_features: 1}"
    line = opened(file, f"task={__name__}:Line", model, "optimizer=null", run_dir="runs/line")
    for checked in (lambda: line.check("train"), line.train):
        with pytest.raises(ConfigError, match="optimizer of Line is None"):
            checked()
    assert not Path("runs/line").exists()


# ----------------------------------------------------------------------- predictions as files
NAMES = ("file", "allow_pickle", "args", "a b")


def test_predictions_of_any_name_are_read_back(tmp_path: Path) -> None:
    batches = [{name: np.arange(2.0) + at for at, name in enumerate(NAMES)} for _ in range(2)]
    for name in ("found.npz", "found.jsonl"):
        assert write_predictions(tmp_path / name, batches) == 4
    with np.load(tmp_path / "found.npz", allow_pickle=False) as arrays:
        found = {name: arrays[name].tolist() for name in arrays.files}
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    expected = {name: [at, at + 1.0] * 2 for at, name in enumerate(NAMES)}
    assert found == {name: [line[name] for line in lines] for name in lines[0]} == expected


def test_lines_are_strict_json(tmp_path: Path) -> None:
    write_predictions(tmp_path / "a.jsonl", [np.array([[0.1, np.nan], [np.inf, -np.inf]], np.float32)])
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == [[float(np.float32(0.1)), "nan"], ["inf", "-inf"]]


OBJECTS = np.array([{}, None], object)


WRONG: list[tuple[str, list[Any], str]] = [
    ("a.npz", [], "no batch"),
    ("a.npz", [{"a": [1]}, {"a": [1], "b": [1]}], r"batch 2 has the predictions \['a', 'b'\]"),
    ("a.npz", [{"a": [1], "b": [1]}, {"a": [1]}], r"batch 2 .* and the first batch \['a', 'b'\]"),
    ("a.npz", [{"a": [1], "b": [1, 2]}], "do not fit together"),
    ("a.jsonl", [{"a": [1], "b": [1, 2]}], "do not fit together"),
    ("a.npz", [[[1]], [1]], "do not fit together"),
    ("a.npy", [{"a": [1], "b": [1]}], "named a, b; give a .npz or .jsonl"),
    ("a.npz", [OBJECTS], "'predictions' is object, no type of .npz"),
    ("a.npy", [OBJECTS], "'predictions' is object"),
    ("a.jsonl", [np.array([1j])], "'predictions' is complex128, no type of .jsonl"),
]


def test_what_a_file_cannot_hold_is_said(tmp_path: Path) -> None:
    for name, batches, said in WRONG:
        with pytest.raises(DataError, match=said):
            write_predictions(tmp_path / name, batches)
    assert not list(tmp_path.iterdir())
