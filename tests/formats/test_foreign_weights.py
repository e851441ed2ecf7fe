"""Weights of other programs, taken by `InitFrom` and `everstep.load`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from foreign_files import FLAT, as_safetensors, distributed_folder, net, same

import everstep
from everstep import InitFrom
from everstep.errors import ConfigError, RestoreError

Writer = Callable[[torch.nn.Module, Path], Path]


@pytest.fixture(params=FLAT.values(), ids=FLAT)
def write(request: pytest.FixtureRequest) -> Writer:
    """A writer of a model's state_dict."""
    writer: Writer = request.param
    return writer


@pytest.mark.campaign("long", gate=2)
def test_a_run_starts_from_them(tmp_path: Path, write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    given, model = write(net(1), tmp_path), net(2)
    optimizer = torch.optim.Adam(model.parameters())
    with everstep.Supervisor(tmp_path / "run", {"model": model, "optimizer": optimizer}, init_from=given):
        assert same(model, net(1))
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert str(given) in capsys.readouterr().out


@pytest.mark.campaign("long", gate=2)
def test_what_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path: Path, write: Writer) -> None:
    given, model = write(net(1), tmp_path), net(2, out=5)
    model.append(torch.nn.Linear(5, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RestoreError) as raised:
        everstep.load(given, {"model": model})
    assert raised.value.missing == ("model/2.weight", "model/2.bias")
    assert "model/0.weight (3, 4) F32 -> (5, 4) F32" in raised.value.reshaped
    assert "model/0.bias (3,) BF16 -> (5,) BF16" in raised.value.reshaped
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    chosen = InitFrom(given, on_missing="skip", on_reshaped="skip")
    everstep.load(chosen, {"model": model})
    assert torch.equal(model.state_dict()["1.num_batches_tracked"], torch.tensor(0))


@pytest.mark.campaign("long", gate=2)
def test_a_part_under_other_names(tmp_path: Path, write: Writer) -> None:
    holder = torch.nn.Module()
    holder.backbone = net(2)
    given = write(net(1), tmp_path)
    with pytest.raises(RestoreError, match=r"choose with .*rename=.*\n.*net/backbone\.0\.weight"):
        everstep.load(given, {"net": holder})
    start = InitFrom(given, rename={"^net/": "net/backbone."}, exclude="running_mean")
    holder.backbone[1].running_mean += 1
    everstep.load(start, {"net": holder})
    assert torch.equal(holder.backbone[0].weight, net(1)[0].weight)
    assert torch.equal(holder.backbone[1].running_mean, torch.ones(3))


@pytest.mark.parametrize("kind", ["torch.save", "torch.distributed.checkpoint"])
def test_values_with_names_of_their_own(tmp_path: Path, kind: str) -> None:
    model = net(1)
    optimizer = torch.optim.Adam(model.parameters())
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scale": torch.ones(2),
        "epoch": 3,
    }
    if kind == "torch.save":
        given = tmp_path / "all.pt"
        torch.save(tree, given)
    else:
        given = distributed_folder(tree, tmp_path / "all")
    again, scale = net(2), torch.zeros(2)
    with (
        pytest.warns(RuntimeWarning, match="pickles, and are not read: ") if given.is_dir() else nullcontext()
    ):
        everstep.load(given, {"model": again, "scale": scale})
    assert same(again, model) and scale.tolist() == [1, 1] and type(scale) is torch.Tensor
    others = torch.optim.Adam(again.parameters())
    with pytest.raises(RestoreError) as raised:
        everstep.load(given, {"model": again, "optimizer": others})
    assert raised.value.missing == ("optimizer",)
    with pytest.raises(ConfigError, match=r"entry='model'\).* has names of its own"):
        everstep.load(InitFrom(given, entry="model"), {"model": again})


