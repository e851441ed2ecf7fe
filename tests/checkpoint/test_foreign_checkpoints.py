"""What was copied into a run from another one is not taken for the run's own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.checkpoint.retention import kept_best
from everstep.errors import ForeignCheckpointError
from everstep.schedule import Every
from tiny_runs import Boom, Tiny, boom_at, collecting, rows

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
    with pytest.raises(ForeignCheckpointError, match=r"to the run other-.*, not to run-.*: move it away"):
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


VALUES = [3.0, 1.0, 2.0, 2.5]
"""Of four epochs: the best is that of the second."""


def with_best(run_dir: Path, crash_at: int = 0, values: Sequence[float] = VALUES, **more: Any) -> Tiny:
    best = everstep.Best("valid_loss", restore_at_end=True)
    saves = everstep.Checkpoints(Every(steps=1), keep_last=None)
    tiny = Tiny(run_dir, max_epoch=len(values), services=[best, saves], **more)
    return tiny.train(boom_at(crash_at), collecting("valid_loss", values))


def test_a_run_that_goes_on_from_another_ones_checkpoint_has_its_best_weights(tmp_path: Path) -> None:
    run, other, whole = tmp_path / "run", tmp_path / "other", with_best(tmp_path / "whole")
    with pytest.raises(Boom):
        with_best(other, crash_at=14)
    with pytest.raises(Boom):
        with_best(run, crash_at=10, seed=8)
    own = (run / "best" / "valid_loss" / "epoch-0002-step-00000008" / "manifest.json").read_bytes()
    taken = with_best(run, resume=newest(other))
    assert taken.w.tobytes() == whole.w.tobytes()  # those of the second epoch, which only the other run made
    assert everstep.runs.best(run)["valid_loss"].value == 1.0
    aside = run / "superseded" / "best.valid_loss.epoch-0002-step-00000008.segment-2" / "manifest.json"
    assert aside.read_bytes() == own
    with_best(run, resume=newest(other))  # what is copied already stays
    assert len(list((run / "superseded").glob("best.*"))) == 1
    again = with_best(run)  # finished: the best weights count as this run's own
    assert not [line for line in again.lines if "belongs to" in line]
    assert (other / "best" / "valid_loss" / "epoch-0002-step-00000008").is_dir()


def test_best_weights_that_cannot_be_copied_are_said(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    with pytest.raises(Boom):
        with_best(other, crash_at=14)
    arrays = other / "best" / "valid_loss" / "epoch-0002-step-00000008" / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1])
    taken = with_best(run, resume=newest(other))
    assert taken.loop.ending.finished
    assert any("best weights by valid_loss are not copied" in line for line in taken.lines)


def test_names_of_best_weights_that_are_no_such_names_lead_nowhere(tmp_path: Path) -> None:
    kept = {"loss": ["../../x", "step-00000001"], "..": ["step-00000001"], "": ["step-00000001"]}
    assert kept_best({"kept": kept}) == {"loss": ["step-00000001"]} and kept_best(None) == {}


def test_best_weights_of_another_run_move_away(tmp_path: Path) -> None:
    run, other, falling = tmp_path / "run", tmp_path / "other", [1.0, 0.5, 0.3]
    with_best(other, values=falling)
    with pytest.raises(Boom):
        with_best(run, 10, falling)
    name = "epoch-0003-step-00000012"
    shutil.copytree(other / "best" / "valid_loss" / name, run / "best" / "valid_loss" / name)
    tiny = with_best(run, values=falling)
    assert any("belongs to the run other-" in line and "damaged/" in line for line in tiny.lines), tiny.lines
    assert everstep.runs.best(run)["valid_loss"].step == STEPS
