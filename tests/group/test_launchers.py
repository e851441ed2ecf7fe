"""What a launcher does to its ranks, and what torchrun is told: statuses, and the error that ended a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from processes import free_port, lines_by_rank, outputs, started, under_torchrun

import warm
from everstep.group import exit_status, write_error_file
from everstep.record import RunJournal, failures

PATIENCE = 120

RANK = """
import os, signal, subprocess, sys
os.environ |= {{"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0"}}
os.environ |= {{"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}}
os.environ |= {{"EVERSTEP_GROUP_LIMIT": "3600"}}
"""
"""A rank of two, whose torchrun has its store at a port of 127.0.0.1."""


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A host that takes connections, and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(PATIENCE)
        yield server


def port(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def test_a_rank_ends_with_its_torchrun(silent: socket.socket) -> None:
    """It waits in torch for a host that never answers, and no Python code can end that."""
    program = RANK.format(port=port(silent))
    program += (
        "if os.fork(): signal.pause()  # as torchrun\nfrom everstep.group import find_group\nfind_group()"
    )
    with warm.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as torchrun:
        with silent.accept()[0]:
            torchrun.kill()
            torchrun.communicate(timeout=PATIENCE)  # until the rank has closed its end of the pipe, too


def test_a_rank_whose_torchrun_died_before_it_asked_ends(silent: socket.socket) -> None:
    """A cold process: its parent is another one at the import of everstep than when it joins the group."""
    program = RANK.format(port=port(silent))
    program += 'print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True); signal.pause()'
    rank = "import everstep, os, sys\nprint('imported', flush=True)\n"
    rank += "sys.stdin.read()  # until the test has seen the end of the parent\n"
    rank += "from everstep.group import find_group\ntry: find_group()\n"
    rank += "except everstep.errors.StoreLostError as error: print(error)\n"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    torchrun = subprocess.Popen([sys.executable, "-c", program, rank], **pipes)
    with torchrun:
        assert torchrun.stdout is not None
        while torchrun.stdout.readline() != "imported\n":
            assert torchrun.poll() is None
        torchrun.kill()
        torchrun.wait(PATIENCE)
        said, _ = torchrun.communicate(timeout=PATIENCE)
    assert said.startswith("torchrun, which has started this process, is gone"), said


def test_a_rank_whose_torchrun_was_dead_before_ends_soon() -> None:
    """Its port is asked for a short time, and not for twice the limit of the group: an hour here."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        program = RANK.format(port=port(taken))
        program += "from everstep.backends.torch import parallel\nparallel.ANSWER = 0.1\n"
        program += "from everstep.group import find_group\nfind_group()"
        done = warm.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "StoreLostError: no store answers at 127.0.0.1" in done.stderr


def test_a_store_that_is_gone_is_asked_once() -> None:
    """torch prints twenty lines at each request, and all threads of a rank make some."""
    program = """
    from everstep.errors import GroupError
    group = find_group()
    ask = group.store.clone()
    if rank == 0:
        group.store.block("connected")
        os.kill(os.getpid(), signal.SIGKILL)
    group.store.set("connected", "")
    refused = 0
    while refused < 60:
        for store in (ask, group.store, group.store.below("torch/")):
            try:
                store.has(["a key"])
            except GroupError:
                refused += 1
    os._exit(0)
    """
    with started(program, 2) as processes:
        text = processes[1].communicate(timeout=PATIENCE)[0]
    assert processes[1].returncode == 0 and text.count("[c10d]") == 1, text


def test_a_process_without_torchrun_may_lose_its_parent() -> None:
    """A shell that ends does not kill a run under nohup."""
    program = """
import ctypes, os
from everstep.group.environment import end_with_torchrun
for said in ({}, {"TORCHELASTIC_RUN_ID": "x"}):
    os.environ |= said
    end_with_torchrun()
    found = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(2, ctypes.byref(found)) == 0  # PR_GET_PDEATHSIG
    print(found.value)
"""
    assert warm.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"0\n9\n"


@pytest.mark.parametrize(("run_id", "name", "after", "then", "status"), [
    ("x", "SIGTERM", 29, "SIGTERM", 0), ("x", "SIGUSR1", 29, "SIGUSR1", 0),
    ("x", "SIGTERM", 31, "SIGTERM", -15), ("", "SIGTERM", 29, "SIGTERM", -15),
    ("", "SIGTERM", 0, "SIGUSR1", 0),  # submitit's order for a job that is preempted
])  # fmt: skip
def test_a_repeated_signal_or_a_later_notice_does_not_end_a_save(run_id, name, after, then, status) -> None:
    """Slurm signals torchrun and its ranks, and torchrun its ranks."""
    program = f"""
import os, signal
from everstep.supervisor.threads.signals import SignalWatch
from everstep.testing import ManualClock
os.environ |= {{"TORCHELASTIC_RUN_ID": "x"}} if {run_id!r} else {{}}
clock = ManualClock(1000)
watch = SignalWatch(lambda: None, clock)
watch.install()
signal.raise_signal(signal.{name})
clock.advance({after})
signal.raise_signal(signal.{then})
print(watch.received == signal.{name})
"""
    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert status or done.stdout == "True\n"
    assert done.stderr.count(f"{name}: saving at the next boundary") == 1
    assert ("send it again" in done.stderr) is not bool(run_id)


def test_a_process_with_a_process_group_pauses_at_its_end() -> None:
    """The campaign's test below sees what the pause is for."""
    program = f"""
import atexit, time
import torch.distributed as dist
from everstep.backends.torch.parallel import connect
pauses = []
time.sleep = pauses.append
atexit.register(lambda: print(pauses))
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
connect(120)
"""
    assert warm.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[0.05]\n"


@pytest.mark.campaign("timed")  # what is tried is a pause of the product
def test_a_thread_of_gloo_does_not_abort_a_process_at_its_end() -> None:
    """It lets go of the last tensor, and asks for Python's lock, which the main thread holds to its end."""
    program = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    find_group().close()
    sys.setswitchinterval(100)
    dist.all_reduce(torch.ones(3), async_op=True)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    """
    for _ in range(10):  # without the pause 11 of 26 processes aborted
        outputs(program, 2)


# ------------------------------------------------------------------------------------------ under torchrun
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
    [(143, "signal.raise_signal(signal.SIGTERM)", ""), (3, "time.sleep(0.2)", ", max_time=0.1")],
)
def test_a_planned_end_has_status_0(tmp_path: Path, meant: int, at_3: str, more: str) -> None:
    """The real one is in the run."""
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


def test_the_error_file_is_what_torch_reads_and_only_under_torchrun(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert [exit_status(status) for status in (0, 3, 143)] == [0, 3, 143]
    monkeypatch.chdir(tmp_path)
    write_error_file("nothing", [])
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error_file("ValueError: x", ["Traceback:", "  there"])
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == "ValueError: x"
    assert told["extraInfo"]["py_callstack"] == "Traceback:\n  there"
    assert int(told["extraInfo"]["timestamp"]) > 1_700_000_000
