"""`Best(keep=k)`: the k best, in order, whatever kills the run or damages them; one of them is the best."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import everstep
from everstep.checkpoint.format import ARRAYS, FORMAT, MANIFEST, pack_manifest
from everstep.cli.group import commands
from everstep.errors import ConfigError, Interrupted
from everstep.index.database import Database
from everstep.views.describe_run import live_state
from tiny_runs import Boom, Tiny, boom_at, collecting, flip, resumed, serviced, supervised

VALUES = [math.nan, 0.7, 0.3, 0.7, 0.5, 0.3, -math.inf, 0.2]
"""Of each epoch, of four steps."""


GUARD = everstep.services.NaNGuard(metrics=["loss"])
"""The default one would end a run at the NaN of a metric that is watched."""


def kept(run_dir: Path) -> list[tuple[float, int]]:
    """(value, epoch) of the folders in best/, the best first."""
    found = []
    for folder in (run_dir / "best" / "valid_loss").iterdir():
        meta: Any = everstep.checkpoint.read_manifest(folder)
        found.append((meta["meta"]["value"], meta["epoch"]))
    return sorted(found)


def test_the_best_three_ties_keep_the_earlier_over_a_crash(tmp_path: Path) -> None:
    def start(run_dir: Path, crash: int) -> Tiny:
        services = [everstep.Best("valid_loss", keep=3), GUARD]
        return serviced(run_dir, services, collecting("valid_loss", VALUES), boom_at(crash), max_epoch=8)

    whole, _ = resumed(tmp_path, start, 22)
    assert whole.loop.best is not None and whole.loop.best == whole.loop.ending.best
    assert (whole.loop.best.epoch, whole.loop.best_valid_metric) == (8, 0.2)
    for run_dir in tmp_path.iterdir():
        listed = everstep.checkpoint.Store(run_dir, 0, print).kept_best()["valid_loss"]
        assert [path.name for path in listed] == [f"epoch-000{n}-step-000000{4 * n:02d}" for n in (8, 3, 6)]
        assert set(kept(run_dir)) >= {(0.2, 8), (0.3, 3), (0.3, 6)}


def test_the_best_of_several_is_loaded_and_unnamed_ones_go(tmp_path: Path) -> None:
    run, weights = tmp_path / "run", np.zeros(3)
    tiny = train(best_run(run, keep=3))
    found = everstep.load(run / "best" / "valid_loss", {"w": weights})
    assert (found.epoch, weights.tolist()) == (2, tiny.w.tolist())
    assert everstep.runs.best(run)["valid_loss"] == tiny.loop.ending.best
    assert kept(run) == [(0.2, 2), (0.3, 3), (0.5, 1)]
    train(best_run(run, max_epoch=5))  # fewer stay
    assert everstep.runs.best(run)["valid_loss"].value == 0.05
    services = [everstep.Best("valid_loss", keep=2), GUARD, everstep.Checkpoints(keep_last=1)]
    Tiny(tmp_path / "two", services=services, max_epoch=8).train(tail=collecting("valid_loss", VALUES))
    assert kept(tmp_path / "two")[:2] == [(0.2, 8), (0.3, 3)]
    assert len(kept(tmp_path / "two")) <= 3  # one that the checkpoint before spoke of, until the next best


def test_two_evaluations_of_one_state_take_one_place(tmp_path: Path) -> None:
    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=1 / epoch)
        loop.collect_metrics(valid_loss=0.9 / epoch)

    serviced(tmp_path, [everstep.Best("valid_loss", keep=2)], tail, max_epoch=3)
    best = everstep.checkpoint.Store(tmp_path, 0, print).kept_best()["valid_loss"]
    assert [path.name for path in best] == ["epoch-0003-step-00000012", "epoch-0002-step-00000008"]
    assert everstep.runs.best(tmp_path)["valid_loss"].value == 0.9 / 3


# ---- one flipped bit: found at the next start and by `verify`; no run fails to finish for it
OF_EPOCH = {1: 0.5, 2: 0.2, 3: 0.3, 4: 0.9, 5: 0.05}
"""Of each epoch, of four steps: the best two of four are of epochs 2 and 3."""

BEST, NEXT = "epoch-0002-step-00000008", "epoch-0003-step-00000012"


def best_run(run_dir: Path, keep: int = 1, **more: Any) -> Tiny:
    best = everstep.Best("valid_loss", keep=keep, restore_at_end=True)
    services = [best, *more.pop("services", ())]
    return Tiny(run_dir, services=services, **{"max_epoch": 4, **more})


def train(tiny: Tiny, crash_at: int = 0, each: Any = lambda epoch: None, scale: float = 1.0) -> Tiny:
    """`each` is called in the tail of each epoch."""

    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=scale * OF_EPOCH[epoch])
        each(epoch)

    return tiny.train(inside=boom_at(crash_at), tail=tail)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "arrays": lambda folder: flip(folder / ARRAYS),
    "manifest": lambda folder: flip(folder / MANIFEST, 100),
    "short": lambda folder: os.truncate(folder / ARRAYS, 8),
    "another's": lambda folder: shutil.copytree(folder.parent / NEXT, folder, dirs_exist_ok=True),
    "missing": lambda folder: (folder / ARRAYS).unlink(),
}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_start_moves_it_away_and_the_run_finishes_with_the_next_best(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(Boom):
        train(best_run(run, keep=2), crash_at=15)
    second = np.zeros(3)
    everstep.load(run / "best" / "valid_loss" / NEXT, {"w": second})
    DAMAGES[kind](run / "best" / "valid_loss" / BEST)
    tiny = train(best_run(run, keep=2))
    (moved,) = (run / "damaged").iterdir()
    assert moved.name == f"best.valid_loss.{BEST}.segment-2"
    found, end = tiny.loop.ending.warnings
    assert f"best weights in valid_loss: checkpoint {BEST} is damaged" in found
    assert f"the folder is now {moved}" in found
    assert "restore_at_end loaded the next best weights by valid_loss (0.3, step 12); not" in end
    assert "; not those of 0.2, step 8" in end
    assert tiny.w.tobytes() == second.tobytes() and tiny.loop.ending.finished
    assert tiny.loop.best is not None and (tiny.loop.best.value, tiny.loop.best.path) == (0.2, None)
    again = train(best_run(run, keep=2))
    assert again.loop.ending.finished and again.w.tobytes() == second.tobytes()


def test_with_one_that_is_kept_the_last_weights_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    straight = Tiny(tmp_path / "straight", max_epoch=4).train()
    arrays = run / "best" / "valid_loss" / BEST / ARRAYS
    ends = train(best_run(run), each=lambda epoch: epoch == 4 and flip(arrays))
    (warning,) = ends.loop.ending.warnings
    assert "restore_at_end restored nothing: those of 0.2, step 8: checkpoint" in warning
    assert f"the folder is now {run / 'damaged'}" in warning and warning.endswith("the last weights stay")
    assert ends.loop.ending.finished and ends.w.tobytes() == straight.w.tobytes()
    for _ in range(2):
        again = train(best_run(run))
        assert again.seen == [] and again.w.tobytes() == straight.w.tobytes()
        assert "is gone; bring it back" in again.loop.ending.warnings[-1]


def test_verify_reads_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(best_run(run, keep=2))
    verify = ["checkpoints", str(run), "verify"]
    whole = CliRunner().invoke(commands, verify)
    assert whole.exit_code == 0 and f"best/valid_loss/{BEST}" in whole.stdout
    flip(run / "best" / "valid_loss" / BEST / ARRAYS)
    found = CliRunner().invoke(commands, [*verify, "--json"])
    assert found.exit_code == 1
    damaged = [one["name"] for one in json.loads(found.stdout) if one["verified"] == "damaged"]
    assert damaged == [f"best/valid_loss/{BEST}"]
    assert f"checkpoint {BEST} is damaged: " in CliRunner().invoke(commands, verify).stdout
    newest = CliRunner().invoke(commands, [*verify, "latest"])
    assert newest.exit_code == 0 and "best/" not in newest.stdout


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("copy", [True, False])
def test_what_the_disk_refused_is_said_and_named_by_no_later_checkpoint(tmp_path: Path, copy: bool) -> None:
    """The save of the best value fails, and the saves that follow do not."""
    saves = everstep.Checkpoints(everstep.Every(epochs=1), copy=copy)
    tiny = train(best_run(tmp_path, keep=2, services=[saves]), each=refuse_at)
    refused, lost, end = tiny.loop.ending.warnings
    assert "a save failed" in refused
    assert f"the weights of the best valid_loss in {BEST} are not kept" in lost
    assert "(0.3, step 12); not those of 0.2, step 8: they were not kept" in end
    assert tiny.loop.best is not None and (tiny.loop.best.value, tiny.loop.best.path) == (0.2, None)
    assert kept_in(tmp_path) == {"valid_loss": [NEXT]}


def kept_in(run_dir: Path) -> Any:
    """What the newest checkpoint says of best weights."""
    newest = sorted((run_dir / "checkpoints").iterdir(), key=lambda path: path.name[-8:])[-1]
    return json.loads((newest / MANIFEST).read_text())["body"]["meta"]["kept"]


def refuse_at(epoch: int) -> None:
    """Refuse the folder of the best weights, which is the first that a save makes."""
    everstep.hazard.arm("ENOSPC:checkpoint.mkdir:1" if epoch == 2 else None)


def test_what_the_disk_refused_is_not_named_by_the_checkpoint_of_an_interruption(tmp_path: Path) -> None:
    tiny = best_run(tmp_path, services=[everstep.Checkpoints(everstep.Every(epochs=1))])

    def each(epoch: int) -> None:
        refuse_at(epoch)
        if epoch == 3:  # the state that was kept after the steps is committed
            os.kill(os.getpid(), signal.SIGTERM)
            tiny.loop.collect_metrics(test_loss=1.0)

    with pytest.raises(Interrupted):
        train(tiny, each=each)
    assert kept_in(tmp_path) == {}
    assert any("in epoch-0002-step-00000008 are not kept" in told for told in tiny.loop.ending.warnings)


def test_what_an_earlier_timeline_kept_does_not_stand_for_what_the_disk_refused(tmp_path: Path) -> None:
    saves = everstep.Checkpoints(everstep.Every(epochs=1), keep_last=None)
    with pytest.raises(Boom):
        train(best_run(tmp_path, keep=2), crash_at=15)
    tiny = train(best_run(tmp_path, keep=2, services=[saves], resume=4), each=refuse_at, scale=0.5)
    assert kept_in(tmp_path) == {"valid_loss": [NEXT]}
    assert "(0.15, step 12); not those of 0.1, step 8" in tiny.loop.ending.warnings[-1]


def test_what_is_not_loaded_at_the_end_is_said(tmp_path: Path) -> None:
    """Weights of another value, and of another format, which stay where they are; the run finishes."""
    run = tmp_path / "run"
    train(best_run(run, keep=2))
    manifest = run / "best" / "valid_loss" / BEST / MANIFEST
    body = json.loads(manifest.read_bytes())["body"]
    changes = [({"meta": {**body["meta"], "value": 0.25}}, "has the weights of 0.25")]
    changes += [({"format": n}, f"has format version {n}") for n in (FORMAT - 1, FORMAT + 1)]
    for change, words in changes:
        manifest.write_bytes(pack_manifest({**body, **change}))
        again = train(best_run(run, keep=2))
        told = again.loop.ending.warnings[-1]
        assert "(0.3, step 12); not those of 0.2, step 8" in told and words in told
        assert again.loop.ending.finished and manifest.exists()


@pytest.mark.parametrize("every", [None, everstep.Every(epochs=1), everstep.Every(steps=50)])
def test_the_best_of_an_evaluation_every_few_steps_keeps_its_weights(tmp_path: Path, every: Any) -> None:
    """The value was kept and its weights were not: `Best` looked at an epoch's end alone."""
    scores = iter([0.5, 0.9])  # at steps 3 and 6, in epochs of four steps
    evaluator = lambda _: {"valid/acc": next(scores)}  # noqa: E731
    evaluate = everstep.Evaluate("valid", everstep.Every(steps=3), evaluator=evaluator)
    condition = everstep.services.OnBest("valid/acc")
    export = everstep.services.Export(condition, entry="w", every=every)
    saves = everstep.services.When(condition, everstep.Save(), every=every)
    services = [everstep.Best("valid/acc", every=every), export, saves, evaluate]
    Tiny(tmp_path / "run", max_epoch=2, services=services).train()
    best = everstep.runs.best(tmp_path / "run")["valid/acc"]
    assert (best.value, best.step) == (0.9, 6) and best.path is not None
    assert everstep.checkpoint.read_manifest(Path(best.path))["step"] == 6
    exports = sorted(path.name for path in (tmp_path / "run" / "exports" / "export").iterdir())
    assert exports == ["step-00000003", "step-00000006"]
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").exists()


