"""docs/quickstart.md is walked as a reader walks it: the file is written, then each console line runs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent.parent / "docs" / "quickstart.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
CONSOLE = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.S))
LINES = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", CONSOLE, re.M)
"""(line, what it prints among others) of each console line."""


def command(line: str) -> list[str]:
    """A console line of the page in this environment, and with a drill of one hazard in place of twelve."""
    python, *arguments = shlex.split(line.replace("--kills 1", "--hazard resume --kills 1"))
    assert python in ("python", "everstep"), line
    return [sys.executable, "-u", *([] if python == "python" else ["-m", "everstep"]), *arguments]


def run(line: str, folder: Path) -> str:
    done = subprocess.run(command(line), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def killed(line: str, folder: Path) -> str:
    """As `timeout -s KILL` ends it, but in its fifth epoch, however slow the machine is."""
    said = ""
    with subprocess.Popen(command(line), cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "[Epoch 5/" not in said:
            said += process.stdout.readline()
            assert process.poll() is None, said
        process.kill()
    assert process.returncode == -signal.SIGKILL
    return said


def digest(said: str) -> str:
    (found,) = re.findall(r"^digest of the state: (\w{32})$", said, re.M)
    return str(found)


@pytest.mark.campaign("long")
def test_the_page_is_walked(tmp_path: Path) -> None:
    lines = dict(LINES)
    assert list(lines) == [
        ". .venv/bin/activate",
        "timeout -s KILL 5 python train.py",
        "python train.py",
        "everstep drill --kills 1 train.py",
        "everstep show runs/quick",
        "everstep runs --sort valid_accuracy",
        "everstep runs 'config.lr<0.01 best/valid_accuracy>0.8'",
    ]
    script = SCRIPT.replace("max_epoch=40", "max_epoch=8")
    assert script != SCRIPT
    (tmp_path / "train.py").write_text(script)

    before = killed("python train.py", tmp_path)
    assert "resuming" not in before
    after = run("python train.py", tmp_path)
    assert re.search(r"resuming epoch [5-8]", after), after
    assert lines["python train.py"].replace("40", "8").replace("1120", "224") in after
    assert digest(run("python train.py", tmp_path)) == digest(after), "a finished run runs no step"

    assert "exact: 1 of 1" in run("everstep drill --kills 1 train.py", tmp_path)
    assert lines["everstep drill --kills 1 train.py"].startswith("exact: 12 of 12")
    (tmp_path / "train.py").write_text(
        script.replace("with everstep.Tr", "seen = 0\nwith everstep.Tr")
        .replace("            loss = ", "            seen += 1\n            loss = ")
        .replace("model(images)", "model(images + 0.01 * seen)")
    )
    broken = subprocess.run(
        command("everstep drill --kills 1 train.py"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert broken.returncode == 1 and re.search(r"^first: loss \(loss\) step \d+", broken.stdout, re.M), (
        broken.stdout
    )

    index = {**os.environ, "EVERSTEP_INDEX": ""}
    for line in list(lines)[-3:]:
        done = subprocess.run(
            command(line), cwd=tmp_path, env=index, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "quick" in done.stdout, done.stdout + done.stderr
