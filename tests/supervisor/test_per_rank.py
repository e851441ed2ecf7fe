"""`PerRank`: a declaration that changes nothing on one process, and is told to the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.checkpoint import read_checkpoint
from everstep.supervisor.saving.user_state import UserState
from everstep.trainer.eval_loop import evaluating
from tiny_runs import Boom, boom_at


def with_memory(run_dir: Path, declare: Callable[[Any], Any], stop_at: int = 0) -> tuple[str, list[int]]:
    """Train with a memory in the state; return the digest at the end and the memory."""
    weights, memory = np.zeros(3), dict[str, Any](seen=[])
    state = {"w": weights, "memory": declare(memory)}
    saves = everstep.Checkpoints(everstep.Every(steps=1), keep_last=None)
    with everstep.TrainLoop(run_dir, state, max_epoch=2, seed=3, services=[saves]) as loop:
        for _epoch in loop.iter_epochs():
            for step, (ids,) in loop.iter_steps(everstep.data.arrays(np.arange(8), batch_size=2)):
                memory["seen"].append(int(ids[0]))
                weights += ids.sum()
                boom_at(stop_at)(loop, step)
    assert loop.ending.digest is not None
    return loop.ending.digest, memory["seen"]


def structure(run_dir: Path) -> Any:
    return read_checkpoint(max((run_dir / "checkpoints").iterdir())).structure["user"]


def test_on_one_process_the_declaration_changes_nothing(tmp_path: Path) -> None:
    assert with_memory(tmp_path / "bare", lambda memory: memory) == with_memory(
        tmp_path / "declared", everstep.PerRank
    )
    assert structure(tmp_path / "bare") == structure(tmp_path / "declared")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("first", [everstep.PerRank, lambda memory: memory])
def test_a_run_resumes_with_and_without_the_declaration(tmp_path: Path, first: Any) -> None:
    undisturbed = with_memory(tmp_path / "a", everstep.PerRank)
    with pytest.raises(Boom):
        with_memory(tmp_path / "b", first, stop_at=6)
    assert with_memory(tmp_path / "b", everstep.PerRank) == undisturbed


class Player(everstep.Task):
    """A task with a model of each rank's own."""

    def __init__(self) -> None:
        self.model = torch.nn.Dropout()

    def state(self) -> dict[str, Any]:
        return {"model": everstep.PerRank(self.model)}


def test_an_evaluation_switches_the_mode_of_a_declared_model() -> None:
    task = Player()
    with evaluating(task, seed=1):
        assert not task.model.training
    assert task.model.training


def test_the_state_describes_its_entries_for_the_other_ranks() -> None:
    user = UserState({"w": np.zeros(2), "memory": everstep.PerRank({"a": 1}), "slot": everstep.Slot(1)})
    assert user.described() == {
        "w": "numpy.ndarray",
        "memory": "PerRank",
        "slot": "everstep.state.entries.Slot",
    }
    assert user.per_rank == {"memory"}
    assert user.objects["memory"] == {"a": 1}
