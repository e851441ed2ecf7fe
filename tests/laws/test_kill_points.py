"""Laws 1 and 4, exhaustively: killed, or refused by the disk, at every I/O operation of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from law_support.forkserver import ForkServer
from law_support.program import Points

import gate

SHARDS = 12
"""Tests that share the points, for pytest-xdist; the gate has the first, and of each point three times."""

STARTS = {
    "first start": (None,),
    "resumed start": ("checkpoint.fsync:14",),
    "first start, live arrays": (None, "--live"),
    "resumed start, live arrays": ("checkpoint.fsync:14", "--live"),
}
"""Which start is struck; the resumed one goes on from a start that was killed inside a commit."""


@pytest.fixture(params=STARTS)
def points(request: pytest.FixtureRequest, server: ForkServer, tmp_path: Path) -> Points:
    return Points(server, tmp_path, *STARTS[request.param])


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_killed_at_every_point(points: Points, shard: int, tally: Any) -> None:
    struck = 0
    strikes = points.strikes(every_time=gate.is_campaign)[shard::SHARDS]
    for strike in strikes:
        program = points.fresh()
        # The threads' race may reach a point less often than when it was traced.
        struck += program.run(hazard=f"kill:{strike}") == -9
        program.finish()
        program.require_equal(points.undisturbed, strike)
    assert struck >= sum(strike.endswith(":1") for strike in strikes) > 0
    tally("crash points", struck, how="SIGKILL", door="TrainLoop", by="points of everstep.hazard")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_refused_by_the_disk_at_every_point(points: Points, shard: int) -> None:
    """Training goes on, or it ends with an error that says what to do; nothing is lost either way."""
    operations = [strike for strike in points.strikes() if not strike.startswith("loop.")]  # no I/O there
    for number, strike in enumerate(operations[shard::SHARDS]):
        program = points.fresh()
        if program.run(hazard=f"{('ENOSPC', 'EIO')[number % 2]}:{strike}"):
            said = program.said()
            refused = len(program.bodies()) <= 1 and ("RunDirError" in said or "the trial save" in said)
            assert refused or "start again" in said.splitlines()[-1], f"{strike}\n{said}"
            program.finish()
        elif "rmtree" in strike:
            program.finish()  # what was not deleted, or may not be yet, goes at the next start
        program.require_equal(points.undisturbed, strike)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    "operation", [*(f"checkpoint.{of}" for of in ("write", "open", "rename")), "journal.write"]
)
def test_a_disk_that_is_full_for_a_while(server: ForkServer, tmp_path: Path, operation: str) -> None:
    points = Points(server, tmp_path, None)
    first = round(0.4 * points.course().count(operation))
    outage = f"ENOSPC:{operation}:{first}-{first + 2}"  # a refused operation ends its save: three saves fail
    program = points.fresh()
    program.finish(hazard=outage)
    assert "No space left" in program.said()
    program.require_equal(points.undisturbed, outage)
