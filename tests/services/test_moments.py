"""What happens around steps: moments behind each door, in which order services run, what they may do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import everstep
import tiny_task
from everstep import Boundary, Every, Outcome, Service, Stop
from everstep.errors import ConfigError, MetricError, ServiceError, UsageError
from everstep.services import Moment, Stage
from everstep.testing import ManualClock
from tiny_runs import Acts, Boom, Tiny, Told, boom_at, events, quiet, rows, supervised
from tiny_task import numbers

EVALUATED = ["metrics_collected", "after_evaluation", "summary_added", "metric_stats_printed"]
EVALUATED += ["time_metric_stats_printed", "after_epoch"]


def evaluated(loop: Any, epoch: int) -> None:
    """A tail that fires every moment of one."""
    with loop.evaluation():
        loop.collect_metrics(valid_loss=0.5)
    loop.add_summary("a picture")
    loop.print_logs()


def test_the_trace_of_two_epochs_of_two_steps_and_what_the_moments_carry(tmp_path: Path) -> None:
    trace: list[tuple[str, int, int]] = []
    carried: dict[str, Any] = {}
    saved: list[str] = []
    tiny = Tiny(tmp_path / "run", samples=4, max_epoch=2)

    def note(boundary: Boundary) -> None:
        trace.append((boundary.moment.value, boundary.epoch, boundary.step))
        carried[boundary.moment.value] = boundary.payload

    for moment in set(Moment) - {Moment.AFTER_EVAL_STEP}:
        # a checkpoint is announced when the writer thread is done: at no fixed step
        checkpoint = moment is Moment.AFTER_CHECKPOINT
        tiny.loop.on(moment, (lambda b: saved.append(b.payload)) if checkpoint else note)

    tiny.train(tail=evaluated)
    expected = [("enter_loop", 0, 0)]
    for epoch in (1, 2):
        expected.append(("before_epoch", epoch, 2 * epoch - 2))
        for step in (2 * epoch - 1, 2 * epoch):
            expected += [("before_step", epoch, step - 1), ("metrics_collected", epoch, step - 1)]
            expected += [("after_step", epoch, step)]
        expected += [(name, epoch, 2 * epoch) for name in EVALUATED]
    assert trace == [*expected, ("exit_loop", 2, 4)]
    assert saved == [f"epoch-000{n}-step-0000000{2 * n}" for n in range(3)]
    assert tuple(carried["before_step"][0]) == tuple(carried["after_step"][0]) == tiny.seen[-1][2]
    assert carried["metrics_collected"] == {"valid_loss": 0.5}
    assert carried["after_evaluation"] == {"valid_loss": 0.5}
    assert carried["summary_added"] == "a picture"
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

    def inside(loop: Any, step: int) -> None:
        if step == 2:
            loop.on(Moment.AFTER_STEP, lambda b: seen.append(f"late {b.step}"), every=everstep.At(2, 4))

    def tail(loop: Any, epoch: int) -> None:
        second.remove()
        second.remove()

    tiny.train(inside, tail)
    assert seen == ["step 2", "late 2", "at 3", "step 4", "late 4", "at 5", "epoch 3"]


def test_stages_give_the_order_however_they_are_listed(tmp_path: Path) -> None:
    order: list[str] = []
    stages = [Stage[name] for name in ["SAVE", "REPORT", "MEASURE", "DECIDE", "GUARD", "EVALUATE", "REPORT"]]
    names = [f"{i} {stage.name}" for i, stage in enumerate(stages)]
    services = [Told(n, lambda b, n=n: order.append(n), s) for n, s in zip(names, stages, strict=True)]
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


def failing(boundary: Boundary) -> None:
    raise Boom(f"at step {boundary.step}")


def test_a_report_that_fails_at_each_step_stops_nothing_and_is_named_now_and_then(tmp_path: Path) -> None:
    """That it changes nothing: `check_service`; what is printed: the failing ends below."""
    fragile = Told("fragile", failing, every=Every(steps=1))
    ending = Tiny(tmp_path, max_epoch=26, services=[fragile]).train().loop.ending
    told = [
        f"service 'fragile' failed, and the training goes on: Boom: at step {step}" for step in range(1, 11)
    ]
    assert ending.warnings == (
        *told,
        "service 'fragile' failed 100 times, and the training goes on: Boom: at step 100",
    )
    assert ending.finished


def test_a_failing_service_of_any_other_stage_raises(tmp_path: Path) -> None:
    for stage in set(Stage) - {Stage.REPORT}:
        important = Told("important", failing, stage, Every(steps=3))
        tiny = Tiny(tmp_path / stage.name, max_epoch=2, services=[important])
        with pytest.raises(Boom, match="at step 3") as raised:
            tiny.train()
        assert raised.value.__notes__ == [f"in service 'important' (stage {stage.name})"]
        assert tiny.loop.ending.step == 3 and not tiny.loop.ending.finished


STOP = Outcome(actions=(Stop("now"),))
ANYTHING: Any = {"loss": 1.0}
UNNAMED: Any = Stop("now")
UNKNOWN = Outcome(actions=(ANYTHING,))


def at(moment: Moment) -> Service:
    service = Acts("eager", lambda b: STOP, Stage.DECIDE)
    service.moments = frozenset({moment})
    return service


REFUSED: list[tuple[Service, str]] = [
    (at(Moment.BEFORE_STEP), "BEFORE_STEP is for observers"),
    (at(Moment.METRICS_COLLECTED), "METRICS_COLLECTED is for observers"),
    (at(Moment.AFTER_CHECKPOINT), "AFTER_CHECKPOINT is for observers.* such as AFTER_STEP"),
    (at(Moment.EXIT_LOOP), "EXIT_LOOP is for observers"),
    (Told("looks", lambda b: STOP), r"observer.*class controller = True and stage = .*Stage.DECIDE or"),
    (Told("looks", lambda b: STOP, Stage.GUARD), "give its class controller = True$"),
    (Acts("late", lambda b: STOP, Stage.SAVE), r"'late' \(a controller of stage SAVE.*class stage = "),
    (Told("odd", lambda b: UNNAMED, Stage.DECIDE), r"or everstep.Outcome\(actions=\(Stop\(.*\),\)\)$"),
    (Told("odd", lambda b: ANYTHING, Stage.DECIDE), r"'odd' returned \{.*\}; return None or"),
    (Told("odd", lambda b: Outcome(UNNAMED), Stage.DECIDE), r"by name: everstep.Outcome\(actions="),
    (Acts("odd", lambda b: UNKNOWN, Stage.DECIDE), r"\} cannot be applied here; give Stop, Int"),
]


def test_what_a_service_may_not_do(tmp_path: Path) -> None:
    for number, (service, message) in enumerate(REFUSED):
        with pytest.raises(UsageError, match=message):
            Tiny(tmp_path / str(number), max_epoch=1, services=[service]).train()


def test_controllers_act_at_the_other_moments(tmp_path: Path) -> None:
    def tail(loop: Any, epoch: int) -> None:
        with loop.evaluation():
            pass

    for moment, steps in {Moment.ENTER_LOOP: 0, Moment.BEFORE_EPOCH: 0, Moment.AFTER_EVALUATION: 4}.items():
        tiny = Tiny(tmp_path / moment.name, max_epoch=3, services=[at(moment)]).train(tail=tail)
        assert (tiny.loop.step, tiny.loop.ending.reason) == (steps, "now")


def test_metrics_of_an_outcome_are_recorded(tmp_path: Path) -> None:
    measure = Told("norms", lambda b: Outcome({"w_norm": b.step * 2.0}), Stage.MEASURE, Every(steps=2))
    slow = Told("slow", lambda b: Outcome({"temperature": 1.0}), Stage.MEASURE, Every(seconds=1e-9))
    Tiny(tmp_path / "run", max_epoch=1, services=[measure, slow]).train()
    of_steps = [(1, step, "eval/norms", "w_norm", 0, (2.0 * step).hex(), 1) for step in (2, 4)]
    assert rows(tmp_path / "run", "eval/norms") == of_steps
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
    assert [line for line in tiny.lines if "failed, and the training goes on" in line] == [
        f"warning: service '{n}' failed, and the training goes on: Boom: exit {n}" for n in "ac"
    ]
    again = Tiny(tmp_path / "run", max_epoch=1).train()
    assert again.seen == [] and again.loop.ending.finished


def test_after_an_error_all_are_closed_and_the_error_stays(tmp_path: Path) -> None:
    def fails(at: str) -> list[str]:
        """What is logged where the loop's body, a service's `open`, or its first moment fails."""
        log: list[str] = []

        class Fails(Told):
            moments = frozenset({Moment.ENTER_LOOP})

            def open(self, run: Any) -> None:
                if at == "open":
                    raise Boom("at open")

        def early(boundary: Boundary) -> None:
            if at == "enter":
                raise Boom("at enter")

        last = Fails("c", early, Stage.REPORT if at == "open" else Stage.GUARD)
        services = [Ends("a", log, fails=at == "3"), Ends("b", log), last]
        tiny = Tiny(tmp_path / at, max_epoch=1, services=services)
        with pytest.raises(Boom, match=f"at {at}") as raised:
            tiny.train(inside=boom_at(3))
        if at == "3":
            assert "closing failed for 1 service(s): 'a': Boom: close a" in raised.value.__notes__[-1]
        assert Tiny(tmp_path / at, max_epoch=1).train().loop.ending.finished
        return log

    closed = ["close b", "close a"]
    assert fails("3") == ["exit a: Boom: at 3", "exit b: Boom: at 3", *closed]
    assert fails("open") == closed
    assert fails("enter")[-2:] == closed


class Counter(Service):
    """Counts its own runs, across restarts."""

    at: Any = ()

    def run(self, boundary: Boundary) -> None:
        self.at = (*self.at, boundary.step)

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def test_a_resume_at_seven_with_every_five_fires_at_ten_and_keeps_its_state(tmp_path: Path) -> None:
    def program() -> tuple[Counter, Tiny]:
        counter, saves = Counter("counter", Every(steps=5)), everstep.Checkpoints(Every(steps=7))
        return counter, Tiny(tmp_path / "run", max_epoch=4, services=[counter, saves])

    first, tiny = program()
    with pytest.raises(Boom):
        tiny.train(inside=boom_at(9))
    assert first.at == (5,)
    second, tiny = program()
    assert tiny.train().seen[0][1] == 8
    assert second.at[:3] == (5, 10, 15)
    without = Tiny(tmp_path / "run", max_epoch=5).train()
    assert "service 'counter' was removed: its state is dropped" in without.lines
    again = Tiny(tmp_path / "run", max_epoch=6, services=[Counter("counter", Every(steps=1))]).train()
    assert "service 'counter' is new in this run: it starts fresh" in again.lines


def test_windows_and_schedules_are_each_services_own(tmp_path: Path) -> None:
    clock, shared = ManualClock(), Every(seconds=10)
    counts: dict[str, list[int]] = {"keeps": [], "clears": [], "a": [], "b": []}

    def reads(name: str) -> Callable[[Boundary], None]:
        def read(boundary: Boundary) -> None:
            stats = boundary.readings.stats("loss")
            assert stats is not None
            counts[name].append(stats.count)
            if name == "clears":
                boundary.readings.clear()

        return read

    every = {"a": shared, "b": shared}
    services = [Told(name, reads(name), every=every.get(name)) for name in counts]
    tiny = Tiny(tmp_path / "run", samples=14, max_epoch=1, services=services, clock=clock)
    tiny.train(inside=lambda loop, step: clock.advance(4))
    assert counts["keeps"][:3] == [1, 2, 3] and counts["clears"][:3] == [1, 1, 1]
    assert counts["a"] == counts["b"] != []
    assert shared == Every(seconds=10) and shared.next_time() == 10
    assert (shared & Every(seconds=600)).next_time() == 600  # where both must be due
    assert (shared | Every(seconds=600)).next_time() == 10


class Finishing(Told):
    """Says its stage and the step when it finishes."""

    said: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, stage: Stage, moments: set[Moment]) -> None:
        super().__init__(f"finishing {stage.name}", lambda boundary: None, stage)
        self.moments = frozenset(moments)

    def finish(self, boundary: Boundary) -> None:
        self.said.append((self.stage.name, boundary.step))


def test_a_service_of_each_stage_finishes_once_and_at_a_clean_end_alone(tmp_path: Path) -> None:
    stages = [stage for stage in Stage if stage is not Stage.SAVE]
    for number, moments in enumerate(({Moment.AFTER_STEP}, {Moment.ENTER_LOOP}, set[Moment]())):

        def start(crash: int = 0, number: int = number, moments: set[Moment] = moments) -> None:
            services = [Finishing(stage, moments) for stage in reversed(stages)]
            Tiny(tmp_path / str(number), max_epoch=2, services=services).train(inside=boom_at(crash))

        Finishing.said.clear()
        with pytest.raises(Boom):
            start(crash=5)
        assert Finishing.said == []
        start()
        assert Finishing.said == [(stage.name, 8) for stage in stages]


class AtOdd(everstep.schedule.Schedule):
    def due(self, when: Any) -> bool:
        return when.step % 2 == 1


def test_of_two_schedules_either_or_both_are_due(tmp_path: Path) -> None:
    """One of the program's own, with `due` alone, is asked at each step, whatever else is due."""
    both, clock = Every(steps=2) & Every(steps=3), Every(epochs=1) & Every(seconds=1e-9)
    due: dict[str, list[int]] = {"both": [], "clock": [], "either": [], "own": []}
    schedules = {"both": both, "clock": clock, "either": everstep.At(5) | both, "own": AtOdd()}
    note = lambda name: lambda b: due[name].append(b.step)  # noqa: E731
    services = [Told(name, note(name), Stage.DECIDE, each) for name, each in schedules.items()]
    Tiny(tmp_path, max_epoch=2, services=services).train()
    assert due == {"both": [6], "clock": [4, 8], "either": [5, 6], "own": [1, 3, 5, 7]}
    assert {both, Every(steps=2) & Every(steps=3)} == {both}