def test_a_run_leaves_its_optimizer_and_what_the_file_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net(1)
    state = {"model": model.state_dict(), "optimizer": torch.optim.Adam(model.parameters()).state_dict()}
    torch.save({**state, "epoch": 3}, tmp_path / "all.pt")
    again = net(2)
    entries = {"model": again, "optimizer": torch.optim.SGD(again.parameters(), lr=0.1)}
    with (
        pytest.raises(RestoreError) as raised,
        everstep.Supervisor(tmp_path / "a", entries, init_from=tmp_path / "all.pt"),
    ):
        pass
    assert raised.value.unexpected == ("epoch",)
    start = InitFrom(tmp_path / "all.pt", exclude="^epoch$")
    with everstep.Supervisor(tmp_path / "b", entries, init_from=start):
        assert same(again, model)
    assert "optimizers are only taken from everstep's checkpoints" in capsys.readouterr().out


def test_the_entry_is_named_where_several_could_be_meant(tmp_path: Path) -> None:
    given, entries = as_safetensors(net(1), tmp_path), {"model": net(2), "teacher": net(3)}
    with pytest.raises(ConfigError, match=r"2 entries .*\(model, teacher\).*entry='model'"):
        everstep.Supervisor(tmp_path / "a", entries, init_from=given).__enter__()
    with pytest.raises(ConfigError, match="did you mean 'teacher'"):
        everstep.Supervisor(tmp_path / "b", entries, init_from=InitFrom(given, entry="techer")).__enter__()
    with everstep.Supervisor(tmp_path / "c", entries, init_from=InitFrom(given, entry="teacher")):
        assert same(entries["teacher"], net(1)) and same(entries["model"], net(2))


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    """As Hugging Face's libraries store them: a safetensors file has no two names for one tensor."""

    def tied(seed: int) -> torch.nn.ModuleDict:
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict(
            {"head": torch.nn.Linear(4, 9, bias=False), "words": torch.nn.Embedding(9, 4)}
        )
        model["head"].weight = model["words"].weight
        return model

    safetensors.torch.save_file({"words.weight": tied(1)["words"].weight}, tmp_path / "model.safetensors")
    model = tied(2)
    everstep.load(tmp_path, {"model": model})
    assert torch.equal(model["head"].weight, tied(1)["words"].weight)
    loose = tied(2)
    loose["head"].weight = torch.nn.Parameter(loose["head"].weight.detach().clone())
    with pytest.raises(RestoreError) as raised:
        everstep.load(tmp_path, {"model": loose})
    assert raised.value.missing == ("model/head.weight",)


@pytest.mark.campaign("long")
def test_arrays_of_numpy_need_no_torch(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / "w.safetensors")
    script = """
import json, sys
import numpy as np
import everstep
weights = {"w": np.zeros((2, 3))}
live = weights["w"]
everstep.load(sys.argv[1], {"weights": weights})
print(json.dumps([live.tolist(), "torch" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "w.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [[[0, 1, 2], [3, 4, 5]], False]


SHARDED = """
import sys
import safetensors.torch, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import everstep
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
weights = safetensors.torch.load_file(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
try:
    everstep.load(sys.argv[1], {"model": model})
except everstep.errors.RestoreError as error:
    print(*error.missing)
everstep.load(everstep.InitFrom(sys.argv[1], on_missing="skip"), {"model": model})
for name, whole in weights.items():
    live = model.state_dict()[name]
    print(name, torch.equal(live.to_local(), whole.chunk(4)[1]), tuple(live.to_local().shape))
dist.destroy_process_group()
"""


@pytest.mark.campaign("long")
def test_a_sharded_model_takes_its_part(tmp_path: Path) -> None:
    """By torch's fake process group: one process that is rank 1 of 4, and communicates with nobody."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("1.")}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "model.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "model/1.weight model/1.bias",
        "0.bias True (2,)",
        "0.weight True (2, 4)",
        "2.bias True (1,)",
        "2.weight True (1, 8)",
    ]
