"""`Export` and `Dump`: files that need no everstep, whole or absent, whatever kills the run."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as distributed
from safetensors.numpy import load_file

import everstep
import tiny_task
from everstep import Evaluate, Every, Service
from everstep.errors import ConfigError, DamagedCheckpointError, MetricError, NoCheckpointError
from everstep.services import Dump, Export, OnBest
from everstep.testing import ManualClock
from tiny_runs import Boom, boom_at, collecting, flip_array, resumed, rows, serviced, supervised

LOSSES = [0.7, math.nan, 0.5, 0.6, 0.5]
"""Of each epoch, of four steps."""
GUARD = everstep.services.NaNGuard(metrics=["loss"])


def exported(run_dir: Path, name: str = "export") -> dict[str, Any]:
    """By folder, what it says of itself but for the run's id, and its weights, in bytes."""
    found = {}
    for folder in sorted((run_dir / "exports" / name).iterdir()):
        about = json.loads((folder / "export.json").read_text())
        assert about.pop("run") == json.loads((run_dir / "run.json").read_text())["id"]
        arrays = load_file(folder / "model.safetensors")
        found[folder.name] = about, {key: value.tobytes() for key, value in arrays.items()}
    return found


STRATEGIES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "at the end": ({}, [20]),
    "latest": ({"when": Every(epochs=2), "keep": 2}, [8, 16]),
    "all": ({"when": Every(steps=5), "keep": None}, [5, 10, 15, 20]),
    "best": ({"when": OnBest("valid_loss"), "keep": 2}, [4, 12]),
    "condition": ({"when": lambda boundary: boundary.epoch in (1, 3)}, [4, 12]),
}
"""By name, when the weights are exported, and after which steps that is."""


def test_each_strategy_has_its_steps_and_a_crash_changes_no_folder(tmp_path: Path) -> None:
    """Killed at any point: test_all_together."""

    def start(run_dir: Path, crash: int) -> None:
        services = [Export(entry="w", name=name, **how) for name, (how, _) in STRATEGIES.items()]
        tail = collecting("valid_loss", LOSSES)
        serviced(run_dir, [*services, GUARD], tail, boom_at(crash), max_epoch=5)

    resumed(tmp_path, start, 14)
    for name, (_, steps) in STRATEGIES.items():
        whole = exported(tmp_path / "whole", name)
        assert list(whole) == [f"step-{step:08d}" for step in steps], name
        assert len({about["digest"] for about, _ in whole.values()}) == len(steps), "of the weights"
        assert exported(tmp_path / "run", name) == whole
    assert not list(tmp_path.rglob(".tmp-*"))


def test_what_an_export_says_of_itself(tmp_path: Path) -> None:
    services = [Export(OnBest("valid_loss"), entry="w")]
    tiny = serviced(tmp_path, services, collecting("valid_loss", [0.5]), max_epoch=1)
    ((about, arrays),) = exported(tmp_path).values()
    loss = everstep.record.RunJournal(tmp_path).rows("loss")
    assert about.pop("digest")
    metrics = {"loss": [row.value for row in loss if row.phase == "step"][-1], "valid_loss": 0.5}
    where = {"step": 4, "epoch": 1, "checkpoint": "epoch-0001-step-00000004"}
    assert about == {**where, "entry": "w", "format": "safetensors", "metrics": metrics}
    assert arrays == {"array": tiny.w.tobytes()}


def test_a_restart_exports_no_worse_value_and_its_own_end(tmp_path: Path) -> None:
    def start(values: Sequence[float], epochs: int) -> list[str]:
        services = [Export(OnBest("valid_loss"), entry="w"), Export(entry="w", name="final")]
        serviced(tmp_path, services, collecting("valid_loss", values), max_epoch=epochs)
        assert list(exported(tmp_path, "final")) == [f"step-{4 * epochs:08d}"]
        return list(exported(tmp_path))

    for _ in range(2):
        assert start([0.5, 0.3], 2) == ["step-00000004", "step-00000008"]
    assert start([0, 0, 0.4], 3) == ["step-00000004", "step-00000008"]
    assert start([0, 0, 0, 0.2], 4) == ["step-00000004", "step-00000008", "step-00000016"]


