"""`Best(keep=k)`: the k best, in order, whatever kills the run; one of them is the best."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashing import check_crashes, collecting, run

import everstep
from everstep.proof.compare import compare_runs

VALUES = [math.nan, 0.7, 0.3, 0.7, 0.5, 0.3, 0.9, 0.2]
"""Of each epoch, of four steps."""


GUARD = everstep.NaNGuard(metrics=["loss"])
"""The default one would end a run at the NaN of a metric that is watched."""


def kept(run_dir: Path) -> list[tuple[float, int]]:
    """(value, epoch) of the folders in best/, the best first."""
    found = []
    for folder in (run_dir / "best" / "valid_loss").iterdir():
        meta: Any = everstep.checkpoint.read_manifest(folder)
        found.append((meta["meta"]["value"], meta["epoch"]))
    return sorted(found)


@pytest.mark.campaign("long", gate="share")
def test_the_best_three_ties_keep_the_earlier_and_no_crash_changes_them(tmp_path: Path) -> None:
    make = lambda: [everstep.Best("valid_loss", keep=3), GUARD]  # noqa: E731
    whole = check_crashes(tmp_path, make, collecting("valid_loss", VALUES), max_epoch=8)
    for run_dir in tmp_path.iterdir():
        assert compare_runs(tmp_path / "whole", run_dir) == []
        best = everstep.checkpoint.Store(run_dir, 0, print).kept_best()["valid_loss"]
        assert [path.name for path in best] == [f"epoch-000{n}-step-000000{4 * n:02d}" for n in (8, 3, 6)]
        assert set(kept(run_dir)) >= {(0.2, 8), (0.3, 3), (0.3, 6)}
    assert whole.loop.best is not None and whole.loop.best.epoch == 8


def test_older_ones_that_no_checkpoint_speaks_of_go(tmp_path: Path) -> None:
    checkpoints = everstep.Checkpoints(keep_last=1)
    services = [everstep.Best("valid_loss", keep=2), GUARD]
    everstep_run(tmp_path, [*services, checkpoints], VALUES, 8)
    assert kept(tmp_path)[:2] == [(0.2, 8), (0.3, 3)]
    assert len(kept(tmp_path)) <= 3  # one that the checkpoint before spoke of, until the next best


def everstep_run(run_dir: Path, services: Any, values: list[float], epochs: int, **more: Any) -> Any:
    weights = np.zeros(2)
    with everstep.TrainLoop(
        run_dir, {"w": weights}, max_epoch=epochs, services=services, seed=1, **more
    ) as loop:
        for epoch in loop.iter_epochs():
            for _ in loop.iter_steps(range(2)):
                weights += 1
            loop.collect_metrics(valid_loss=values[epoch - 1])
    return loop


def test_the_best_of_several_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    loop = everstep_run(tmp_path, [everstep.Best("valid_loss", keep=3)], [0.2, 0.1, 0.3], 3)
    weights = np.zeros(2)
    found = everstep.load(tmp_path / "best" / "valid_loss", {"w": weights})
    assert (found.epoch, *weights) == (2, 4, 4)
    assert everstep.best(tmp_path)["valid_loss"] == loop.ending.best
    assert kept(tmp_path) == [(0.1, 2), (0.2, 1), (0.3, 3)]


def test_a_smaller_number_lets_the_worst_go(tmp_path: Path) -> None:
    everstep_run(tmp_path, [everstep.Best("valid_loss", keep=3)], [0.2, 0.1, 0.3], 3)
    checkpoints = everstep.Checkpoints(keep_last=1)
    services = [everstep.Best("valid_loss", keep=1), checkpoints]
    everstep_run(tmp_path, services, [0, 0, 0, 0.4, 0.05], 5)
    assert everstep.best(tmp_path)["valid_loss"].value == 0.05


def test_a_frozen_base_is_not_written_again_for_each_best(tmp_path: Path) -> None:
    base, weights = np.arange(50_000.0), np.zeros(2)
    run_dir, written, inodes = tmp_path / "run", [], dict[int, int]()
    best = everstep.Best("valid_loss", save=True)
    state = {"base": base, "w": weights}
    with everstep.TrainLoop(run_dir, state, max_epoch=8, seed=1, services=[best]) as loop:
        for epoch in loop.iter_epochs():
            for _ in loop.iter_steps(range(2)):
                weights += 1
            loop.collect_metrics(valid_loss=1 / epoch)
            loop.make_checkpoint()
            found = {each.stat().st_ino: each.stat().st_size for each in run_dir.glob("best/*/*/*")}
            written.append(sum(size for inode, size in found.items() if inode not in inodes))
            inodes |= {each.stat().st_ino: 0 for each in run_dir.rglob("*") if each.is_file()}
    # first each writes it, then there are two copies that all share
    assert max(written) > base.nbytes and max(written[-3:]) < 20_000, written
    alone = Path(shutil.copytree(run_dir / "best", tmp_path / "best"))
    loaded = {"base": np.zeros_like(base), "w": np.zeros(2)}
    everstep.load(next((alone / "valid_loss").iterdir()), loaded)
    np.testing.assert_array_equal(loaded["base"], base)
    everstep.export(run_dir / "best/valid_loss", tmp_path / "exported", entry="base")


def test_two_evaluations_of_one_state_take_one_place(tmp_path: Path) -> None:
    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=1 / epoch)
        loop.collect_metrics(valid_loss=0.9 / epoch)

    run(tmp_path, [everstep.Best("valid_loss", keep=2)], tail, max_epoch=3)
    best = everstep.checkpoint.Store(tmp_path, 0, print).kept_best()["valid_loss"]
    assert [path.name for path in best] == ["epoch-0003-step-00000012", "epoch-0002-step-00000008"]
    assert everstep.best(tmp_path)["valid_loss"].value == 0.9 / 3
