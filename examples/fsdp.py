"""A small language model in shards: each process holds a part of each weight, with its moments and average.

    python examples/fsdp.py
    torchrun --nproc-per-node 2 examples/fsdp.py

Kill a process, or all of them, and start again: the run resumes, and ends with the same bits.  Start it on
another number of processes: the run goes on from the same values.  --small takes some seconds.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformer import SMALL, Block, Size, Transformer, loss_on, split, standard_library

import everstep


def in_shards(model: nn.Module) -> None:
    """Divide a model among the processes: block by block, then what is around the blocks."""
    for part in model.modules():
        if isinstance(part, Block):
            fully_shard(part)
    fully_shard(model)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    # torchrun takes --run for an option of its own that is cut short
    parser.add_argument("--run-dir", default="runs/fsdp", help="the run's directory (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a size for tests")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    size = SMALL if options.small else Size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # of the initial weights, equal on all processes
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")

    text = standard_library(size.files)
    train, held_out = split(text, size)
    model = Transformer(size)
    # before: what is divided cannot be copied any more
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    if several:
        in_shards(model)
        in_shards(average.module)
    # after: the optimizer steps the parts that this process holds
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with everstep.TrainLoop(
        options.run_dir,
        state={"model": model, "average": average, "optimizer": optimizer},
        max_epoch=size.epochs,
        steps_per_epoch=size.steps,
        seed=0,
        watch="valid_loss",
        # between two updates: a sum that is open belongs to as many processes as there are
        services=[everstep.Checkpoints(everstep.Every(steps=12 * size.accumulate))],
    ) as loop:
        for _epoch in loop.iter_epochs():
            for step, (batch,) in loop.iter_steps(train):
                ends = step % size.accumulate == 0
                if several:
                    model.set_requires_gradient_sync(ends)  # type: ignore[operator]
                loss = loss_on(model, text, batch, size.context)
                (loss / size.accumulate).backward()
                if ends:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    average.update_parameters(model)
                loop.collect_metrics(loss=loss)
            with loop.evaluation():
                # all processes make each pass together, as each holds a part of the weights
                loop.collect_metrics(valid_loss=loss_on(average, text, held_out, size.context))
            loop.print_logs()
    if loop.rank == 0:
        print("digest of the state:", loop.ending.digest)


if __name__ == "__main__":
    main()
