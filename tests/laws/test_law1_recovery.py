"""Law 1 for a run that rolls back: struck at every instant around the decision, it ends the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from law_support.forkserver import ForkServer
from law_support.program import Points, Program

import gate
from everstep.record import RunJournal

BAD = ("--bad", "7")


def around_the_rollback(course: list[str]) -> list[str]:
    """POINT:COUNT of what is reached from just before the first decision until the run trains again."""
    begin = course.index("loop.rollback") - 2
    end = course.index("journal.create", begin) + 3
    return [f"{course[at]}:{course[: at + 1].count(course[at])}" for at in range(begin, end)]


def go_on(points: Points, program: Program, where: str) -> None:
    while program.run() == 3:
        pass
    program.require_equal(points.undisturbed, where)


ACTIONS = ("kill", "SIGTERM", "ENOSPC")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("action", ACTIONS)
def test_struck_at_every_fifth_point_around_a_rollback(server, tmp_path: Path, action: str, tally) -> None:
    """In the campaign at each."""
    points = Points(server, tmp_path, None, *BAD)
    undone = RunJournal(points.undisturbed).rollbacks()
    assert len(undone) == 2
    strikes = around_the_rollback(points.course())
    assert 9 < len(strikes) < 99
    struck = 0
    for strike in strikes if gate.is_campaign else strikes[len(action) % 5 :: 5]:
        program = points.fresh()
        status = program.run(hazard=f"{action}:{strike}")
        assert status in {"kill": (-9, 0), "SIGTERM": (143, -15, 0), "ENOSPC": (0, 1)}[action], program.said()
        struck += status != 0
        go_on(points, program, f"{action}:{strike}")
        again = RunJournal(program.run_dir).rollbacks()
        assert [one.batches for one in again] == [one.batches for one in undone]
    kind = {"kill": "crash points", "SIGTERM": "signals", "ENOSPC": "refused operations"}[action]
    tally(kind, struck, door="TrainLoop", by="points of everstep.hazard", how="around a rollback")


@pytest.mark.campaign("long")
@pytest.mark.parametrize("door", ["loop", "supervisor", "trainer"])
def test_at_every_door_over_every_kind_of_data(server: ForkServer, tmp_path: Path, door: str) -> None:
    kinds = {"loop": ("arrays", "plain"), "supervisor": ("own", "loader"), "trainer": ("prefetch", "plain")}
    for kind in kinds[door]:
        folder = tmp_path / kind
        folder.mkdir()
        points = Points(server, folder, None, *BAD, "--door", door, "--data", kind)
        assert len(RunJournal(points.undisturbed).rollbacks()) == 2
        program = points.fresh()
        assert program.run(hazard="kill:loop.rolled_back:2") == -9
        go_on(points, program, kind)
