"""`make demo`: two twins, one of them killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PLAY = ROOT / "examples" / "digits.py"
DEMO = ROOT / "tools" / "demo.py"
SMALL = """
import argparse, pathlib, signal
import numpy as np
import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--run")
parser.add_argument("--epochs", type=int)
options = parser.parse_args()
weights = {"w": np.zeros(3)}
last = None  # step of this start before it waits for its kill
outside = 0  # what the state lacks, if it is used
train = everstep.data.arrays(np.arange(180.0), batch_size=4, shuffle=True, seed=1)
with everstep.TrainLoop(options.run, {"weights": weights}, max_epoch=options.epochs, seed=1) as loop:
    for epoch in loop.iter_epochs():
        for step, (batch,) in loop.iter_steps(train):
            if step - 1 == last:
                signal.pause()  # until the demo kills it
            begun = pathlib.Path(options.run).with_name(f"begun-{step}")
            if step in KILLS and begun.parent.name == "killed" and not begun.exists():
                begun.touch()
                last = step
            outside += FORGOTTEN
            weights["w"] += batch.mean() + outside
            loop.collect_metrics(loss=weights["w"].sum())
        loop.collect_metrics(valid_accuracy=epoch / 10)
        loop.print_logs()
print(f"digest of the state: {loop.ending.digest}")
"""


def demo(
    tmp_path: Path, *at: str, script: Path | None = None, forgotten: int = 0
) -> subprocess.CompletedProcess[str]:
    """Kill at these steps, of a small script that waits there and may forget a number."""
    text = SMALL.replace("FORGOTTEN", str(forgotten)).replace("KILLS", str([*map(int, at)]))
    small = tmp_path / "small.py"
    small.write_text(text)
    command = [sys.executable, str(DEMO), "--folder", str(tmp_path), "--epochs", "3", "--at", *at]
    return subprocess.run(
        [*command, "--script", str(script or small)], capture_output=True, text=True, check=False
    )


def test_the_demo_kills_one_twin_twice_and_proves_both_equal(tmp_path: Path) -> None:
    assert_proven(demo(tmp_path, "40", "80"), tmp_path / "demo.svg")


@pytest.mark.campaign("long")
def test_the_demo_on_the_digits(tmp_path: Path) -> None:
    assert_proven(demo(tmp_path, "40", "80", script=PLAY), tmp_path / "demo.svg")


def assert_proven(done: subprocess.CompletedProcess[str], drawn: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    ends = re.search(
        r"^undisturbed (\w{16}) / killed at (\d+) and (\d+): (\w{16}), equal$", done.stdout, re.M
    )
    assert ends is not None and ends[1] == ends[4], done.stdout
    first, second = int(ends[2]), int(ends[3])
    assert 40 <= first < second >= 80, "a kill comes at its step or a few later"
    assert re.search(rf"^ {{42}}step {first:3} ✗ kill -9, again from step \d+$", done.stdout, re.M)
    assert re.search(rf"^ {{42}}step {second:3} ✗ kill -9, again from step \d+$", done.stdout, re.M)
    lines = done.stdout.splitlines()
    halves = [line.split("    ") for line in lines if line.startswith("step ")]
    assert len(halves) == 3 and all(left == right and "accuracy 0." in left for left, right in halves)
    assert lines[-1].endswith("everstep drill your_script.py")
    assert max(map(len, lines[2:-2])) <= 80 and "\x1b" not in done.stdout
    picture = ElementTree.parse(drawn)
    assert f"killed by kill -9 at steps {first} and {second}" in "".join(picture.getroot().itertext())


@pytest.mark.campaign("long")
def test_the_demo_says_loudly_that_the_twins_differ(tmp_path: Path) -> None:
    done = demo(tmp_path, "60", forgotten=1)
    assert done.returncode == 1
    assert "DIFFERENT: killed at" in done.stdout and "equal" not in done.stdout
    assert re.search(r"^first: loss \(loss\) step \d+: \S+ undisturbed, \S+ here$", done.stdout, re.M), (
        done.stdout
    )
    assert "at the end: leaf/user/weights" in done.stdout
