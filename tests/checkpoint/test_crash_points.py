"""Struck at each call that changes a file, as strace sees the calls: nothing is lost, nothing is half done.

The calls come from strace's record of a save, of best weights, of retention and of each other scenario, and
strace itself kills or refuses: no word of `everstep.hazard` is trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from checkpoint_samples import SCENARIOS
from scenario_strikes import LOG, Strikes

import gate
from strace_log import Call
from strace_order import Order, unannounced
from strace_record import ways_of

pytestmark = pytest.mark.campaign("machine")

Tally = Callable[..., None]


def all_ways(strikes: Strikes) -> list[tuple[Call, str]]:
    return [(call, way) for call in strikes.record() if call.path != LOG for way in ways_of(call)]


def strike_all(strikes: Strikes, chosen: Iterable[tuple[Call, str]], tally: Tally) -> None:
    counts, faults = Counter[tuple[str, str]](), list[str]()
    for call, way in chosen:
        try:
            strikes.strike(call, way)
        except AssertionError as error:
            faults.append(str(error))
        counts[call.kind, way] += 1
    assert not faults, f"{len(faults)} of {counts.total()}: " + "\n\n".join(faults[:12])
    for (kind, way), n in counts.items():
        tally("crash points", n, what=kind, how=way, scenario=strikes.scenario)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_data_then_the_name_then_its_folder(tmp_path: Path, scenario: str) -> None:
    """Each call has its hazard, and their order is one that no power cut spoils."""
    found = Strikes(tmp_path, scenario).record(EVERSTEP_HAZARD=f"trace:{tmp_path}/all.hazards")
    calls = [call for call in found if call.path != LOG]
    assert len(calls) > 4
    assert unannounced(calls) == set()
    order = Order()
    order.follow(calls)
    assert order.committed


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_struck_at_some_calls(tmp_path: Path, scenario: str, tally_sample: Tally) -> None:
    strikes = Strikes(tmp_path, scenario)
    ways = all_ways(strikes)
    strike_all(strikes, (ways[number] for number in gate.spread(12, len(ways))), tally_sample)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_struck_at_every_call(tmp_path: Path, scenario: str, tally: Tally) -> None:
    strikes = Strikes(tmp_path, scenario)
    strike_all(strikes, all_ways(strikes), tally)
