"""Bad input of loops on several ranks: one clear error on each rank, quickly, and nothing lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import lines_by_rank, outputs
from rank_loops import HEAD

from everstep.supervisor.streams.same_samples import samples


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
numbers = np.random.default_rng(0)
x, y = x[: 64 - 8 * rank], y[: 64 - 8 * rank]
say(*ended("data"))
say(*ended("retry", services=[services.Retry()]), (folder / "retry").exists())
"""
    said = lines_by_rank("".join(outputs(HEAD + program, 2)))
    for rank in range(2):
        whole, _folders, epochs, seed, config, change, guards, data, retry = said[rank]
        assert whole.startswith("ended 8 ")
        assert "max_epoch: rank 0 has 2, rank 1 has 3" in epochs
        assert "seed: rank 0 has 7, rank 1 has 8" in seed
        assert "config.width: rank 0 has 3, rank 1 has 4" in config and "config.rank" not in config
        assert 'on_change: rank 0 has "error", rank 1 has "override"' in change
        assert guards.startswith("DisagreementError: ") and 'rank 1 has "EarlyStop"' in guards, guards
        assert data.startswith("DisagreementError: the data of stream 'train' differs between the processes")
        assert retry.startswith("ConfigError: Retry tries again in one process") and retry.endswith(" False")
        assert "torchrun --max-restarts" in retry
    assert said[1][1].startswith("RunDirError: rank 1 finds no run") and "all of them see" in said[1][1]
    assert "rank 1 has failed: RunDirError: rank 1 finds no run" in said[0][1]
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-1].endswith("00000008")


@pytest.mark.campaign("long")
def test_ranks_whose_samples_differ_are_told_where(folder: Path) -> None:
    """Lengths are equal in each case: a split without a seed, files in the order of a disk."""
    program = """
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, TensorDataset
from torch.utils.data import random_split
whole = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
class Files(Dataset):
    def __init__(self, root, order):
        self.paths = [(f"{root}/{n}.png", n % 3) for n in range(64)][::order]
        self.names, self.calls = {0: 'cat', 1: 'dog'}, 0
    def __len__(self): return len(self.paths)
    def __getitem__(self, n): return x[n], y[n]
def split(seed):
    return random_split(whole, [64, 0], torch.Generator().manual_seed(seed))[0]
def loaded(dataset):
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, shuffle=False))
def tried(stream):
    try:
        with everstep.TrainLoop(folder / f"{next(count)}", {}, max_step=1, seed=7) as loop:
            for epoch in loop.iter_epochs():
                for step, batch in loop.iter_steps(stream):
                    pass
        say("trained")
    except EverstepError as error:
        say(f"{type(error).__name__}: {error}")
import itertools
count = itertools.count()
tried(data.arrays(x + rank, y, batch_size=8))
tried(data.loader(split(rank), batch_size=8))
tried(loaded(ConcatDataset([split(rank)])))
tried(data.loader(Files("/data", 1 - 2 * rank), batch_size=8))
tried(data.loader(split(3), batch_size=8))
tried(loaded(split(3)))
tried(data.loader(Files(f"/node{rank}", 1), batch_size=8))
from everstep.group import find_group
from everstep.trainer.eval_ranks import EvalRanks
group = find_group()
for seed in (3, rank):
    try:
        EvalRanks(group).share_of(data.loader(split(seed), batch_size=8), "valid")
        say("shared")
    except EverstepError as error:
        say(error)
group.close()
"""
    said = lines_by_rank("".join(outputs(HEAD + program, 2)))
    paths = ["arrays", "dataset.indices", "given.dataset.datasets[0].indices", "dataset.paths"]
    for rank in range(2):
        for line, path in zip(said[rank], paths, strict=False):
            assert f"not the same on all ranks: {path} of rank 1 differs from the writer's" in line, line
        assert said[rank][4:8] == ["trained", "trained", "trained", "shared"]
        assert said[rank][8].startswith(
            "the samples of stream 'valid' are not the same on all ranks: dataset.in"
        )


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
