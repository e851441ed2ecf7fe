"""How a run begins or goes on, and a loop of one's own under a Supervisor: calls, streams, threads, end."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every, Supervisor, errors
from everstep.data import arrays
from everstep.data.cursor import CursorWrapper, StreamWrapper
from everstep.errors import CheckpointError, ConfigError, DataError, NoCheckpointError, RestoreError
from everstep.supervisor.threads.signals import SignalWatch
from everstep.testing import armed, nothing_left
from tiny_runs import Boom, Tiny, boom_at, events, quiet, rows, supervised
from waiting import PATIENCE


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
        name: partial(calls.append, name) for name in ("init_fn", "local_init_fn", "ready")
    }
    crashed(tmp_path / "run", **hooks)
    assert calls == ["init_fn", "ready", "local_init_fn", "ready"]
    for _ in range(2):
        calls.clear()
        stepwise(tmp_path / "run", **hooks).train()
        assert calls == ["ready", "local_init_fn", "ready"]


def test_init_fn_sees_the_seed_applied_and_its_values_are_trained_from(tmp_path: Path) -> None:
    def start(name: str) -> Tiny:
        tiny = stepwise(tmp_path / name, init_fn=lambda: tiny.w.__setitem__(slice(None), np.random.rand(3)))
        return tiny

    one, two = start("one").train(), start("two").train()
    assert one.result() == two.result()
    assert one.w.tobytes() != stepwise(tmp_path / "plain").train().w.tobytes()


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
@pytest.mark.parametrize("which", ["another run's", "a step", "a name", "a path"])
def test_a_program_that_goes_back_is_killed_and_continues(tmp_path: Path, which: str) -> None:
    keep_last = None if which in ("a step", "a name") else 2
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
    with pytest.raises(errors.UsageError, match="not ready"):
        stepwise(tmp_path, resume=False, ready=lambda: "not ready").train()
    assert kept(tmp_path) == before


def test_a_finished_checkpoint_that_is_chosen_sets_the_later_ones_aside(tmp_path: Path) -> None:
    stepwise(tmp_path, max_epoch=1).train()
    stepwise(tmp_path).train()
    last = "epoch-0001-step-00000004"
    assert stepwise(tmp_path, max_epoch=1, resume=last).train().seen == []
    assert checkpoints(tmp_path)[-1].startswith("step-00000003") and last in checkpoints(tmp_path)
    assert stepwise(tmp_path, max_epoch=1).train().loop.ending.resumed_from == last


def test_a_checkpoint_of_another_state_is_refused_with_the_three_lists(tmp_path: Path) -> None:
    crashed(tmp_path)
    before, w = checkpoints(tmp_path), np.ones(4)
    with pytest.raises(RestoreError, match=r"missing in the checkpoint \(1\): v") as raised:
        stepwise(tmp_path, state={"w": w, "v": np.zeros(3)}).train()
    assert raised.value.unexpected == ("momentum",)
    assert raised.value.reshaped == ("w/float64 (3,) -> float64 (4,)",)
    assert w.tolist() == [1] * 4 and checkpoints(tmp_path) == before
    others = {"w": np.zeros(3), "momentum": np.zeros(3), "bag": [1]}
    Tiny(tmp_path / "other", max_epoch=1, also={"bag": {"n": 1}}).train()
    with pytest.raises(RestoreError, match="make the program as it was") as raised:
        Tiny(tmp_path / "other", max_epoch=2, state=others).train()
    assert raised.value.reshaped == ("bag/a dict -> a list",) and others["bag"] == [1]
    assert stepwise(tmp_path).train().seen[0][1] == 6


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


def test_without_room_for_two_saves_no_training_begins(tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    tiny = Tiny(tmp_path / "run", max_epoch=1, state={"w": np.zeros(100_000)})
    with (
        nothing_left(),
        pytest.raises(errors.RunDirError, match=r"need [\d,]+ bytes, [\d,]+ are free.*free space"),
    ):
        tiny.train()
    assert tiny.seen == []


def test_a_trial_save_that_fails_refuses_at_the_first_step(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=3)
    with nothing_left(), armed("ENOSPC:checkpoint.rename:1-1000"):
        with pytest.raises((CheckpointError, errors.RunDirError), match=r"free space|space left"):
            tiny.train()
    assert len(tiny.seen) <= 1
    assert Tiny(tmp_path / "run", max_epoch=3).train().loop.ending.finished


def test_a_last_save_that_fails_is_an_error_and_the_run_goes_on_from_before(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=3).train()
    with armed("ENOSPC:checkpoint.rename:4-1000"), pytest.raises(CheckpointError, match="space and start"):
        Tiny(tmp_path / "run", max_epoch=3).train()
    again = Tiny(tmp_path / "run", max_epoch=3).train()
    assert 0 < len(again.seen) < 12
    assert again.result() == straight.result()


def test_an_end_that_cannot_be_recorded_is_an_error_and_no_step_is_lost(tmp_path: Path) -> None:
    told = r"could not be recorded.*no step"
    with armed("EIO:journal.fsync:3-99"), pytest.raises(CheckpointError, match=told):
        Tiny(tmp_path, max_epoch=1).train()
    again = Tiny(tmp_path, max_epoch=1).train()
    assert again.seen == [] and again.loop.ending.finished


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

    with nothing_left(), pytest.raises(errors.StateError, match=r"notes.*b"):
        Tiny(tmp_path / "run", max_epoch=2, state={"notes": notes}).train(inside=inside)
    notes = {"a": 0}
    tiny = Tiny(tmp_path / "run", max_epoch=2, state={"notes": notes}).train()
    assert tiny.seen[0][1] == 5 and notes == {"a": 1}


Hook = Callable[[Supervisor, int], object]


class Walk:
    """A Supervisor program with a stream, noise and momentum; call `run` once."""

    def __init__(self, run_dir: Path, *, passes: int | None = None, **arguments: Any) -> None:
        self.run_dir, self.passes = run_dir, passes
        self.w, self.momentum = np.zeros(3), np.zeros(3)
        self.data = everstep.data.arrays(np.arange(10), batch_size=2, shuffle=True)
        self.seen: list[tuple[int, ...]] = []
        self.lines: list[str] = []
        arguments = {"seed": 3, "state": {"w": self.w, "momentum": self.momentum}, **arguments}
        services = [*arguments.pop("services", ()), everstep.services.Console(sink=self.lines.append)]
        self.sv = Supervisor(run_dir, services=services, **arguments)

    def run(self, inside: Hook = lambda sv, step: None, leave: int = 0) -> Walk:
        """`inside` is called in each step before its end; the loop is left by `break` after step `leave`."""
        with self.sv as sv:
            batches = sv.stream(self.data, passes=self.passes)
            while not sv.should_stop():
                (ids,) = next(batches)
                gradient = self.w - ids.mean() + np.random.standard_normal(3)
                self.momentum[:] = 0.9 * self.momentum + gradient
                self.w -= 0.1 * self.momentum
                inside(sv, sv.step + 1)
                sv.advance(loss=float(gradient @ gradient))
                self.seen.append(tuple(int(i) for i in ids))
                if sv.step == leave:
                    break
        return self

    def result(self) -> Any:
        return self.w.tobytes(), self.sv.ending.digest, rows(self.run_dir)


def test_a_loop_of_ones_own_stops_at_the_exact_step_and_saves_the_last(tmp_path: Path) -> None:
    walk = Walk(tmp_path / "run", max_step=12).run()
    ending = walk.sv.ending
    assert (ending.step, ending.finished, ending.reason) == (12, True, "max_step 12 is reached")
    assert (tmp_path / "run" / "checkpoints" / "step-00000012").is_dir()
    assert [r[1] for r in rows(tmp_path / "run", "step")] == list(range(1, 13))
    again = Walk(tmp_path / "run", max_step=12).run()
    assert again.seen == [] and again.w.tobytes() == walk.w.tobytes()


def test_a_step_after_the_stop_is_refused(tmp_path: Path) -> None:
    sv = quiet(tmp_path / "run", max_step=3)

    def never_asks() -> None:
        with sv:
            sv.should_stop()
            for _ in range(10):
                sv.advance()

    with pytest.raises(errors.UsageError, match=r"max_step 3 is reached.*while not sv.should_stop\(\)"):
        never_asks()
    assert sv.ending.step == 3
    with quiet(tmp_path / "run", max_step=3) as again:
        assert again.should_stop()
        with pytest.raises(errors.UsageError, match="max_step 3 is reached"):
            again.advance()


def test_a_loop_without_a_stream_is_warned_once_unless_it_says_so(tmp_path: Path) -> None:
    for silent in (False, True):
        sv = quiet(tmp_path / str(silent), max_step=3)
        if silent:
            supervised(sv)
        else:
            with sv:
                while not sv.should_stop():
                    sv.advance()
        said = [text for text in sv.ending.warnings if "no stream is registered" in text]
        assert sv.ending.step == 3 and len(sv.ending.warnings) == len(said) == (not silent)
        assert silent or ("sv.stream(data)" in said[0] and "sv.stream(None)" in said[0])


def test_steps_without_batches_and_values_are_compared_by_their_updates(tmp_path: Path) -> None:
    def start(crash: int = 0, rate: float = 0.1) -> int | None:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        services = [everstep.Checkpoints(Every(steps=4))]
        state = {"model": model, "optimizer": optimizer}

        def step(sv: Supervisor) -> None:
            boom_at(crash)(sv, sv.step + 1)
            (rate * model(torch.ones(1, 2))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        sv = supervised(Supervisor(tmp_path, state, max_step=9, services=services), step)
        return sv.ending.diverged  # type: ignore[no-any-return]

    with pytest.raises(Boom):
        start(8)
    with pytest.raises(Boom):
        start(8)
    assert [each["report"] for each in events(tmp_path, "verified")] == [
        "resume verified: 3 steps executed again: 3 state digests equal"
    ]
    assert start(rate=0.2) == 5


def test_a_loop_left_by_break_saves_its_last_step(tmp_path: Path) -> None:
    def start(name: str, leave: int = 0) -> Walk:
        never = [everstep.Checkpoints(everstep.Never())]
        return Walk(tmp_path / name, max_step=9, services=never).run(leave=leave)

    straight = start("straight")
    assert not start("run", leave=5).sv.ending.finished
    again = start("run")
    assert again.sv.ending.resumed_from == "step-00000005"
    assert again.result() == straight.result()


def test_a_batch_without_its_advance_is_not_part_of_the_last_save(tmp_path: Path) -> None:
    walk = Walk(tmp_path / "run", max_step=9)
    with walk.sv as sv:
        batches = sv.stream(walk.data)
        for _ in range(3):
            sv.should_stop()
            next(batches)
            sv.advance()
        next(batches)
    assert any("its step not completed by advance()" in w for w in walk.sv.ending.warnings)


def test_passes_end_the_loop_cleanly(tmp_path: Path) -> None:
    walk = Walk(tmp_path / "run", passes=2).run()
    ending = walk.sv.ending
    assert (ending.step, ending.finished, ending.reason) == (10, True, "stream 'train' ended after 2 passes")
    assert sorted(i for ids in walk.seen[:5] for i in ids) == list(range(10))
    assert sorted(i for ids in walk.seen[5:] for i in ids) == list(range(10))
    assert walk.seen[:5] != walk.seen[5:]
    again = Walk(tmp_path / "run", passes=2).run()
    assert again.seen == [] and again.sv.ending.finished
    with quiet(tmp_path / "next") as sv:
        batches = sv.stream([1, 2], passes=1)
        while True:  # the StopIteration leaves the block, as clean an end as that of should_stop()
            sv.should_stop()
            next(batches)
            sv.advance()
    assert (sv.ending.finished, sv.ending.reason) == (True, "stream 'train' ended after 1 pass")


def test_more_passes_continue_a_run_that_used_its_up(tmp_path: Path) -> None:
    straight = Walk(tmp_path / "straight", passes=3).run()
    Walk(tmp_path / "run", passes=2).run()
    walk = Walk(tmp_path / "run", passes=3).run()
    assert walk.seen == straight.seen[10:]
    assert walk.result() == straight.result()


def test_a_stream_that_the_program_forgot_on_resume(tmp_path: Path) -> None:
    Walk(tmp_path / "run", max_step=3).run()
    with quiet(tmp_path / "run", max_step=5, seed=3, state={"w": np.zeros(3), "momentum": np.zeros(3)}) as sv:
        sv.stream(everstep.data.arrays(np.arange(10), batch_size=2, shuffle=True), "training")
        with pytest.raises(errors.UsageError, match=r"stream 'train'.*did you mean 'training'"):
            sv.should_stop()


def test_a_periodic_function_runs_at_once_and_again_until_the_end(tmp_path: Path) -> None:
    calls: list[str] = []
    twice = threading.Event()

    def beat() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) >= 2:
            twice.set()

    with nothing_left():
        walk = Walk(tmp_path / "run", max_step=2)
        with walk.sv as sv:
            sv.loop(0.001, beat)
            assert twice.wait(PATIENCE)
    assert all("beat" in name for name in calls)


def test_a_failing_periodic_function_ends_the_training_with_its_own_traceback(tmp_path: Path) -> None:
    failed = threading.Event()

    def breaks_here() -> None:
        failed.set()
        raise Boom("in the background")

    walk = Walk(tmp_path / "run", max_step=100_000)

    def inside(sv: Supervisor, step: int) -> None:
        if step == 3:
            sv.loop(60, breaks_here)
            assert failed.wait(PATIENCE)

    with nothing_left(), pytest.raises(Boom, match="in the background") as raised:
        walk.run(inside)
    assert "breaks_here" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert not walk.sv.ending.finished and 3 <= walk.sv.ending.step < 100_000


def test_an_error_in_a_thread_of_ones_own(tmp_path: Path) -> None:
    walk = Walk(tmp_path / "run", max_step=100_000)

    def work(sv: Supervisor) -> None:
        with sv.stop_on_exception():
            raise Boom("elsewhere")

    def inside(sv: Supervisor, step: int) -> None:
        if step == 2:
            thread = threading.Thread(target=work, args=(sv,))
            thread.start()
            thread.join()

    with pytest.raises(Boom, match="elsewhere"):
        walk.run(inside)
    assert walk.sv.ending.step == 2


def test_a_supervisor_in_another_thread_installs_no_handlers(tmp_path: Path) -> None:
    results: list[Walk] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=lambda: results.append(Walk(tmp_path / "run", max_step=2).run()))
    thread.start()
    thread.join()
    assert results[0].sv.ending.finished
    assert before == {n: signal.getsignal(n) for n in before}


def test_ctrl_c_at_a_prompt_keeps_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    walk = Walk(tmp_path / "run", max_step=8)
    with nothing_left(), pytest.raises(KeyboardInterrupt, match="SIGINT"):
        walk.run(lambda sv, step: os.kill(os.getpid(), signal.SIGINT) if step == 4 else None)
    assert not walk.sv.ending.finished and "SIGINT" in walk.sv.ending.reason
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


STEPS = 12


class Struck(CursorWrapper):
    """Numbers; the fetch of one of them fails, and the signal that is to blame comes with the error."""

    fetch_error_may_be_signal = True
    at, number = -1, None

    def __next__(self) -> Any:
        if self.position()["batches"] == self.at:
            if self.number is not None:
                os.kill(os.getpid(), self.number)
            raise DataError("a worker died")
        return next(self.cursor)


class Struckable(StreamWrapper):
    def __init__(self, at: int = -1, number: int | None = None) -> None:
        super().__init__(arrays(np.arange(STEPS), batch_size=1))
        self.at, self.number = at, number

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Struck:
        cursor = Struck(self.stream.open(purpose, pass_index, position, seed=seed))
        cursor.at, cursor.number = self.at, self.number
        return cursor


def train(run_dir: Path, door: str, stream: Struckable) -> tuple[list[float], Any]:
    w = np.zeros(1)
    services = [everstep.Checkpoints(Every(steps=4)), everstep.services.Console(sink=lambda line: None)]
    arguments: dict[str, Any] = {"state": {"w": w}, "services": services, "seed": 1}
    if door == "loop":
        with everstep.TrainLoop(run_dir, max_epoch=1, **arguments) as loop:
            for _ in loop.iter_epochs():
                for _, (x,) in loop.iter_steps(stream):
                    w += x[0] * np.random.random()
        return w.tolist(), loop.ending.digest
    with everstep.Supervisor(run_dir, max_step=STEPS // 2, **arguments) as sv:
        batches = sv.stream(stream, passes=1)
        while not sv.should_stop():
            for _ in range(2):  # the state has changed when the second fetch of a step fails
                (x,) = next(batches)
                w += x[0] * np.random.random()
            sv.advance()
    return w.tolist(), sv.ending.digest


@pytest.mark.parametrize("door", ["loop", "supervisor"])
@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_an_error_that_comes_with_a_signal_is_the_interruption(tmp_path, monkeypatch, door, number) -> None:
    """Without one it is an error, after a look for a signal that may yet come."""
    asked: list[float] = []
    if number is None:
        monkeypatch.setattr(SignalWatch, "received_within", lambda watch, seconds: asked.append(seconds))
    with pytest.raises((SystemExit, DataError)) as ended:
        train(tmp_path / "run", door, Struckable(9, number))
    if number is None:
        assert "a worker died" in str(ended.value) and len(asked) == 1 and asked[0] > 0
    else:
        assert ended.value.code == 128 + number
    assert train(tmp_path / "run", door, Struckable()) == train(tmp_path / "whole", door, Struckable())
