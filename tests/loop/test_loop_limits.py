"""Limits, stops and what reopens a run: exact counts, one reason, no step too many, no mix of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep import Boundary, Every, Outcome, Service, Stage, Stop
from everstep.errors import ConfigError, Interrupted
from everstep.testing import ManualClock
from tiny_runs import Boom, Tiny, boom_at, events, rows


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
        ({"services": [everstep.StopAfter(steps=5)]}, 5, 2, "stop after 5 steps"),
        ({"services": [everstep.StopAfter(epochs=2)]}, 8, 2, "stop after 2 epochs"),
        ({"services": [everstep.StopAfter(epochs=2, steps=6)]}, 6, 2, "stop after 6 steps"),
        ({"services": [everstep.StopAfter(steps=6)], "max_step": 4}, 4, 1, "max_step 4 is reached"),
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
    again = Tiny(tmp_path / "run", **limits).train()
    assert again.seen == [] and again.w.tobytes() == tiny.w.tobytes()


def test_request_stop_ends_after_the_step_and_says_why(tmp_path: Path) -> None:
    tails: list[int] = []

    def inside(loop: Any, step: int) -> None:
        if step == 6:
            loop.request_stop("looks good")

    tiny = Tiny(tmp_path / "run", max_epoch=5).train(inside=inside, tail=lambda loop, e: tails.append(e))
    assert (tiny.loop.step, tiny.loop.ending.reason, tiny.loop.ending.finished) == (6, "looks good", True)
    assert tails == [1, 2]
    again = Tiny(tmp_path / "run", max_epoch=5).train()
    assert again.seen == []
    assert any("finished at epoch 2, step 6 (looks good)" in line for line in again.lines)


# ---------------------------------------------------------------------------------- the time budget


@pytest.mark.parametrize("way", ["max_time", "StopAfter"])
def test_a_time_budget_interrupts_with_exit_code_3_and_the_run_goes_on(tmp_path: Path, way: str) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=3, services=[Looks()]).train()
    clock = ManualClock()

    def start() -> Tiny:
        services: list[Service] = [Looks()]  # due at each step: the budget is noticed there
        if way == "StopAfter":
            return Tiny(
                tmp_path / "run",
                max_epoch=3,
                clock=clock,
                services=[*services, everstep.StopAfter(seconds=50)],
            )
        return Tiny(tmp_path / "run", max_epoch=3, clock=clock, max_time=50, services=services)

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


class Looks(Service):
    """An observer that is due at each step."""

    def __init__(self) -> None:
        super().__init__("looks", Every(steps=1))

    def run(self, boundary: Boundary) -> None:
        return None


def test_a_time_budget_used_up_in_the_tail_saves_what_is_there_and_leaves(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=2).train(tail=lambda loop, e: loop.collect_metrics(m=e))
    clock = ManualClock()

    def tail(loop: Any, epoch: int) -> None:
        clock.advance(60)
        loop.call_soon(everstep.Interrupt("the node goes down"))
        loop.collect_metrics(m=epoch)

    tiny = Tiny(tmp_path / "run", max_epoch=2, clock=clock)
    with pytest.raises(Interrupted, match="the node goes down"):
        tiny.train(tail=tail)
    again = Tiny(tmp_path / "run", max_epoch=2)
    again.train(tail=lambda loop, epoch: loop.collect_metrics(m=epoch))
    assert again.result() == straight.result()


# ------------------------------------------------------------------------------------- a clock that jumps


@pytest.mark.parametrize("jumps", [[1e6, -1e6, 5.0], [-50.0, -50.0, 1e9]])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, jumps: list[float]) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=2).train(tail=lambda loop, e: loop.print_logs())
    clock = ManualClock(1000.0)

    def inside(loop: Any, step: int) -> None:
        with loop.timeit("some_time"):
            clock.now += jumps[step % len(jumps)]
        loop.get_eta()
        loop.println("where", with_tag=True)

    services = [everstep.Checkpoints(Every(seconds=5) | Every(epochs=1)), Looks()]
    tiny = Tiny(tmp_path / "run", max_epoch=2, clock=clock, services=services)
    tiny.train(inside=inside, tail=lambda loop, e: loop.print_logs())
    assert tiny.w.tobytes() == straight.w.tobytes()
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")


# ------------------------------------------------------------------------------------------- early stop

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
    assert [e["by"] for e in events(tmp_path / "run", "stop")] == ["early stop valid_loss"]


@pytest.mark.parametrize("at", [18, 21, 26])
def test_early_stop_stops_at_the_same_epoch_across_a_resume(tmp_path: Path, at: int) -> None:
    straight = stopping(tmp_path / "straight").train(tail=validate)
    with pytest.raises(Boom):
        stopping(tmp_path / "run").train(inside=boom_at(at), tail=validate)
    tiny = stopping(tmp_path / "run").train(tail=validate)
    assert tiny.loop.epoch == 7
    assert tiny.result() == straight.result()


def test_early_stop_on_steps_means_min_delta_and_min_steps(tmp_path: Path) -> None:
    stopper = everstep.EarlyStop(
        "score", "max", patience=2, min_delta=0.5, min_steps=9, every=Every(steps=3), name="stopper"
    )

    def inside(loop: Any, step: int) -> None:
        loop.collect_metrics(score=1.0 + 0.01 * step)

    tiny = Tiny(tmp_path / "run", max_epoch=9, services=[stopper]).train(inside=inside)
    assert tiny.loop.step == 9
    assert stopper.waited == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "loss", "patience": 0}, "patience=0"),
        ({"metric": "loss", "patience": 2.5}, "patience=2.5"),
        ({"metric": "loss", "patience": 1, "min_delta": -1}, "min_delta=-1: give a number, 0 or more"),
        ({"metric": "loss", "patience": 1, "min_delta": "a"}, "min_delta='a'"),
        ({"metric": "loss", "patience": 1, "min_delta": float("nan")}, "min_delta=nan"),
        ({"metric": "loss", "patience": 1, "min_steps": "a"}, "min_steps='a': give an integer, 0 or"),
        ({"metric": "loss", "patience": 1, "min_steps": -1}, "min_steps=-1"),
        ({"metric": "f1", "patience": 1}, 'give mode="min"'),
        ({"metric": "f1", "mode": "up", "patience": 1}, "'up'"),
    ],
)
def test_early_stop_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        everstep.EarlyStop(**arguments)


# --------------------------------------------------------------------------- finished runs, and reopened ones


def test_a_finished_run_run_again_executes_no_step_and_says_so(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=2).train()
    for _ in range(2):
        again = Tiny(tmp_path / "run", max_epoch=2).train()
        assert again.seen == []
        assert again.result() == tiny.result()
        assert any("finished at epoch 2, step 8 (max_epoch 2 is reached); no step" in x for x in again.lines)
        assert again.loop.ending.finished and again.loop.epoch == 2


def test_a_raised_max_epoch_is_a_straight_run(tmp_path: Path) -> None:
    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=1.0 / epoch)
        loop.print_logs()

    straight = Tiny(tmp_path / "straight", max_epoch=5).train(tail=tail)
    Tiny(tmp_path / "run", max_epoch=2).train(tail=tail)
    tiny = Tiny(tmp_path / "run", max_epoch=5).train(tail=tail)
    assert tiny.seen[0][:2] == (3, 9)
    assert tiny.result() == straight.result()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("first", [5, 6, 7, 8])
@pytest.mark.parametrize("every", [None, 2])
def test_a_raised_max_step_is_a_straight_run_even_from_the_middle_of_a_pass(
    tmp_path: Path, first: int, every: int | None
) -> None:
    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=1.0 / loop.step)
        loop.print_logs()

    def start(name: str, max_step: int) -> Tiny:
        services = [Judge()]
        if every is not None:
            services.append(everstep.Checkpoints(Every(steps=every), keep_last=1))
        return Tiny(tmp_path / name, max_step=max_step, services=services)

    straight = start("straight", 14).train(tail=tail)
    stopped = start("run", first).train(tail=tail)
    again = start("run", first).train(tail=tail)  # the same configuration reopens it and runs nothing
    assert again.seen == [] and again.result() == stopped.result()
    tiny = start("run", 14).train(tail=tail)
    assert tiny.seen[0][1] == (first + 1 if first % 4 == 0 else first)
    assert tiny.result() == straight.result()


class Judge(everstep.EarlyStop):
    """An early stop that never stops: its memory is state."""

    def __init__(self) -> None:
        super().__init__("valid_loss", patience=99)


@pytest.mark.campaign("long")
def test_raised_limits_in_small_steps(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_step=11).train(tail=lambda loop, e: loop.print_logs())
    for limit in (1, 2, 5, 8, 11):
        tiny = Tiny(tmp_path / "run", max_step=limit).train(tail=lambda loop, e: loop.print_logs())
    assert tiny.result() == straight.result()


def test_a_lowered_limit_runs_no_step(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=3).train()
    for limits in ({"max_epoch": 1}, {"max_epoch": 3, "max_step": 2}):
        again = Tiny(tmp_path / "run", **limits).train()
        assert again.seen == [] and again.w.tobytes() == tiny.w.tobytes()
        assert again.loop.step == 12


def test_a_limit_that_is_lower_than_where_the_resume_stands(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        Tiny(tmp_path / "run", max_epoch=3, services=[everstep.Checkpoints(Every(steps=1))]).train(
            inside=boom_at(7)
        )
    tiny = Tiny(tmp_path / "run", max_step=3).train()
    assert tiny.seen == [] and tiny.loop.step == 6
    assert tiny.loop.ending.finished


def test_an_early_stop_is_not_reopened_by_a_raised_limit_and_it_says_so(tmp_path: Path) -> None:
    tiny = stopping(tmp_path / "run").train(tail=validate)
    again = stopping(tmp_path / "run", max_epoch=30).train(tail=validate)
    assert again.seen == [] and again.w.tobytes() == tiny.w.tobytes()
    said = next(line for line in again.lines if "this run is finished" in line)
    assert "early stop" in said and "change or remove 'early stop valid_loss'" in said
    assert "raise a limit" not in said


def test_an_early_stop_is_reopened_by_a_changed_stopper(tmp_path: Path) -> None:
    stopping(tmp_path / "run").train(tail=validate)
    tiny = stopping(tmp_path / "run", patience=5).train(tail=validate)
    assert tiny.seen[0][:2] == (8, 29)
    assert tiny.loop.epoch == 11
    assert any("patience" in line and "used as given" in line for line in tiny.lines)


def test_an_early_stop_is_reopened_by_removing_it(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=11).train(tail=validate)
    stopping(tmp_path / "run").train(tail=validate)
    tiny = Tiny(tmp_path / "run", max_epoch=11).train(tail=validate)
    assert tiny.seen[0][:2] == (8, 29)
    assert tiny.w.tobytes() == straight.w.tobytes()
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")


class Stopper(Service):
    """A stopper of the user's own, without a configuration."""

    stage, controller = Stage.DECIDE, True

    def __init__(self, at: int) -> None:
        super().__init__("mine", Every(steps=1))
        self.at = at

    def run(self, boundary: Boundary) -> Outcome | None:
        return Outcome(actions=(Stop("mine"),)) if boundary.step == self.at else None


