"""examples/fsdp.py on two ranks: killed at any time, it ends as the run that nobody killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_ddp import ended, start_ranks

import warm
from everstep.polling import wait_until
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

FSDP = str(Path(__file__).parents[2] / "examples" / "fsdp.py")


def options(run: Path) -> list[str]:
    return [FSDP, "--small", f"--run-dir={run}"]


def run_ranks(run: Path) -> str:
    ranks = start_ranks(options(run))
    said = "".join(map(ended, ranks))
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said


@pytest.mark.campaign("long")
def test_it_learns_and_a_kill_changes_nothing(tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    run_ranks(straight)
    losses = RunJournal(straight).series("valid_loss", "tail")[1]
    assert losses == sorted(losses, reverse=True)
    ranks = start_ranks(options(run))
    assert wait_until(lambda: len(list(run.glob("checkpoints/*"))) >= 3, 120)
    ranks[1].kill()
    "".join(map(ended, ranks))
    assert "resuming" in run_ranks(run)
    assert compare_runs(straight, run) == []


@pytest.mark.campaign("long")
def test_on_one_process_it_goes_on_from_two(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = start_ranks(options(run))
    assert wait_until(lambda: len(list(run.glob("checkpoints/*"))) >= 3, 120)
    for rank in ranks:
        rank.kill()
    "".join(map(ended, ranks))
    said = warm.run([sys.executable, *options(run)], check=True, capture_output=True, text=True).stdout
    assert "is of 2 ranks, and this start has 1 rank" in said
    assert "digest of the state" in said
