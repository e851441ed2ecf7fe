"""Services that judge a metric or the run's progress: they act in time, and exactly so after any crash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from crashing import check_crashes, collecting, run

import everstep
import warm
from everstep import EarlyStop, Every, Service, SetValue, Stop
from everstep.errors import ConfigError, GuardStop, LossBoundError
from everstep.schedule import Schedule
from everstep.services import Annealing, LossBound, Plateau, Require, Scheduled
from everstep.services.judges import Judge
from everstep.supervisor.opening.comparing import changed_controllers
from gate import share
from tiny_runs import Boom, Tiny, boom_at, rows

NAN, INF = float("nan"), float("inf")
LOWER = SetValue("optimizer.lr", times=0.5, least=0.2)
OVER = "max_epoch {} is reached"
UNMET = "requirement not met: acc has not reached 0.9 by epoch 3, its best is 0.8"


class Case(NamedTuple):
    """Service, metric of each epoch's tail, its values, max_epoch: the reason of the end, and its step."""

    make: Callable[[], Service]
    metric: str
    values: list[float]
    max_epoch: int
    reason: str
    step: int


CASES = {
    "patience in steps counts from the last improvement": Case(
        lambda: EarlyStop("loss/v", "min", patience_steps=9),
        *(
            "loss/v",
            [1.0, 0.5, 0.6, 0.7, 0.8],
            9,
            "early stop: loss/v has not improved on 0.5 for 12 steps",
            20,
        ),
    ),
    "a threshold stops at once": Case(
        lambda: EarlyStop("acc", threshold=0.9),
        *("acc", [0.2, 0.95, NAN], 9, "early stop: acc has reached 0.9 with 0.95", 8),
    ),
    "a threshold waits for min_steps": Case(
        lambda: EarlyStop("v_loss", threshold=0.1, min_steps=9),
        *("v_loss", [0.1], 9, "early stop: v_loss has reached 0.1 with 0.1", 12),
    ),
    "what is not better than the baseline is no improvement": Case(
        lambda: EarlyStop("v_loss", patience=3, baseline=0.5),
        *("v_loss", [0.9, 0.8, 0.7], 9, "early stop: v_loss has not improved on 0.5 for 3 evaluations", 12),
    ),
    "a plateau stops": Case(
        lambda: Plateau("acc", then=Stop("no better"), long=4, short=2),
        *("acc", [0.1, 0.5, 0.9, 0.8, 0.7, 0.6], 9, "no better", 24),
    ),
    "what gets better is no plateau, and NaN does not count": Case(
        lambda: Plateau("perplexity", "min", then=Stop("no better"), long=4, short=2),
        *("perplexity", [9, 8, NAN, 7, 6, INF, 5, 4], 8, OVER.format(8), 32),
    ),
    "any value before the deadline reaches it": Case(
        lambda: Require("acc", 0.8, epoch=3), "acc", [0.5, 0.8, 0.6], 4, OVER.format(4), 16
    ),
    "a requirement is not met": Case(
        lambda: Require("acc", 0.9, epoch=3), "acc", [0.5, 0.8, 0.6], 4, UNMET, 12
    ),
    "a requirement is not met where a limit ends the run": Case(
        lambda: Require("acc", 0.9, epoch=3), "acc", [0.5, 0.8, 0.6], 3, UNMET, 12
    ),
    "no bound is broken": Case(
        lambda: LossBound(bound=1e9, times=1e9, last=3), "x", [1], 2, OVER.format(2), 8
    ),
}


@pytest.mark.campaign("long", gate="share")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_judges_and_no_crash_changes_that(tmp_path: Path, case: Case) -> None:
    tail = collecting(case.metric, case.values)
    tiny = check_crashes(tmp_path, lambda: [case.make()], tail, max_epoch=case.max_epoch)
    assert (tiny.loop.ending.reason, tiny.loop.ending.step) == (case.reason, case.step)


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
    stop = EarlyStop("loss", patience_steps=2, every=Every(steps=1))
    sv = advance(tmp_path, [None] * 3 + [1.0] * 6, stop)
    assert sv.ending.reason == "early stop: loss has not improved on 1.0 for 2 steps"
    assert sv.step == 6


