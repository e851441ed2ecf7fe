"""Programs whose resume is not exact are found out by the resume itself, after kill -9 a few steps later.

The scripts are the drill's; no boundary lies between the last checkpoint and the kill.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from everstep.record import RunJournal, Trail

SCRIPTS = Path(__file__).parent.parent / "drill" / "scripts"
FAULTS = {
    "cached_draw": "loss", "clock_augmentation": "batch of train", "counter_outside": "loss",
    "data_generator": "batch of train", "ema_outside": "valid_loss", "forgetful_service": "total",
    "notes_by_hand": "state 'notes'", "rate_by_hand": "state 'w'", "rows_by_chance": "norm",
    "schedule_outside": "state 'w'", "set_order": "batch of train", "thread": "loss",
    "torch_rate": "state 'optimizer'",
}  # fmt: skip
"""Script -> what its resume first finds to differ."""


def run(name: str, kill_at: int | None = None) -> None:
    """The script as the program of this process, killed once a step is complete."""
    whole = Trail.step

    def step(trail: Trail, at: int, *found: object) -> None:
        whole(trail, at, *found)  # type: ignore[arg-type]
        if at == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    Trail.step = step  # type: ignore[method-assign, assignment]
    script = SCRIPTS / f"{name}.py"
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def start(name: str, kill_at: int | None = None) -> int:
    """The exit status of a process of its own, in which strings have other hashes if it is killed."""
    here = f"import test_planted_faults; test_planted_faults.run({name!r}, {kill_at})"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(kill_at or 1)}
    by_hashes = name == "set_order"  # which a fresh interpreter alone has
    begin: Any = subprocess.run if by_hashes else warm.run
    return int(begin([sys.executable, "-c", here], env=environment, capture_output=True).returncode)


SOUND = ("lines_again", "supervisor", "unseeded")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", [*FAULTS, *SOUND])
def test_a_resume_finds_out_by_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert start(name, 20) == -signal.SIGKILL
    in_data = FAULTS.get(name) == "batch of train"
    assert start(name) == (1 if in_data else 0)
    found = [event.data for event in RunJournal(next(Path("runs").glob("*/run.json")).parent).divergences()]
    assert FAULTS.get(name) in [each["component"] for each in found] or (name not in FAULTS and not found)
    assert all(each["step"] >= 16 for each in found)
