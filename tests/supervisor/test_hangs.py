"""A step, a fetch, a tail or a save that does not move is noticed, with the stacks of all threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
import warm
from everstep import At, Every, hazard
from everstep.errors import ConfigError, ServiceError
from everstep.record import RunJournal, failures
from everstep.services import HangWatch
from everstep.testing import nothing_left
from tiny_runs import Tiny, rows
from waiting import until

AFTER = 0.6


def hang_until_noticed(run_dir: Path, pages: int = 1) -> None:
    until(lambda: len(failures(run_dir)) >= pages)
    threading.Event().wait(1.5 * AFTER)  # once for each hang


def watched(run_dir: Path, **arguments: Any) -> Tiny:
    services = [HangWatch(AFTER), *arguments.pop("services", ())]
    return Tiny(run_dir, max_epoch=2, services=services, **arguments)


def in_a_step(run_dir: Path) -> Tiny:
    return watched(run_dir).train(lambda loop, step: hang_until_noticed(run_dir) if step == 3 else None)


def in_a_tail(run_dir: Path) -> Tiny:
    return watched(run_dir).train(
        tail=lambda loop, epoch: hang_until_noticed(run_dir) if epoch == 1 else None
    )


def in_a_fetch(run_dir: Path) -> Tiny:
    class Slow:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            for number in range(4):
                if number == 2 and not failures(run_dir):
                    hang_until_noticed(run_dir)
                yield (np.arange(2) + number,)

    tiny = watched(run_dir)
    tiny.data = everstep.data.replay(Slow())
    return tiny.train()


def in_a_service(run_dir: Path) -> Tiny:
    service = everstep.services.When(Every(epochs=2), lambda boundary: hang_until_noticed(run_dir))
    return watched(run_dir, services=[service]).train()


PLACES = {"step": in_a_step, "tail": in_a_tail, "fetch": in_a_fetch, "service": in_a_service}


@pytest.mark.campaign("timed")
@pytest.mark.parametrize("place", PLACES)
def test_a_hang_of_the_loop_is_noticed_once_and_the_run_goes_on(tmp_path: Path, place: str) -> None:
    run_dir = tmp_path / "run"
    with nothing_left():
        tiny = PLACES[place](run_dir)
    (page,) = failures(run_dir)
    assert (page.kind, page.segment, page.rank, page.cause) == ("hang", 1, 0, None)
    assert page.what.startswith(f"the loop has not moved for {AFTER} s; the main thread is in ")
    assert page.lines[0] == "Thread 'MainThread' (most recent call last):"
    assert any("hang_until_noticed" in line for line in page.lines)
    assert any("everstep-hang-watch" in line for line in page.lines)
    ending = tiny.loop.ending
    assert ending is not None and ending.finished
    (warning,) = ending.warnings
    assert warning.startswith("hang: the loop has not moved") and str(run_dir / "failures") in warning
    (event,) = RunJournal(run_dir).events("hang")
    assert event.data == {"what": page.what, "rank": 0}


@pytest.mark.campaign("timed")
def test_each_hang_is_told(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    watched(run_dir).train(
        lambda loop, step: hang_until_noticed(run_dir, step - 1) if step in (2, 3) else None
    )
    assert [page.step for page in failures(run_dir)] == [1, 2]


@pytest.mark.campaign("timed")
def test_a_save_that_hangs_beside_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"

    def stuck(name: str) -> None:
        in_the_save = threading.current_thread().name == "everstep-writer" and name == "checkpoint.rename"
        if in_the_save and tiny.loop.step > 1 and not failures(run_dir):
            hang_until_noticed(run_dir)

    tiny = watched(run_dir, services=[everstep.Checkpoints(At(2))])
    monkeypatch.setattr(hazard, "_action", stuck)
    tiny.train(lambda loop, step: time.sleep(AFTER / 4))
    page = failures(run_dir)[0]
    assert page.what.startswith(f"a save has not ended for {AFTER} s")
    assert any("everstep-writer" in line for line in page.lines)
    assert any("hang_until_noticed" in line for line in page.lines)


@pytest.mark.campaign("timed")
def test_a_loop_that_waits_and_asks_does_not_hang(tmp_path: Path) -> None:
    """Nor does an evaluation: both draw batches, or ask whether to go on."""
    services = [HangWatch(AFTER), everstep.Console(sink=lambda line: None)]
    with everstep.Supervisor(tmp_path, {"w": np.zeros(1)}, max_step=2, services=services) as sv:
        data = sv.stream(everstep.data.arrays(np.arange(4), batch_size=1))
        began = time.monotonic()
        while not sv.should_stop():
            if time.monotonic() > began + 4 * AFTER:
                sv.advance()
            elif time.monotonic() > began + 2 * AFTER:
                next(data)
            time.sleep(0.01)
    assert failures(tmp_path) == []


@pytest.mark.campaign("timed")
def test_a_service_that_waits_for_another_run_does_not_hang(tmp_path: Path) -> None:
    waiter = everstep.services.GlobalStepWaiter(tmp_path / "other", 1, poll=AFTER / 10, timeout=3 * AFTER)
    with pytest.raises(ServiceError, match="look at that run"):
        watched(tmp_path / "run", services=[waiter]).train()
    assert failures(tmp_path / "run") == []


@pytest.mark.campaign("timed")
def test_a_clock_that_jumps_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def jump(clock: Callable[[], float]) -> Callable[[], float]:
        shift = [0.0]

        def jumping() -> float:
            shift[0] += 3600
            return clock() + shift[0]

        return jumping

    def inside(loop: Any, step: int) -> None:
        time.sleep(AFTER / 4)
        if step == 3:
            monkeypatch.setattr(time, "monotonic", jump(time.monotonic))
            monkeypatch.setattr(time, "time", jump(time.time))

    watched(tmp_path).train(inside)
    assert failures(tmp_path) == []


PROGRAM = """
import everstep, numpy, sys, threading
from everstep.services import HangWatch
run_dir, then, sleep = sys.argv[1], sys.argv[2], float(sys.argv[3])
data = everstep.data.arrays(numpy.arange(8.0), batch_size=2)
w = numpy.zeros(1)
services = [HangWatch(2.0, then), everstep.Checkpoints(everstep.Every(steps=1))]
def body():
    if loop.step == 3:
        print("step 3", flush=True)
        threading.Event().wait(sleep)
