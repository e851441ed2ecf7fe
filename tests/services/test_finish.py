"""`finish` is called once, whatever the service's stage and moments, and only at a clean end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.contracts.services import Boundary, Moment, Stage
from everstep.schedule import Every
from tiny_runs import Boom, Tiny, boom_at


class Finishing(everstep.Service):
    def __init__(self, stage: Stage, moments: frozenset[Moment], said: list[tuple[str, int]]) -> None:
        super().__init__(f"finishing {stage.name}", Every(steps=1))
        self.stage, self.moments, self.said = stage, moments, said

    def run(self, boundary: Boundary) -> None:
        pass

    def finish(self, boundary: Boundary) -> None:
        self.said.append((self.stage.name, boundary.step))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    "moments", [frozenset({Moment.AFTER_STEP}), frozenset({Moment.ENTER_LOOP}), frozenset()]
)
def test_a_service_of_each_stage_finishes_once(tmp_path: Path, moments: Any) -> None:
    said: list[tuple[str, int]] = []
    stages = [stage for stage in Stage if stage is not Stage.SAVE]
    Tiny(
        tmp_path, max_epoch=2, services=[Finishing(stage, moments, said) for stage in reversed(stages)]
    ).train()
    assert said == [(stage.name, 8) for stage in stages]


def test_no_service_finishes_a_run_that_has_failed(tmp_path: Path) -> None:
    said: list[tuple[str, int]] = []
    moments = frozenset({Moment.AFTER_STEP})
    with pytest.raises(Boom):
        Tiny(tmp_path, max_epoch=2, services=[Finishing(Stage.REPORT, moments, said)]).train(
            inside=boom_at(5)
        )
    assert said == []