def test_a_stopper_of_ones_own_is_reopened_only_by_removing_it(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=4).train()
    Tiny(tmp_path / "run", max_epoch=3, services=[Stopper(6)]).train()
    again = Tiny(tmp_path / "run", max_epoch=4, services=[Stopper(6)]).train()
    assert again.seen == [] and again.loop.ending.finished
    tiny = Tiny(tmp_path / "run", max_epoch=4).train()
    assert tiny.seen[0][:2] == (2, 7)
    assert tiny.w.tobytes() == straight.w.tobytes()


def test_stop_after_is_reopened_by_a_later_one(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=3).train()
    Tiny(tmp_path / "run", max_epoch=3, services=[everstep.StopAfter(steps=6)]).train()
    again = Tiny(tmp_path / "run", max_epoch=9, services=[everstep.StopAfter(steps=6)]).train()
    assert again.seen == []
    tiny = Tiny(tmp_path / "run", max_epoch=3, services=[everstep.StopAfter(steps=99)]).train()
    assert tiny.seen[0][:2] == (2, 7)
    assert tiny.w.tobytes() == straight.w.tobytes()


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


# ------------------------------------------------------------------------------------ best, never mixed


def best_run(run_dir: Path, **arguments: Any) -> Tiny:
    best = everstep.Best("valid_loss", restore_at_end=True)
    stopper = everstep.EarlyStop("valid_loss", patience=arguments.pop("patience", 3))
    return Tiny(run_dir, services=[best, stopper], **{"max_epoch": 11, **arguments})


