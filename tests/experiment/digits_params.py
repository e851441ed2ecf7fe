"""The parameters of tfutils' tutorial, on scikit-learn's digits: what a user writes."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

ImageSet = dict[str, Any]

READS: list[int] = []
"""The first label of each batch that `counted` has read."""


def digits(group: str, count: int = 400) -> ImageSet:
    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[:, None]
    chosen = slice(0, count) if group == "train" else slice(1500, 1500 + count)
    return {"images": images[chosen], "labels": bunch.target[chosen]}


def build_data(batch_size: int, group: str, count: int = 400) -> ImageSet:
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
            "data_params": {"func": build_data, "batch_size": 50, "group": "train"},
            "num_steps": 20,
            "thres_loss": 1000,
            "targets": {"func": accuracy, "k": 3},
        },
        "loss_params": {"pred_targets": "labels", "loss_func": cross_entropy},
        "learning_rate_params": {"func": staircase, "base": 0.05},
        "optimizer_params": {"optimizer": sgd, "momentum": 0.8},
        "validation_params": {
            "valid0": {
                "data_params": {"func": build_data, "batch_size": 60, "group": "valid", "count": 200},
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


def train_loop(
    task: Any, inputs: Mapping[str, Tensor], times: int = 1, kill_at: int = 0
) -> Mapping[str, Any]:
    """A loop of one's own: several updates on one batch."""
    for _ in range(times):
        metrics = task.step(inputs)
    if kill_at and task.state()["global_step"]["global_step"] + 1 == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return metrics