with everstep.TrainLoop(run_dir, {"w": w}, max_epoch=2, services=services) as loop:
    for epoch in loop.iter_epochs():
        for step, (batch,) in loop.iter_steps(data):
            body()
            w += batch.mean()
            loop.collect_metrics(loss=w.sum())
"""


def start(run_dir: Path, then: str, sleep: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(run_dir), then, str(sleep)]
    return warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.campaign("timed")
def test_a_run_that_hangs_can_be_ended_and_goes_on_exactly(tmp_path: Path) -> None:
    hung = start(tmp_path / "run", "stop", 600)
    _, said = hung.communicate(timeout=60)
    assert hung.returncode == 1, said
    assert "everstep: the loop has not moved for 2 s; the main thread is in" in said and "in body" in said
    (page,) = failures(tmp_path / "run")
    assert (page.kind, page.step) == ("hang", 2) and any(line.endswith("in body") for line in page.lines)
    (end,) = RunJournal(tmp_path / "run").events("closed", valid=False)
    assert (end.data["status"], end.data["reason"]) == ("failed", page.what)
    for name in ("run", "undisturbed"):
        start(tmp_path / name, "stop", 0).communicate(timeout=60)
    assert everstep.record.failures(tmp_path / "undisturbed") == []
    assert rows(tmp_path / "run") == rows(tmp_path / "undisturbed") != []


@pytest.mark.campaign("timed")
def test_a_process_that_is_stopped_does_not_hang(tmp_path: Path) -> None:
    """It is stopped for twice as long as a hang takes."""
    stopped = start(tmp_path, "stop", 0.1)
    assert stopped.stdout is not None
    while stopped.stdout.readline() != "step 3\n":
        pass
    os.kill(stopped.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(stopped.pid, signal.SIGCONT)
    _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == 0, said
    assert failures(tmp_path) == []


def test_a_hang_is_noticed_and_the_run_goes_on(tmp_path: Path) -> None:
    """Also where a machine is so slow that other steps are taken for hangs."""
    run_dir = tmp_path / "run"

    def noticed() -> list[Any]:
        return [page for page in failures(run_dir) if any("stuck_here" in line for line in page.lines)]

    def stuck_here(loop: Any, step: int) -> None:
        if step == 3:
            until(noticed)

    with nothing_left():
        tiny = Tiny(run_dir, max_epoch=1, services=[HangWatch(0.1)]).train(stuck_here)
    page, ending = noticed()[0], tiny.loop.ending
    assert (page.kind, page.step, page.cause) == ("hang", 2, None)
    assert page.what.startswith("the loop has not moved for 0.1 s; the main thread is in ")
    assert ending.finished and any(page.what in each for each in ending.warnings)
    assert page.what in [event.data["what"] for event in RunJournal(run_dir).events("hang")]


def test_every_run_has_a_watch_that_warns_after_half_an_hour(tmp_path: Path) -> None:
    def threads(**arguments: Any) -> set[str]:
        with everstep.TrainLoop(tmp_path / str(len(arguments)), max_epoch=1, **arguments) as loop:
            found = {thread.name for thread in threading.enumerate()}
            for _ in loop.iter_epochs():
                pass
        return found

    assert "everstep-hang-watch" in threads()
    assert "everstep-hang-watch" not in threads(default_services=False)
    assert (HangWatch().after, HangWatch().then) == (1800, "warn")


@pytest.mark.parametrize("wrong", [{"after": 0}, {"after": float("nan")}, {"after": "1h"}, {"then": "end"}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HangWatch(**wrong)


def test_two_watches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two HangWatch"):
        everstep.TrainLoop(tmp_path, services=[HangWatch(), HangWatch(5)])
