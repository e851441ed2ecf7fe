"""`everstep watch`: a line for each change, until the run ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import everstep
from sqlalchemy import update

import warm
from everstep.index.database import Database
from everstep.index.sql_tables import runs
from waiting import until

PROGRAM = """
import os, signal, sys, threading
import numpy, everstep
kill, pause = int(sys.argv[1]), float(sys.argv[2])
data = everstep.data.arrays(numpy.arange(16.0), batch_size=2)
w = numpy.zeros(1)
services = [everstep.Checkpoints(everstep.Every(steps=2))]
with everstep.TrainLoop("run", {"w": w}, seed=1, max_epoch=2, services=services) as loop:
    for epoch in loop.iter_epochs():
        for step, (batch,) in loop.iter_steps(data):
            if step == 3: loop.make_checkpoint()
            if step == kill:
                threading.Event().wait(pause + 0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            if pause < 0:
                sys.stdin.readline()
            else:
                threading.Event().wait(pause)
            w += batch.mean()
            loop.collect_metrics(loss=float(w.sum()))
"""


def train(here: Path, kill: int = 0, pause: float = 0.0) -> Any:
    """A training with pauses of some seconds; below 0: with one step for each line that it is sent."""
    command = [sys.executable, "-c", PROGRAM, str(kill), str(pause)]
    lines = subprocess.PIPE if pause < 0 else subprocess.DEVNULL
    return warm.Popen(command, cwd=here, stdin=lines, stdout=subprocess.DEVNULL, text=True)


def watch(here: Path, *options: str, run: str | None = "run") -> Any:
    named = [] if run is None else [run]
    return warm.Popen(
        [sys.executable, "-m", "everstep", "watch", *named, "--every", "0.1", *options],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def opened(here: Path) -> None:
    until(lambda: list((here / "run" / "journal").glob("*.evj")))


def test_in_a_pipe_there_is_a_line_for_each_change_until_the_run_ends(tmp_path: Path) -> None:
    training = train(tmp_path, pause=-1)
    opened(tmp_path)
    process = watch(tmp_path)
    lines = [process.stdout.readline()]
    assert re.match(r"run-\w+: start 1 from nothing; ", lines[0])
    for step in range(1, 11):
        print(file=training.stdin, flush=True)
        while f"  step {step} " not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
    training.communicate("\n" * 16)
    said, wrong = process.communicate()
    assert (process.returncode, training.returncode) == (0, 0), wrong
    lines = [line.rstrip() for line in lines] + said.splitlines()
    steps = [int(step) for step in re.findall(r"  step (\d+)", "\n".join(lines))]
    assert steps == sorted(steps)
    assert any("steps/s" in line and "ETA " in line for line in lines)
    assert "step 16 of 16" in lines[-1] and lines[-1].startswith("finished")
    assert len(lines) == len({*lines}) and "\x1b" not in said


@pytest.mark.campaign("timed")
def test_it_stays_when_a_start_ends_if_another_follows(tmp_path: Path) -> None:
    process = None
    for kill in (6, 0):
        training = train(tmp_path, kill=kill, pause=0.05)
        opened(tmp_path)
        process = process or watch(tmp_path, "--stay", "--metric", "loss")
        training.wait()
        while kill and "killed  step 5" not in process.stdout.readline():
            pass
    assert process is not None
    said = process.communicate()[0]
    assert process.returncode == 0 and "start 2 from" in said
    assert said.splitlines()[-1].startswith("finished")


@pytest.mark.campaign("timed")
def test_it_writes_nothing(tmp_path: Path) -> None:
    assert train(tmp_path).wait() == 0

    def files() -> dict[Path, tuple[int, bytes]]:
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()}

    before = files()
    everstep("watch", "run", cwd=tmp_path)
    assert files() == before


@pytest.mark.campaign("timed")
def test_a_run_on_another_machine_is_followed_through_the_server(tmp_path: Path, server: Any) -> None:
    """Here nothing of the run can be read."""
    url = server.database()
    program = "import platform; platform.node = lambda: 'another'" + PROGRAM.replace('"run"', "sys.argv[3]")
    away = tmp_path / "away"
    away.mkdir()
    training = warm.Popen(
        [sys.executable, "-c", program, "0", "0.5", "/proc/self/cwd/run"],  # for other processes not there
        cwd=away, env={**os.environ, "EVERSTEP_INDEX": url}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    found = until(lambda: json.loads(everstep("runs", "--json", "--index", url, cwd=tmp_path)[0]))
    process = watch(tmp_path, found[0]["name"], "--index", url, "--metric", "loss", run=None)
    said = process.communicate()[0].splitlines()[-1]
    assert process.returncode == 0 and said.startswith("finished: ") and "step 16 of 16" in said
    assert training.wait() == 0


def test_a_run_whose_directory_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    assert train(tmp_path).wait() == 0
    everstep("sync", ".", cwd=tmp_path)
    with Database(tmp_path / "everstep.db").write() as connection:
        connection.execute(update(runs).values(status="running"))
    shutil.rmtree(tmp_path / "run")
    (name,) = json.loads(everstep("runs", "--json", "--limit", "1", cwd=tmp_path)[0])
    said = everstep("watch", name["name"], "--stay", cwd=tmp_path, status=1)[0]
    assert "gone" in said
