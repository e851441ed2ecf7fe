"""One flipped bit in best weights: found at the next start and by `verify`; no run fails to finish for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import everstep
from everstep.checkpoint.manifest import ARRAYS, FORMAT, MANIFEST, OLDEST, packed
from everstep.cli.group import commands
from tiny_runs import Boom, Tiny, boom_at

VALUES = {1: 0.5, 2: 0.2, 3: 0.3, 4: 0.9}
"""Of each epoch, of four steps: the best two are of epochs 2 and 3."""

BEST, NEXT = "epoch-0002-step-00000008", "epoch-0003-step-00000012"


def best_run(run_dir: Path, keep: int = 1, **more: Any) -> Tiny:
    best = everstep.Best("valid_loss", keep=keep, restore_at_end=True)
    return Tiny(run_dir, services=[best], max_epoch=4, **more)


def train(tiny: Tiny, crash_at: int = 0, at_end: Callable[[], object] = lambda: None) -> Tiny:
    weights: dict[int, bytes] = {}

    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=VALUES[epoch])
        weights[epoch] = tiny.w.tobytes()
        if epoch == 4:
            at_end()

    tiny.train(inside=boom_at(crash_at), tail=tail)
    return tiny


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def weights_of(run_dir: Path, name: str) -> bytes:
    found = np.zeros(3)
    everstep.load(run_dir / "best" / "valid_loss" / name, {"w": found})
    return found.tobytes()


def damage(kind: str, folder: Path) -> None:
    manifest, arrays = folder / MANIFEST, folder / ARRAYS
    if kind == "arrays":
        flip(arrays)
    elif kind == "manifest":
        flip(manifest, 100)
    elif kind == "short":
        arrays.write_bytes(arrays.read_bytes()[:-8])
    elif kind == "another's":
        shutil.copy(folder.parent / NEXT / MANIFEST, manifest)
        shutil.copy(folder.parent / NEXT / ARRAYS, arrays)
    else:
        arrays.unlink()


@pytest.mark.parametrize("kind", ["arrays", "manifest", "short", "another's", "missing"])
def test_a_start_finds_it_moves_it_away_and_the_run_finishes_with_the_next_best(
    tmp_path: Path, kind: str
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Boom):
        train(best_run(run, keep=2), crash_at=15)
    second = weights_of(run, NEXT)
    damage(kind, run / "best" / "valid_loss" / BEST)
    tiny = train(best_run(run, keep=2))
    (moved,) = (run / "damaged").iterdir()
    assert moved.name == f"best.valid_loss.{BEST}.segment-2"
    found, end = tiny.loop.ending.warnings
    assert (
        f"best weights in valid_loss: checkpoint {BEST} is damaged" in found
        and f"the folder is now {moved}" in found
    )
    assert (
        "restore_at_end loaded the next best weights by valid_loss (0.3, step 12); not those of 0.2, step 8"
        in end
    )
    assert tiny.w.tobytes() == second
    assert tiny.loop.best is not None and (tiny.loop.best.value, tiny.loop.best.path) == (0.2, None)
    assert tiny.loop.ending.finished
    again = train(best_run(run, keep=2))
    assert again.loop.ending.finished and again.w.tobytes() == second


def test_with_one_that_is_kept_the_last_weights_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    straight = Tiny(tmp_path / "straight", max_epoch=4).train()
    ends = train(best_run(run), at_end=lambda: flip(run / "best" / "valid_loss" / BEST / ARRAYS))
    (warning,) = ends.loop.ending.warnings
    assert "restore_at_end restored nothing: those of 0.2, step 8: checkpoint" in warning
    assert f"the folder is now {run / 'damaged'}" in warning and warning.endswith("the last weights stay")
    assert ends.loop.ending.finished and ends.w.tobytes() == straight.w.tobytes()
    for _ in range(2):
        again = train(best_run(run))
        assert again.seen == [] and again.w.tobytes() == straight.w.tobytes()
        assert "is gone; bring it back" in again.loop.ending.warnings[-1]


def test_of_another_format_they_stay_where_they_are_and_the_run_finishes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(best_run(run))
    manifest = run / "best" / "valid_loss" / BEST / MANIFEST
    for version in (OLDEST - 1, FORMAT + 1):
        body = json.loads(manifest.read_bytes())["body"]
        manifest.write_bytes(packed({**body, "format": version}))
        again = train(best_run(run))
        assert len(again.loop.ending.warnings) == 2 and again.loop.ending.finished
        assert all(f"has format version {version}" in told for told in again.loop.ending.warnings)
        assert manifest.exists()


def test_verify_reads_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(best_run(run, keep=2))
    verify = ["checkpoints", str(run), "verify"]
    whole = CliRunner().invoke(commands, verify)
    assert whole.exit_code == 0 and f"best/valid_loss/{BEST}" in whole.stdout
    flip(run / "best" / "valid_loss" / BEST / ARRAYS)
    found = CliRunner().invoke(commands, [*verify, "--json"])
    assert found.exit_code == 1
    assert [one["name"] for one in json.loads(found.stdout) if one["verified"] == "damaged"] == [
        f"best/valid_loss/{BEST}"
    ]
    assert f"checkpoint {BEST} is damaged: " in CliRunner().invoke(commands, verify).stdout
    newest = CliRunner().invoke(commands, [*verify, "latest"])
    assert newest.exit_code == 0 and "best/" not in newest.stdout


def test_what_a_trainer_evaluates_after_the_end_is_what_was_loaded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(best_run(run, keep=2))
    flip(run / "best" / "valid_loss" / BEST / ARRAYS)
    tiny = train(best_run(run, keep=2))
    assert tiny.loop._engine.restored is not None and tiny.loop._engine.restored.path is not None
    assert Path(tiny.loop._engine.restored.path).name == NEXT
