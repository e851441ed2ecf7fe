"""Models that ranks hold together, in parts of weights or of computations: exact, read anywhere."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import HEAD, Net
from processes import ended, lines_by_rank, outputs, started
from safetensors.numpy import load_file

import everstep
import warm
from everstep.errors import DamagedCheckpointError
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("long")

RANKS = {"one": 1, "ddp": 2, "turned": 2, "fsdp": 2, "plain": 2, "sequence": 2, "plain+": 4, "sequence+": 4}
"""Number of ranks by layout; "+" is a mesh of two dimensions, with fully_shard over the other one."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))


def train(run: Path, how: str, kill_at: int = 0, size: int = 0, **given: Any) -> list[str]:
    """Train to the end, or until the last rank kills itself in a step; return what each rank said."""
    arguments = "".join(f", {name}={value!r}" for name, value in given.items())
    program = f"{HEAD}\ntrain({str(run)!r}, {how!r}, {kill_at}{arguments})"
    return outputs(program, size or RANKS[how], dies=bool(kill_at))


def series(run: Path) -> dict[tuple[str, int], float]:
    rows = RunJournal(run).rows()
    return {(row.name, row.step): row.value for row in rows if row.phase in ("step", "tail") and not row.wall}


def sums(said: Sequence[str]) -> dict[int, float]:
    """The sum of the samples of each step over all parts, of which the ranks of one part have the same."""
    found: dict[int, dict[str, str]] = {}
    for lines in lines_by_rank("".join(said)).values():
        for word, step, part, total in (line.split() for line in lines if line.startswith("sums ")):
            assert found.setdefault(int(step), {}).setdefault(part, total) == total, (word, step)
    return {step: sum(map(float, parts.values())) for step, parts in found.items()}


def told(said: Sequence[str], word: str) -> str:
    """What all ranks have said after a word."""
    (only,) = {
        line.split(f"{word} ")[1] for text in said for line in text.splitlines() if f": {word} " in line
    }
    return only


def approx(values: Any) -> Any:
    return pytest.approx(values, abs=1e-9, rel=1e-9)


# ------------------------------------------------------------------ the same numbers as one process
COMPUTES = [
    (how, kind) for how in ("plain", "sequence", "plain+", "sequence+") for kind in ("", "global", "window")
]
COMPUTES += [("fsdp", kind) for kind in ("value", "norm", "global", "window")]


@pytest.mark.parametrize(("how", "wrapped"), COMPUTES)
def test_it_computes_what_one_process_computes(how: str, wrapped: str, tmp_path: Path) -> None:
    alone = train(tmp_path / "one", "one", wrapped=wrapped)
    said = train(tmp_path / "run", how, wrapped=wrapped)
    assert sums(said) == approx(sums(alone))
    found = series(tmp_path / "run")
    assert found == approx(series(tmp_path / "one")) and (("grad_norm", 3) in found) == bool(wrapped)


def test_dropout_of_what_all_ranks_have_is_that_of_one_process(tmp_path: Path) -> None:
    for how in ("one", "plain"):
        train(tmp_path / how, how, dropout=0.4, epochs=2)
    assert series(tmp_path / "plain") == approx(series(tmp_path / "one"))


KINDS = "plain, clipped, window and ema, elements, window of elements, static, spare"
TASKS = [
    ("fsdp", 2, "plain, window, elements"),
    ("sequence", 2, "window, no mean"),
    ("plain+", 4, "window, no mean"),
    ("ddp", 2, f"{KINDS}, compiled"),  # which takes seconds
    ("ddp", 3, KINDS),
]


@pytest.mark.parametrize(("how", "size", "kinds"), TASKS)
def test_a_trainer_trains_and_evaluates_as_on_one_process(how, size, kinds, tmp_path: Path) -> None:
    for each, ranks in ((how, size), ("one", 1)):
        runs = {kind: str(tmp_path / f"{each}-{kind}") for kind in kinds.split(", ")}
        calls = [f"run_task({run!r}, {each!r}, {kind!r})" for kind, run in runs.items()]
        outputs("\n".join([HEAD, *calls]), ranks)
    for kind in kinds.split(", "):
        run, alone = tmp_path / f"{how}-{kind}", tmp_path / f"one-{kind}"
        (text,) = {Path(f"{run}.{rank}").read_text() for rank in range(size)}
        (weights, *values), (expected, *wanted) = json.loads(text), json.loads(Path(f"{alone}.0").read_text())
        assert weights == approx(expected) and len(values) == 1 + (kind == "no mean"), kind
        if "elements" not in kind:  # what is told is a mean over samples
            assert values == approx(wanted) and series(run) == approx(series(alone)), kind


