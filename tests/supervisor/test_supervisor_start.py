"""How a run begins or goes on: initialise or recover, seeds, warm starts, choosing a checkpoint, the lock."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every, InitFrom, Supervisor, hazard
from everstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NoCheckpointError,
    RestoreError,
    RunDirError,
    RunLockedError,
    UsageError,
)
from everstep.record import RunDir
from tiny_runs import Boom, Tiny, boom_at, events


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
        with Supervisor(tmp_path, {name: Noting(name) for name in names}, max_step=max_step) as sv:
            while not sv.should_stop():
                sv.advance()
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
    calls.clear()
    stepwise(tmp_path / "run", **hooks).train()
    assert calls == ["ready", "local", "ready"]
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


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (["w", "momentum"], r"not ready: \['w', 'momentum'\] \(before local_init_fn\)"),
        ("the table is empty", "not ready: the table is empty"),
        (False, r"ready\(\) returned False"),
    ],
)
def test_what_is_not_ready_is_named(tmp_path: Path, found: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Tiny(tmp_path / "run", ready=lambda: found, max_epoch=1).train()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("found", [None, True, [], ""])
def test_what_counts_as_ready(tmp_path: Path, found: Any) -> None:
    assert Tiny(tmp_path / "run", ready=lambda: found, max_epoch=1).train().loop.ending.finished


def test_an_error_in_init_fn_leaves_the_directory_free(tmp_path: Path) -> None:
    def fail() -> None:
        raise Boom("no table")

    with pytest.raises(Boom, match="no table"):
        Tiny(tmp_path / "run", init_fn=fail, max_epoch=1).train()
    calls: list[str] = []
    tiny = Tiny(tmp_path / "run", init_fn=lambda: calls.append("init"), max_epoch=1).train()
    assert calls == ["init"] and tiny.loop.ending.finished and not tiny.loop.resumed


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


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
def test_seeds_are_whole_numbers(tmp_path: Path, seed: Any) -> None:
    with pytest.raises(ConfigError, match=f"seed={seed!r}"):
        everstep.TrainLoop(tmp_path, seed=seed)


def test_a_seed_that_differs_must_be_chosen(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"seed: stored 7, given 8.*on_change=\"override\""):
        stepwise(tmp_path / "run", seed=8).train()
    assert stepwise(tmp_path / "run", seed=None).train().loop.seed == 7
    tiny = stepwise(tmp_path / "run", seed=8, on_change="override", max_epoch=3).train()
    assert tiny.loop.seed == 8 and tiny.loop.epoch == 3
    assert any("seed: stored 7, given 8" in line for line in tiny.lines)


@pytest.mark.parametrize("on_change", ["keep", "", None])
def test_on_change_values(tmp_path: Path, on_change: Any) -> None:
    with pytest.raises(ConfigError, match='"error" or "override"'):
        everstep.TrainLoop(tmp_path, on_change=on_change)


# --------------------------------------------------------------------------- choosing a checkpoint


def test_resume_from_a_step_a_name_or_a_path(tmp_path: Path) -> None:
    straight = stepwise(tmp_path / "straight").train()
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    for which in (3, "step-00000003", path, str(path), 0, "epoch-0001-step-00000004"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        crashed(tmp_path / "run")
        tiny = stepwise(tmp_path / "run", resume=which).train()
        first = {0: 1, "epoch-0001-step-00000004": 5}.get(which, 4)  # type: ignore[call-overload]
        assert tiny.seen[0][1] == first, which
        assert tiny.result() == straight.result(), which


def test_later_checkpoints_are_set_aside_and_do_not_win_at_the_next_start(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    with pytest.raises(Boom):
        stepwise(tmp_path / "run", resume=2).train(inside=boom_at(4))
    assert "step-00000005" not in checkpoints(tmp_path / "run")
    assert any(p.name.startswith("step-00000005") for p in (tmp_path / "run" / "superseded").iterdir())
    tiny = stepwise(tmp_path / "run").train()
    assert tiny.seen[0][1] == 4
    assert tiny.result() == stepwise(tmp_path / "straight").train().result()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("which", "message"),
    [
        (77, r"no checkpoint of step 77.*the nearest is step-00000005"),
        ("step-00000055", r"no checkpoint 'step-00000055'.*did you mean 'step-00000005'"),
        (Path("nowhere/step-00000003"), "no checkpoint in nowhere"),
        ("nowhere/step-00000003", "no checkpoint in nowhere"),
    ],
)
def test_a_checkpoint_that_is_not_there(tmp_path: Path, which: Any, message: str) -> None:
    crashed(tmp_path / "run")
    before = checkpoints(tmp_path / "run")
    with pytest.raises(NoCheckpointError, match=message):
        stepwise(tmp_path / "run", resume=which).train()
    assert checkpoints(tmp_path / "run") == before


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


def test_resume_from_another_runs_checkpoint_sets_the_own_ones_aside(tmp_path: Path) -> None:
    crashed(tmp_path / "long", at=8)
    crashed(tmp_path / "other", at=4)
    foreign = tmp_path / "other" / "checkpoints" / "step-00000003"
    with pytest.raises(Boom):
        stepwise(tmp_path / "long", resume=foreign).train(inside=boom_at(6))
    assert checkpoints(tmp_path / "long")[-1] == "step-00000005"
    tiny = stepwise(tmp_path / "long").train()
    assert tiny.seen[0][1] == 6
    assert tiny.w.tobytes() == stepwise(tmp_path / "straight").train().w.tobytes()


def older(run_dir: Path, which: str) -> Any:
    """What a program gives as resume=: step 2, of the run or of another run."""
    paths = {"another run's": run_dir.parent / "other", "a path": run_dir}
    name = "step-00000002"
    return {"a step": 2, "a name": name}.get(which) or paths[which] / "checkpoints" / name


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("which", ["a step", "a name", "a path", "another run's"])
@pytest.mark.parametrize("keep_last", [None, 2])
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


def test_an_edited_checkpoint_file_wins(tmp_path: Path) -> None:
    straight = stepwise(tmp_path / "straight").train()
    crashed(tmp_path / "run")
    (tmp_path / "run" / "checkpoint").write_text("step-00000002\n")
    tiny = crashed(tmp_path / "run", at=4)
    assert any("resuming from step-00000002, as" in line for line in tiny.lines)
    again = stepwise(tmp_path / "run").train()
    assert again.seen[0][1] == 4  # from what came after the edit, not from it once more
    assert again.result() == straight.result()


def test_an_edited_checkpoint_file_that_names_nothing(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    (tmp_path / "run" / "checkpoint").write_text("step-00000052\n")
    before = checkpoints(tmp_path / "run")
    with pytest.raises(NoCheckpointError, match=r"names 'step-00000052'.*did you mean 'step-0000000\d'"):
        stepwise(tmp_path / "run").train()
    assert checkpoints(tmp_path / "run") == before
    (tmp_path / "run" / "checkpoint").unlink()
    assert stepwise(tmp_path / "run").train().seen[0][1] == 6


# -------------------------------------------------------------------------------------- warm starts


def model_of(seed: int, out: int = 2) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, out))
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator)
    return model


class Net:
    """A torch program with model and Adam; `run` trains a few steps."""

    def __init__(
        self, run_dir: Path, *, seed: int = 1, out: int = 2, lr: float = 0.1, **arguments: Any
    ) -> None:
        self.model = model_of(seed, out)
        self.before = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.lines: list[str] = []
        names = arguments.pop("names", ("model", "optimizer"))
        state = dict(zip(names, (self.model, self.optimizer), strict=True))
        services = [everstep.Console(sink=self.lines.append)]
        self.sv = Supervisor(run_dir, state, services=services, **{"seed": 1, **arguments})

    def run(self, steps: int = 3) -> Net:
        self.sv.max_step = steps or None
        with self.sv as sv:
            batches = sv.stream([torch.ones(2, 3) * i for i in range(4)])
            while not sv.should_stop():
                loss = self.model(next(batches)).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                sv.advance(loss=loss)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in self.model.state_dict().items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    run_dir = tmp_path_factory.mktemp("source") / "run"
    return run_dir, Net(run_dir).run(3).weights()


Source = tuple[Path, dict[str, torch.Tensor]]


def entered(net: Net) -> Net:
    """Enter and leave the block without a step."""
    with net.sv as sv:
        sv.stream([1])
        sv.should_stop()
    return net


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_a_warm_start_takes_the_weights_and_counts_from_zero(tmp_path: Path, source: Source) -> None:
    net = entered(Net(tmp_path / "run", seed=9, init_from=source[0]))
    assert_same(net.weights(), source[1])
    assert net.sv.step == 0
    assert net.optimizer.state_dict()["state"][0]["step"] == 3  # the optimizer comes along
    assert any("initialised from" in line and "step-00000003" in line for line in net.lines)


def test_what_a_dict_has_and_its_checkpoint_lacks_is_said_once(tmp_path: Path) -> None:
    def lines(notes: dict[str, int]) -> list[str]:
        said: list[str] = []
        console = everstep.Console(sink=said.append)
        with Supervisor(tmp_path / "run", {"notes": notes}, max_step=1, services=[console]) as sv:
            sv.stream(None)
            while not sv.should_stop():
                sv.advance()
        return [line for line in said if "dropped" in line]

    assert lines({"n": 0}) == []
    notes = {"n": 0, "k": 5}
    (line,) = lines(notes)
    assert "state 'notes': the checkpoint has no 'k': dropped" in line and notes == {"n": 0}


def test_a_warm_start_from_one_checkpoint(tmp_path: Path, source: Source) -> None:
    folder = source[0] / "checkpoints" / "step-00000003"
    assert_same(entered(Net(tmp_path / "run", seed=9, init_from=str(folder))).weights(), source[1])


def test_the_run_of_a_warm_start_is_left_as_it_is(tmp_path: Path, source: Source) -> None:
    other = tmp_path / "other"
    shutil.copytree(source[0], other)
    names = checkpoints(other)
    with open(other / "checkpoints" / names[-1] / "arrays.safetensors", "r+b") as file:
        file.truncate(10)

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in other.rglob("*") if path.is_file()}

    before = files()
    net = entered(Net(tmp_path / "run", seed=9, init_from=other))
    assert files() == before
    assert any("init_from" in line and names[-1] in line and "passed over" in line for line in net.lines)


def test_a_second_launch_ignores_it_and_says_so(tmp_path: Path, source: Source) -> None:
    first = Net(tmp_path / "run", seed=9, init_from=source[0]).run(2)
    second = Net(tmp_path / "run", seed=5, init_from=source[0])
    second.run(2)
    assert_same(second.weights(), first.weights())
    assert any("init_from" in line and "is not used" in line for line in second.lines)


def test_a_warm_start_goes_before_nothing_else(tmp_path: Path, source: Source) -> None:
    """init_fn runs first, the warm start has the last word."""
    calls: list[str] = []
    net = Net(tmp_path / "run", seed=9, init_from=source[0], init_fn=lambda: calls.append("init"))
    assert_same(entered(net).weights(), source[1])
    assert calls == ["init"]


def test_the_default_error_lists_every_mismatch(tmp_path: Path, source: Source) -> None:
    net = Net(tmp_path / "run", seed=9, out=5, names=("net", "optimizer"), init_from=source[0])
    with pytest.raises(RestoreError) as raised:
        entered(net)
    error = raised.value
    assert error.missing == ("net/0.weight", "net/0.bias", "net/2.weight", "net/2.bias")
    assert error.unexpected == ("model/0.weight", "model/0.bias", "model/2.weight", "model/2.bias")
    assert "include=" in str(error) and "rename=" in str(error)
    assert_same(net.weights(), net.before)

    net = Net(tmp_path / "run2", seed=9, out=5, init_from=source[0])
    with pytest.raises(RestoreError, match="reshaped") as raised:
        entered(net)
    assert len(raised.value.reshaped) == 2
    assert all("model/2." in text for text in raised.value.reshaped)
    assert_same(net.weights(), net.before)


def test_include_and_exclude(tmp_path: Path, source: Source) -> None:
    net = entered(Net(tmp_path / "a", seed=9, init_from=InitFrom(source[0], include=r"^model/0\.")))
    expected = {k: (source[1] if k.startswith("0.") else net.before)[k] for k in net.before}
    assert_same(net.weights(), expected)
    assert net.optimizer.state_dict()["state"] == {}
    net = entered(Net(tmp_path / "b", seed=9, init_from=InitFrom(source[0], exclude=r"bias$|^optimizer")))
    expected = {k: (net.before if k.endswith("bias") else source[1])[k] for k in net.before}
    assert_same(net.weights(), expected)


def test_rename(tmp_path: Path, source: Source) -> None:
    start = InitFrom(source[0], rename={r"^model/": "net/"})
    net = entered(Net(tmp_path / "run", seed=9, names=("net", "optimizer"), init_from=start))
    assert_same(net.weights(), source[1])


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_what_to_do_with_what_does_not_fit(tmp_path: Path, source: Source, policy: Any) -> None:
    start = InitFrom(source[0], on_reshaped=policy, reset={"step", "optimizer"})
    net = entered(Net(tmp_path / "a", seed=9, out=5, init_from=start))
    expected = {k: (source[1] if k.startswith("0.") else net.before)[k] for k in net.before}
    assert_same(net.weights(), expected)
    said = [line for line in net.lines if "reshaped" in line]
    assert (len(said) == 1 and "model/2.weight" in said[0]) if policy == "warn" else not said

    start = InitFrom(
        source[0], on_missing=policy, on_unexpected=policy, rename={r"^model/0\.weight$": "model/other"}
    )
    net = entered(Net(tmp_path / "b", seed=9, init_from=start))
    expected = {k: (net.before if k == "0.weight" else source[1])[k] for k in net.before}
    assert_same(net.weights(), expected)


def test_reset_parts(tmp_path: Path, source: Source) -> None:
    net = entered(Net(tmp_path / "all", seed=9, lr=0.5, init_from=InitFrom(source[0], reset=())))
    assert net.sv.step == 3
    assert net.optimizer.param_groups[0]["lr"] == 0.1
    net = entered(Net(tmp_path / "lr", seed=9, lr=0.5, init_from=InitFrom(source[0], reset={"step", "lr"})))
    assert net.optimizer.param_groups[0]["lr"] == 0.5
    assert net.optimizer.state_dict()["state"][0]["step"] == 3
    start = InitFrom(source[0], reset={"step", "optimizer"})
    net = entered(Net(tmp_path / "optimizer", seed=9, lr=0.5, init_from=start))
    assert net.optimizer.param_groups[0]["lr"] == 0.5 and net.optimizer.state_dict()["state"] == {}


def test_counters_that_go_on_from_a_warm_start_resume_exactly(tmp_path: Path, source: Source) -> None:
    start = InitFrom(source[0], reset=())
    straight = Net(tmp_path / "straight", seed=9, init_from=start).run(7)
    assert straight.sv.ending.step == 7
    Net(tmp_path / "run", seed=9, init_from=start).run(5)
    assert_same(Net(tmp_path / "run", seed=9, init_from=start).run(7).weights(), straight.weights())


def test_two_names_that_become_one_are_refused(tmp_path: Path, source: Any) -> None:
    start = InitFrom(source[0], rename={r"^model/\d": "model/0"})
    with pytest.raises(ConfigError, match=r"'model/0\.weight' and 'model/\d\.weight' would both be"):
        entered(Net(tmp_path / "run", seed=9, init_from=start))


def test_a_replacement_that_names_no_group_is_refused(tmp_path: Path, source: Any) -> None:
    start = InitFrom(source[0], rename={"^model/": r"\1/"})
    with pytest.raises(ConfigError, match=r"invalid group reference 1.*give a name, or groups"):
        entered(Net(tmp_path / "run", seed=9, init_from=start))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rename": {"model/(": "x"}}, r"'model/\(': .*re\.escape"),
        ({"reset": {"stepp"}}, "'stepp': did you mean 'step'"),
        ({"on_missing": "ignore"}, 'on_missing=\'ignore\'.*"error", "warn" or "skip"'),
        ({"include": "["}, r"include='\['.*regular expression"),
        ({"exclude": "("}, r"exclude='\('.*regular expression"),
    ],
)
def test_init_from_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InitFrom("somewhere", **arguments)


def test_a_warm_start_from_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(
            NoCheckpointError, match=r"neither a checkpoint.* nor a run with a checkpoint; check the path"
        ):
            entered(Net(tmp_path / "run", init_from=path))


# ------------------------------------------------------------------------------------------ the lock


def test_a_second_loop_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with Tiny(tmp_path / "run", max_epoch=1).loop as loop:
        with pytest.raises(RunLockedError, match="another loop of this process"):
            Tiny(tmp_path / "run", max_epoch=1).train()
        assert loop.segment == 1
        (tmp_path / "link").symlink_to(tmp_path / "run")
        with pytest.raises(RunLockedError, match="another loop of this process"):
            Tiny(tmp_path / "link", max_epoch=1).train()
        for _ in loop.iter_epochs():
            list(loop.iter_steps([1]))
    assert Tiny(tmp_path / "run", max_epoch=1).train().loop.ending.finished


def test_a_second_process_is_refused_and_a_dead_ones_lock_taken_over(tmp_path: Path) -> None:
    holder = (
        "import sys, everstep\n"
        "sv = everstep.Supervisor(sys.argv[1], default_services=False).__enter__()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(RunLockedError, match=rf"in use by process {process.pid} on host"):
            Tiny(tmp_path / "run", max_epoch=1).train()
        process.kill()
    tiny = Tiny(tmp_path / "run", max_epoch=1).train()
    assert any(f"took over the run from process {process.pid}" in line for line in tiny.lines)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("point", ["lock.open", "lock.lock"])
def test_a_run_that_is_replaced_while_it_is_entered_is_left_alone(tmp_path: Path, point: str) -> None:
    """The seed and the config that were read are the removed one's."""
    run_dir = tmp_path / "run"
    Tiny(run_dir, max_epoch=1).train()

    def replace(number: int, frame: object) -> None:
        run_dir.rename(tmp_path / "removed")
        RunDir.open(run_dir)

    before = signal.signal(signal.SIGUSR2, replace)
    hazard.arm(f"SIGUSR2:{point}:1")
    try:
        with pytest.raises(RunDirError, match=r"replaced by .*; start again"):
            Tiny(run_dir, max_epoch=2).train()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not (run_dir / "journal").exists()
    assert Tiny(run_dir, max_epoch=2).train().loop.ending.finished


