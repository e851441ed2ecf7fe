"""Training and evaluating in every order, or watching; and what was evaluated apart is recorded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_task import TinyTask, trainer

import everstep
import warm
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


def train_and_evaluate(door: everstep.Trainer, **how: Any) -> tuple[everstep.Ending, dict[str, float]]:
    """How training ended, and what the evaluation of the end found."""
    ending = door.run_training(**{"evaluate_end": True, **how})
    return ending, door.evaluate_all()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("how", "in_the_loop", "afterwards"),
    [
        ({}, [4, 8], []),
        ({"max_step": 6}, [4, 6], []),
        ({"evaluate": False}, [], [8]),
        ({"evaluate": everstep.Every(steps=2)}, [2, 4, 6, 8], []),
        ({"evaluate": everstep.Every(steps=3)}, [3, 6, 8], []),
    ],
    ids=str,
)
def test_training_and_evaluating(
    tmp_path: Path, how: dict[str, Any], in_the_loop: list[int], afterwards: list[int]
) -> None:
    run_dir, task = tmp_path / "run", TinyTask()
    ending, metrics = train_and_evaluate(trainer(run_dir, task), **how)
    assert ending.finished
    assert evaluated(run_dir) == in_the_loop and apart(run_dir) == afterwards
    straight = TinyTask()
    trainer(tmp_path / "straight", straight).train(ending.step)
    assert task.seen == straight.seen and task.w.tobytes() == straight.w.tobytes()
    assert metrics == trainer(run_dir).evaluate("valid")


def test_the_end_is_evaluated_in_the_loop_so_that_every_sink_has_it(tmp_path: Path) -> None:
    def door(run_dir: Path) -> everstep.Trainer:
        services = [everstep.Evaluate("valid", everstep.Every(steps=6)), everstep.services.JSONLines()]
        return trainer(run_dir, services=services, max_epoch=9, max_step=10)

    run_dir = tmp_path / "run"
    _, metrics = train_and_evaluate(door(run_dir))
    assert evaluated(run_dir) == [6, 10] and apart(run_dir) == []
    lines = map(json.loads, (run_dir / "logs" / "metrics.jsonl").read_text().splitlines())
    written = {line["step"]: line["valid/loss"] for line in lines if "valid/loss" in line}
    assert written.keys() == {6, 10} and written[10] == metrics["valid/loss"]
    for number, struck in enumerate(("EIO:loop.tail:3", "EIO:loop.tail_end:3", "SIGTERM:loop.tail_end:3")):
        cut = tmp_path / str(number)
        hazard.arm(struck)
        with pytest.raises((OSError, SystemExit)):
            train_and_evaluate(door(cut))
        hazard.arm(None)
        assert train_and_evaluate(door(cut))[1] == metrics and evaluated(cut) == [6, 10] and apart(cut) == []


def watched(door: everstep.Trainer) -> dict[str, float]:
    (found,) = door.watch(every="newest", timeout=0.0)
    return found.metrics


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    "evaluate",
    [
        lambda door: door.evaluate_all(newest=True),
        lambda door: train_and_evaluate(door)[1],
        lambda door: train_and_evaluate(door, evaluate=False)[1],
        watched,
    ],
    ids=["the newest", "training and evaluating", "training, then evaluating", "watching"],
)
def test_a_finished_run_still_evaluates(
    tmp_path: Path, evaluate: Callable[[everstep.Trainer], dict[str, float]]
) -> None:
    trainer(tmp_path / "run").run_training(evaluate=False)
    assert evaluate(trainer(tmp_path / "run")) == trainer(tmp_path / "run").evaluate("valid")
    assert evaluated(tmp_path / "run") == []


def test_nothing_is_evaluated_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="train first"):
        trainer(tmp_path / "run").evaluate_all(newest=True)
    assert not (tmp_path / "run").exists()
    assert list(trainer(tmp_path / "run").watch(timeout=0.0)) == []


def test_all_streams_of_the_services_are_evaluated(tmp_path: Path) -> None:
    services = [everstep.Evaluate("valid", num_steps=1), everstep.Evaluate("test")]
    trainer(tmp_path / "run", services=services).run_training()
    found = trainer(tmp_path / "run", services=services).evaluate_all(newest=True)
    assert set(found) == {f"{stream}/{name}" for stream in ("valid", "test") for name in ("loss", "noise")}
    assert [(one.stream, one.num_steps) for one in everstep.evaluations(tmp_path / "run")] == [
        ("valid", 1),
        ("test", -1),
    ]


def test_rows_of_the_loop_answer_only_for_the_same_evaluation(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def door(**how: Any) -> everstep.Trainer:
        return trainer(run_dir, services=[everstep.Evaluate("valid", **how)])

    door(num_steps=1, name="part").run_training()
    part = door(num_steps=1).evaluate_all()
    assert apart(run_dir) == [] and part["valid/loss"].hex() in str(rows(run_dir, "eval/part"))
    whole = door().evaluate_all()
    assert apart(run_dir) == [8] and whole == door().evaluate("valid") != part
    more = door(num_steps=1, stats={"loss": ["max"]}).evaluate_all()
    assert more.keys() - part.keys() == {"valid/loss/max"}
    assert len(apart(run_dir)) == 3 and door(num_steps=1, stats={"loss": ["max"]}).evaluate_all() == more


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
    with pytest.warns(RuntimeWarning, match="an evaluation is not recorded: .*; repair the disk"):
        assert door.evaluate("valid") == found[1]
    hazard.arm(None)
    found[1] = door.evaluate("valid", 1)
    assert [one.metrics for one in everstep.evaluations(tmp_path / "run")] == found
    assert {row.segment for row in RunJournal(tmp_path / "run" / "evaluations").rows()} == {1, 4}


@pytest.mark.campaign("random")
def test_processes_record_at_the_same_time(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.run_training()
    program = "from tiny_task import trainer; from pathlib import Path; import sys\n"
    program += "for _ in range(5): trainer(Path(sys.argv[1])).evaluate('test')"
    path = os.pathsep.join([*sys.path])
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    both = [warm.Popen(command, env={**os.environ, "PYTHONPATH": path}) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    found = everstep.evaluations(tmp_path / "run")
    assert len(found) == 10 and len({str(one.metrics) for one in found}) == 1


def test_restored_best_weights_are_what_is_evaluated_and_named(tmp_path: Path) -> None:
    class Rising(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"step": float(len(self.seen)), "w": self.w[0]}

    task = Rising()
    best = everstep.Best("valid/step", "min", restore_at_end=True)
    _, metrics = train_and_evaluate(trainer(tmp_path / "run", task, services=[best]))
    (found,) = everstep.evaluations(tmp_path / "run")
    assert found.checkpoint == "best/valid.step/epoch-0001-step-00000004" and found.step == 4
    assert metrics["valid/w"] == task.w[0]
    newest = trainer(tmp_path / "run", Rising()).evaluate_all(newest=True)
    assert newest["valid/w"] != task.w[0]


def test_data_without_a_name_is_not_recorded(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.train(1)
    door.evaluate([(np.array([1.0]),)])
    assert everstep.evaluations(tmp_path / "run") == []


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
