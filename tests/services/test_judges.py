"""Services that judge a metric or the run's progress act in time; `check_service` has their crashes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from crashing import collecting, run

import everstep
import warm
from everstep import EarlyStop, Every, Service, Stop
from everstep.errors import ConfigError, GuardStop, LossBoundError
from everstep.services import Annealing, LossBound, Plateau, Require, Scheduled, SetValue
from everstep.services.judges import Judge
from everstep.supervisor.opening.configuration import changed_controllers
from tiny_runs import Boom, Tiny, boom_at, rows

NAN, INF = float("nan"), float("inf")
OVER = "max_epoch {} is reached"
UNMET = "requirement not met: acc has not reached 0.9 by epoch 3, its best is 0.8"

CASES: list[tuple[Callable[[], Service], list[float], int, str, int]] = [
    # patience in steps counts from the last improvement
    (
        lambda: EarlyStop("acc/v", "min", patience_steps=9),
        *([1.0, 0.5, 0.6, 0.7, 0.8], 9, "early stop: acc/v has not improved on 0.5 for 12 steps", 20),
    ),
    # a threshold stops at once, or after min_steps
    (
        lambda: EarlyStop("acc", threshold=0.9),
        *([0.2, 0.95, NAN], 9, "early stop: acc has reached 0.9 with 0.95", 8),
    ),
    (
        lambda: EarlyStop("v_loss", threshold=0.1, min_steps=9),
        *([0.1], 9, "early stop: v_loss has reached 0.1 with 0.1", 12),
    ),
    # what is not better than the baseline is no improvement
    (
        lambda: EarlyStop("v_loss", patience=3, baseline=0.5),
        *([0.9, 0.8, 0.7], 9, "early stop: v_loss has not improved on 0.5 for 3 evaluations", 12),
    ),
    # a plateau stops; what gets better is none, and NaN does not count
    (
        lambda: Plateau("acc", then=Stop("no better"), long=4, short=2),
        *([0.1, 0.5, 0.9, 0.8, 0.7, 0.6], 9, "no better", 24),
    ),
    (
        lambda: Plateau("perplexity", "min", then=Stop("no better"), long=4, short=2),
        *([9, 8, NAN, 7, 6, INF, 5, 4], 8, OVER.format(8), 32),
    ),
    # any value before the deadline reaches a requirement; one is not met where a limit ends the run, too
    (lambda: Require("acc", 0.8, epoch=3), [0.5, 0.8, 0.6], 4, OVER.format(4), 16),
    (lambda: Require("acc", 0.9, epoch=3), [0.5, 0.8, 0.6], 4, UNMET, 12),
    (lambda: Require("acc", 0.9, epoch=3), [0.5, 0.8, 0.6], 3, UNMET, 12),
    (lambda: Require("nothing", 0.5, "min", step=2), [1], 1, "... by step 2, it has no value", 2),
    (lambda: LossBound(bound=1e9, times=1e9, last=3), [1], 2, OVER.format(2), 8),
]


def test_each_judges_in_time(tmp_path: Path) -> None:
    for number, (make, values, max_epoch, reason, step) in enumerate(CASES):
        judge: Any = make()
        name = judge.metric if judge.metric not in ("loss", "nothing") else "x"
        tiny = run(tmp_path / str(number), [judge], collecting(name, values), max_epoch=max_epoch)
        assert tiny.loop.ending.reason.endswith(reason.removeprefix("...")), number
        assert tiny.loop.ending.step == step, number


def advance(run_dir: Path, losses: Sequence[float | None], *services: Service, crash: int = 0) -> Any:
    """A Supervisor's steps with these losses; None is a step without."""
    saves, state = everstep.Checkpoints(Every(steps=2)), {"seen": {"sum": 0.0}}
    with everstep.Supervisor(run_dir, state, services=[*services, saves], max_step=len(losses), seed=1) as sv:
        sv.stream(None)
        while not sv.should_stop():
            if sv.step + 1 == crash:
                raise Boom
            loss = losses[sv.step]
            state["seen"]["sum"] += loss or 0.0
            sv.advance(**({} if loss is None else {"loss": loss}))
    return sv


