"""Sharded models: each rank saves what it holds, other layouts read it; everstep's optimizers around them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ended, lines_by_rank, outputs, started
from safetensors.numpy import load_file
from sharded_loops import HEAD

import everstep
import warm
from everstep.errors import DamagedCheckpointError
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("long")


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_bytes())["body"]


def test_each_value_is_written_once_by_a_rank_that_holds_it(tmp_path: Path) -> None:
    outputs(f"{HEAD}\ntrain({str(tmp_path / 'run')!r}, 'hsdp', epochs=1)", 4)
    folder = tmp_path / "run/checkpoints/epoch-0001-step-00000005"
    body = manifest(folder)
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


def told(said: list[str], word: str) -> str:
    """What all ranks have said after a word."""
    found = {line.split(word)[1].strip() for line in "\n".join(said).splitlines() if f": {word} " in line}
    (only,) = found
    return only


def test_a_state_goes_from_one_layout_into_another(tmp_path: Path) -> None:
    run, before = tmp_path / "run", ""
    ways = [("fsdp", 4), ("ddp", 2), ("plain", 1), ("hsdp", 4), ("fsdp", 2), ("fsdp", 3)]
    for number, (how, size) in enumerate(ways, 1):
        given = f"{how!r}, epochs={number}, on_divergence='warn'"
        said = outputs(f"{HEAD}\ntrain({str(run)!r}, {given})", size)
        assert before in ("", told(said, "entered"))
        before = told(said, "left")
    outputs(f"{HEAD}\ntrain({str(tmp_path / 'alone')!r}, 'plain', epochs={len(ways)})", 1)
    losses = [series(each)["loss"] for each in (run, tmp_path / "alone")]
    assert len(losses[0]) == 5 * len(ways) and losses[0] == pytest.approx(losses[1], rel=1e-10)


def test_a_damaged_or_missing_shard_is_named_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    outputs(f"{HEAD}\ntrain({str(run)!r}, epochs=2)", 2)
    newest = run / "checkpoints/epoch-0002-step-00000010"
    torn = newest / "pieces-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1] + b"x")
    said = "".join(outputs(f"{HEAD}\ntrain({str(run)!r}, epochs=3)", 2))
    assert f"{torn} has changed since it was written" in said and "resuming epoch 2, step 8, from" in said
    last = run / "checkpoints/epoch-0003-step-00000015/pieces-00000.safetensors"
    last.unlink()
    said = "".join(outputs(f"{HEAD}\ntrain({str(run)!r}, epochs=4)", 2))
    assert f"{last} is missing" in said and "resuming epoch 3, step 14, from" in said


REFUSING = """
def refused(state, **given):
    try:
        with everstep.TrainLoop(given.pop("run", "{run}"), state, max_epoch=1) as loop:
            given.pop("then", lambda: None)()
            for epoch in loop.iter_epochs():
                for step, _ in loop.iter_steps(everstep.data.arrays(x, y, batch_size=12)):
                    pass
        return "taken"
    except EverstepError as error:
        return " ".join(str(error).split())
"""
REFUSED = """
adamw = torch.optim.AdamW
model = bare()
for layer in (model[0], model[2]):
    fully_shard(layer)
say(refused({"model": model, "optimizer": adamw(model.parameters())}))

model = sharded(bare())
say(refused({"model": everstep.PerRank(model), "optimizer": adamw(model.parameters())}))

model = bare()
model[0].requires_grad_(False)
sharded(model)
say(refused({"model": everstep.torch.trainable(model), "optimizer": adamw(model[2:].parameters())}))

model = bare()
late = {"model": model, "optimizer": adamw(model.parameters())}
say(refused({"model": model}, then=lambda: sharded(model)))

alone = dist.device_mesh.DeviceMesh("cpu", [rank])
model = sharded(bare(), mesh=alone)
say(refused({"model": model, "optimizer": adamw(model.parameters())}))

mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
model = parallelize_module(bare(), mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
say(refused({"model": model, "optimizer": adamw(model.parameters())}))
fully_shard(model, mesh=mesh["data"])
say(refused({"model": model, "optimizer": adamw(model.parameters())}))
"""


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    program = REFUSING.replace("{run}", str(tmp_path / "run"))
    said = lines_by_rank("".join(outputs(HEAD + program + REFUSED, 2)))
    wanted = [
        "would train model/4.weight, model/4.bias on its own: call fully_shard(model) for the model",
        "'model' is each rank's own (PerRank), and the ranks hold it together",
        "in trainable(...) '0.weight' is sharded over processes",
        "'0.bias' was sharded after the loop was made",
        "is sharded over",
        "tensor parallel",
        "tensor parallel",
    ]
    for lines in said.values():
        assert len(lines) == len(wanted)
        for line, part in zip(lines, wanted, strict=True):
            assert part in line


DIFFERING = """
model = laid_out("hsdp")
if rank == 3:
    with torch.no_grad():
        model[2].weight._local_tensor.mul_(2)
say(refused({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}))
"""


def test_copies_that_differ_make_no_checkpoint_and_the_ranks_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = outputs(HEAD + REFUSING.replace("{run}", str(run)) + DIFFERING, 4)
    for text in said:
        assert "'user/model/2.weight' of rank 3 is not that of rank 1" in text
    assert not list(run.glob("checkpoints/*"))


# ---------------------------------------------------- read in another layout, or by one process
def model() -> torch.nn.Module:
    layers = [torch.nn.Linear(5, 23), torch.nn.Tanh(), torch.nn.Linear(23, 12), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(12, 1)).double()


def everstep_says(*words: object) -> tuple[int, str]:
    """Exit status and output of a command."""
    command = [sys.executable, "-m", "everstep", *map(str, words)]
    done = warm.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_one_process_loads_verifies_and_compares_also_what_was_copied(tmp_path: Path) -> None:
    run, newest = tmp_path / "run", "epoch-0002-step-00000010"
    said = outputs(f"{HEAD}\ntrain({str(run)!r}, epochs=2)", 2)
    digest = said[0].partition("digest ")[2].split()[0]
    folder, copies = run / "checkpoints" / newest, tmp_path / "copies"
    loaded, trained = model(), model()
    optimizer = torch.optim.AdamW(loaded.parameters())
    assert everstep.load(run, {"model": loaded, "optimizer": optimizer}).digest == digest
    everstep.load(run / "best/valid_loss", {"model": trained})
    assert len(optimizer.state_dict()["state"]) == 6

    assert newest in everstep_says("checkpoints", run)[1]
    assert everstep_says("checkpoints", run, "verify")[0] == 0
    shutil.copytree(folder, copies / newest)
    shutil.copytree(run, tmp_path / "other")
    assert compare_runs(run, tmp_path / "other") == []
    assert everstep_says("compare", run, tmp_path / "other")[0] == 0

    torn = folder / "pieces-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1] + b"x")
    status, text = everstep_says("checkpoints", run, "verify")
    assert status == 1 and torn.name in text
    again = model()
    everstep.load(copies / newest, {"model": again})
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))
    with pytest.raises(DamagedCheckpointError, match=torn.name):
        everstep.load(folder, {"model": again, "optimizer": optimizer})


def test_another_mesh_of_as_many_ranks_is_another_layout_and_no_divergence(tmp_path: Path) -> None:
    run, changed = tmp_path / "run", "results are not bit-identical to those before"

    def train(how: str, kill_at: int = 0) -> str:
        program = f"{HEAD}\ntrain({str(run)!r}, {how!r}, {kill_at}, every=5)"
        return "".join(outputs(program, 4, dies=bool(kill_at)))

    train("fsdp", kill_at=9)
    assert changed not in train("fsdp", kill_at=8)
    said = train("hsdp", kill_at=9)
    was, now = re.findall(r"laid out as (.*), and is (.*) in this start", said)[0]
    assert (was, now) == ("Shard(dim=0) over 4", "Replicate(), Shard(dim=0) over 2 x 2")
    assert said.count(changed) == 1 and "resume differs" not in said
    last = train("hsdp")
    assert "resume verified" in last and "resume differs" not in last
    journal = RunJournal(run)
    decided = [e.data for e in journal.events("decision", valid=False) if e.data["what"] == "chosen"]
    assert [(each["why"], each["step"]) for each in decided] == [("another layout of the sharded state", 5)]
    assert "more than one kind of machine" in everstep_says("show", run)[1]


def trained(run: Path, how: str, kill_at: int = 0, more: str = "") -> str:
    """What two ranks say; a program that is refused says so."""
    train = f"train({str(run)!r}, {how!r}, {kill_at}, every=2{more})"
    program = f"{HEAD}\ntry:\n    {train}\nexcept EverstepError as error:\n    say('refused', error)"
    with started(program, 2) as processes:
        return "".join(ended(processes))


def test_another_precision_of_a_sharded_model_is_a_changed_setting(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, "reduced in bfloat16", kill_at=5)
    refused = trained(run, "fsdp")
    assert "state 'model': mp_policy" in refused and "reduce_dtype=torch.bfloat16" in refused
    assert "digest" not in refused
    assert "mp_policy" not in trained(run, "reduced in bfloat16", kill_at=7)
    said = trained(run, "fsdp", more=", on_change='override'")
    assert "used as given" in said and said.count(": digest ") == 2 and "resume differs" not in said


PROGRAM = """
from everstep.backends.torch.optimizers import ScaledOptimizer
from everstep.torch import Clip, ClipOptimizer, MinibatchOptimizer, Task

WRAPPERS = {
    "value": lambda inner: ClipOptimizer(inner, Clip(value=0.01)),
    "norm": lambda inner: ClipOptimizer(inner, Clip(norm=0.05)),
    "global": lambda inner: ClipOptimizer(inner, Clip(global_norm=0.1)),
    "window": lambda inner: MinibatchOptimizer(ClipOptimizer(inner, Clip(global_norm=0.1)), 3),
}

def squares(model, bx, by):
    return torch.nn.functional.mse_loss(model(torch.as_tensor(bx)), torch.as_tensor(by))

def wrapped(run, which, how, kill_at=0):
    model = laid_out(how)
    optimizer = WRAPPERS[which](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    services = [everstep.Checkpoints(Every(steps=4))]
    state = {"model": model, "optimizer": optimizer}
    with everstep.TrainLoop(run, state, seed=7, max_epoch=3, services=services, uneven="weight") as loop:
        data = everstep.data.arrays(x[:59], y[:59], batch_size=12, shuffle=True)
        for epoch in loop.iter_epochs():
            for step, (bx, by) in loop.iter_steps(data):
                loss = squares(model, bx, by)
                if which == "window":
                    optimizer.weighted(loss, len(bx)).backward()
                else:
                    (loss * loop.batch_weight).backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.collect_metrics(loss=loss, **optimizer.metrics())
                if step == kill_at and rank == size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)

class Squares(Task):
    def __init__(self, how, **given):
        super().__init__(**given)
        self.how = how

    def build_model(self):
        return laid_out(self.how)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def forward(self, batch):
        bx, by = batch
        return {"loss": squares(self.model, bx, by)}

class Weighted(Squares):
    def forward(self, batch):
        weights = batch[0][:, :1].abs()
        found = (self.model(batch[0]) - batch[1]).square()
        return {"loss": (found * weights).sum() / weights.sum()}

    def elements(self, batch):
        return batch[0][:, 0].abs().sum().item()

TASKS = {
    "plain": lambda how: Squares(how, parallel=True),
    "clipped window": lambda how: Squares(how, accumulate=3, clip=Clip(global_norm=0.1)),
    "elements": lambda how: Weighted(how),
}

def trained(run, which, how):
    data = everstep.data.arrays(torch.as_tensor(x[:59]), torch.as_tensor(y[:59]), batch_size=12, shuffle=True)
    given = dict(seed=7, max_epoch=3, uneven="weight")
    task = TASKS[which](how)
    everstep.Trainer(task, {"train": data}, run, **given).run_training()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in task.model.parameters()]
    say("weights", torch.cat([p.detach().flatten() for p in whole]).tolist())