# ---------------------------------------------------------------------------------- plateau: values


def lowered(run_dir: Path, crash: int = 0) -> tuple[str | None, float, list[Any]]:
    """A model whose validation loss stands still from the first epoch on; two steps an epoch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    data = everstep.data.arrays(torch.arange(8.0).reshape(4, 2) / 8, batch_size=2, shuffle=True)
    services = [Plateau("valid_loss", then=LOWER, long=3, short=1, cooldown=1)]
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
    assert changes == [(3, 0.5), (5, 0.25), (7, 0.2)]
    assert whole[1] == 0.2
    for crash in (5, 7, 11, 20):
        with pytest.raises(Boom):
            lowered(tmp_path / str(crash), crash)
        assert lowered(tmp_path / str(crash)) == whole


# ------------------------------------------------------------------------------------- requirements

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


def test_no_value_at_all(tmp_path: Path) -> None:
    tiny = run(tmp_path, [Require("nothing", 0.5, "min", step=2)], max_epoch=1)
    assert tiny.loop.ending.reason.endswith("by step 2, it has no value")


@pytest.mark.campaign("long")
def test_a_run_that_is_over_before_fails_and_goes_on_with_a_raised_limit(tmp_path: Path) -> None:
    """Its end is its own: an early stop, a limit."""

    def start(max_epoch: int, stopped: bool = False) -> str:
        patience = [EarlyStop("acc", threshold=0.7)] if stopped else []
        services = [Require("acc", 0.9, epoch=9), *patience]
        tiny = Tiny(tmp_path / str(stopped), max_epoch=max_epoch, services=services)
        with pytest.raises(GuardStop) as raised:
            tiny.train(tail=collecting("acc", [0.5, 0.8, 0.6]))
        assert raised.value.code == 4
        assert tiny.loop.ending.finished
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


# --------------------------------------------------------------------------------------- loss bounds

QUIET = [1.0, 1.2, 0.9, 1.1, 1.0, 0.8]


def test_one_step_above_an_absolute_bound(tmp_path: Path) -> None:
    with pytest.raises(LossBoundError, match=r"loss is 50 at step 7, above its bound 10;.*batch"):
        advance(tmp_path, [*QUIET, 50.0, 1.0], LossBound(bound=10))
    assert advance(tmp_path, [*QUIET, 1.0, 1.0], LossBound(bound=10)).ending.resumed_from == "step-00000006"


BROKEN: list[tuple[dict[str, Any], list[float | None], str]] = [
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


@pytest.mark.campaign("long", gate="share")
def test_times_a_running_median_killed_in_any_step(tmp_path: Path) -> None:
    losses = [9.0, *QUIET, 6.0, 1.0]
    for crash in share(range(1, 9), 2):
        with pytest.raises(Boom):
            advance(tmp_path / str(crash), losses, LossBound(times=5, last=5), crash=crash)
        with pytest.raises(
            LossBoundError, match="loss is 6 at step 8, above 5 times 1, the median of the last 5"
        ):
            advance(tmp_path / str(crash), losses, LossBound(times=5, last=5))


def test_policy_stop_ends_as_written_with_exit_status_1(tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="above its bound 2") as caught:
        advance(tmp_path, [1.0, 1.0, 3.0, 1.0], LossBound(bound=2, policy="stop"))
    assert caught.value.code == 1


# --------------------------------------------------------------------------------- scheduled values


def test_annealing_begins_with_the_initial_value_and_stays_between_its_bounds() -> None:
    """Of step 1, as TFSnippet's AnnealingScalar, and for `every` steps; before the first it is that, too."""
    assert [Annealing(1.0, 0.5)(step) for step in range(4)] == [1, 1, 0.5, 0.25]
    rarely = Annealing(1.0, 0.5, every=3)
    assert [rarely(step) for step in range(10)] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    falling = Annealing(1.0, 0.5, every=10, least=0.2)
    assert [falling(step) for step in (10, 11, 20, 21, 31, 10**6)] == [1, 0.5, 0.5, 0.25, 0.2, 0.2]
    assert Annealing(1.0, 2.0, most=3.0)(9) == 3.0


