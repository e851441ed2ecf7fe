"""Saved weights in another script: `everstep.load`, `everstep.best`, and `RUN/best/METRIC` as a path."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import InitFrom
from everstep.errors import ConfigError, NoCheckpointError, RestoreError, RunDirError
from everstep.supervisor import Loaded

LOSSES = [3.0, 1.0, 2.0, 0.5]
"""By epoch; the run resumes from epoch 3 below, where 0.5 was not seen yet."""


class Net:
    """A model and an optimizer; its first start ends after epoch 3, its second one is complete."""

    def __init__(self, out: int = 3) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, out), torch.nn.BatchNorm1d(out))
        self.model[0].register_buffer("seen", torch.zeros(1), persistent=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.notes = {"scale": np.ones(2), "epoch": 0}
        self.state = {"model": self.model, "optimizer": self.optimizer, "notes": self.notes}

    def train(self, run_dir: Path, max_epoch: int) -> dict[int, Any]:
        """The weights after each epoch."""
        weights = {}
        services = [everstep.Best("valid/loss"), everstep.Checkpoints(everstep.Every(epochs=1), keep_last=9)]
        with everstep.TrainLoop(
            run_dir, self.state, max_epoch=max_epoch, services=services, default_services=False
        ) as loop:
            for epoch in loop.iter_epochs():
                for _, (x,) in loop.iter_steps(everstep.data.arrays(torch.randn(4, 4), batch_size=2)):
                    loss = self.model(x).square().sum()
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.model[0].seen += 1
                self.notes.update(epoch=epoch)
                with loop.evaluation():
                    loop.collect_metrics({"valid/loss": LOSSES[epoch - 1]})
                weights[epoch] = snapshot(self.model)
        return weights


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = [*model.state_dict().items(), *model.named_buffers()]
    return {name: tensor.clone() for name, tensor in tensors}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    weights = Net().train(run_dir, 3)
    return run_dir, weights | Net().train(run_dir, 4)


Trained = tuple[Path, dict[int, Any]]


@pytest.mark.campaign("long")
def test_the_best_weights_by_the_folder_of_their_metric(trained: Trained) -> None:
    run_dir, weights = trained
    assert len(list((run_dir / "best" / "valid.loss").iterdir())) > 1, "older ones that checkpoints speak of"
    net = Net()
    found = everstep.load(run_dir / "best" / "valid.loss", {"model": net.model})
    assert same(snapshot(net.model), weights[4])
    folder = run_dir / "best" / "valid.loss" / "epoch-0004-step-00000008"
    assert found == Loaded(path=str(folder), step=8, epoch=4)
    (best,) = everstep.best(run_dir).values()
    assert best == everstep.BestRecord("valid/loss", 0.5, 8, 4, str(folder))


def test_after_going_back_the_best_is_the_one_of_that_time(tmp_path: Path, trained: Trained) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained[0], run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "epoch-0004-step-00000008")
    net = Net()
    assert everstep.load(run_dir / "best" / "valid.loss", {"model": net.model}).epoch == 2
    assert same(snapshot(net.model), trained[1][2])
    assert everstep.best(str(run_dir))["valid/loss"].value == 1.0


@pytest.mark.parametrize(
    "source",
    [
        lambda run: run,
        lambda run: str(run / "checkpoints" / "epoch-0004-step-00000008"),
        lambda run: InitFrom(run),
        lambda run: InitFrom(run / "best" / "valid.loss", include="^model|^notes"),
    ],
)
def test_every_source_and_no_trace(trained: Trained, source: Callable[[Path], Any]) -> None:
    run_dir, weights = trained

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    before, random_state, net = files(), torch.get_rng_state(), Net()
    torch.set_rng_state(random_state)
    found = everstep.load(source(run_dir), {"model": net.model, "notes": net.notes})
    assert found.step == 8 and net.notes["epoch"] == 4
    assert torch.equal(net.model.state_dict()["0.weight"], weights[4]["0.weight"])
    assert files() == before and torch.equal(torch.get_rng_state(), random_state)


def test_what_does_not_fit_is_refused_before_anything_is_loaded(trained: Trained) -> None:
    net = Net(out=5)
    before = snapshot(net.model)
    with pytest.raises(RestoreError, match="does not fit the state") as raised:
        everstep.load(trained[0], {"notes": net.notes, "model": net.model, "ema": np.zeros(2)})
    assert raised.value.missing == ("ema",) and raised.value.unexpected == ()
    assert "model/0.weight (3, 4) float32 -> (5, 4) float32" in raised.value.reshaped
    assert same(snapshot(net.model), before) and net.notes["epoch"] == 0
    with pytest.raises(RestoreError) as raised:
        everstep.load(InitFrom(trained[0], on_reshaped="skip"), {"model": net.model, "ema": np.zeros(2)})
    assert raised.value.missing == ("ema",)
    other = torch.optim.SGD([*net.model.parameters()][:1], lr=0.1)
    with pytest.raises(RestoreError) as raised:
        everstep.load(InitFrom(trained[0], on_reshaped="skip"), {"model": net.model, "optimizer": other})
    assert raised.value.reshaped == (
        "optimizer/parameters per group [4] -> [1]",
        "optimizer/Adam -> SGD",
    )
    assert same(snapshot(net.model), before)


def test_renamed_and_in_part(trained: Trained) -> None:
    net = Net(out=3)
    chosen = InitFrom(trained[0], rename={"^model/": "net/"}, include=r"^net/0\.", on_unexpected="error")
    before = snapshot(net.model)
    everstep.load(chosen, {"net": net.model})
    assert torch.equal(net.model.state_dict()["0.bias"], trained[1][4]["0.bias"])
    assert torch.equal(net.model.state_dict()["1.running_var"], before["1.running_var"])


def test_no_such_thing(tmp_path: Path, trained: Trained) -> None:
    state = {"model": Net().model}
    with pytest.raises(NoCheckpointError, match="neither a checkpoint, nor best weights"):
        everstep.load(tmp_path / "nowhere", state)
    with pytest.raises(RunDirError, match="is not a run"):
        everstep.best(trained[0].parent / "rum")
    alone = tmp_path / "best" / "valid.loss"
    shutil.copytree(trained[0] / "best" / "valid.loss", alone)
    with pytest.raises(
        NoCheckpointError, match=r"none of those that it names is there.*valid\.loss/epoch-0002-step"
    ):
        everstep.load(alone, state)
    for wrong in (None, 3, "", b"x"):
        with pytest.raises(ConfigError, match="is not a path"):
            everstep.load(wrong, state)  # type: ignore[arg-type]


def test_a_program_without_torch_takes_what_needs_none(trained: Trained) -> None:
    script = """
