"""The parameters of tfutils' tutorial, on drawn digits: what a user writes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import everstep
from everstep.trainer.named_streams import TrainInputs
from tiny_runs import Boom

ImageSet = dict[str, Any]

READS: list[int] = []
"""The first label of each batch that `counted` has read."""


FAILS_AT: list[int] = []
"""Steps at which `train_loop` fails."""

IMAGES = np.random.default_rng(1).random((260, 1, 8, 8), np.float32)


def digits(group: str, count: int = 160) -> ImageSet:
    first = 0 if group == "train" else 160
    return {"images": IMAGES[first : first + count], "labels": np.arange(first, first + count) % 10}


def build_data(batch_size: int, group: str, count: int = 160) -> ImageSet:
    return digits(group, count)


class Net(torch.nn.Module):
    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, width, 3)
        self.drop = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(width * 36, classes)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        hidden: Tensor = self.drop(self.conv(inputs["images"]).relu().flatten(1))
        scores: Tensor = self.head(hidden)
        return scores


def mnist_model(
    inputs: Mapping[str, Any], train: bool, seed: int, width: int = 4, classes: int = 10, dropout: float = 0.2
) -> Net:
    assert inputs["images"].shape[1:] == (1, 8, 8)
    assert seed >= 0 and isinstance(train, bool)
    return Net(width, classes, dropout)


def any_model(inputs: Mapping[str, Any], train: bool, seed: int, depth: int, **more: int) -> Net:
    return Net(depth, 10, 0.0)


def staircase(global_step: int, base: float = 0.05, decay: float = 0.5, every: int = 8) -> float:
    return float(base * decay ** (global_step // every))


def sgd(parameters: Any, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def accuracy(inputs: Mapping[str, Tensor], outputs: Tensor, k: int = 1) -> dict[str, Tensor]:
    best = outputs.topk(k).indices
    return {f"top{k}": (best == inputs["labels"][:, None]).any(1).float().mean()}


def features(inputs: Mapping[str, Tensor], outputs: Tensor) -> dict[str, Any]:
    hits = (outputs.argmax(1) == inputs["labels"]).float().mean()
    return {"scores": outputs, "hits": hits}


def mean_of(results: list[dict[str, Any]]) -> dict[str, float]:
    return {"hits": float(np.mean([float(each["hits"]) for each in results])), "batches": float(len(results))}


def mean_dict(results: list[dict[str, Any]]) -> dict[str, float]:
    return {name: float(np.mean([float(each[name]) for each in results])) for name in results[0]}


def running_mean(current: Any, new: Mapping[str, Any], step: int) -> dict[str, float]:
    if current is None:
        return {name: float(value) for name, value in new.items()}
    return {name: old + (float(new[name]) - old) / (step + 1) for name, old in current.items()}


def params(exp_id: str = "basic", **changes: Any) -> dict[str, Any]:
    """The tree, with changes by dotted path ("train_params__num_steps")."""
    tree: dict[str, Any] = {
        "save_params": {
            "dbname": "digits",
            "collname": "tutorial",
            "exp_id": exp_id,
            "save_valid_freq": 10,
            "save_filters_freq": 20,
            "cache_filters_freq": 5,
            "cache_max_num": 2,
            "save_metrics_freq": 5,
        },
        "model_params": {"func": mnist_model, "seed": 3, "width": 4},
        "train_params": {
            "data_params": {"func": build_data, "batch_size": 20, "group": "train"},
            "num_steps": 20,
            "thres_loss": 1000,
            "targets": {"func": accuracy, "k": 3},
        },
        "loss_params": {"pred_targets": "labels", "loss_func": cross_entropy},
        "learning_rate_params": {"func": staircase, "base": 0.05},
        "optimizer_params": {"optimizer": sgd, "momentum": 0.8},
        "validation_params": {
            "valid0": {
                "data_params": {"func": build_data, "batch_size": 30, "group": "valid", "count": 100},
                "targets": {"func": accuracy},
                "num_steps": 3,
                "agg_func": mean_dict,
            }
        },
    }
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        *above, name = path.split("__")
        place = tree
        for part in above:
            place = place[part]
        place[name] = value
    return tree


def train_loop(task: Any, inputs: Mapping[str, Tensor], times: int = 1) -> Mapping[str, Any]:
    """A loop of one's own: several updates on one batch."""
    for _ in range(times):
        metrics = task.step(inputs)
    if task.state()["global_step"]["global_step"] + 1 in FAILS_AT:
        raise Boom
    return metrics


def counted(batch_size: int) -> Any:
    """A stream that tells which batches were read."""
    from counting import Counted  # the tests' own; a user's program has no such thing

    found = digits("train")
    data = everstep.data.arrays(found["images"], found["labels"], batch_size=batch_size, shuffle=True, seed=0)
    named = TrainInputs(data, lambda batches: dict(zip(found, next(batches), strict=True)))
    return Counted(named, lambda batch: READS.append(int(batch["labels"][0])))


def only_conv(names: list[str]) -> list[str]:
    return [name for name in names if "conv" in name]


def renamed_model(inputs: Mapping[str, Any], train: bool, seed: int) -> torch.nn.Module:
    return Renamed()


class Renamed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Conv2d(1, 4, 3)
        self.head = torch.nn.Linear(144, 10)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        scores: Tensor = self.head(self.features(inputs["images"]).relu().flatten(1))
        return scores


class Follower:
    """A model on NumPy that trains itself."""

    def __init__(self, seed: int) -> None:
        self.weights = np.random.default_rng(seed).normal(0, 0.01, 10)

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        return np.tile(self.weights, (len(inputs["labels"]), 1))

    def train_step(self, inputs: Mapping[str, Any], learning_rate: float) -> dict[str, float]:
        gradient = self.weights - inputs["images"].mean() + 0.1 * np.random.standard_normal(10)
        self.weights -= learning_rate * gradient
        return {"loss": float(gradient @ gradient)}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights[:] = state["weights"]


def numpy_model(inputs: Mapping[str, Any], train: bool, seed: int) -> Follower:
    return Follower(seed)
