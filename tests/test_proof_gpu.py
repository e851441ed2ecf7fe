"""`make proof-gpu`, tried on the CPU as far as it goes: kills, comparisons, the table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.mark.campaign("long")
def test_on_a_cpu_it_kills_compares_and_writes_a_table(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    size = ("--minutes", "0.01", "--steps", "60", "--repeats", "1", "--width", "8", "--seed", "1")
    command = [sys.executable, str(BENCH / "proof_gpu.py"), "--device", "cpu", "--out", str(out), *size]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = out.read_text()
    assert re.match(r"# Proof on .+, \d{4}-\d\d-\d\d\n", table)
    assert "| 6 | any | 39 steps" in table and "all metrics equal" in table
    assert "| 1 | deterministic | 2 kills; every leaf and row equal in 1 of 1 runs |" in table
    assert "| 1 | other | 2 kills; batches, noise and random state equal in 1 of 1 runs |" in table
    assert table.count("| overhead |") == 2