def test_a_window_is_reduced_once() -> None:
    program = """
from collections import Counter
from torch.profiler import ProfilerActivity, profile
from everstep import backends
from everstep.contracts.group import DataRanks

task = Squares("ddp", accumulate=3, parallel=True)
task.build()
backends.get("torch").prepare_ranks(task.state(), DataRanks(range(size)))
counts = []
for _ in range(4):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        task.train_step([torch.as_tensor(each[rank:10:size]) for each in (samples, targets)])
    counts.append(Counter(event.name for event in profiler.events())["gloo:all_reduce"])
say(counts)  # a bucket, and the counts of elements
"""
    assert lines_by_rank("".join(outputs(HEAD + program, 2))) == {0: ["[0, 0, 2, 0]"], 1: ["[0, 0, 2, 0]"]}


# ------------------------------------------------------------------ from one layout into another
def test_a_run_goes_from_one_layout_into_another(tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    expected = sums(train(straight, "one", epochs=4))
    said: list[str] = []
    ways = "plain 3, one 6, plain+ 9, ddp 11, sequence+ 14, fsdp 17, plain 0"
    for how, kill_at in ((how, int(at)) for how, at in map(str.split, ways.split(", "))):
        said = train(run, how, kill_at, epochs=4, every=1, slow=0.1, size=4 if how == "fsdp" else 0)
        found = sums(said)
        found.pop(kill_at, None)  # not all ranks were there
        assert found == approx({step: expected[step] for step in found}), how
    assert series(run) == approx(series(straight))
    assert "the checkpoint is of 4 ranks, and this start has 2 ranks with 1 part of each batch" in said[0]


def test_values_go_from_one_layout_into_another_to_the_bit(tmp_path: Path) -> None:
    run, before = tmp_path / "run", ""
    ways = [("fsdp", 4), ("ddp", 2), ("one", 1), ("hsdp", 4), ("fsdp", 2), ("fsdp", 3)]
    for number, (how, size) in enumerate(ways, 1):
        said = train(run, how, size=size, epochs=number, on_divergence="warn")
        assert before in ("", told(said, "entered"))
        before = told(said, "left")
    train(tmp_path / "alone", "one", epochs=len(ways))
    found = series(run)
    assert sum(name == "loss" for name, _ in found) == 5 * len(ways)
    assert found == approx(series(tmp_path / "alone"))


def test_weights_of_one_process_begin_a_run_in_parts(tmp_path: Path) -> None:
    left = told(train(tmp_path / "one", "one", epochs=1), "left")
    said = train(tmp_path / "run", "fsdp", epochs=2, init_from=str(tmp_path / "one"))
    assert told(said, "entered") == left


def test_another_mesh_of_as_many_ranks_is_another_layout_and_no_divergence(tmp_path: Path) -> None:
    run, changed = tmp_path / "run", "results are not bit-identical to those before"

    def start(how: str, kill_at: int = 0) -> str:
        return "".join(train(run, how, kill_at, size=4, every=5))

    start("fsdp", kill_at=9)
    assert changed not in start("fsdp", kill_at=8)
    said = start("hsdp", kill_at=9)
    was, now = re.findall(r"laid out as (.*), and is (.*) in this start", said)[0]
    assert (was, now) == ("Shard(dim=0) over 4", "Replicate(), Shard(dim=0) over 2 x 2")
    assert said.count(changed) == 1 and "resume differs" not in said
    last = start("hsdp")
    assert "resume verified" in last and "resume differs" not in last
    journal = RunJournal(run)
    decided = [e.data for e in journal.events("decision", valid=False) if e.data["what"] == "chosen"]
    assert [(each["why"], each["step"]) for each in decided] == [("another layout of the sharded state", 5)]
    assert "more than one kind of machine" in everstep_says("show", run)[1]


def test_another_precision_of_a_sharded_model_is_a_changed_setting(tmp_path: Path) -> None:
    def start(how: str, kill_at: int = 0, more: str = "") -> str:
        call = f"train({str(tmp_path / 'run')!r}, {how!r}, {kill_at}{more})"
        program = f"{HEAD}\ntry:\n    {call}\nexcept EverstepError as error:\n    say('refused', error)"
        with started(program, 2) as processes:
            return "".join(ended(processes))

    start("reduced in bfloat16", kill_at=5)
    refused = start("fsdp")
    assert "state 'model': mp_policy" in refused and "reduce_dtype=torch.bfloat16" in refused
    assert "digest" not in refused
    assert "mp_policy" not in start("reduced in bfloat16", kill_at=7)
    said = start("fsdp", more=", on_change='override'")
    assert "used as given" in said and said.count(": digest ") == 2 and "resume differs" not in said


# ------------------------------------------------------------------ what is on the disk
def test_each_value_is_written_once_by_a_rank_that_holds_it(tmp_path: Path) -> None:
    train(tmp_path / "run", "hsdp", size=4, epochs=1)
    folder = tmp_path / "run/checkpoints/epoch-0001-step-00000005"
    body = json.loads((folder / "manifest.json").read_bytes())["body"]
    stored = {file: load_file(folder / file) for file in body["files"] if file.startswith("pieces-")}
    assert len(stored) > 2  # copies share the work
    used = set()
    for name, facts in body["arrays"].items():
        if name.endswith(("weight", "bias", "exp_avg", "exp_avg_sq")):
            pieces = facts["pieces"]
            used |= {(piece["file"], piece["key"]) for piece in pieces}
            rows = [row for p in pieces for row in range(p["offset"][0], p["offset"][0] + p["shape"][0])]
            assert sorted(rows) == list(range(facts["shape"][0])), name
            assert all([*stored[p["file"]][p["key"]].shape] == p["shape"] for p in pieces)
    assert used == {(file, key) for file, arrays in stored.items() for key in arrays}


def tear(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    return file


def test_a_damaged_or_missing_shard_is_named_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "fsdp", epochs=2)
    torn = tear(run / "checkpoints/epoch-0002-step-00000010/pieces-00001.safetensors")
    said = "".join(train(run, "fsdp", epochs=3))
    assert f"{torn} has changed since it was written" in said and "resuming epoch 2, step 8, from" in said
    last = run / "checkpoints/epoch-0003-step-00000015/pieces-00000.safetensors"
    last.unlink()
    said = "".join(train(run, "fsdp", epochs=4))
    assert f"{last} is missing" in said and "resuming epoch 3, step 14, from" in said


def everstep_says(*words: object) -> tuple[int, str]:
    """Exit status and output of a command."""
    command = [sys.executable, "-m", "everstep", *map(str, words)]
    done = warm.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_one_process_loads_verifies_and_compares_also_what_was_copied(tmp_path: Path) -> None:
    run, newest = tmp_path / "run", "epoch-0002-step-00000010"
    digest = told(train(run, "fsdp", epochs=2), "digest")
    folder, copies = run / "checkpoints" / newest, tmp_path / "copies"
    loaded, trained, again = (Net().double() for _ in range(3))
    optimizer = torch.optim.AdamW(loaded.parameters())
    assert everstep.load(run, {"model": loaded, "optimizer": optimizer}).digest == digest
    everstep.load(run / "best/valid_loss", {"model": trained})
    assert len(optimizer.state_dict()["state"]) == len([*loaded.parameters()])

    assert newest in everstep_says("checkpoints", run)[1]
    assert everstep_says("checkpoints", run, "verify")[0] == 0
    shutil.copytree(folder, copies / newest)
    shutil.copytree(run, tmp_path / "other")
    assert compare_runs(run, tmp_path / "other") == []
    assert everstep_says("compare", run, tmp_path / "other")[0] == 0

    torn = tear(folder / "pieces-00001.safetensors")
    status, text = everstep_says("checkpoints", run, "verify")
    assert status == 1 and torn.name in text
    everstep.load(copies / newest, {"model": again})
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))
    with pytest.raises(DamagedCheckpointError, match=torn.name):
        everstep.load(folder, {"model": again, "optimizer": optimizer})


