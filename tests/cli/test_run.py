"""`everstep run`: a command is started again while that helps, and never while it does not."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import everstep, values

import warm
from everstep.record import RunJournal, is_held
from waiting import until

PROGRAM = """
import os, pathlib, signal, subprocess, sys, threading, time
import numpy, everstep

start = len(list(pathlib.Path("run/journal").glob("*.evj"))) + 1
def breathe():
    threading.Event().wait(5e-2)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
numbers, limits, services, size = numpy.arange(16.0), {"max_epoch": 2}, [], 1
BEFORE
data = everstep.data.arrays(numbers, batch_size=2)
w = numpy.zeros(size)
services += [everstep.Checkpoints(everstep.Every(steps=2))]
with everstep.TrainLoop("run", {"w": w}, seed=1, services=services, **limits) as loop:
    for epoch in loop.iter_epochs():
        for step, (batch,) in loop.iter_steps(data):
            INSIDE
            w += batch.mean()
            loop.collect_metrics(loss=float(w.sum()))
AFTER
"""

Write = Callable[..., list[str]]
REQUIRE = "everstep.services.Require('loss', -1.0, step=3)"
ENDLESS = "limits['max_epoch'] = 10**6"


@pytest.fixture
def program(tmp_path: Path) -> Write:
    """Writes the program, with lines of a test's own, and returns the command that runs it."""

    def write(inside: str = "pass", before: str = "", after: str = "") -> list[str]:
        text = PROGRAM.replace("INSIDE", inside).replace("BEFORE", before).replace("AFTER", after)
        (tmp_path / "train.py").write_text(text)
        return [sys.executable, "train.py"]

    return write


