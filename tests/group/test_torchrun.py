"""Under torchrun: a planned end has exit status 0, and an error is in torchrun's error file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from processes import lines_by_rank, under_torchrun

from everstep.group import exit_status, write_error_file
from everstep.record import RunJournal, failures

TRAINS = """
import everstep, numpy
data = everstep.data.arrays(numpy.arange(8.0), batch_size=2)
with everstep.TrainLoop("{run}", {{"w": numpy.zeros(1)}}, max_epoch=2{more}) as loop:
    for epoch in loop.iter_epochs():
        for step, (batch,) in loop.iter_steps(data):
            if step == 3:
                {at_3}
"""


def ended(program: str, folder: Path) -> tuple[int, str]:
    with under_torchrun(program, 1, folder) as process:
        printed, _ = process.communicate(timeout=180)
    return process.returncode, printed


@pytest.mark.campaign("timed")
@pytest.mark.parametrize(
    ("meant", "at_3", "more"),
    [(143, "os.kill(os.getpid(), signal.SIGTERM)", ""), (3, "time.sleep(0.2)", ", max_time=0.1")],
)
def test_a_planned_end_has_status_0_and_the_real_one_is_in_the_run(
    tmp_path: Path, meant: int, at_3: str, more: str
) -> None:
    status, printed = ended(TRAINS.format(run=tmp_path / "run", at_3=at_3, more=more), tmp_path)
    assert status == 0, printed
    (left,) = RunJournal(tmp_path / "run").events("interrupted", valid=False)
    assert left.data["status"] == meant


@pytest.mark.campaign("long")
def test_a_restart_does_not_read_what_the_attempt_before_has_left(tmp_path: Path) -> None:
    """torch's process groups leave addresses of processes in the store, which the next attempt has, too."""
    program = """
import torch, everstep
from torch.distributed.distributed_c10d import _get_default_store
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
everstep.torch.parallel(torch.nn.Linear(2, 1))
if attempt == 0:
    _get_default_store().set(f"address/{rank}", "an old one")
    _get_default_store().wait(["address/0", "address/1"])
    os.kill(os.getpid(), signal.SIGKILL)
say(attempt, _get_default_store().check([f"address/{rank}"]))
os._exit(0)
"""
    with under_torchrun(program, 2, tmp_path, "--max-restarts=1") as process:
        printed, _ = process.communicate(timeout=180)
    assert process.returncode == 0, printed
    assert lines_by_rank(printed) == {0: ["1 False"], 1: ["1 False"]}


def test_torchrun_prints_the_error_that_ended_a_run(tmp_path: Path) -> None:
    program = TRAINS.format(run=tmp_path / "run", at_3='raise ValueError("no such batch")', more="")
    status, printed = ended(program, tmp_path)
    assert status == 1
    root = printed.partition("Root Cause")[2]
    assert "ValueError: no such batch" in root and "program.py" in root, printed
    assert [page.what for page in failures(tmp_path / "run")] == ["ValueError: no such batch"]


def test_without_torchrun_statuses_are_what_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert [exit_status(status) for status in (0, 3, 143)] == [0, 3, 143]
    monkeypatch.chdir(tmp_path)
    write_error_file("nothing", [])
    assert os.listdir(tmp_path) == []


def test_the_error_file_is_what_torch_itself_reads(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error_file("ValueError: x", ["Traceback:", "  there"])
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == "ValueError: x"
    assert told["extraInfo"]["py_callstack"] == "Traceback:\n  there"
    assert int(told["extraInfo"]["timestamp"]) > 1_700_000_000