def test_restore_at_end_gives_the_best_whole_and_resumes_from_the_last(tmp_path: Path) -> None:
    at_best: list[tuple[bytes, bytes]] = []
    at_end: list[tuple[bytes, bytes]] = []
    tiny = best_run(tmp_path / "run")

    def tail(loop: Any, epoch: int) -> None:
        validate(loop, epoch)
        (at_best if epoch == 4 else at_end).append((tiny.w.tobytes(), tiny.momentum.tobytes()))

    tiny.train(tail=tail)
    assert tiny.loop.epoch == 7
    assert [(tiny.w.tobytes(), tiny.momentum.tobytes())] == at_best  # weights AND momentum of epoch 4
    assert any("best weights by valid_loss (3, step 16) are loaded" in line for line in tiny.lines)
    assert tiny.loop.best is not None and tiny.loop.best.path is not None

    again = best_run(tmp_path / "run").train(tail=tail)  # finished: no step, the best is given again
    assert again.seen == [] and again.w.tobytes() == tiny.w.tobytes()

    straight = Tiny(tmp_path / "straight", max_epoch=11).train(tail=validate)
    goes_on = Tiny(tmp_path / "run", max_epoch=11, services=[everstep.Best("valid_loss")]).train(
        tail=validate
    )
    assert goes_on.seen[0][:2] == (8, 29)
    assert goes_on.w.tobytes() == straight.w.tobytes()
    assert goes_on.momentum.tobytes() == straight.momentum.tobytes()


