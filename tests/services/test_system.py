"""`System`: the load of the machine beside the training, at no cost for a step."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everstep import Every
from everstep.record import RunJournal
from everstep.services import System
from everstep.testing import nothing_left
from tiny_runs import Tiny, rows

LINUX = {"cpu_share", "memory_share", "process_memory_gb", "disk_read_mb_per_s", "disk_written_mb_per_s"}
ANYWHERE = {"process_cpus", "disk_share", "disk_free_gb"}


def recorded(run_dir: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in RunJournal(run_dir).rows():
        if row.phase == "eval/system":
            assert row.wall
            found.setdefault(row.name, []).append(row.value)
    return found


def work(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.mark.campaign("timed")
def test_what_it_records_is_so(tmp_path: Path) -> None:
    """One step computes, one sleeps, one takes memory and writes to the disk."""
    held: list[Any] = []

    def inside(loop: Any, step: int) -> None:
        if step == 1:
            work(0.5)
        if step == 2:
            time.sleep(0.5)
        if step == 3:
            held.append(bytearray(os.urandom(1)) * 300_000_000)
            (tmp_path / "large").write_bytes(bytes(20_000_000))
        if step == 4:
            time.sleep(0.1)  # the kernel counts in ticks of 10 ms: in a shorter time none may pass

    Tiny(tmp_path / "run", max_epoch=1, services=[System(every=Every(steps=1))]).train(inside)
    found = recorded(tmp_path / "run")
    names = {name for name in found if not name.startswith("gpu")}
    assert ANYWHERE <= names <= ANYWHERE | LINUX
    assert {len(values) for values in found.values()} == {4}
    busy = found["process_cpus"]
    assert busy[0] > 0.05 and busy[1] < busy[0] / 2
    usage = shutil.disk_usage(tmp_path)
    assert found["disk_free_gb"][-1] == pytest.approx(usage.free / 1e9, abs=2)
    for name, values in found.items():
        assert all(value >= 0 for value in values)
        assert not name.endswith("_share") or max(values) <= 1
    if sys.platform == "linux":
        assert names >= LINUX
        memory = found["process_memory_gb"]
        assert memory[2] - memory[1] > 0.25
        assert found["cpu_share"][0] > 0


def test_it_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    with nothing_left():
        Tiny(tmp_path / "watched", max_epoch=2, services=[System(every=Every(steps=1))]).train()
    Tiny(tmp_path / "alone", max_epoch=2).train()
    assert rows(tmp_path / "watched") == rows(tmp_path / "alone") != []


def test_a_figure_that_cannot_be_had_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise PermissionError(path)

    monkeypatch.setattr("everstep.services.measure._text", refuse)
    Tiny(tmp_path, max_epoch=1, services=[System(every=Every(steps=1))]).train()
    assert {name for name in recorded(tmp_path) if not name.startswith("gpu")} == ANYWHERE