Ask = Callable[[Any], object]
Door = Callable[..., Any]


def supervisor(run_dir: Path, ask: Ask = lambda loop: None, *services: Service) -> Any:
    with quiet(run_dir, {"w": np.zeros(1)}, max_step=4, services=services) as sv:
        ask(sv)
        batches = sv.stream(numbers(8, 2))
        while not sv.should_stop():
            next(batches)
            sv.add_summary({"note": "seen"})
            sv.advance(loss=1.0)
    return sv


def train_loop(run_dir: Path, ask: Ask = lambda loop: None, *services: Service) -> Any:
    tiny = Tiny(run_dir, max_epoch=1, services=services)
    ask(tiny.loop)
    return tiny.train(tail=evaluated).loop


def trainer(run_dir: Path, ask: Ask = lambda loop: None, *services: Service, task: Any = None) -> Any:
    streams = {"train": numbers(8, 2), "valid": numbers(4, 2)}
    door = tiny_task.trainer(run_dir, task, streams=streams, services=services, max_epoch=1)
    with door.open() as loop:
        ask(loop)
        for _ in loop.iter_epochs():
            door.epoch()
            loop.add_summary({"note": "seen"})
    return loop


OF_STEPS = {Moment.BEFORE_STEP, Moment.AFTER_STEP, Moment.METRICS_COLLECTED, Moment.SUMMARY_ADDED}
FIRES = {
    # it is entered where `on` can be called in this test
    "S": OF_STEPS | {Moment.AFTER_CHECKPOINT, Moment.EXIT_LOOP},
    "TL": {*Moment} - {Moment.AFTER_EVAL_STEP},
    "T": {*Moment},
}
DOORS: dict[str, Door] = {"S": supervisor, "TL": train_loop, "T": trainer}


