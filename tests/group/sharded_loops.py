"""A small program whose model several real processes hold together, in one of several layouts."""

from __future__ import annotations

HEAD = """
import contextlib, hashlib, numpy, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import everstep
from everstep import Every
from everstep.errors import EverstepError

torch.set_num_threads(1)
if size > 1 or os.environ.get("ALONE_IN_A_GROUP"):
    dist.init_process_group("gloo", init_method=os.environ.get("GROUP"), rank=rank, world_size=size)
numbers = numpy.random.default_rng(0)
x, y = numbers.standard_normal((60, 5)), numbers.standard_normal((60, 1))

def bare(dtype=torch.float64):
    torch.manual_seed(0)
    # 23 rows divide by neither 2 nor 4; of the last layer most ranks hold no row
    layers = [torch.nn.Linear(5, 23), torch.nn.Tanh(), torch.nn.Linear(23, 12), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(12, 1)).to(dtype)

def sharded(model, **given):
    for layer in (model[0], model[2]):
        fully_shard(layer, **given)
    return fully_shard(model, **given)

def values(model, optimizer):
    # a hash of every value, whatever the layout
    def plain(value):
        return (value.full_tensor() if isinstance(value, DTensor) else value).numpy()
    state = [plain(value) for value in model.state_dict().values()]
    for held in optimizer.state_dict()["state"].values():
        state += [plain(value) for value in held.values()]
    return hashlib.sha1(b"".join(each.tobytes() for each in state)).hexdigest()

def laid_out(how):
    model = bare(torch.float32 if how == "mixed precision" else torch.float64)
    if how in ("fsdp", "window", "clipped"):
        return sharded(model)
    if how == "mixed precision":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return sharded(model, mp_policy=policy)
    if how == "reduced in bfloat16":
        return sharded(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "parts"))
        return sharded(model, mesh=mesh)
    if how == "ddp":
        return everstep.torch.parallel(model)
    return model

def entered(run, model, optimizer):
    open(f"{run}.{os.getpid()}", "w").close()
    say("entered", values(model, optimizer))

def end_step(loop, step, loss, slow, kill_at):
    loop.collect_metrics(loss=loss)
    threading.Event().wait(slow)
    if step == kill_at and rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

def end_epoch(loop, model, inputs, targets):
    with loop.evaluation(), torch.no_grad():
        found = model(torch.as_tensor(inputs))
        loop.collect_metrics(valid_loss=(found.double() - torch.as_tensor(targets)).square().mean())
    loop.print_logs()

def left(loop, model, optimizer):
    say("left", values(model, optimizer))
    say("digest", loop.ending.digest)

def train(run, how="fsdp", kill_at=0, slow=0.0, epochs=3, every=2, **given):
    model = laid_out(how)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    state = {"model": model, "optimizer": optimizer}
    each = [everstep.Checkpoints(Every(steps=every)), everstep.Best('valid_loss', save=True)]
    accumulate = 3 if how == "window" else 1
    with everstep.TrainLoop(run, state, seed=7, max_epoch=epochs, services=each, **given) as loop:
        entered(run, model, optimizer)
        data = everstep.data.arrays(x, y, batch_size=12, shuffle=True)
        for epoch in loop.iter_epochs():
            for step, (bx, by) in loop.iter_steps(data):
                ends = step % accumulate == 0
                if accumulate > 1:
                    model.set_requires_gradient_sync(ends)
                dtype = torch.float32 if how == "mixed precision" else torch.float64
                found = model(torch.as_tensor(bx, dtype=dtype))
                loss = torch.nn.functional.mse_loss(found.to(dtype), torch.as_tensor(by, dtype=dtype))
                (loss / accumulate).backward()
                if ends:
                    if how == "clipped":
                        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                        loop.collect_metrics(norm=norm.full_tensor())
                    optimizer.step()
                    optimizer.zero_grad()
                end_step(loop, step, loss, slow, kill_at)
            end_epoch(loop, model, x.astype("float32") if how == "mixed precision" else x, y)
    left(loop, model, optimizer)
"""
