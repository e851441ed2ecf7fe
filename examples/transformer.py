"""A small causal transformer on the source text of Python's standard library, byte by byte.

Stop it at any point, with Ctrl-C or kill -9, and start it again: it resumes, and ends with the same bits.
The default takes about ten minutes on two CPU cores, --small some seconds.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everstep


@dataclass(frozen=True)
class Size:
    """What --small changes; `accumulate` batches make one update."""

    files: int | None = None
    context: int = 128
    width: int = 128
    layers: int = 4
    batch: int = 32
    accumulate: int = 2
    steps: int = 200
    epochs: int = 8


SMALL = Size(files=20, context=32, width=32, layers=2, batch=8, steps=60, epochs=4)


def standard_library(files: int | None) -> Tensor:
    """The bytes of its modules, in the order of their names: int64, 1-D."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:files]
    text = b"".join(path.read_bytes() for path in modules)
    print(f"{len(modules)} modules, {len(text):,} bytes, hash {xxhash.xxh3_64_hexdigest(text)}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Block(nn.Module):
    """Attention to what came before, then a perceptron: (batch, time, width) to the same."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(attended))
        mixed: Tensor = x + self.dropout(self.mlp(self.between(x)))
        return mixed


class Transformer(nn.Module):
    """Bytes (batch, time) to scores of the next byte (batch, time, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm, self.scores = nn.LayerNorm(size.width), nn.Linear(size.width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        scores: Tensor = self.scores(self.norm(self.blocks(x)))
        return scores


def loss_on(model: nn.Module, text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Mean nats per byte on the pieces of text that begin at `starts`."""
    pieces = text[starts[:, None] + torch.arange(context + 1)]
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def split(text: Tensor, size: Size) -> tuple[everstep.data.Stream, Tensor]:
    """Where pieces of the text begin: batches of them to train on, and 128 that are held out."""
    starts = torch.arange(0, len(text) - size.context - 1, size.context)
    trained = starts[torch.arange(len(starts)) % 20 != 0]
    train = everstep.data.arrays(trained, batch_size=size.batch, shuffle=True, drop_last=True)
    return train, starts[::20][:128]


def rate(size: Size, update: int) -> float:
    """The part of the learning rate: up in a line, down in a cosine."""
    updates = size.steps * size.epochs // size.accumulate
    warm_up = updates // 10
    done = (update - warm_up) / (updates - warm_up)
    return update / warm_up if update < warm_up else 0.55 + 0.45 * math.cos(math.pi * min(done, 1))


@torch.no_grad()
def sample(model: nn.Module, prompt: str, length: int, context: int) -> str:
    """`prompt` and `length` more bytes, drawn from the model with a generator of its own."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    text = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        chances = (model(text[:, -context:].to(device))[0, -1] / 0.7).softmax(-1).cpu()
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)[None]], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--run", default="runs/transformer", help="the run's directory (default: %(default)s)"
    )
    parser.add_argument("--small", action="store_true", help="a size for tests")
    parser.add_argument(
        "--again", action="store_true", help="start over; the checkpoints move to superseded/"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    size = SMALL if options.small else Size()
    if options.small:
        torch.set_num_threads(1)  # so small a model gains nothing from more
    torch.manual_seed(0)  # of the initial weights
    device = "cuda" if torch.cuda.is_available() else "cpu"

    text = standard_library(size.files).to(device)
    train, held_out = split(text, size)

    model = Transformer(size).to(device)  # before the optimizer is made
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rate(size, update + 1))

    with everstep.TrainLoop(
        options.run,
        state={"model": model, "average": average, "optimizer": optimizer, "schedule": schedule},
        max_epoch=size.epochs,
        steps_per_epoch=size.steps,
        seed=0,
        watch="valid_loss",
        services=[everstep.Checkpoints(everstep.Every(steps=25)), everstep.services.JSONLines()],
        resume=not options.again,
    ) as loop:
        loop.println(f"stop me with Ctrl-C, or with kill -9 {os.getpid()}, and start me again")
        for _epoch in loop.iter_epochs():
            for step, (batch,) in loop.iter_steps(train):
                loss = loss_on(model, text, batch, size.context)
                (loss / size.accumulate).backward()
                if step % size.accumulate == 0:
                    loop.collect_metrics(rate=schedule.get_last_lr()[0])
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    average.update_parameters(model)
                loop.collect_metrics(loss=loss)
            with loop.evaluation(), loop.timeit("valid_time"):
                loop.collect_metrics(valid_loss=loss_on(average, text, held_out, size.context))
            loop.print_logs()
    average.eval()
    print(sample(average, "def ", 50 if options.small else 500, size.context))
    print(f"digest of the state: {loop.ending.digest}")


if __name__ == "__main__":
    main()
