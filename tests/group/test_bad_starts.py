"""Bad input of loops on several ranks: one clear error on each rank, quickly, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import lines_by_rank, outputs
from rank_loops import HEAD
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, random_split

from everstep import data
from everstep.supervisor.data_ranks import samples


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


@pytest.mark.campaign("long")
def test_ranks_that_were_started_differently_are_told_what_differs(folder: Path) -> None:
    program = """
say(*ended("run", epochs=1))
say(*ended(f"run-{rank}"))
say(*ended("run", epochs=2 + rank))
say(*ended("run", seed=7 + rank))
say(*ended("run", config={"width": 3 + rank, "rank": rank}))
say(*ended("run", on_change=("error", "override")[rank]))
say(*ended("run", services=[everstep.EarlyStop("loss", threshold=-1.0)] if rank else []))
x = x + rank
say(*ended("samples"))
x, y = x[: 64 - 8 * rank], y[: 64 - 8 * rank]
say(*ended("data"))
say(*ended("retry", services=[services.Retry()]), (folder / "retry").exists())
"""
    said = lines_by_rank("".join(outputs(HEAD + program, 2)))
    for rank in range(2):
        whole, _folders, epochs, seed, config, change, guards, other, lengths, retry = said[rank]
        assert whole.startswith("ended 8 ")
        assert "max_epoch: rank 0 has 2, rank 1 has 3" in epochs
        assert "seed: rank 0 has 7, rank 1 has 8" in seed
        assert "config.width: rank 0 has 3, rank 1 has 4" in config and "config.rank" not in config
        assert 'on_change: rank 0 has "error", rank 1 has "override"' in change
        assert guards.startswith("DisagreementError: ") and 'rank 1 has "EarlyStop"' in guards, guards
        assert "'train' are not the same on all ranks: arrays of rank 1 differs from the writer's" in other
        assert lengths.startswith(
            "DisagreementError: the data of stream 'train' differs between the processes"
        )
        assert retry.startswith("ConfigError: Retry tries again in one process") and retry.endswith(" False")
        assert "torchrun --max-restarts" in retry
    assert said[1][1].startswith("RunDirError: rank 1 finds no run") and "all of them see" in said[1][1]
    assert "rank 1 has failed: RunDirError: rank 1 finds no run" in said[0][1]
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-1].endswith("00000008")


class Files:
    """Paths and labels in the order of a disk."""

    def __init__(self, root: str = "/data", order: int = 1) -> None:
        self.paths = [(f"{root}/{n}.png", n % 3) for n in range(64)][::order]
        self.names, self.calls = {0: "cat", 1: "dog"}, 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, n: int) -> int:
        return n


def split(seed: int) -> Any:
    return random_split(TensorDataset(torch.zeros(64)), [64, 0], torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda rank: data.arrays(np.arange(64) + rank, batch_size=8), "arrays"),
        (lambda rank: data.loader(split(rank), batch_size=8), "dataset.indices"),
        (
            lambda rank: data.as_stream(DataLoader(ConcatDataset([split(rank)]))),
            "given.dataset.datasets[0].indices",
        ),
        (lambda rank: data.loader(Files(order=1 - 2 * rank), batch_size=8), "dataset.paths"),
        (lambda rank: data.loader(split(3), batch_size=8), None),
        (lambda rank: data.as_stream(DataLoader(split(3))), None),
        (lambda rank: data.loader(Files(f"/node{rank}"), batch_size=8), None),
    ],
)
def test_samples_that_differ_have_other_digests(make: Callable[[int], Any], path: str | None) -> None:
    """Lengths are equal in each case: a split without a seed, files in the order of a disk."""
    one, other = samples(make(0)), samples(make(1))
    assert one and one.keys() == other.keys()
    differing = {each for each in one if one[each] != other[each]}
    assert path in differing if path else not differing, differing


def test_a_long_dictionary_of_a_dataset_is_left_out_of_the_comparison() -> None:
    class Files:
        def __init__(self) -> None:
            self.labels, self.places = {"cat": [0]}, {f"{n}.png": [n] for n in range(100_000)}

        def __len__(self) -> int:
            return 1

        def __getitem__(self, n: int) -> int:
            return n

    stream: Any = SimpleNamespace(dataset=Files())
    assert list(samples(stream)) == ["dataset.labels.cat"]
