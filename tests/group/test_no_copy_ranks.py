"""`Checkpoints(copy=False)` on several ranks: what is kept on disk is kept on all ranks, or on none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import rank_loops
from processes import outputs

pytestmark = pytest.mark.campaign("long")

REFUSED = f"""{rank_loops.HEAD}
class Memory:
    def state_dict(self):
        # of this step a copy is kept, for an interruption in the tail; no save is asked for
        if rank == refusing and keep and keep[0].step == 7:
            raise everstep.errors.NotResumableError("not here")
        return {{"here": 1}}
    def load_state_dict(self, state):
        pass
for refusing in (1, 0):
    keep, own = [], {{"memory": everstep.PerRank(Memory())}}
    saves = everstep.Checkpoints(everstep.Every(epochs=1), copy=False)
    loop = trained(f"refused-{{refusing}}", keep=keep, services=[saves], own=own)
    say(refusing, loop.ending.finished, loop.ending.failed_saves, loop.ending.warnings)
"""


def test_a_state_that_one_rank_cannot_keep_is_kept_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "FOLDER", str(tmp_path))
    for rank, said in enumerate(outputs(REFUSED, 2)):
        told = [line for line in said.splitlines() if "True" in line]
        assert told == [f"{rank}: {refusing} True 0 ()" for refusing in (1, 0)]


PROGRAM = f"""{rank_loops.HEAD}
def run(name, spec=None):
    everstep.hazard.arm(spec)
    saves = everstep.Checkpoints(everstep.Every(steps=3), copy=False)
    loop = trained(name, services=[saves])
    everstep.hazard.arm(None)
    return loop.ending
expected = run("straight").digest
for refusing in (1, 0):
    found = run(f"refused-{{refusing}}", "ENOSPC:checkpoint.spill:1-99" if rank == refusing else None)
    say(refusing, found.digest == expected, found.failed_saves, found.warnings[0])
"""


def test_a_disk_that_refuses_what_one_rank_keeps_costs_a_warning_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "FOLDER", str(tmp_path))
    first, second = [
        [line.partition(": ")[2] for line in said.splitlines() if ": a save failed" in line or "True" in line]
        for said in outputs(PROGRAM, 2)
    ]
    assert len(second) == 2 and all(line in first for line in second), (first, second)
    for refusing, line in zip((1, 0), second, strict=True):
        assert line.startswith(f"{refusing} True ") and f"rank {refusing}: No space left" in line