def test_without_any_value_steps_of_patience_do_not_pass(tmp_path: Path) -> None:
    sv = advance(tmp_path, [None] * 3 + [1.0] * 6, EarlyStop("loss", patience_steps=2, every=Every(steps=1)))
    assert (sv.step, sv.ending.reason) == (6, "early stop: loss has not improved on 1.0 for 2 steps")


def lowered(run_dir: Path, crash: int = 0) -> tuple[str | None, float, list[Any]]:
    """A model whose validation loss stands still from the first epoch on; two steps an epoch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    data = everstep.data.arrays(torch.arange(8.0).reshape(4, 2) / 8, batch_size=2, shuffle=True)
    lower = SetValue("optimizer.lr", times=0.5, least=0.2)
    services = [Plateau("valid_loss", then=lower, long=3, short=1, cooldown=1)]
    with everstep.TrainLoop(
        run_dir, {"model": model, "optimizer": optimizer}, max_epoch=10, seed=1, services=services
    ) as loop:
        for _ in loop.iter_epochs():
            for step, (x,) in loop.iter_steps(data):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if step == crash:
                    raise Boom
            loop.collect_metrics(valid_loss=1.0)
    return loop.ending.digest, optimizer.param_groups[0]["lr"], rows(run_dir)


def test_the_learning_rate_falls_and_rests_and_is_exact_over_resumes(tmp_path: Path) -> None:
    whole = lowered(tmp_path / "whole")
    changes = [(row[0], float.fromhex(row[5])) for row in whole[2] if row[3] == "optimizer.lr"]
    assert changes == [(3, 0.5), (5, 0.25), (7, 0.2)] and whole[1] == 0.2
    for crash in (7, 11):
        with pytest.raises(Boom):
            lowered(tmp_path / str(crash), crash)
        assert lowered(tmp_path / str(crash)) == whole


PROGRAM = """
import sys
import everstep
from everstep.services import Require

required = Require("loss", float(sys.argv[1]), step=4, every=everstep.Every(steps=2))
with everstep.Supervisor("run", services=[required], max_step=6, on_change=sys.argv[2]) as sv:
    sv.stream(None)
    while not sv.should_stop():
        sv.advance(loss=1.0)
