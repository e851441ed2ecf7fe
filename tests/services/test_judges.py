"""Services that judge the run, and those that act: in time, and exactly over a crash."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
import warm
from everstep import EarlyStop, Every, Outcome, Save, Service, Stop, services
from everstep.errors import ConfigError, GuardStop, LossBoundError, ServiceError, UsageError
from everstep.services import (
    Annealing,
    GlobalStepWaiter,
    Interrupt,
    LossBound,
    OnBest,
    Plateau,
    Require,
    Scheduled,
    SetValue,
    Stage,
    When,
)
from everstep.services.judges import Judge
from everstep.supervisor.opening.configuration import changed_controllers
from everstep.testing import ManualClock
from tiny_runs import Acts, Boom, Tiny, boom_at, collecting, events, quiet, rows, serviced, supervised

NAN, INF = float("nan"), float("inf")
OVER, STOP = "max_epoch {} is reached", Stop("no better")
UNMET = "requirement not met: acc has not reached 0.9 by epoch 3, its best is 0.8"

CASES: list[tuple[Any, list[float], int, str, int]] = [
    # patience in steps counts from the last improvement
    (
        EarlyStop("acc/v", "min", patience_steps=9),
        *([1.0, 0.5, 0.6, 0.7, 0.8], 9, "early stop: acc/v has not improved on 0.5 for 12 steps", 20),
    ),
    # a threshold stops at once, or after min_steps
    (EarlyStop("acc", threshold=0.9), [0.2, 0.95, NAN], 9, "early stop: acc has reached 0.9 with 0.95", 8),
    (
        EarlyStop("v_loss", threshold=0.1, min_steps=9),
        *([0.1], 9, "early stop: v_loss has reached 0.1 with 0.1", 12),
    ),
    # patience counts evaluations, a tie is no improvement
    (
        EarlyStop("valid_loss", patience=3),
        *([5.0, 4.0, 4.5, 3.0, 3.5, 3.2, 3.0], 9),
        *("early stop: valid_loss has not improved on 3.0 for 3 evaluations", 28),
    ),
    # what is not better than the baseline is no improvement
    (
        EarlyStop("v_loss", patience=3, baseline=0.5),
        *([0.9, 0.8, 0.7], 9, "early stop: v_loss has not improved on 0.5 for 3 evaluations", 12),
    ),
    # a plateau stops; what gets better is none, and NaN does not count
    (Plateau("acc", then=STOP, long=4, short=2), [0.1, 0.5, 0.9, 0.8, 0.7, 0.6], 9, "no better", 24),
    (Plateau("x", "min", then=STOP, long=4, short=2), [9, 8, NAN, 7, 6, INF, 5, 4], 8, OVER.format(8), 32),
    # any value before the deadline reaches a requirement; one is not met where a limit ends the run, too
    (Require("acc", 0.8, epoch=3), [0.5, 0.8, 0.6], 4, OVER.format(4), 16),
    (Require("acc", 0.9, epoch=3), [0.5, 0.8, 0.6], 4, UNMET, 12),
    (Require("acc", 0.9, epoch=3), [0.5, 0.8, 0.6], 3, UNMET, 12),
    (Require("nothing", 0.5, "min", step=2), [1], 1, "... by step 2, it has no value", 2),
    (LossBound(bound=1e9, times=1e9, last=3), [1], 2, OVER.format(2), 8),
]


def test_each_judges_in_time(tmp_path: Path) -> None:
    for number, (judge, values, max_epoch, reason, step) in enumerate(CASES):
        name = judge.metric if judge.metric not in ("loss", "nothing") else "x"
        tiny = serviced(tmp_path / str(number), [judge], collecting(name, values), max_epoch=max_epoch)
        assert tiny.loop.ending.reason.endswith(reason.removeprefix("...")), number
        assert tiny.loop.ending.step == step, number


def advance(run_dir: Path, losses: Sequence[float | None], *services: Service) -> Any:
    """A Supervisor's steps with these losses; None is a step without."""
    listed = (*services, everstep.Checkpoints(Every(steps=2)))
    options: Any = {"services": listed, "max_step": len(losses), "seed": 1}
    sv = everstep.Supervisor(run_dir, {"seen": {"rate": 1.0}}, **options)
    return supervised(sv, lambda sv: {} if losses[sv.step] is None else {"loss": losses[sv.step]})


def test_without_any_value_steps_of_patience_do_not_pass(tmp_path: Path) -> None:
    sv = advance(tmp_path, [None] * 3 + [1.0] * 6, EarlyStop("loss", patience_steps=2, every=Every(steps=1)))
    assert (sv.step, sv.ending.reason) == (6, "early stop: loss has not improved on 1.0 for 2 steps")


