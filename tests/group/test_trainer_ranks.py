"""A Trainer on several ranks finds what it finds on one process, or refuses, in real processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from processes import lines_by_rank, outputs

pytestmark = pytest.mark.campaign("long")

HEAD = """
import json, math, os, pathlib
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import everstep
from everstep.record import RunJournal
from everstep.torch import Task
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
rng = np.random.default_rng(0)
def data(count):
    x = rng.standard_normal((count, 5))
    return x, np.sin(x.sum(1))
TRAIN, VALID = data(53), data(21)

class Squares(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    def build_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), 0.02)
    def errors(self, batch):
        x, y = map(torch.as_tensor, batch)
        return (self.model(x).squeeze(1) - y).square()
    def forward(self, batch):
        return {"loss": self.errors(batch).mean()}
    def inference_step(self, batch):
        return self.model(torch.as_tensor(batch[0])).squeeze(1).tolist()
"""

PROGRAM = """
class Measured(Squares):
    def eval_step(self, batch):
        errors = self.errors(batch)
        return {"loss": errors.mean(), "error": errors}

def middle(outputs):  # the median of all errors: not a mean over parts
    return {"middle": float(torch.cat([each["error"] for each in outputs]).median())}

tensors = TensorDataset(*map(torch.as_tensor, VALID))
sampler = DistributedSampler(tensors, size, rank, shuffle=False)
streams = {
    "train": everstep.data.arrays(*TRAIN, batch_size=16, shuffle=True),  # the last batch has 5 samples
    "valid": everstep.data.arrays(*VALID, batch_size=10),  # the last batch has 1: padding on the other ranks
    "sampled": DataLoader(tensors, 12 // size, sampler=sampler),
    "loaded": DataLoader(tensors, 10),
    "all": everstep.data.arrays(*VALID, batch_size=10),
}
stats = {"loss": ["std", "max"], "error": ["q90", "mean"]}
each = {"error": ["mean"]}
services = [
    everstep.Evaluate("valid", validate_first=True, stats=stats),
    everstep.Evaluate("sampled", everstep.Every(steps=3), stats=each),
    everstep.Evaluate("loaded", stats=each),
    everstep.Evaluate("all", agg_func=middle),
    everstep.EarlyStop("valid/loss", patience=9),
]
trainer = everstep.Trainer(
    Measured(parallel=True), streams, os.environ["RUN"], max_epoch=3, seed=7, services=services
)
ending = trainer.run_training()
forwards = 0
def counting(*_):
    global forwards
    forwards += 1
net = trainer.task.model
hook = net.register_forward_hook(counting)
found = {
    "after": trainer.evaluate_all(),
    "valid": trainer.evaluate("valid"),
    "part": trainer.evaluate("valid", 2),
    "given": trainer.evaluate(everstep.data.arrays(*VALID, batch_size=4)),
}
found["predicted"] = [value for batch in trainer.predict("valid") for value in batch]
found["steps"] = ending.step
found["weights"] = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
found["rows"] = sorted(  # which metric's rows come first in the file depends on when it was flushed
    [row.step, row.phase, row.name, row.value]
    for row in RunJournal(os.environ["RUN"]).rows() if not row.wall
)
recorded = everstep.runs.evaluations(os.environ["RUN"])
found["recorded"] = [[each.stream, each.num_steps, each.step, each.metrics] for each in recorded]
if rank == 0:
    assert recorded[0].digest == ending.digest and recorded[0].digest
say("forwards", forwards)
say("found", json.dumps(found))
"""


def near(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(near(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(near, found, wanted))
    return bool(found == wanted) or math.isclose(found, wanted, abs_tol=1e-10)


def run(program: str, size: int, folder: Path) -> dict[int, dict[str, str]]:
    program = f"import os; os.environ['RUN'] = {str(folder / f'run{size}')!r}\n{HEAD}{program}"
    found = lines_by_rank("".join(outputs(program, size)))
    assert sorted(found) == list(range(size)), found
    return {rank: dict(line.partition(" ")[::2] for line in lines) for rank, lines in found.items()}


def test_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    [alone] = run(PROGRAM, 1, tmp_path).values()
    wanted = json.loads(alone["found"])
    for size in (2, 3):
        said = run(PROGRAM, size, tmp_path)
        assert len({each["found"] for each in said.values()}) == 1, said
        found = json.loads(said[0]["found"])
        for name in wanted:
            assert near(found[name], wanted[name]), (size, name, found[name], wanted[name])
        assert {each["forwards"] for each in said.values()} == {alone["forwards"]}


WHOLE = """
from everstep.errors import ConfigError, DataError, DisagreementError, UsageError
from everstep.services import NaNGuard, Recovery
from everstep.services import Dump

class Ranked(Squares):
    \"""Evaluated by a function of all errors; one batch spoils a step on the rank that is handed it.\"""
    def forward(self, batch):
        spoiled = self.model.training and 0.25 in batch[0][:, 0]
        return {"loss": self.errors(batch).mean() * (math.nan if spoiled else 1.0)}
    def eval_step(self, batch):
        return {"error": self.errors(batch)}
    def eval_begin(self):
        return []
    def eval_reduce(self, state, outputs):
        return [*state, outputs["error"]]
    def eval_end(self, state):
        return {"middle": float(torch.cat(state).median())}

class Logged(Squares):
    def next_eval_inputs(self, batches):
        batch = next(batches)
        return batch, {"inputs": batch[0][:, 0]}
    def eval_step(self, batch):
        assert not self.model.training
        return self.forward(batch)

def refused(call):
    try:
        call()
    except (DataError, DisagreementError, UsageError, ConfigError) as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', [])}"
    raise AssertionError(call)

run = os.environ["RUN"]
found = {}
x, y = TRAIN
x[17, 0] = 0.25
train = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
valid = everstep.data.arrays(*VALID, batch_size=10)

services = [Recovery(), NaNGuard(), everstep.Checkpoints(everstep.Every(steps=2))]
trainer = everstep.Trainer(
    Ranked(parallel=True), {"train": train, "valid": valid}, f"{run}/ranked",
    max_epoch=2, seed=7, services=services,
)
ending = trainer.run_training()
found["ranked"] = [trainer.evaluate_all(), ending.step, ending.rollbacks]
rows = [[row.step, row.name, row.value] for row in RunJournal(f"{run}/ranked").rows() if not row.wall]
found["rows"] = [row for row in rows if row[2] == row[2]]

made = lambda: Logged(parallel=True)
experiment = everstep.Experiment(
    made, lambda: train, lambda: valid, f"{run}/made",
    services=[everstep.Evaluate("valid"), Dump(["inputs"])], max_step=9, seed=7, skip_check=True,
)
x[17, 0] = 0.5
found["made"] = experiment.train_and_evaluate(min_eval_frequency=4).metrics
again = everstep.Experiment(made, lambda: train, lambda: valid, f"{run}/made", seed=7, skip_check=True)
found["again"] = again.evaluate().metrics  # weights from the disk
if rank == 0:
    dumps = sorted(pathlib.Path(f"{run}/made/dumps").rglob("*.jsonl"))
    found["dumped"] = [path.read_text() for path in dumps]
say("found", json.dumps({name: each for name, each in found.items() if name != "dumped"}))
say("dumped", json.dumps(found.get("dumped")))
if size > 1:
    say("watch", refused(lambda: next(trainer.watch("valid"))))
    say("smoke", refused(trainer.smoke_test))
    say("multi", refused(lambda: everstep.trainer.MultiRun([trainer]).run_training()))
    mine = everstep.data.as_stream([(x[:3] + rank, y[:3])])  # each rank has other batches
    say("other", refused(lambda: trainer.evaluate(mine)))
    tensors = TensorDataset(*map(torch.as_tensor, VALID))
    part = DataLoader(tensors, 5, sampler=DistributedSampler(tensors, size, rank, shuffle=False))
    say("part", refused(lambda: trainer.evaluate(part)))
    say("predict", refused(lambda: next(trainer.predict(part))))
    class Own(Squares):
        def train_step(self, batch):
            return super().train_step(batch)
    say("uneven", refused(lambda: everstep.Trainer(
        Own(parallel=True), {"train": train}, f"{run}/own", max_step=1, seed=7).run_training()))
"""


def test_what_follows_from_all_outputs_and_what_is_refused(tmp_path: Path) -> None:
    [alone] = run(WHOLE, 1, tmp_path).values()
    said = run(WHOLE, 2, tmp_path)
    assert said[0]["found"] == said[1]["found"]
    wanted, found = json.loads(alone["found"]), json.loads(said[0]["found"])
    for name in wanted:
        assert near(found[name], wanted[name]), (name, found[name], wanted[name])
    assert wanted["ranked"][2] == 2 and said[0]["dumped"] == alone["dumped"] != "[]"
    for told in said.values():
        assert "watch() is for one process, and here 2 train together" in told["watch"]
        assert "smoke_test() is for one process" in told["smoke"]
        assert "a MultiRun is for one process" in told["multi"]
        assert "the data of stream 'valid' differs between the processes" in told["other"]
        assert "Ranked has eval_begin of its own; give data that is not divided" in told["part"]
        assert "predict() yields what one process predicts; give data" in told["predict"]
        assert 'give uneven="weight"' in told["uneven"]
