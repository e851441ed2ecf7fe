"""Limits, stops and what reopens a run: exact counts, one reason, no step too many, no mix of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep import Every, Outcome, Service, Stop
from everstep.errors import ConfigError, Interrupted
from everstep.services import Stage
from everstep.testing import ManualClock
from tiny_runs import Acts, Boom, Tiny, Told, boom_at, events, rows


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize(
    ("limits", "steps", "epochs", "reason"),
    [
        ({"max_epoch": 3}, 12, 3, "max_epoch 3 is reached"),
        ({"max_step": 7}, 7, 2, "max_step 7 is reached"),
        ({"max_step": 8}, 8, 2, "max_step 8 is reached"),
        ({"max_epoch": 2, "max_step": 7}, 7, 2, "max_step 7 is reached"),
        ({"max_epoch": 2, "max_step": 8}, 8, 2, "max_step 8 is reached"),
        ({"max_epoch": 2, "max_step": 9}, 8, 2, "max_epoch 2 is reached"),
        ({"max_epoch": 2, "steps_per_epoch": 3}, 6, 2, "max_epoch 2 is reached"),
        ({"max_epoch": 2, "max_step": 5, "steps_per_epoch": 3}, 5, 2, "max_step 5 is reached"),
        ({"services": [everstep.services.StopAfter(steps=5)]}, 5, 2, "stop after 5 steps"),
        ({"services": [everstep.services.StopAfter(epochs=2)]}, 8, 2, "stop after 2 epochs"),
        ({"services": [everstep.services.StopAfter(epochs=2, steps=6)]}, 6, 2, "stop after 6 steps"),
        ({"services": [everstep.services.StopAfter(steps=6)], "max_step": 4}, 4, 1, "max_step 4 is reached"),
    ],
)
def test_each_limit_alone_and_together_stops_at_the_exact_count(
    tmp_path: Path, limits: dict[str, Any], steps: int, epochs: int, reason: str
) -> None:
    tails = []
    tiny = Tiny(tmp_path / "run", **limits).train(tail=lambda loop, epoch: tails.append(epoch))
    assert [step for _, step, _ in tiny.seen] == list(range(1, steps + 1))
    assert tails == list(range(1, epochs + 1))
    ending = tiny.loop.ending
    assert (ending.step, ending.epoch, ending.reason, ending.finished) == (steps, epochs, reason, True)
    assert f"ended: {reason} (step {steps}, finished)" in tiny.lines
    assert [e["reason"] for e in events(tmp_path / "run", "stop")] == [reason]
    assert [e["reason"] for e in events(tmp_path / "run", "ended")] == [reason]
    for _ in range(2):
        again = Tiny(tmp_path / "run", **limits).train()
        assert again.seen == [] and again.result() == tiny.result()
        assert any(f"finished at epoch {epochs}, step {steps} ({reason}); no step" in x for x in again.lines)
        assert again.loop.ending.finished and again.loop.epoch == epochs


def test_request_stop_ends_after_the_step_and_says_why(tmp_path: Path) -> None:
    tails: list[int] = []

    def inside(loop: Any, step: int) -> None:
        if step == 6:
            loop.request_stop("looks good")

    tiny = Tiny(tmp_path / "run", max_epoch=5).train(inside=inside, tail=lambda loop, e: tails.append(e))
    assert (tiny.loop.step, tiny.loop.ending.reason, tiny.loop.ending.finished) == (6, "looks good", True)
    assert tails == [1, 2]
    assert Tiny(tmp_path / "run", max_epoch=5).train().seen == []


@pytest.mark.parametrize("way", ["max_time", "StopAfter"])
def test_a_time_budget_interrupts_with_exit_code_3_and_the_run_goes_on(tmp_path: Path, way: str) -> None:
    looks = Told("looks", lambda boundary: None)  # due at each step: the budget is noticed there
    straight = Tiny(tmp_path / "straight", max_epoch=3, services=[looks]).train()
    clock = ManualClock()

    def start() -> Tiny:
        services: list[Service] = [looks]
        if way == "StopAfter":
            services.append(everstep.services.StopAfter(seconds=50))
        limit: dict[str, Any] = {} if way == "StopAfter" else {"max_time": 50}
        return Tiny(tmp_path / "run", max_epoch=3, clock=clock, services=services, **limit)

    ran = []
    for _ in range(2):
        tiny = start()
        with pytest.raises(Interrupted, match="time budget of 50 s is used up") as raised:
            tiny.train(inside=lambda loop, step: clock.advance(10))
        assert raised.value.code == 3
        assert not tiny.loop.ending.finished
        assert tiny.loop.ending.reason == "time budget of 50 s is used up"
        assert any("start again to continue" in line for line in tiny.lines)
        ran.append(tiny.loop.step)
    tiny = start().train(inside=lambda loop, step: clock.advance(10))
    assert ran == [5, 10]
    assert tiny.result() == straight.result()


LOSSES = [5.0, 4.0, 4.5, 3.0, 3.5, 3.2, 3.1, 1.0, 0.5, 0.4, 0.3]


def validate(loop: Any, epoch: int) -> None:
    loop.collect_metrics(valid_loss=LOSSES[epoch - 1])


def stopping(run_dir: Path, patience: int = 3, **arguments: Any) -> Tiny:
    stopper = everstep.EarlyStop("valid_loss", patience=patience)
    return Tiny(run_dir, services=[stopper], **{"max_epoch": 11, **arguments})


def test_early_stop_really_stops_at_the_exact_epoch(tmp_path: Path) -> None:
    tiny = stopping(tmp_path / "run").train(tail=validate)
    assert (tiny.loop.epoch, tiny.loop.step) == (7, 28)
    assert tiny.loop.ending.reason == "early stop: valid_loss has not improved on 3.0 for 3 evaluations"
    assert tiny.loop.best_valid_metric == 3.0
    assert everstep.load(tmp_path / "run" / "best" / "valid_loss", {"w": np.zeros(3)}).epoch == 4
    assert [e["by"] for e in events(tmp_path / "run", "stop")] == ["early stop valid_loss"]


def test_early_stop_on_steps_means_min_delta_and_min_steps(tmp_path: Path) -> None:
    stopper = everstep.EarlyStop(
        "score", "max", patience=2, min_delta=0.5, min_steps=9, every=Every(steps=3), name="stopper"
    )

    def inside(loop: Any, step: int) -> None:
        loop.collect_metrics(score=1.0 + 0.01 * step)

    tiny = Tiny(tmp_path / "run", max_epoch=9, services=[stopper]).train(inside=inside)
    assert tiny.loop.step == 9
    assert stopper.waited == 2


def test_a_lowered_limit_runs_no_step(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=3).train()
    for limits in ({"max_epoch": 1}, {"max_epoch": 3, "max_step": 2}):
        again = Tiny(tmp_path / "run", **limits).train()
        assert again.seen == [] and again.w.tobytes() == tiny.w.tobytes()
        assert again.loop.step == 12
    with pytest.raises(Boom):
        Tiny(tmp_path / "cut", max_epoch=3, services=[everstep.Checkpoints(Every(steps=1))]).train(boom_at(7))
    tiny = Tiny(tmp_path / "cut", max_step=3).train()
    assert tiny.seen == [] and tiny.loop.step == 6 and tiny.loop.ending.finished


def stops_at_6() -> Service:
    """A stopper of the user's own, without a configuration."""
    stop = Outcome(actions=(Stop("mine"),))
    return Acts("mine", lambda boundary: stop if boundary.step == 6 else None, Stage.DECIDE)