def test_what_is_better_by_less_than_min_delta_counts_as_worse_from_min_steps_on(tmp_path: Path) -> None:
    rising = [-1.0 - 0.01 * step for step in range(20)]
    when = {"patience": 2, "min_delta": 0.5, "min_steps": 9, "every": Every(steps=3)}
    sv = advance(tmp_path, rising, EarlyStop("loss", **when))
    assert (sv.step, sv.ending.reason) == (9, "early stop: loss has not improved on -1.01 for 2 evaluations")


def test_a_value_falls_and_rests(tmp_path: Path) -> None:
    """The loss stands still from the first step on.  What is struck: `check_service`, here and below."""
    lower = SetValue("seen.rate", times=0.5, least=0.2)
    advance(
        tmp_path, [1.0] * 10, Plateau("loss", then=lower, long=3, short=1, cooldown=1, every=Every(steps=1))
    )
    found = [(row[1], float.fromhex(row[5])) for row in rows(tmp_path) if row[3] == "seen.rate"]
    assert found == [(3, 0.5), (5, 0.25), (7, 0.2)]


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
        serviced(tmp_path / "left", [Require("loss", 0.0, "min", epoch=9)], inside=boom_at(3), max_epoch=1)
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


def test_what_is_above_a_bound(tmp_path: Path) -> None:
    for number, (arguments, losses, message) in enumerate(BROKEN):
        with pytest.raises(LossBoundError, match=message):
            advance(tmp_path / str(number), losses, LossBound(**arguments))
    with pytest.raises(GuardStop, match="above its bound 2") as caught:  # ends as written, with exit status 1
        advance(tmp_path / "stop", [1.0, 1.0, 3.0, 1.0], LossBound(bound=2, policy="stop"))
    assert caught.value.code == 1


def test_after_a_broken_bound_the_run_goes_on_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    for losses in ([*QUIET, 50.0, 1.0], [*QUIET, 1.0, 1.0]):
        with contextlib.suppress(LossBoundError):
            sv = advance(tmp_path, losses, LossBound(bound=10))
    assert sv.ending.finished and sv.ending.resumed_from == "step-00000006"


