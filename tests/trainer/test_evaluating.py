"""Training and evaluating in every order, or watching; and what was evaluated apart is recorded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import everstep
import warm
from everstep import hazard
from everstep.contracts.data import Share, Stream
from everstep.data import arrays, as_stream
from everstep.errors import ConfigError, DataError, NoCheckpointError, UsageError
from everstep.proof.compare import compare_runs
from everstep.record import RunDir, RunJournal
from everstep.trainer.eval_loop import evaluate
from everstep.trainer.named_streams import TrainInputs
from tiny_runs import rows
from tiny_task import TinyTask, calling, numbers, trainer
from waiting import PATIENCE, until


def evaluated(run_dir: Path) -> list[int]:
    """The steps at which the loop evaluated."""
    return [row[1] for row in rows(run_dir, "eval/valid") if row[3] == "valid/loss"]


def apart(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that were evaluated apart from the loop."""
    return [one.step for one in everstep.runs.evaluations(run_dir)]


def written_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (run_dir / "logs" / "metrics.jsonl").read_text().splitlines())]


def train_and_evaluate(door: everstep.Trainer, **how: Any) -> tuple[Any, dict[str, float]]:
    """How training ended, and what the evaluation of the end found."""
    ending = door.run_training(**{"evaluate_end": True, **how})
    return ending, door.evaluate_all()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(("how", "in_the_loop", "afterwards"), [
    ({}, [4, 8], []),
    ({"max_step": 6}, [4, 6], []),
    ({"evaluate": False}, [], [8]),
    ({"evaluate": everstep.Every(steps=2)}, [2, 4, 6, 8], []),
    ({"evaluate": everstep.Every(steps=3)}, [3, 6, 8], []),
    ({"evaluate": everstep.Every(epochs=2)}, [8], []),
    ({"evaluate": everstep.Every(epochs=1) | everstep.Every(steps=5)}, [4, 5, 8], []),
], ids=str)  # fmt: skip
def test_training_and_evaluating(tmp_path: Path, how: Any, in_the_loop: Any, afterwards: Any) -> None:
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
    lines = written_lines(run_dir)
    written = {line["step"]: line["valid/loss"] for line in lines if "valid/loss" in line}
    assert written.keys() == {6, 10} and written[10] == metrics["valid/loss"]
    for number, struck in enumerate(("EIO:loop.tail:3", "EIO:loop.tail_end:3", "SIGTERM:loop.tail_end:3")):
        cut = tmp_path / str(number)
        hazard.arm(struck)
        with pytest.raises((OSError, SystemExit)):
            train_and_evaluate(door(cut))
        hazard.arm(None)
        assert train_and_evaluate(door(cut))[1] == metrics and evaluated(cut) == [6, 10]


def test_the_end_by_a_service_is_evaluated_in_the_loop_too(tmp_path: Path) -> None:
    def ended(run_dir: Path, task: everstep.Task) -> list[dict[str, Any]]:
        services = [everstep.services.StopAfter(epochs=1), everstep.services.JSONLines()]
        door = trainer(run_dir, task, services=[everstep.Evaluate("valid", everstep.Never()), *services])
        train_and_evaluate(door)
        assert evaluated(run_dir) == [4] and apart(run_dir) == []
        assert [one.epoch for one in trainer(run_dir).watch("test", timeout=None)] == [0, 1]  # it has ended
        lines = written_lines(run_dir)
        found = [{name: line[name] for name in line if name != "valid/eval_time"} for line in lines]
        return sorted(found, key=repr)

    with pytest.raises(SystemExit):
        ended(tmp_path / "cut", calling(evaluation=lambda: signal.raise_signal(signal.SIGTERM)))
    whole = ended(tmp_path / "whole", TinyTask())
    assert ended(tmp_path / "cut", TinyTask()) == whole and any("valid/loss" in line for line in whole)


