"""Tensor parallelism: ranks that compute with one batch together read the same samples, and resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import lines_by_rank, outputs
from tensor_loops import HEAD

from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("long")

RANKS = {"one": 1, "ddp": 2, "turned": 2, "fsdp": 4, "plain": 2, "sequence": 2, "plain+": 4, "sequence+": 4}
"""Number of ranks by layout; "+" is a mesh of two dimensions, with fully_shard over the other one."""


def trained(run: Path, how: str, kill_at: int = 0, **given: Any) -> list[str]:
    """Train to the end, or until the last rank kills itself in a step; return what each rank said."""
    arguments = "".join(f", {name}={value!r}" for name, value in given.items())
    program = f"{HEAD}\ntrain({str(run)!r}, {how!r}, {kill_at}{arguments})"
    return outputs(program, RANKS[how], dies=bool(kill_at))


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


def approx(values: Mapping[Any, float]) -> Any:
    return pytest.approx(values, abs=1e-9, rel=1e-9)


# ------------------------------------------------------------------ the same numbers as one process
@pytest.mark.parametrize("wrapped", ["", "clip", "window"])
@pytest.mark.parametrize("how", ["plain", "sequence", "plain+", "sequence+"])
def test_it_computes_what_one_process_computes(how: str, wrapped: str, tmp_path: Path) -> None:
    alone = trained(tmp_path / "one", "one", wrapped=wrapped)
    said = trained(tmp_path / "run", how, wrapped=wrapped)
    assert sums(said) == approx(sums(alone))
    assert series(tmp_path / "run") == approx(series(tmp_path / "one"))


def test_dropout_of_what_all_ranks_have_is_that_of_one_process(tmp_path: Path) -> None:
    for how in ("one", "plain"):
        trained(tmp_path / how, how, dropout=0.4, epochs=2)
    assert series(tmp_path / "plain") == approx(series(tmp_path / "one"))


def test_a_run_goes_from_one_layout_into_another(tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    expected = sums(trained(straight, "one", epochs=4))
    said: list[str] = []
    ways = "plain 3, one 6, plain+ 9, ddp 12, sequence+ 16, fsdp 20, plain 0"
    for how, kill_at in ((how, int(at)) for how, at in map(str.split, ways.split(", "))):
        said = trained(run, how, kill_at, epochs=4, every=1, slow=0.1)
        found = sums(said)
        found.pop(kill_at, None)  # not all ranks were there
        assert found == approx({step: expected[step] for step in found}), how
    assert series(run) == approx(series(straight))
    assert "the checkpoint is of 4 ranks, and this start has 2 ranks with 1 part of each batch" in said[0]


# ------------------------------------------------------------------------------- what ranks share
SHARED = """
import random
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
each = [everstep.Checkpoints(Every(steps=2))]
given = dict(max_epoch=1, data_ranks={given}, services=each)
with everstep.TrainLoop({run!r}, {{"a": numpy.zeros(2)}}, **given) as loop:
    for epoch in loop.iter_epochs():
        for step, _ in loop.iter_steps(everstep.data.arrays(x, batch_size=12)):
            say("drew", step, random.random(), numpy.random.random(), float(torch.rand(())))
            loop.collect_metrics(own=float(rank), weighed=float(loop.data_rank))
            if step == {kill_at} and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        with loop.metric_collector("collected") as collected:
            collected.collect(float(rank))
    say("who", loop.data_rank, loop.data_ranks)
"""


def drawn(said: Sequence[str]) -> list[list[str]]:
    by_rank = lines_by_rank("".join(said))
    return [[line for line in by_rank[rank] if line.startswith("drew")] for rank in sorted(by_rank)]


def test_ranks_of_one_part_draw_the_same_and_count_once(tmp_path: Path) -> None:
    def trains(name: str, given: str, kill_at: int = 0) -> list[str]:
        program = SHARED.format(run=str(tmp_path / name), given=given, kill_at=kill_at)
        return outputs(f"{HEAD}\n{program}", 4, dies=bool(kill_at))

    said = trains("mesh", "mesh['dp']", kill_at=4)
    first, second, third, fourth = drawn(said)
    assert first == second != third == fourth and len(first) == 4
    again = trains("mesh", "(rank // 2, 2)")
    for before, now in zip((first, second, third, fourth), drawn(again), strict=True):
        assert now[0] in before and len(now) >= 2, "random state was not saved"
    ranks = lines_by_rank("".join(again))
    assert [ranks[rank][-1] for rank in range(4)] == ["who 0 2", "who 0 2", "who 1 2", "who 1 2"]
    found = series(tmp_path / "mesh")
    assert {name: found[name, 5] for name in ("own", "weighed", "collected")} == {
        "own": 1.0,  # of the ranks 0 and 2
        "weighed": 0.5,
        "collected": 1.0,
    }


TASK = """
from everstep.torch import Task