def test_times_a_running_median_over_a_resume(tmp_path: Path) -> None:
    losses, message = [9.0, *QUIET, 6.0], "is 6 at step 8, above 5 times 1, the median of the last 5"
    advance(tmp_path, losses[:6], LossBound(times=5, last=5))
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
    """Two steps an epoch; it tells the changes of the rate, and the rate of each step of this start."""
    settings, rates = {"rate": -1.0}, []
    listed = [*services, everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
    arguments = {"max_epoch": 6, "steps_per_epoch": 2, "seed": 1, **arguments}
    with everstep.TrainLoop(run_dir, {"settings": settings}, services=listed, **arguments) as loop:
        for epoch in loop.iter_epochs():
            for step in loop.iter_steps():
                rates.append(settings["rate"])
                boom_at(crash)(loop, step)
            loop.collect_metrics(valid_loss=LOSSES[epoch % len(LOSSES) - 1])
    changes = {row[1]: float.fromhex(row[5]) for row in rows(run_dir) if row[3] == "settings.rate"}
    return changes, rates


@pytest.mark.parametrize(
    ("every", "rates"),
    [(None, [8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1]), (Every(steps=4), [8, 8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2])],
)
def test_each_step_has_its_value(tmp_path: Path, every: Any, rates: list[float]) -> None:
    schedule = Scheduled("settings.rate", Annealing(8, 0.5, every=3, least=1), every=every)
    changes, seen = scheduled(tmp_path, schedule)
    assert seen == rates
    settings = [-1, *rates, 1]  # the last is that of step 13, which a raised limit would make
    assert changes == {step: settings[step + 1] for step in range(13) if settings[step + 1] != settings[step]}


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


LOSSES = [0.5, 0.6, 0.4, 0.4, 0.3]
"""Of each epoch, of four steps: bests in epochs 1, 3 and 5."""


def test_on_a_new_best_once_per_best_over_restarts(tmp_path: Path) -> None:
    told: list[int] = []
    for epochs in (1, 2, 3, 5, 5):
        note = When(OnBest("valid_loss"), lambda boundary: told.append(boundary.step))
        serviced(tmp_path, [note], collecting("valid_loss", LOSSES), max_epoch=epochs)
    assert told == [4, 12, 20]


def test_each_kind_of_condition_sets_a_value(tmp_path: Path) -> None:
    halve = SetValue("settings.rate", times=0.5)
    kinds: list[tuple[When, list[int]]] = [
        (When(OnBest("valid_loss"), halve), [4, 12, 20]),
        (When(Every(steps=7), halve), [7, 14]),
        (When(lambda b: b.step in (6, 12), halve, every=Every(steps=3)), [6, 12]),
    ]
    for number, (when, steps) in enumerate(kinds):
        changes, _ = scheduled(tmp_path / str(number), when, max_epoch=5, steps_per_epoch=4)
        assert list(changes) == steps


def test_a_save_on_each_best(tmp_path: Path) -> None:
    saves = everstep.Checkpoints(everstep.Never(), keep_last=None)
    tiny = Tiny(tmp_path, services=[When(OnBest("valid_loss"), Save()), saves], max_epoch=5)
    tiny.train(tail=collecting("valid_loss", LOSSES))
    names = {path.name[:10] for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"epoch-0000", "epoch-0001", "epoch-0003", "epoch-0005"}


def test_a_stop_and_an_interruption(tmp_path: Path) -> None:
    tail = collecting("valid_loss", LOSSES)
    low = lambda boundary: (boundary.readings.values("valid_loss") or [1])[-1] < 0.45  # noqa: E731
    tiny = serviced(tmp_path / "a", [When(low, Stop("low enough"))], tail, max_epoch=5)
    assert (tiny.loop.ending.reason, tiny.loop.ending.step) == ("low enough", 12)
    with pytest.raises(everstep.errors.Interrupted) as raised:
        serviced(tmp_path / "b", [When(Every(steps=5), Interrupt("a pause"))], max_epoch=5)
    assert raised.value.code == 3 and events(tmp_path / "b", "interrupted")[0]["step"] == 5


def test_several_actions_in_order_and_a_function_that_returns_something_is_refused(tmp_path: Path) -> None:
    seen: list[Any] = []
    two = [lambda b: seen.append(b.step), Save(), lambda b: seen.append(-b.step)]
    one = When(Every(steps=2), lambda b: seen.append(str(b.step)))
    serviced(tmp_path / "a", [When(Every(steps=2), two, name="two"), one], max_epoch=1)
    assert seen == [2, -2, "2", 4, -4, "4"]
    returns = When(Every(steps=1), lambda boundary: True)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="returned True; return nothing"):
        serviced(tmp_path / "b", [returns], max_epoch=1)


def test_another_decision_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        serviced(tmp_path, [When(Every(steps=9), Stop("over"))], inside=boom_at(2), max_epoch=1)
    with pytest.raises(ConfigError, match=r"stored .*Every\(steps=9.*given .*Every\(steps=8"):
        serviced(tmp_path, [When(Every(steps=8), Stop("over"), name="when Every(steps=9)")], max_epoch=2)
    with pytest.raises(Boom):
        serviced(tmp_path / "b", [When(Every(steps=9), print)], inside=boom_at(2), max_epoch=1)
    serviced(tmp_path / "b", [When(Every(steps=8), print)], max_epoch=2)  # an observer may change


def test_before_and_after_a_save(tmp_path: Path) -> None:
    """CheckpointSaverListener: before_save is the object's own state_dict, after_save is AFTER_CHECKPOINT."""
    log: list[str] = []

    class Cache:
        def state_dict(self) -> dict[str, int]:
            log.append("before")
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    services = [everstep.Checkpoints(Every(steps=2))]
    sv = everstep.Supervisor(tmp_path, {"cache": Cache()}, services=services, max_step=4)
    sv.on(everstep.services.Moment.AFTER_CHECKPOINT, lambda boundary: log.append(boundary.payload))
    supervised(sv)
    names = [line for line in log if line != "before"]
    assert names == ["epoch-0000-step-00000000", "step-00000002", "step-00000004"]
    assert log[log.index("step-00000002") - 1] == "before"


# ---- GlobalStepWaiter: a process that begins when another run has come far enough
WAITER = """
import everstep
from everstep.services import GlobalStepWaiter

waiter = GlobalStepWaiter("other", 4, poll=0.02)
with everstep.Supervisor("waiting", services=[waiter], max_step=2, seed=1) as sv:
    sv.stream(None)
    while not sv.should_stop():
        print("begun", flush=True)
        sv.advance()
"""


def advanced(run_dir: Path, steps: int) -> None:
    services = [everstep.Checkpoints(Every(steps=2))]
    supervised(everstep.Supervisor(run_dir, services=services, max_step=steps, seed=1))


