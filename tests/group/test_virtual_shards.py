"""VirtualShards: the same bits on 1, 2 and 4 ranks, also where kills change the number in mid-epoch."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from processes import ended, lines_by_rank, outputs, started

import everstep
from everstep.errors import ConfigError, DataError, StateError
from everstep.polling import wait_until
from everstep.proof.compare import compare_runs
from everstep.torch import VirtualShards, parallel

# dropout, BatchNorm, draws of each kind, a buffer that is replaced and a part that only some shards use: what
# depends on how a batch is divided
NET = """
import random
import numpy
import torch
from torch import nn
import everstep
from everstep.state import digest, encode, make_entry
from everstep.torch import Clip, Task, VirtualShards

torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.2))
        self.last, self.spare, self.unused = nn.Linear(24, 1), nn.Linear(24, 1), nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(24))
    def forward(self, x):
        found = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * found.detach().mean(0)
            found = found * random.uniform(0.5, 1) * numpy.random.uniform(0.5, 1) - self.mean
        return self.spare(found) if x[0, 0] > 1 else self.last(found)

def loss_of(model, part):
    return nn.functional.mse_loss(model(part[0]), part[1])
"""

STEPS = """
generator = torch.Generator().manual_seed(0)
batches = [
    (torch.randn(24, 5, generator=generator), torch.randn(24, 1, generator=generator)) for _ in range(12)
]

def own(batch):
    each = 24 // size
    return tuple(values[rank * each : (rank + 1) * each] for values in batch)

torch.manual_seed(rank)  # all begin with the weights of rank 0
model = Net()
torch.manual_seed(0)
shards = VirtualShards(model, 4)
optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.1)
told = []
for batch in batches:
    drawn = torch.get_rng_state()
    optimizer.zero_grad()
    # two passes in one update: gradients are added
    loss = shards.backward(own(batch), lambda part: loss_of(model, part))
    more = shards.backward(own(batch), lambda part: {"loss": model(part[0]).square().mean(), "n": 1})
    optimizer.step()
    assert torch.equal(drawn, torch.get_rng_state())
    told += [float(loss), *map(float, more.values())]
assert model.unused.weight.grad is None  # no weight decay for what is not used
say(digest(encode({"m": make_entry("m", model).save(), "s": shards.state_dict(), "t": told})))

class Squares(Task):
    def build_model(self):
        torch.manual_seed(0)
        return Net()
    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    def forward(self, batch):
        return {"loss": loss_of(self.model, batch)}

task = Squares(shards=4, clip=Clip(global_norm=0.5), ema=0.9, autocast="bfloat16")
task.build()
told = [sorted((name, float(value)) for name, value in task.train_step(own(b)).items()) for b in batches]
trees = {name: make_entry(name, part).save() for name, part in task.state().items()}
say(digest(encode({"t": told, **trees})))
odd = torch.zeros(2 + rank, 5) if size == 4 else torch.zeros(3, 5)
try:
    shards.backward(odd, lambda part: model(part).mean())
except everstep.errors.DataError as error:
    say("refused")
"""


@pytest.mark.campaign("long")
def test_steps_have_the_same_bits_on_any_number_of_ranks() -> None:
    alone, *others = [lines_by_rank("".join(outputs(NET + STEPS, size))) for size in (1, 2, 4)]
    assert len(alone[0]) == 3
    for found in others:
        assert all(lines == alone[0] for lines in found.values())


LOOP = """
import numpy
from everstep import Every