# ------------------------------------------------------------------ what ranks share
SHARED = """
each = [everstep.Checkpoints(Every(steps=2))]
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
given = dict(max_epoch=1, data_ranks={given}, services=each)
with everstep.TrainLoop({run!r}, {{"a": numpy.zeros(2)}}, **given) as loop:
    for epoch in loop.iter_epochs():
        for step, _ in loop.iter_steps(everstep.data.arrays(samples, batch_size=12)):
            say("drew", step, random.random(), numpy.random.random(), float(torch.rand(())))
            loop.collect_metrics(own=float(rank), weighed=float(loop.data_rank))
            if step == {kill_at} and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        with loop.metric_collector("collected") as collected:
            collected.collect(float(rank))
    say("who", loop.data_rank, loop.data_ranks)
"""


def test_ranks_of_one_part_draw_the_same_and_count_once(tmp_path: Path) -> None:
    def trains(name: str, given: str, kill_at: int = 0) -> tuple[dict[int, list[str]], list[list[str]]]:
        program = SHARED.format(run=str(tmp_path / name), given=given, kill_at=kill_at)
        said = lines_by_rank("".join(outputs(f"{HEAD}\n{program}", 4, dies=bool(kill_at))))
        return said, [[line for line in said[rank] if line.startswith("drew")] for rank in range(4)]

    _, drawn = trains("mesh", "mesh['dp']", kill_at=4)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3] and len(drawn[0]) == 4
    said, again = trains("mesh", "(rank // 2, 2)")
    for before, now in zip(drawn, again, strict=True):
        assert now[0] in before and len(now) >= 2, "random state was not saved"
    assert [said[rank][-1] for rank in range(4)] == ["who 0 2", "who 0 2", "who 1 2", "who 1 2"]
    found = series(tmp_path / "mesh")
    # own is of the ranks 0 and 2
    assert [found[name, 5] for name in ("own", "weighed", "collected")] == [1.0, 0.5, 1.0]


