"""A step, a fetch, a tail or a save that does not move is noticed, with the stacks of all threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import everstep
import warm
from everstep.record import RunJournal, failures
from everstep.services import HangWatch
from everstep.services.recovery import HALF_AN_HOUR
from everstep.testing import nothing_left
from tiny_runs import Tiny, rows
from waiting import until


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
    for default, watches in ((True, True), (False, False)):
        with everstep.TrainLoop(tmp_path / str(default), max_epoch=1, default_services=default):
            names = [thread.name for thread in threading.enumerate()]
        assert ("everstep-hang-watch" in names) is watches
    assert (HangWatch().after, HangWatch().then, HALF_AN_HOUR) == (None, "warn", 1800)
