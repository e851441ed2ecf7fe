"""What a newcomer gets wrong without noticing: each is an error or a warning that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Best, Checkpoints
from everstep.errors import ConfigError
from tiny_runs import Tiny


def collecting(**values: float) -> Any:
    """A tail that collects these; more metrics come as more keywords."""
    return lambda loop, epoch: loop.collect_metrics({name: value / epoch for name, value in values.items()})


# ------------------------------------------------------------------------------------ what is watched


@pytest.mark.parametrize("given", [[Best("valid_loss")], [Best("valid_loss"), Best("valid_acc", save=False)]])
def test_a_watched_metric_is_the_runs_best_beside_other_best_services(tmp_path: Path, given: Any) -> None:
    def tail(loop: Any, epoch: int) -> None:
        collecting(valid_loss=1.0, valid_acc=0.5)(loop, epoch)
        loop.print_logs()

    tiny = Tiny(tmp_path / "run", max_epoch=2, watch=("valid_acc", "max"), services=given).train(tail=tail)
    assert tiny.loop.best_valid_metric == 0.5 and tiny.loop.ending.best.metric == "valid_acc"
    first = next(line for line in tiny.lines if "valid acc" in line)
    assert first.count(" (*)") == 2
    assert (tmp_path / "run" / "best" / "valid_loss").is_dir()


def test_a_watch_that_contradicts_a_best_service_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        Tiny(tmp_path / "run", watch=("f1", "min"), services=[Best("f1", "max")])


def test_a_watch_without_a_direction_is_told_how_to_give_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'give watch=\("val_los", "min"\) or "max"'
    ):
        Tiny(tmp_path / "run", watch="val_los")


@pytest.mark.parametrize("watch", [("a", "min", 2), 5, ()])
def test_a_watch_of_another_shape_is_an_error(tmp_path: Path, watch: Any) -> None:
    with pytest.raises(ConfigError, match="give a name, or a pair"):
        Tiny(tmp_path / "run", watch=watch)


def test_two_checkpoints_services_are_told_how_to_be_one(tmp_path: Path) -> None:
    services = [Checkpoints(everstep.Every(steps=2)), Checkpoints(keep_last=None)]
    with pytest.raises(ConfigError, match=r"Checkpoints\(Every\(epochs=1\) \| Every\(steps=500\)"):
        Tiny(tmp_path / "run", services=services)