def test_restore_at_end_of_a_part_leaves_the_rest_as_it_ended(tmp_path: Path) -> None:
    best = everstep.Best("valid_loss", restore_at_end=["w"])
    tiny = Tiny(tmp_path / "run", max_epoch=7, services=[best])
    at_best, at_end = [], []

    def tail(loop: Any, epoch: int) -> None:
        validate(loop, epoch)
        (at_best if epoch == 4 else at_end).append((tiny.w.tobytes(), tiny.momentum.tobytes()))

    tiny.train(tail=tail)
    assert tiny.w.tobytes() == at_best[0][0] != at_end[-1][0]
    assert tiny.momentum.tobytes() == at_end[-1][1] != at_best[0][1]
    assert any("step 16) are loaded into 'w'" in line for line in tiny.lines)


def test_a_part_that_is_not_in_the_state_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"restore_at_end= of 'best valid_loss' names 'wt'.*did you mean 'w'"
    ):
        Tiny(tmp_path / "run", services=[everstep.Best("valid_loss", restore_at_end=["wt"])]).train()
    for wrong in ("w", [], 3, [3]):
        with pytest.raises(ConfigError, match=r"restore_at_end=.*give True, or a list of entries"):
            everstep.Best("valid_loss", restore_at_end=wrong)  # type: ignore[arg-type]


def test_restore_at_end_not_after_an_exception(tmp_path: Path) -> None:
    tiny = best_run(tmp_path / "run")
    before: list[bytes] = []

    def tail(loop: Any, epoch: int) -> None:
        validate(loop, epoch)
        if epoch == 6:
            before.append(tiny.w.tobytes())
            raise Boom

    with pytest.raises(Boom):
        tiny.train(tail=tail)
    assert [tiny.w.tobytes()] == before


