"""A small program with a model in tensor parallelism, alone and beside FSDP2, DDP or on one process."""

from __future__ import annotations

from sharded_loops import HEAD as SHARDED

HEAD = f"""{SHARDED}
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel
from everstep.torch import Clip, ClipOptimizer, MinibatchOptimizer

samples = numpy.random.default_rng(1).standard_normal((64, 4, 6))
targets = samples.sum((1, 2), keepdims=True)

class Net(torch.nn.Module):
    # 22 rows of `up` and columns of `down` are divided; sequences of 4 places, too, with the plan "sequence"
    def __init__(self, dropout):
        super().__init__()
        linear = torch.nn.Linear
        self.into, self.norm, self.up = linear(6, 8), torch.nn.LayerNorm(8), linear(8, 22)
        self.down, self.out = linear(22, 8), linear(8, 2)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x):
        h = self.into(x)
        h = h + self.down(torch.tanh(self.up(self.norm(h))))
        return self.out(self.dropout(h)).sum((1, 2), keepdim=True)

PLANS = {{
    # `into`, `norm` and `out` are whole on each rank
    "plain": {{"up": ColwiseParallel(), "down": RowwiseParallel()}},
    "sequence": {{
        "into": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }},
}}

def built(how, dropout=0.0):
    # the model, and who reads the same samples
    torch.manual_seed(0)
    model = Net(dropout).double()
    if how == "ddp":
        return everstep.torch.parallel(model), None
    if how == "turned":
        return everstep.torch.parallel(model), (size - 1 - rank, size)
    if how == "fsdp":
        return fully_shard(model), None
    if how == "one":
        return model, None
    plan, divided = how.rstrip("+"), how.endswith("+")
    dp = size // 2 if divided else 1
    mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLANS[plan])
    if not divided:
        return model, 1
    return fully_shard(model, mesh=mesh["dp"]), mesh["dp"]

WRAPPED = {{
    "": lambda inner: inner,
    "clip": lambda inner: ClipOptimizer(inner, Clip(global_norm=0.5)),
    "window": lambda inner: MinibatchOptimizer(ClipOptimizer(inner, Clip(global_norm=0.5)), 3),
}}

def make_data(kind):
    if kind == "arrays":
        return everstep.data.arrays(samples, targets, batch_size=12, shuffle=True)
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    pairs = TensorDataset(torch.as_tensor(samples), torch.as_tensor(targets))
    sampler = DistributedSampler(pairs, num_replicas=data_size, rank=data_rank, seed=3)
    return DataLoader(pairs, batch_size=12 // data_size, sampler=sampler)

def train(run, how, kill_at=0, epochs=3, wrapped="", dropout=0.0, data="arrays", slow=0.0, every=2, **given):
    global data_rank, data_size
    model, mesh = built(how, dropout)
    optimizer = WRAPPED[wrapped](torch.optim.AdamW(model.parameters(), 0.01))
    state = {{"model": model, "optimizer": optimizer}}
    each = [everstep.Checkpoints(Every(steps=every)), everstep.Best("valid_loss", save=True)]
    given = dict(uneven="weight", seed=7, max_epoch=epochs, services=each, data_ranks=mesh) | given
    with everstep.TrainLoop(run, state, **given) as loop:
        entered(run, model, optimizer)
        data_rank, data_size = loop.data_rank, loop.data_ranks
        stream = make_data(data)
        for epoch in loop.iter_epochs():
            for step, (bx, by) in loop.iter_steps(stream):
                bx, by = torch.as_tensor(bx), torch.as_tensor(by)
                say("sums", step, data_rank, float(bx.sum()))
                loss = torch.nn.functional.mse_loss(model(bx), by)
                if wrapped == "window":
                    optimizer.weighted(loss, len(bx)).backward()
                else:
                    (loss * loop.batch_weight).backward()
                optimizer.step()
                optimizer.zero_grad()
                end_step(loop, step, loss, slow, kill_at)
            if wrapped == "window":
                optimizer.flush()
            model.eval()
            end_epoch(loop, model, samples, targets)
            model.train()
    left(loop, model, optimizer)
"""
