"""Write docs/checked.md: the verdicts of `everstep.testing.check` on public objects.

    python tools/checked_page.py

Needs the extra `test` and gymnasium; the page says which versions were checked, and when.
"""

from __future__ import annotations

import copy
import datetime
import platform
import random
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import datasets
import gymnasium
import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from everstep.testing import Checked, check

PAGE = Path(__file__).parent.parent / "docs" / "checked.md"
PACKAGES = ("torch", "torchdata", "numpy", "datasets", "torchmetrics", "accelerate", "gymnasium")


class Row(NamedTuple):
    """One object: its name on the page, what makes it, what training does to it, and what to do."""

    name: str
    make: Callable[[], Any]
    change: Callable[[Any], Any] | None = None
    remedy: str = ""


# ---------------------------------------------------------------------------------------- data


def samples(count: int = 400) -> Any:
    """A list, which a DataLoader takes for data as well as a Dataset."""
    return list(torch.arange(float(count)).view(-1, 1))


class Numbers(IterableDataset[Any]):
    """As people write it: no state."""

    def __iter__(self) -> Any:
        return iter(samples())


class InPlace(Sampler[Any]):
    """As deepspeech.pytorch's sampler: batches of neighbours, shuffled within each batch."""

    def __init__(self) -> None:
        self.batches = [list(range(first, first + 4)) for first in range(0, 400, 4)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for batch in self.batches:
            random.shuffle(batch)
            yield batch


def rows(shuffle: bool = False) -> Any:
    found = datasets.Dataset.from_dict({"x": list(range(4000))}).to_iterable_dataset(num_shards=4)
    return found.shuffle(seed=1, buffer_size=300) if shuffle else found


def table() -> Any:
    return datasets.Dataset.from_dict({"x": list(range(400))}).with_format("torch")


def prepared() -> Any:
    return accelerate.Accelerator(cpu=True).prepare(DataLoader(samples(), 4))


DATA = [
    Row("list of batches", lambda: samples()),
    Row("torch `DataLoader`, `shuffle=True`", lambda: DataLoader(samples(), 4, shuffle=True)),
    Row("the same, `num_workers=2`", lambda: DataLoader(samples(), 4, shuffle=True, num_workers=2)),
    Row(
        "the same, `persistent_workers=True`",
        lambda: DataLoader(samples(), 4, num_workers=2, persistent_workers=True),
        remedy="`persistent_workers=False`, or `everstep.data.loader`",
    ),
    Row("`DataLoader` over an `IterableDataset`", lambda: DataLoader(Numbers(), 4)),
    Row("`RandomSampler`", lambda: DataLoader(samples(), 4, sampler=RandomSampler(samples()))),
    Row(
        "`WeightedRandomSampler`",
        lambda: DataLoader(samples(), 4, sampler=WeightedRandomSampler([1.0] * 400, 400)),
    ),
    Row(
        "`BatchSampler`",
        lambda: DataLoader(samples(), batch_sampler=BatchSampler(RandomSampler(samples()), 4, True)),
    ),
    Row(
        "`DistributedSampler`", lambda: DataLoader(samples(), 4, sampler=DistributedSampler(samples(), 1, 0))
    ),
    Row(
        "a sampler that shuffles its own list in place",
        lambda: DataLoader(samples(), batch_sampler=InPlace()),
    ),
    Row(
        "torchdata `StatefulDataLoader`, `shuffle=True`",
        lambda: StatefulDataLoader(samples(), 4, shuffle=True),
    ),
    Row(
        "torchdata `StatefulDistributedSampler` in a `DataLoader`",
        lambda: DataLoader(samples(), 4, sampler=StatefulDistributedSampler(samples(), 1, 0)),
    ),
    Row("datasets `Dataset` (map-style) in a `DataLoader`", lambda: DataLoader(table(), 4, shuffle=True)),
    Row("datasets `IterableDataset`", lambda: rows().batch(4)),
    Row(
        "datasets `IterableDataset.shuffle(seed=1)`",
        lambda: rows(True).batch(4),
        remedy="none needed: drawn again",
    ),
    Row(
        "the same in a `StatefulDataLoader`",
        lambda: StatefulDataLoader(rows(True), 4),
        remedy="none needed: drawn again",
    ),
    Row("the same in a `DataLoader`", lambda: DataLoader(rows(True), 4)),
    Row(
        "a loader that accelerate has prepared",
        prepared,
        remedy="prepare model and optimizer only; give the `DataLoader` itself",
    ),
    Row(
        "`zip(a, b)`",
        lambda: zip(samples(), samples(), strict=True),
        remedy="`StackDataset`, or two streams of a Supervisor",
    ),
    Row("a generator", lambda: (each for each in samples()), remedy="a list, or an object with `__iter__`"),
    Row("an iterable without state", Numbers),
]

# --------------------------------------------------------------------------------------- state


def optimizer(kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(nn.Linear(3, 3).parameters(), lr=0.1, **options)


def step(made: Any) -> None:
    """One update with gradients that follow from the random state."""
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    made.step()


class Scheduled:
    """A scheduler and its optimizer, whose learning rate some schedulers read."""

    def __init__(self, kind: Any, *arguments: Any, metric: bool = False, **options: Any) -> None:
        self.optimizer, self.metric = optimizer(), metric
        self.scheduler = kind(self.optimizer, *arguments, **options)

    def step(self) -> Any:
        self.scheduler.step(*([1.0] if self.metric else []))
        return self.optimizer.param_groups[0]["lr"]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def measure(metric: Any) -> Any:
    metric.update(torch.rand(4, 3), torch.randint(0, 3, (4,)))
    return metric.compute()


def average(metric: Any) -> Any:
    metric.update(torch.rand(4))
    return metric.compute()


def auroc(metric: Any) -> Any:
    metric.update(torch.rand(8), torch.randint(0, 2, (8,)))
    return metric.compute()


def advance(scheduler: Any) -> Any:
    scheduler.step()
    return scheduler.get_last_lr()


def forward(model: Any) -> Any:
    return model(torch.rand(5, 3)).detach()


def swa() -> Any:
    torch.manual_seed(0)
    return torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3))