"""


def test_exit_status_4_again_and_again_until_the_requirement_changes(tmp_path: Path) -> None:
    def status(goal: str, on_change: str = "error") -> int:
        command = [sys.executable, "-c", PROGRAM, goal, on_change]
        return warm.run(command, cwd=tmp_path, capture_output=True).returncode

    assert [status("0.5"), status("0.5"), status("1.0", "override")] == [4, 4, 0]


def test_a_run_that_is_over_before_fails_and_goes_on_with_a_raised_limit(tmp_path: Path) -> None:
    """Its end is its own: an early stop, a limit."""

    def start(max_epoch: int, stopped: bool = False) -> str:
        patience = [EarlyStop("acc", threshold=0.7)] if stopped else []
        services = [Require("acc", 0.9, epoch=9), *patience]
        tiny = Tiny(tmp_path / str(stopped), max_epoch=max_epoch, services=services)
        with pytest.raises(GuardStop) as raised:
            tiny.train(tail=collecting("acc", [0.5, 0.8, 0.6]))
        assert raised.value.code == 4 and tiny.loop.ending.finished
        assert raised.value.reason == tiny.lines[-1]
        return raised.value.reason

    unmet = "requirement not met: acc has not reached 0.9, its best is"
    assert start(1) == start(1) == f"{unmet} 0.5 (max_epoch 1 is reached)"
    assert start(3) == f"{unmet} 0.8 (max_epoch 3 is reached)"
    assert start(5, stopped=True).startswith(f"{unmet} 0.8 (early stop: ")


def test_a_run_that_is_left_is_not_judged_and_what_came_after_the_last_look_counts(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        run(tmp_path / "left", [Require("loss", 0.0, "min", epoch=9)], inside=boom_at(3), max_epoch=1)
    assert advance(tmp_path / "late", [0.5, 0.5], Require("loss", 0.5, step=9)).ending.finished


QUIET = [1.0, 1.2, 0.9, 1.1, 1.0, 0.8]
BROKEN: list[tuple[dict[str, Any], list[float], str]] = [
    ({"bound": 10}, [*QUIET, 50.0, 1.0], r"loss is 50 at step 7, above its bound 10;.*batch"),
    ({"bound": 10, "every": Every(steps=4)}, [1.0, 50.0, *QUIET], "loss is 50 at step 4"),  # a rare look
    ({"bound": 1e300}, [1.0, NAN], "at step 2, which is not finite"),
    ({"bound": 1e300}, [1.0, INF], "at step 2, which is not finite"),
    ({"times": 10, "last": 5}, [1.0, NAN, 1.0], "at step 2, which is not finite"),  # no median yet
    ({"times": 10, "last": 5}, [1.0, INF, 1.0], "at step 2, which is not finite"),
]


@pytest.mark.parametrize(("arguments", "losses", "message"), BROKEN)
def test_what_is_above_a_bound(
    tmp_path: Path, arguments: dict[str, Any], losses: list[float], message: str
) -> None:
    with pytest.raises(LossBoundError, match=message):
        advance(tmp_path, losses, LossBound(**arguments))


def test_policy_stop_ends_as_written_with_exit_status_1(tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="above its bound 2") as caught:
        advance(tmp_path, [1.0, 1.0, 3.0, 1.0], LossBound(bound=2, policy="stop"))
    assert caught.value.code == 1


def test_after_a_broken_bound_the_run_goes_on_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    for losses in ([*QUIET, 50.0, 1.0], [*QUIET, 1.0, 1.0]):
        with contextlib.suppress(LossBoundError):
            sv = advance(tmp_path, losses, LossBound(bound=10))
    assert sv.ending.finished and sv.ending.resumed_from == "step-00000006"


def test_times_a_running_median_over_a_crash(tmp_path: Path) -> None:
    losses = [9.0, *QUIET, 6.0, 1.0]
    with pytest.raises(Boom):
        advance(tmp_path, losses, LossBound(times=5, last=5), crash=6)
    message = "loss is 6 at step 8, above 5 times 1, the median of the last 5"
    with pytest.raises(LossBoundError, match=message):
        advance(tmp_path, losses, LossBound(times=5, last=5))


def test_annealing_begins_with_the_initial_value_and_stays_between_its_bounds() -> None:
    """Of step 1, as TFSnippet's AnnealingScalar, and for `every` steps; before the first it is that, too."""
    assert [Annealing(1.0, 0.5)(step) for step in range(4)] == [1, 1, 0.5, 0.25]
    rarely = Annealing(1.0, 0.5, every=3)
    assert [rarely(step) for step in range(10)] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    falling = Annealing(1.0, 0.5, every=10, least=0.2)
    assert [falling(step) for step in (10, 11, 20, 21, 31, 10**6)] == [1, 0.5, 0.5, 0.25, 0.2, 0.2]
    assert Annealing(1.0, 2.0, most=3.0)(9) == 3.0