def run(here: Path, *command: str, status: int = 0, options: tuple[str, ...] = ("--back-off", "0")) -> str:
    """What `everstep run` says besides what the command says."""
    line = [sys.executable, "-m", "everstep", "run", *options, "--", *command]
    done = warm.run(line, cwd=here, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    lines = done.stderr.splitlines()
    return "\n".join(line for line in lines if line.startswith(("everstep run:", "  start")))


def begin(here: Path, command: list[str], *options: str) -> Any:
    line = [sys.executable, "-m", "everstep", "run", *options, "--", *command]
    return warm.Popen(line, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def starts(here: Path) -> int:
    return len(list((here / "run" / "journal").glob("*.evj")))


@pytest.mark.campaign("long")
def test_three_deaths_at_one_step_are_enough(tmp_path: Path, program: Write) -> None:
    said = run(tmp_path, *program("step == 6 and die()"), status=137, options=("--back-off", "0.1"))
    dead = [f"start {number}: killed by SIGKILL after step 5 of run" for number in (1, 2, 3)]
    again = [f"{dead[0]}; start 2 in 0.1 s", f"{dead[1]}; start 3 in 0.2 s"]
    told = [*again, "not started again: 3 starts in a row got no further:"]
    assert said.splitlines() == [*(f"everstep run: {line}" for line in told), *(f"  {line}" for line in dead)]
    assert starts(tmp_path) == 3


@pytest.mark.campaign("long")
def test_killed_now_and_then_it_ends_as_if_it_never_was(tmp_path: Path, program: Write) -> None:
    """Progress resets the wait, and the count: more deaths than --max-deaths."""
    command = program("step == 3 * start and start < 5 and die()")
    said = run(tmp_path, *command, options=("--max-deaths", "2", "--back-off", "0.1"))
    ends = [f"start {n}: killed by SIGKILL after step {3 * n - 1} of run" for n in range(1, 5)]
    assert [line.split("; ")[0] for line in said.splitlines()[:-1]] == [f"everstep run: {e}" for e in ends]
    assert re.findall(r"in ([\d.]+) s", said) == ["0.1"] * 4
    assert said.splitlines()[-1] == "everstep run: start 5: finished after step 16 of run"
    disturbed = values(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "killed")
    run(tmp_path, *program())
    assert values(tmp_path / "run") == disturbed != []


def test_a_start_that_leaves_out_a_finished_run_got_further_in_another(tmp_path: Path) -> None:
    """As a sweep, or a loop over folds, does: run a alone has more steps than run b when b dies."""
    (tmp_path / "folds.py").write_text("""
import os, signal, numpy, everstep
from everstep.record import RunJournal
for name in "ab":
    if os.path.exists(name) and RunJournal(name).ended():
        continue
    w, begun = numpy.zeros(1), None
    services = [everstep.Checkpoints(everstep.Every(steps=1))]
    with everstep.TrainLoop(name, {"w": w}, max_epoch=1, seed=1, services=services) as loop:
        for epoch in loop.iter_epochs():
            for step, (batch,) in loop.iter_steps(everstep.data.arrays(numpy.arange(16.0), batch_size=2)):
                w += batch.mean()
                begun = begun or step
                name == "b" and step == begun + 2 < 8 and os.kill(os.getpid(), signal.SIGKILL)
""")
    said = run(tmp_path, sys.executable, "folds.py", options=("--back-off", "0", "--max-deaths", "2"))
    assert said.splitlines()[-1].endswith("finished after step 8 of b")
    assert len(said.splitlines()) > 3


@pytest.mark.campaign("timed")
def test_a_time_budget_is_used_again_and_again_at_once(tmp_path: Path, program: Write) -> None:
    command = program("breathe()", "limits['max_time'] = 0.3")
    said = run(tmp_path, *command, options=("--max-deaths", "1"))
    assert re.match(r"everstep run: start 1: out of time after step \d+ of run; start 2 in 0 s\n", said)
    assert re.search(r"start \d+: finished after step 16 of run$", said) and starts(tmp_path) > 2


USELESS = [
    (0, "", 1, ["pass"]),
    (2, "exit status 2 before it opened a run; wrong usage", 0, ["pass", "sys.exit(2)"]),
    (1, "before it opened a run: ConfigError: max_epoch=-1", 0, ["pass", "limits['max_epoch'] = -1"]),
    (1, "after step 3 of run: RestoreError: ", 1, ["w.size == 2 or step == 4 and die()", "size = start"]),
    (1, "of run: DivergenceError: resume differs: step", 2, ["step == 4 and die()", "numbers += start"]),
    (4, "; a further start would meet that, too; it is not", 1, ["pass", f"services = [{REQUIRE}]"]),
]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("status", "told", "begun", "lines"), USELESS)
def test_no_further_start_where_it_would_not_help(tmp_path, program, status, told, begun, lines) -> None:
    said = run(tmp_path, *program(*lines), status=status)
    assert (told in said.splitlines()[-1]) if told else not said, said
    assert starts(tmp_path) == begun


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    said = everstep("run", "--", "./nowhere", cwd=tmp_path, status=127)[1]
    assert said == "everstep run: ./nowhere cannot be started: No such file or directory; check its name\n"
    everstep("run", "--", cwd=tmp_path, status=2)


@pytest.mark.campaign("long")
def test_people_are_told_of_a_process_that_was_killed(tmp_path: Path, program: Write) -> None:
    """It could not tell that itself; what it can tell, `everstep run` does not repeat."""
    before = 'services = [everstep.services.Notify(command=["sh", "-c", "cat >> told"])]'
    command = program("step == 6 and die()", before)
    said = run(tmp_path, *command, status=137, options=("--max-deaths", "2", "--back-off", "0"))
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert {(each["event"], each["step"]) for each in told} == {("failed", 5)}
    reasons = ["killed by SIGKILL"] * 2 + ["not started again: 2 starts in a row got no further"]
    assert [each["reason"] for each in told] == reasons
    assert told[0]["run_dir"] == str(tmp_path / "run") and "told" not in said
    run(tmp_path, *program("pass", before))
    assert (tmp_path / "told").read_text().count("\n") == 4


# -------------------------------------------------------------------------------- signals
@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("shell", ["", "trap : INT TERM USR1; ", "true; "])
def test_a_signal_makes_the_command_save(tmp_path: Path, program: Write, number: int, shell: str) -> None:
    """Also where a shell stands between, which may end at once: the save is waited for."""
    command = program("open('now', 'w').close(); breathe()", ENDLESS)
    if shell:  # which does not pass signals on
        command = ["sh", "-c", f"{shell}{' '.join(command)}; exit $?"]
    process = begin(tmp_path, command)
    until((tmp_path / "now").exists)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number, said
    (end,) = RunJournal(tmp_path / "run").events("interrupted")
    assert end.data["status"] == 128 + number and not is_held(tmp_path / "run")
    assert starts(tmp_path) == 1 and "everstep run:" not in said


@pytest.mark.campaign("long")
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process that its parent died")
def test_killed_itself_it_leaves_no_training_behind(tmp_path: Path, program: Write) -> None:
    """And while the training lives, a second `everstep run` starts no twin."""
    command = program("open('now', 'w').close(); breathe()", ENDLESS)
    process = begin(tmp_path, command)
    until((tmp_path / "now").exists)
    said = run(tmp_path, *command, status=1, options=("--max-deaths", "1"))
    assert re.search(r"RunLockedError: .*run is in use by process \d+", said)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: not is_held(tmp_path / "run"))
    (end,) = RunJournal(tmp_path / "run").events("interrupted")
    assert end.data["status"] == 143


@pytest.mark.campaign("timed")
def test_the_status_that_torchrun_hides_is_found(tmp_path: Path, program: Write) -> None:
    """Under torchrun an interrupted run ends with 0."""
    command = program("breathe()", "os.environ['TORCHELASTIC_RUN_ID'] = 'here'; limits['max_time'] = 0.3")
    said = run(tmp_path, *command)
    assert said.count("out of time") == starts(tmp_path) - 1 >= 1
    assert said.endswith("finished after step 16 of run")
