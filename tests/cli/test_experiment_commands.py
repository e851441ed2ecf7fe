"""train, resume, eval, predict, config, data: as a person starts them, wrong input included."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runs import as_json, everstep, values
from tiny_experiment import write

import everstep as library
from everstep.record import RunJournal

EVAL = """
profiles:
  eval: {streams: {valid: {count: 3}}, services: [Evaluate: {num_steps: 1}]}
  big: {streams: {train: {count: 12}}}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with tiny.yaml and its module."""
    write(tmp_path, EVAL)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    write(folder, EVAL)
    everstep("train", "tiny.yaml", "optimizer.lr=1e-2", cwd=folder)
    return folder


def test_ctrl_c_and_the_same_line_again(here: Path, trained: Path) -> None:
    line = ("train", "tiny.yaml", "optimizer.lr=1e-2")
    everstep(*line, cwd=here, status=130, SIGINT_AT="5")
    said, _ = everstep(*line, cwd=here)
    assert "resuming epoch 2, step 5" in said and "max_epoch 3 is reached" in said
    assert values(here / "runs" / "tiny") == values(trained / "runs" / "tiny")
    compared, _ = everstep("compare", "tiny", str(trained / "runs" / "tiny"), cwd=here)
    assert "the newest checkpoints are equal to the bit" in compared
    assert "no step is run" in everstep(*line, cwd=here)[0]


def test_resume_by_name_with_a_raised_limit_and_a_changed_config_by_choice(here: Path) -> None:
    everstep("train", "tiny.yaml", "trainer.max_epoch=1", cwd=here)
    said, _ = everstep("resume", "tiny", "trainer.max_epoch=2", cwd=here)
    assert "config.trainer.max_epoch: stored 1, given 2" in said and "step 8, finished" in said
    line = ("train", "tiny.yaml", "optimizer.lr=0.2", "task.scale=2")
    _, refused = everstep(*line, cwd=here, status=2)
    assert "\n  config.optimizer.lr: stored 0.1, given 0.2\n" in refused
    assert "--on-change keep" in refused and "give another --run-dir" in refused
    assert "into runs/tiny-fork-1" in everstep(*line, "--dry-run", "--on-change", "fork", cwd=here)[0]
    _, refused = everstep("resume", "tiny", "task.scale=3", cwd=here, status=2)
    assert "use --on-change keep" in refused and "--run-dir" not in refused


def test_a_schedule_by_name(here: Path) -> None:
    arguments = "schedules={train_and_evaluate: {min_eval_frequency: 5}}"
    said, _ = everstep("train", "tiny.yaml", arguments, "--schedule", "train_and_evaluate", cwd=here)
    run = here / "runs" / "tiny"
    assert RunJournal(run).series("valid/loss", "eval/valid")[0] == [5, 10, 12]
    assert re.fullmatch(r"valid/loss: [\d.]+", said.splitlines()[-1])


def test_a_run_that_has_diverged_has_an_exit_status_of_its_own(here: Path) -> None:
    module = here / "tiny_experiment.py"
    module.write_text(module.read_text().replace("self.scale *", 'float(os.environ.get("X", "1")) *'))
    line = ("train", "tiny.yaml")
    everstep(*line, cwd=here, status=-9, SIGKILL_AT="6")
    _, said = everstep(*line, cwd=here, status=5, X="2")
    (step,) = re.findall(r"everstep accept RUN --divergence (\d)", said)
    _, said = everstep("run", "--", sys.executable, "-m", "everstep", *line, cwd=here, status=5)
    assert "not started again" in said
    everstep("accept", "tiny", "--divergence", step, cwd=here)
    everstep("resume", "tiny", cwd=here)


def test_a_dry_run_leaves_nothing(here: Path) -> None:
    said, _ = everstep("train", "tiny.yaml", "--dry-run", cwd=here)
    assert "TinyTask: w (ndarray), momentum (ndarray)" in said and "nothing was run" in said
    _, said = everstep("train", "tiny.yaml", "streams.train.count=x", "--dry-run", cwd=here, status=2)
    assert "streams.train.count: 'x' is a string; give an integer" in said
    assert not (here / "runs").exists()


@pytest.mark.campaign("long")
def test_eval_with_its_profile_and_without(trained: Path) -> None:
    found = json.loads(everstep("eval", "tiny", "--json", cwd=trained)[0])
    whole = RunJournal(trained / "runs" / "tiny").series("valid/loss", "eval/valid")[1][-1]
    assert found.keys() == {"valid/loss"} and found["valid/loss"] != whole
    other = json.loads(everstep("eval", "tiny", "--profile", "big", "--json", cwd=trained)[0])
    assert other == {"valid/loss": whole}
    assert everstep("eval", "runs/tiny", "--stream", "train", cwd=trained)[0].startswith("train/loss: ")


def test_the_best_weights_or_an_earlier_checkpoint_by_name(here: Path) -> None:
    services = "services=[Evaluate, {Best: {metric: valid/loss, mode: min}}]"
    everstep("train", "tiny.yaml", services, "profiles={}", "trainer.max_epoch=2", cwd=here)
    valid, best = ("tiny", "--stream", "valid"), library.runs.best(here / "runs" / "tiny")["valid/loss"]
    assert best.path is not None and best.step == 4  # the newest is another one
    assert as_json("eval", *valid, "--weights", "best", cwd=here) == {"valid/loss": best.value}
    everstep("predict", *valid, "--weights", "epoch-0001-step-00000004", "--out", "a.npy", cwd=here)
    state = {"w": np.zeros(3)}
    library.load(best.path, state)
    assert np.load(here / "a.npy").tolist() == (np.arange(5) * state["w"][0]).tolist()


@pytest.mark.campaign("long")
def test_predict_writes_what_the_file_asks_for(trained: Path) -> None:
    for name in ("a.npy", "a.npz", "a.jsonl"):
        said, _ = everstep("predict", "tiny", "--stream", "valid", "--out", name, cwd=trained)
        assert said == f"{name}: 5 predictions for 'valid'\n"
    line = ("predict", "tiny", "--stream", "valid", "--out", "a.npy")
    before = (trained / "a.npy").stat().st_ino
    assert "a.npy exists; give another file, or --overwrite" in everstep(*line, cwd=trained, status=2)[1]
    assert (trained / "a.npy").stat().st_ino == before
    everstep(*line, "--overwrite", cwd=trained)
    array = np.load(trained / "a.npy")
    assert array.shape == (5,) and (np.load(trained / "a.npz")["predictions"] == array).all()
    assert [json.loads(line) for line in (trained / "a.jsonl").read_text().splitlines()] == array.tolist()


def test_config_prints_a_config_file(trained: Path) -> None:
    by_file, _ = everstep("config", "tiny.yaml", "optimizer.lr=1e-2", cwd=trained)
    by_run, _ = everstep("config", "tiny", cwd=trained)
    assert by_file == by_run and "lr: 0.01" in by_file and "steps_per_epoch: null" in by_file
    (trained / "again.yaml").write_text(by_run)
    assert everstep("config", "again.yaml", cwd=trained)[0] == by_run
    assert json.loads(everstep("config", "tiny", "--json", cwd=trained)[0])["seed"] == 7


def test_data_shows_batches_and_trains_nothing(here: Path) -> None:
    said, _ = everstep("data", "tiny.yaml", "--stream", "valid", "-n", "3", cwd=here)
    shown = ("(2)  0, 1", "(2)  2, 3", "(1)  4")
    assert said == "".join(f"valid, batch {n}\n  [0]: int64 {each}\n" for n, each in enumerate(shown, 1))
    assert everstep("data", "tiny.yaml", "--profile", "big", "-n", "9", cwd=here)[0].count("batch") == 6
    assert not (here / "runs").exists()


@pytest.mark.campaign("long", gate=6)
@pytest.mark.parametrize(("command", "status", "said"), [
    ("train", 2, "give a config FILE"), ("train none.yaml", 2, "none.yaml cannot be read"),
    ("train tiny.yml", 2, "did you mean 'tiny.yaml'"),
    ("train tiny.yaml optimizer", 2, "'optimizer' is neither a file nor a setting (PATH=VALUE"),
    ("train tiny.yaml optimizr.lr=1", 2, "did you mean 'optimizer'"),
    ("train tiny.yaml --schedule trian", 2, "did you mean 'train'"),
    ("train tiny.yaml --strict-git --run-dir runs/strict", 1, "commit and push first"),
    ("resume tiny.yaml", 2, "tiny.yaml is a config file; give a run, or train it"),
    ("eval tiny --stream vald", 2, "did you mean 'valid'"),
    ("eval tiny --weights best/valid/los", 2, "give one that the run keeps"),
    ("predict tiny --stream valid --out never.npy --weights epoch-9", 1, "epoch-9"),
    ("predict tiny --out a.npy", 2, "Missing option '--stream'"),
    ("predict tiny --stream valid --out a.txt", 2, ".jsonl, .npy, .npz"),
    ("data tiny.yaml --stream vald", 2, "did you mean 'valid'"),
    ("sweep tiny.yaml", 2, "nothing varies"),
    ("sweep tiny.yaml --grid optimizer.lr=[0.1,x]", 2, "'x' is a string"),
])  # fmt: skip
def test_wrong_input_is_told_and_trains_nothing(trained: Path, command: str, status: int, said: str) -> None:
    assert said in everstep(*command.split(), cwd=trained, status=status)[1]
    assert [path.name for path in (trained / "runs").iterdir() if path.is_dir()] == ["tiny"]


def git(folder: Path, *command: str) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    names = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    subprocess.run(["git", *names, *command], cwd=folder, env=environment, capture_output=True, check=True)


@pytest.mark.campaign("long")
def test_strict_git_wants_what_can_be_had_back(here: Path) -> None:
    line = ("train", "tiny.yaml", "trainer.max_step=1")
    strict = (*line, "--strict-git")
    git(here, "init", "-b", "main")
    git(here, "add", ".")
    assert "changes that are not committed" in everstep(*strict, cwd=here, status=1)[1]
    git(here, "commit", "-m", "first")
    assert "is on no remote" in everstep(*strict, cwd=here, status=1)[1]
    assert not (here / "runs").exists() and "note: " in everstep(*line, cwd=here)[1]
    assert everstep(*line, "--skip-check", cwd=here)[1] == ""
    git(here, "clone", "--bare", ".", "../origin.git")
    git(here, "remote", "add", "origin", "../origin.git")
    git(here, "fetch", "origin")
    git(here, "checkout", "--detach")
    assert everstep(*strict, "--run-dir", "runs/detached", cwd=here)[1] == ""
    (start,) = RunJournal(here / "runs" / "detached").events("segment")
    assert start.data["facts"]["git"]["branch"] is None and start.data["facts"]["git"]["pushed"]
    (here / "tiny.yaml").write_text((here / "tiny.yaml").read_text() + "group: changed\n")
    assert "changes that are not committed" in everstep(*strict, cwd=here, status=1)[1]


def ends(how: str) -> str:
    return f"services=[Evaluate, {{tiny_experiment:Ends: {{at: 5, how: {how}}}}}]"


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(("change", "status", "said"), [
    ("trainer.max_step=5", 0, "max_step 5 is reached"),
    (ends("stop"), 0, "it is enough (step 5, finished)"),
    ("services=[{LossBound: {metric: loss, bound: 1e-9}}]", 1, "above its bound 1e-09"),
    ("optimizer.lr=fast", 2, "give a number"),
    ("trainer.max_time=1e-6", 3, "start again to continue"),
    (ends("interrupt"), 3, "the machine is taken away: "),
    ("services=[Evaluate, {Require: {metric: valid/loss, value: 0.0, epoch: 1}}]", 4, "valid/loss"),
    (ends("SIGHUP"), 129, "start again to continue"), (ends("SIGUSR1"), 138, "start again to continue"),
    (ends("SIGTERM"), 143, "start again to continue"),
])  # fmt: skip
def test_how_a_training_ended_is_its_exit_status(here: Path, change: str, status: int, said: str) -> None:
    """Ctrl-C (130) is `test_ctrl_c_and_the_same_line_again`."""
    assert said in "".join(everstep("train", "tiny.yaml", change, cwd=here, status=status))
    if change == ends("interrupt"):
        assert "resuming epoch 2, step 5" in everstep("train", "tiny.yaml", change, cwd=here)[0]
