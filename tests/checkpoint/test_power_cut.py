"""A power cut at any call of a save: what was said to be saved is there, whole; else what was there before.

`power_cut_model` makes the states from strace's record.  A failure names the scenario, the call and the
number of the state: the campaign's seed makes the same states again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import SCENARIOS, seed_of, store_in
from crash_verdicts import require_sound
from scenario_strikes import LOG, Strikes

import gate
from power_cut_model import Cut, cuts, unannounced

pytestmark = pytest.mark.campaign("machine")

SEED = gate.seed
EACH = 128
"""States of each instant that are drawn from."""
Tally = Callable[..., None]

WHOLE = tuple(name for name in SCENARIOS if name != "replace_damaged")
"""Scenarios without a damaged checkpoint: there, each that has its name is whole."""


class Cuts:
    """The states that a power cut may leave of a scenario, up to `each` at every call."""

    def __init__(self, folder: Path, scenario: str, each: int) -> None:
        self._folder, self._scenario, self._each = folder, scenario, each
        self._strikes = Strikes(folder, scenario)
        self.calls = self._strikes.record()

    def require_sound(self, tally: Tally) -> None:
        """Look at all states, as far as they are different."""
        faults, count = list[str](), 0
        for cut in cuts(self._strikes.disk, self.calls, SEED, self._each, LOG):
            count += 1
            try:
                self._require_sound(cut)
            except Exception as error:
                call = self.calls[cut.at] if cut.at < len(self.calls) else "the end"
                faults.append(f"state {cut.number} before call {cut.at}, {call}: {error!r}")
        told = "\n\n".join(faults[:12])
        assert not faults, f"{self._scenario}, seed {SEED}: {len(faults)} of {count}:\n{told}"
        tally("power-cut states", count, scenario=self._scenario)

    def _require_sound(self, cut: Cut) -> None:
        after = self._folder / "after"
        shutil.rmtree(after, ignore_errors=True)
        cut.state.build(after, only="run")
        (after / LOG).write_bytes(cut.said)
        if self._scenario in WHOLE:
            for name in store_in(after / "run").names():
                assert seed_of(store_in(after / "run").read(name)) >= 0
        require_sound(self._scenario, after)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_call_is_announced(tmp_path: Path, scenario: str) -> None:
    """So hazards strike wherever a file changes."""
    found = Strikes(tmp_path, scenario).record(EVERSTEP_HAZARD=f"trace:{tmp_path}/all.hazards")
    calls = [call for call in found if call.path != LOG]
    assert len(calls) > 4 and unannounced(calls) == set()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_cut_at_every_call(tmp_path: Path, scenario: str, tally: Tally) -> None:
    Cuts(tmp_path, scenario, each=EACH).require_sound(tally)
