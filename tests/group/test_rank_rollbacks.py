"""Failed steps on several ranks: the writer decides, and all ranks go back together, or none does."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ended, lines_by_rank, outputs, started
from rank_loops import HEAD

pytestmark = pytest.mark.campaign("long")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


PROGRAM = """
x[37] = np.inf
weights = []
def main():
    from everstep.services import NaNGuard, Recovery
    guards = [NaNGuard(), Recovery(), everstep.Checkpoints(every=everstep.Every(steps=3))]
    loop = trained("run", services=guards)
    say(loop.ending.rollbacks, loop.step, loop.ending.finished, weigh(loop))

def weigh(loop):
    return [round(number, 12) for number in loop.live_object("model").weight.flatten().tolist()]

everstep.recovering(main)
"""


def test_all_ranks_go_back_and_end_like_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines_by_rank("".join(outputs(HEAD + PROGRAM, 2)))
    assert said[0] == said[1] and said[0][0].startswith("3 "), said
    monkeypatch.setenv("FOLDER", str(folder / "alone"))
    alone = lines_by_rank("".join(outputs(HEAD + PROGRAM, 1)))
    assert alone[0] == said[0]


def test_a_step_that_fails_on_one_rank_alone_is_not_undone_and_ends_all(folder: Path) -> None:
    program = """
def bad(loop, step):
    if step == 5 and rank == 1:
        raise everstep.errors.BadStepError("a loss of rank 1")

def main():
    trained("run", bad, services=[everstep.services.Recovery()])

everstep.recovering(main)
"""
    with started(HEAD + program, 2) as processes:
        printed = ended(processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert "BadStepError: a loss of rank 1" in printed[1] and "step 5 is not undone" in printed[1]
    assert "a consequence of rank 1: BadStepError: a loss of rank 1" in printed[0]


def test_retry_is_refused_before_anything_is_made(folder: Path) -> None:
    program = """
said, *_ = ended("run", services=[services.Retry()])
say(said, (folder / "run").exists())
"""
    said = lines_by_rank("".join(outputs(HEAD + program, 2)))
    for rank in range(2):
        assert said[rank][0].startswith("ConfigError: Retry tries again in one process")
        assert "torchrun --max-restarts" in said[rank][0] and said[rank][0].endswith(" False")
