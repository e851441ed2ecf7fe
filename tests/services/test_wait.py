"""`GlobalStepWaiter`: a process that begins when another run has come far enough."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import everstep
import warm
from everstep import Every
from everstep.errors import ServiceError
from everstep.services import GlobalStepWaiter

WAITER = """
import everstep
from everstep.services import GlobalStepWaiter

waiter = GlobalStepWaiter("other", 4, poll=0.02)
with everstep.Supervisor("waiting", services=[waiter], max_step=2, seed=1) as sv:
    sv.stream(None)
    while not sv.should_stop():
        print("begun", flush=True)
        sv.advance()
"""


def train(run_dir: Path, steps: int) -> None:
    services = [everstep.Checkpoints(Every(steps=2))]
    with everstep.Supervisor(run_dir, services=services, max_step=steps, seed=1) as sv:
        sv.stream(None)
        while not sv.should_stop():
            sv.advance()


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """The waiting process, as soon as it says that it waits, and what it has said."""
    process = warm.Popen([sys.executable, "-c", WAITER], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = ""
    while "waiting until" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return process, said


def test_it_begins_when_the_other_has_come_there(tmp_path: Path) -> None:
    process, said = start(tmp_path)
    train(tmp_path / "other", 2)
    train(tmp_path / "other", 5)
    rest, _ = process.communicate()
    assert process.returncode == 0
    assert (said.count("begun"), rest.count("begun")) == (0, 2)


def test_a_signal_ends_the_waiting(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert rest.count("begun") == 1


def test_the_time_is_over(tmp_path: Path) -> None:
    train(tmp_path / "other", 2)
    waiter = GlobalStepWaiter(tmp_path / "other", 4, poll=0.01, timeout=0.02)
    sv = everstep.Supervisor(tmp_path / "run", services=[waiter])
    with pytest.raises(ServiceError, match="has come to step 2, not to step 4; look at that run"):
        sv.__enter__()
