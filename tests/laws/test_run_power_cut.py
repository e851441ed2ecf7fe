"""Laws 1 and 4 after a power cut, or a kill, at any call of a training: the next start ends all the same.

`power_cut_model` makes the states from strace's record.  What is promised (docs/decisions):

- a checkpoint that was committed is there, whole, and so are the rows that belong to its state;
- other rows may be lost, and the steps behind them are executed again; no torn row is read as a value;
- the trail may be lost: a power cut costs the comparison, no step.

A failure names the kind, the call and the number of the state, which the campaign's seed makes again.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Container
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from law_support.forkserver import ForkServer
from law_support.program import Points

import gate
from everstep.checkpoint import CheckpointName, Store
from everstep.errors import EverstepError
from everstep.record import RunJournal
from power_cut_model import KILLED, Cut, Disk, cuts, unannounced
from strace_record import record

pytestmark = pytest.mark.campaign("machine")

SEED = gate.seed
EACH = 24
"""States of each instant that are drawn from."""

VICTIM = Path(__file__).parent / "law_support" / "victim.py"
PARTS = 8
"""Tests that share all of them, so that a campaign may end in between."""
Tally = Callable[..., None]
RowKey = tuple[int, int, str, str, int]


KINDS: dict[str, tuple[Any, ...]] = {
    "first start": (None,),
    "recovery": ("checkpoint.fsync:14",),
    "rollback": (None, "--bad", "33"),
}
"""The start that is cut: a first one, one after a kill inside a save, one that rolls back."""


class Cuts:
    """The states that a power cut may leave of one start of a run."""

    def __init__(self, server: ForkServer, folder: Path, kind: str, **environment: str) -> None:
        self._points, self._kind = Points(server, folder, *KINDS[kind]), kind
        self._program = self._points.fresh()
        self._disk = Disk(self._program.run_dir.parent)
        command = [str(VICTIM), *self._program.arguments()]
        self.calls = record(command, self._program.run_dir.parent, folder / "strace", **environment)
        self._program.require_equal(self._points.undisturbed, "recorded")
        self._rows = rows_of(self._points.undisturbed)

    def require_sound(self, some: Container[int], tally: Tally, part: slice = slice(None)) -> None:
        """Look at a part of those states among `some` that are different."""
        faults, count = list[str](), 0
        found = cuts(self._disk, self.calls, SEED, EACH, some)
        for cut in islice(found, part.start, part.stop, part.step):
            count += 1
            try:
                self._require_sound(cut)
            except (AssertionError, EverstepError) as error:
                call = self.calls[cut.at] if cut.at < len(self.calls) else "the end"
                faults.append(f"state {cut.number} before call {cut.at}, {call}: {error}")
        told = "\n\n".join(faults[:8])
        assert not faults, f"{self._kind}, seed {SEED}: {len(faults)} of {count}:\n{told}"
        tally("power-cut states", count, scenario=self._kind)

    def _require_sound(self, cut: Cut) -> None:
        program = self._points.fresh()
        shutil.rmtree(program.run_dir.parent)
        cut.state.build(program.run_dir.parent)
        if self._kind != "rollback":  # which takes back checkpoints and rows that were there before
            self._require_promised(cut, program.run_dir)
        program.finish()
        program.require_equal(self._points.undisturbed)

    def _require_promised(self, cut: Cut, run_dir: Path) -> None:
        committed = {name for name in cut.least.listed("run/checkpoints") if CheckpointName.matches(name)}
        if committed:
            name = max(map(CheckpointName.parse, committed))
            there = Store(run_dir).names()
            assert there and there[-1] >= name, f"{name} was committed, and there are {there}"
            for each in there:
                Store(run_dir).read(each)  # whole, every byte
        try:
            rows = rows_of(run_dir)
        except EverstepError:
            assert not committed
            return
        wrong = {key: values for key, values in rows.items() if values != self._rows.get(key)}
        assert not wrong, f"rows that were never measured: {list(wrong.items())[:5]}"


def rows_of(run_dir: Path) -> dict[RowKey, list[bytes]]:
    """The rows that do not depend on the clock, by their keys."""
    found: dict[RowKey, list[bytes]] = {}
    for row in RunJournal(run_dir).rows():
        if not row.wall:
            key = row.epoch, row.step, row.phase, row.name, row.seq
            found.setdefault(key, []).append(struct.pack(">dq", row.value, row.count))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_is_announced(server: ForkServer, tmp_path: Path, kind: str) -> None:
    """So hazards strike wherever a file changes."""
    calls = Cuts(server, tmp_path, kind, EVERSTEP_HAZARD=f"trace:{tmp_path}/all.hazards").calls
    assert len(calls) > 99 and unannounced(calls) == set()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut_at_every_call(server, tmp_path: Path, kind: str, part: int, tally: Tally) -> None:
    found = Cuts(server, tmp_path, kind)
    # what a kill leaves, and three states of each instant; over the instants each number has its turn
    instants = range(len(found.calls) + 1)
    some = {at * EACH + (7 * at + shift) % EACH for at in instants for shift in (0, 7, 15)}
    some |= {at * EACH + KILLED for at in instants}
    found.require_sound(some, tally, slice(part, None, PARTS))
