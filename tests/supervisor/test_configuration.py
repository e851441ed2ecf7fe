"""`config=` of the doors, and the machine of a start: recorded, compared, never changed in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.contracts.group import DataRanks
from everstep.errors import ChangedError, ConfigError
from everstep.record import RunJournal
from everstep.supervisor.opening.configuration import Configuration, changes, differences, fingerprint
from tiny_runs import Boom, Tiny, boom_at


def train(path: Path, config: Any, epochs: int = 1, **arguments: Any) -> Tiny:
    return Tiny(path, max_epoch=epochs, config=config, **arguments).train()


def recorded(path: Path) -> list[Any]:
    return [event.data["facts"]["config"] for event in RunJournal(path).events("segment", valid=False)]


def test_it_is_recorded_with_each_start(tmp_path: Path) -> None:
    train(tmp_path / "run", {"lr": 0.1, "layers": (1, 2), "out": Path("x")})
    train(tmp_path / "run", None, 2)
    assert recorded(tmp_path / "run") == [{"lr": 0.1, "layers": [1, 2], "out": "x"}, {}]


def test_a_difference_is_refused_shown_or_chosen(tmp_path: Path) -> None:
    before = {"optimizer": {"lr": 0.1, "decay": 0}, "seed": 1}
    now = {"optimizer": {"lr": 0.2, "decay": 0}, "seed": 1, "more": None, "new": 3}
    train(tmp_path / "run", before)
    with pytest.raises(ChangedError) as raised:
        train(tmp_path / "run", now, 2)
    assert "\n  config.optimizer.lr: stored 0.1, given 0.2\n  config.new: stored none, given 3\n" in str(
        raised.value
    )
    assert 'on_change="override"' in str(raised.value) and "more" not in str(raised.value)
    tiny = train(tmp_path / "run", now, 2, on_change="override")
    assert any("config.optimizer.lr: stored 0.1, given 0.2" in line for line in tiny.lines)
    assert not any("config." in line for line in train(tmp_path / "run", now, 3).lines)


def test_what_touches_no_step_is_shown_and_used(tmp_path: Path) -> None:
    train(tmp_path / "run", Configuration({"limits": {"epochs": 1}, "lr": 1}, free=("limits",)))
    config = Configuration({"limits": {"epochs": 2}, "lr": 1}, free=("limits",))
    tiny = train(tmp_path / "run", config, 2)
    assert any("used as given: config.limits.epochs: stored 1, given 2" in line for line in tiny.lines)


@pytest.mark.parametrize(
    ("stored", "given", "said"),
    [
        (None, ..., "t.x: stored null, given none"),
        (1, 1.0, "t.x: stored 1, given 1.0"),
        (0.0, -0.0, "t.x: stored 0.0, given -0.0"),
        (True, 1, "t.x: stored true, given 1"),
        ("1", 1, 't.x: stored "1", given 1'),
        ("none", ..., 't.x: stored "none", given none'),
        ([1, 2], {"0": 1, "1": 2}, 't.x: stored [1, 2], given {"0": 1, "1": 2}'),
        ({"a.b": 1}, {"a": {"b": 1}}, 't.x."a.b": stored 1, given none; t.x.a.b: stored none, given 1'),
        ([None], [None, None], "t.x.1: stored none, given null"),
        ([], {}, "t.x: stored [], given {}"),
        ([1, []], [1, None], "t.x.1: stored [], given null"),
        (..., {"a": {"b": 1}, "c": []}, "t.x.a.b: stored none, given 1; t.x.c: stored none, given []"),
        (1000.0, 1e3, ""),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, ""),
    ],
)
def test_what_a_program_can_tell_apart_is_different(stored: Any, given: Any, said: str) -> None:
    both = ({"t": {"x": value} if value is not ... else {}} for value in (stored, given))
    assert "; ".join(map(str, differences(*both))) == said


def test_a_setting_that_is_new_and_none_changes_nothing() -> None:
    """So a newer schema goes on with the runs of an older one."""
    now = {"new": None, "trainer": {"steps": 1, "new": None}, "task": {"new": None}}
    found = differences({"trainer": {"steps": 1}, "task": {}}, now, sections=("trainer",))
    assert [each.path for each in found] == ["task.new"]


def test_limits_and_settings_of_the_loader_are_free_and_others_by_name(tmp_path: Path) -> None:
    def start(free: tuple[str, ...] = (), **config: Any) -> None:
        Tiny(tmp_path / "run", max_epoch=config["epochs"], config=config, config_free=free).train()

    start(epochs=1, workers=0, lr=0.1, note="first")
    start(epochs=2, workers=2, lr=0.1, note="first")
    with pytest.raises(ChangedError, match=r'config\.note: stored "first", given "second"'):
        start(epochs=3, workers=2, lr=0.1, note="second")
    start(("note",), epochs=3, workers=2, lr=0.1, note="second")
    with pytest.raises(ChangedError, match=r"config\.lr: stored 0\.1, given 0\.2"):
        start(("note",), epochs=4, workers=2, lr=0.2, note="second")
    with pytest.raises(ConfigError, match=r"config has no 'not'; did you mean 'note'"):
        start(("not",), epochs=4, workers=2, lr=0.1, note="second")


def test_a_programs_limit_by_another_name_is_free_and_the_error_tells_how_to_free_it(tmp_path: Path) -> None:
    def start(epochs: int, free: tuple[str, ...] = (), **config: Any) -> None:
        Tiny(tmp_path / "run", max_epoch=epochs, config=config, config_free=free).train()

    start(1, total_timesteps=8, frames=8, num_steps=4)
    start(2, total_timesteps=16, frames=8, num_steps=4)
    with pytest.raises(ChangedError, match=r"or config_free=\['frames'\] if that changes no step"):
        start(3, total_timesteps=24, frames=16, num_steps=4)
    start(3, ("frames",), total_timesteps=24, frames=16, num_steps=4)
    # of a reinforcement learner it is the length of a rollout
    with pytest.raises(ChangedError, match=r"config\.num_steps: stored 4, given 5"):
        start(4, ("frames",), total_timesteps=32, frames=16, num_steps=5)


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Here(Tiny):
    """A program whose numbers depend on the number of threads, as those of a kernel may."""

    def __init__(self, run_dir: Path, threads: int, **arguments: Any) -> None:
        torch.set_num_threads(threads)
        services = [everstep.Checkpoints(everstep.Every(steps=4))]
        super().__init__(run_dir, services=services, **{"max_epoch": 2, **arguments})

    def update(self, ids: Any) -> None:
        self.w += 1e-9 * torch.get_num_threads()
        super().update(ids)

    def said(self, text: str) -> list[int]:
        return [at for at, line in enumerate(self.lines) if text in line]


def crash(here: Here, at: int) -> Here:
    with pytest.raises(Boom):
        here.train(inside=boom_at(at))
    return here


DIFFERENCE = "torch.threads: stored 1, given 2"


def test_another_fingerprint_is_said_first_and_its_numbers_are_no_divergence(tmp_path: Path) -> None:
    crash(Here(tmp_path, 1), 7)
    now = Here(tmp_path, 2).train()
    (first,) = now.said("warning: the checkpoint was computed on another machine")
    assert first < now.said("resuming")[0]
    assert (
        DIFFERENCE in now.lines[first] and "may differ from those of an uninterrupted run" in now.lines[first]
    )
    assert now.said("not compared (they were computed on another machine") and not now.said("differs")
    assert not now.loop.ending.one_fingerprint and DIFFERENCE in now.loop.ending.warnings[0]


def test_the_run_stays_marked_and_a_finished_one_computes_nothing(tmp_path: Path) -> None:
    crash(Here(tmp_path / "a", 1), 5)
    Here(tmp_path / "a", 2).train()
    Here(tmp_path / "b", 1).train()
    for run, epochs, same in (("a", 2, False), ("a", 3, False), ("b", 2, True)):
        again = Here(tmp_path / run, 2, max_epoch=epochs).train()
        assert not again.said("machine") and again.loop.ending.one_fingerprint is same


def test_it_is_that_of_the_start_that_wrote_the_checkpoint(tmp_path: Path) -> None:
    """Not that of the start before: what it did was superseded, and its rows are no measure either."""
    crash(Here(tmp_path, 1), 5)
    crash(Here(tmp_path, 2), 7)
    back = Here(tmp_path, 1).train()
    assert not back.said("machine, or under other settings of it:") and not back.said("state=")
    assert back.loop.ending.one_fingerprint
    undisturbed = Here(tmp_path.with_name("undisturbed"), 1).train()
    assert back.result() == undisturbed.result()


def test_under_the_same_one_a_difference_is_the_program_s(tmp_path: Path) -> None:
    crash(Here(tmp_path, 1), 7)
    now = Here(tmp_path, 1)
    now.update = lambda ids: now.loop.collect_metrics(loss=0.5)  # type: ignore[method-assign]
    now.train()
    assert now.said("state=")


def test_a_framework_that_one_side_has_not_imported_is_no_difference() -> None:
    here = fingerprint({}, DataRanks([0]))
    assert changes({"numpy": here["numpy"], "machine": here["machine"]}, here) == []
    assert changes(None, here) == []
    other = {**here, "machine": {**here["machine"], "processor": "abacus"}}
    (found,) = changes(other, here)
    assert str(found) == f"machine.processor: stored abacus, given {here['machine']['processor']}"
