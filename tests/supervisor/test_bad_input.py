"""The list of bad input: each is one clear error that says what to do, and nothing is lost."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import SystemRandom as Unseeded
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every, Supervisor
from everstep.checkpoint.manifest import FORMAT, MANIFEST, packed
from everstep.errors import (
    CheckpointError,
    CheckpointVersionError,
    ConfigError,
    MetricError,
    ProgressError,
    RunDirError,
    StateError,
)
from everstep.record import RunJournal
from everstep.testing import armed, nothing_left
from tiny_runs import Boom, Tiny, boom_at, quiet


def crashed(run_dir: Path, at: int = 6) -> None:
    services = [everstep.Checkpoints(Every(steps=1), keep_last=None)]
    with pytest.raises(Boom):
        Tiny(run_dir, max_epoch=2, services=services).train(inside=boom_at(at))


# ---------------------------------------------------------------------------------- run directories


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with nothing_left(), pytest.raises(RunDirError, match=r"file is a file; give a directory"):
        Tiny(tmp_path / "file", max_epoch=1).train()
    with nothing_left(), pytest.raises(RunDirError, match="give a path that can be written"):
        Tiny(tmp_path / "file" / "run", max_epoch=1).train()
    assert (tmp_path / "file").read_text() == "mine"


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


@pytest.mark.parametrize("path", [None, 3, "", b"run"])
def test_a_run_directory_that_is_no_path(path: Any) -> None:
    for door in (everstep.TrainLoop, Supervisor, RunJournal, everstep.InitFrom, everstep.best):
        with pytest.raises(ConfigError, match=r"path|run_dir.* is not a path; give a path, as in"):
            door(path)


def test_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    first = Tiny(Path("~/run"), max_epoch=1).train()
    assert (tmp_path / "run" / "run.json").exists() and not (tmp_path / "~").exists()
    assert everstep.load("~/run", {"w": first.w}).step == 4
    assert not RunJournal("~/run").problems
    saved = "~/run/checkpoints/epoch-0001-step-00000004"
    assert Tiny(tmp_path / "two", max_epoch=1, init_from=saved).train().loop.step == 4
    assert Tiny(tmp_path / "three", max_epoch=1, resume=saved).train().loop.step == 4
    with pytest.raises(ConfigError, match="give the path without '~'"):
        everstep.TrainLoop("~no-such-user-anywhere/run")


def test_a_run_directory_that_cannot_be_made() -> None:
    with nothing_left(), pytest.raises(RunDirError, match="give a path that can be written"):
        Tiny(Path("/proc/everstep-run"), max_epoch=1).train()


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter one")
    with pytest.raises(
        RunDirError, match=r"is not a run directory: it holds thesis.tex.*empty or new directory"
    ):
        Tiny(tmp_path, max_epoch=1).train()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 1 MiB, where that may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here; the armed hazards test the same paths")
    yield folder
    # lazily: a process that the test has ended may not be gone, and holds the disk until it is
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_read_only_disk(disk: Path) -> None:
    crashed(disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with nothing_left(), pytest.raises(RunDirError, match="read-only"):
        Tiny(disk / "run", max_epoch=2).train()
    with nothing_left(), pytest.raises(RunDirError, match=r"[Rr]ead-only"):
        Tiny(disk / "new", max_epoch=2).train()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert Tiny(disk / "run", max_epoch=2).train().seen[0][1] == 6


def test_a_disk_without_room_for_two_checkpoints_refuses_before_training(disk: Path) -> None:
    state = {"w": np.zeros(100_000)}
    tiny = Tiny(disk / "run", max_epoch=1, state=state)
    with nothing_left(), pytest.raises(RunDirError, match=r"need [\d,]+ bytes, [\d,]+ are free.*free space"):
        tiny.train()
    assert tiny.seen == []


def test_a_disk_that_fills_up_costs_saves_and_not_the_training(disk: Path, tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=4).train()
    filler = disk / "filler"

    def inside(loop: Any, step: int) -> None:
        if step == 5:
            with suppress(OSError), open(filler, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        if step == 14:
            filler.unlink()

    tiny = Tiny(disk / "run", max_epoch=4).train(inside=inside)
    ending = tiny.loop.ending
    assert ending.finished and ending.failed_saves >= 1
    assert any("a save failed, and the previous checkpoint is intact" in w for w in ending.warnings)
    assert tiny.w.tobytes() == straight.w.tobytes() and ending.digest == straight.loop.ending.digest
    assert Tiny(disk / "run", max_epoch=4).train().seen == []


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("point", ["checkpoint.write", "checkpoint.fsync", "checkpoint.rename"])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_failing_disk_in_the_middle_costs_saves_and_not_the_training(
    tmp_path: Path, point: str, error: str
) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=3).train()
    tiny = Tiny(tmp_path / "run", max_epoch=3)

    def tail(loop: Any, epoch: int) -> None:
        if epoch == 1:
            hazard.__enter__()

    def inside(loop: Any, step: int) -> None:
        if step == 11:
            hazard.__exit__(None, None, None)

    hazard = armed(f"{error}:{point}:1-1000")
    tiny.train(inside=inside, tail=tail)
    assert tiny.loop.ending.failed_saves >= 1
    assert tiny.result() == straight.result()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    "point", ["checkpoint.open", "checkpoint.write", "checkpoint.fsync", "checkpoint.rename"]
)
def test_a_trial_save_that_fails_refuses_at_the_first_step(tmp_path: Path, point: str) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=3)
    with nothing_left(), armed(f"ENOSPC:{point}:1-1000"):
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


# -------------------------------------------------------------------------------------- checkpoints


def truncate(folder: Path) -> None:
    file = folder / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def flip(folder: Path) -> None:
    file = folder / "arrays.safetensors"
    data = bytearray(file.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 4
    file.write_bytes(data)


def flip_manifest(folder: Path) -> None:
    file = folder / MANIFEST
    file.write_bytes(file.read_bytes().replace(b'"step":5', b'"step":4', 1))


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("damage", [truncate, flip, flip_manifest, empty])
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, damage: Any) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=2).train()
    crashed(tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step-00000005")
    tiny = Tiny(tmp_path / "run", max_epoch=2).train()
    assert tiny.seen[0][1] == 5
    assert any("step-00000005" in line and "passed over" in line for line in tiny.lines)
    assert any(path.name.startswith("step-00000005") for path in (tmp_path / "run" / "damaged").iterdir())
    assert tiny.result()[::2] == straight.result()[::2]


def test_a_checkpoint_of_a_newer_format_is_never_passed_over(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    manifest = tmp_path / "run" / "checkpoints" / "step-00000005" / MANIFEST
    body = json.loads(manifest.read_bytes())["body"]
    manifest.write_bytes(packed({**body, "format": FORMAT + 1, "versions": {"everstep": "7.1"}}))
    with nothing_left(), pytest.raises(CheckpointVersionError, match=r"install everstep 7\.1"):
        Tiny(tmp_path / "run", max_epoch=2).train()
    assert manifest.exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_journal_that_is_lost_is_said_and_the_run_goes_on(tmp_path: Path, damage: Any) -> None:
    crashed(tmp_path)
    damage(tmp_path / "journal" / "segment-0001.evj")
    resumed = Tiny(tmp_path, max_epoch=2).train()
    (said,) = [line for line in resumed.lines if "metrics that were recorded before" in line]
    assert "segment-0001.evj" in said and "the state is whole" in said
    assert resumed.loop.ending.finished


def test_a_chosen_checkpoint_that_is_damaged_is_refused_with_the_others_named(tmp_path: Path) -> None:
    crashed(tmp_path / "run")
    flip(tmp_path / "run" / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match=r"choose another one: .*step-00000002"):
        Tiny(tmp_path / "run", max_epoch=2, resume=3).train()
    assert Tiny(tmp_path / "run", max_epoch=2).train().seen[0][1] == 6


# ------------------------------------------------------------------------------------------- state


def test_two_states_under_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two state entries are named 'w'; give each its own name"):
        Supervisor(tmp_path, [("w", np.zeros(1)), ("w", np.zeros(2))])


@pytest.mark.parametrize("name", ["", "a/b", 3])
def test_names_of_states(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match=f"state name {name!r}"):
        Supervisor(tmp_path, {name: np.zeros(1)})


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (object(), r"state_dict\(\) and load_state_dict"),
        (lambda: None, r"state_dict\(\) and load_state_dict"),
        (7, r"Slot\(value\)"),
        ("text", r"Slot\(value\)"),
        ((1, 2), r"Slot\(value\)"),
        (None, r"Slot\(value\)"),
        (torch.nn.Linear, "pass an instance"),
        (Unseeded(), r"random.Random\(seed\)"),
        ({1, 2}, "can"),
    ],
)
def test_an_entry_that_cannot_be_saved_is_named_with_what_can(
    tmp_path: Path, value: Any, remedy: str
) -> None:
    with pytest.raises(StateError, match=rf"(?s)state entry 'thing'.*{remedy}"):
        Supervisor(tmp_path / "run", {"thing": value})
    assert not (tmp_path / "run").exists()


def test_something_unsaveable_inside_an_entry_is_found_at_the_door(tmp_path: Path) -> None:
    sv = quiet(tmp_path / "run", {"config": {"layers": [1, {"act": object()}]}})
    with nothing_left(), pytest.raises(StateError, match=r"config.*layers.*1.*act"):
        sv.__enter__()


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


class Training:
    """A torch model that trains under either door; `optimizer` may be left out of the state, or idle."""

    def __init__(
        self, run_dir: Path, *, in_state: bool = True, steps: bool = True, by_hand: bool = False
    ) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.run_dir, self.steps, self.by_hand = run_dir, steps, by_hand
        self.state = {"model": self.model} | ({"optimizer": self.optimizer} if in_state else {})

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).sum().backward()
        if self.by_hand:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        elif self.steps:
            self.optimizer.step()

    def train_loop(self) -> None:
        services = [everstep.Console(sink=lambda line: None)]
        with everstep.TrainLoop(self.run_dir, self.state, max_epoch=2, services=services) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps([1, 2, 3]):
                    self.step()

    def supervise(self) -> None:
        with quiet(self.run_dir, self.state, max_step=6) as sv:
            sv.stream([1, 2, 3])
            while not sv.should_stop():
                self.step()
                sv.advance()


DOORS = [Training.train_loop, Training.supervise]


@pytest.mark.parametrize("door", DOORS)
def test_a_state_without_the_optimizer_that_steps_it(tmp_path: Path, door: Any) -> None:
    with (
        nothing_left(),
        pytest.raises(StateError, match=r"SGD.*not part of the state.*'optimizer': optimizer"),
    ):
        door(Training(tmp_path / "run", in_state=False))
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert names == ["epoch-0000-step-00000000"]
    door(Training(tmp_path / "again"))


@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_that_never_steps(tmp_path: Path, door: Any) -> None:
    with nothing_left(), pytest.raises(ProgressError, match=r"no optimizer.*call optimizer.step\(\)"):
        door(Training(tmp_path / "run", steps=False))


@pytest.mark.parametrize("door", DOORS)
def test_a_model_that_is_updated_by_hand_needs_no_optimizer(tmp_path: Path, door: Any) -> None:
    door(Training(tmp_path / "run", in_state=False, by_hand=True))


# ------------------------------------------------------------------------------- values of arguments


@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan"), True, "60"])
def test_time_budgets_must_be_positive(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="positive"):
        everstep.TrainLoop(tmp_path, max_time=value)
    with pytest.raises(ConfigError, match="positive"):
        everstep.StopAfter(seconds=value)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "3", float("nan")])
def test_counts_must_be_positive_whole_numbers(value: Any) -> None:
    for make in (
        lambda: Every(steps=value),
        lambda: Every(epochs=value),
        lambda: everstep.At(value),
        lambda: everstep.StopAfter(steps=value),
        lambda: everstep.StopAfter(epochs=value),
    ):
        with pytest.raises(ConfigError, match=r"give an integer, 1 or more"):
            make()


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_how_many_checkpoints_stay(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"keep_last={value}"):
        everstep.Checkpoints(keep_last=value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: everstep.StopAfter(), "give steps=, epochs= or seconds="),
        (lambda: everstep.NaNGuard("ignore"), 'policy=\'ignore\'.*"raise" or "stop"'),  # type: ignore[arg-type]
        (lambda: everstep.NaNGuard(metrics="loss"), r"give a list of names, \['loss'\]"),
        (lambda: everstep.Best("valid_loss", "lower"), "'lower'"),
        (lambda: everstep.Best("f1"), 'give mode="min"'),
        (lambda: everstep.Checkpoints(evry=Every(steps=1)), "'evry'; did you mean 'every'"),  # type: ignore[call-arg]
        (lambda: everstep.Checkpoints(100), "every=100"),  # type: ignore[arg-type]
        (lambda: everstep.EarlyStop("loss", patience=2, every=5), "every=5"),  # type: ignore[arg-type]
        (lambda: everstep.StopAfter(step=5), "'step'; did you mean 'steps'"),  # type: ignore[call-arg]
        (lambda: everstep.Console(plain_seconds=0), "plain_seconds=0"),
    ],
)
def test_arguments_of_services(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("given", [5, [("loss", 1.0)], "loss"])
def test_metrics_must_be_a_mapping(tmp_path: Path, given: Any) -> None:
    with Tiny(tmp_path / "run", max_epoch=1).loop as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1]):
                with pytest.raises(MetricError, match=r"give a mapping"):
                    loop.collect_metrics(given)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        pytest.param(10**400, "an int of 1329 bits", id="int"),
        pytest.param(10**5000, "an int of", id="int that has no text"),
        pytest.param(np.ma.masked, "masked", id="masked"),
    ],
)
def test_a_metric_value_that_is_no_float_is_named(tmp_path: Path, value: Any, says: str) -> None:
    with Tiny(tmp_path / "run", max_epoch=1).loop as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1]):
                with pytest.raises(MetricError, match=f"^metric 'loss': .*{says}"):
                    loop.collect_metrics(loss=value)
            with pytest.raises(MetricError, match=f"^metric 'loss': .*{says}"):
                loop.collect_metrics(loss=value)


@pytest.mark.parametrize("name", [1, None, ""])
def test_metric_names_must_be_texts(tmp_path: Path, name: Any) -> None:
    with Tiny(tmp_path / "run", max_epoch=1).loop as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1]):
                with pytest.raises(MetricError, match=rf"metric name {name!r}"):
                    loop.collect_metrics({"good": 1.0, name: 1.0})


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ("abc", "give a list of batches"),
        ({"x": 1}, r"everstep.data.arrays"),
        (np.zeros((4, 2)), r"everstep.data.arrays\(data, batch_size=...\)"),
        (7, "give everstep.data.arrays"),
        (lambda: [1], "call it"),
    ],
)
def test_data_that_is_none(tmp_path: Path, data: Any, remedy: str) -> None:
    with Tiny(tmp_path / "run", max_epoch=1).loop as loop:
        for _ in loop.iter_epochs():
            with pytest.raises(everstep.errors.DataError, match=remedy):
                loop.iter_steps(data)


@pytest.mark.parametrize(
    "state",
    [
        torch.nn.Linear(2, 2),
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()),
        torch.zeros(3),
        np.zeros((2, 2)),
        "model",
        ["model", "optimizer"],
        7,
    ],
    ids=lambda state: type(state).__name__,
)
def test_a_state_without_names(tmp_path: Path, state: Any) -> None:
    with pytest.raises(ConfigError, match=r'gives no names.*state=\{"model": model'):
        everstep.TrainLoop(tmp_path / "run", state=state)


def test_pairs_are_names_enough(tmp_path: Path) -> None:
    everstep.TrainLoop(tmp_path / "run", state=[("a", np.zeros(2)), ("b", np.zeros(2))])
    everstep.Supervisor(tmp_path / "run", state=zip("ab", (np.zeros(2), np.zeros(2)), strict=True))


@pytest.mark.parametrize("door", [everstep.TrainLoop, everstep.Supervisor])
@pytest.mark.parametrize("services", [everstep.Checkpoints(), 3, everstep.Checkpoints, print])
def test_services_are_a_list(tmp_path: Path, door: Any, services: Any) -> None:
    with pytest.raises(ConfigError, match=r"services=.*; give a list, as in services=\["):
        door(tmp_path / "run", services=services)


def test_unknown_keywords_of_iter_steps(tmp_path: Path) -> None:
    with Tiny(tmp_path / "run", max_epoch=1).loop as loop:
        for _ in loop.iter_epochs():
            with pytest.raises(ConfigError, match=r"iter_steps\(\) has no argument 'nme'.*'name'"):
                loop.iter_steps([1], nme="train")


def test_an_entry_that_fails_to_save_is_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        with everstep.TrainLoop(tmp_path, {"model": model, "optimizer": optimizer}, max_epoch=2) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps([torch.ones(1, 2)]):
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
                    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(3))] * 3

    with pytest.raises(KeyError) as caught:
        train()
    assert caught.value.__notes__ == ["while state entry 'optimizer' was being saved"]
