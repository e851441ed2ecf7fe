"""`Profile`: windows of steps as Chrome traces, the newest few of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everstep
from everstep import Every
from everstep.services import Profile
from tiny_runs import Boom


def train(run_dir: Path, service: Profile, crash: int = 0, steps: int = 20) -> str | None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    with everstep.Supervisor(run_dir, {"model": model}, services=[service], max_step=steps, seed=1) as sv:
        sv.stream(None)
        while not sv.should_stop():
            with torch.no_grad():
                model.weight.copy_(model(model.weight).tanh())
            if sv.step + 1 == crash:
                raise Boom
            sv.advance()
    return sv.ending.digest


def traces(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "logs" / "profile").iterdir())


def test_traces_of_whole_windows_and_no_more_than_asked_for(tmp_path: Path) -> None:
    digest = train(tmp_path / "run", Profile(Every(steps=4), steps=2, keep=2))
    assert traces(tmp_path / "run") == ["step-00000012.json", "step-00000016.json"]
    found = json.loads((tmp_path / "run" / "logs" / "profile" / "step-00000012.json").read_text())
    calls = [event for event in found["traceEvents"] if event.get("name") == "aten::linear"]
    assert len(calls) == 2
    other = train(tmp_path / "without", Profile(Every(steps=999)))
    assert digest == other


def test_a_crash_inside_a_window(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        train(tmp_path / "run", Profile(Every(steps=4)), crash=6)
    digest = train(tmp_path / "run", Profile(Every(steps=8)))
    assert traces(tmp_path / "run") == ["step-00000008.json", "step-00000016.json"]
    assert digest == train(tmp_path / "whole", Profile(Every(steps=999)))


@pytest.mark.campaign("long")
def test_the_profiler_says_nothing_on_standard_error(tmp_path: Path) -> None:
    program = """
import os, sys, torch, everstep
from everstep.services import Profile
quiet = everstep.Console(sink=lambda line: None)
services = [Profile(everstep.Every(steps=2), steps=1, keep=2), quiet]
with everstep.Supervisor(sys.argv[1], services=services, max_step=8) as sv:
    sv.stream(None)
    while not sv.should_stop():
        torch.ones(2).sum()
        sv.advance()
assert "KINETO_LOG_LEVEL" not in os.environ
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(traces(tmp_path / "run")) == 2