def asking(moment: Moment, seen: list[Boundary]) -> Service:
    """A service that wants one moment."""
    service = Told(f"asks {moment.name}", seen.append, every=Every(steps=1) | Every(epochs=1))
    service.moments = frozenset({moment})
    return service


@pytest.mark.parametrize("door", DOORS)
def test_a_moment_fires_behind_a_door_or_asking_for_it_is_an_error(tmp_path: Path, door: str) -> None:
    fires = {*FIRES[door], Moment.ENTER_LOOP}
    seen, heard = ({moment: list[Boundary]() for moment in fires} for _ in range(2))

    def ask(loop: Any) -> None:
        for moment in fires:
            loop.on(moment, heard[moment].append)

    DOORS[door](tmp_path / "run", ask, *(asking(moment, seen[moment]) for moment in fires))
    for moment in fires:
        assert {boundary.moment for boundary in seen[moment]} == {moment}
        if moment is not Moment.ENTER_LOOP or door == "TL":  # else entered before `on` was called
            assert {boundary.moment for boundary in heard[moment]} == {moment}
    for moment, steps in {Moment.BEFORE_STEP: range(4), Moment.AFTER_STEP: range(1, 5)}.items():
        assert [b.step for b in heard[moment]] == list(steps)
        assert all(b.payload is not None for b in heard[moment])
    for moment in set(Moment) - set(fires):
        with pytest.raises(ConfigError, match=rf"'asks {moment.name}' asks for {moment.name}, which a"):
            DOORS[door](tmp_path / "service", lambda loop: None, asking(moment, []))
        with pytest.raises(ConfigError, match=rf"on\(\) asks for {moment.name}, which a "):
            DOORS[door](tmp_path / "function", lambda loop, moment=moment: loop.on(moment, print))