def test_a_finished_run_still_evaluates(tmp_path: Path) -> None:
    def watched(door: everstep.Trainer) -> dict[str, float]:
        (found,) = door.watch(every="newest", timeout=0.0)
        return found.metrics

    ways = [lambda door: door.evaluate_all(newest=True), lambda door: train_and_evaluate(door)[1], watched]
    ways.append(lambda door: train_and_evaluate(door, evaluate=False)[1])
    for number, way in enumerate(ways):
        run_dir = tmp_path / str(number)
        trainer(run_dir).run_training(evaluate=False)
        assert way(trainer(run_dir)) == trainer(run_dir).evaluate("valid"), number
        assert evaluated(run_dir) == []


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
    apart = [(one.stream, one.num_steps) for one in everstep.runs.evaluations(tmp_path / "run")]
    assert apart == [("valid", 1), ("test", -1)]


def test_one_service_may_be_given_to_several_trainers(tmp_path: Path) -> None:
    services = [everstep.Evaluate("valid")]
    first = trainer(tmp_path / "first", services=services)
    trainer(tmp_path / "second", services=services)
    first.run_training()
    assert evaluated(tmp_path / "first") == [4, 8]


def test_a_function_of_ones_own_needs_no_stream_of_the_trainer(tmp_path: Path) -> None:
    services = [everstep.Evaluate("retrieval", evaluator=lambda service: {"retrieval/rank1": 0.5})]
    door = trainer(tmp_path / "run", services=[*services, everstep.Evaluate("valid")])
    door.run_training()
    assert [row[1] for row in rows(tmp_path / "run", "eval/retrieval")] == [4, 8]
    assert all(name.startswith("valid/") for name in door.evaluate_all())  # outside the loop: streams alone


# ---------------------------------------------------------------------------------- the record
def test_an_evaluation_is_recorded_with_its_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    door = trainer(run_dir)
    door.run_training()
    before = [path.read_bytes() for path in sorted((run_dir / "journal").iterdir())]
    found = door.evaluate("test")
    trainer(run_dir).run_evaluation("test")
    door.evaluate("test", 1)
    door.evaluate([(np.array([1.0]),)])  # without a name: not recorded
    assert [path.read_bytes() for path in sorted((run_dir / "journal").iterdir())] == before
    first, part = everstep.runs.evaluations(run_dir)  # the same once, by whichever process
    assert first.metrics == found != part.metrics
    assert (first.stream, first.checkpoint) == ("test", "epoch-0002-step-00000008")
    assert (first.step, first.epoch, first.num_steps) == (8, 2, -1)
    assert part.num_steps == 1 and first.digest == part.digest
    page = json.loads(min((run_dir / "evaluations").iterdir()).read_bytes())
    assert page["run"] == RunDir.open(run_dir, create=False).id and page["wall"]["test/eval_time"] > 0
    assert page["facts"]["seed"] == RunDir.open(run_dir, create=False).seed


