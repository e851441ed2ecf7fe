"""Accumulation windows on several ranks: a save inside a window has each rank's own gradients and sums."""

from __future__ import annotations

from pathlib import Path

from processes import ended, lines_by_rank, started

PROGRAM = """
import numpy, torch
import everstep
from everstep import Every

torch.set_default_dtype(torch.float64)

class Small(everstep.torch.Task):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    def build_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), 0.02)
    def forward(self, batch):
        x, y = map(torch.as_tensor, batch)
        return {"loss": (self.model(x) - y).square().mean()}

def train(run, kill_at):
    torch.set_num_threads(1)
    numbers = numpy.random.default_rng(0)
    x, y = numbers.standard_normal((43, 3)), numbers.standard_normal((43, 1))
    class Killed(everstep.Service):
        stage = everstep.Stage.MEASURE
        def run(self, boundary):
            if boundary.step == kill_at and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    services = [everstep.Checkpoints(Every(steps=1)), Killed(None, Every(steps=1))]
    streams = {"train": everstep.data.arrays(x, y, batch_size=8, shuffle=True)}
    task = Small(accumulate=3, parallel=True)
    trainer = everstep.Trainer(task, streams, run, seed=3, max_step=17, services=services)
    ending = trainer.run_training()
    say("digest", ending.digest)
"""


def test_killed_inside_a_window_it_ends_as_the_undisturbed(tmp_path: Path) -> None:
    digests = []
    for name, kills in (("straight", [0]), ("killed", [8, 11, 0])):
        for kill_at in kills:
            with started(f"{PROGRAM}\ntrain({str(tmp_path / name)!r}, {kill_at})", 2) as processes:
                said = ended(processes)
                codes = [process.returncode for process in processes]
            assert codes == ([1, -9] if kill_at else [0, 0]), "\n".join(said)
        digests.append([lines_by_rank(text) for text in said])
    last = [[lines[rank][-1] for rank, lines in enumerate(each)] for each in digests]
    assert last[0] == last[1] and last[0][0] == last[0][1]
