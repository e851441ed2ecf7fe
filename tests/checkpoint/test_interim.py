"""What is saved one step before an epoch's end, for its tail, goes when the epoch's own is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import at, commit, store_in
from click.testing import CliRunner

import everstep
from everstep import Every
from everstep.checkpoint import find_checkpoint
from everstep.cli.group import commands
from everstep.proof.compare import compare_runs
from everstep.trainer.evaluations import CheckpointFollower
from tiny_runs import Boom, Tiny, boom_at

THREE_AN_EPOCH: dict[str, Any] = {"samples": 6, "max_epoch": 3}


def tiny(run_dir: Path, keep_last: int | None = None, every: Any = None, **more: Any) -> Tiny:
    saves = everstep.Checkpoints(every or Every(steps=3), keep_last=keep_last)
    return Tiny(run_dir, services=[saves], **{**THREE_AN_EPOCH, **more})


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def asked(*command: str | Path) -> Any:
    done = CliRunner().invoke(commands, [*map(str, command), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


OWN = [f"epoch-000{n}-step-0000000{3 * n}" for n in range(4)]


def test_only_the_steps_that_were_asked_for_have_checkpoints(tmp_path: Path) -> None:
    told: list[str] = []
    run = tiny(tmp_path)
    run.loop.on("AFTER_CHECKPOINT", lambda boundary: told.append(boundary.payload))
    run.train()
    assert names(tmp_path) == OWN and told == OWN[: len(told)]
    kept = tiny(tmp_path / "kept", keep_last=3).train()
    assert names(kept.run_dir) == OWN[1:]


def test_it_is_there_in_the_tail_and_neither_listed_nor_watched_nor_exported(tmp_path: Path) -> None:
    seen: list[tuple[list[str], ...]] = []

    def look(loop: Any, epoch: int) -> None:
        if epoch == 3:
            loop._engine.saver._writer.wait_idle()
            listed = [one["name"] for one in asked("checkpoints", tmp_path)]
            shown = [one["name"] for one in asked("show", tmp_path)["checkpoints"]]
            watched = CheckpointFollower(tmp_path, "each", 0, 0.0)._committed()
            export = ["export", tmp_path, "--entry", "w", "--out", tmp_path / "out"]
            CliRunner().invoke(commands, [*map(str, export)])
            exported = json.loads((tmp_path / "out" / "export.json").read_text())["checkpoint"]
            seen.append((names(tmp_path), listed, shown, [name for name, _ in watched], [exported]))

    tiny(tmp_path).train(tail=look)
    assert seen == [([*OWN[:3], "step-00000008"], OWN[:3], OWN[:3], OWN[:3], OWN[2:3])]


def test_killed_in_the_tail_the_run_goes_on_from_it(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        tiny(tmp_path / "run").train(tail=boom_at(2))
    listed = CliRunner().invoke(commands, ["checkpoints", str(tmp_path / "run")])
    assert "step-00000005 " not in listed.stdout
    assert "step-00000005" in [one["name"] for one in asked("checkpoints", tmp_path / "run", "verify")]
    assert tiny(tmp_path / "run").train().loop.ending.resumed_from == "step-00000005"
    assert names(tmp_path / "run") == OWN
    tiny(tmp_path / "straight").train()
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []


def test_where_a_limit_cut_the_epoch_short_it_stays_for_a_raised_one(tmp_path: Path) -> None:
    for keep_last in (None, 1):
        run_dir = tmp_path / str(keep_last)
        tiny(run_dir, keep_last, max_step=5).train()
        assert names(run_dir)[-1:] == ["step-00000004"]
        assert "step-00000004" not in [one["name"] for one in asked("checkpoints", run_dir)]
        tiny(run_dir, keep_last).train()
        assert "step-00000004" not in names(run_dir)
        tiny(tmp_path / "straight" / str(keep_last)).train()
        assert compare_runs(tmp_path / "straight" / str(keep_last), run_dir) == []


def test_an_interruption_asks_for_its_checkpoint_wherever_it_comes(tmp_path: Path) -> None:
    enough = everstep.services.Interrupt("enough", 3)
    with pytest.raises(everstep.errors.Interrupted):
        tiny(tmp_path).train(inside=lambda loop, step: step == 6 and loop.call_soon(enough))
    assert [one["name"] for one in asked("checkpoints", tmp_path)][-1:] == ["step-00000005"]


def test_one_that_a_kill_leaves_behind_goes_at_the_next_start_also_of_a_finished_run(tmp_path: Path) -> None:
    run, aside = tmp_path / "run", tmp_path / "aside"
    with pytest.raises(Boom):
        tiny(run, max_epoch=1).train(tail=boom_at(1))
    shutil.copytree(run / "checkpoints" / "step-00000002", aside)
    tiny(run, max_epoch=1).train()
    aside.rename(run / "checkpoints" / "step-00000002")
    assert tiny(run, max_epoch=1).train().seen == [] and names(run) == OWN[:2]


def test_latest_is_one_that_was_asked_for(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    commit(store, at(3))
    commit(store, at(5), meta={"interim": True})
    assert store.newest() == at(3)
    found, asked_for = store.find(True)[0], find_checkpoint(tmp_path, print, interim=False)
    assert found is not None and found.step == 5
    assert asked_for is not None and asked_for.step == 3
