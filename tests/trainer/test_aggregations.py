"""Statistics and aggregations of an evaluation: the same by the service and outside the loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_task import TinyTask, numbers, trainer

import everstep
from everstep.errors import ConfigError, MetricError
from everstep.record import RunJournal


class Values(TinyTask):
    """Each sample's value, as an array, as a tensor, as a list, and the mean of each batch."""

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        x = ids * 1.0
        return {"each": x, "tensor": torch.tensor(x), "list": list(x), "mean": float(np.mean(x))}


def evaluated(run_dir: Path, task: everstep.Task, **arguments: Any) -> dict[str, float]:
    """What the service finds, which `evaluate` of the same and of another process find, too."""

    def door() -> everstep.Trainer:
        services = [everstep.Evaluate("valid", **arguments)]
        return trainer(run_dir, task, services=services, streams={"valid": numbers(9, 2)}, max_epoch=1)

    first = door()
    first.run_training()
    rows = list(RunJournal(run_dir).rows())
    found = {row.name: row.value for row in rows if row.phase == "eval/valid" and not row.wall}
    assert first.evaluate("valid") == found == door().evaluate("valid")
    return found


def test_statistics_of_samples_and_of_batches(tmp_path: Path) -> None:
    names = ["mean", "std", "nanmean", "median", "q90"]
    stats = {"each": names, "tensor": names, "list": names, "mean": ["std", "max"]}
    found = evaluated(tmp_path, Values(), stats=stats)
    samples = np.arange(9.0)
    values = [samples.mean(), samples.std(), samples.mean(), np.median(samples), np.quantile(samples, 0.9)]
    for metric in ("each", "tensor", "list"):
        assert [found[f"valid/{metric}/{name}"] for name in names] == pytest.approx(values, rel=1e-12)
    weighted = np.std([0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5, 8.0])
    assert found["valid/mean"] == found["valid/each"] == samples.mean()
    assert found["valid/mean/std"] == pytest.approx(float(weighted), rel=1e-12)
    assert found["valid/mean/max"] == 8.0


def test_tfutils_functions(tmp_path: Path) -> None:
    steps: list[int] = []

    def online(current: Any, new: Mapping[str, Any], step: int) -> Any:
        steps.append(step)
        return {"sum": (current or {"sum": 0.0})["sum"] + float(np.sum(new["each"]))}

    def aggregate(results: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        return {"sum": float(np.sum(np.concatenate([one["each"] for one in results])))}

    both = {"online_agg_func": online, "agg_func": lambda found: {"half": found["sum"] / 2}}
    assert evaluated(tmp_path / "both", Values(), **both) == {"valid/half": 18.0, "valid/mean": 4.0}
    assert steps == [0, 1, 2, 3, 4] * 3
    assert evaluated(tmp_path / "online", Values(), online_agg_func=online)["valid/sum"] == 36.0
    assert evaluated(tmp_path / "list", Values(), agg_func=aggregate)["valid/sum"] == 36.0


def test_a_statistic_can_be_watched(tmp_path: Path) -> None:
    services = [
        everstep.Evaluate("valid", stats={"each": ["q90"]}, agg_func=lambda results: {}),
        everstep.Best("valid/each/q90", "min"),
    ]
    ending = trainer(tmp_path, Values(), services=services, max_epoch=1).run_training()
    assert ending.best is not None and ending.best.value == pytest.approx(3.6)


def test_wrong_statistics_are_errors_with_a_remedy(tmp_path: Path) -> None:
    def start(task: everstep.Task, **how: Any) -> None:
        trainer(tmp_path, task, services=[everstep.Evaluate("valid", **how)]).run_training()

    with pytest.raises(ConfigError, match="there is no statistic 'quantile'"):
        start(TinyTask(), stats={"loss": ["quantile"]})
    with pytest.raises(ConfigError, match="'los', which eval_step did not return; did you mean 'loss'"):
        start(TinyTask(), stats={"los": ["std"]})
    with pytest.raises(MetricError, match=r"Evaluate\.agg_func returned 3; return a mapping"):
        start(TinyTask(), agg_func=lambda results: 3)
    with pytest.raises(MetricError, match="metric 'each'") as raised:
        start(Values())
    assert "write that method; or for Evaluate's stats=" in str(raised.value.__notes__)
