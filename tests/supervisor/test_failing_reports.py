"""A service that reports may fail: training goes on, and the warnings stay few."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep import Boundary, Every, Outcome, Service, Stop
from everstep.errors import UsageError
from everstep.services import Moment, Stage
from tiny_runs import Tiny


class Fails(Service):
    stage = Stage.REPORT

    def __init__(self) -> None:
        super().__init__("fails", Every(steps=1))

    def run(self, boundary: Boundary) -> None:
        raise OSError("no route to host")


def test_a_report_that_fails_at_each_step_is_named_now_and_then(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, max_epoch=26, services=[Fails()]).train()
    assert tiny.loop.ending.finished and tiny.loop.step == 104
    assert tiny.loop.ending.warnings == (
        *["service 'fails' failed and is skipped: OSError: no route to host"] * 10,
        "service 'fails' failed 100 times and is skipped: OSError: no route to host",
    )


class StopsLate(Service):
    moments = frozenset({Moment.AFTER_CHECKPOINT})

    def run(self, boundary: Boundary) -> Outcome:
        return Outcome(actions=(Stop("saved"),))


def test_a_stop_at_a_moment_for_observers_is_answered_by_advice_that_helps(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"AFTER_CHECKPOINT is for observers.* such as AFTER_STEP"):
        Tiny(tmp_path, max_epoch=1, services=[StopsLate()]).train()
