"""`everstep sweep` and `export`: settings in runs of their own; and what a run has saved, in files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import as_json, everstep, values
from tiny_experiment import write

import warm
from everstep.errors import ConfigError
from everstep.experiment import as_yaml, open_run
from everstep.experiment.config import layered
from everstep.experiment.sweep import trials
from everstep.record import RunDir, RunJournal, evaluations
from waiting import until

SMALL = ("tiny.yaml", "trainer.max_epoch=1")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with tiny.yaml and its module."""
    write(tmp_path)
    return tmp_path


def runs(here: Path) -> set[str]:
    return {path.name for path in (here / "runs").iterdir() if path.is_dir()}


@pytest.mark.campaign("long")
def test_a_grid_in_parallel_and_every_value_with_its_type(here: Path) -> None:
    line = ("sweep", *SMALL, "--grid", "optimizer.lr=[0.1, 2.0]", "--grid", "group=['1', a b]", "-j", "2")
    rows = as_json(*line, cwd=here)
    assert [row["status"] for row in rows] == ["finished"] * 4
    assert {Path(row["run"]).name for row in rows} == runs(here)
    for row in rows:
        tree = open_run(here / row["run"]).tree
        given, expected = (tree["optimizer"]["lr"], tree["group"]), tuple(row["settings"].values())
        assert given == expected and [type(value) for value in given] == [float, str]
        assert RunJournal(here / row["run"]).ended() is not None
    assert len(as_json("runs", "config.optimizer.lr=0.1", cwd=here)) == 2
    assert len(as_json("runs", "sweep=tiny", cwd=here)) == 4


def test_a_run_is_named_by_its_settings_and_is_that_of_train(here: Path) -> None:
    said, beside = everstep("sweep", *SMALL, "--grid", "optimizer.lr=[0.1]", "--grid", "seed=[7]", cwd=here)
    assert beside == "[1/1] runs/tiny-optimizer.lr-0.1-seed-7: finished\n"
    assert said.splitlines()[0].split() == ["run", "optimizer.lr", "seed", "status"]
    everstep("train", *SMALL, "optimizer.lr=0.1", cwd=here)
    assert values(here / "runs" / "tiny-optimizer.lr-0.1-seed-7") == values(here / "runs" / "tiny")


def test_a_schedule_that_evaluates_has_work_to_do_in_finished_runs(here: Path) -> None:
    line = ("sweep", *SMALL, "--grid", "seed=[7]")
    everstep(*line, cwd=here)
    assert everstep(*line, cwd=here)[1] == "[1/1] runs/tiny-seed-7: finished, before this sweep\n"
    _, beside = everstep(*line, "--schedule", "evaluate", cwd=here)
    assert beside == "[1/1] runs/tiny-seed-7: finished\n"
    assert len(evaluations(here / "runs" / "tiny-seed-7")) == 1


def test_a_divergence_is_reported_by_each_sweep_until_it_is_accepted(here: Path) -> None:
    text = (here / "tiny_experiment.py").read_text()
    assert text.count("self.scale *") == 1
    text = text.replace("self.scale *", "(1 + os.getpid()) * self.scale *")
    (here / "tiny_experiment.py").write_text(text)
    line = ("sweep", "tiny.yaml", "--grid", "seed=[7]")
    everstep(*line, cwd=here, status=1, SIGKILL_AT="6")  # two steps after a save: one at least is repeated
    for _ in range(2):
        assert everstep(*line, cwd=here, status=1)[0].splitlines()[1].split()[-1] == "diverged"
    (diverged,) = RunJournal(here / "runs" / "tiny-seed-7").divergences()
    everstep("accept", "runs/tiny-seed-7", "--divergence", str(diverged.data["step"]), cwd=here)
    assert everstep(*line, cwd=here)[0].splitlines()[1].split()[-1] == "finished"


@pytest.mark.campaign("long")
def test_draws_are_the_same_again_and_within_their_range(here: Path) -> None:
    draws = ("optimizer.lr={low: 1e-4, high: 1e-1, log: true}", "streams.train.count={low: 2, high: 4}")
    line = ["sweep", "tiny.yaml", "--dry-run", "-n", "20"]
    line += [word for draw in (*draws, "task.scale=[1, 2.5]") for word in ("--random", draw)]
    rows = as_json(*line, cwd=here)
    assert rows == as_json(*line, cwd=here) != as_json(*line, "--seed", "1", cwd=here)
    assert len(rows) == 20 and not (here / "runs").exists()
    drawn = [tuple(row["settings"].values()) for row in rows]
    assert all(1e-4 <= lr <= 1e-1 for lr, _, _ in drawn) and sum(lr < 1e-2 for lr, _, _ in drawn) > 5
    assert {count for _, count, _ in drawn} == {2, 3, 4} and {scale for _, _, scale in drawn} == {1, 2.5}
    assert {row["status"] for row in rows} == {"not run (--dry-run)"}
    each = as_json(*line[:5], "--grid", "seed=[1, 2]", "--random", "task.scale=[3]", cwd=here)
    assert [row["settings"] for row in each] == [{"seed": seed, "task.scale": 3} for seed in (1, 2)]


