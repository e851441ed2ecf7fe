"""What to do is one word: train, evaluate, both, or watch; and what was evaluated apart is recorded."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_task import TinyTask, numbers, trainer

import everstep
from everstep import hazard
from everstep.errors import ConfigError, NoCheckpointError, UsageError
from everstep.proof.compare import compare_runs
from everstep.record import RunDir, RunJournal
from tiny_runs import rows


def evaluated(run_dir: Path) -> list[int]:
    """The steps at which the loop evaluated."""
    return [row[1] for row in rows(run_dir, "eval/valid") if row[3] == "valid/loss"]


def apart(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that were evaluated apart from the loop."""
    return [one.step for one in everstep.evaluations(run_dir)]


@pytest.mark.parametrize(
    ("mode", "arguments", "in_the_loop", "afterwards"),
    [
        ("train", {}, [4, 8], []),
        ("train", {"evaluate": False}, [], []),
        ("train_and_eval", {}, [4, 8], []),
        ("train_and_eval", {"max_step": 6}, [4, 6], []),
        ("train_then_eval", {}, [], [8]),
        ("continuous_train_and_eval", {"steps_per_iteration": 2}, [2, 4, 6, 8], []),
        ("continuous_train_and_eval", {"steps_per_iteration": 3}, [3, 6, 8], []),
        ("continuous_train_and_eval", {"max_step": 8}, list(range(1, 9)), []),
    ],
)
def test_modes_that_train(
    tmp_path: Path, mode: str, arguments: dict[str, int], in_the_loop: list[int], afterwards: list[int]
) -> None:
    run_dir, task = tmp_path / "run", TinyTask()
    result = trainer(run_dir, task).run(mode, **arguments)
    assert result.ending is not None and result.ending.finished
    assert evaluated(run_dir) == in_the_loop and apart(run_dir) == afterwards
    straight = TinyTask()
    trainer(tmp_path / "straight", straight).train(result.ending.step)
    assert task.seen == straight.seen and task.w.tobytes() == straight.w.tobytes()
    if mode == "train":
        assert result.metrics == {}
    else:
        assert result.metrics == trainer(run_dir).evaluate("valid")


def test_the_end_is_evaluated_in_the_loop_so_that_every_sink_has_it(tmp_path: Path) -> None:
    def door(run_dir: Path) -> everstep.Trainer:
        services = [everstep.Evaluate("valid", everstep.Every(steps=6)), everstep.services.JSONLines()]
        return trainer(run_dir, services=services, max_epoch=9, max_step=10)

    run_dir = tmp_path / "run"
    result = door(run_dir).run("train_and_eval")
    assert evaluated(run_dir) == [6, 10] and apart(run_dir) == []
    lines = map(json.loads, (run_dir / "logs" / "metrics.jsonl").read_text().splitlines())
    written = {line["step"]: line["valid/loss"] for line in lines if "valid/loss" in line}
    assert written.keys() == {6, 10} and written[10] == result.metrics["valid/loss"]
    for number, struck in enumerate(("EIO:loop.tail:3", "EIO:loop.tail_end:3", "SIGTERM:loop.tail_end:3")):
        cut = tmp_path / str(number)
        hazard.arm(struck)
        with pytest.raises((OSError, SystemExit)):
            door(cut).run("train_and_eval")
        hazard.arm(None)
        again = door(cut).run("train_and_eval")
        assert again.metrics == result.metrics and evaluated(cut) == [6, 10] and apart(cut) == []


@pytest.mark.parametrize("mode", ["eval", "train_and_eval", "train_then_eval", "watch", "continuous_eval"])
def test_a_finished_run_still_evaluates(tmp_path: Path, mode: str) -> None:
    trainer(tmp_path / "run").run("train", evaluate=False)
    result = trainer(tmp_path / "run").run(mode)
    assert result.ending is None or result.ending.finished
    assert result.metrics == trainer(tmp_path / "run").evaluate("valid")
    assert evaluated(tmp_path / "run") == []


