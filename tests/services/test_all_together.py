"""Every service that needs no Trainer, at once, killed by SIGKILL again and again: the run ends equal."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import everstep
import warm
from everstep import Every, services
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from gate import share
from tiny_runs import Boom, rows

PROGRAM = """
import os
import signal
import sys
import torch
import everstep
from everstep import Every, SetValue, services

run_dir, kill, order = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
state = {"model": model, "optimizer": optimizer, "settings": {"noise": 0.0}}
data = everstep.data.arrays(torch.arange(16.0).reshape(8, 2) / 16, batch_size=2, shuffle=True)
LOWER = SetValue("optimizer.lr", times=0.5, least=0.01)
listed = [
    everstep.EarlyStop("valid_loss", patience=9, patience_steps=90, threshold=-1.0, baseline=1e9),
    everstep.Best("valid_loss", keep=2),
    services.When(services.OnBest("valid_loss"), SetValue("settings.noise", times=0.9), name="calm"),
    services.When(Every(steps=7), everstep.Save()),
    services.Export(services.OnBest("valid_loss"), keep=2, name="best"),
    services.Export(name="final"),
    services.ProgressBar(),
    everstep.StopAfter(epochs=6),
    everstep.Recovery(reset_after=100),
    services.LossBound(bound=1e9, times=1e9, last=3),
    services.Plateau("loss", then=LOWER, long=3, short=2, cooldown=1, every=Every(steps=2)),
    services.Require("valid_loss", 1e9, epoch=2),
    services.Scheduled("settings.noise", services.Annealing(0.1, 0.8, every=2)),
    services.LogVariables(["*loss"], every=Every(steps=5)),
    services.FinalValues(lambda: {"norm": model.weight.norm().item()}),
    services.Throughput(2, every=Every(steps=3)),
    services.Notify(command=["cat"]),
    services.System(every=Every(steps=4)),
    services.Profile(Every(steps=6), steps=2, keep=1),
    everstep.Checkpoints(Every(steps=4) | Every(epochs=1)),
]
if order == "reversed":
    listed.reverse()
with everstep.TrainLoop(run_dir, state, max_epoch=5, seed=3, services=listed) as loop:
    for epoch in loop.iter_epochs():
        for step, (x,) in loop.iter_steps(data):
            optimizer.zero_grad()
            spoilt = epoch in (2, 4) and bool((x == 0).any())
            loss = model(x + state["settings"]["noise"] * torch.randn(2)).square().mean()
            loss.backward()
            optimizer.step()
            loop.collect_metrics(loss=loss, spoilt_loss=float("nan") if spoilt else 0.0)
            if step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
        with loop.evaluation():
            loop.collect_metrics(valid_loss=model(torch.ones(2)).square().mean())
"""


def start(run_dir: Path, kill: int = 0, order: str = "listed") -> int:
    command = [sys.executable, "-c", PROGRAM, str(run_dir), str(kill), order]
    while (status := warm.run(command, capture_output=True).returncode) == 3:
        pass  # rolled back
    return status


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("together") / "whole"
    assert start(run_dir) == 0
    names = {row[3] for row in rows(run_dir)}
    assert len(RunJournal(run_dir).rollbacks()) == 2
    assert names >= {"loss", "valid_loss", "optimizer.lr", "settings.noise", "norm"}
    return run_dir


@pytest.mark.campaign("long")
def test_killed_again_and_again(whole: Path, tmp_path: Path) -> None:
    for kill in (3, 9, 18):
        assert start(tmp_path / "run", kill) == -signal.SIGKILL
    assert start(tmp_path / "run") == 0
    assert compare_runs(whole, tmp_path / "run") == []
    assert len(exports(whole)) > 1 and exports(whole) == exports(tmp_path / "run")


def exports(run_dir: Path) -> dict[str, bytes]:
    found = (run_dir / "exports").rglob("*.safetensors")
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in found}


@pytest.mark.campaign("long")
def test_their_order_is_irrelevant(whole: Path, tmp_path: Path) -> None:
    assert start(tmp_path / "run", order="reversed") == 0
    assert compare_runs(whole, tmp_path / "run") == []


def supervised(run_dir: Path, crash: int = 0) -> tuple[str | None, dict[str, float]]:
    """A loop without epochs, whose loss stands still."""
    settings = {"rate": 1.0, "noise": 0.0, "sum": 0.0}
    lower = everstep.SetValue("settings.rate", times=0.5, least=0.2)
    listed = [
        services.Plateau("loss", then=lower, long=3, short=1, cooldown=2, every=Every(steps=1)),
        services.Scheduled("settings.noise", services.Annealing(1.0, 0.5, every=4)),
        services.LogVariables(every=Every(steps=3)),
        services.FinalValues(lambda: {"final": settings["sum"]}),
        everstep.Checkpoints(Every(steps=4)),
    ]
    with everstep.Supervisor(run_dir, {"settings": settings}, services=listed, max_step=10, seed=1) as sv:
        sv.stream(None)
        while not sv.should_stop():
            settings["sum"] += settings["rate"] + settings["noise"]
            if sv.step + 1 == crash:
                raise Boom
            sv.advance(loss=1.0)
    return sv.ending.digest, dict(settings)


@pytest.mark.campaign("long", gate="share")
def test_in_a_supervisor_crashed_in_any_step(tmp_path: Path) -> None:
    whole = supervised(tmp_path / "whole")
    assert whole[1]["rate"] == 0.2
    assert {row[3] for row in rows(tmp_path / "whole")} == {
        "loss",
        "settings.rate",
        "settings.noise",
        "final",
    }
    for crash in share(range(1, 11), 3):
        run_dir = tmp_path / str(crash)
        with pytest.raises(Boom):
            supervised(run_dir, crash)
        assert supervised(run_dir) == whole
        assert rows(run_dir) == rows(tmp_path / "whole")