def test_the_best_that_runs_tell_is_the_services_own_value(tmp_path: Path) -> None:
    """It may be in no row (a mean of some steps), or in none of an epoch (an evaluation inside it)."""
    scores = [2.0, 9.0, 7.0, 7.0, 1.0, 1.0, 5.0, 5.0]

    def supervise(max_step: int, *services: everstep.Service) -> None:
        sv = everstep.Supervisor(tmp_path / "sv", {"w": np.zeros(1)}, max_step=max_step, services=services)
        supervised(sv, lambda sv: {"score/x": scores[sv.step]})

    def found(metric: str, run: str) -> tuple[Any, list[Any]]:
        (row,) = everstep.query("runs", {"name": run, f"best/{metric}": {"$gt": 0}}, index=tmp_path)
        (row,) = everstep.query("runs", {"name": run}, fields=[f"best/{metric}"], index=tmp_path)
        metrics = everstep.runs.show(tmp_path / run).metrics
        rows = [(one["phase"], one["best"], one["best_step"]) for one in metrics if one["name"] == metric]
        return row[f"best/{metric}"], rows

    two = everstep.Every(steps=2)
    supervise(6, everstep.Best("score/x", "max", every=two))
    assert found("score/x", "sv") == (7.0, [("step", 7.0, 4)])  # (7 + 7) / 2
    supervise(7, everstep.Best("score/x", "max", every=two))  # a start that finds no better one
    assert found("score/x", "sv") == (7.0, [("step", 7.0, 4)])

    def evaluate(loop: everstep.TrainLoop, step: int) -> None:
        if step % 2 == 0:
            with loop.evaluation():
                loop.collect_metrics(score=float(step))

    Tiny(tmp_path / "loop", max_epoch=2, services=[everstep.Best("score", "max", every=two)]).train(evaluate)
    assert found("score", "loop") == (8.0, [("epoch", None, None), ("step", 8.0, 8)])
    assert live_state(Database(tmp_path / "everstep.db"), tmp_path / "loop")["metrics"][-1]["best"] == 8.0
    compared = everstep.runs.compare("loop", "sv", index=tmp_path)
    assert [*compared.metrics["step/score/x best"].values()] == [None, 7.0]
    supervise(8)  # without the service: what an earlier start kept is not the run's best any more
    with pytest.raises(ConfigError, match=r"best/score/x': 'score/x' was measured inside steps alone"):
        found("score/x", "sv")
    with pytest.raises(ConfigError, match=r"no run has 'best/scor'") as unknown:
        found("scor", "sv")
    listed = str(unknown.value).partition("known: ")[2]
    assert listed.startswith("best/score, ") and listed.count(",") == 9 and " more" in listed