def scheduled(
    run_dir: Path, services: Sequence[Service], crash: int = 0, **arguments: Any
) -> tuple[str | None, list[float], Any]:
    """Two steps an epoch; it tells the rate of each step of this start."""
    settings, rates = {"rate": -1.0, "sum": 0.0}, []
    services = [*services, everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
    arguments = {"max_epoch": 6, "steps_per_epoch": 2, "seed": 1, **arguments}
    with everstep.TrainLoop(run_dir, {"settings": settings}, services=services, **arguments) as loop:
        for _ in loop.iter_epochs():
            for step in loop.iter_steps():
                rates.append(settings["rate"])
                settings["sum"] += settings["rate"] * step
                if step == crash:
                    raise Boom
    return loop.ending.digest, rates, rows(run_dir)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("every", "rates"),
    [
        (None, [8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1]),
        (Every(steps=4), [8, 8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2]),
    ],
)
def test_each_step_has_its_value_after_any_crash(
    tmp_path: Path, every: Schedule | None, rates: list[float]
) -> None:
    def services() -> list[Service]:
        return [Scheduled("settings.rate", Annealing(8, 0.5, every=3, least=1), every=every)]

    whole = scheduled(tmp_path / "whole", services())
    assert whole[1] == rates
    changes = {row[1]: float.fromhex(row[5]) for row in whole[2] if row[3] == "settings.rate"}
    settings = [-1, *rates, 1]  # the last is that of step 13, which a raised limit would make
    assert changes == {step: settings[step + 1] for step in range(13) if settings[step + 1] != settings[step]}
    for crash in share(range(1, 13), 3):
        run_dir = tmp_path / str(crash)
        with pytest.raises(Boom):
            scheduled(run_dir, services(), crash)
        digest, seen, found = scheduled(run_dir, services())
        assert (digest, found) == (whole[0], whole[2])
        assert seen == rates[12 - len(seen) :]


def test_another_schedule_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        scheduled(tmp_path, [Scheduled("settings.rate", Annealing(8, 0.5))], crash=4)
    changed = [Scheduled("settings.rate", Annealing(8, 0.25))]
    with pytest.raises(ConfigError, match=r"schedule of settings\.rate.*ratio=0\.5.*ratio=0\.25"):
        scheduled(tmp_path, changed)
    assert scheduled(tmp_path, changed, on_change="override")[1][-1] == 8 * 0.25**11


# --------------------------------------------------------------------------------------- the settings

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
    (everstep.StopAfter(steps=9), {"steps": 9, "epochs": None}),
]
"""Judges, and what checkpoints have of them."""


@pytest.mark.parametrize(("service", "stored"), STORED, ids=[type(s).__name__ for s, _ in STORED])
def test_settings_are_compared_one_by_one(service: Judge, stored: dict[str, Any]) -> None:
    def is_changed(other: dict[str, Any]) -> bool:
        return bool(
            changed_controllers({service.name: other}, {service.name: service.config()}, None).touching
        )

    assert not is_changed(stored)
    assert all(is_changed(stored | {name: "other" if stored[name] is None else None}) for name in stored)


def test_the_repr_shows_the_settings_and_a_subclass_has_those_of_the_one_above() -> None:
    class Patient(EarlyStop):
        def __init__(self, metric: str, times: int) -> None:
            super().__init__(metric, patience=10 * times)

    assert Patient("loss", 2).config() == EarlyStop("loss", patience=20).config()
    assert repr(EarlyStop("loss", patience=5, every=Every(steps=3), name="mine")) == (
        "EarlyStop(name='mine', metric='loss', mode='min', patience=5, min_delta=0.0, min_steps=0, "
        "every=Every(steps=3, epochs=None, seconds=None))"
    )


def test_a_schedule_that_is_given_to_two_services_stays_as_it_is() -> None:
    first, second = LossBound(bound=1.0), LossBound(bound=1.0, name="second")
    assert first.schedule == LossBound.default_schedule
    assert first.schedule is not second.schedule
