"""`everstep export`: what the service `Export` would have written, from what a run has saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import everstep

import warm
from everstep.record import RunDir

PROGRAM = """
import sys
import torch
import everstep
from everstep.services import Export, OnBest


class Task(everstep.torch.Task):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(self, batch):
        return {"loss": self.model(batch[0]).square().mean()}


torch.manual_seed(0)
data = everstep.data.arrays(torch.randn(12, 4), batch_size=4, shuffle=True)
services = [
    everstep.Evaluate("valid"),
    everstep.Best("valid/loss", "max"),
    Export(name="last"),
    Export(entry="ema", name="averaged"),
    Export(OnBest("valid/loss", "max"), keep=1, name="best"),
]
valid = everstep.data.arrays(torch.randn(8, 4), batch_size=4)
everstep.Trainer(
    Task(ema=0.9), {"train": data, "valid": valid}, "runs/small", services=services, seed=7, max_epoch=3
).run_training()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/small`, which has exports by the service."""
    folder = tmp_path_factory.mktemp("trained")
    warm.run([sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, check=True)
    return folder


def content(folder: Path) -> tuple[Any, bytes]:
    about = json.loads((folder / "export.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["export.json", "model.safetensors"]
    return about, (folder / "model.safetensors").read_bytes()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("name", "options"),
    [("last", []), ("averaged", ["--entry", "ema"]), ("best", ["--best", "valid/loss"])],
)
def test_it_is_what_the_service_writes(trained: Path, name: str, options: list[str]) -> None:
    said, _ = everstep("export", "small", *options, "--out", f"out/{name}", cwd=trained)
    assert said.startswith(f"out/{name}: ")
    (by_service,) = (trained / "runs" / "small" / "exports" / name).iterdir()
    about, weights = content(trained / "out" / name)
    expected, bits = content(by_service)
    assert weights == bits
    assert about.pop("metrics")["valid/loss"] == expected.pop("metrics")["valid/loss"]
    checkpoints = about.pop("checkpoint"), expected.pop("checkpoint")
    assert checkpoints[0].endswith(f"step-{about['step']:08d}") and about == expected


@pytest.mark.campaign("long")
def test_it_loads_without_everstep(trained: Path) -> None:
    everstep("export", "runs/small", "--out", "plain", cwd=trained)
    program = (
        "import sys; sys.modules['everstep'] = None\n"
        "import torch; from safetensors.torch import load_file\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))\n"
        "print(model.load_state_dict(load_file('plain/model.safetensors')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=trained, capture_output=True, text=True, check=True
    )
    assert "All keys matched" in done.stdout


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("smoll", 2, "there is no run 'smoll'"),
        ("small --best valid/los", 2, "did you mean 'valid/loss'"),
        ("small --entry modle", 2, "did you mean 'model'"),
        ("small --checkpoint 77", 2, "77"),
        ("small --max-shard-size x", 2, "'x' is not a size"),
        ("runs/none", 1, "has no checkpoint yet"),
    ],
)
def test_wrong_input_is_told_and_writes_nothing(trained: Path, command: str, status: int, said: str) -> None:
    RunDir.open(trained / "runs" / "none")
    assert said in everstep("export", *command.split(), "--out", "a", cwd=trained, status=status)[1]
    assert not (trained / "a").exists()
