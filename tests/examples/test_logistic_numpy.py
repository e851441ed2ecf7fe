"""The NumPy example trains, needs no framework, and a killed run of it ends as the one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "logistic_numpy.py"
STEPS = "1500"


def command(run: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), "--run", str(run), "--steps", STEPS]


def finish(run: Path) -> list[str]:
    done = subprocess.run(command(run), capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def kill_after_a_checkpoint(run: Path) -> None:
    """SIGKILL once the first scheduled checkpoint is there."""
    with subprocess.Popen(command(run), stdout=subprocess.DEVNULL) as victim:
        while victim.poll() is None and not any(run.glob("checkpoints/step-00000500")):
            time.sleep(0.001)
        victim.send_signal(signal.SIGKILL)


def test_a_killed_run_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole")
    accuracy = float(next(line for line in whole if line.startswith("accuracy")).rpartition(" ")[2])
    assert accuracy > 0.85
    kill_after_a_checkpoint(tmp_path / "killed")
    killed = finish(tmp_path / "killed")
    assert any(line.startswith("resuming step") for line in killed)
    assert killed[-1] == whole[-1]
    again = finish(tmp_path / "killed")
    assert any("no step is run" in line for line in again)
    assert again[-1] == whole[-1]


def test_no_framework_is_imported(tmp_path: Path) -> None:
    program = (
        f"import runpy, sys; sys.argv = ['x', '--run', {str(tmp_path / 'run')!r}, '--steps', '3']; "
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__'); "
        "found = {'torch', 'jax', 'tensorflow'} & sys.modules.keys(); assert not found, found"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, stdout=subprocess.DEVNULL)