def test_a_disk_that_refuses_costs_the_export_and_not_the_run(tmp_path: Path) -> None:
    def damage(loop: Any, step: int) -> None:
        if step == 2:
            (tmp_path / "exports").write_text("in the way")
        if step == 3:
            (tmp_path / "exports").unlink()

    tiny = serviced(tmp_path, [Export(Every(steps=2), entry="w")], inside=damage, max_epoch=1)
    assert list(exported(tmp_path)) == ["step-00000004"]
    (warning,) = tiny.loop.ending.warnings
    assert "'export' failed, and the training goes on" in warning


def test_a_state_with_nan_is_not_exported(tmp_path: Path) -> None:
    weights = {"w": np.zeros(2), "scale": np.ones(1)}
    state, services = {"w": weights["w"], "settings": {"parts": weights}}, [Export(Every(steps=1), entry="w")]
    with everstep.TrainLoop(tmp_path, state, services=services, max_step=3, default_services=False) as loop:
        for _ in loop.iter_epochs():
            for step in loop.iter_steps():
                weights["w"][:] = math.inf if step == 2 else step
    assert list(exported(tmp_path)) == ["step-00000001", "step-00000003"]


def test_a_run_that_was_left_or_is_called_bad_has_no_export(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        serviced(tmp_path, [Export(entry="w")], inside=boom_at(3), max_epoch=1)
    services = [Export(Every(steps=1), entry="w"), Export(entry="w", name="final")]
    bad = everstep.Stop("bad", failed=True)
    serviced(tmp_path / "bad", services, inside=lambda loop, step: loop.call_soon(bad), max_epoch=1)
    assert not (tmp_path / "exports").exists() and not (tmp_path / "bad" / "exports").exists()


def test_a_supervisor_exports_at_its_end_a_dictionary_of_arrays(tmp_path: Path) -> None:
    parts = {"a": np.arange(3.0), "inner": {"b": np.ones((2, 2), np.float32)}, "count": 3}
    sv = everstep.Supervisor(tmp_path, {"w": parts}, services=[Export(entry="w")], max_step=3)
    supervised(sv, lambda sv: {"loss": 0.5})
    (found,) = exported(tmp_path).items()
    assert found[0] == "step-00000003" and found[1][0]["metrics"] == {"loss": 0.5}
    assert found[1][1].keys() == {"a", "inner/b"}


def test_on_a_schedule_in_seconds(tmp_path: Path) -> None:
    """What the clock decides is no part of the state: the folder alone is gone on with."""
    clock = ManualClock()
    for epochs in (1, 2):
        services = [Export(Every(seconds=1), entry="w", keep=3)]
        tick = lambda loop, step: clock.advance(1)  # noqa: E731
        serviced(tmp_path, services, inside=tick, max_epoch=epochs, clock=clock)
    assert list(exported(tmp_path)) == [f"step-{step:08d}" for step in (6, 7, 8)]


class Digits(everstep.torch.Task):
    """A linear model of two numbers, with dropout, a buffer that is no state, and an average."""

    def build_model(self) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
        model.register_buffer("mask", torch.full((1,), -math.inf), persistent=False)
        return model

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch[0]).square().mean()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Digits]:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    services = [Export(OnBest("valid/loss"), entry="ema", name="weights")]
    program = {"inputs": (torch.zeros(2, 2),), "dynamic_shapes": [{0: torch.export.Dim("batch")}]}
    services += [Export(entry="ema", name="program", format="torch.export", **program)]
    task, data = Digits(ema=0.5), everstep.data.arrays(torch.randn(8, 2), batch_size=4)
    streams = {"train": data, "valid": data}
    everstep.Trainer(task, streams, run_dir, max_epoch=2, seed=1, services=services).run_training()
    return run_dir, task