"""


def series(run: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in RunJournal(run).rows():
        if row.phase == "step" and not row.wall:
            found.setdefault(row.name, []).append(row.value)
    return found


@pytest.mark.parametrize("which", ["value", "norm", "global", "window"])
def test_wrapped_optimizers_compute_what_one_process_computes(which: str, tmp_path: Path) -> None:
    for how, size in (("fsdp", 2), ("plain", 1)):
        outputs(f"{HEAD}{PROGRAM}\nwrapped({str(tmp_path / how)!r}, {which!r}, {how!r})", size)
    sharded, alone = series(tmp_path / "fsdp"), series(tmp_path / "plain")
    assert sharded.keys() == alone.keys() >= {"loss", "grad_norm"}
    for name, values in alone.items():
        assert sharded[name] == pytest.approx(values, rel=1e-9), name


@pytest.mark.parametrize("which", ["plain", "clipped window", "elements"])
def test_a_task_computes_what_one_process_computes(which: str, tmp_path: Path) -> None:
    found = []
    for how, size in (("fsdp", 2), ("plain", 1)):
        said = outputs(f"{HEAD}{PROGRAM}\ntrained({str(tmp_path / how)!r}, {which!r}, {how!r})", size)
        (weights,) = {line for text in said for line in text.split("0: weights")[1:]}
        found.append(json.loads(weights))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


SCALED = """
model = laid_out("fsdp")
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
optimizer = ScaledOptimizer(torch.optim.SGD(model.parameters(), 0.1), scaler)
before = values(model, optimizer)
scaler.scale(squares(model, x, y)).backward()
if rank == 1:
    model[0].weight.grad._local_tensor[0, 0] = float("inf")
