"""Hostile files: each input ends in a value or in an error of everstep's, and nothing of a file runs.

Every input is read in a process that may take half a gigabyte more than its imports, and that hears of each
unpickled class and of each other process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzz_targets import NAMES

import gate
from whole_run import make_whole

CHILD = Path(__file__).with_name("fuzz_child.py")
INPUTS, MANY, PARTS = 240, 2_000, 4
"""Inputs of a target in the sample, and in each part of the campaign: there over 100,000 in all."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole(tmp_path_factory.mktemp("fuzz") / "run")


def fuzz(whole: Path, folder: Path, name: str, first: int, count: int) -> int:
    """Hand a target's inputs to its readers, in a process of their own; returns their number."""
    run = shutil.copytree(whole, folder / "run")
    seed = str(gate.seed)
    asked = [sys.executable, str(CHILD), str(run), name, seed, str(first), str(count)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, f"{asked} died:\n{done.stdout}{done.stderr}"
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    repeat = f"to repeat one: python {CHILD} A_COPY_OF_A_RUN {name!r} {seed} NUMBER 1"
    assert not told["faults"], "\n".join([repeat, *told["faults"]])
    # else no input would get further than the door, or none would be refused
    assert 0 < told["values"] < told["done"] == count, told
    return count


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("part", range(1 + PARTS))
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_input_ends_in_a_value_or_an_error(
    whole: Path, tmp_path: Path, name: str, part: int, tally: Any
) -> None:
    """The first part is the sample of the gate."""
    many = MANY // NAMES[name]
    first, count = (INPUTS + (part - 1) * many, many) if part else (0, max(60, INPUTS // NAMES[name]))
    tally("fuzz inputs", fuzz(whole, tmp_path, name, first, count), file=name)