def test_lock_false_is_ones_own_responsibility(tmp_path: Path) -> None:
    assert Tiny(tmp_path / "run", max_epoch=1, lock=False).train().loop.ending.finished
    assert not (tmp_path / "run" / "lock").exists()


# ------------------------------------------------------------------------------ what does not fit


def test_a_checkpoint_of_another_model_is_refused_with_the_three_lists(tmp_path: Path) -> None:
    Net(tmp_path / "run").run(2)
    before = checkpoints(tmp_path / "run")
    other = Net(tmp_path / "run", out=5)
    with pytest.raises(RestoreError) as raised:
        other.run(4)
    assert any("2.weight" in text and "(2, 4)" in text and "(5, 4)" in text for text in raised.value.reshaped)
    renamed = Net(tmp_path / "run", names=("net", "optimizer"))
    with pytest.raises(RestoreError, match=r"missing in the checkpoint \(1\): net") as raised:
        renamed.run(4)
    assert raised.value.unexpected == ("model",)
    assert_same(renamed.weights(), renamed.before)
    assert checkpoints(tmp_path / "run") == before
    assert Net(tmp_path / "run").run(4).sv.ending.step == 4


def test_what_was_decided_and_given_is_on_record(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    stepwise(tmp_path / "run").train()
    segments = events(tmp_path / "run", "segment")
    assert len(segments) >= 1
    assert segments[-1]["facts"]["resumed_from"] == "step-00000005"


def test_all_checkpoints_damaged_is_never_a_silent_fresh_start(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").glob("*/*"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"all \d+ checkpoints.*are damaged"):
        stepwise(tmp_path / "run").train()