def train(run, slow, window=1):
    numbers = numpy.random.default_rng(0)
    x, y = (numbers.standard_normal((64, n)).astype("float32") for n in (5, 1))
    torch.manual_seed(0)
    model = Net()
    shards = VirtualShards(model, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    state = {"model": model, "optimizer": optimizer, "shards": shards}
    stop = everstep.EarlyStop("valid_loss", patience=50)
    checkpoints = everstep.Checkpoints(Every(steps=3), keep_last=None)
    train = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
    with everstep.TrainLoop(run, state, seed=7, max_epoch=5, services=[stop, checkpoints]) as loop:
        for epoch in loop.iter_epochs():
            for step, batch in loop.iter_steps(train):
                loss = shards.backward([torch.as_tensor(v) for v in batch], lambda part: loss_of(model, part))
                if step % window == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                loop.collect_metrics(loss=loss)
                threading.Event().wait(slow)
            with loop.evaluation():
                model.eval()
                with torch.no_grad():
                    loop.collect_metrics(valid_loss=loss_of(model, [torch.as_tensor(v) for v in (x, y)]))
                model.train()
    user = {name: make_entry(name, value).save() for name, value in state.items()}
    say("digest", digest(encode(user)))
    say("one fingerprint", loop.ending.one_fingerprint)
"""


def _digests(said: list[str]) -> set[str]:
    return {line.partition("digest ")[2] for text in said for line in text.splitlines() if "digest" in line}


@cache
def undisturbed(folder: Path) -> tuple[Path, set[str]]:
    run = folder / "straight"
    return run, _digests(outputs(f"{NET}{LOOP}\ntrain({str(run)!r}, 0)", 1))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.mark.campaign("long")
@pytest.mark.parametrize("seed", range(12))
def test_kills_that_change_the_number_of_ranks_change_no_bit(seed: int, folder: Path, tmp_path: Path) -> None:
    chosen, run = random.Random(seed), tmp_path / "run"
    sizes = [4, 2, 1, 4, 1, 2]
    for size in sizes[seed % 4 : seed % 4 + 2]:
        with started(f"{NET}{LOOP}\ntrain({str(run)!r}, 0.05)", size) as processes:
            saved = {*run.glob("checkpoints/*/manifest.json")}
            wait_until(lambda: bool({*run.glob("checkpoints/*/manifest.json")} - saved), 60)  # noqa: B023
            time.sleep(chosen.random())
            for process in processes if seed % 2 else [chosen.choice(processes)]:
                process.send_signal(signal.SIGKILL)
            ended(processes)
    straight, expected = undisturbed(folder)
    last = sizes[seed % 4 + 2]
    said = outputs(f"{NET}{LOOP}\ntrain({str(run)!r}, 0)", last)
    assert _digests(said) == expected and "one fingerprint True" in said[0], said[0]
    # random state, whether gradients are used anew, and the digest of the last batch are what each rank has
    own = re.compile(r"ranks$|rank \d+/|leaf/(rng|gradients|streams/train/last)\b")
    assert [each for each in compare_runs(straight, run) if not own.match(each.path)] == []


@pytest.mark.campaign("long")
def test_a_window_of_gradients_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Windows of 4 steps, checkpoints each 3: the gradients are in the checkpoint, equal on all ranks."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    expected = _digests(outputs(f"{NET}{LOOP}\ntrain({str(straight)!r}, 0, 4)", 1))
    for size, save in ((2, "step-00000003"), (4, "step-00000006"), (1, "step-00000015")):
        with started(f"{NET}{LOOP}\ntrain({str(run)!r}, 0.05, 4)", size) as processes:
            wait_until((run / "checkpoints" / save).exists, 60)
            for process in processes:
                process.send_signal(signal.SIGKILL)
            ended(processes)
        # none later: what comes next begins inside a window
        for later in run.glob("checkpoints/step-*"):
            if later.name > save:
                shutil.rmtree(later)
    said = outputs(f"{NET}{LOOP}\ntrain({str(run)!r}, 0, 4)", 2)
    assert "this start has 2 ranks" in said[0] and "one fingerprint True" in said[0]
    assert _digests(said) == expected


MODEL, TABLE = torch.nn.Linear(2, 1), torch.nn.Embedding(3, 2, sparse=True)
SHARDS, ZEROS = VirtualShards(MODEL, 4), torch.zeros(4, 2)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: VirtualShards(MODEL, 3), ConfigError, "power of two"),
    (lambda: VirtualShards(torch.nn.ReLU(), 2), ConfigError, "leave out VirtualShards"),
    (lambda: VirtualShards(torch.nn.DataParallel(MODEL), 2), ConfigError, "without parallel"),
    (lambda: SHARDS.backward(torch.zeros(6, 2), MODEL), DataError, r"shape \(6, 2\).*drop_last"),
    (lambda: SHARDS.backward((ZEROS, "abcd"), lambda part: MODEL(part[0]).mean()), DataError, "holds a str"),
    (lambda: SHARDS.backward(ZEROS, lambda part: {"loss": MODEL(part).mean(), "size": part}), ConfigError,
     "'size' of shape"),
    (lambda: SHARDS.backward(ZEROS, lambda part: 1.0), ConfigError, "or a mapping with the tensor"),
    (lambda: SHARDS.backward((), MODEL), DataError, r"the batch \(\) holds no array"),
    (lambda: SHARDS.backward(torch.eye(4, 2), lambda x: {"loss": MODEL(x).mean(), str(x[0, 0].item()): 1}),
     ConfigError, r"\['loss', '0.0'\] for a shard, and \['loss', '1.0'\]"),
    (lambda: VirtualShards(TABLE, 2).backward(torch.tensor([0, 1]), lambda part: TABLE(part).sum()),
     ConfigError, "sparse=False"),
    (lambda: SHARDS.load_state_dict({"count": 2, "seed": 0, "passes": 0}), StateError,
     "has 4, which gives other bits"),
    (lambda: everstep.torch.Task(shards=4, parallel=True), ConfigError, "cannot be used with parallel"),
    (lambda: everstep.torch.Task(shards=4, accumulate=2), ConfigError, "cannot be used with accumulate"),
]  # fmt: skip


def test_what_cannot_be_divided_is_refused() -> None:
    for call, error, words in REFUSED:
        with pytest.raises(error, match=words):
            call()


def test_a_buffer_that_shards_change_otherwise_is_refused() -> None:
    counts = torch.nn.Linear(2, 1)
    counts.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def counted(part: torch.Tensor) -> torch.Tensor:
        counts.seen += (part > 0).sum(0)
        return counts(part).mean()

    split = VirtualShards(counts, 2)
    split.backward(torch.ones(4, 2), counted)  # alike: as a counter of passes
    assert counts.seen.tolist() == [2, 2]
    with pytest.raises(ConfigError, match=r"the buffer 'seen'.*float64"):
        split.backward(torch.tensor([[1, -1], [-1, 1]]).float(), counted)


def test_hooks_run_once_for_each_gradient_that_is_handed_out() -> None:
    model = torch.nn.Linear(2, 1)
    seen: list[torch.Tensor | None] = []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    VirtualShards(model, 2).backward(torch.ones(4, 2), lambda part: model(part).mean())
    (gradient,) = seen
    assert torch.equal(torch.ones(1, 2), gradient)  # type: ignore[arg-type]


def test_a_state_without_the_shards_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    shards = VirtualShards(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": parallel(model), "optimizer": optimizer}
    with pytest.raises(StateError, match="lacks the VirtualShards"):
        with everstep.TrainLoop(tmp_path / "run", state, max_step=1):
            pass
    data = everstep.data.arrays(torch.zeros(4, 2).numpy(), batch_size=2)
    with everstep.TrainLoop(tmp_path / "run", {**state, "shards": shards}, max_epoch=1, seed=1) as loop:
        for _ in loop.iter_epochs():
            for _, (x,) in loop.iter_steps(data):
                shards.backward(x, lambda part: model(torch.as_tensor(part)).mean())
                optimizer.step()