import json, sys
import numpy as np
import everstep
notes = {"scale": np.zeros(2), "epoch": 0}
everstep.load(sys.argv[1], {"notes": notes})
print(json.dumps([notes["epoch"], notes["scale"].tolist(), "torch" in sys.modules]))
"""
    for source in (trained[0], trained[0] / "best" / "valid.loss"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(source)], capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout) == [4, [1, 1], False]


def test_a_choice_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    """Else weights that were never loaded would be taken for the checkpoint's."""
    Net().train(tmp_path, max_epoch=1)
    for wrong in ({"include": "^modle/"}, {"include": "^old/", "rename": {"^model": "m"}}, {"exclude": "."}):
        with pytest.raises(ConfigError, match=r"takes nothing of .*after rename=: .*0\.weight"):
            everstep.load(InitFrom(tmp_path, **wrong), {"model": Net().model})


def test_only_the_bytes_of_the_entry_are_read(tmp_path: Path, trained: Trained) -> None:
    """The optimizer is damaged, and the model is loaded; a resume would pass the checkpoint over."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(trained[0] / "checkpoints" / "epoch-0004-step-00000008", folder)
    path = folder / "arrays.safetensors"
    raw = bytearray(path.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start + header["user/optimizer/state/0/exp_avg"]["data_offsets"][0]] ^= 1
    path.write_bytes(raw)
    net = Net()
    everstep.load(folder, {"model": net.model})
    assert torch.equal(net.model.state_dict()["0.weight"], trained[1][4]["0.weight"])
    with pytest.raises(everstep.errors.DamagedCheckpointError, match="has changed"):
        everstep.load(folder, {"optimizer": net.optimizer})
    raw[start + header["user/model/0.weight"]["data_offsets"][0]] ^= 1
    path.write_bytes(raw)
    with pytest.raises(everstep.errors.DamagedCheckpointError, match="has changed"):
        everstep.load(folder, {"model": net.model})
