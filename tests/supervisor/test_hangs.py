"""A step, a fetch, a tail or a save that does not move is noticed, with the stacks of all threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import everstep
from everstep.record import RunJournal, failures
from everstep.services import HangWatch
from everstep.services.recovery import HALF_AN_HOUR
from everstep.testing import nothing_left
from tiny_runs import Tiny
from waiting import until


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
