"""A program that real processes train, whose model they hold together in one of several layouts.

Programs take it by `HEAD`; importing it joins no group.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import threading
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist  # noqa: F401, for programs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss

import everstep
from everstep import Every
from everstep.torch import Clip, ClipOptimizer, MinibatchOptimizer, Task

HEAD = """
import random
from everstep.errors import EverstepError
from layouts import *
torch.set_num_threads(1)
if size > 1:
    dist.init_process_group("gloo", rank=rank, world_size=size)
"""
rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
samples = numpy.random.default_rng(1).standard_normal((60, 4, 6))
samples[48:, 3, 5] = 0  # by which `Spare` knows the last batch of an epoch
targets = samples.sum((1, 2), keepdims=True)


def say(*words):
    os.write(1, (" ".join(map(str, (f"{rank}:", *words))) + "\n").encode())


class Net(torch.nn.Module):
    """Rows that neither 2 nor 4 divides, and one row; 22 rows of `up` and sequences of 4 for "sequence"."""

    def __init__(self, dropout=0.0, norm=None):
        super().__init__()
        linear = torch.nn.Linear
        self.into, self.norm, self.up = linear(6, 7), norm or torch.nn.LayerNorm(7), linear(7, 22)
        self.down, self.out, self.last = linear(22, 7), linear(7, 2), linear(2, 1)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x, spare=False):
        h = self.into(x)
        h = h + self.down(torch.tanh(self.up(self.norm(h))))
        return (self.spare if spare else self.last)(self.out(self.dropout(h)).sum(1, keepdim=True))


PLANS = {
    # `into`, `norm`, `out` and `last` are whole on each rank
    "plain": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "into": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
}
POLICIES = {
    "mixed precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "reduced in bfloat16": {"reduce_dtype": torch.bfloat16},
}
WRAPPED = {
    "value": lambda inner: ClipOptimizer(inner, Clip(value=0.01)),
    "norm": lambda inner: ClipOptimizer(inner, Clip(norm=0.05)),
    "global": lambda inner: ClipOptimizer(inner, Clip(global_norm=0.1)),
    "window": lambda inner: MinibatchOptimizer(ClipOptimizer(inner, Clip(global_norm=0.1)), 3),
}


def bare(dropout=0.0, norm=None, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return Net(dropout, norm).to(dtype)


def sharded(model, **given):
    for layer in (model.into, model.up):
        fully_shard(layer, **given)
    return fully_shard(model, **given)


def built(how, dropout=0.0, norm=None):
    """The model, and who reads the same samples; "+" is a mesh of two dimensions."""
    model = bare(dropout, norm, torch.float32 if how == "mixed precision" else torch.float64)
    plan, dp = how.rstrip("+"), size // 2 if how.endswith("+") else 1
    if how in POLICIES:
        return sharded(model, mp_policy=MixedPrecisionPolicy(**POLICIES[how])), None
    if how == "fsdp":
        return sharded(model), None
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "parts"))
        return sharded(model, mesh=mesh), None
    if how in ("ddp", "turned"):
        return everstep.torch.parallel(model), None if how == "ddp" else (size - 1 - rank, size)
    if plan in PLANS:
        mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], PLANS[plan])
        return (fully_shard(model, mesh=mesh["dp"]), mesh["dp"]) if dp > 1 else (model, 1)
    return model, None


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def values(model, optimizer):
    """A hash of every value, whatever the layout."""
    state = [*model.state_dict().values()]
    for held in optimizer.state_dict()["state"].values():
        state += held.values()
    return hashlib.sha1(b"".join(whole(each).numpy().tobytes() for each in state)).hexdigest()


def make_data(kind, loop):
    if kind == "arrays":
        return everstep.data.arrays(samples[:59], targets[:59], batch_size=12, shuffle=True)
    pairs = torch.utils.data.TensorDataset(*map(torch.as_tensor, (samples, targets)))
    part = {"num_replicas": loop.data_ranks, "rank": loop.data_rank, "seed": 3}
    sampler = torch.utils.data.DistributedSampler(pairs, **part)
    return torch.utils.data.DataLoader(pairs, batch_size=12 // loop.data_ranks, sampler=sampler)


def train(
    run, how="fsdp", kill_at=0, slow=0.0, epochs=3, every=2, wrapped="", dropout=0.0, data="arrays", **given
):
    """`wrapped`: an optimizer around SGD; "by hand", "no_sync" and "clipped" are what the program does.

    Inside a window of no_sync each rank has gradients and running statistics of its own.
    """
    model, data_ranks = built(how, dropout, torch.nn.BatchNorm1d(4) if wrapped == "no_sync" else None)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if wrapped in WRAPPED:
        optimizer = WRAPPED[wrapped](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    state = {"model": model, "optimizer": optimizer}
    each = [everstep.Checkpoints(Every(steps=every)), everstep.Best("valid_loss", save=True)]
    given = {"uneven": "weight", "data_ranks": data_ranks, **given}
    window, dtype = {"by hand": 3, "no_sync": 4}.get(wrapped, 1), next(model.parameters()).dtype
    with everstep.TrainLoop(run, state, seed=7, max_epoch=epochs, services=each, **given) as loop:
        open(f"{run}.{os.getpid()}", "w").close()
        say("entered", values(model, optimizer))
        stream = make_data(data, loop)
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(stream):
                bx, by = (torch.as_tensor(each, dtype=dtype) for each in batch)
                say("sums", step, loop.data_rank, float(bx.sum()))
                if wrapped == "by hand":
                    model.set_requires_gradient_sync(step % window == 0)
                with model.no_sync() if wrapped == "no_sync" and step % window else contextlib.nullcontext():
                    loss = mse_loss(model(bx).to(dtype), by)
                    if wrapped == "window":
                        optimizer.weighted(loss, len(bx)).backward()
                    else:
                        (loss * loop.batch_weight / window).backward()
                if wrapped == "clipped":
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    loop.collect_metrics(norm=norm.full_tensor())
                if step % window == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                loop.collect_metrics(loss=loss, **(optimizer.metrics() if wrapped in WRAPPED else {}))
                threading.Event().wait(slow)
                if step == kill_at and rank == size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            if wrapped == "window":
                optimizer.flush()
                loop.collect_metrics(optimizer.metrics())
            model.eval()
            with loop.evaluation(), torch.no_grad():
                found = model(torch.as_tensor(samples, dtype=dtype)).double()
                loop.collect_metrics(valid_loss=mse_loss(found, torch.as_tensor(targets)))
            model.train()
            loop.print_logs()
    say("left", values(model, optimizer))
    say("digest", loop.ending.digest)


class Squares(Task):
    def __init__(self, how, **given):
        super().__init__(**given)
        self.how = how

    def build_model(self, norm=None):
        if self.how == "ddp":  # all begin with the weights of rank 0
            return bare(norm=norm, seed=rank)
        return built(self.how, norm=norm)[0]

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.001, momentum=0.9, weight_decay=0.01)

    def forward(self, batch):
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}


class Normed(Squares):
    def build_model(self):
        return super().build_model(torch.nn.BatchNorm1d(4))


class Whole(Squares):
    def eval_end(self, state):
        return {"of_all": 1.0}


class Weighted(Squares):
    """The loss is a mean over elements that are not samples."""

    def forward(self, batch):
        weights = batch[0][:, :1, :1].abs()
        return {"loss": ((self.model(batch[0]) - batch[1]).square() * weights).sum() / weights.sum()}

    def elements(self, batch):
        return batch[0][:, 0, 0].abs().sum().item()


class Spare(Squares):
    """Another part of the model is used in some batches."""

    def build_model(self):
        model = super().build_model()
        model.spare = torch.nn.Linear(2, 1).double()
        return model

    def forward(self, batch):
        spare = self.model.training and bool((batch[0][:, 3, 5] == 0).all())
        return {"loss": mse_loss(self.model(batch[0], spare=spare), batch[1])}


CLIP = Clip(global_norm=0.1)
TASKS = {
    "plain": Squares,
    "clipped": partial(Squares, clip=CLIP, ema=0.9),
    "window": partial(Squares, clip=CLIP, accumulate=3),
    "window and ema": partial(Squares, clip=CLIP, accumulate=3, ema=0.5),
    "no mean": partial(Whole, clip=CLIP, accumulate=2),
    "elements": Weighted,
    "window of elements": partial(Weighted, accumulate=2),
    "static": partial(Squares, accumulate=3),
    "spare": partial(Spare, accumulate=2),
    "normed": partial(Normed, accumulate=4),
    "compiled": partial(Squares, compile={"backend": "eager"}),
}
OPTIONS = {"static": {"static_graph": True}, "spare": {"find_unused_parameters": True}}


class Dies(everstep.Service):
    """Kills the last rank in a step, before it is saved."""

    stage = everstep.services.Stage.MEASURE

    def __init__(self, kill_at):
        super().__init__("dies", Every(steps=1))
        self.kill_at = kill_at

    def run(self, boundary):
        if boundary.step == self.kill_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def run_task(run, how, kind, kill_at=0):
    """Leaves each rank's weights in the end, and what an evaluation finds with them."""
    pairs = [torch.as_tensor(each[:59]) for each in (samples, targets)]
    data = everstep.data.arrays(*pairs, batch_size=12)
    held = everstep.data.arrays(*pairs, batch_size=9)
    parallel = {"bucket_cap_mb": 1, **OPTIONS.get(kind, {})} if how == "ddp" else kind != "elements"
    each = [everstep.Checkpoints(Every(steps=1)), Dies(kill_at)] if kind == "normed" else []
    given = {"seed": 7, "max_epoch": 3, "uneven": "weight", "services": each}
    if how.rstrip("+") in PLANS:
        given["data_ranks"] = (rank // 2, size // 2)
    task = TASKS[kind](how, parallel=parallel)
    trainer = everstep.Trainer(task, {"train": data, "valid": held}, run, **given)
    trainer.run_training()
    models = [part for name, part in task.state().items() if name in ("model", "ema")]
    weights = torch.cat([whole(parameter).flatten() for model in models for parameter in model.parameters()])
    found = [weights.tolist(), *trainer.evaluate("valid").values()]
    Path(f"{run}.{rank}").write_text(json.dumps(found))


runs = itertools.count()


def refused(how, data_ranks=None, prepare=bool, in_step=lambda: None, stream=None, **state):
    """Says how a loop ends that trains a layout or a model; `prepare` is given the model."""
    try:
        model = built(how)[0] if isinstance(how, str) else how
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, 0.01)
        state = {"model": model, "optimizer": optimizer, **state}
        state = {name: part for name, part in state.items() if part is not None}
        run, each = f"{os.environ['FOLDER']}/refused-{next(runs)}", [everstep.Checkpoints(Every(steps=2))]
        stream = stream or everstep.data.arrays(samples, targets, batch_size=12)
        given = {"services": each, "data_ranks": data_ranks, "seed": 1, "max_epoch": 1}
        with everstep.TrainLoop(run, state, **given) as loop:
            prepare(model)
            for _ in loop.iter_epochs():
                for _, (bx, _) in loop.iter_steps(stream):
                    in_step()
                    model(torch.as_tensor(bx)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        say("taken")
    except Exception as error:
        say(type(error).__name__, " ".join(str(error).split()))