def waiting(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """The waiting process, as soon as it says that it waits, and what it has said."""
    process = warm.Popen([sys.executable, "-c", WAITER], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = ""
    while "waiting until" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return process, said


def test_it_begins_when_the_other_has_come_there(tmp_path: Path) -> None:
    process, said = waiting(tmp_path)
    advanced(tmp_path / "other", 2)
    advanced(tmp_path / "other", 5)
    rest, _ = process.communicate()
    assert process.returncode == 0
    assert (said.count("begun"), rest.count("begun")) == (0, 2)


def test_a_signal_ends_the_waiting(tmp_path: Path) -> None:
    process, _ = waiting(tmp_path)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert rest.count("begun") == 1


def test_the_time_is_over(tmp_path: Path) -> None:
    advanced(tmp_path / "other", 2)
    waiter = GlobalStepWaiter(tmp_path / "other", 4, poll=0.01, timeout=0.02)
    sv = everstep.Supervisor(tmp_path / "run", services=[waiter])
    with pytest.raises(ServiceError, match="has come to step 2, not to step 4; look at that run"):
        sv.__enter__()


class Sets(Acts):
    """Asks for the same change each time it is due."""

    def __init__(self, action: SetValue, steps: int = 1, sets: Any = None) -> None:
        super().__init__("sets", lambda b: Outcome(actions=(action,)), Stage.DECIDE, Every(steps=steps))
        self.sets = (action.target,) if sets is None else sets


def advanced_by(run_dir: Path, state: Any, service: Service) -> None:
    supervised(everstep.Supervisor(run_dir, state, services=[service], max_step=3))


def test_an_optimizers_option_in_every_group_and_the_rest_of_it_stays(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.Adam(groups, lr=1.0)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state_of_weight = optimizer.state[model.weight]
    state = {"model": model, "optimizer": optimizer}
    action = SetValue("optimizer.lr", times=0.5, least=0.2)
    sv = everstep.Supervisor(tmp_path / "run", state, services=[Sets(action, 2)], max_step=6)
    supervised(sv, lambda sv: optimizer.step())
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert optimizer.state[model.weight] is state_of_weight
    assert state_of_weight["step"] == 7
    found = [(step, name, float.fromhex(value)) for _, step, _, name, _, value, _ in rows(tmp_path / "run")]
    assert found == [(2, "optimizer.lr", 0.5), (4, "optimizer.lr", 0.25), (6, "optimizer.lr", 0.2)]


NOT_SET: list[tuple[Service, str]] = [
    (Sets(SetValue("optimiser.lr", 0.5)), "no state entry 'optimiser'.*did you mean 'optimizer'"),
    (Sets(SetValue("optimizer.rl", 0.5)), "'optimizer' has no number 'rl' to be set.*did you mean 'lr'"),
    (Sets(SetValue("optimizer.name", 0.5)), "'optimizer' has no number 'name'"),
    (Sets(SetValue("optimizer", 0.5)), "'optimizer' has no number ''"),
    (Sets(SetValue("w.lr", 0.5)), "'w' has no number 'lr'"),
    (Sets(SetValue("huge.rate", times=1e300)), r"makes inf of 1e\+300; give a finite value="),
    (Sets(SetValue("huge.rate", 0.5), sets=()), r"add to class Sets: sets = \('huge.rate',\)"),
    (Sets(SetValue("huge.rate", 0.5), sets="huge.rate"), "sets of service 'sets' is the string 'huge.rate'"),
    # a target that is known beforehand is looked up when the loop opens
    (services.Plateau("loss", then=SetValue("optimizer.rl", 0.5), every=Every(steps=9)), "did you mean 'lr'"),
    (services.When(Every(steps=9), SetValue("optimizer.rl", 0.5)), "did you mean 'lr'"),
    (services.Scheduled("optimiser.lr", lambda step: 0.5), "did you mean 'optimizer'"),
]


def test_a_target_that_cannot_be_set_is_refused(tmp_path: Path) -> None:
    state = {"optimizer": {"lr": 0.1, "name": "mine"}, "w": np.zeros(2), "huge": {"rate": 1e300}}
    for number, (service, message) in enumerate(NOT_SET):
        with pytest.raises((ConfigError, UsageError), match=message):
            advanced_by(tmp_path / str(number), state, service)
    assert state["huge"] == {"rate": 1e300}


def test_a_key_of_a_dictionary_a_slot_and_a_tensor_that_stays_the_same(tmp_path: Path) -> None:
    settings, slot = {"beta": 1.0}, everstep.Slot(8.0)
    model, rate = torch.nn.Linear(2, 1), torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    state = {"model": model, "optimizer": optimizer}
    service = Sets(SetValue("optimizer.lr", 0.25))
    model(torch.ones(2)).sum().backward()
    sv = everstep.Supervisor(tmp_path / "tensor", state, services=[service], max_step=1)
    supervised(sv, lambda sv: optimizer.step())
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25
    advanced_by(tmp_path / "dictionary", {"settings": settings}, Sets(SetValue("settings.beta", 0.5)))
    advanced_by(tmp_path / "slot", {"temperature": slot}, Sets(SetValue("temperature", times=0.5)))
    assert settings == {"beta": 0.5} and slot.value == 1.0
    with quiet(tmp_path / "run") as sv, pytest.raises(UsageError, match="give Stop"):
        sv.call_soon(SetValue("w", 1.0))  # it is no action for another thread


schedulers = torch.optim.lr_scheduler
falling = lambda o: schedulers.LambdaLR(o, lambda k: 1 / (k + 1))  # noqa: E731


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (falling, "LambdaLR 'plan'"),
        (lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=50), "OneCycleLR 'plan'"),
        (lambda o: schedulers.CyclicLR(o, 0.1, 1.0), "CyclicLR 'plan'"),
        (lambda o: schedulers.CosineAnnealingWarmRestarts(o, 9), "CosineAnnealingWarmRestarts 'plan'"),
        (lambda o: schedulers.SequentialLR(o, [falling(o)], []), "LambdaLR 'plan'"),
        (lambda o: schedulers.StepLR(o, 2), None),
        (lambda o: schedulers.ExponentialLR(o, 0.9), None),
        (lambda o: schedulers.CosineAnnealingLR(o, 50), None),
        (lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.9), None),
    ],
)
def test_a_scheduler_that_undoes_it_is_named_once(tmp_path: Path, make: Any, told: str | None) -> None:
    model = torch.nn.Linear(2, 1)

    def rates(run_dir: Path, services: list[Service]) -> tuple[list[float], everstep.supervisor.Ending]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        state = {"model": model, "optimizer": optimizer, "plan": make(optimizer)}
        found = []

        def step(sv: everstep.Supervisor) -> None:
            found.append(optimizer.param_groups[0]["lr"])
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            state["plan"].step()

        sv = supervised(everstep.Supervisor(run_dir, state, services=services, max_step=6), step)
        return [*found[1:], optimizer.param_groups[0]["lr"]], sv.ending

    alone, _ = rates(tmp_path / "alone", [])
    found, ending = rates(tmp_path / "run", [Sets(SetValue("optimizer.lr", times=1e-6), 2)])
    undone = [k for k in (2, 4) if found[k] == pytest.approx(alone[k])]
    assert undone == ([2, 4] if told else []) and len(ending.warnings) == (told is not None)
    for warning in ending.warnings:
        assert f"service 'sets' sets optimizer.lr, and {told} computes it from" in warning


