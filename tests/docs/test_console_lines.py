"""The console lines of README.md, docs/guide/doors.md and docs/quickstart.md run in order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
PAGES = README + (ROOT / "docs" / "guide" / "doors.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def blocks(pages: str) -> list[str]:
    return re.findall(r"```console\n(.*?)```", pages, re.S)


def lines_of(pages: str) -> list[str]:
    return re.findall(r"^\$ (.*?)(?: {2,}#.*)?$", "".join(blocks(pages)), re.M)


LINES = lines_of(PAGES)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_readme_takes_five_minutes() -> None:
    assert len(README.partition("## Where to go next")[0].split()) <= 600


def test_each_line_that_installs_names_extras_and_targets_that_there_are() -> None:
    installing = [line for line in LINES if " install " in line]
    named = {
        extra for line in installing for found in re.findall(r"\[(.*?)\]", line) for extra in found.split(",")
    }
    assert "demo" in named and named <= EXTRAS.keys()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    made = [line.split()[1] for line in LINES if line.startswith("make")]
    assert made and set(made) <= set(targets)
    walked = {line.split()[0] for line in LINES if line not in installing}
    assert walked == {"make", "everstep"}, "a line that nobody tries"


def test_a_block_of_commands_begins_with_what_installs_them() -> None:
    with_commands = [block for block in blocks(PAGES) if "$ everstep" in block]
    assert len(with_commands) == 2
    assert all(block.startswith('$ pip install -e ".[demo]"') for block in with_commands)


def start(line: str, folder: Path) -> subprocess.Popen[str]:
    """A line in this environment, with less to train, and a drill with one kill in place of twelve."""
    for long, short in (
        *(("max_epoch=10", "max_epoch=1"), ('max_epoch": 10', 'max_epoch": 1'), ("--epochs 3", "--epochs 1")),
        ("--kills 1", "--kills 1 --hazard commit"),
    ):
        line = line.replace(long, short)
    program, *arguments = shlex.split(line)
    python = [sys.executable, "-u", *([] if program == "python" else ["-m", program])]
    return subprocess.Popen(
        [*python, *arguments],
        cwd=folder,
        env={**os.environ, "EVERSTEP_INDEX": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(line: str, folder: Path) -> str:
    with start(line, folder) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, f"{line}\n{said}"
    return said


@pytest.mark.campaign("long")
def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    """tests/package tries what an extra brings."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    config = tmp_path / "examples" / "digits.yaml"
    config.write_text(config.read_text().replace("max_epoch: 40", "max_epoch: 11"))  # a fork goes on from 10
    said = {line.split()[1]: run(line, tmp_path) for line in LINES if line.startswith("everstep")}
    assert "config.optimizer.lr" in said["compare"]
    assert "digits-config" in said["runs"]
    assert "exact: 1 of 1" in said["drill"]


@pytest.mark.campaign("long")
def test_the_quickstart_is_walked(tmp_path: Path) -> None:
    """Its file is written; where the page's `timeout` kills by the clock, here it is in the fifth epoch."""
    (script,) = re.findall(r"```python\n(.*?)```", QUICKSTART, re.S)
    (tmp_path / "train.py").write_text(script.replace("max_epoch=40", "max_epoch=8"))
    activates, kills, resumes, *others = lines_of(QUICKSTART)
    assert (activates, kills) == (". .venv/bin/activate", "timeout -s KILL 5 python train.py")
    with start("python train.py", tmp_path) as process:
        said = ""
        while "[Epoch 5/" not in said:
            assert process.stdout is not None and process.poll() is None, said
            said += process.stdout.readline()
        process.kill()
    assert process.returncode == -signal.SIGKILL and "resuming" not in said
    digests = [re.findall(r"^digest of the state: \w{32}$", run(resumes, tmp_path), re.M) for _ in "ab"]
    assert digests[0] and digests[0] == digests[1], "a finished run runs no step"
    for line in others:
        said = run(line, tmp_path)
        assert "exact: 1 of 1" in said if " drill " in line else "quick" in said, line
