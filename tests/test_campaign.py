"""`make campaign` runs what the gate does not, counts what was survived, and names what failed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
TOOL = TESTS.parent / "tools" / "campaign.py"

SAMPLE = """
import random
import gate
import pytest
from hypothesis import given, strategies

@pytest.mark.campaign("random")
def test_kills(tally):
    tally("kills", 3, phase="body")

@pytest.mark.campaign("timed", gate=1)
@pytest.mark.parametrize("number", range(4))
def test_that_fails_in_one_case(number):
    assert number != 2, f"two, with seed {gate.seed}"

@given(strategies.integers())
def test_of_hypothesis(number):
    pass

def test_of_the_gate():
    assert not gate.is_campaign
"""


def test_a_campaign_counts_reports_and_adds_a_line(tmp_path: Path) -> None:
    for name in ("conftest.py", "gate.py", "waiting.py"):
        shutil.copy(TESTS / name, tmp_path)
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    page = tmp_path / "campaigns.md"
    page.write_text("| the line before |\n")
    here = ["-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", str(tmp_path)]
    command = [sys.executable, str(TOOL), "--seed", "7", "--page", str(page), *here]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    test = "test_sample.py::test_that_fails_in_one_case[2]"
    assert f"FAILED {test}" in done.stdout and f'SEED=7 ONLY="{test}"' in done.stdout
    before, line = page.read_text().splitlines()
    assert before == "| the line before |"
    counted = r"5 passed, 1 failed; survived, and exact: 3 kills"
    assert re.fullmatch(rf"\| [\d-]{{10}} \| \S+ \| 7 \| \d+ \| {counted} \|", line), line
