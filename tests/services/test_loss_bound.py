"""`LossBound`: a single step above the bound ends the run before it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crashing import check_crashes

import everstep
from everstep import Every
from everstep.errors import ConfigError, GuardStop, LossBoundError
from everstep.services import LossBound
from everstep.testing import check_service
from gate import share
from tiny_runs import Boom


def train(run_dir: Path, losses: list[float], *bounds: LossBound, crash: int = 0) -> everstep.Supervisor:
    services = [*bounds, everstep.Checkpoints(Every(steps=2))]
    state = {"seen": {"sum": 0.0}}
    sv = everstep.Supervisor(run_dir, state, services=services, max_step=len(losses), seed=1)
    with sv:
        sv.stream(None)
        while not sv.should_stop():
            if sv.step + 1 == crash:
                raise Boom
            loss = losses[sv.step]
            state["seen"]["sum"] += loss
            sv.advance(loss=loss)
    return sv


QUIET = [1.0, 1.2, 0.9, 1.1, 1.0, 0.8]


def test_one_step_above_an_absolute_bound(tmp_path: Path) -> None:
    with pytest.raises(LossBoundError, match=r"loss is 50 at step 7, above its bound 10;.*batch"):
        train(tmp_path / "run", [*QUIET, 50.0, 1.0], LossBound(bound=10))
    assert train(tmp_path / "run", [*QUIET, 1.0, 1.0], LossBound(bound=10)).ending.resumed_from == (
        "step-00000006"
    )


def test_looking_rarely_finds_a_single_step_too(tmp_path: Path) -> None:
    bound = LossBound(bound=10, every=Every(steps=4))
    with pytest.raises(LossBoundError, match="loss is 50 at step 4"):
        train(tmp_path / "run", [1.0, 50.0, *QUIET], bound)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_what_is_no_number_is_above_every_bound(tmp_path: Path, loss: float) -> None:
    with pytest.raises(LossBoundError, match="at step 2, which is not finite"):
        train(tmp_path / "run", [1.0, loss], LossBound(bound=1e300))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_what_is_no_number_is_too_large_before_there_is_a_median(tmp_path: Path, loss: float) -> None:
    with pytest.raises(LossBoundError, match="at step 2, which is not finite"):
        train(tmp_path / "run", [1.0, loss, 1.0], LossBound(times=10, last=5))


@pytest.mark.campaign("long", gate="share")
def test_times_a_running_median_killed_in_any_step(tmp_path: Path) -> None:
    losses = [9.0, *QUIET, 6.0, 1.0]
    message = "loss is 6 at step 8, above 5 times 1, the median of the last 5"

    def bound() -> LossBound:
        return LossBound(times=5, last=5)

    for crash in share(range(1, 9), 2):
        run_dir = tmp_path / f"run {crash}"
        with pytest.raises(Boom):
            train(run_dir, losses, bound(), crash=crash)
        with pytest.raises(LossBoundError, match=message):
            train(run_dir, losses, bound())


def test_policy_stop_ends_as_written_with_exit_status_1(tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="above its bound 2") as caught:
        train(tmp_path / "run", [1.0, 1.0, 3.0, 1.0], LossBound(bound=2, policy="stop"))
    assert caught.value.code == 1


@pytest.mark.campaign("long", gate="share")
def test_a_run_within_its_bounds_ends_equal_after_any_crash(tmp_path: Path) -> None:
    make = lambda: [LossBound(bound=1e9), LossBound(times=1e9, last=3, name="median")]  # noqa: E731
    assert check_crashes(tmp_path, make, lambda loop, epoch: None, max_epoch=2).loop.ending.finished


@pytest.mark.campaign("long")
@pytest.mark.parametrize("arguments", [{"bound": 1e9}, {"times": 9, "last": 2}])
def test_it_keeps_the_laws(arguments: Any) -> None:
    check_service(lambda: LossBound(**arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "has no bound: give bound= or times="),
        ({"times": 0.5}, "give more than 1"),
        ({"times": 2, "last": 0}, "last=0"),
        ({"bound": 1, "policy": "halt"}, 'give "raise" or "stop"'),
    ],
)
def test_misuse(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossBound(**arguments)
