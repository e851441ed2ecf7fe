"""everstep's optimizers and tasks around sharded models compute what one process computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import lines_by_rank, outputs
from sharded_loops import HEAD

from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("long")

PROGRAM = (
    HEAD
    + """
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
)


def series(run: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in RunJournal(run).rows():
        if row.phase == "step" and not row.wall:
            found.setdefault(row.name, []).append(row.value)
    return found


@pytest.mark.parametrize("which", ["value", "norm", "global", "window"])
def test_wrapped_optimizers_compute_what_one_process_computes(which: str, tmp_path: Path) -> None:
    for how, size in (("fsdp", 2), ("plain", 1)):
        outputs(f"{PROGRAM}\nwrapped({str(tmp_path / how)!r}, {which!r}, {how!r})", size)
    sharded, alone = series(tmp_path / "fsdp"), series(tmp_path / "plain")
    assert sharded.keys() == alone.keys() >= {"loss", "grad_norm"}
    for name, values in alone.items():
        assert sharded[name] == pytest.approx(values, rel=1e-9), name


@pytest.mark.parametrize("which", ["plain", "clipped window", "elements"])
def test_a_task_computes_what_one_process_computes(which: str, tmp_path: Path) -> None:
    found = []
    for how, size in (("fsdp", 2), ("plain", 1)):
        said = outputs(f"{PROGRAM}\ntrained({str(tmp_path / how)!r}, {which!r}, {how!r})", size)
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


def test_an_overflow_on_one_rank_leaves_out_the_update_on_all() -> None:
    said = lines_by_rank("".join(outputs(f"{PROGRAM}\n{SCALED}", 2)))
    assert said == {rank: ["1.0 True 2.0", "0.0 False 2.0"] for rank in range(2)}


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


def test_a_short_window_that_was_not_averaged_is_refused(tmp_path: Path) -> None:
    program = SHORT.format(run=str(tmp_path / "run"))
    for lines in lines_by_rank("".join(outputs(f"{PROGRAM}\n{program}", 2))).values():
        assert lines[0] == "flushed"
        assert "its gradients were not averaged" in lines[1]


ASKED = """
for given in ({"ema": 0.9}, {"shards": 2}, {"parallel": {"bucket_cap_mb": 1}}):
    try:
        Squares("fsdp", **given).build()
    except EverstepError as error:
        say(str(error))
"""


def test_what_a_task_cannot_do_with_a_sharded_model_is_refused() -> None:
    said = lines_by_rank("".join(outputs(f"{PROGRAM}\n{ASKED}", 2)))
    for lines in said.values():
        assert [line.rpartition("cannot be used with ")[2] for line in lines] == [
            "ema: leave out one of them",
            "shards: leave out one of them",
            "parallel_options: leave out one of them",
        ]
