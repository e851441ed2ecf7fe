"""Accumulation windows on several ranks: killed inside a window, a run ends as the undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ended, started

from everstep.proof.compare import compare_runs

pytestmark = pytest.mark.campaign("long")

# Inside a window each rank has gradients, sums and (but for the broadcast) running statistics of its own.
HEAD = """
import contextlib, numpy, torch
import everstep
from everstep import Every

torch.set_num_threads(1)
numbers = numpy.random.default_rng(0)
x, y = numbers.standard_normal((45, 5)), numbers.standard_normal((45, 1))
data = everstep.data.arrays(x, y, batch_size=8, shuffle=True)

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 1)).double()

def mean_error(model, batch):
    bx, by = map(torch.as_tensor, batch)
    return torch.nn.functional.mse_loss(model(bx), by)

each = [everstep.Checkpoints(Every(steps=1))]
steps = 0
def count():
    global steps
    steps += 1
    if steps == kill_at and rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""

DOORS = {
    "Task": """
class Squares(everstep.torch.Task):
    def build_model(self):
        return build()
    def build_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), 0.01)
    def forward(self, batch):
        count()
        return {"loss": mean_error(self.model, batch)}
task = Squares(parallel=True, accumulate=4)
everstep.Trainer(task, {"train": data}, run, max_epoch=3, seed=7, services=each).run_training()
""",
    "no_sync": """
model = everstep.torch.parallel(build())
optimizer = torch.optim.Adam(model.parameters(), 0.01)
state = {"model": model, "optimizer": optimizer}
with everstep.TrainLoop(run, state, seed=7, max_epoch=3, uneven="weight", services=each) as loop:
    for epoch in loop.iter_epochs():
        for step, batch in loop.iter_steps(data):
            count()
            with contextlib.nullcontext() if step % 4 == 0 else model.no_sync():
                (mean_error(model, batch) * loop.batch_weight / 4).backward()
            if step % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
""",
}


@pytest.mark.parametrize("door", DOORS)
def test_a_run_killed_inside_windows_ends_as_the_undisturbed(door: str, tmp_path: Path) -> None:
    def train(name: str, kill_at: int, size: int = 2) -> list[int | None]:
        run = tmp_path / name
        with started(f"run, kill_at = {str(run)!r}, {kill_at}\n{HEAD}{DOORS[door]}", size) as processes:
            said = ended(processes)
        codes = [process.returncode for process in processes]
        assert kill_at or codes == [0] * size, "\n".join(said)
        return codes

    train("straight", 0)
    assert train("killed", 7)[-1] == -9
    assert train("killed", 4)[-1] == -9
    train("killed", 0)
    assert compare_runs(tmp_path / "straight", tmp_path / "killed") == []