# ------------------------------------------------------------------ what is refused
OF_TWO = """
class OfRank:
    def __len__(self):
        return 4

    def __iter__(self):
        for index in range(4):
            yield samples[:6] + (rank if index == 2 else 0), targets[:6]

def double(model):
    model.norm.weight.register_hook(lambda gradient: gradient * (1 + rank))

def whole_but(left_out):
    model = bare()
    for name, layer in model.named_children():
        if name != left_out and [*layer.parameters()]:
            fully_shard(layer)
    return model

refused("plain")
refused("plain", (0, 2))
refused("plain", (0, 1 + rank))
refused("plain", 2)
refused("plain", "dp")
refused("plain", (2, 2))
refused("plain", 1, stream=everstep.data.replay(OfRank()))
refused("plain", 1, prepare=double)
refused("plain", 1, in_step=lambda: rank and torch.rand(()))
refused("plain", 1, prepare=lambda model: model.norm.weight.data.add_(rank))
refused("plain", (rank, 2))
refused(alone := bare(), 1, shards=everstep.torch.VirtualShards(alone, 2))
refused("plain", 1)
refused(whole_but("last"))
refused(own := sharded(bare()), model=everstep.PerRank(own))
part = bare()
part.into.requires_grad_(False)
refused(sharded(part), model=everstep.torch.trainable(part))
refused("one", prepare=sharded, optimizer=None)
refused(sharded(bare(), mesh=dist.device_mesh.DeviceMesh("cpu", [rank])))
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
refused(fully_shard(parallelize_module(bare(), mesh["model"], PLANS["plain"]), mesh=mesh["data"]))
"""

TOLD_BY_TWO = [
    ["ConfigError", "tensor parallel", "'model/up.weight': its gradient is that of rank", "data_ranks=1"],
    ["ConfigError", "equally many of the 2 ranks, and it is 0 of 2, 1 of 0"],
    ["DisagreementError", "1 part on rank 0, and 2 parts on rank 1"],
    ["ConfigError", "data_ranks=2: give a mesh"],
    ["ConfigError", "data_ranks='dp': give a mesh"],
    ["ConfigError", "data_ranks=(2, 2): give a mesh"],
    ["DisagreementError", "after step 3 are not the same on ranks 0, 1", "those of rank 1 differ"],
    # of the leaves that differ the first by name: after two steps those before it differ, too
    ["StateError", "'model' is not the same on all ranks", "'user/model/into.bias' of rank 1"],
    ["StateError", "random state of ranks that compute with the same samples", "'rng/torch/cpu' of rank 1"],
    ["StateError", "'model' is not the same on all ranks", "'user/model/norm.weight' of rank 1"],
    ["ConfigError", "its gradient is that of rank", "give data_ranks=1, or"],
    ["ConfigError", "VirtualShards divides each batch among all 2 ranks"],
    ["taken"],
    ["would train model/last.weight, model/last.bias on its own: call fully_shard(model) for the model"],
    ["'model' is each rank's own (PerRank), and the ranks hold it together"],
    ["in trainable(...) 'into.weight' is sharded over processes"],
    ["'down.bias' was sharded after the loop was made"],
    ["is sharded over"],
    ["tensor parallel"],
]  # fmt: skip