LOADS = """
import json, sys
sys.modules["everstep"] = None  # importing it fails
import torch
from safetensors.torch import load_file
weights, program = sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)).eval()
model.load_state_dict(load_file(weights))
x = torch.arange(6.0).reshape(3, 2)
print(json.dumps([model(x).tolist(), torch.export.load(program).module()(x).tolist()]))
"""


@pytest.mark.campaign("long")
def test_it_loads_without_everstep(trained: tuple[Path, Digits]) -> None:
    """The average of the weights, by the model's own names, and as a program for any size of batch."""
    run_dir, task = trained
    (weights,) = (run_dir / "exports" / "weights").glob("step-00000004/model.safetensors")
    (program,) = (run_dir / "exports" / "program").glob("*/model.pt2")
    command = [sys.executable, "-I", "-c", LOADS, str(weights), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert task._ema is not None
    with torch.no_grad():
        expected = task._ema.module.eval()(torch.arange(6.0).reshape(3, 2)).tolist()
    assert json.loads(done.stdout) == [expected, expected]


@pytest.mark.campaign("long")
def test_exporting_a_program_changes_nothing(tmp_path: Path) -> None:
    def start(run_dir: Path, services: list[Service]) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
        with everstep.TrainLoop(run_dir, {"model": model}, services=services, max_step=3, seed=1) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps():
                    with torch.no_grad():
                        model[0].weight += model(model[0].weight) * torch.rand(2)
        return model[0].weight.tolist()

    export = Export(Every(steps=2), format="torch.export", inputs=(torch.ones(1, 2),))
    assert start(tmp_path / "a", [export]) == start(tmp_path / "b", [])
    assert (tmp_path / "a" / "exports" / "export" / "step-00000002" / "model.pt2").exists()


# ---- everstep.export: weights of a checkpoint in the formats of other libraries, read back by them
def net(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(50, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3))
    model[2].weight.data = model[2].weight.data.to(torch.bfloat16)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model was never changed, with checkpoints at step 0 and 1."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    model = net(1)
    state = {"model": model, "table": {"w": np.arange(3.0)}, "epoch": {"now": 1}}
    saves = everstep.Checkpoints(everstep.Every(steps=1), keep_last=9)
    with everstep.TrainLoop(run_dir, state, max_step=1, services=[saves]) as loop:
        for _ in loop.iter_epochs():
            list(loop.iter_steps(everstep.data.arrays(np.zeros(2), batch_size=2)))
    return run_dir


def same(state: dict[str, Any]) -> bool:
    expected = net(1).state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


def test_shards_with_an_index(saved: Path, tmp_path: Path) -> None:
    done = everstep.export(saved, tmp_path / "out", max_shard_size=2040)
    assert (done.step, done.arrays) == (1, 9)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(shards)
    assert shards == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] and count > 1
    state: dict[str, Any] = {}
    for shard in shards:
        read = safetensors.torch.load_file(tmp_path / "out" / shard)
        assert {index["weight_map"][name] for name in read} == {shard}
        assert sum(tensor.nbytes for tensor in read.values()) <= 2040
        state |= read
    assert same(state) and index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    with safetensors.safe_open(tmp_path / "out" / shards[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file without
    again = net(2)
    everstep.load(tmp_path / "out", {"model": again})
    assert same(again.state_dict())


def test_what_fits_one_file_is_one_and_a_large_array_is_one(saved: Path, tmp_path: Path) -> None:
    checkpoint = saved / "checkpoints" / "epoch-0001-step-00000001"
    for size in (None, "1MB", "1 MiB", 10**6):
        everstep.export(checkpoint, tmp_path / "out", max_shard_size=size)
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == ["export.json", "model.safetensors"]
        assert same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    everstep.export(saved, tmp_path / "out", max_shard_size=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 9


def test_a_folder_for_torch_distributed_checkpoint_and_arrays_of_numpy(saved: Path, tmp_path: Path) -> None:
    everstep.export(saved, tmp_path / "out", format="torch.distributed.checkpoint")
    again = net(2)
    state = again.state_dict()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        distributed.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(state)
    third = net(3)
    everstep.load(tmp_path / "out", {"model": third})
    assert same(third.state_dict())
    for format in ("safetensors", "torch.distributed.checkpoint"):
        everstep.export(saved, tmp_path / "out", entry="table", format=format)
        table = {"w": np.zeros(3)}
        everstep.load(tmp_path / "out", {"table": table})
        assert table["w"].tolist() == [0, 1, 2]


def test_only_the_entry_is_read(saved: Path, tmp_path: Path) -> None:
    name = "epoch-0001-step-00000001"
    folder = Path(shutil.copytree(saved / "checkpoints" / name, tmp_path / name))
    flip_array(folder, "user/table/w")
    everstep.export(folder, tmp_path / "out")
    assert same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        everstep.export(folder, tmp_path / "table", entry="table")
    assert not (tmp_path / "table").exists()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"format": "torch"}, "did you mean|known: safetensors"),
    ({"max_shard_size": "5 apples"}, "'5 apples' is not a size"),
    ({"max_shard_size": 0}, "0 is not a size"),
    ({"max_shard_size": -5}, "-5 is not a size"),
    ({"max_shard_size": "5GB", "format": "torch.distributed.checkpoint"}, "leave out the size"),
    ({"entry": "modle"}, "did you mean 'model'"),
    ({"entry": "epoch"}, "'epoch' has no arrays"),
    ({"entyr": "model"}, "did you mean 'entry'"),
]