def test_nothing_is_evaluated_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="train first"):
        trainer(tmp_path / "run").run("eval")
    assert not (tmp_path / "run").exists()
    assert trainer(tmp_path / "run").run("watch", timeout=0.0).metrics == {}


def test_unknown_modes_and_arguments_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no mode 'train_and_evaluate'; did you mean 'train_and_eval'"):
        trainer(tmp_path / "run").run("train_and_evaluate")
    with pytest.raises(ConfigError, match=r"did you mean 'max_step'"):
        trainer(tmp_path / "run").run("train", max_steps=3)
    with pytest.raises(ConfigError, match=r"steps_per_iteration=0"):
        trainer(tmp_path / "run").run("continuous_train_and_eval", steps_per_iteration=0)


def test_all_streams_of_the_services_are_evaluated(tmp_path: Path) -> None:
    services = [everstep.Evaluate("valid", num_steps=1), everstep.Evaluate("test")]
    trainer(tmp_path / "run", services=services).run("train")
    found = trainer(tmp_path / "run", services=services).run("eval").metrics
    assert set(found) == {f"{stream}/{name}" for stream in ("valid", "test") for name in ("loss", "noise")}
    assert [(one.stream, one.num_steps) for one in everstep.evaluations(tmp_path / "run")] == [
        ("valid", 1),
        ("test", -1),
    ]


# ---------------------------------------------------------------------------------- the record


def test_an_evaluation_is_recorded_with_its_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    door = trainer(run_dir)
    door.run_training()
    before = [path.read_bytes() for path in sorted((run_dir / "journal").iterdir())]
    found = door.evaluate("test")
    trainer(run_dir).run_evaluation("test")
    door.evaluate("test", 1)
    assert [path.read_bytes() for path in sorted((run_dir / "journal").iterdir())] == before
    first, second, part = everstep.evaluations(run_dir)
    assert first.metrics == second.metrics == found != part.metrics
    assert (first.stream, first.checkpoint, first.step, first.epoch, first.num_steps) == (
        *("test", "epoch-0002-step-00000008"),
        *(8, 2, -1),
    )
    assert part.num_steps == 1 and first.digest == second.digest
    about = RunDir.open(run_dir / "evaluations", create=False).facts
    assert (about["kind"], about["of"]) == ("evaluation", RunDir.open(run_dir, create=False).id)
    kept = [(row.step, row.epoch, row.phase, row.seq) for row in RunJournal(run_dir / "evaluations").rows()]
    assert kept[0] == (8, 2, "eval/test", 0) and len(set(kept)) == 3


