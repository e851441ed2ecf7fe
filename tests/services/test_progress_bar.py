"""`ProgressBar` on a real terminal (a pseudo-terminal), and silent anywhere else."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ, tcgetattr

import pytest
from screens import screen

import warm

PROGRAM = """
import os, signal, sys
import everstep
from everstep.services import ProgressBar
what = sys.argv[2]
services = [ProgressBar(everstep.Every(steps=1)), everstep.Best("valid_loss")]
with everstep.TrainLoop(sys.argv[1], {}, max_epoch=3, services=services, seed=1) as loop:
    for epoch in loop.iter_epochs():
        for step, _ in loop.iter_steps(range(4)):
            loop.collect_metrics({"loss": 1 / step, "[x/]": step})
            if step == 6 and what == "error":
                raise RuntimeError("as planned")
            if step == 6 and what in ("SIGINT", "SIGTERM"):
                os.kill(os.getpid(), signal.Signals[what])
        loop.collect_metrics(valid_loss=1 / epoch)
        loop.print_logs()
print("the last line")
"""


def on_a_terminal(run_dir: Path, what: str = "", program: str = PROGRAM) -> tuple[int, str]:
    """Exit status and output of the program in a terminal of 60 columns."""
    master, slave = pty.openpty()
    ioctl(slave, TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    before = tcgetattr(slave)
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "SLURM_JOB_ID")}
    command = [sys.executable, "-c", program, str(run_dir), what]
    with warm.Popen(
        command, env={**environment, "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave
    ) as process:
        output, ended = b"", False
        while not ended:  # what it wrote before it ended is there to be read then
            ended = process.poll() is not None
            while select.select([master], [], [], 0.05)[0]:
                output += os.read(master, 65536)
    assert tcgetattr(slave) == before
    os.close(slave)
    os.close(master)
    return process.returncode, output.decode()


def test_it_draws_below_the_lines_that_are_printed(tmp_path: Path) -> None:
    status, output = on_a_terminal(tmp_path)
    assert status == 0
    before = output.index("\r\x1b[J[Epoch 2/3")  # where the second line is about to be printed
    drawn = screen(output[:before])
    (at,) = [row for row, line in enumerate(drawn) if line.startswith("Epoch 2/3  Step 8 ")]
    assert re.fullmatch(r"━+╸?─+  66%", drawn[at + 1]) and len(drawn[at + 1]) == 59
    first, *others = [line.split() for line in drawn[at + 2 : at + 5]]
    assert first == ["loss", "0.125"] and ["[x/]", "8"] in others
    assert re.search(r"\n  valid loss +1  best 1$", "\n".join(line.rstrip() for line in drawn), re.MULTILINE)
    seen = screen(output)
    assert seen[-2:] == ["the last line", ""]
    assert not any("━" in line or line.startswith("Epoch ") for line in seen)
    printed = [line for line in seen if line.startswith("[Epoch ")]
    assert [line.partition("] loss: ")[1] for line in printed] == ["] loss: "] * 3
    assert max(map(len, printed)) <= 60
    assert (tmp_path / "logs" / "run.log").read_text().count("; valid loss: ") == 3


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("what", "status", "last"),
    [
        ("error", 1, "RuntimeError: as planned"),
        ("SIGINT", 128 + signal.SIGINT, "start again to continue"),
        ("SIGTERM", 128 + signal.SIGTERM, "start again to continue"),
    ],
)
def test_it_leaves_the_terminal_in_order(tmp_path: Path, what: str, status: int, last: str) -> None:
    found, output = on_a_terminal(tmp_path, what)
    seen = screen(output)
    assert found == status
    assert seen[-1] == "" and any(last in line for line in seen[-6:])
    assert not any("━" in line for line in seen)
    # what a signal handler says begins a line of its own, below the one that stood there
    assert sum(line.startswith("Epoch ") for line in seen) == (what != "error")
    assert set(re.findall(r"\x1b\[[?0-9;]*([A-Za-z])", output)) <= set("mAJK")  # no mode, no hidden cursor


def test_it_is_silent_elsewhere_but_for_what_is_printed(tmp_path: Path) -> None:
    done = warm.run([sys.executable, "-c", PROGRAM, str(tmp_path), ""], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "the last line" and sum("valid loss:" in line for line in lines) == 3
    assert "\x1b" not in done.stdout and not any(line.startswith("Epoch") for line in lines)


@pytest.mark.campaign("long")
def test_beside_a_console_one_of_the_two_draws(tmp_path: Path) -> None:
    program = PROGRAM.replace("services = [", "services = [everstep.Console(), ")
    _, output = on_a_terminal(tmp_path, program=program)
    assert not re.search(r"\x1b\[\d+A", output) and "━" in output
    assert screen(output)[-2:] == ["the last line", ""]
