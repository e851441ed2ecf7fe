"""Each program of docs/recipes with its real libraries: killed and stopped, it ends as the one that was not.

EVERSTEP_RECIPES names the Python of an environment that has docs/recipes/requirements.txt and everstep; left
out, one is made beside the project, which downloads a few hundred MB.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gate
import waiting
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("machine")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ALONE = "reinforcement_learning.md"
"""Page with a test of its own."""
PAGES = sorted(page for page in (ROOT / "docs" / "recipes").glob("*.md") if page.name != ALONE)
KILLS = 20


def programs() -> Iterator[tuple[str, str]]:
    """Name and text of each program that a page marks as a recipe."""
    mark = "<!-- snippet: recipe -->\n```python\n"
    for page in PAGES:
        for number, text in enumerate(page.read_text().split(mark)[1:], 1):
            yield f"{page.stem}_{number}", text.partition("```")[0]


PROGRAMS = dict(programs())
SUBMITTED = [name for name, text in PROGRAMS.items() if "import submitit" in text]


@pytest.fixture(scope="module")
def python() -> str:
    if (named := os.environ.get("EVERSTEP_RECIPES")) is not None:
        return named
    with open(ROOT / ".venv" / ".recipes.lock", "w") as lock:  # of the workers of pytest-xdist
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", ".venv/.recipes"], cwd=ROOT, check=True)
    return str(ROOT / ".venv" / "recipes" / "bin" / "python")


@pytest.fixture
def start(tmp_path: Path, python: str) -> Callable[..., Any]:
    """Starts a program in a folder, with one thread."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env = {**os.environ, **threads, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}

    def start(*command: str, folder: Path = tmp_path, **added: str) -> Any:
        folder.mkdir(exist_ok=True)
        pipe, line = subprocess.PIPE, [python, *command]
        return subprocess.Popen(line, cwd=folder, env=env | added, stdout=pipe, stderr=pipe, text=True)

    return start


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - SUBMITTED))
def test_killed_and_stopped_it_is_the_program_that_was_left_alone(
    name: str, start: Callable[..., Any], tmp_path: Path, tally: Any
) -> None:
    (tmp_path / f"{name}.py").write_text(PROGRAMS[name])
    process = start(str(HERE / "struck.py"), f"{name}.py", str(gate.seed), str(KILLS), "kept")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    report = json.loads(output.splitlines()[-1])
    assert report["exact"], errors
    assert report["kills_resumed"], "each kill came before the first checkpoint"
    for result in report["results"]:
        kind = "kills" if result["hazard"] == "random instant" else "signals"
        tally(kind, result["strikes"], phase="recipe", door=name)


@pytest.mark.parametrize("signal_name", ["USR1", "USR2"])  # everstep's, and submitit's own choice
@pytest.mark.parametrize("name", SUBMITTED)
def test_a_job_that_submitit_queues_again_is_the_job_that_was_left_alone(
    name: str, signal_name: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "launch.py").write_text(PROGRAMS[name])
    whole, struck = (tmp_path / folder / "runs" / "job" for folder in ("whole", "struck"))
    ends = []
    for run, signals in ((whole, 0), (struck, 3)):
        folder = run.parents[1]
        process = start(str(tmp_path / "launch.py"), folder=folder, SUBMITIT_PREEMPT_SIGNAL=signal_name)
        for number in range(signals):
            trainer = waiting.until(partial(trainer_of, run, number + 1))
            os.kill(trainer, signal.Signals[f"SIG{signal_name}"])
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        ends.append(output.split()[-1])
    assert ends[0] == ends[1] and compare_runs(whole, struck) == []
    assert RunJournal(struck).status().segments == 4


@pytest.mark.parametrize("name", SUBMITTED)
def test_a_job_that_is_cancelled_is_not_queued_again_and_resumes_when_submitted_again(
    name: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "launch.py").write_text(PROGRAMS[name])
    whole, struck = (tmp_path / folder / "runs" / "job" for folder in ("whole", "struck"))
    for run, statuses in ((whole, [0]), (struck, [1, 0])):
        for number, status in enumerate(statuses, 1):
            process = start(
                str(tmp_path / "launch.py"), folder=run.parents[1], SUBMITIT_PREEMPT_SIGNAL="USR1"
            )
            if status != 0:
                os.kill(waiting.until(partial(trainer_of, run, number)), signal.SIGTERM)
            _, errors = process.communicate()
            assert process.returncode == status, errors
            assert RunJournal(run).status().segments == number
    assert compare_runs(whole, struck) == []


@pytest.mark.parametrize("name", [name for name, text in PROGRAMS.items() if "from peft import" in text])
def test_peft_reads_the_best_adapters_from_the_folder_that_the_page_saves(
    name: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    text = PROGRAMS[name]
    base, made, _ = text.partition("model = get_peft_model(base, lora)")
    (tmp_path / "train.py").write_text(
        f"{text}torch.save(model.eval()(input_ids=held_out).logits, 'out.pt')\n"
    )
    (tmp_path / "use.py").write_text(
        f"{base}from peft import PeftModel\n"
        "model = PeftModel.from_pretrained(base, 'adapter')\n"
        "assert torch.equal(model.eval()(input_ids=held_out).logits, torch.load('out.pt'))\n"
    )
    for program in ("train.py", "use.py"):
        process = start(str(tmp_path / program))
        _, errors = process.communicate()
        assert made and process.returncode == 0, errors
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize("name", [name for name, text in PROGRAMS.items() if "@hydra.main" in text])
def test_the_lines_of_the_page_resume_raise_a_limit_fork_and_sweep(
    name: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAMS[name])
    runs = tmp_path / "runs"

    def train(*words: str, status: int = 0, **added: str) -> str:
        process = start("train.py", *words, **added)
        _, errors = process.communicate()
        assert process.returncode == status, errors
        return str(errors)

    def step(run: str) -> int:
        return RunJournal(runs / run).status().step

    train("-m", "lr=0.001,0.003", "width=16,32")
    assert {run.name: step(run.name) for run in runs.iterdir() if run.is_dir()} == {
        f"lr-{rate}-width-{width}": 32 for rate in ("0.001", "0.003") for width in (16, 32)
    }
    train("lr=0.003", "epochs=8")
    assert step("lr-0.003-width-32") == 64
    train("lr=0.003", "run=runs/a")
    assert "lr: stored 0.003, given 0.02" in train("lr=0.02", "run=runs/a", status=1)

    train()
    began = runs / "lr-0.01-width-32" / "checkpoints" / "epoch-0004-step-00000032"
    line = ("lr=0.005", "epochs=8", f"fork={began.relative_to(tmp_path)}")
    train(*line, "run=runs/whole")
    train(*line, "run=runs/struck", status=-signal.SIGKILL, EVERSTEP_HAZARD="kill:trail.write:13")
    train(*line, "run=runs/struck")
    assert [step(name) for name in ("whole", "struck", "lr-0.01-width-32")] == [64, 64, 32]
    assert compare_runs(runs / "whole", runs / "struck") == []
    assert RunJournal(runs / "struck").status().segments == 2
    facts = RunJournal(runs / "struck").facts()
    assert facts["parent"]["path"] == str(began) and facts["config"]["lr"] == 0.005


def trainer_of(run: Path, start: int) -> int | None:
    """Number of the process that trains a run in its n-th start."""
    newest = RunJournal(run).newest_start() if (run / "run.json").exists() else None
    return newest.data["facts"]["pid"] if newest is not None and newest.segment == start else None
