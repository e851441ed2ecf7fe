"""Law 3: workers and prefetching change speed, never samples, their order or their augmentation."""

from __future__ import annotations

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


@pytest.mark.campaign("long")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_is_the_same_run(tmp_path: Path, workers: int) -> None:
    Program((*SHORT, "--data", "loader")).run(tmp_path / "none")
    Program((*SHORT, "--data", "loader", "--workers", str(workers))).run(tmp_path / "workers")
    assert compare_runs(tmp_path / "none", tmp_path / "workers") == []


def test_prefetching_is_the_same_run(tmp_path: Path) -> None:
    Program((*SHORT, "--data", "arrays")).run(tmp_path / "arrays")
    Program((*SHORT, "--data", "prefetch")).run(tmp_path / "prefetched")
    assert compare_runs(tmp_path / "arrays", tmp_path / "prefetched") == []


def test_the_number_of_workers_may_change_at_a_resume(tmp_path: Path) -> None:
    Program((*SHORT, "--data", "loader")).run(tmp_path / "none")
    for workers, crash in ((2, Crash("start", 3)), (0, Crash("end", 6)), (1, None)):
        program = Program(
            (*SHORT, "--data", "loader", "--workers", str(workers)),
            services=lambda: [everstep.Checkpoints(everstep.Every(steps=2))],
        )
        try:
            program.run(tmp_path / "changing", crash)
        except CrashError:
            continue
    assert compare_runs(tmp_path / "none", tmp_path / "changing") == []