def update_swa(averaged: Any) -> None:
    other = copy.deepcopy(averaged.module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    averaged.update_parameters(other)


def distributed() -> Any:
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def scale(scaler: Any) -> Any:
    scaler.scale(torch.ones(()))
    scaler.update(new_scale=scaler.get_scale() / 2)
    return scaler.get_scale()


def act(env: Any) -> Any:
    observation, _ = env.reset()
    return observation, env.step(0)[0]


class ReplayBuffer:
    """As people write it: arrays and a place to write."""

    def __init__(self) -> None:
        self.data, self.at = np.zeros((64, 3)), 0

    def add(self) -> Any:
        self.data[self.at % 64] = np.random.rand(3)
        self.at += 1
        return self.data[np.random.randint(0, min(self.at, 64))].copy()

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data[:], self.at = state["data"], state["at"]


class Ema:
    """As people write it: the average is saved, its count of updates is not."""

    def __init__(self) -> None:
        self.shadow, self.updates = torch.zeros(3), 0

    def update(self) -> Any:
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        self.shadow = decay * self.shadow + (1 - decay) * torch.rand(3)
        return self.shadow

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"].clone()


class Tempered(nn.Module):
    """A module whose temperature is a plain attribute that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.9
        return x / self.temperature


schedulers = torch.optim.lr_scheduler
STATE = [
    Row("`SGD` with momentum", lambda: optimizer(torch.optim.SGD, momentum=0.9), step),
    Row("`AdamW`", optimizer, step),
    Row(
        "an optimizer that accelerate has prepared",
        lambda: accelerate.Accelerator(cpu=True).prepare(optimizer()),
        step,
    ),
    Row(
        "`CosineAnnealingLR` without its optimizer",
        lambda: schedulers.CosineAnnealingLR(optimizer(), 20),
        advance,
        "save the optimizer, too: a run refuses a state without it",
    ),
    Row(
        "`CosineAnnealingLR` and its optimizer",
        lambda: Scheduled(schedulers.CosineAnnealingLR, 20),
        Scheduled.step,
    ),
    Row(
        "`ReduceLROnPlateau` and its optimizer",
        lambda: Scheduled(schedulers.ReduceLROnPlateau, patience=1, metric=True),
        Scheduled.step,
    ),
    Row(
        "`LambdaLR` and its optimizer",
        lambda: Scheduled(schedulers.LambdaLR, lambda n: 0.9**n),
        Scheduled.step,
    ),
    Row("`OneCycleLR` and its optimizer", lambda: Scheduled(schedulers.OneCycleLR, 0.1, 30), Scheduled.step),
    Row("`GradScaler`", lambda: torch.amp.GradScaler("cpu"), scale),
    Row("`BatchNorm1d`", lambda: nn.Sequential(nn.BatchNorm1d(3)), forward),
    Row("`AveragedModel` (EMA, SWA)", swa, update_swa),
    Row(
        "`torch.compile(model)`",
        lambda: torch.compile(nn.BatchNorm1d(3), backend="eager"),
        forward,
        "`dynamic=False`, where the shapes of batches vary: "
        "[why](guide/exactness.md#a-compiled-model-and-batches-of-two-shapes). A compiled function is not "
        "watched",
    ),
    Row("`DistributedDataParallel`, one process", distributed, forward, "save `model.module`"),
    Row("a module with a plain attribute that changes", Tempered, forward, "none needed in a run"),
    Row("torchmetrics `MeanMetric`", torchmetrics.MeanMetric, average, "elsewhere `metric.persistent(True)`"),
    Row("torchmetrics `MulticlassAccuracy`", lambda: MulticlassAccuracy(3), measure, "the same"),
    Row("torchmetrics `BinaryAUROC` (a growing list)", BinaryAUROC, auroc, "the same"),
    Row(
        "torchmetrics `MetricCollection`",
        lambda: torchmetrics.MetricCollection([MulticlassAccuracy(3)]),
        measure,
        "the same",
    ),
    Row("`numpy.random.Generator`", lambda: np.random.default_rng(0), lambda g: g.random()),
    Row("`random.Random`", lambda: random.Random(0), lambda g: g.random()),
    Row("`torch.Generator`", lambda: torch.Generator().manual_seed(0), lambda g: torch.rand(3, generator=g)),
    Row("a replay buffer with arrays and a place", ReplayBuffer, ReplayBuffer.add),
    Row("an average that forgets its count", Ema, Ema.update, "save the count, too"),
    Row(
        "gymnasium `CartPole-v1`",
        lambda: gymnasium.make("CartPole-v1"),
        act,
        "an episode that begins anew is not the undisturbed run; an entry with `state`, "
        "`steps_beyond_terminated`, `_elapsed_steps` and, of a vector environment, `_autoreset_envs`: "
        "[an environment](guide/state.md#an-environment)",
    ),
]


def said(verdict: Any) -> str:
    if verdict is None:
        return "none"
    word = {True: "**yes**", False: "**no**", None: "not tried"}[verdict.kept]
    return word if verdict.kept else f"{word}: {_short(verdict.why)}"


def _short(text: str) -> str:
    return text.split(";")[0].replace("|", "\\|").replace("\n", " ")[:160]


def line(row: Row) -> str:
    try:
        found: Checked = check(row.make(), row.change)
    except Exception as error:  # the page shows it
        return f"| {row.name} | | **error**: {type(error).__name__}: {error} | {row.remedy} |"
    run = said(found.run)
    if found.run.kept and "draws" in found.run.why:
        run += ", drawn again"
    return f"| {row.name} | {said(found.word)} | {run} | {row.remedy} |"


HEAD = """# Which objects can be resumed

`state_dict` and `load_state_dict` are a promise: that what is saved brings the object back. `everstep check`
tries it on copies. Of data it draws batches, takes a position and draws on; a second copy that is opened
there must give the same. Of state it makes a few changes and saves; a second copy that is given this must do
the same afterwards. The columns say whether the object's own `state_dict` brings it back ("none": it has
none), and whether a run of everstep does.

    $ everstep check train.py:loader
    $ everstep check train.py:make_metric --change train.py:update

This page is made by `python tools/checked_page.py`, on {date}, with Python {python}, {versions}.
"""
TABLE = "## {title}\n\n| object | its own `state_dict` | in a run | remedy |\n|---|---|---|---|\n{lines}\n"


def main() -> None:
    warnings.simplefilter("ignore")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    today = datetime.datetime.now(datetime.UTC).date()
    parts = [HEAD.format(date=today, python=platform.python_version(), versions=versions)]
    for title, table_rows in (("Data", DATA), ("State", STATE)):
        parts.append(TABLE.format(title=title, lines="\n".join(map(line, table_rows))))
    PAGE.write_text("\n".join(parts))
    print(f"{PAGE}: {len(DATA) + len(STATE)} objects")


if __name__ == "__main__":
    main()
