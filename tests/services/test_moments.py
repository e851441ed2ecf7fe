"""What happens around steps: which moments there are, in which order services run, what they may do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import everstep
from everstep import Boundary, Every, Moment, Outcome, Service, Stage, Stop
from everstep.errors import ConfigError, ServiceError, UsageError
from everstep.schedule import Schedule
from everstep.testing import ManualClock
from tiny_runs import Boom, Tiny, boom_at, events, rows

Run = Callable[[Boundary], Outcome | None]


class Told(Service):
    """Calls a function at its boundaries."""

    def __init__(
        self, name: str, fn: Run, stage: Stage = Stage.REPORT, every: Schedule | None = None
    ) -> None:
        super().__init__(name, Every(steps=1) if every is None else every)
        self.stage, self.fn = stage, fn

    def run(self, boundary: Boundary) -> Outcome | None:
        return self.fn(boundary)


class Acts(Told):
    controller: ClassVar[bool] = True


def test_the_trace_of_two_epochs_of_two_steps(tmp_path: Path) -> None:
    trace: list[tuple[str, int, int]] = []
    saved: list[str] = []
    tiny = Tiny(tmp_path / "run", samples=4, max_epoch=2)
    for moment in set(Moment) - {Moment.AFTER_EVAL_STEP}:
        if moment is Moment.AFTER_CHECKPOINT:  # comes when the writer thread is done: at no fixed step
            tiny.loop.on(moment, lambda b: saved.append(b.payload))
        else:
            tiny.loop.on(moment, lambda b: trace.append((b.moment.value, b.epoch, b.step)))

    def tail(loop: Any, epoch: int) -> None:
        with loop.evaluation():
            loop.collect_metrics(valid_loss=1.0)
        loop.add_summary("a picture")
        loop.print_logs()

    tiny.train(tail=tail)
    assert trace == [
        ("enter_loop", 0, 0),
        ("before_epoch", 1, 0),
        ("before_step", 1, 0),
        ("metrics_collected", 1, 0),
        ("after_step", 1, 1),
        ("before_step", 1, 1),
        ("metrics_collected", 1, 1),
        ("after_step", 1, 2),
        ("metrics_collected", 1, 2),
        ("after_evaluation", 1, 2),
        ("summary_added", 1, 2),
        ("metric_stats_printed", 1, 2),
        ("time_metric_stats_printed", 1, 2),
        ("after_epoch", 1, 2),
        ("before_epoch", 2, 2),
        ("before_step", 2, 2),
        ("metrics_collected", 2, 2),
        ("after_step", 2, 3),
        ("before_step", 2, 3),
        ("metrics_collected", 2, 3),
        ("after_step", 2, 4),
        ("metrics_collected", 2, 4),
        ("after_evaluation", 2, 4),
        ("summary_added", 2, 4),
        ("metric_stats_printed", 2, 4),
        ("time_metric_stats_printed", 2, 4),
        ("after_epoch", 2, 4),
        ("exit_loop", 2, 4),
    ]
    assert saved == [
        "epoch-0000-step-00000000",
        "epoch-0001-step-00000002",
        "epoch-0002-step-00000004",
    ]


def test_what_the_moments_carry(tmp_path: Path) -> None:
    carried: dict[str, Any] = {}
    tiny = Tiny(tmp_path / "run", samples=4, max_epoch=1)
    for moment in set(Moment) - {Moment.AFTER_EVAL_STEP}:
        tiny.loop.on(moment, lambda b: carried.update({b.moment.value: b.payload}))

    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=0.5)
        loop.print_logs()

    tiny.train(tail=tail)
    batch = tiny.seen[-1][2]
    assert tuple(carried["before_step"][0]) == tuple(carried["after_step"][0]) == batch
    assert carried["metrics_collected"] == {"valid_loss": 0.5}
    assert carried["metric_stats_printed"].keys() == {"loss", "valid_loss"}
    assert carried["metric_stats_printed"]["valid_loss"].mean == 0.5
    assert carried["time_metric_stats_printed"].keys() == {"epoch_time", "step_time"}
    assert carried["exit_loop"] == tiny.loop.ending


def test_a_checkpoint_is_announced_again_once_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        Tiny(tmp_path / "run", max_epoch=2).train(inside=boom_at(6))
    saved: list[str] = []
    tiny = Tiny(tmp_path / "run", max_epoch=2)
    tiny.loop.on(Moment.AFTER_CHECKPOINT, lambda b: saved.append(b.payload))
    tiny.train()
    assert saved == ["epoch-0001-step-00000004", "epoch-0002-step-00000008"]


def test_handlers_are_called_every_n_until_removed(tmp_path: Path) -> None:
    seen: list[str] = []
    tiny = Tiny(tmp_path / "run", max_epoch=3)
    second = tiny.loop.on(Moment.AFTER_STEP, lambda b: seen.append(f"step {b.step}"), every=2)
    tiny.loop.on("after_epoch", lambda b: seen.append(f"epoch {b.epoch}"), every=3)
    tiny.loop.on("AFTER_STEP", lambda b: seen.append(f"at {b.step}"), every=everstep.At(3, 5))

    def tail(loop: Any, epoch: int) -> None:
        second.remove()
        second.remove()

    tiny.train(tail=tail)
    assert seen == ["step 2", "at 3", "step 4", "at 5", "epoch 3"]


def test_a_handler_added_in_the_middle(tmp_path: Path) -> None:
    seen: list[int] = []
    tiny = Tiny(tmp_path / "run", max_epoch=1)

    def inside(loop: Any, step: int) -> None:
        if step == 2:
            loop.on(Moment.AFTER_STEP, lambda b: seen.append(b.step))
            loop.on(Moment.BEFORE_STEP, lambda b: seen.append(-b.step - 1))

    tiny.train(inside=inside)
    assert seen == [2, -3, 3, -4, 4]


@pytest.mark.parametrize(
    ("moment", "every", "message"),
    [
        ("AFTER_STEPS", None, "no moment 'AFTER_STEPS'; did you mean 'AFTER_STEP'"),
        (3, None, "no moment 3"),
        ("BEFORE_EPOCH", 2, "leave out every=2"),
        ("METRICS_COLLECTED", Every(steps=2), "leave out every="),
        ("AFTER_STEP", 0, "steps=0: give an integer, 1 or more"),
    ],
)
def test_wrong_registrations(tmp_path: Path, moment: Any, every: Any, message: str) -> None:
    loop = everstep.TrainLoop(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        loop.on(moment, print, every=every)


def test_stages_give_the_order_however_they_are_listed(tmp_path: Path) -> None:
    order: list[str] = []
    stages = [
        Stage.SAVE,
        Stage.REPORT,
        Stage.MEASURE,
        Stage.DECIDE,
        Stage.GUARD,
        Stage.EVALUATE,
        Stage.REPORT,
    ]
    services = [
        Told(f"{i} {stage.name}", lambda b, i=i, s=stage: order.append(f"{i} {s.name}"), stage)  # type: ignore[misc]
        for i, stage in enumerate(stages)
    ]
    Tiny(tmp_path / "run", samples=2, max_epoch=1, services=services).train()
    assert order[:7] == ["2 MEASURE", "4 GUARD", "5 EVALUATE", "3 DECIDE", "1 REPORT", "6 REPORT", "0 SAVE"]


def test_a_logger_after_a_stopper_still_logs_and_sees_why(tmp_path: Path) -> None:
    logged: list[tuple[int, str | None]] = []

    def stop(boundary: Boundary) -> Outcome | None:
        return Outcome(actions=(Stop("seen enough"),)) if boundary.step == 3 else None

    services = [
        Acts("stopper", stop, Stage.DECIDE),
        Told("second thoughts", lambda b: logged.append((-b.step, b.stop)), Stage.DECIDE),
        Told("logger", lambda b: logged.append((b.step, b.stop))),
    ]
    tiny = Tiny(tmp_path / "run", max_epoch=5, services=services).train()
    assert logged[:6] == [(-1, None), (1, None), (-2, None), (2, None), (-3, None), (3, "seen enough")]
    assert (tiny.loop.step, tiny.loop.ending.reason) == (3, "seen enough")
    assert [e["reason"] for e in events(tmp_path / "run", "stop")] == ["seen enough"]
    assert [e["by"] for e in events(tmp_path / "run", "stop")] == ["stopper"]


def test_the_first_reason_counts(tmp_path: Path) -> None:
    def stop(boundary: Boundary) -> Outcome | None:
        return Outcome(actions=(Stop("first"), Stop("second"))) if boundary.step == 2 else None

    tiny = Tiny(tmp_path / "run", max_step=2, services=[Acts("stopper", stop, Stage.DECIDE)]).train()
    assert tiny.loop.ending.reason == "max_step 2 is reached"


def test_a_failing_report_is_warned_counted_and_stops_nothing(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=2).train()

    def fail(boundary: Boundary) -> None:
        raise Boom(f"at step {boundary.step}")

    tiny = Tiny(tmp_path / "run", max_epoch=2, services=[Told("fragile", fail, every=Every(steps=4))]).train()
    assert tiny.w.tobytes() == straight.w.tobytes()
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    warned = [w for w in tiny.loop.ending.warnings if "'fragile'" in w]
    assert len(warned) == 2 and "Boom: at step 4" in warned[0]
    assert any("warning: service 'fragile' failed" in line for line in tiny.lines)
    assert tiny.loop.ending.finished


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("stage", [Stage.MEASURE, Stage.GUARD, Stage.EVALUATE, Stage.DECIDE, Stage.SAVE])
def test_a_failing_service_of_any_other_stage_raises(tmp_path: Path, stage: Stage) -> None:
    def fail(boundary: Boundary) -> None:
        raise Boom("no")

    tiny = Tiny(tmp_path / "run", max_epoch=2, services=[Told("important", fail, stage, Every(steps=3))])
    with pytest.raises(Boom, match="no") as raised:
        tiny.train()
    assert raised.value.__notes__ == [f"in service 'important' (stage {stage.name})"]
    assert tiny.loop.ending.step == 3 and not tiny.loop.ending.finished


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("moment", [m for m in Moment if m is not Moment.AFTER_EVAL_STEP])  # a Trainer's
def test_observers_that_return_actions_are_refused(tmp_path: Path, moment: Moment) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=1)
    tiny.loop.on(moment, lambda b: Outcome(actions=(Stop("me too"),)))

    def tail(loop: Any, epoch: int) -> None:
        with loop.evaluation():
            loop.add_summary("x")
        loop.print_logs()

    with pytest.raises(UsageError, match=r"observer"):
        tiny.train(tail=tail)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    "moment", [Moment.BEFORE_STEP, Moment.METRICS_COLLECTED, Moment.AFTER_CHECKPOINT, Moment.EXIT_LOOP]
)
def test_controllers_cannot_act_where_only_observing_is_safe(tmp_path: Path, moment: Moment) -> None:
    class Eager(Acts):
        moments = frozenset({moment})

    stop = Outcome(actions=(Stop("now"),))
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=[Eager("eager", lambda b: stop, Stage.DECIDE)])
    with pytest.raises(UsageError, match=rf"{moment.name} is for observers"):
        tiny.train()


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("moment", "steps"), [(Moment.ENTER_LOOP, 0), (Moment.BEFORE_EPOCH, 0), (Moment.AFTER_EVALUATION, 4)]
)
def test_controllers_act_at_the_other_moments(tmp_path: Path, moment: Moment, steps: int) -> None:
    class Eager(Acts):
        moments = frozenset({moment})

    stop = Outcome(actions=(Stop("now"),))
    tiny = Tiny(tmp_path / "run", max_epoch=3, services=[Eager("eager", lambda b: stop, Stage.DECIDE)])

    def tail(loop: Any, epoch: int) -> None:
        with loop.evaluation():
            pass

    tiny.train(tail=tail)
    assert (tiny.loop.step, tiny.loop.ending.reason) == (steps, "now")


def test_a_report_cannot_act_even_as_a_controller(tmp_path: Path) -> None:
    late = Acts("late", lambda b: Outcome(actions=(Stop("now"),)), Stage.REPORT)
    with pytest.raises(UsageError, match=r"'late' \(a controller of stage REPORT\).*stage = Stage.DECIDE"):
        Tiny(tmp_path / "run", max_epoch=1, services=[late]).train()


def test_a_service_that_returns_something_else(tmp_path: Path) -> None:
    odd: Any = Told("odd", lambda b: {"loss": 1.0}, Stage.DECIDE)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=r"'odd' returned \{'loss': 1.0\}; return None or everstep.Outcome"):
        Tiny(tmp_path / "run", max_epoch=1, services=[odd]).train()
    odd = Told("odd", lambda b: Outcome(Stop("now")), Stage.DECIDE)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"by name: everstep.Outcome\(actions="):
        Tiny(tmp_path / "other", max_epoch=1, services=[odd]).train()


def test_metrics_of_an_outcome_are_recorded(tmp_path: Path) -> None:
    measure = Told("norms", lambda b: Outcome({"w_norm": b.step * 2.0}), Stage.MEASURE, Every(steps=2))
    slow = Told("slow", lambda b: Outcome({"temperature": 1.0}), Stage.MEASURE, Every(seconds=1e-9))
    Tiny(tmp_path / "run", max_epoch=1, services=[measure, slow]).train()
    assert rows(tmp_path / "run", "eval/norms") == [
        (1, 2, "eval/norms", "w_norm", 0, (4.0).hex(), 1),
        (1, 4, "eval/norms", "w_norm", 0, (8.0).hex(), 1),
    ]
    assert rows(tmp_path / "run", "eval/slow") == []  # recorded, but as depending on the clock


class Ends(Service):
    """Takes part in the end, and may fail there."""

    moments = frozenset({Moment.EXIT_LOOP})

    def __init__(self, name: str, log: list[str], fails: bool = False) -> None:
        super().__init__(name)
        self.log, self.fails = log, fails

    def run(self, boundary: Boundary) -> None:
        self.log.append(f"exit {self.name}: {boundary.payload.reason}")
        if self.fails:
            raise Boom(f"exit {self.name}")

    def close(self) -> None:
        self.log.append(f"close {self.name}")
        if self.fails:
            raise Boom(f"close {self.name}")


def test_every_end_runs_though_others_fail_and_all_failures_are_shown(tmp_path: Path) -> None:
    log: list[str] = []
    services = [Ends("a", log, fails=True), Ends("b", log), Ends("c", log, fails=True)]
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=services)
    with pytest.raises(ServiceError, match=r"2 service\(s\): 'c': Boom: close c; 'a': Boom: close a"):
        tiny.train()
    assert log == [f"exit {n}: max_epoch 1 is reached" for n in "abc"] + ["close c", "close b", "close a"]
    assert [line for line in tiny.lines if "failed and is skipped" in line] == [
        f"warning: service '{n}' failed and is skipped: Boom: exit {n}" for n in "ac"
    ]
    again = Tiny(tmp_path / "run", max_epoch=1).train()
    assert again.seen == [] and again.loop.ending.finished


def test_every_end_runs_after_an_error_and_does_not_hide_it(tmp_path: Path) -> None:
    log: list[str] = []
    services = [Ends("a", log, fails=True), Ends("b", log)]
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=services)
    with pytest.raises(Boom, match="at 3") as raised:
        tiny.train(inside=boom_at(3))
    assert log == ["exit a: Boom: at 3", "exit b: Boom: at 3", "close b", "close a"]
    assert "closing failed for 1 service(s): 'a': Boom: close a" in raised.value.__notes__[-1]


def test_a_service_that_fails_to_open_closes_the_others(tmp_path: Path) -> None:
    log: list[str] = []

    class Stuck(Service):
        def open(self, run: Any) -> None:
            raise Boom("cannot open")

    with pytest.raises(Boom, match="cannot open"):
        Tiny(tmp_path / "run", services=[Ends("a", log), Stuck("stuck")], max_epoch=1).train()
    assert log == ["close a"]
    assert Tiny(tmp_path / "run", max_epoch=1).train().loop.ending.finished


def test_a_service_that_fails_at_enter_loop_closes_all(tmp_path: Path) -> None:
    log: list[str] = []

    class Early(Acts):
        moments = frozenset({Moment.ENTER_LOOP})

    def fail(boundary: Boundary) -> None:
        raise Boom("at the door")

    services = [Ends("a", log), Early("early", fail, Stage.GUARD)]
    with pytest.raises(Boom, match="at the door"):
        Tiny(tmp_path / "run", services=services, max_epoch=1).train()
    assert "close a" in log
    assert Tiny(tmp_path / "run", max_epoch=1).train().loop.ending.finished


class Counter(Service):
    """Counts its own runs, across restarts."""

    def __init__(self, every: Schedule) -> None:
        super().__init__("counter", every)
        self.at: list[int] = []

    def run(self, boundary: Boundary) -> None:
        self.at.append(boundary.step)

    def state_dict(self) -> Any:
        return {"at": tuple(self.at)}

    def load_state_dict(self, state: Any) -> None:
        self.at = list(state["at"])


def test_a_resume_at_seven_with_every_five_fires_at_ten_and_keeps_its_state(tmp_path: Path) -> None:
    first = Counter(Every(steps=5))
    save = everstep.Checkpoints(Every(steps=7))
    with pytest.raises(Boom):
        Tiny(tmp_path / "run", max_epoch=4, services=[first, save]).train(inside=boom_at(9))
    assert first.at == [5]
    second = Counter(Every(steps=5))
    tiny = Tiny(
        tmp_path / "run", max_epoch=4, services=[second, everstep.Checkpoints(Every(steps=7))]
    ).train()
    assert tiny.seen[0][1] == 8
    assert second.at[:3] == [5, 10, 15]


def test_added_and_removed_observers_are_said(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        Tiny(tmp_path / "run", max_epoch=2, services=[Counter(Every(steps=1))]).train(inside=boom_at(6))
    tiny = Tiny(tmp_path / "run", max_epoch=2).train()
    assert "service 'counter' is gone: its state is dropped" in tiny.lines
    tiny = Tiny(tmp_path / "run", max_epoch=3, services=[Counter(Every(steps=1))]).train()
    assert "service 'counter' is new in this run: it starts fresh" in tiny.lines


def test_service_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"two services are named 'early stop valid_loss'.*name="):
        Tiny(tmp_path, services=[everstep.EarlyStop("valid_loss", patience=n) for n in (1, 2)])
    with pytest.raises(ConfigError, match="without '/'"):
        Told("a/b", lambda b: None)
    with pytest.raises(ConfigError, match="is not a Service; pass an instance"):
        Tiny(tmp_path, services=[everstep.EarlyStop])
    with pytest.raises(ConfigError, match="is not a Service"):
        Tiny(tmp_path, services=[print])


def test_one_reader_clears_nobody_elses_window(tmp_path: Path) -> None:
    means: list[tuple[str, float]] = []

    def reads(name: str, clear: bool) -> Run:
        def read(boundary: Boundary) -> None:
            stats = boundary.readings.stats("loss")
            assert stats is not None
            means.append((name, stats.count))
            if clear:
                boundary.readings.clear()

        return read

    services = [Told("keeps", reads("keeps", False)), Told("clears", reads("clears", True))]
    Tiny(tmp_path / "run", samples=6, max_epoch=1, services=services).train()
    assert [n for who, n in means if who == "keeps"][:3] == [1, 2, 3]
    assert [n for who, n in means if who == "clears"][:3] == [1, 1, 1]


def test_services_given_one_schedule_do_not_postpone_each_other(tmp_path: Path) -> None:
    clock, ran = ManualClock(), {"a": 0, "b": 0}
    shared = Every(seconds=10)

    def count(name: str) -> Run:
        def run(boundary: Boundary) -> None:
            ran[name] += 1

        return run

    services = [Told("a", count("a"), every=shared), Told("b", count("b"), every=shared)]
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=services, clock=clock)
    tiny.train(inside=lambda loop, step: clock.advance(4))
    assert ran["a"] == ran["b"] > 0
    assert shared == Every(seconds=10) and shared.next_time() == 10
