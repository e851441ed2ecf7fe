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


def trainer_of(run: Path, start: int) -> int | None:
    """Number of the process that trains a run in its n-th start."""
    newest = RunJournal(run).newest_start() if (run / "run.json").exists() else None
    return newest.data["facts"]["pid"] if newest is not None and newest.segment == start else None
