"""`everstep watch`: how a run stands, again and again, until it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import everstep
from index_runs import start

import everstep as library
import warm
from everstep.record import Block, Journal, RunDir
from tiny_runs import Tiny


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_look_tells_the_place_the_time_left_the_metrics_and_the_newest_warning(tmp_path: Path) -> None:
    told: list[str] = []

    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=abs(epoch - 2.5))

    def inside(loop: Any, step: int) -> None:
        if step == 14:
            told.append(everstep("watch", "run", "--once", cwd=tmp_path)[0])

    services = [library.EarlyStop("vaild_loss", patience=9)]
    Tiny(tmp_path / "run", max_epoch=5, services=services).train(inside, tail)
    (text,) = told
    first, place = text.splitlines()[:2]
    assert first.startswith("run-") and "  running, last sign 2" in first
    # the step by the trail; the journal has the rows of three epochs
    assert place.startswith("  step 13, epoch 3, 65%, 0:00:0") and place.endswith(" left")
    (best,) = (line.split() for line in text.splitlines() if "valid_loss " in line)
    assert best == ["tail", "valid_loss", "12", "0.5", "0.5", "8"]
    assert "warning: " in text.splitlines()[-1] and "vaild_loss" in text.splitlines()[-1]
    before = files(tmp_path)
    text, _ = everstep("watch", "run", cwd=tmp_path)
    assert files(tmp_path) == before
    assert "  finished: max_epoch 5 is reached\n  step 20, epoch 5, 100%\n" in text


@pytest.mark.parametrize(("said", "status"), [("finished", 0), ("stopped", 1), ("failed", 1)])
def test_the_exit_status_tells_how_it_ended(tmp_path: Path, said: str, status: int) -> None:
    journal = Journal.open(RunDir.open(tmp_path / "run").path, 1, None, {})
    journal.append(Block(0, "step", "loss", False, [1, 2], [0.5, float("nan")], [1, 1], [0, 0]))
    journal.event("closed", {"status": said, "reason": "\x1b[2Jdone", "step": 2}, wall=True)
    journal.close()
    text, _ = everstep("watch", "run", cwd=tmp_path, status=status)
    assert text.splitlines()[0].endswith(f"{said}: \\x1b[2Jdone") and "step 2\n" in text


def test_in_a_pipe_each_change_is_told_until_the_run_ends(tmp_path: Path) -> None:
    training = start(tmp_path / "run", 2, 2, "ask")
    while "asks at 2" not in training.stdout.readline():
        pass
    watching = warm.Popen(
        [sys.executable, "-m", "everstep", "watch", "run", "--every", "0.05"],
        cwd=tmp_path,
        env={**os.environ, "EVERSTEP_INDEX": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    for step in (2, 3, 4):
        print(file=training.stdin, flush=True)
        line = "-"
        while line and f"  step {step}, epoch" not in line:
            line = watching.stdout.readline()
        assert line, "it has ended before the run"
    training.communicate("\n" * 8)
    text, _ = watching.communicate()
    assert (training.returncode, watching.returncode) == (0, 0)
    assert text.count("finished: max_epoch 2 is reached") == 1 and "\x1b" not in text
