"""Law 1 on several ranks: ranks are killed or signalled at random times; the run ends as the undisturbed."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from processes import ended, started

from everstep.proof.compare import compare_runs

pytestmark = pytest.mark.campaign("random")

# What is exact by itself is left out: several buckets, dropout, BatchNorm, a short last batch, a counter of
# each rank's own, and workers' positions are what a resume must bring back.
PROGRAM = """
import numpy, torch
import everstep
from everstep import Every, services

def train(run, slow):
    numbers = numpy.random.default_rng(0)
    x, y = numbers.standard_normal((59, 5)), numbers.standard_normal((59, 1))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(5, 24), torch.nn.BatchNorm1d(24), torch.nn.Tanh(), torch.nn.Dropout(0.2)]
    layers += [torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1)]
    bare = torch.nn.Sequential(*layers).double()
    model = everstep.torch.parallel(bare, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    seen = {"samples": 0, "drawn": 0}
    state = {"model": model, "optimizer": optimizer, "seen": everstep.PerRank(seen)}
    each = [everstep.Checkpoints(Every(steps=4)), everstep.EarlyStop("valid_loss", patience=50)]
    with everstep.TrainLoop(run, state, seed=7, max_epoch=6, uneven="weight", services=each) as loop:
        open(f"{run}.{os.getpid()}", "w").close()
        for epoch in loop.iter_epochs():
            model.train()
            for step, (bx, by) in loop.iter_steps(everstep.data.arrays(x, y, batch_size=12, shuffle=True)):
                bx, by = torch.as_tensor(bx), torch.as_tensor(by)
                loss = torch.nn.functional.mse_loss(model(bx), by)
                optimizer.zero_grad()
                (loss * loop.batch_weight).backward()
                optimizer.step()
                seen["samples"] += len(bx)
                seen["drawn"] += int(torch.randint(1000, ()))
                loop.collect_metrics(loss=loss)
                time.sleep(slow)
            with loop.evaluation():
                model.eval()
                with torch.no_grad():
                    loss = torch.nn.functional.mse_loss(bare(torch.as_tensor(x)), torch.as_tensor(y))
                loop.collect_metrics(valid_loss=loss)
    say("digest", loop.ending.digest, seen)
"""


@cache
def undisturbed(size: int, folder: Path) -> tuple[Path, list[str]]:
    """Train without a disturbance, once for each number of ranks; return its run and what each rank said."""
    run = folder / f"straight-{size}"
    with started(f"{PROGRAM}\ntrain({str(run)!r}, 0)", size) as processes:
        said = ended(processes)
        assert [process.returncode for process in processes] == [0] * size, "\n".join(said)
    return run, _last(said)


def _last(said: list[str]) -> list[str]:
    return [next(line for line in text.splitlines() if ": digest " in line) for text in said]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def strike(seed: int, folder: Path, run: Path) -> Counter[str]:
    """Disturb a run twice, at times and ranks that the seed chooses; then let it end, and compare.

    Returns:
        How many kills and signals have ended a rank.
    """
    chosen, struck = random.Random(seed), Counter[str]()
    size = 2 + seed % 3
    for _ in range(2):
        how = chosen.choice(["kill one", "kill all", "SIGTERM one"])
        with started(f"{PROGRAM}\ntrain({str(run)!r}, 0.02)", size) as processes:
            until = time.monotonic() + 30
            while not list(run.glob("checkpoints/*")) and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(chosen.random() * 1.2)
            victims = processes if how == "kill all" else [chosen.choice(processes)]
            began = all(Path(f"{run}.{process.pid}").exists() for process in processes)
            for victim in victims:
                victim.send_signal(signal.SIGTERM if how == "SIGTERM one" else signal.SIGKILL)
            if not began:
                # before the ranks know each other only a launcher can end those that are left
                for process in processes:
                    process.kill()
            said = ended(processes)
            codes = [process.returncode for process in processes]
        if any(victim.returncode for victim in victims):
            struck["signals" if how == "SIGTERM one" else "kills"] += 1
        if how == "SIGTERM one" and began and 0 not in codes:
            assert set(codes) == {143}, (how, codes, said)  # all ranks, with one checkpoint
    straight, expected = undisturbed(size, folder)
    with started(f"{PROGRAM}\ntrain({str(run)!r}, 0)", size) as processes:
        said = ended(processes)
        assert [process.returncode for process in processes] == [0] * size, "\n".join(said)
    assert _last(said) == expected
    assert compare_runs(straight, run) == []
    return struck


@pytest.mark.parametrize("seed", range(80))
def test_disturbed_ranks_end_as_the_undisturbed(seed: int, folder: Path, tmp_path: Path, tally: Any) -> None:
    for kind, n in strike(seed, folder, tmp_path / "run").items():
        tally(kind, n, phase="ranks, at any time", door="DistributedDataParallel")