def test_a_supervisor_takes_a_schedule_that_is_in_steps_too(tmp_path: Path) -> None:
    either = Every(epochs=1) | Every(steps=9)
    everstep.Supervisor(tmp_path, {}, services=[everstep.EarlyStop("loss", patience=1, every=either)])


def test_a_supervisors_step_has_its_newest_batch(tmp_path: Path) -> None:
    """Several streams give their batches by name; a step without a batch is a step."""

    def seen(name: str, draws: Sequence[str], **data: Any) -> tuple[list[Any], list[Any]]:
        """In each step, the streams of which a batch is drawn."""
        before: list[Any] = []
        after: list[Any] = []
        with quiet(tmp_path / name, {"w": np.zeros(1)}, max_step=3) as sv:
            sv.on(Moment.BEFORE_STEP, lambda b: before.append((b.step, b.payload)))
            sv.on(Moment.AFTER_STEP, lambda b: after.append((b.step, b.payload)))
            streams = {each: sv.stream(data[each], each) for each in data} or sv.stream(None)
            while not (sv.should_stop() or sv.should_stop()):
                for each in draws[sv.step].split():
                    next(streams[each])
                sv.advance(loss=1.0)
        return before, after

    found = seen("two at a time", ["train train"] * 3, train=range(6))
    assert found == ([(0, 0), (1, 2), (2, 4)], [(1, 1), (2, 3), (3, 5)])
    before, after = seen("named", ["noise real", "noise", "noise real"], real=list("abcdef"), noise=range(6))
    assert [step for step, _ in before] == [0, 1, 2]
    assert [b for _, b in after] == [{"noise": 0, "real": "a"}, {"noise": 1}, {"noise": 2, "real": "b"}]
    found = seen("no data", ["", "", ""])
    assert found == ([(0, None), (1, None), (2, None)], [(1, None), (2, None), (3, None)])
    found = seen("every other", ["train", "", "train"], train=range(9))
    assert found == ([(0, 0), (1, None), (2, 1)], [(1, 0), (2, None), (3, 1)])