class Sums(Task):
    def __init__(self, how, **given):
        super().__init__(**given)
        self.how = how

    def build_model(self):
        return built(self.how)[0]

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 0.01)

    def forward(self, batch):
        found = self.model(batch[0])
        return {"loss": torch.nn.functional.mse_loss(found, batch[1])}

class Whole(Sums):
    def eval_end(self, state):
        return {"of_all": 1.0}

def run_task(run, how, kind, **given):
    arrays = [torch.as_tensor(samples), torch.as_tensor(targets)]
    data = everstep.data.arrays(*arrays, batch_size=10, shuffle=True)
    held = everstep.data.arrays(*arrays, batch_size=9)
    task = kind(how, parallel=True, **given)
    mesh = init_device_mesh("cpu", (size // 2, 2)) if size > 1 else None
    data_ranks = None if mesh is None else (rank // 2, size // 2)
    trainer = everstep.Trainer(task, {"train": data, "valid": held, "test": held}, run, seed=7,
                               max_epoch=2, data_ranks=data_ranks)
    trainer.run_training()
    say("found", json.dumps(trainer.evaluate("test")))
"""


@pytest.mark.parametrize("kind", ["Sums", "Whole"])
@pytest.mark.parametrize("how", ["sequence", "plain+"])
def test_a_trainer_trains_and_evaluates_as_on_one_process(how: str, kind: str, tmp_path: Path) -> None:
    found = []
    for each in (how, "one"):
        call = f"{str(tmp_path / each)!r}, {each!r}, {kind}, accumulate=2, clip=Clip(global_norm=0.5)"
        said = outputs(f"{HEAD}\nimport json\n{TASK}\nrun_task({call})", RANKS[each])
        (told,) = {line.split("found ")[1] for line in "\n".join(said).splitlines() if ": found " in line}
        found.append(json.loads(told))
    assert found[0] == approx(found[1]) and "test/loss" in found[0]
    assert series(tmp_path / how) == approx(series(tmp_path / "one"))


# ------------------------------------------------------------------------------ what is refused
REFUSED = """
number = 0

def refused(how, data_ranks=None, prepare=lambda model: None, in_step=lambda: None, stream=None, **more):
    global number
    number += 1
    try:
        model = built(how)[0] if isinstance(how, str) else how
        prepare(model)
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.01), **more}
        given = dict(services=[everstep.Checkpoints(Every(steps=2))], data_ranks=data_ranks)
        with everstep.TrainLoop(f"{run}-{number}", state, seed=1, max_epoch=1, **given) as loop:
            for epoch in loop.iter_epochs():
                stream = stream or everstep.data.arrays(samples, targets, batch_size=16)
                for step, (bx, by) in loop.iter_steps(stream):
                    in_step()
                    model(torch.as_tensor(bx)).square().mean().backward()
                    state["optimizer"].step()
                    state["optimizer"].zero_grad()
        say("taken")
    except Exception as error:
        say(type(error).__name__, " ".join(str(error).split()))
"""

OF_TWO = """
class OfRank:
    def __len__(self):
        return 4

    def __iter__(self):
        for index in range(4):
            yield samples[:6] + (rank if index == 2 else 0), targets[:6]

def double(model):
    model.norm.weight.register_hook(lambda gradient: gradient * (1 + rank))

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
refused(bare := Net(0.0).double(), 1, shards=everstep.torch.VirtualShards(bare, 2))
refused("plain", 1)
"""

TOLD_BY_TWO = [
    ["ConfigError", "'model/up.weight': its gradient is that of rank", "give data_ranks=1, or"],
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
]

OF_FOUR = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
part = dist.device_mesh.DeviceMesh("cpu", [0, 1])
beside = dist.device_mesh.DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "tp"))

def on_tp():
    return parallelize_module(Net(0.0).double(), mesh["tp"], PLANS["plain"])

refused("plain+", mesh["tp"])
refused("plain+", mesh)
refused(on_tp(), mesh["dp"])
refused("plain+", part)
refused(everstep.torch.parallel(Net(0.0).double()), mesh["dp"])
refused("plain+", beside["dp"])
in_ddp = torch.nn.parallel.DistributedDataParallel(on_tp(), device_mesh=mesh["dp"])  # makes plain tensors
refused(in_ddp, mesh["dp"])
refused("plain+", mesh["dp"])
"""

TOLD_BY_FOUR = [
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
    program = REFUSED.replace("{run}", str(tmp_path / "run"))
    said = lines_by_rank("".join(outputs(f"{HEAD}\n{program}\n{calls}", size)))
    assert said.keys() == set(range(size))
    for lines in said.values():
        assert len(lines) == len(wanted), lines
        for line, parts in zip(lines, wanted, strict=True):
            assert all(part in line for part in parts), (line, parts)