def test_a_changed_controller_in_the_middle_of_a_run_must_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        stopping(tmp_path / "run").train(inside=boom_at(6), tail=validate)
    with pytest.raises(ConfigError, match=r"'patience': 3.*'patience': 4.*on_change=\"override\""):
        stopping(tmp_path / "run", patience=4).train(tail=validate)
    with pytest.raises(ConfigError, match=r"given none"):
        Tiny(tmp_path / "run", max_epoch=11).train(tail=validate)
    tiny = stopping(tmp_path / "run", patience=4, on_change="override").train(tail=validate)
    assert any("changed since the checkpoint, and used as given" in line for line in tiny.lines)
    assert tiny.loop.epoch == 11  # 3.0 at epoch 4, then three that are worse, then 1.0


REOPENED: dict[str, tuple[Any, Any, tuple[int, int]]] = {
    "by a later StopAfter": (
        lambda: everstep.services.StopAfter(steps=6),
        lambda: everstep.services.StopAfter(steps=99),
        (2, 7),
    ),
    "without a stopper of its own": (stops_at_6, None, (2, 7)),
    "without the early stop": (lambda: everstep.EarlyStop("valid_loss", patience=3), None, (8, 29)),
}


@pytest.mark.parametrize(("first", "then", "goes_on"), REOPENED.values(), ids=REOPENED)
def test_a_run_that_a_service_has_ended_is_reopened_by_changing_it(
    tmp_path: Path, first: Any, then: Any, goes_on: tuple[int, int]
) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=11).train(tail=validate)
    Tiny(tmp_path / "run", max_epoch=10, services=[first()]).train(tail=validate)
    again = Tiny(tmp_path / "run", max_epoch=11, services=[first()]).train(tail=validate)
    assert again.seen == [] and again.loop.ending.finished
    services = [then()] if then else []
    tiny = Tiny(tmp_path / "run", max_epoch=11, services=services).train(tail=validate)
    assert tiny.seen[0][:2] == goes_on
    assert tiny.w.tobytes() == straight.w.tobytes() and rows(tmp_path / "run") == rows(tmp_path / "straight")


