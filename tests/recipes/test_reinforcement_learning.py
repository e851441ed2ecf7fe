"""The program of docs/recipes/reinforcement_learning.md: killed and stopped, it ends as the undisturbed one.

It needs gymnasium, which `make campaign` installs; another Python that has it: EVERSTEP_RECIPES=PATH.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("machine")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes" / "reinforcement_learning.md"
PYTHON = os.environ.get("EVERSTEP_RECIPES", sys.executable)
ENDS = {"kill": -signal.SIGKILL, "SIGTERM": 128 + signal.SIGTERM}
"""Exit status of a start by what it is struck with."""

STRIKES = {
    "a kill in mid-episode": ["kill:trail.write:977"],
    "kills in saves": ["kill:checkpoint.write:90", "kill:checkpoint.rename:4", "kill:checkpoint.fsync:7"],
    "SIGTERM, after which no step is compared": ["SIGTERM:trail.write:250"] * 4,
    "both": ["kill:lock.json.write:1", "SIGTERM:trail.write:431", "kill:journal.fsync:3"],
}
"""Hazards of the starts before the last one."""

FORGOTTEN = {
    "whose episode has ended": ("self.envs._autoreset_envs = saved", "_ = saved"),
    "the generator of the environment": ("env.unwrapped.np_random.bit_generator.state = random", "pass"),
    "the pole": ('("state", ', "("),
    "the return of the open episode": ('"episode_returns", ', ""),
    "the last observation": ('    "obs": obs,\n', ""),
    "the memory": ('    "memory": memory,\n', ""),
    "the generator of actions and samples": ('    "draws": draws,\n', ""),
}
"""What a program fails to restore: the text, and what takes its place."""

Outcome = tuple[str, list[str]]


def run(program: str, folders: Sequence[Path], hazards: Sequence[Sequence[str]]) -> list[str]:
    """Run a program in each folder, struck by its hazards and then once undisturbed; return the outputs."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cartpole.py").write_text(program)
    chains = [[str(folder), [*strikes, None]] for folder, strikes in zip(folders, hazards, strict=True)]
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("struck.py")), "cartpole.py"],
        input=json.dumps(chains),
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        },
        text=True,
        stdout=subprocess.PIPE,
    )
    assert done.returncode == 0, f"{PYTHON} needs gymnasium, or EVERSTEP_RECIPES another one"
    outputs = [
        "".join((folder / f"{n}.log").read_text() for n in range(len(strikes) + 1))
        for folder, strikes in zip(folders, hazards, strict=True)
    ]
    wanted = [[*(ENDS[each.partition(":")[0]] for each in strikes), 0] for strikes in hazards]
    assert json.loads(done.stdout) == wanted, outputs
    return outputs


def outcome(folder: Path, output: str) -> Outcome:
    """The digest of the last state, which holds the memory and the environments, and all rows of metrics."""
    (digest,) = re.findall(r"^digest of the state: (\w+)$", output, re.M)
    return digest, sorted(map(repr, RunJournal(folder / "runs" / "cartpole").comparable()))


@pytest.fixture(scope="module")
def program() -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return code


@pytest.fixture(scope="module")
def undisturbed(program: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("undisturbed")
    (output,) = run(program, [folder], [[]])
    return folder, outcome(folder, output)


def test_the_program_ends_as_the_undisturbed_one(
    program: str, undisturbed: tuple[Path, Outcome], tmp_path: Path
) -> None:
    folders = [tmp_path / str(number) for number in range(len(STRIKES))]
    outputs = run(program, folders, list(STRIKES.values()))
    for kind, folder, output in zip(STRIKES, folders, outputs, strict=True):
        assert "resuming step" in output and "resume differs" not in output, (kind, output)
        assert outcome(folder, output) == undisturbed[1], kind


@pytest.mark.parametrize("edit", FORGOTTEN.values(), ids=FORGOTTEN)
def test_each_part_of_the_state_is_needed(
    edit: tuple[str, str], program: str, undisturbed: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Stopped at each of the steps around the end of an episode."""
    steps, _ = RunJournal(undisturbed[0] / "runs" / "cartpole").series("episode_return")
    end = next(step for step in steps if step > 200)
    assert program.count(edit[0]) == 1
    hazards = [f"SIGTERM:trail.write:{end - 2}", *["SIGTERM:trail.write:1"] * 4]
    (output,) = run(program.replace(*edit), [tmp_path], [hazards])
    assert outcome(tmp_path, output)[1] != undisturbed[1][1]
