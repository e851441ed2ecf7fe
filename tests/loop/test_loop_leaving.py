"""Leaving loops: early, in every way, and by limits and stops; what reopens a run, and orders of use."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Every, Outcome, Service, Stop
from everstep.errors import ConfigError, DataError, Interrupted, UsageError
from everstep.record import RunJournal
from everstep.services import Stage, StopAfter
from everstep.testing import ManualClock
from tiny_runs import Acts, Boom, Tiny, Told, boom_at, events, rows


def loop_in(run_dir: Path, **arguments: Any) -> everstep.TrainLoop:
    services = [*arguments.pop("services", ()), everstep.services.Console(sink=lambda line: None)]
    return everstep.TrainLoop(run_dir, services=services, **arguments)


def run_over(loop: everstep.TrainLoop, data: Any, name: str = "train") -> None:
    with loop:
        for _ in loop.iter_epochs():
            list(loop.iter_steps(data, name))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_break_completes_the_step_ends_the_pass_and_the_tail_runs(tmp_path: Path) -> None:
    """The step that is left has no snapshot of its own."""
    seen: list[Any] = []
    saves = everstep.Checkpoints(Every(steps=1), keep_last=None)
    with loop_in(tmp_path / "run", max_epoch=2, services=[saves]) as loop:
        loop.on("AFTER_STEP", lambda b: seen.append(f"after {b.step}"))
        for epoch in loop.iter_epochs():
            for step, batch in loop.iter_steps(list("abcd")):
                seen.append(f"{step}{batch}")
                loop.collect_metrics(loss=float(step))
                if batch == "b":
                    break
            assert not loop.within_step and loop.step_data is None
            loop.collect_metrics(valid_loss=float(epoch))
            seen.append(f"tail {loop.step}")
    assert seen == ["1a", "after 1", "2b", "after 2", "tail 2", "3a", "after 3", "4b", "after 4", "tail 4"]
    assert [r[1] for r in rows(tmp_path / "run", "step")] == [1, 2, 3, 4]
    assert [r[1] for r in rows(tmp_path / "run", "tail")] == [2, 4]
    assert loop.ending.finished and loop.step == 4
    ends = ["epoch-0000-step-00000000", "epoch-0002-step-00000004"]
    assert names(tmp_path / "run") == [*ends, "step-00000001", "step-00000003"]


def test_an_epoch_loop_left_by_break_is_closed_at_the_exit_and_resumable(tmp_path: Path) -> None:
    epochs: list[int] = []
    with loop_in(tmp_path / "run", max_epoch=4) as loop:
        loop.on("AFTER_EPOCH", lambda b: epochs.append(b.epoch))
        for epoch in loop.iter_epochs():
            for _ in loop.iter_steps([1, 2]):
                loop.collect_metrics(loss=1.0)
            if epoch == 2:
                break
        with pytest.raises(UsageError, match="outside an epoch"):
            loop.iter_steps([1])
    assert epochs == [1, 2]
    assert "epoch-0002-step-00000004" in names(tmp_path / "run")
    assert not loop.ending.finished and loop.ending.reason == "the loop was left before its end"
    with loop_in(tmp_path / "run", max_epoch=4) as again:
        steps = [step for _ in again.iter_epochs() for step, _ in again.iter_steps([1, 2])]
    assert steps == [5, 6, 7, 8] and again.ending.finished


def test_after_an_exception_the_last_commit_is_finished_and_none_is_started(tmp_path: Path) -> None:
    saves = everstep.Checkpoints(Every(steps=3), keep_last=None)
    tiny = Tiny(tmp_path / "run", samples=20, max_epoch=2, services=[saves])
    with pytest.raises(Boom, match="at 6"):
        tiny.train(inside=boom_at(6))
    assert names(tmp_path / "run") == ["epoch-0000-step-00000000", "step-00000003"]
    assert (tiny.loop.ending.step, tiny.loop.ending.reason) == (5, "Boom: at 6")
    assert not tiny.loop.ending.finished
    assert list(RunJournal(tmp_path / "run").series("loss", "step")[0]) == [1, 2, 3, 4, 5]


def test_a_generator_that_is_kept_too_long_says_so(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=3) as loop:
        epochs, old = loop.iter_epochs(), None
        for epoch in epochs:
            if epoch == 2:
                with pytest.raises(UsageError, match="do not keep the iterator"):
                    next(old)
            if epoch > 1:
                list(loop.iter_steps([1, 2]))
            loop.iter_steps([1, 2, 3])  # not iterated, it blocks nothing
            old = loop.iter_steps([1, 2, 3])
            next(old)
            if epoch == 2:
                break
    assert loop.step == 4
    with pytest.raises(UsageError, match="do not keep the iterator"):
        next(old)
    with pytest.raises(UsageError, match="after the with block"):
        next(epochs)


def test_two_streams_under_one_name(tmp_path: Path) -> None:
    with loop_in(tmp_path / "run", max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1, 2]):
                break
            list(loop.iter_steps([3, 4]))  # the pass of the first is over: another object may follow
    with loop_in(tmp_path / "other", max_epoch=1, steps_per_epoch=1) as loop:
        for _ in loop.iter_epochs():
            list(loop.iter_steps([1, 2, 3]))
            with pytest.raises(ConfigError, match=r"'train' is in the middle of a pass.*name="):
                loop.iter_steps([4, 5, 6])


def another(tiny: Tiny) -> None:
    run_over(tiny.loop, tiny.data, "training")


def without_step_loops(tiny: Tiny) -> None:
    with tiny.loop as loop:
        list(loop.iter_epochs())


CHANGED: dict[str, tuple[dict[str, int], Callable[[Tiny], object], type[Exception], str]] = {
    "another": ({}, another, UsageError, "over stream 'train', this one reads 'training'; run the program"),
    "no step loop": ({}, without_step_loops, UsageError, "loop number 1 of epoch 1.*entered only 0; run"),
    "fewer samples": ({"samples": 6}, Tiny.train, DataError, "8.*6|6.*8"),
    "more samples": ({"samples": 10}, Tiny.train, DataError, "8.*10|10.*8"),
    "larger batches": ({"batch": 4}, Tiny.train, DataError, "batch"),
}


@pytest.mark.parametrize(("arguments", "train", "error", "message"), CHANGED.values(), ids=CHANGED)
def test_a_change_is_refused(tmp_path: Path, arguments: Any, train: Any, error: Any, message: str) -> None:
    with pytest.raises(Boom):
        Tiny(tmp_path, max_epoch=2, services=[everstep.Checkpoints(Every(steps=1))]).train(boom_at(3))
    before = names(tmp_path)
    with pytest.raises(error, match=message):
        train(Tiny(tmp_path, max_epoch=2, **arguments))
    assert names(tmp_path) == before
    assert Tiny(tmp_path, max_epoch=2).train().loop.ending.finished


def test_an_epoch_loop_less_than_before_is_refused(tmp_path: Path) -> None:
    def start(loops: int) -> None:
        with loop_in(tmp_path / "run", max_epoch=3) as loop:
            for _ in range(loops):
                for epoch in loop.iter_epochs():
                    for _ in loop.iter_steps([0]):
                        if epoch == 3:
                            raise Boom
                    break

    with pytest.raises(Boom):
        start(loops=3)
    with pytest.raises(UsageError, match="loop number 3, but the program entered only 1"):
        start(loops=1)


def test_data_without_any_batch(tmp_path: Path) -> None:
    for number, data in enumerate(([], iter(()), iter([1, 2]))):
        with pytest.raises(DataError, match=r"gave no batch|one pass"):
            run_over(loop_in(tmp_path / str(number), max_epoch=2), data)


def heads_and_tails(run_dir: Path, boom: int | None = None, again: Callable[..., None] | None = None) -> Tiny:
    tiny = Tiny(run_dir, max_epoch=3, services=[everstep.Checkpoints(Every(steps=1))])
    with tiny.loop as loop:
        for epoch in loop.iter_epochs():
            if again is not None:
                again(epoch, "head", loop.resumed_mid_epoch)
            loop.collect_metrics(lr=1.0 / epoch)
            loop.print_logs()
            assert loop.batch_index is None
            for step, (ids,) in loop.iter_steps(tiny.data):
                tiny.update(ids)
                loop.collect_metrics(number=loop.batch_index)
                if step == boom:
                    raise Boom
            if again is not None:
                again(epoch, "tail", loop.resumed_mid_epoch)
            for value in (1.0, 2.0, 3.0):
                loop.collect_metrics(score=value * epoch)
            if boom == -epoch:
                raise Boom
            loop.print_logs()
    return tiny


@pytest.mark.parametrize("at", [6, 8, -2])
def test_a_resumed_epoch_has_the_rows_and_lines_of_the_whole(tmp_path: Path, at: int) -> None:
    def printed(tiny: Tiny) -> list[str]:
        """What lines say of metrics, without times."""
        parts = [part for line in tiny.lines for part in line.partition("] ")[2].split("; ")]
        return [part for part in parts if part.startswith(("loss: ", "lr: ", "number: ", "score: "))]

    straight = heads_and_tails(tmp_path / "straight")
    with pytest.raises(Boom):
        heads_and_tails(tmp_path / "run", at)
    calls: list[Any] = []
    tiny = heads_and_tails(tmp_path / "run", None, lambda *call: calls.append(call))
    assert calls[:4] == [(2, "head", True), (2, "tail", True), (3, "head", False), (3, "tail", False)]
    assert tiny.result() == straight.result()
    resumed = printed(tiny)
    assert len(resumed) > 5 and resumed == printed(straight)[-len(resumed) :]
    numbers = [row[5] for row in rows(tmp_path / "run", "step") if row[3] == "number"]
    assert numbers == [float(n).hex() for n in range(4)] * 3
    heads = rows(tmp_path / "run", "head")
    assert [(r[0], r[1], r[4]) for r in heads] == [(1, 0, 0), (2, 4, 0), (3, 8, 0)]
    tails = rows(tmp_path / "run", "tail")
    assert [(r[0], r[1], r[4]) for r in tails] == [(e, 4 * e, seq) for e in (1, 2, 3) for seq in (0, 1, 2)]
    every = [(r.epoch, r.step, r.phase, r.name, r.seq) for r in RunJournal(tmp_path / "run").rows()]
    assert len(every) == len(set(every))


def test_the_best_names_no_weights_that_are_not_its_own(tmp_path: Path) -> None:
    def best(save: bool, *values: float) -> tuple[float, bool]:
        services = [everstep.Best("valid_loss", save=save)]
        with loop_in(tmp_path, state={"w": [0]}, max_epoch=len(values), services=services) as loop:
            for epoch in loop.iter_epochs():
                list(loop.iter_steps([1, 2]))
                loop.collect_metrics(valid_loss=values[epoch - 1])
        assert loop.best is not None
        return loop.best.value, str(loop.best.path).endswith("step-00000004")

    assert best(True, 3.0, 2.0) == (2.0, True)
    assert best(False, 3.0, 2.0, 1.0) == (1.0, False)


def test_weights_that_were_trained_on_since_the_measurement_are_not_kept_as_the_best(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=1, watch="valid_loss")
    with tiny.loop as loop:
        for _ in loop.iter_epochs():
            list(loop.iter_steps([1, 2]))
            loop.collect_metrics(valid_loss=1.0)
            list(loop.iter_steps([1, 2], "more"))
    assert loop.best is not None and (loop.best.value, loop.best.path) == (1.0, None)
    assert "measured at step 2 and its weights were trained on until step 4" in "".join(tiny.lines)


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
def test_limits_stop_exactly(tmp_path: Path, limits: Any, steps: int, epochs: int, reason: str) -> None:
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
        limit: Any = {"services": [looks], "max_time": 50}
        if way == "StopAfter":
            limit = {"services": [looks, StopAfter(seconds=50)]}
        return Tiny(tmp_path / "run", max_epoch=3, clock=clock, **limit)

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


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_limit_that_the_program_sets_is_in_its_checkpoints(tmp_path: Path, before: int, after: int) -> None:
    def train(name: str, fails_at: int = 0, given: int = before) -> Tiny:
        tiny = Tiny(tmp_path / name, max_epoch=given)

        def tail(loop: Any, epoch: int) -> None:
            if epoch == 1:
                loop.max_epoch = after
            if epoch == fails_at:
                raise Boom

        tiny.train(tail=tail)
        return tiny

    straight = train("straight")
    assert straight.loop.ending.epoch == after
    with pytest.raises(Boom):
        train("run", fails_at=2)
    tiny = train("run")
    assert any(f"max_epoch is {after}, as the program had set it" in line for line in tiny.lines)
    assert tiny.w.tobytes() == straight.w.tobytes() and rows(tmp_path / "run") == rows(tmp_path / "straight")
    assert train("run").seen == [], "it is finished"
    assert train("run", given=4).loop.ending.epoch == 4, "another limit given at a start counts"


@pytest.mark.parametrize(("between", "head", "inside"), [(None, 3, 4), (None, 5, 2), (3, 3, 4)])
def test_a_limit_set_again_is_the_checkpoints(tmp_path: Path, between: Any, head: int, inside: int) -> None:
    """A resume runs the epoch's head again, and lines between two epoch loops."""
    first = 1 if between is None else 3

    def train(stop: int = 0) -> int:
        with loop_in(tmp_path / "run", max_epoch=2) as loop:
            if between is not None:
                for _ in loop.iter_epochs():
                    list(loop.iter_steps(range(2)))
                loop.max_epoch = between
            for epoch in loop.iter_epochs():
                if epoch == first:
                    loop.max_epoch = head
                for step, _ in loop.iter_steps(range(2)):
                    if step == stop:
                        loop.max_epoch = inside
                        signal.raise_signal(signal.SIGTERM)
        return loop.step

    with pytest.raises(Interrupted):
        train(stop=2 * first - 1)
    assert train() == 2 * inside


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
    "by a later StopAfter": (lambda: StopAfter(steps=6), lambda: StopAfter(steps=99), (2, 7)),
    "without a stopper of its own": (stops_at_6, None, (2, 7)),
    "without the early stop": (lambda: everstep.EarlyStop("valid_loss", patience=3), None, (8, 29)),
}


@pytest.mark.parametrize(("first", "then", "goes_on"), REOPENED.values(), ids=REOPENED)
def test_a_changed_service_reopens_what_it_ended(tmp_path: Path, first: Any, then: Any, goes_on: Any) -> None:
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
    assert names(tmp_path / "run")[1:] == ["epoch-0001-step-00000004", "epoch-0002-step-00000008"]
    assert "finished at epoch 2" in "".join(Tiny(tmp_path / "run", max_epoch=2).train().lines)