class Looks(Service):
    """Looks at outputs of steps, and makes a metric of one."""

    stage = Stage.MEASURE
    outputs = ("loss", "scores")

    def __init__(self) -> None:
        super().__init__("looks", Every(steps=1))
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def run(self, boundary: Boundary) -> Outcome | None:
        self.seen.append((boundary.step, dict(boundary.outputs)))
        scores = boundary.outputs.get("scores")
        return None if scores is None else Outcome({"top": float(max(scores))})


class Scores(tiny_task.TinyTask):
    """Its steps return scores of each sample, too."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        return {"loss": float(ids.mean()), "scores": ids * 1.0, "more": 1.0}


def test_a_service_sees_what_a_trainers_step_returned(tmp_path: Path) -> None:
    looks = Looks()
    trainer(tmp_path / "run", lambda loop: None, looks, task=Scores())
    assert [(step, seen["loss"], list(seen["scores"])) for step, seen in looks.seen] == [
        (step, 2 * step - 1.5, [2 * step - 2.0, 2 * step - 1.0]) for step in range(1, 5)
    ]
    assert {key for _, seen in looks.seen for key in seen} == {"loss", "scores"}
    with pytest.raises(MetricError, match=r"metric 'scores'"):  # no number, and nobody looks at it
        trainer(tmp_path / "other", task=Scores())
    names = {row[3] for row in rows(tmp_path / "run", "step")}
    assert names == {"loss", "more"}  # a number is a metric, too; scores are none
    assert len(rows(tmp_path / "run", "eval/looks")) == 4


def test_a_service_sees_what_advance_was_given(tmp_path: Path) -> None:
    looks, one = Looks(), Looks()
    one.name, one.outputs = "one", "loss"  # one name needs no tuple
    sv = quiet(tmp_path / "run", {}, services=[looks, one], max_step=2)
    supervised(sv, lambda sv: {"loss": 1.0, "scores": [sv.step, 3]})
    assert looks.seen == [(1, {"loss": 1.0, "scores": [0, 3]}), (2, {"loss": 1.0, "scores": [1, 3]})]
    assert {step: seen["loss"] for step, seen in one.seen} == {1: 1.0, 2: 1.0}