def test_restore_at_end_without_any_best_keeps_the_last(tmp_path: Path) -> None:
    services = [everstep.Best("valid_loss", restore_at_end=True)]
    tiny = Tiny(tmp_path / "run", max_epoch=2, services=services, default_services=False)
    tiny.train(tail=lambda loop, epoch: loop.collect_metrics(valid_loss=float("nan")))
    plain = Tiny(tmp_path / "plain", max_epoch=2, default_services=False).train()
    assert tiny.w.tobytes() == plain.w.tobytes()
    assert tiny.loop.best is None


def test_the_best_survives_a_resume_that_never_improves(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        best_run(tmp_path / "run", patience=9).train(inside=boom_at(22), tail=validate)
    weights: list[bytes] = []
    tiny = best_run(tmp_path / "run", patience=9, max_epoch=7)
    tiny.train(tail=validate)
    straight = best_run(tmp_path / "straight", patience=9, max_epoch=7)

    def tail(loop: Any, epoch: int) -> None:
        validate(loop, epoch)
        if epoch == 4:
            weights.append(straight.w.tobytes())

    straight.train(tail=tail)
    assert tiny.w.tobytes() == straight.w.tobytes() == weights[0]
    assert tiny.loop.best_valid_metric == 3.0


# ------------------------------------------------------------------- epochs that a limit cut short


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("first", range(1, 10))
@pytest.mark.parametrize("steps_per_epoch", [None, 3])
def test_an_epoch_of_two_loops_that_was_cut_goes_on_where_it_was_cut(
    tmp_path: Path, first: int, steps_per_epoch: int | None
) -> None:
    """Also where the limit fell exactly between the two, or stood at the end of an epoch of fixed size."""

    def train(name: str, max_step: int) -> Tiny:
        tiny = Tiny(tmp_path / name, samples=6, max_step=max_step, steps_per_epoch=steps_per_epoch)
        other = everstep.data.arrays(np.arange(10, 14), batch_size=2, shuffle=True)
        with tiny.loop as loop:
            for _ in loop.iter_epochs():
                for data, stream in ((tiny.data, "train"), (other, "extra")):
                    for step, (ids,) in loop.iter_steps(data, stream):
                        tiny.update(ids)
                        tiny.seen.append((loop.epoch, step, tuple(ids)))
                    loop.collect_metrics(gap=float(tiny.w.sum()))
                loop.print_logs()
        return tiny

    straight = train("straight", 12)
    train("run", first)
    tiny = train("run", 12)
    assert first - 1 <= tiny.seen[0][1] <= first + 1
    assert tiny.result() == straight.result()


def test_rows_of_one_name_at_one_step_have_each_their_own_key(tmp_path: Path) -> None:
    """A second loop without steps, and a service that is due after the step and after its epoch."""
    both = Every(steps=2) | Every(epochs=1)
    measure = Measure("norms", both)
    tiny = Tiny(tmp_path / "run", samples=8, max_epoch=2, max_step=6, services=[measure])
    with tiny.loop as loop:
        for _ in loop.iter_epochs():
            for data, stream in ((tiny.data, "train"), (tiny.data, "again")):
                for _, (ids,) in loop.iter_steps(data, stream):
                    tiny.update(ids)
                loop.collect_metrics(gap=1.0)
    keys = [(r[0], r[1], r[2], r[3], r[4]) for r in rows(tmp_path / "run")]
    assert len(keys) == len(set(keys))
    assert [k[1:] for k in keys if k[2] == "eval/norms"][-2:] == [
        (6, "eval/norms", "norm", 0),
        (6, "eval/norms", "norm", 1),
    ]


class Measure(Service):
    stage = Stage.MEASURE

    def run(self, boundary: Boundary) -> Outcome:
        return Outcome({"norm": float(boundary.step)})


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