def test_wrong_arguments_write_nothing_and_what_is_no_export_stays(saved: Path, tmp_path: Path) -> None:
    for wrong, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            everstep.export(saved, tmp_path / "out", **wrong)
        assert not (tmp_path / "out").exists()
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="exists and is not an export"):
        everstep.export(saved, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(NoCheckpointError, match="there is no checkpoint yet"):
        everstep.export(tmp_path, tmp_path / "out")


class Task(tiny_task.TinyTask):
    """Says of each example its number, what the weights make of it, and a pair."""

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


def trainer(run_dir: Path, *services: everstep.Service, **options: Any) -> Any:
    return tiny_task.trainer(run_dir, Task(), services=services, **{"max_epoch": 3, **options})


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
            wide = np.array([1, 2], np.longdouble)  # its tolist() gives no number of Python
            return {"parts": np.array([np.array([1, 2]), np.array([3.5])], object), "wide": wide}

    streams = {"train": tiny_task.numbers(8, 2), "valid": tiny_task.numbers(2, 2)}
    options = {"streams": streams, "services": [Dump(["parts", "wide"])], "max_epoch": 1}
    tiny_task.trainer(tmp_path / "run", Ragged(), **options).run_training()
    (text,) = dumped(tmp_path / "run").values()
    assert [json.loads(line)["parts"] for line in text.splitlines()] == [[1, 2], [3.5]]


def test_what_the_program_evaluates_is_dumped_and_taken_back(tmp_path: Path) -> None:
    names = [f"dump valid/step-{step:08d}.jsonl" for step in (4, 8, 12)]
    door = trainer(tmp_path / "run", Dump(ALL))
    tiny_task.in_epochs(door, lambda loop: door.epoch("train", "valid"))
    assert set(dumped(tmp_path / "run")) == {*names}
    trainer(tmp_path / "run", Dump(ALL), max_epoch=2, resume="epoch-0001-step-00000004").run_training()
    assert set(dumped(tmp_path / "run")) == {*names[:2]}
    trainer(tmp_path / "run", Dump(ALL), max_epoch=1, resume=False).run_training()
    assert set(dumped(tmp_path / "run")) == {names[0]}


def test_what_cannot_be_dumped_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did not return 'eac'; did you mean 'each'"):
        trainer(tmp_path / "a", Dump([*ALL, "eac"])).run_training()
    with pytest.raises(MetricError, match=r"'loss' is .*a single value for a whole batch"):
        trainer(tmp_path / "b", Dump([*ALL, "loss"])).run_training()
    with pytest.raises(ConfigError, match="AFTER_EVAL_STEP, which a TrainLoop does not have"):
        everstep.TrainLoop(tmp_path / "c", services=[Dump("id")])
