"""`everstep.export`: weights of a checkpoint in the formats of other libraries, read back by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as distributed

import everstep
from everstep.errors import ConfigError, DamagedCheckpointError, NoCheckpointError


def net(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(50, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3))
    model[2].weight.data = model[2].weight.data.to(torch.bfloat16)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model was never changed, with checkpoints at step 0 and 1."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    model = net(1)
    state = {"model": model, "table": {"w": np.arange(3.0)}, "epoch": {"now": 1}}
    saves = everstep.Checkpoints(everstep.Every(steps=1), keep_last=9)
    with everstep.TrainLoop(run_dir, state, max_step=1, services=[saves]) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps(everstep.data.arrays(np.zeros(2), batch_size=2)):
                pass
    return run_dir


def same(state: dict[str, Any]) -> bool:
    expected = net(1).state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


def test_shards_with_an_index(trained: Path, tmp_path: Path) -> None:
    done = everstep.export(trained, tmp_path / "out", max_shard_size=2040)
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


def test_what_fits_one_file_is_one(trained: Path, tmp_path: Path) -> None:
    for size in (None, "1MB", "1 MiB", 10**6):
        everstep.export(
            trained / "checkpoints" / "epoch-0001-step-00000001", tmp_path / "out", max_shard_size=size
        )
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == ["export.json", "model.safetensors"]
        assert same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))


def test_an_array_that_is_larger_than_a_shard_has_a_file_of_its_own(trained: Path, tmp_path: Path) -> None:
    everstep.export(trained, tmp_path / "out", max_shard_size=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 9


def test_a_folder_for_torch_distributed_checkpoint(trained: Path, tmp_path: Path) -> None:
    everstep.export(trained, tmp_path / "out", format="torch.distributed.checkpoint")
    again = net(2)
    state = again.state_dict()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        distributed.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(state)
    third = net(3)
    everstep.load(tmp_path / "out", {"model": third})
    assert same(third.state_dict())


@pytest.mark.parametrize("format", ["safetensors", "torch.distributed.checkpoint"])
def test_arrays_of_numpy(trained: Path, tmp_path: Path, format: str) -> None:
    everstep.export(trained, tmp_path / "out", entry="table", format=format)
    table = {"w": np.zeros(3)}
    everstep.load(tmp_path / "out", {"table": table})
    assert table["w"].tolist() == [0, 1, 2]


def test_only_the_entry_is_read(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "epoch-0001-step-00000001"
    folder.mkdir()
    for path in (trained / "checkpoints" / "epoch-0001-step-00000001").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    raw = bytearray((folder / "arrays.safetensors").read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    raw[start + header["user/table/w"]["data_offsets"][0]] ^= 1
    (folder / "arrays.safetensors").write_bytes(raw)
    everstep.export(folder, tmp_path / "out")
    assert same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        everstep.export(folder, tmp_path / "table", entry="table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"format": "torch"}, "did you mean|known: safetensors"),
        ({"max_shard_size": "5 apples"}, "'5 apples' is not a size"),
        ({"max_shard_size": 0}, "0 is not a size"),
        ({"max_shard_size": -5}, "-5 is not a size"),
        ({"max_shard_size": "5GB", "format": "torch.distributed.checkpoint"}, "leave out the size"),
        ({"entry": "modle"}, "did you mean 'model'"),
        ({"entry": "epoch"}, "'epoch' has no arrays"),
        ({"entyr": "model"}, "did you mean 'entry'"),
    ],
)
def test_wrong_arguments_write_nothing(trained: Path, tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        everstep.export(trained, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_what_is_no_export_stays(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="exists and is not an export"):
        everstep.export(trained, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(NoCheckpointError, match="there is no checkpoint yet"):
        everstep.export(tmp_path, tmp_path / "out")
