"""A small program that several real processes train, for tests of their decisions."""

from __future__ import annotations

HEAD = """
import json
import numpy as np, torch, torch.distributed as dist
from pathlib import Path
import everstep
from everstep import data, services
from everstep.errors import EverstepError

torch.set_num_threads(1)
dist.init_process_group("gloo")
folder = Path(os.environ["FOLDER"])
numbers = np.random.default_rng(0)
x, y = numbers.standard_normal((64, 5)), numbers.standard_normal((64, 1))

def nothing(loop, step=0):
    pass

def trained(name, inside=nothing, tail=nothing, epochs=3, seed=7, keep=None, own=None, **given):
    # 8 steps in each epoch; `inside` is called in each step before its end, `tail` after the steps
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1).double()
    parallel = everstep.torch.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = {"model": model, "optimizer": optimizer, **(own or {})}
    with everstep.TrainLoop(folder / name, state, max_epoch=epochs, seed=seed, **given) as loop:
        if keep is not None:
            keep.append(loop)
        for epoch in loop.iter_epochs():
            for step, (bx, by) in loop.iter_steps(data.arrays(x, y, batch_size=8, shuffle=True)):
                loss = torch.nn.functional.mse_loss(parallel(torch.as_tensor(bx)), torch.as_tensor(by))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loop.collect_metrics(loss=loss)
                inside(loop, step)
            loop.collect_metrics(valid_loss=float(epoch))
            tail(loop)
            loop.print_logs()
    return loop

def ended(name, *args, **given):
    # how a loop ends, in words that are equal on all ranks
    keep = []
    try:
        trained(name, *args, keep=keep, **given)
        said = "ended"
    except (EverstepError, SystemExit) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
    ending = keep[0].ending if keep and keep[0]._engine.ending else None
    return said, ending and ending.step, ending and ending.reason

def checkpoints(name):
    return sorted(path.name for path in (folder / name / "checkpoints").iterdir())
"""
