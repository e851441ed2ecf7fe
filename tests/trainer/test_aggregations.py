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


def three_ways(tmp_path: Path, task: everstep.Task, **arguments: Any) -> dict[str, float]:
    """What the service found at the end, which `evaluate` and `run_evaluation` find, too."""
    by_hand = [everstep.Evaluate("valid", everstep.Never(), **arguments)]
    door = trainer(tmp_path / "by hand", task, services=by_hand, streams={"valid": numbers(9, 2)})
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch("train", "valid")
    services = [everstep.Evaluate("valid", **arguments)]
    door = trainer(tmp_path / "run", task, services=services, streams={"valid": numbers(9, 2)})
    door.run_training()
    tail = {row.name: row.value for row in RunJournal(tmp_path / "by hand").rows() if row.phase == "tail"}
    rows = list(RunJournal(tmp_path / "run").rows())
    found = {row.name: row.value for row in rows if row.phase == "eval/valid" and not row.wall}
    assert door.evaluate("valid") == found == door.run_evaluation("valid") == tail
    fresh = trainer(
        tmp_path / "run",
        task,
        services=[everstep.Evaluate("valid", **arguments)],
        streams={"valid": numbers(9, 2)},
    )
    assert fresh.evaluate("valid") == found
    return found


def test_statistics_of_samples_and_of_batches(tmp_path: Path) -> None:
    names = ["mean", "std", "nanmean", "median", "q90"]
    stats = {"each": names, "tensor": names, "list": names, "mean": ["std", "max"]}
    found = three_ways(tmp_path, Values(), stats=stats)
    samples = np.arange(9.0)
    expected = {
        "": samples.mean(),
        "/mean": samples.mean(),
        "/std": samples.std(),
        "/nanmean": samples.mean(),
        "/median": np.median(samples),
        "/q90": np.quantile(samples, 0.9),
    }
    for metric in ("each", "tensor", "list"):
        for name, value in expected.items():
            assert found[f"valid/{metric}{name}"] == pytest.approx(float(value), rel=1e-12)
    weighted = np.std([0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5, 8.0])
    assert found["valid/mean"] == samples.mean()
    assert found["valid/mean/std"] == pytest.approx(float(weighted), rel=1e-12)
    assert found["valid/mean/max"] == 8.0


@pytest.mark.campaign("long")
def test_tfutils_functions(tmp_path: Path) -> None:
    steps: list[int] = []

    def online(current: Any, new: Mapping[str, Any], step: int) -> Any:
        steps.append(step)
        return {"sum": (current or {"sum": 0.0})["sum"] + float(np.sum(new["each"]))}

    def aggregate(results: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        return {"sum": float(np.sum(np.concatenate([one["each"] for one in results])))}

    both = three_ways(
        tmp_path / "both",
        Values(),
        online_agg_func=online,
        agg_func=lambda found: {"half": found["sum"] / 2},
    )
    assert both == {"valid/half": 18.0, "valid/mean": 4.0}
    assert steps == [0, 1, 2, 3, 4] * (len(steps) // 5)
    assert three_ways(tmp_path / "online", Values(), online_agg_func=online)["valid/sum"] == 36.0
    assert three_ways(tmp_path / "list", Values(), agg_func=aggregate)["valid/sum"] == 36.0


def test_a_statistic_can_be_watched(tmp_path: Path) -> None:
    services = [
        everstep.Evaluate("valid", stats={"each": ["q90"]}, agg_func=lambda results: {}),
        everstep.Best("valid/each/q90", "min"),
    ]
    door = trainer(tmp_path / "run", Values(), services=services)
    ending = door.run_training()
    assert ending.best is not None and ending.best.value == pytest.approx(3.6)


def test_wrong_statistics_are_errors_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no statistic 'quantile'"):
        everstep.Evaluate("valid", stats={"loss": ["quantile"]})
    door = trainer(tmp_path / "a", services=[everstep.Evaluate("valid", stats={"los": ["std"]})])
    with pytest.raises(ConfigError, match="'los', which eval_step did not return; did you mean 'loss'"):
        door.run_training()
    door = trainer(tmp_path / "b", services=[everstep.Evaluate("valid", agg_func=lambda results: 3)])  # type: ignore[arg-type, return-value]
    with pytest.raises(MetricError, match=r"Evaluate\.agg_func returned 3; return a mapping"):
        door.run_training()
    with pytest.raises(MetricError, match="metric 'each'") as raised:
        trainer(tmp_path / "c", Values()).run_training()
    assert "write that method; or for Evaluate's stats=" in str(raised.value.__notes__)
