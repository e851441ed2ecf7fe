"""A Supervisor used wrongly, or at Python's prompt: nothing is silent, and nothing is lost."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everstep
from everstep.errors import ProgressError
from everstep.supervisor.checks import no_progress


class Net:
    """The smallest training with torch."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()


def test_a_loop_that_never_advances_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_progress, "WORKING", 100)
    net = Net()

    def forgetful() -> None:
        with everstep.Supervisor(tmp_path / "run", net.state, max_step=3) as sv:
            sv.stream(None)
            while not sv.should_stop():
                net.update()

    with pytest.raises(ProgressError, match=r"advance\(\) was not called in 100 rounds .* made 98 updates"):
        forgetful()


def test_should_stop_may_be_asked_often(tmp_path: Path) -> None:
    net = Net()
    with everstep.Supervisor(tmp_path / "run", net.state, max_step=70) as sv:
        sv.stream(None)
        while not sv.should_stop():
            net.update()
            for _ in range(40):
                sv.should_stop()
            sv.advance()
        for _ in range(250):  # where nothing trains it may be asked for ever
            assert sv.should_stop()
    assert (sv.step, sv.updates) == (70, 70)


SESSION = """
import os, signal, everstep
def train():
    global loop
    with everstep.TrainLoop("run", {{"w": [1]}}, max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            for step, _ in loop.iter_steps(list(range(9))):
                if step == 4: os.kill(os.getpid(), signal.{signal})

kept = "still"
train()
print(kept, "here", loop.step, loop.ending.reason, "finished" if loop.ending.finished else "resumable")
raise SystemExit(7)
"""


def session(folder: Path, signal_name: str) -> tuple[int, str]:
    """Type the session into Python's own prompt on a terminal; its exit status and what it showed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-q"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "PYTHON_BASIC_REPL": "1"},
        start_new_session=True,
    )
    os.close(theirs)
    os.write(ours, SESSION.format(signal=signal_name).lstrip().encode())
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other side is closed
            part = b""
        if not part:
            break
        shown += part
    os.close(ours)
    return process.wait(), shown.decode()


def test_ctrl_c_at_pythons_prompt_saves_and_keeps_the_session(tmp_path: Path) -> None:
    code, shown = session(tmp_path, "SIGINT")
    assert "KeyboardInterrupt: Ctrl-C (SIGINT)" in shown and "start again to continue" in shown
    assert "still here 4 Ctrl-C (SIGINT) resumable" in shown
    assert code == 7
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


@pytest.mark.campaign("long")
def test_another_signal_at_pythons_prompt_ends_it(tmp_path: Path) -> None:
    assert session(tmp_path, "SIGTERM")[0] == 143