def test_what_was_not_recorded_whole_does_not_count(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.run_training()
    (tmp_path / "run" / "evaluations").mkdir()  # killed when it was to be made
    assert everstep.evaluations(tmp_path / "run") == []
    found = [door.evaluate("test"), door.evaluate("valid")]
    torn = tmp_path / "run" / "evaluations" / "journal" / "segment-0002.evj"
    torn.write_bytes(torn.read_bytes()[:-1])  # killed while it was written
    assert [one.metrics for one in everstep.evaluations(tmp_path / "run")] == found[:1]
    hazard.arm("ENOSPC:journal.fsync:1-9")
    with pytest.warns(RuntimeWarning, match="an evaluation is not recorded: .*; see to the disk"):
        assert door.evaluate("valid") == found[1]
    hazard.arm(None)
    found[1] = door.evaluate("valid", 1)
    assert [one.metrics for one in everstep.evaluations(tmp_path / "run")] == found
    assert {row.segment for row in RunJournal(tmp_path / "run" / "evaluations").rows()} == {1, 4}


def test_processes_record_at_the_same_time(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.run_training()
    program = "from tiny_task import trainer; from pathlib import Path; import sys\n"
    program += "for _ in range(5): trainer(Path(sys.argv[1])).evaluate('test')"
    path = os.pathsep.join([*sys.path])
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    both = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    found = everstep.evaluations(tmp_path / "run")
    assert len(found) == 10 and len({str(one.metrics) for one in found}) == 1


def test_values_that_are_not_finite_come_back(tmp_path: Path) -> None:
    class Bad(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"nan": math.nan, "inf": -math.inf}

    trainer(tmp_path / "run", Bad()).run("train_then_eval")
    (found,) = everstep.evaluations(tmp_path / "run")
    assert math.isnan(found.metrics["valid/nan"]) and found.metrics["valid/inf"] == -math.inf


def test_restored_best_weights_are_what_is_evaluated_and_named(tmp_path: Path) -> None:
    class Rising(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"step": float(len(self.seen)), "w": self.w[0]}

    task = Rising()
    best = everstep.Best("valid/step", "min", restore_at_end=True)
    result = trainer(tmp_path / "run", task, services=[best]).run("train_and_eval")
    (found,) = everstep.evaluations(tmp_path / "run")
    assert found.checkpoint == "best/valid.step/epoch-0001-step-00000004" and found.step == 4
    assert result.metrics["valid/w"] == task.w[0]
    newest = trainer(tmp_path / "run", Rising()).run("eval").metrics
    assert newest["valid/w"] != task.w[0]


def test_data_without_a_name_is_not_recorded(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.train(1)
    door.evaluate([(np.array([1.0]),)])
    assert everstep.evaluations(tmp_path / "run") == []


def test_evaluation_data_is_shuffled_by_the_runs_seed(tmp_path: Path) -> None:
    class First(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"first": float(batch[0][0])}

    def door() -> everstep.Trainer:
        streams = {"valid": numbers(10_000, 1, shuffle=True)}
        services = [everstep.Evaluate("valid", num_steps=1)]
        return trainer(tmp_path / "run", First(), streams=streams, services=services, seed=None)

    door().run_training()
    rows_of = RunJournal(tmp_path / "run").series("valid/first", "eval/valid")[1]
    assert door().evaluate("valid", 1)["valid/first"] == rows_of[-1]


# ------------------------------------------------------------------------------------- epochs


def test_an_epoch_alone_is_one_epoch_of_the_run(tmp_path: Path) -> None:
    for _ in range(2):
        trainer(tmp_path / "run", max_epoch=3).epoch()
    door = trainer(tmp_path / "run", max_epoch=3)
    door.epoch("train", [])
    task: Any = door.task
    assert len(task.seen) == 4
    door.epoch()
    assert len(task.seen) == 4, "the run is at its limit"
    ending = trainer(tmp_path / "run", max_epoch=3).run_training()
    assert ending.finished and ending.step == 12
    trainer(tmp_path / "straight", max_epoch=3).run_training()
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []


def test_the_best_weights_are_evaluated_and_predicted_with(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    trainer(run_dir, max_epoch=4, services=[everstep.Evaluate(), everstep.Best("valid/loss")]).run_training()
    best = everstep.best(run_dir)["valid/loss"]
    assert best.path is not None and best.step != 16  # the newest is another one
    door = trainer(run_dir, max_epoch=4)
    newest = door.evaluate("valid")
    for name in ("best", "best/valid/loss", best.path):
        found = door.evaluate("valid", weights=name)
        assert found["valid/loss"] == best.value != newest["valid/loss"]
    assert {Path(one.checkpoint).name for one in everstep.evaluations(run_dir)[1:]} == {Path(best.path).name}
    (prediction, *_) = door.predict("valid", weights="best")
    assert np.array_equal(prediction, next(iter(door.predict("valid", weights=best.path))))
    with pytest.raises(ConfigError, match="'best/valid/loss'"):
        door.evaluate("valid", weights="best/valid/los")
    with door.open(), pytest.raises(UsageError, match="inside the loop"):
        door.evaluate("valid", weights="best")