optimizer.step()
say(optimizer.metrics()["overflowed"], values(model, optimizer) == before, scaler.get_scale())
optimizer.zero_grad()
scaler.scale(squares(model, x, y)).backward()
optimizer.step()
say(optimizer.metrics()["overflowed"], values(model, optimizer) == before, scaler.get_scale())
"""


SHORT = """
model = laid_out("fsdp")
optimizer = MinibatchOptimizer(torch.optim.SGD(model.parameters(), 0.1), 3)
with everstep.TrainLoop({run!r}, {{"model": model, "optimizer": optimizer}}, max_epoch=1) as loop:
    for epoch in loop.iter_epochs():
        for step, (bx, by) in loop.iter_steps(everstep.data.arrays(x, y, batch_size=30)):
            model.set_requires_gradient_sync(step == 1)
            squares(model, bx, by).backward()
            optimizer.step()
            try:
                optimizer.flush()
                say("flushed")
            except EverstepError as error:
                say(str(error))
                os._exit(0)
"""


ASKED = """
for given in ({"ema": 0.9}, {"shards": 2}, {"parallel": {"bucket_cap_mb": 1}}):
    try:
        Squares("fsdp", **given).build()
    except EverstepError as error:
        say(str(error))
"""


def test_an_overflow_of_one_rank_and_what_sharded_models_cannot_do(tmp_path: Path) -> None:
    program = f"{HEAD}{PROGRAM}\n{SCALED}\n{ASKED}\n{SHORT.format(run=str(tmp_path / 'run'))}"
    for lines in lines_by_rank("".join(outputs(program, 2))).values():
        assert lines[:2] == ["1.0 True 2.0", "0.0 False 2.0"]
        for name, line in zip(("ema", "shards", "parallel_options"), lines[2:5], strict=True):
            assert line.endswith(f"cannot be used with {name}: leave out one of them")
        assert lines[5] == "flushed" and "its gradients were not averaged" in lines[6]
