"""What a Trainer says of its own accord, where silence would be misunderstood."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_task import TinyTask, numbers, trainer

import everstep
from everstep import Best, EarlyStop, Evaluate, Every, Recovery, StopAfter


class Lines(list[str]):
    def having(self, part: str) -> list[str]:
        return [line for line in self if part in line]


def said(run_dir: Path, task: everstep.Task | None = None, **arguments: Any) -> Lines:
    lines = Lines()
    trainer(run_dir, task, lines=lines, **arguments).run_training()
    return lines


class Ending(TinyTask):
    """Ends the run from inside, which nothing else does."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        if len(self.seen) == 6:
            raise KeyboardInterrupt
        return super().train_step(batch)


def test_a_training_without_an_end_says_so(tmp_path: Path) -> None:
    lines = Lines()
    endless = trainer(tmp_path / "run", Ending(), lines=lines, max_epoch=None, services=[Recovery()])
    with pytest.raises(KeyboardInterrupt):
        endless.run_training()
    (line,) = lines.having("no limit")
    assert "give max_epoch=, max_step= or max_time=" in line
    limits: list[dict[str, Any]] = [
        {"max_step": 2},
        {"max_time": 1000.0, "max_step": 2},
        {"services": [StopAfter(epochs=1)]},
        {"services": [EarlyStop("loss", patience=1, threshold=1e9)]},
    ]
    for number, given in enumerate(limits):
        assert not said(tmp_path / str(number), **{"max_epoch": None, **given}).having("no limit")


def test_a_metric_that_an_evaluation_did_not_find_is_said_at_once(tmp_path: Path) -> None:
    class Looking(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            if len(self.seen) == 3:
                said_at_step_3.extend(lines.having("no value of"))
            return super().train_step(batch)

    said_at_step_3: list[str] = []
    lines = Lines()
    watching = [EarlyStop("valid/los", "min", patience=9), Best("valid/loss")]
    watching += [Best("test/top1", "max"), Best("other", "max")]
    services = [*watching, Evaluate("valid", Every(steps=2)), Evaluate("test", Every(epochs=2))]
    trainer(tmp_path, Looking(), lines=lines, max_epoch=2, services=services).run_training()
    assert len(said_at_step_3) == 1
    assert "no value of 'valid/los' has come; did you mean 'valid/loss'? known: valid/" in said_at_step_3[0]
    assert [line.split("'")[3] for line in lines.having("no value of")] == ["valid/los", "test/top1", "other"]


def test_streams_that_nobody_evaluates_are_named(tmp_path: Path) -> None:
    (line,) = said(tmp_path / "run", streams={"val": numbers(3, 2)}).having("streams not evaluated")
    assert line.startswith("streams not evaluated while training: test, val; ")
    assert not said(tmp_path / "all", services=[Evaluate("valid"), Evaluate("test")]).having("not evaluated")
    assert not said(tmp_path / "all").having("not evaluated")  # finished


def test_a_rollback_does_not_introduce_the_run_again(tmp_path: Path) -> None:
    class Spoilt(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            found = super().train_step(batch)
            return {"loss": math.nan} if len(self.seen) == 3 else found

    streams = {"train": numbers(20, 2)}
    lines = said(tmp_path, Spoilt(), services=[Recovery()], streams=streams, max_epoch=1)
    assert len(lines.having("Quarantined")) == 1
    assert len(lines.having("Execution Environment")) == len(lines.having("not evaluated")) == 1


def test_the_batch_in_which_a_metric_is_not_finite_is_named(tmp_path: Path) -> None:
    class Nan(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            spoilt = 2 in batch[0]
            return {"acc": math.nan if spoilt else 1.0, "ok": 1.0, "left": math.nan, "size": math.inf}

    services = [Evaluate("valid", stats={"left": ["nanmean"]})]
    lines = said(tmp_path, Nan(), services=services, max_epoch=1)
    assert lines.having("of the evaluation") == [
        "stream 'valid': 'size' is inf in batch 1, 'acc' is nan in batch 2 of the evaluation"
    ]
