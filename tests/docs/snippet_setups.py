"""What the snippets of the documentation may take for granted, by the names in their comments."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import everstep


def digits() -> dict[str, Any]:
    """A classifier small enough for a snippet: `x`, `y`, `model`, `optimizer`, `valid`, `evaluate` ..."""
    torch.manual_seed(0)
    x, y = torch.randn(96, 16), torch.arange(96) % 4
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 4))

    def evaluate(model: torch.nn.Module, data: Any) -> float:
        with torch.no_grad():
            return float(cross_entropy(model(data[0]), data[1]))

    return {
        "everstep": everstep,
        "torch": torch,
        "cross_entropy": cross_entropy,
        "x": x,
        "y": y,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2),
        "valid": (x[:24], y[:24]),
        "evaluate": evaluate,
    }


def training() -> dict[str, Any]:
    """`digits` with a stream `train` and a function `train_step(batch)` that returns the loss."""
    names = digits()
    model, optimizer = names["model"], names["optimizer"]

    def train_step(batch: Any) -> torch.Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    train = everstep.data.arrays(names["x"], names["y"], batch_size=32, shuffle=True, seed=0)
    return {**names, "train": train, "train_step": train_step}


def trained() -> dict[str, Any]:
    """`training`, and a run of two epochs in `runs/digits`, finished."""
    return run_digits(training())


def exported() -> dict[str, Any]:
    """`trained`, with its best weights by `valid_loss` and its last model exported."""
    from everstep.services import Export, OnBest

    services = [
        Export(OnBest("valid_loss"), keep=1, name="best"),
        Export(format="torch.export", inputs=(torch.zeros(2, 16),), name="final"),
    ]
    return run_digits(training(), services=services)


def trained_with_best() -> dict[str, Any]:
    """`trained`, with the best weights by `valid_loss`."""
    return run_digits(training(), services=[everstep.Best("valid_loss")])


def tied() -> dict[str, Any]:
    """A `model`, not trained, of which `runs/digits` has a trained one, beside an average that holds it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    untrained = copy.deepcopy(model)
    average = torch.nn.ModuleDict({"online": model, "average": copy.deepcopy(model)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "average": average, "optimizer": optimizer}
    with everstep.Supervisor("runs/digits", state, max_step=2, seed=1) as sv:
        sv.stream(None)
        while not sv.should_stop():
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sv.advance()
    return {"model": untrained, "trained": model}


def evaluated() -> dict[str, Any]:
    """`task`, and a `trainer` whose run in `runs/digits` is finished and evaluated once."""
    names = task()
    streams = {"train": names["train"], "valid": names["valid"]}
    trainer = everstep.Trainer(names["Digits"](), streams, "runs/digits", max_epoch=2)
    trainer.run_training()
    trainer.evaluate("valid")
    return {**names, "trainer": trainer}


def run_digits(names: dict[str, Any], services: Any = ()) -> dict[str, Any]:
    state = {"model": names["model"], "optimizer": names["optimizer"]}
    with everstep.TrainLoop(
        "runs/digits", state, max_epoch=2, services=services, default_services=False
    ) as loop:
        for _epoch in loop.iter_epochs():
            for _step, batch in loop.iter_steps(names["train"]):
                loop.collect_metrics(loss=names["train_step"](batch))
            with loop.evaluation():
                loop.collect_metrics(valid_loss=evaluate_now(names))
    return {**names, "state": state}


def evaluate_now(names: dict[str, Any]) -> float:
    return float(names["evaluate"](names["model"], names["valid"]))


def task() -> dict[str, Any]:
    """`training`, with `valid` a stream, too, and `Digits`, a task for both."""
    names = training()

    class Digits(everstep.torch.Task):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))

        def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.Adam(model.parameters(), lr=1e-2)

        def forward(self, batch: Any) -> dict[str, torch.Tensor]:
            scores = self.model(batch[0])
            accuracy = (scores.argmax(1) == batch[1]).float().mean()
            return {"loss": cross_entropy(scores, batch[1]), "accuracy": accuracy}

    return {**names, "Digits": Digits, "valid": everstep.data.arrays(*names["valid"], batch_size=10)}


def dataset() -> dict[str, Any]:
    """`digits` with a map-style `Dataset` class, whose samples are drawn with augmentation."""
    names = digits()

    class Dataset(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            return torch.randn(16) + index, index % 4

    return {**names, "Dataset": Dataset}


def bare() -> dict[str, Any]:
    """Only the imports: `everstep`, `torch`, `numpy as np`."""
    return {"everstep": everstep, "torch": torch, "np": np}


def experiment() -> dict[str, Any]:
    """The files of the page on experiments, digits.yaml and digits_task.py, as they stand there."""
    page = (Path(__file__).parent.parent.parent / "docs" / "guide" / "experiment.md").read_text()
    for name, language in (("digits_task.py", "python"), ("digits.yaml", "yaml")):
        Path(name).write_text(page.split(f"```{language}\n")[1].split("```")[0])
    sys.path.insert(0, os.getcwd())
    return {"everstep": everstep, "torch": torch}


def witness_beside() -> dict[str, Any]:
    """Nothing but the file witness.py of conformance/ beside the program."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "conformance"))
    return {}


SETUPS = {
    setup.__name__: setup
    for setup in (
        *(bare, digits, training, trained, exported, trained_with_best, tied, task, dataset, evaluated),
        *(experiment, witness_beside),
    )
}