def test_what_was_not_recorded_whole_does_not_count(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.run_training()
    (tmp_path / "run" / "evaluations").mkdir()  # killed when it was to be made
    assert everstep.runs.evaluations(tmp_path / "run") == []
    found = [door.evaluate("test")]
    whole = set((tmp_path / "run" / "evaluations").iterdir())
    found.append(door.evaluate("valid"))
    (torn,) = set((tmp_path / "run" / "evaluations").iterdir()) - whole
    torn.write_bytes(torn.read_bytes()[:-3])
    assert [one.metrics for one in everstep.runs.evaluations(tmp_path / "run")] == found[:1]
    hazard.arm("ENOSPC:evaluations.fsync:1-9")
    with pytest.warns(RuntimeWarning, match="an evaluation is not recorded: .*; repair the disk"):
        assert door.evaluate("valid") == found[1]
    hazard.arm(None)
    found[1] = door.evaluate("valid", 1)
    assert [one.metrics for one in everstep.runs.evaluations(tmp_path / "run")] == found


@pytest.mark.campaign("random")
def test_processes_record_at_the_same_time(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.run_training()
    evaluate = "[trainer(Path(sys.argv[1])).evaluate('test') for _ in range(5)]"
    both = [process(evaluate, tmp_path / "run") for _ in range(2)]
    said = [each.communicate()[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert len(everstep.runs.evaluations(tmp_path / "run")) == 1


def test_restored_best_weights_are_what_is_evaluated_and_named(tmp_path: Path) -> None:
    class Rising(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"step": float(len(self.seen)), "w": self.w[0]}

    task = Rising()
    best = everstep.Best("valid/step", "min", restore_at_end=True)
    _, metrics = train_and_evaluate(trainer(tmp_path / "run", task, services=[best]))
    (found,) = everstep.runs.evaluations(tmp_path / "run")
    assert found.checkpoint == "best/valid.step/epoch-0001-step-00000004" and found.step == 4
    assert metrics["valid/w"] == task.w[0]
    newest = trainer(tmp_path / "run", Rising()).evaluate_all(newest=True)
    assert newest["valid/w"] != task.w[0]


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
    best = everstep.runs.best(run_dir)["valid/loss"]
    assert best.path is not None and best.step != 16  # the newest is another one
    door = trainer(run_dir, max_epoch=4)
    newest = door.evaluate("valid")
    for name in ("best", "best/valid/loss", best.path):
        found = door.evaluate("valid", weights=name)
        assert found["valid/loss"] == best.value != newest["valid/loss"]
    of_best = everstep.runs.evaluations(run_dir)[1:]
    assert {Path(one.checkpoint).name for one in of_best} == {Path(best.path).name}
    (prediction, *_) = door.predict("valid", weights="best")
    assert np.array_equal(prediction, next(iter(door.predict("valid", weights=best.path))))
    with pytest.raises(ConfigError, match="'best/valid/loss'"):
        door.evaluate("valid", weights="best/valid/los")
    with door.open(), pytest.raises(UsageError, match="inside the loop"):
        door.evaluate("valid", weights="best")


# -------------------- aggregations
class Values(TinyTask):
    """Each sample's value, as an array, as a tensor, as a list, and the mean of each batch."""

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        x = ids * 1.0
        return {"each": x, "tensor": torch.tensor(x), "list": list(x), "mean": float(np.mean(x))}


def found_by_all(run_dir: Path, best: Any = None, **arguments: Any) -> dict[str, float]:
    """What the service finds, which `evaluate` of the same and of another process find, too."""

    def door() -> everstep.Trainer:
        services = [everstep.Evaluate("valid", **arguments), *filter(None, [best])]
        return trainer(run_dir, Values(), services=services, streams={"valid": numbers(9, 2)}, max_epoch=1)

    first = door()
    ending = first.run_training()
    assert best is None or (ending.best is not None and ending.best.value == pytest.approx(7.2))
    rows = list(RunJournal(run_dir).rows())
    found = {row.name: row.value for row in rows if row.phase == "eval/valid" and not row.wall}
    assert first.evaluate("valid") == found == door().evaluate("valid")
    return found


def test_statistics_of_samples_and_of_batches(tmp_path: Path) -> None:
    names = ["mean", "std", "nanmean", "median", "q90"]
    stats = {"each": names, "tensor": names, "list": names, "mean": ["std", "max"]}
    found = found_by_all(tmp_path, best=everstep.Best("valid/each/q90", "min"), stats=stats)
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
    assert found_by_all(tmp_path / "both", **both) == {"valid/half": 18.0, "valid/mean": 4.0}
    assert steps == [0, 1, 2, 3, 4] * 3
    assert found_by_all(tmp_path / "online", online_agg_func=online)["valid/sum"] == 36.0
    assert found_by_all(tmp_path / "list", agg_func=aggregate)["valid/sum"] == 36.0


# -------------------- split evaluation
class Counting(everstep.Task):
    """Counts its forwards, and collects the samples that a reduction is given."""

    def __init__(self) -> None:
        self.forwards, self.samples = 0, []  # type: ignore[var-annotated]

    def state(self) -> Mapping[str, Any]:
        return {}

    def train_step(self, inputs: Any) -> Mapping[str, Any]:
        raise AssertionError("not trained")

    def eval_step(self, inputs: Any) -> Mapping[str, Any]:
        self.forwards += 1
        [ids] = inputs
        return {"mean": float(np.mean(np.asarray(ids, dtype=float))), "ids": np.asarray(ids).tolist()}

    def batch_size(self, inputs: Any) -> int:
        return len(inputs[0])

    def eval_begin(self) -> Any:
        return self.samples

    def eval_reduce(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        state.extend(outputs["ids"])
        return state


def in_memory(length: int, batch: int, share: Share) -> Stream:
    return arrays(np.arange(length), batch_size=batch).split(share)


def sampled(length: int, batch: int, share: Share) -> Stream:
    numbers = torch.utils.data.TensorDataset(torch.arange(length))
    sampler = DistributedSampler(numbers, share.size, share.rank, shuffle=False)
    return as_stream(DataLoader(numbers, batch // share.size, sampler=sampler)).split(share)


@pytest.mark.parametrize("make", [in_memory, sampled])
@pytest.mark.parametrize(
    ("length", "batch", "num_steps"), [(7, 3, -1), (8, 3, -1), (1, 3, -1), (9, 6, 1), (12, 6, -1)]
)
def test_as_many_forwards_and_each_sample_once(make: Any, length: int, batch: int, num_steps: int) -> None:
    tasks, sums = [Counting() for _ in range(3)], 0.0
    seen: list[Any] = []
    for rank, task in enumerate(tasks):
        stream = make(length, batch, Share(rank, 3, "pad"))
        found = evaluate(task, stream, "valid", num_steps, 0, on_step=seen.append)
        sums += found.get("mean", 0.0) * len(task.samples)
    evaluated = length if num_steps < 0 else batch * num_steps
    assert {task.forwards for task in tasks} == {-(-evaluated // batch)}
    assert sorted(sample for task in tasks for sample in task.samples) == list(range(evaluated))
    assert sums == pytest.approx(sum(range(evaluated)))
    assert sum(len(step.batch[0]) for step in seen) == evaluated


def test_a_rank_that_is_handed_padding_alone_is_not_an_evaluation_without_a_batch() -> None:
    assert evaluate(Counting(), in_memory(1, 3, Share(2, 3, "pad")), "valid", -1, 0) == {}
    nothing = arrays(np.arange(1), batch_size=3, drop_last=True).split(Share(2, 3, "pad"))
    with pytest.raises(DataError, match="gave no batch to evaluate; give it data"):
        evaluate(Counting(), nothing, "valid", -1, 0)


def test_inputs_of_several_batches_have_a_weight_only_where_the_parts_are_alike() -> None:
    def pair(batches: Iterator[Any]) -> Any:
        return next(batches), next(batches)

    even = TrainInputs(in_memory(8, 2, Share()), pair).split(Share(1, 2))
    cursor = even.open("train", 0, seed=0)
    assert [[int(part[0]) for [part] in inputs] for inputs in cursor] == [[1, 3], [5, 7]]
    assert cursor.weight == 1.0
    uneven = TrainInputs(in_memory(12, 3, Share()), pair).split(Share(1, 2, "weight"))
    with pytest.raises(DataError, match=r'next_train_inputs drew 2 batches.*give uneven="drop"'):
        next(uneven.open("train", 0, seed=0))
    single = TrainInputs(in_memory(12, 3, Share()), next).split(Share(1, 2, "weight"))
    cursor = single.open("train", 0, seed=0)
    assert (next(cursor)[0].tolist(), cursor.weight) == ([2], pytest.approx(2 / 3))


# -------------------- watch
def door(run_dir: Path, seconds: float = 0.0, steps: int = 40) -> everstep.Trainer:
    """It saves a checkpoint after each step, and takes seconds for it, so that two processes can meet."""
    task = calling(lambda: threading.Event().wait(seconds))
    saves = everstep.Checkpoints(everstep.Every(steps=1), keep_last=None)
    services = [everstep.Evaluate("valid", everstep.Never()), saves]
    return trainer(run_dir, task, services=services, max_epoch=None, max_step=steps)


TRAIN = "door(Path(sys.argv[1]), 0.03).run_training()"
WATCH = f"[*map(print, door(Path(sys.argv[1])).watch(['valid', 'test'], timeout={PATIENCE}))]"


def process(what: str, run_dir: Path) -> subprocess.Popen[str]:
    program = f"from pathlib import Path; import sys; from test_evaluating import door, trainer; {what}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return warm.Popen([sys.executable, "-c", program, str(run_dir)], env=environment, **out)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.campaign("long")
def test_both_are_killed_and_nothing_is_evaluated_twice_or_missed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    watcher, training = process(WATCH, run), process(TRAIN, run)
    until(lambda: (run / "evaluations").exists() and len(everstep.runs.evaluations(run)) >= 5)
    watcher.kill()
    until(lambda: len(names(run)) >= 12)
    training.kill()
    for killed in (watcher, training):
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL
    before = everstep.runs.evaluations(run)
    watcher, training = process(WATCH, run), process(TRAIN, run)
    said, _ = watcher.communicate()
    trained, _ = training.communicate()
    assert (watcher.returncode, training.returncode) == (0, 0), said + trained
    found = everstep.runs.evaluations(run)
    assert found[: len(before)] == before
    each = {(stream, name) for stream in ("valid", "test") for name in names(run)}
    assert {(one.stream, one.checkpoint) for one in found} == each
    assert max(Counter((one.stream, one.checkpoint, one.digest) for one in found).values()) == 1
    door(tmp_path / "straight").run_training()
    assert compare_runs(tmp_path / "straight", run) == []


def test_each_checkpoint_in_order_then_none(tmp_path: Path) -> None:
    door(tmp_path / "run", steps=6).run_training()
    found = list(door(tmp_path / "run").watch())
    ends = {0: "epoch-0000-", 4: "epoch-0001-", 6: "epoch-0002-"}  # of epochs
    assert [one.checkpoint for one in found] == [f"{ends.get(n, '')}step-{n:08d}" for n in range(7)]
    task = TinyTask()
    for one in found:
        everstep.load(tmp_path / "run" / "checkpoints" / one.checkpoint, task.state())
        loss = sum((i - task.w[0]) ** 2 for i in range(5)) / 5
        assert one.metrics["valid/loss"] == pytest.approx(loss) and one.epoch == (one.step + 3) // 4
    in_the_loop = [everstep.Evaluate("valid", everstep.Every(steps=1), validate_first=True)]
    trainer(tmp_path / "loop", services=in_the_loop, max_step=6).run_training()
    for name in ("valid/loss", "valid/noise"):
        assert [one.metrics[name] for one in found] == RunJournal(tmp_path / "loop").series(name)[1]
    assert everstep.runs.evaluations(tmp_path / "run") == found
    assert list(door(tmp_path / "run").watch()) == []
    assert len(list(door(tmp_path / "run").watch("test"))) == 7
    door(tmp_path / "run", steps=7).run_training()
    newer = [one.checkpoint for one in door(tmp_path / "run").watch()]
    assert newer == ["step-00000006", "epoch-0002-step-00000007"]  # the epoch went on inside


@pytest.mark.campaign("timed")
def test_throttled(tmp_path: Path) -> None:
    door(tmp_path / "run", steps=1).run_training()
    began = time.monotonic()
    assert len(list(door(tmp_path / "run").watch(throttle=0.5))) == 2
    assert time.monotonic() - began >= 0.5


def test_a_run_that_is_not_there_or_was_left_is_given_up(tmp_path: Path, capsys: Any) -> None:
    assert list(door(tmp_path / "run").watch(timeout=0.0)) == []
    assert "it is not there" in capsys.readouterr().out
    left = door(tmp_path / "run", steps=6)
    with left.open() as loop:
        for _ in loop.iter_epochs():
            left.epoch()
            break
    assert [one.step for one in door(tmp_path / "run").watch(timeout=0.0)] == [0, 1, 2, 3, 4]
    assert "has not ended, and nobody trains it for 0 s" in capsys.readouterr().out


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_passed_over(tmp_path: Path, capsys: Any) -> None:
    there = tmp_path / "run" / "checkpoints"

    class Deleting(TinyTask):
        states = 0

        def state(self) -> Mapping[str, Any]:  # asked for when the checkpoint has been chosen
            self.states += 1
            if self.states == deleting:
                shutil.rmtree(there / "step-00000001")
            return super().state()

    door(tmp_path / "run", steps=4).run_training()
    arrays = there / "step-00000002" / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1])  # cut: of what is not read, the bytes are not looked at
    deleting = 0
    watching = trainer(tmp_path / "run", task := Deleting()).watch()
    assert next(watching).step == 0
    deleting = task.states + 1
    assert [one.step for one in watching] == [3, 4]
    said = capsys.readouterr().out
    assert "checkpoint step-00000001 is passed over: it was deleted while it was read" in said
    assert "checkpoint step-00000002 is passed over: " in said and "damaged" in said