Kept = dict[int, tuple[bytes, bytes]]


def with_best(run_dir: Path, restore: bool = True, fails_at: int = 0, **arguments: Any) -> tuple[Tiny, Kept]:
    """Trained, with the weights and the momentum of each epoch."""
    services = [everstep.Best("valid_loss", restore_at_end=restore), *arguments.pop("services", ())]
    tiny, kept = Tiny(run_dir, services=services, **{"max_epoch": 7, **arguments}), Kept()

    def tail(loop: Any, epoch: int) -> None:
        validate(loop, epoch)
        kept[epoch] = tiny.w.tobytes(), tiny.momentum.tobytes()
        if epoch == fails_at:
            raise Boom

    if fails_at:
        with pytest.raises(Boom):
            tiny.train(tail=tail)
    else:
        tiny.train(tail=tail)
    return tiny, kept


def test_restore_at_end_gives_the_best_whole_and_resumes_from_the_last(tmp_path: Path) -> None:
    tiny, kept = with_best(tmp_path / "run")
    assert (tiny.w.tobytes(), tiny.momentum.tobytes()) == kept[4]  # weights and momentum
    assert any("best weights by valid_loss (3, step 16) are loaded" in line for line in tiny.lines)
    assert tiny.loop.best is not None and tiny.loop.best.path is not None
    again, _ = with_best(tmp_path / "run")  # finished: no step, the best is given again
    assert again.seen == [] and again.w.tobytes() == tiny.w.tobytes()
    straight = Tiny(tmp_path / "straight", max_epoch=11).train(tail=validate)
    goes_on, _ = with_best(tmp_path / "run", restore=False, max_epoch=11)
    assert goes_on.seen[0][:2] == (8, 29)
    assert goes_on.w.tobytes() == straight.w.tobytes()
    assert goes_on.momentum.tobytes() == straight.momentum.tobytes()


def test_restore_at_end_not_after_an_exception_and_not_without_a_best(tmp_path: Path) -> None:
    tiny, kept = with_best(tmp_path / "fails", fails_at=6)
    assert tiny.w.tobytes() == kept[6][0]
    services = [everstep.Best("valid_loss", restore_at_end=True)]
    tiny = Tiny(tmp_path / "nan", max_epoch=2, services=services, default_services=False)
    tiny.train(tail=lambda loop, epoch: loop.collect_metrics(valid_loss=float("nan")))
    assert tiny.w.tobytes() == Tiny(tmp_path / "plain", max_epoch=2).train().w.tobytes()
    assert tiny.loop.best is None


def test_a_cut_epoch_without_a_checkpoint_inside_says_so_and_the_next_begins(tmp_path: Path) -> None:
    def train(max_step: int) -> Tiny:
        tiny = Tiny(tmp_path / "run", max_step=max_step)
        with tiny.loop as loop:
            for _ in loop.iter_epochs():
                for step, (ids,) in loop.iter_steps(tiny.data):
                    tiny.update(ids)
                    if step == 3:
                        break  # a step that is left has no snapshot, and here the limit ends the run, too
                list(loop.iter_steps([7, 8], "extra"))
        return tiny

    train(3)
    tiny = train(5)
    assert any("epoch 1 stays cut short and the next one begins" in line for line in tiny.lines)
    assert tiny.loop.ending.step == 5


def test_a_stop_that_is_decided_anew_is_saved_at_the_same_boundary(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=2).train()
    Tiny(tmp_path / "run", max_step=8).train()
    tiny = Tiny(tmp_path / "run", max_epoch=2).train()
    assert tiny.seen == [] and tiny.loop.ending.reason == "max_epoch 2 is reached"
    assert tiny.result() == straight.result()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[1:] == [
        "epoch-0001-step-00000004",
        "epoch-0002-step-00000008",
    ]
    assert "finished at epoch 2" in "".join(Tiny(tmp_path / "run", max_epoch=2).train().lines)