def scheduled(run_dir: Path, *services: Service, crash: int = 0, **arguments: Any) -> tuple[Any, list[float]]:
    """Two steps an epoch; it tells the rows, and the rate of each step of this start."""
    settings, rates = {"rate": -1.0}, []
    listed = [*services, everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
    arguments = {"max_epoch": 6, "steps_per_epoch": 2, "seed": 1, **arguments}
    with everstep.TrainLoop(run_dir, {"settings": settings}, services=listed, **arguments) as loop:
        for _ in loop.iter_epochs():
            for step in loop.iter_steps():
                rates.append(settings["rate"])
                if step == crash:
                    raise Boom
    return rows(run_dir), rates


@pytest.mark.parametrize(
    ("every", "rates"),
    [
        (None, [8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1]),
        (Every(steps=4), [8, 8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2]),
    ],
)
def test_each_step_has_its_value_after_a_crash(tmp_path: Path, every: Any, rates: list[float]) -> None:
    schedule = Annealing(8, 0.5, every=3, least=1)
    whole, seen = scheduled(tmp_path / "whole", Scheduled("settings.rate", schedule, every=every))
    assert seen == rates
    changes = {row[1]: float.fromhex(row[5]) for row in whole if row[3] == "settings.rate"}
    settings = [-1, *rates, 1]  # the last is that of step 13, which a raised limit would make
    assert changes == {step: settings[step + 1] for step in range(13) if settings[step + 1] != settings[step]}
    with pytest.raises(Boom):
        scheduled(tmp_path / "run", Scheduled("settings.rate", schedule, every=every), crash=8)
    again, seen = scheduled(tmp_path / "run", Scheduled("settings.rate", schedule, every=every))
    assert again == whole and seen == rates[12 - len(seen) :]


def test_another_schedule_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        scheduled(tmp_path, Scheduled("settings.rate", Annealing(8, 0.5)), crash=4)
    changed = Scheduled("settings.rate", Annealing(8, 0.25))
    with pytest.raises(ConfigError, match=r"schedule of settings\.rate.*ratio=0\.5.*ratio=0\.25"):
        scheduled(tmp_path, changed)
    assert scheduled(tmp_path, changed, on_change="override")[1][-1] == 8 * 0.25**11


EVERY_EPOCH = "Every(steps=None, epochs=1, seconds=None)"
EARLY = {"metric": "loss", "mode": "min", "patience": 5, "min_delta": 0.0, "min_steps": 0}
ACC = {"metric": "acc", "mode": "max", "every": EVERY_EPOCH}
THEN = "SetValue(target='optimizer.lr', value=None, times=0.1, least=-inf)"
STORED: list[tuple[Judge, dict[str, Any]]] = [
    (EarlyStop("loss", patience=5), EARLY | {"every": EVERY_EPOCH}),
    (
        Plateau("acc", then=SetValue("optimizer.lr", times=0.1), long=5, short=2),
        ACC | {"then": THEN, "long": 5, "short": 2, "cooldown": 5},
    ),
    (
        Require("loss", 1.0, step=7),
        {"metric": "loss", "value": 1.0, "mode": "min", "step": 7, "every": f"(At(7) | {EVERY_EPOCH})"},
    ),
    (everstep.services.StopAfter(steps=9), {"steps": 9, "epochs": None}),
]
"""Judges, and what checkpoints have of them."""


def test_settings_are_compared_one_by_one_and_shown() -> None:
    for service, stored in STORED:
        for other in [stored, *({**stored, name: "other"} for name in stored)]:
            changed = changed_controllers({service.name: other}, {service.name: service.config()}, None)
            assert bool(changed) == (other is not stored), (service, other)
    assert repr(EarlyStop("loss", patience=5, every=Every(steps=3), name="mine")) == (
        "EarlyStop(name='mine', metric='loss', mode='min', patience=5, min_delta=0.0, min_steps=0, "
        "every=Every(steps=3, epochs=None, seconds=None))"
    )


def test_a_subclass_has_the_settings_of_the_one_above_and_no_two_share_a_schedule() -> None:
    class Patient(EarlyStop):
        def __init__(self, metric: str, times: int) -> None:
            super().__init__(metric, patience=10 * times)

    assert Patient("loss", 2).config() == EarlyStop("loss", patience=20).config()
    first, second = LossBound(bound=1.0), LossBound(bound=1.0, name="second")
    assert first.schedule == LossBound.default_schedule and first.schedule is not second.schedule