def test_a_value_that_the_clock_sets_is_named_once(tmp_path: Path) -> None:
    sets, clock = Sets(SetValue("settings.rate", times=0.5)), ManualClock()
    sets.schedule = Every(seconds=1.0) | Every(steps=2)
    state = {"settings": {"rate": 8.0}}
    sv = everstep.Supervisor(tmp_path / "run", state, services=[sets], max_step=3, clock=clock)
    supervised(sv, lambda sv: clock.advance(2.0))
    assert state["settings"]["rate"] == 1.0
    (warning,) = sv.ending.warnings
    assert "service 'sets' sets settings.rate by the clock (a schedule in seconds)" in warning


class Opened(Service):
    moments = frozenset({services.Moment.AFTER_STEP})

    def open(self, run: Any) -> None:
        self.count = 0

    def state_dict(self) -> Any:
        return self.count


def test_a_state_that_open_makes_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    """A resume loads it before `open`, which would begin anew."""
    with pytest.raises(AttributeError, match="count") as caught:
        Tiny(tmp_path, services=[Opened(schedule=Every(steps=1))]).train()
    assert caught.value.__notes__ == ["set what 'opened' saves in __init__: state comes before open()"]


def test_services_that_another_run_of_the_process_has_had_begin_as_they_began_it(tmp_path: Path) -> None:
    """One list for a loop over settings: the second run stopped early by what the first one had measured."""
    both = [EarlyStop("loss", "min", patience=2), everstep.Best("loss", "min")]
    runs = [Tiny(tmp_path / name, max_epoch=6, services=both).train() for name in ("one", "two")]
    assert [run.loop.ending.epoch for run in runs] == [5, 5]
    assert runs[0].loop.ending.best.step == runs[1].loop.ending.best.step