def test_settings_that_are_drawn_twice_are_trained_once(here: Path) -> None:
    line = ("sweep", "tiny.yaml", "--dry-run", "-n", "6", "--random", "streams.train.count={low: 2, high: 3}")
    said, beside = everstep(*line, cwd=here)
    assert beside == "note: 6 draws gave 2 different settings; each is trained once\n"
    assert len(said.splitlines()) == 3


@pytest.mark.campaign("long")
def test_a_failure_is_told_and_the_others_are_trained(here: Path) -> None:
    line = ("sweep", *SMALL, "--grid", "streams.valid.batch_size=[2, 0]", "--grid", "trainer.max_time=[60]")
    shown = as_json(*line, "--show", "valid/loss", cwd=here, status=1)
    assert shown[0]["valid/loss"] == RunJournal(here / shown[0]["run"]).series("valid/loss")[1][-1]
    assert shown[1]["valid/loss"] is None
    said, beside = everstep(*line, "--show", "valid/los", cwd=here, status=1)
    assert said.splitlines()[0].split()[-2:] == ["status", "valid/los"]
    assert "did you mean 'valid/loss'" in beside
    assert "tiny-streams.valid.batch_size-2-trainer.max_time-60: finished" in beside
    assert "-0-trainer.max_time-60: failed\n  " in beside and "batch_size" in beside.partition("failed\n")[2]
    assert "failed" in said and "finished" in said


