"""A Task on several ranks computes what one process computes with the whole batches, in real processes."""

from __future__ import annotations

import pytest
import torch
from processes import lines_by_rank, outputs

import everstep
from everstep.errors import ConfigError

PROGRAM = '''
from collections import Counter
import torch, torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
import everstep
from everstep import backends
from everstep.contracts.data import Share
from everstep.contracts.group import DataRanks
from everstep.state import digest, encode, make_entry
from everstep.torch import Clip, MinibatchOptimizer, Task, parallel

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
share = Share(rank, size, "weight")
backend = backends.get("torch")

class Net(nn.Module):
    def __init__(self, spare=False):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 1)
        self.spare = nn.Linear(8, 1) if spare else None  # used in some batches
    def forward(self, x, spare=False):
        found = torch.relu(self.first(x))
        return (self.spare if spare else self.second)(found).squeeze(1)

class Squares(Task):
    def build_model(self):
        torch.manual_seed(rank)  # all begin with the weights of rank 0
        return Net(isinstance(self, Spare))
    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    def forward(self, batch):
        x, y, length = batch
        return {"loss": (self.model(x) - y).square().mean()}

class Spare(Squares):
    def forward(self, batch):
        x, y, length = batch
        return {"loss": (self.model(x, spare=bool((x[:, 4] == 0).all())) - y).square().mean()}

class Tokens(Squares):
    """The loss is a mean over elements that are not samples."""
    def forward(self, batch):
        x, y, length = batch
        return {"loss": ((self.model(x) - y).square() * length).sum() / length.sum()}
    def elements(self, batch):
        return batch[2].sum()

generator = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randn(n, 5, generator=generator), torch.randn(n, generator=generator),
     torch.randint(1, 9, (n,), generator=generator).double())
    for n in (10, 10, 7, 10, 10, 10, 9)
]
BATCHES[-1][0][:, 4] = 0  # for `Spare`: another part of the model, in a window of its own

def ours(task, batch):
    """The part of a global batch, and its weight."""
    places, task.batch_weight = share.of(len(batch[0]))
    return tuple(values[places] for values in batch)

def trained(task, part):
    task.build()
    if part:
        backend.require_synchronised(task.state(), DataRanks(range(size)))
        backend.prepare_ranks(task.state(), DataRanks(range(size)))
    found = {}
    for epoch in range(2):
        for batch in BATCHES:
            metrics = task.train_step(ours(task, batch) if part else batch)
            found |= {name: float(value) for name, value in metrics.items() if name != "loss"}
        found |= {name: float(value) for name, value in (task.train_loop_end() or {}).items()}
    model = task.state()["model"]
    kept = torch.cat([p.detach().flatten() for p in model.parameters()])
    if "ema" in task.state():
        kept = torch.cat([kept, *[p.detach().flatten() for p in task.state()["ema"].parameters()]])
    return kept, found

KINDS = {
    "plain": lambda **how: Squares(**how),
    "clipped": lambda **how: Squares(clip=Clip(global_norm=0.1), ema=0.9, **how),
    "windows": lambda **how: Squares(accumulate=3, clip=Clip(global_norm=0.5), ema=0.5, **how),
    "tokens": lambda **how: Tokens(**how),
    "windows of tokens": lambda **how: Tokens(accumulate=2, **how),
    "compiled": lambda **how: Squares(compile={"backend": "eager"}, **how),
}
STATIC = {"windows of a static graph": lambda **how: Squares(accumulate=3, **how)}
SPARE = {"windows of a part": lambda **how: Spare(accumulate=3, **how)}

for kind, make in (KINDS | STATIC | SPARE).items():
    if kind == "compiled" and size != 2:
        continue  # compiling takes seconds
    options = {"bucket_cap_mb": 1, "find_unused_parameters": kind in SPARE, "static_graph": kind in STATIC}
    task = make(parallel=options)
    kept, found = trained(task, True)
    torch.manual_seed(0)
    alone = make()
    alone.model = Net(kind in SPARE)
    wanted, expected = trained(alone, False)
    error = (kept - wanted).abs().max().item()
    assert error < 1e-10, (kind, error)
    assert found.keys() == expected.keys(), (kind, found, expected)
    for name, value in found.items():
        assert abs(value - expected[name]) < 1e-10, (kind, name, value, expected)
    tree = {name: make_entry(name, part).save() for name, part in task.state().items() if name != "scheduler"}
    say(kind, digest(encode(tree)))

task = Squares(accumulate=3, parallel=True)
task.build()
backend.prepare_ranks(task.state(), DataRanks(range(size)))
counts = []
for batch in BATCHES[:4]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        task.train_step(ours(task, batch))
    counts.append(Counter(event.name for event in profiler.events())["gloo:all_reduce"])
say("all-reduces", counts)  # a bucket, and the counts of elements
'''


@pytest.mark.campaign("long")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_compute_what_one_process_computes(size: int) -> None:
    said = lines_by_rank("".join(outputs(PROGRAM, size)))
    assert len(said) == size and all(lines == said[0] for lines in said.values()), said
    assert len(said[0]) == (9 if size == 2 else 8)
    assert said[0][-1] == "all-reduces [0, 0, 2, 0]"


def test_parallel_is_true_or_options() -> None:
    with pytest.raises(ConfigError, match=r"parallel=2: give True, or options"):
        everstep.torch.Task(parallel=2)  # type: ignore[arg-type]


def test_on_one_process_parallel_changes_nothing() -> None:
    class Line(everstep.torch.Task):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 1)

        def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), 0.1)

    task = Line(parallel={"bucket_cap_mb": 1}, accumulate=2)
    task.build()
    assert type(task.model) is torch.nn.Linear and task.batch_weight == 1.0
    with task.accumulating():
        task.backward(task.model(torch.ones(1, 1)).sum(), 1)
    wrong = Line(parallel={"bucket_cap": 1})
    with pytest.raises(ConfigError, match=r"did you mean 'bucket_cap_mb'"):
        wrong.build()
