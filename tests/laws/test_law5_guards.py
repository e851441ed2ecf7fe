"""Law 5: no non-finite state is committed as good, whenever it arises and whenever it is saved."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import everstep
from everstep import Every
from everstep.checkpoint import CheckpointName, read_checkpoint
from everstep.errors import GuardStop, Interrupted, NonFiniteError
from everstep.services import NaNGuard
from everstep.supervisor.saving.saver import WriterThread

EPOCHS, STEPS = 3, 4
CADENCES = {
    "every step": Every(steps=1), "every 3 steps": Every(steps=3), "every epoch": Every(epochs=1),
    "at the end": everstep.Never(),
}  # fmt: skip
Kind = Literal["loss", "parameter", "moment"]
NO_SAVES = everstep.Checkpoints(everstep.Never())


class Program:
    """Trains a small model; at step `bad` something becomes NaN or infinite."""

    def __init__(
        self, run_dir: Path, bad: int, kind: Kind, value: float, *services: everstep.Service
    ) -> None:
        torch.manual_seed(0)
        self.run_dir, self.bad, self.kind, self.value, self.services = run_dir, bad, kind, value, services
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.data = everstep.data.arrays(np.arange(STEPS), batch_size=1)

    def step(self, step: int) -> float:
        loss = self.model(torch.rand(2, 3)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if step == self.bad and self.kind == "parameter":
            self.model.weight.data[0, 1] = self.value
        if step == self.bad and self.kind == "moment":
            self.optimizer.state[self.model.weight]["exp_avg_sq"][0, 0] = self.value
        return self.value if step == self.bad and self.kind == "loss" else 0.5

    def train_loop(
        self, inside: Any = id, tail: Any = id, max_epoch: int = EPOCHS
    ) -> everstep.supervisor.Ending:
        options: Any = {"max_epoch": max_epoch, "services": self.services}
        with everstep.TrainLoop(self.run_dir, self.state, **options) as loop:
            for epoch in loop.iter_epochs():
                for step, _ in loop.iter_steps(self.data):
                    loop.collect_metrics(loss=self.step(step))
                    inside(step)
                tail(epoch)
                loop.collect_metrics(valid_loss=1 / epoch)
        return loop.ending

    def supervise(self, leave: int = 0, max_step: int | None = EPOCHS * STEPS) -> everstep.supervisor.Ending:
        options: Any = {"max_step": max_step, "services": self.services}
        with everstep.Supervisor(self.run_dir, self.state, **options) as sv:
            batches = sv.stream(self.data)
            while not sv.should_stop():
                next(batches)
                sv.advance(loss=self.step(sv.step + 1))
                if sv.step == leave:
                    break
        return sv.ending


def committed(run_dir: Path) -> list[CheckpointName]:
    """The names of everything committed, checkpoints and best weights; each is finite."""
    names = []
    for manifest in sorted(run_dir.rglob("manifest.json")):
        checkpoint = read_checkpoint(manifest.parent)
        names.append(checkpoint.name)
        for name, array in checkpoint.arrays.items():
            if name.startswith("user/") and array.dtype == "F32":
                assert np.isfinite(array.data.view(np.float32)).all(), f"{checkpoint.name}: {name}"
    return names


@pytest.mark.campaign("long", gate=5)
@pytest.mark.parametrize(("door", "cadence"), [
    *((Program.train_loop, cadence) for cadence in CADENCES),
    *((Program.supervise, cadence) for cadence in CADENCES if cadence != "every epoch"),  # it has none
])  # fmt: skip
@pytest.mark.parametrize("kind", ["loss", "parameter", "moment"])
@pytest.mark.parametrize(("policy", "error"), [("raise", NonFiniteError), ("stop", GuardStop)])
def test_nothing_non_finite_is_committed(tmp_path: Path, door: Any, kind, cadence, policy, error) -> None:
    bad, value = 6, math.nan if policy == "raise" else math.inf
    for _ in range(2):  # started again, it comes to the same step and stops there again
        saves = everstep.Checkpoints(CADENCES[cadence], keep_last=None)
        with pytest.raises(error, match=r"step 6|after step"):
            door(Program(tmp_path, bad, kind, value, saves, NaNGuard(policy)))
        assert max(committed(tmp_path)).step < bad


def test_a_writer_that_is_faster_than_the_boundary_leaves_the_decision_to_the_guard(
    tmp_path, monkeypatch
) -> None:
    submit = WriterThread.submit

    def done_at_once(self: WriterThread, *job: Any) -> None:
        submit(self, *job)
        self.wait_idle()

    monkeypatch.setattr(WriterThread, "submit", done_at_once)
    saves = everstep.Checkpoints(Every(steps=1))
    with pytest.raises(GuardStop, match="after step 1"):
        Program(tmp_path, 1, "parameter", math.inf, saves, NaNGuard("stop")).supervise()


def test_the_step_is_named_however_late_it_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="'loss' is nan at step 6;"):
        Program(tmp_path, 6, "loss", math.nan, NO_SAVES).train_loop()


@pytest.mark.parametrize(("kind", "bad", "where", "error", "saved"), [
    # nothing was due since the NaN of the last step: the state of one step before it is committed
    ("loss", STEPS, "tail", Interrupted, STEPS - 1),
    ("loss", 3, "inside", NonFiniteError, 0),
    ("parameter", 3, "inside", NonFiniteError, 0),
])  # fmt: skip
def test_an_interruption_commits_no_unguarded_state(tmp_path: Path, kind, bad, where, error, saved) -> None:
    def terminate(count: int) -> None:
        if where == "tail" or count == bad:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(error):
        Program(tmp_path, bad, kind, math.nan, NO_SAVES).train_loop(max_epoch=1, **{where: terminate})
    assert max(committed(tmp_path)).step == saved


def test_leaving_a_supervisor_loop_early_saves_no_unguarded_state(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="at step 2"):
        Program(tmp_path, 2, "loss", math.nan).supervise(leave=2, max_step=None)
    assert max(committed(tmp_path)).step == 0


class EvaluatesToNaN(everstep.Service):
    stage = everstep.services.Stage.EVALUATE

    def __init__(self) -> None:
        super().__init__("eval", Every(steps=2))

    def run(self, boundary: everstep.Boundary) -> everstep.Outcome:
        return everstep.Outcome({"valid_loss": math.nan if boundary.step == 4 else 1.0})


def test_what_a_service_measures_is_guarded_before_that_boundary_is_saved(tmp_path: Path) -> None:
    services = [EvaluatesToNaN(), everstep.Checkpoints(Every(steps=1))]
    with pytest.raises(NonFiniteError, match="'valid_loss' is nan at step 4"):
        Program(tmp_path, 99, "loss", math.nan, *services).train_loop()
    assert max(committed(tmp_path)).step == 3


def test_best_weights_are_guarded_too(tmp_path: Path) -> None:
    best = everstep.Best("loss", every=Every(steps=1))
    with pytest.raises(NonFiniteError, match="user/model/weight"):
        Program(tmp_path, 1, "parameter", math.inf, best, NO_SAVES).train_loop()
    assert max(committed(tmp_path)).step == 0


def test_the_initial_state_is_guarded(tmp_path: Path) -> None:
    program = Program(tmp_path, 99, "loss", 0.0)
    program.model.bias.data[0] = math.nan
    with pytest.raises(NonFiniteError, match=r"after step 0, .*user/model/bias"):
        program.train_loop()
    assert committed(tmp_path) == []


def test_a_mask_of_minus_infinity_is_no_fault(tmp_path: Path) -> None:
    program = Program(tmp_path, 99, "loss", 0.0, everstep.Checkpoints(Every(steps=1)))
    program.model.register_buffer("mask", torch.full((2,), -math.inf, dtype=torch.float64))
    assert program.train_loop().finished