@pytest.mark.campaign("long")
def test_what_was_cut_off_goes_on(here: Path) -> None:
    line = ("sweep", "tiny.yaml", "--grid", "seed=[7, 8]", "-j", "2")
    assert everstep(*line, cwd=here, status=1, SIGKILL_AT="5")[1].count("killed by SIGKILL") == 2
    everstep(*line, cwd=here)
    everstep("train", "tiny.yaml", cwd=here)
    assert values(here / "runs" / "tiny-seed-7") == values(here / "runs" / "tiny")
    before = runs(here)
    everstep("sweep", "tiny.yaml", "--grid", "seed=[8, 9]", cwd=here)
    assert runs(here) == before | {"tiny-seed-9"}


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [(signal.SIGINT, 130, "Ctrl-C (SIGINT)"), (signal.SIGTERM, 143, "SIGTERM"), (1, 129, "SIGHUP")],
)
def test_a_signal_stops_trainings_and_saves_them(here: Path, number: int, status: int, reason: str) -> None:
    slow = "import tiny_experiment, time, pathlib\n\nclass Slow(tiny_experiment.TinyTask):\n"
    slow += "    def train_step(self, batch):\n        pathlib.Path('training').touch()\n"
    slow += "        time.sleep(0.05)\n        return super().train_step(batch)\n"
    (here / "slow.py").write_text(slow)
    line = ["sweep", "tiny.yaml", "task.call=slow:Slow", "trainer.max_epoch=1000", "--grid", "seed=[1, 2]"]
    how: Any = {"cwd": here, "env": {**os.environ, "EVERSTEP_INDEX": ""}, "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    sweep = subprocess.Popen([sys.executable, "-m", "everstep", *line], **how)
    until(lambda: sweep.poll() is not None or (here / "training").exists())
    sweep.send_signal(number)
    told, beside = sweep.communicate()
    assert sweep.returncode == status and "Traceback" not in beside
    _, first, second = told.splitlines()
    assert f"stopped by {signal.Signals(number).name}" in first
    assert second.split()[:4] == ["runs/tiny-seed-2", "2", "not", "begun"]
    assert "note: the same command again resumes every run that is not finished\n" in beside
    assert runs(here) == {"tiny-seed-1"}
    told = as_json("show", "runs/tiny-seed-1", cwd=here)
    assert (told["status"], told["reason"]) == ("stopped", reason)
    short = [*line[:3], f"trainer.max_step={told['step'] + 2}", *line[4:-1], "seed=[1]"]
    everstep(*short, cwd=here)  # resumes where the trial was saved
    (run,) = as_json("runs", "--columns", "status,starts,step", cwd=here)
    assert run == {"status": "finished", "starts": 2, "step": told["step"] + 2}


@pytest.mark.parametrize(("grid", "draws", "said"), [
    (["seed=[]"], [], "is not a list of values"), (["seed"], [], "is not an override"),
    (["seed=[1"], [], "correct the YAML"), (["seed=[1]", "seed=[2]"], [], "seed varies twice"),
    (["seed=[1]"], ["seed=[2]"], "seed varies twice"), (["optimizer.lrr=[1]"], [], "did you mean 'lr'"),
    ([], ["seed={low: 1}"], "give a range"), ([], ["seed={low: 3, high: 2}"], "low < high"),
    ([], ["seed={low: 1, high: 2, log: 3}"], "low < high"),
    ([], ["optimizer.lr={low: 0, high: 2, log: true}"], "low > 0"),
    (["optimizer.lr=[0.1, .inf]"], [], "1: inf is not a number of JSON"),
])  # fmt: skip
def test_what_varies_is_checked(here: Path, grid: list[str], draws: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        trials([here / "tiny.yaml"], grid=grid, draws=draws)
    (here / "train.py").write_text("for x in range(3):\n    print(x)\n")
    with pytest.raises(ConfigError, match=r"train\.py is a Python script, .* takes a config: give"):
        trials([here / "train.py"], grid=["seed=[1]"], draws=[])


VALUES: list[Any] = [0.1, 1e-05, 1e22, 3, -2, True, None, {"a": [1.0]}]
VALUES += ["1", "a b", "adam", "True", "€\U0001f600\n", [1, "1"]]


def test_every_value_arrives_as_it_is_in_a_run_of_its_own(here: Path) -> None:
    grid = [f"profiles.other.x={as_yaml(VALUES)}"]
    found = trials([here / "tiny.yaml"], grid=grid)
    arrived = [layered((), trial.overrides).tree["profiles"]["other"]["x"] for trial in found]
    assert [(type(value), value) for value in arrived] == [(type(value), value) for value in VALUES]
    assert len({trial.run_dir for trial in found}) == len(VALUES)
    assert all(re.fullmatch(r"tiny-profiles\.other\.x-[\w.+-]+", trial.run_dir.name) for trial in found)


PROGRAM = """
import sys
import torch
import everstep
from everstep.services import Export, OnBest


class Task(everstep.torch.Task):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(self, batch):
        return {"loss": self.model(batch[0]).square().mean()}


torch.manual_seed(0)
data = everstep.data.arrays(torch.randn(12, 4), batch_size=4, shuffle=True)
services = [
    everstep.Evaluate("valid"),
    everstep.Best("valid/loss", "max"),
    Export(name="last"),
    Export(entry="ema", name="averaged"),
    Export(OnBest("valid/loss", "max"), keep=1, name="best"),
]
valid = everstep.data.arrays(torch.randn(8, 4), batch_size=4)
everstep.Trainer(
    Task(ema=0.9), {"train": data, "valid": valid}, "runs/small", services=services, seed=7, max_epoch=3
).run_training()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/small`, which has exports by the service."""
    folder = tmp_path_factory.mktemp("trained")
    warm.run([sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, check=True)
    return folder


def content(folder: Path) -> tuple[Any, bytes]:
    about = json.loads((folder / "export.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["export.json", "model.safetensors"]
    return about, (folder / "model.safetensors").read_bytes()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(("name", "options"), [
    ("last", []), ("averaged", ["--entry", "ema"]), ("best", ["--best", "valid/loss"])
])  # fmt: skip
def test_it_is_what_the_service_writes(trained: Path, name: str, options: list[str]) -> None:
    said, _ = everstep("export", "small", *options, "--out", f"out/{name}", cwd=trained)
    assert said.startswith(f"out/{name}: ")
    (by_service,) = (trained / "runs" / "small" / "exports" / name).iterdir()
    about, weights = content(trained / "out" / name)
    expected, bits = content(by_service)
    assert weights == bits
    assert about.pop("metrics")["valid/loss"] == expected.pop("metrics")["valid/loss"]
    checkpoints = about.pop("checkpoint"), expected.pop("checkpoint")
    assert checkpoints[0].endswith(f"step-{about['step']:08d}") and about == expected


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize(("command", "status", "said"), [
    ("smoll", 2, "there is no run 'smoll'"),
    ("small --best valid/los", 2, "did you mean 'valid/loss'"),
    ("small --entry modle", 2, "did you mean 'model'"), ("small --checkpoint 77", 2, "77"),
    ("small --max-shard-size x", 2, "'x' is not a size"),
    ("runs/none", 1, "there is no checkpoint yet in "),
])  # fmt: skip
def test_wrong_input_is_told_and_writes_nothing(trained: Path, command: str, status: int, said: str) -> None:
    RunDir.open(trained / "runs" / "none")
    assert said in everstep("export", *command.split(), "--out", "a", cwd=trained, status=status)[1]
    assert not (trained / "a").exists()
