"""Law 3: workers and prefetching change speed, never samples, their order or their augmentation."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from law_support.training import Crash, CrashError, Program

import everstep
from everstep.proof.compare import compare_runs

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on few cores
]

SHORT = ("--epochs", "2", "--batch", "32")


def run(run_dir: Path, data: str, workers: int = 0, crash: Crash | None = None) -> Path:
    saves = everstep.Checkpoints(everstep.Every(steps=2))
    program = Program((*SHORT, "--data", data, "--workers", str(workers)), services=lambda: [saves])
    with suppress(CrashError):
        program.run(run_dir, crash)
    return run_dir


@pytest.mark.campaign("long")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_is_the_same_run(tmp_path: Path, workers: int) -> None:
    one, other = run(tmp_path / "none", "loader"), run(tmp_path / "workers", "loader", workers)
    assert compare_runs(one, other) == []


def test_prefetching_is_the_same_run(tmp_path: Path) -> None:
    one, other = run(tmp_path / "arrays", "arrays"), run(tmp_path / "prefetched", "prefetch")
    assert compare_runs(one, other) == []


def test_the_number_of_workers_may_change_at_a_resume(tmp_path: Path) -> None:
    for workers, crash in ((2, Crash("start", 3)), (0, Crash("end", 6)), (1, None)):
        run(tmp_path / "changing", "loader", workers, crash)
    assert compare_runs(run(tmp_path / "none", "loader"), tmp_path / "changing") == []
