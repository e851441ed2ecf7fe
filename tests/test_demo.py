"""The demo: stopped by Ctrl-C and by kill -9 it goes on, says so, and ends with the same bits."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parent.parent / "examples" / "digits.py"


def start(run: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(DEMO), "--run", str(run), "--epochs", "4", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def stop(run: Path, epoch: int, number: signal.Signals, *arguments: str) -> tuple[int, str]:
    """Send a signal when `epoch` is over; exit status and output."""
    with start(run, *arguments) as demo:
        assert demo.stdout is not None
        output = ""
        while f"[Epoch {epoch}/" not in output:
            line = demo.stdout.readline()
            assert line, output
            output += line
        demo.send_signal(number)
        output += demo.stdout.read()
    return demo.returncode, output


def finish(run: Path, *arguments: str) -> str:
    with start(run, *arguments) as demo:
        output, _ = demo.communicate()
    assert demo.returncode == 0, output
    return output


def digest(output: str) -> str:
    found = re.search(r"digest of the state: (\w{32})", output)
    assert found, output
    return found[1]


def test_stopped_in_two_ways_it_ends_with_the_bits_of_the_run_that_was_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    status, output = stop(run, 1, signal.SIGINT)
    assert status == 130
    saved = re.search(r"saved \S+/(?:epoch-\d+-)?step-0*(\d+); start again to go on", output)
    assert saved, output

    status, output = stop(run, 3, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert f"step {saved[1]}, from" in output

    resumed = finish(run)
    assert "resuming epoch" in resumed

    finished = finish(run)
    assert "this run is finished" in finished
    for command in ("make demo ", "make demo ARGS=", "make demo-again"):
        assert command in finished

    undisturbed = finish(run, "--again")
    assert "this run starts over" in undisturbed
    assert digest(resumed) == digest(finished) == digest(undisturbed)
