"""`When(condition, actions)`: what happens, where, how often; `GlobalStepWaiter`, which waits for a run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crashing import collecting, run

import everstep
import warm
from everstep import Every, Save, Stop
from everstep.errors import ConfigError, ServiceError, UsageError
from everstep.services import GlobalStepWaiter, Interrupt, OnBest, SetValue, When
from tiny_runs import Boom, Tiny, boom_at, events, rows

LOSSES = [0.5, 0.6, 0.4, 0.4, 0.3]
"""Of each epoch, of four steps: bests in epochs 1, 3 and 5."""


def noting(path: Path) -> Callable[[everstep.Boundary], None]:
    def note(boundary: everstep.Boundary) -> None:
        with path.open("a") as file:
            file.write(f"{boundary.step}\n")

    return note


def test_on_a_new_best_once_per_best_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "told"
    for epochs in (1, 2, 3, 5, 5):
        services = [When(OnBest("valid_loss"), noting(path))]
        run(tmp_path / "run", services, collecting("valid_loss", LOSSES), max_epoch=epochs)
    assert path.read_text().split() == ["4", "12", "20"]


def test_a_crash_after_the_checkpoint_does_not_repeat_it_one_before_does(tmp_path: Path) -> None:
    """The boundary's checkpoint has it; steps that are executed again do all that they did."""
    path = tmp_path / "told"

    def start(crash: int = 0) -> None:
        services = [When(OnBest("valid_loss"), noting(path))]
        run(tmp_path / "run", services, collecting("valid_loss", LOSSES), boom_at(crash), max_epoch=4)

    for crash in (6, 14):  # checkpoints after steps 3, 4, 6, 8, 9, 12 ...
        with pytest.raises(Boom):
            start(crash)
    start()
    assert path.read_text().split() == ["4", "12"]


def test_each_kind_of_condition_sets_a_value_exactly(tmp_path: Path) -> None:
    halve = SetValue("settings.rate", times=0.5)
    services: list[tuple[Callable[[], When], list[int]]] = [
        (lambda: When(OnBest("valid_loss"), halve), [4, 12, 20]),
        (lambda: When(Every(steps=7), halve), [7, 14]),
        (lambda: When(lambda b: b.step in (6, 12), halve, every=Every(steps=3)), [6, 12]),
    ]

    def start(run_dir: Path, make: Callable[[], When], crash: int = 0) -> tuple[str | None, Any]:
        settings = {"rate": 1.0, "sum": 0.0}
        services = [make(), everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
        with everstep.TrainLoop(
            run_dir, {"settings": settings}, services=services, max_epoch=5, steps_per_epoch=4, seed=1
        ) as loop:
            for epoch in loop.iter_epochs():
                for step in loop.iter_steps():
                    settings["sum"] += settings["rate"] * step
                    if step == crash:
                        raise Boom
                loop.collect_metrics(valid_loss=LOSSES[epoch - 1])
        return loop.ending.digest, rows(run_dir)

    for number, (make, steps) in enumerate(services):
        whole = start(tmp_path / f"whole {number}", make)
        assert [row[1] for row in whole[1] if row[3] == "settings.rate"] == steps
        with pytest.raises(Boom):
            start(tmp_path / str(number), make, 14)
        assert start(tmp_path / str(number), make) == whole


def test_a_save_on_each_best(tmp_path: Path) -> None:
    saves = everstep.Checkpoints(everstep.Never(), keep_last=None)
    tiny = Tiny(tmp_path, services=[When(OnBest("valid_loss"), Save()), saves], max_epoch=5)
    tiny.train(tail=collecting("valid_loss", LOSSES))
    names = {path.name[:10] for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"epoch-0000", "epoch-0001", "epoch-0003", "epoch-0005"}


def test_a_stop_and_an_interruption(tmp_path: Path) -> None:
    tail = collecting("valid_loss", LOSSES)
    low = lambda boundary: (boundary.readings.values("valid_loss") or [1])[-1] < 0.45  # noqa: E731
    tiny = run(tmp_path / "a", [When(low, Stop("low enough"))], tail, max_epoch=5)
    assert (tiny.loop.ending.reason, tiny.loop.ending.step) == ("low enough", 12)
    with pytest.raises(everstep.errors.Interrupted) as raised:
        run(tmp_path / "b", [When(Every(steps=5), Interrupt("a pause"))], max_epoch=5)
    assert raised.value.code == 3 and events(tmp_path / "b", "interrupted")[0]["step"] == 5


def test_several_actions_in_order_and_the_checkpoint_comes_after(tmp_path: Path) -> None:
    seen: list[Any] = []
    services = [
        When(
            Every(steps=2),
            [lambda b: seen.append(b.step), Save(), lambda b: seen.append(-b.step)],
            name="two",
        ),
        When(Every(steps=2), lambda b: seen.append(str(b.step))),
    ]
    run(tmp_path, services, max_epoch=1)
    assert seen == [2, -2, "2", 4, -4, "4"]


def test_another_decision_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        run(tmp_path, [When(Every(steps=9), Stop("over"))], inside=boom_at(2), max_epoch=1)
    with pytest.raises(ConfigError, match=r"stored .*Every\(steps=9.*given .*Every\(steps=8"):
        run(tmp_path, [When(Every(steps=8), Stop("over"), name="when Every(steps=9)")], max_epoch=2)
    with pytest.raises(Boom):
        run(tmp_path / "b", [When(Every(steps=9), print)], inside=boom_at(2), max_epoch=1)
    run(tmp_path / "b", [When(Every(steps=8), print)], max_epoch=2)  # an observer may change


def test_before_and_after_a_save(tmp_path: Path) -> None:
    """CheckpointSaverListener: before_save is the object's own state_dict, after_save is AFTER_CHECKPOINT."""
    log: list[str] = []

    class Cache:
        def state_dict(self) -> dict[str, int]:
            log.append("before")
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    services = [everstep.Checkpoints(Every(steps=2))]
    with everstep.Supervisor(tmp_path, {"cache": Cache()}, services=services, max_step=4) as sv:
        sv.on(everstep.services.Moment.AFTER_CHECKPOINT, lambda boundary: log.append(boundary.payload))
        sv.stream(None)
        while not sv.should_stop():
            sv.advance()
    names = [line for line in log if line != "before"]
    assert names == ["epoch-0000-step-00000000", "step-00000002", "step-00000004"]
    assert log[log.index("step-00000002") - 1] == "before"


def test_a_function_that_returns_something_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="returned True; return nothing"):
        run(tmp_path, [When(Every(steps=1), lambda boundary: True)], max_epoch=1)  # type: ignore[arg-type, return-value]


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
    with everstep.Supervisor(run_dir, services=services, max_step=steps, seed=1) as sv:
        sv.stream(None)
        while not sv.should_stop():
            sv.advance()


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
