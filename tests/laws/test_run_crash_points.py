"""Laws 1 and 4, from outside: a training struck at each call that changes a file, as strace sees the calls.

strace itself kills or refuses.  The run is started again, and must be the run that was never struck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from law_support.forkserver import ForkServer
from law_support.struck_runs import KINDS, Runs

import gate
from strace_log import Call
from strace_order import Order, unannounced
from strace_record import ways_of

pytestmark = pytest.mark.campaign("machine")

Tally = Callable[..., None]
SHARDS, SOME = 4, 6
"""Tests that share some calls, and calls of such a test."""
PARTS = 8
"""Tests that share all of them, so that a campaign may end in between."""
REFUSALS = ("ENOSPC", "EIO", "EROFS")


def all_ways(calls: Iterable[Call]) -> list[tuple[Call, str]]:
    """Each call with the ways in which it is struck; of the writes into a file the first two and the last.

    The three errors take turns, call by call; in the scenarios of a save each call is refused with all three.
    """
    writes = Counter((call.thread, call.path) for call in calls if call.kind == "write")
    seen, ways = Counter[tuple[str, str]](), list[tuple[Call, str]]()
    for number, call in enumerate(calls):
        place = call.thread, call.path
        seen[place] += call.kind == "write"
        if call.kind == "write" and seen[place] not in (1, 2, writes[place]):
            continue
        left_out = {error for at, error in enumerate(REFUSALS) if at != number % 3}
        ways += [(call, way) for way in ways_of(call) if way not in left_out]
    return ways


def strike_all(runs: Runs, kind: str, chosen: Iterable[tuple[Call, str]], tally: Tally) -> None:
    """Strike, and count.

    Threads take turns as they like, so a start may be struck at another call than that of the record.
    """
    counts, faults, tried = Counter[tuple[str, str]](), list[str](), 0
    for call, way in chosen:
        tried += 1
        try:
            hit = runs.strike(call, way)
        except AssertionError as error:
            faults.append(str(error))
        else:
            if hit is not None:
                counts[hit.kind, way] += 1
    assert not faults, f"{len(faults)} of {tried}: " + "\n\n".join(faults[:8])
    assert counts.total() >= 0.8 * tried, f"{counts.total()} of {tried} starts were struck"
    for (what, way), n in counts.items():
        tally("crash points", n, what=what, how=way, scenario=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_announced_and_in_order(server: ForkServer, tmp_path: Path, kind: str) -> None:
    calls = Runs(server, tmp_path, kind).record(EVERSTEP_HAZARD=f"trace:{tmp_path}/all.hazards")
    assert unannounced(calls) == set()
    order = Order()
    order.follow(calls)
    ends = {name.rpartition("/")[2] for name in order.committed}
    assert ends >= {"checkpoint", "step-N", "epoch-N-step-N", "lock.json"}
    assert any("best" in name for name in order.committed)


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("kind", KINDS)
def test_struck_at_some_calls(
    server: ForkServer, tmp_path: Path, kind: str, shard: int, tally_sample: Tally
) -> None:
    runs = Runs(server, tmp_path, kind)
    ways = all_ways(runs.record())
    turn = gate.spread(SHARDS * SOME, len(ways))
    strike_all(runs, kind, (ways[number] for number in turn[shard::SHARDS]), tally_sample)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_struck_at_every_call(server: ForkServer, tmp_path: Path, kind: str, part: int, tally: Tally) -> None:
    runs = Runs(server, tmp_path, kind)
    strike_all(runs, kind, all_ways(runs.record())[part::PARTS], tally)
