"""`Dump`: what an evaluation made of each example, in files; killed at any point: test_all_together."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Evaluate, Every
from everstep.errors import ConfigError, MetricError
from everstep.services import Dump
from tiny_runs import rows


def numbers(count: int, *, shuffle: bool = False) -> Any:
    return everstep.data.arrays(np.arange(count), batch_size=2, shuffle=shuffle)


class Task(everstep.Task):
    """Says of each example its number, what the weights make of it, and a pair."""

    def __init__(self) -> None:
        self.w = np.zeros(1)

    def state(self) -> Mapping[str, Any]:
        return {"w": self.w}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        self.w += ids.mean() + np.random.standard_normal()
        return {"loss": float(self.w[0])}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        each = ids * self.w[0]
        return {
            "loss": float(each.mean()),
            "id": ids,
            "each": torch.tensor(each),
            "pair": [(float(i), float("nan")) for i in ids],
            "name": [f"sample, {i}" for i in ids],
        }


def trainer(run_dir: Path, *services: everstep.Service, **options: Any) -> everstep.Trainer:
    streams = {"train": numbers(8, shuffle=True), "valid": numbers(5), "test": numbers(3)}
    silent = everstep.services.Console(sink=lambda line: None)
    options = {"max_epoch": 3, "seed": 7, **options}
    return everstep.Trainer(Task(), streams, run_dir, services=[*services, silent], **options)


ALL = ["id", "each", "pair", "name"]


def dumped(run_dir: Path) -> dict[str, bytes]:
    folder = run_dir / "dumps"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_file_for_each_evaluation_and_one_line_for_each_example(tmp_path: Path) -> None:
    evaluate = [Evaluate("valid", Every(steps=3), validate_first=True), Evaluate("test")]
    door = trainer(tmp_path / "run", Dump(ALL), *evaluate)
    door.run_training()
    assert set(dumped(tmp_path / "run")) == {f"dump valid/step-{step:08d}.jsonl" for step in (0, 3, 6, 9, 12)}
    path = tmp_path / "run" / "dumps" / "dump valid" / "step-00000012.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["each"] for line in lines] == [i * door.task.w[0] for i in range(5)]
    assert lines[4] == {"id": 4, "each": 4 * door.task.w[0], "pair": [4.0, None], "name": "sample, 4"}
    recorded = {row[3] for row in rows(tmp_path / "run", "eval/valid")}
    assert recorded == {"valid/loss"}  # what is dumped is no metric
    assert door.evaluate("valid")["valid/loss"] == pytest.approx(2 * door.task.w[0])


def test_a_table_for_other_programs(tmp_path: Path) -> None:
    trainer(tmp_path / "run", Dump(ALL, format="csv", keep=2)).run_training()
    folder = tmp_path / "run" / "dumps" / "dump valid"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000008.csv", "step-00000012.csv"]
    with open(folder / "step-00000012.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [line["name"] for line in table] == [f"sample, {i}" for i in range(5)]
    assert table[4]["pair"] == "[4.0, null]" and float(table[4]["id"]) == 4


def test_arrays_of_different_lengths_are_dumped_whole(tmp_path: Path) -> None:
    class Ragged(Task):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"parts": np.array([np.array([1, 2]), np.array([3.5])], object)}

    streams = {"train": numbers(8), "valid": numbers(2)}
    door = everstep.Trainer(
        Ragged(), streams, tmp_path / "run", services=[Dump("parts")], seed=7, max_epoch=1
    )
    door.run_training()
    (text,) = dumped(tmp_path / "run").values()
    assert [json.loads(line)["parts"] for line in text.splitlines()] == [[1, 2], [3.5]]


def test_what_the_program_evaluates_is_dumped_too(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run", Dump(ALL), max_epoch=2)
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch("train", "valid")
    assert set(dumped(tmp_path / "run")) == {f"dump valid/step-{step:08d}.jsonl" for step in (4, 8)}


def test_an_older_checkpoint_takes_back_what_came_after_it(tmp_path: Path) -> None:
    trainer(tmp_path / "run", Dump(ALL)).run_training()
    again = trainer(tmp_path / "run", Dump(ALL), max_epoch=2, resume="epoch-0001-step-00000004")
    again.run_training()
    assert set(dumped(tmp_path / "run")) == {f"dump valid/step-{step:08d}.jsonl" for step in (4, 8)}
    trainer(tmp_path / "run", Dump(ALL), max_epoch=1, resume=False).run_training()
    assert set(dumped(tmp_path / "run")) == {"dump valid/step-00000004.jsonl"}


def test_what_cannot_be_dumped_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did not return 'eac'; did you mean 'each'"):
        trainer(tmp_path / "a", Dump([*ALL, "eac"])).run_training()
    with pytest.raises(MetricError, match=r"'loss' is .*a single value for a whole batch"):
        trainer(tmp_path / "b", Dump([*ALL, "loss"])).run_training()
    with pytest.raises(ConfigError, match="AFTER_EVAL_STEP, which a TrainLoop does not have"):
        everstep.TrainLoop(tmp_path / "c", services=[Dump("id")])