OF_FOUR = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
part = dist.device_mesh.DeviceMesh("cpu", [0, 1])
beside = dist.device_mesh.DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "tp"))

def on_tp():
    return parallelize_module(bare(), mesh["tp"], PLANS["plain"])

def doubled(model):
    if rank == 3:
        model.up.weight._local_tensor.data.mul_(2)

refused("hsdp", prepare=doubled)
refused("plain+", mesh["tp"])
refused("plain+", mesh)
refused(on_tp(), mesh["dp"])
refused("plain+", part)
refused(everstep.torch.parallel(bare()), mesh["dp"])
refused("plain+", beside["dp"])
in_ddp = torch.nn.parallel.DistributedDataParallel(on_tp(), device_mesh=mesh["dp"])  # makes plain tensors
refused(in_ddp, mesh["dp"])
refused("plain+", mesh["dp"])
"""

TOLD_BY_FOUR = [
    ["'user/model/up.weight' of rank 3 is not that of rank 1"],
    ["ConfigError", "which read the part", "of 2 parts", "fully_shard(model, mesh=mesh['dp'])"],
    ["ConfigError", "alone, and each rank is handed samples of its own"],
    ["ConfigError", "which read the part", "fully_shard(model, mesh=mesh['dp'])"],
    ["ConfigError", "does not fit the 4 ranks of this run"],
    ["taken"],  # each part counts equally often in a mean over all ranks
    ["ConfigError", "divided by tensor parallelism over ranks", "hands different samples"],
    ["StateError", "'model' is not the same on all ranks", "'user/model/down.weight' of rank 1, 3"],
    ["taken"],
]


@pytest.mark.parametrize(("size", "calls", "wanted"), [(2, OF_TWO, TOLD_BY_TWO), (4, OF_FOUR, TOLD_BY_FOUR)])
def test_what_is_no_one_training_is_refused(size: int, calls: str, wanted: Any, tmp_path: Path) -> None:
    said = lines_by_rank("".join(outputs(f"{HEAD}\n{calls}", size)))
    assert said.keys() == set(range(size))
    for lines in said.values():
        assert len(lines) == len(wanted), lines
        for line, parts in zip(lines, wanted, strict=True):
            assert all(part in line for part in parts), (line, parts)
    assert size == 2 or not [*tmp_path.glob("refused-0/checkpoints/*")], "copies that differ were saved"


ASKED = """
from everstep.backends.torch.optimizers import ScaledOptimizer

def loss_of(model):
    return mse_loss(model(torch.as_tensor(samples)), torch.as_tensor(targets))

model = built("fsdp")[0]
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
optimizer = ScaledOptimizer(torch.optim.SGD(model.parameters(), 0.1), scaler)
before = values(model, optimizer)
for overflows in (True, False):
    scaler.scale(loss_of(model)).backward()
    if overflows and rank == 1:
        model.into.weight.grad._local_tensor[0, 0] = float("inf")
    optimizer.step()
    say(optimizer.metrics()["overflowed"], values(model, optimizer) == before, scaler.get_scale())
    optimizer.zero_grad()

for given in ({"ema": 0.9}, {"shards": 2}, {"parallel": {"bucket_cap_mb": 1}}):
    try:
        Squares("fsdp", **given).build()
    except EverstepError as error:
        say(str(error))

optimizer = MinibatchOptimizer(torch.optim.SGD(model.parameters(), 0.1), 3)
run = os.environ["FOLDER"] + "/run"
with everstep.TrainLoop(run, {"model": model, "optimizer": optimizer}, max_epoch=1) as loop:
    for epoch in loop.iter_epochs():
        for step, _ in loop.iter_steps(everstep.data.arrays(samples, batch_size=30)):
            model.set_requires_gradient_sync(step == 1)
            loss_of(model).backward()
            optimizer.step()
            try:
                optimizer.flush()
                say("flushed")
            except EverstepError as error:
                say(str(error))
                os._exit(0)
"""


def test_an_overflow_of_one_rank_and_what_sharded_models_cannot_do() -> None:
    for lines in lines_by_rank("".join(outputs(f"{HEAD}\n{ASKED}", 2))).values():
        assert lines[:2] == ["1.0 True 2.0", "0.0 False 2.0"]
        for name, line in zip(("ema", "shards", "parallel_options"), lines[2:5], strict=True):
            assert line.endswith(f"cannot be used with {name}: leave out one of them")
        assert lines[5] == "flushed" and "its gradients were not averaged" in lines[6]
