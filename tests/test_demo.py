"""`make demo`: two twins, one of them killed; and `make play`, which is stopped by hand."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import warm

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


def write_small(tmp_path: Path, *kills: int, forgotten: int = 0) -> None:
    """A script that is small, waits after each of these steps for its kill, and may forget a number."""
    text = SMALL.replace("FORGOTTEN", str(forgotten)).replace("KILLS", str(kills))
    (tmp_path / "small.py").write_text(text)


def demo(tmp_path: Path, *arguments: str, forgotten: int = 0) -> subprocess.CompletedProcess[str]:
    """The demo without a terminal."""
    write_small(tmp_path, *(int(word) for word in arguments if word.isdigit()), forgotten=forgotten)
    small = () if "--script" in arguments else ("--script", str(tmp_path / "small.py"))
    command = [sys.executable, str(DEMO), "--folder", str(tmp_path), "--epochs", "3", *small, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_demo_kills_one_twin_twice_and_proves_both_equal(tmp_path: Path) -> None:
    assert_proven(demo(tmp_path, "--at", "40", "80"), tmp_path / "demo.svg")


@pytest.mark.campaign("long")
def test_the_demo_on_the_digits(tmp_path: Path) -> None:
    assert_proven(demo(tmp_path, "--at", "40", "80", "--script", str(PLAY)), tmp_path / "demo.svg")


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
    done = demo(tmp_path, "--at", "60", forgotten=1)
    assert done.returncode == 1
    assert "DIFFERENT: killed at" in done.stdout and "equal" not in done.stdout
    assert re.search(r"^first: loss \(loss\) step \d+: \S+ undisturbed, \S+ here$", done.stdout, re.M), (
        done.stdout
    )
    assert "at the end: leaf/user/weights" in done.stdout


@pytest.mark.campaign("long")
@pytest.mark.parametrize("at", ["60", "999"])
def test_on_a_terminal_the_demo_draws_in_place(tmp_path: Path, at: str) -> None:
    write_small(tmp_path, int(at))
    ours, its = pty.openpty()
    arguments = (
        "--folder",
        str(tmp_path),
        "--epochs",
        "3",
        "--at",
        at,
        "--script",
        str(tmp_path / "small.py"),
    )
    size = {"COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        [sys.executable, str(DEMO), *arguments], stdout=its, stderr=its, env={**os.environ, **size}
    ) as process:
        os.close(its)
        said = b""
        while part := read(ours):
            said += part
    os.close(ours)
    assert process.returncode == (at == "999")
    if at == "999":
        assert "ended before it was killed at [999]" in said.decode()
    else:
        assert b"\x1b[2K" in said and ", equal\r\n" in said.decode()


def read(descriptor: int) -> bytes:
    """The next bytes of a terminal; none when nobody has its other side open."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def start(run: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PLAY), "--run", str(run), "--epochs", "3", *arguments]
    return warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def stop(run: Path, epoch: int, number: signal.Signals, *arguments: str) -> tuple[int, str]:
    """Send a signal when `epoch` is over; exit status and output."""
    with start(run, *arguments) as play:
        assert play.stdout is not None
        output = ""
        while f"[Epoch {epoch}/" not in output:
            line = play.stdout.readline()
            assert line, output
            output += line
        play.send_signal(number)
        output += play.stdout.read()
    return play.returncode, output


def finish(run: Path, *arguments: str) -> str:
    with start(run, *arguments) as play:
        output, _ = play.communicate()
    assert play.returncode == 0, output
    return output


def digest(output: str) -> str:
    found = re.search(r"digest of the state: (\w{32})", output)
    assert found, output
    return found[1]


@pytest.mark.campaign("long")
def test_stopped_in_two_ways_it_ends_with_the_bits_of_the_run_that_was_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    status, output = stop(run, 1, signal.SIGINT)
    assert status == 130
    saved = re.search(r"saved \S+/(?:epoch-\d+-)?step-0*(\d+); start again to continue", output)
    assert saved, output

    status, output = stop(run, 2, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert f"step {saved[1]}, from" in output

    resumed = finish(run)
    assert "resuming epoch" in resumed

    finished = finish(run)
    assert "this run is finished" in finished
    for command in ("make play ", 'make play ARGS="--epochs 50"', "make play ARGS=--again"):
        assert command in finished

    undisturbed = finish(run, "--again")
    assert "this run starts over" in undisturbed
    assert digest(resumed) == digest(finished) == digest(undisturbed)
