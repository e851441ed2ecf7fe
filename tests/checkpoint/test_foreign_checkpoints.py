"""What was copied into a run from another one is not taken for the run's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.errors import ForeignCheckpointError
from everstep.schedule import Every
from tiny_runs import Boom, Tiny, boom_at, rows

STEPS = 12


def program(run_dir: Path, **more: Any) -> Tiny:
    return Tiny(run_dir, max_epoch=3, services=[everstep.Checkpoints(Every(steps=1), keep_last=None)], **more)


def half(run_dir: Path) -> Path:
    """A run that was killed in its sixth step of twelve."""
    with pytest.raises(Boom):
        program(run_dir).train(inside=boom_at(6))
    return run_dir


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name[-8:]))


def test_a_checkpoint_of_another_run_stops_the_start_and_is_named(tmp_path: Path) -> None:
    run, other = half(tmp_path / "run"), tmp_path / "other"
    program(other).train()
    put = Path(shutil.copytree(newest(other), run / "checkpoints" / newest(other).name))
    with pytest.raises(
        ForeignCheckpointError, match=r"belongs to the run other-.*, not to run-.*: move it away"
    ):
        program(run).train()
    assert put.is_dir()
    shutil.rmtree(put)
    assert program(run).train().result() == program(tmp_path / "whole").train().result()


def test_a_checkpoint_of_another_run_is_gone_on_from_where_a_person_asks_for_it(tmp_path: Path) -> None:
    run, other = half(tmp_path / "run"), half(tmp_path / "other")
    assert program(run, resume=newest(other)).train().loop.ending.finished
    steps = {row[1] for row in rows(run) if row[3] == "loss"}
    assert steps == set(range(newest_step(other) + 1, STEPS + 1))
    assert program(run).train().loop.ending.finished  # the copy is this run's own


def newest_step(run_dir: Path) -> int:
    return int(newest(run_dir).name[-8:])


def test_a_checkpoint_of_another_run_that_has_the_name_of_the_next_save_makes_room(tmp_path: Path) -> None:
    other = tmp_path / "other"
    program(other).train()
    name = "step-00000007"

    def put(loop: Any, step: int) -> None:
        if step == 6:
            shutil.copytree(other / "checkpoints" / name, tmp_path / "run" / "checkpoints" / name)

    tiny = program(tmp_path / "run").train(inside=put)
    assert tiny.result() == program(tmp_path / "whole").train().result()
    assert any("belongs to the run other-" in line for line in tiny.lines)
    assert [path.name for path in (tmp_path / "run" / "damaged").iterdir()] == [f"{name}.segment-1"]


def test_best_weights_of_another_run_move_away(tmp_path: Path) -> None:
    def start(run_dir: Path, crash_at: int = 0) -> Tiny:
        services = [everstep.Best("valid_loss")]
        tiny = Tiny(run_dir, max_epoch=3, services=services)
        tail = lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)  # noqa: E731
        return tiny.train(inside=boom_at(crash_at), tail=tail)

    run, other = tmp_path / "run", tmp_path / "other"
    start(other)
    with pytest.raises(Boom):
        start(run, crash_at=10)
    name = "epoch-0003-step-00000012"
    shutil.copytree(other / "best" / "valid_loss" / name, run / "best" / "valid_loss" / name)
    tiny = start(run)
    assert any("belongs to the run other-" in line and "damaged/" in line for line in tiny.lines), tiny.lines
    assert everstep.best(run)["valid_loss"].step == STEPS
