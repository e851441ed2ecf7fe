"""How a run begins or goes on: initialise or recover, seeds, warm starts, choosing a checkpoint, the lock."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every, Supervisor
from everstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NoCheckpointError,
    RestoreError,
    RunDirError,
    StateError,
    UsageError,
)
from everstep.testing import armed, nothing_left
from tiny_runs import Boom, Tiny, boom_at, supervised


def stepwise(run_dir: Path, **arguments: Any) -> Tiny:
    services = [everstep.Checkpoints(Every(steps=1), keep_last=None)]
    return Tiny(run_dir, services=services, **{"max_epoch": 2, **arguments})


def crashed(run_dir: Path, at: int = 6, **arguments: Any) -> Tiny:
    tiny = stepwise(run_dir, **arguments)
    with pytest.raises(Boom):
        tiny.train(inside=boom_at(at))
    return tiny


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# ---------------------------------------------------------------------------- initialise or recover


def test_objects_are_restored_in_the_order_of_the_state(tmp_path: Path) -> None:
    """An average may copy its model when it is loaded, and an optimizer the parameters."""
    loaded: list[str] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, int]:
            return {"of": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            loaded.append(self.name)

    names = ["model", "average", "optimizer"]  # neither sorted, nor sorted backwards
    for max_step in (2, 4):
        loaded.clear()
        supervised(Supervisor(tmp_path, {name: Noting(name) for name in names}, max_step=max_step))
    assert loaded
    assert loaded == names * (len(loaded) // 3)


def test_init_fn_only_when_there_is_nothing_to_recover_local_init_fn_always(tmp_path: Path) -> None:
    calls: list[str] = []
    hooks: dict[str, Any] = {
        "init_fn": lambda: calls.append("init"),
        "local_init_fn": lambda: calls.append("local"),
        "ready": lambda: calls.append("ready"),
    }
    crashed(tmp_path / "run", **hooks)
    assert calls == ["init", "ready", "local", "ready"]
    for _ in range(2):
        calls.clear()
        stepwise(tmp_path / "run", **hooks).train()
        assert calls == ["ready", "local", "ready"]


def test_init_fn_sees_the_seed_applied_and_its_values_are_trained_from(tmp_path: Path) -> None:
    def start(name: str) -> Tiny:
        tiny = stepwise(tmp_path / name, init_fn=lambda: tiny.w.__setitem__(slice(None), np.random.rand(3)))
        return tiny

    one, two = start("one").train(), start("two").train()
    assert one.result() == two.result()
    assert one.w.tobytes() != stepwise(tmp_path / "plain").train().w.tobytes()


# ------------------------------------------------------------------------------------------- seeds


def test_a_given_seed_seeds_the_global_generators(tmp_path: Path) -> None:
    def draw(name: str, seed: int | None) -> tuple[float, float, float, int]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        with Tiny(tmp_path / name, seed=seed, max_epoch=1).loop as loop:
            next(loop.iter_epochs())
            return random.random(), float(np.random.rand()), float(torch.rand(())), loop.seed

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    untouched = (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert draw("a", 11) == draw("b", 11) != draw("c", 12)
    assert draw("d", None)[:3] == untouched


def test_a_drawn_seed_is_recorded_and_kept(tmp_path: Path) -> None:
    def order(name: str) -> tuple[int, list[Any]]:
        tiny = Tiny(tmp_path / name, seed=None, max_epoch=1).train()
        return tiny.loop.seed, [ids for _, _, ids in tiny.seen]

    drawn = {order(f"run{i}")[0] for i in range(4)}
    assert len(drawn) == 4
    first = crashed(tmp_path / "run", seed=None)
    again = stepwise(tmp_path / "run", seed=None).train()
    assert again.loop.seed == first.loop.seed
    assert [s for _, s, _ in again.seen] == [6, 7, 8]


def test_a_seed_that_differs_must_be_chosen(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"seed: stored 7, given 8.*on_change=\"override\""):
        stepwise(tmp_path / "run", seed=8).train()
    assert stepwise(tmp_path / "run", seed=None).train().loop.seed == 7
    tiny = stepwise(tmp_path / "run", seed=8, on_change="override", max_epoch=3).train()
    assert tiny.loop.seed == 8 and tiny.loop.epoch == 3
    assert any("seed: stored 7, given 8" in line for line in tiny.lines)


# --------------------------------------------------------------------------- choosing a checkpoint


def test_resume_from_a_step_a_name_or_a_path(tmp_path: Path) -> None:
    straight = stepwise(tmp_path / "straight").train()
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    for which in (3, str(path), 0, "epoch-0001-step-00000004"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        crashed(tmp_path / "run")
        tiny = stepwise(tmp_path / "run", resume=which).train()
        first = {0: 1, "epoch-0001-step-00000004": 5}.get(which, 4)  # type: ignore[call-overload]
        assert tiny.seen[0][1] == first, which
        assert tiny.result() == straight.result(), which


def test_resume_false_starts_over_and_loses_nothing(tmp_path: Path) -> None:
    straight = stepwise(tmp_path / "straight").train()
    crashed(tmp_path / "run")
    tiny = stepwise(tmp_path / "run", resume=False).train()
    assert tiny.seen[0][1] == 1 and not tiny.loop.resumed
    assert any("starts over" in line for line in tiny.lines)
    assert tiny.result() == straight.result()
    assert any(p.name.startswith("step-00000005") for p in (tmp_path / "run" / "superseded").iterdir())


def test_resume_in_an_empty_directory_just_starts(tmp_path: Path) -> None:
    assert Tiny(tmp_path / "run", resume=False, max_epoch=1).train().loop.step == 4
    assert Tiny(tmp_path / "other", resume=True, max_epoch=1).train().loop.step == 4
    with pytest.raises(NoCheckpointError, match="there is no checkpoint at all"):
        Tiny(tmp_path / "third", resume=3, max_epoch=1).train()


def older(run_dir: Path, which: str) -> Any:
    """What a program gives as resume=: step 2, of the run or of another run."""
    paths = {"another run's": run_dir.parent / "other", "a path": run_dir}
    name = "step-00000002"
    return {"a step": 2, "a name": name}.get(which) or paths[which] / "checkpoints" / name


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("which", "keep_last"), [("another run's", 2), ("a step", None), ("a name", None), ("a path", 2)]
)
def test_a_program_that_goes_back_is_killed_and_continues(
    tmp_path: Path, which: str, keep_last: int | None
) -> None:
    run, whole = tmp_path / "run", stepwise(tmp_path / "whole").train()

    def again(at: int) -> tuple[int, str]:
        services = [everstep.Checkpoints(Every(steps=1), keep_last=keep_last)]
        tiny = Tiny(run, services=services, max_epoch=2, resume=older(run, which))
        with contextlib.suppress(Boom):
            tiny.train(inside=boom_at(at))
        return tiny.seen[0][1] if tiny.seen else 0, "\n".join(tiny.lines)

    crashed(run)
    crashed(tmp_path / "other")
    assert again(3)[0] == 0  # nothing was saved: it goes back once more
    assert again(6)[0] == 3
    first, said = again(7)
    assert first == 6 and "followed before" in said
    assert (run / "checkpoints" / "step-00000002").exists() is (keep_last is None)
    first, said = again(99)
    assert first == 7 and "not verified: steps" not in said
    assert again(99)[0] == 0  # it is finished
    last = stepwise(run)
    last.train()
    assert last.w.tobytes() == whole.w.tobytes() and last.loop.ending.digest == whole.loop.ending.digest


def test_a_person_can_go_back_again(tmp_path: Path) -> None:
    crashed(tmp_path)
    assert crashed(tmp_path, resume=2).seen[0][1] == 3
    (tmp_path / "checkpoint").write_text("step-00000002\n")
    assert crashed(tmp_path, resume=2).seen[0][1] == 3
    crashed(tmp_path, at=7)  # another line of the program
    assert crashed(tmp_path, resume=2).seen[0][1] == 3


def kept(run_dir: Path) -> dict[str, bytes]:
    """The files of the checkpoints, those set aside included."""
    folders = ("checkpoint", "checkpoints", "superseded", "damaged", "best")
    paths = (path for folder in folders for path in run_dir.glob(f"{folder}/**/*"))
    files = [run_dir / "checkpoint", *paths]
    return {str(path): path.read_bytes() for path in files if path.is_file()}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("which", ["older", "another run's", "edited", "another run's of the same name"])
def test_a_resume_that_the_data_refuses_moves_nothing(tmp_path: Path, which: str) -> None:
    run, other, at = tmp_path / "run", tmp_path / "other", 5 if which.endswith("name") else 2
    whole = stepwise(tmp_path / "whole").train().result()
    crashed(run)
    crashed(other, seed=8)
    resume: Any = "step-00000002" if which == "older" else other / "checkpoints" / f"step-{at:08}"
    if which == "edited":
        resume = (run / "checkpoint").write_text("step-00000002\n") > 0
    before = kept(run)
    with pytest.raises(DataError, match="length was"):
        stepwise(run, samples=10, resume=resume, seed=None).train()
    assert kept(run) == before
    if which != "edited":
        again = stepwise(run).train()
        assert again.seen[0][1] == 6 and again.result() == whole


def test_a_start_over_that_is_refused_moves_nothing(tmp_path: Path) -> None:
    crashed(tmp_path)
    before = kept(tmp_path)
    with pytest.raises(UsageError, match="not ready"):
        stepwise(tmp_path, resume=False, ready=lambda: "not ready").train()
    assert kept(tmp_path) == before


def test_a_finished_checkpoint_that_is_chosen_sets_the_later_ones_aside(tmp_path: Path) -> None:
    stepwise(tmp_path, max_epoch=1).train()
    stepwise(tmp_path).train()
    last = "epoch-0001-step-00000004"
    assert stepwise(tmp_path, max_epoch=1, resume=last).train().seen == []
    assert checkpoints(tmp_path)[-1].startswith("step-00000003") and last in checkpoints(tmp_path)
    assert stepwise(tmp_path, max_epoch=1).train().loop.ending.resumed_from == last


# ------------------------------------------------------------------------------ what does not fit


def test_a_checkpoint_of_another_state_is_refused_with_the_three_lists(tmp_path: Path) -> None:
    crashed(tmp_path)
    before, w = checkpoints(tmp_path), np.ones(4)
    with pytest.raises(RestoreError, match=r"missing in the checkpoint \(1\): v") as raised:
        stepwise(tmp_path, state={"w": w, "v": np.zeros(3)}).train()
    assert raised.value.unexpected == ("momentum",)
    assert raised.value.reshaped == ("w/float64 (3,) -> float64 (4,)",)
    assert w.tolist() == [1] * 4 and checkpoints(tmp_path) == before
    assert stepwise(tmp_path).train().seen[0][1] == 6


# -------------------------------------------------------------------------- the disk, and the state


def test_a_run_directory_that_is_gone_while_training(tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    tiny = Tiny(tmp_path / "run", max_epoch=1)
    message = r"run directory is gone: bring back .*/run'; do so and start again"
    with nothing_left(), pytest.raises(CheckpointError, match=message):
        tiny.train(inside=lambda loop, step: (tmp_path / "run").rename(moved) if step == 2 else None)
    assert any("a save failed" in line and "run directory is gone" in line for line in tiny.lines)
    moved.rename(tmp_path / "run")
    again, straight = Tiny(tmp_path / "run", max_epoch=1), Tiny(tmp_path / "straight", max_epoch=1)
    assert again.train().result()[:2] == straight.train().result()[:2]


def test_without_room_for_two_checkpoints_no_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    tiny = Tiny(tmp_path / "run", max_epoch=1, state={"w": np.zeros(100_000)})
    with nothing_left(), pytest.raises(RunDirError, match=r"need [\d,]+ bytes, [\d,]+ are free.*free space"):
        tiny.train()
    assert tiny.seen == []


def test_a_trial_save_that_fails_refuses_at_the_first_step(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=3)
    with nothing_left(), armed("ENOSPC:checkpoint.rename:1-1000"):
        with pytest.raises((CheckpointError, RunDirError), match=r"free space|space left"):
            tiny.train()
    assert len(tiny.seen) <= 1
    assert Tiny(tmp_path / "run", max_epoch=3).train().loop.ending.finished


def test_a_last_save_that_fails_is_an_error_and_the_run_goes_on_from_before(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=3).train()
    with (
        armed("ENOSPC:checkpoint.rename:4-1000"),
        pytest.raises(CheckpointError, match="free space and start"),
    ):
        Tiny(tmp_path / "run", max_epoch=3).train()
    again = Tiny(tmp_path / "run", max_epoch=3).train()
    assert 0 < len(again.seen) < 12
    assert again.result() == straight.result()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_journal_that_is_lost_is_said_and_the_run_goes_on(tmp_path: Path, damage: Any) -> None:
    crashed(tmp_path)
    damage(tmp_path / "journal" / "segment-0001.evj")
    resumed = Tiny(tmp_path, max_epoch=2).train()
    (said,) = [line for line in resumed.lines if "metrics that were recorded before" in line]
    assert "segment-0001.evj" in said and "the state is whole" in said
    assert resumed.loop.ending.finished


def test_something_unsaveable_that_appears_later_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    notes: dict[str, Any] = {"a": 1}

    def inside(loop: Any, step: int) -> None:
        if step == 6:
            notes["b"] = object()

    with nothing_left(), pytest.raises(StateError, match=r"notes.*b"):
        Tiny(tmp_path / "run", max_epoch=2, state={"notes": notes}).train(inside=inside)
    notes = {"a": 0}
    tiny = Tiny(tmp_path / "run", max_epoch=2, state={"notes": notes}).train()
    assert tiny.seen[0][1] == 5 and notes == {"a": 1}
