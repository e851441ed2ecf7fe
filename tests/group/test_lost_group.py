"""Lost ranks: the others leave soon, or an agent of torchrun joins; and the figures of docs/scale.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import HEAD, free_port, outputs, started, under_torchrun
from rank_loops import HEAD as LOOPS
from test_other_ranks import PROGRAM as DDP
from test_other_ranks import losses, samples

from everstep.record import RunJournal, failures
from waiting import until

pytestmark = pytest.mark.campaign("timed")

PROGRAM = """
def inside(loop, step):
    if step == 3:
        print(flush=True)
        if rank != {lost}:
            stand()
        {ends}

def stand(boundary=None):
    time.sleep(600)

if "TORCHELASTIC_RUN_ID" not in os.environ:
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{{folder}}/error-{{rank}}.json"
trained("run", inside, epochs=1)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FAIL = 'raise ValueError("a bad sample")'
LATE = "the main thread did not leave the loop within 5 s of the loss: "


@pytest.mark.parametrize(("lost", "ends", "cause", "own"), [
    (1, KILL, "rank 1: its process died without an error", []),
    (1, FAIL, "rank 1: ValueError: a bad sample", ["ValueError: a bad sample"]),
    (0, f'loop.on("exit_loop", stand); {FAIL}', "rank 0: ValueError: a bad sample",
     ["ValueError: a bad sample", f"{LATE}ValueError: a bad sample"]),
])  # fmt: skip
def test_the_other_rank_leaves_with_the_first_cause(tmp_path, monkeypatch, lost, ends, cause, own) -> None:
    """Its main thread stands, as in a collective; the rank that fails may hang while it leaves."""
    monkeypatch.setenv("FOLDER", str(tmp_path))
    with started(LOOPS + PROGRAM.format(lost=lost, ends=ends), 2) as processes:
        said = [process.communicate(timeout=120)[0] for process in processes]
    other = 1 - lost
    assert processes[other].returncode == 1 and processes[lost].returncode in (1, -signal.SIGKILL), said
    pages = failures(tmp_path / "run")
    assert [page.what for page in pages if page.rank == lost] == own, said
    (page,) = (page for page in pages if page.rank == other)
    assert (page.kind, page.step, page.epoch) == ("lost", 2, 1)
    assert page.cause is not None and page.cause.startswith(cause)
    assert page.what.startswith(f"{LATE}rank {lost} has") and page.lines[0].startswith("Thread 'MainThread'")
    assert any(line.endswith("in stand") for line in page.lines)
    told = json.loads((tmp_path / f"error-{other}.json").read_text())["message"]
    assert told["message"] == str(page) and "in stand" in told["extraInfo"]["py_callstack"]
    assert "in stand" in said[other] and page.cause in said[other]
    ends_of = [event.data for event in RunJournal(tmp_path / "run").events("closed", valid=False)]
    assert {end["status"] for end in ends_of} == {"failed"}
    assert any(cause.partition(": ")[2] in end["reason"] for end in ends_of)


def test_torchrun_is_not_held_by_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends SIGTERM to them, and would wait for 30 seconds."""
    monkeypatch.setenv("FOLDER", str(tmp_path))
    program = LOOPS + PROGRAM.format(lost=1, ends=KILL)
    with under_torchrun(program, 2, tmp_path) as torchrun:
        assert torchrun.stdout is not None
        while torchrun.stdout.readline() != "\n":
            assert torchrun.poll() is None
        killed = time.monotonic()
        printed, _ = torchrun.communicate(timeout=90)
        took = time.monotonic() - killed
    assert torchrun.returncode == 1 and took < 25, (took, printed)
    kinds = {(page.rank, page.kind) for page in failures(tmp_path / "run")}
    assert kinds == {(0, "lost")}, "no preemption"
    assert "SIGKILL" in printed.partition("Root Cause")[2], printed


# ------------------------------------------------------------------------------- who is lost, and who is not
JOINED = """
from everstep.group import Peers
group = find_group()
peers = Peers(group)
group.barrier("all have joined")
"""


def test_a_stopped_rank_is_not_lost() -> None:
    """It is stopped for longer than a machine may be silent."""
    program = """
if rank == 1:
    if os.fork() == 0:  # somebody has to continue it
        time.sleep(7)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
group.barrier("a stopped rank")
peers.close()
group.close()
say(threading.active_count())
"""
    assert outputs(JOINED + program, 2) == ["0: 1\n", "1: 1\n"]


def test_a_rank_that_cannot_be_reached_is_an_error_on_all() -> None:
    program = """
import everstep.group.peers
from everstep.errors import GroupError
everstep.group.peers.REACH = 1
group = find_group()
if rank == 1:  # it says an address at which nobody is
    gather = group.gather
    group.gather = lambda value, what: gather([value[0], 9] if "addresses" in what else value, what)
try:
    everstep.group.Peers(group)
except GroupError as error:
    say("rank 0 does not reach rank 1" in str(error))
group.close()
say(threading.active_count())
"""
    assert outputs(program, 2) == [f"{rank}: True\n{rank}: 1\n" for rank in range(2)]


PACED = """
folder = FOLDER
open(f"{folder}/{os.getppid()}.{os.getpid()}", "w").close()
def pace(step):
    open(f"{folder}/{size}-{step}", "w").close()
    if os.environ.get("TORCHELASTIC_RUN_ID"):  # until there are two again, there is time to join
        time.sleep(0.5 if size == 1 and step > 20 else 0.02)
train(f"{folder}/run", of_arrays, max_epoch=24, pace=pace)
"""


def agent(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start an agent of torchrun with one rank, which other agents may join."""
    timing = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-id=elastic"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={timing}"]
    command += ["--monitor-interval=0.2"]
    with (folder / "said").open("ab") as said:
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        how: Any = {"env": environment, "stdout": said, "stderr": subprocess.STDOUT, "cwd": folder}
        line = [sys.executable, "-m", "torch.distributed.run", *command, "program.py"]
        return subprocess.Popen(line, start_new_session=True, **how)


def lose(folder: Path, lost: subprocess.Popen[bytes]) -> None:
    """Kill an agent with its ranks, as the loss of its machine does."""
    lost.kill()
    for path in folder.glob(f"{lost.pid}.*"):
        try:
            os.kill(int(path.suffix[1:]), signal.SIGKILL)
        except ProcessLookupError:
            continue
    lost.wait()


def test_an_agent_is_lost_and_another_joins(tmp_path: Path) -> None:
    folder, straight = tmp_path / "elastic", tmp_path / "straight"
    folder.mkdir()
    straight.mkdir()
    expected = samples(outputs(DDP + PACED.replace("FOLDER", repr(str(straight))), 1))
    (folder / "program.py").write_text(HEAD + DDP + PACED.replace("FOLDER", repr(str(folder))))
    port = free_port()
    agents = [agent(folder, port)]
    try:
        time.sleep(0.5)  # the first agent hosts the store of the rendezvous
        agents.append(agent(folder, port))
        until(lambda: (folder / "2-9").exists())
        lose(folder, agents[1])
        until(lambda: list(folder.glob("1-*")))
        agents.append(agent(folder, port))
        for each in (agents[0], agents[2]):
            assert each.wait(timeout=150) == 0, (folder / "said").read_text()
    finally:
        for each in agents:
            lose(folder, each)
    said = (folder / "said").read_text()
    starts = [event.data["facts"] for event in RunJournal(folder / "run").events("segment", valid=False)]
    changes = [(facts["ranks"], facts.get("ranks_before")) for facts in starts]
    assert changes[0][0] in (1, 2) and changes[-1][0] == 2, said  # the second agent may come later
    assert (1, 2) in changes and (2, 1) in changes, said
    # a step that ran again, or on ranks of which one was lost, had the same samples: each is there
    found = samples([said])
    assert found.keys() == expected.keys()
    assert all(set(ids) == set(expected[step]) for step, ids in found.items())
    straightly = losses(straight / "run")
    assert losses(folder / "run").keys() == straightly.keys()
    for place, loss in losses(folder / "run").items():
        assert loss == pytest.approx(straightly[place], abs=1e-10), place


ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("size", [8, 1000])
def test_files_and_requests_are_those_of_the_page(size: int) -> None:
    command = [sys.executable, ROOT / "tools" / "scale.py", str(size)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rows = -(-1024 // size)
    with_rows = -(-1024 // rows)
    assert found["save"]["requests"] == 4 * size + 3 and found["gather"]["requests"] == 3 * size + 2
    assert found["save"]["files"] == size + with_rows + 2
    assert all(seconds < 5 for seconds in found["seconds to"].values()), found
    page = (ROOT / "docs" / "scale.md").read_text()
    if size == 1000:
        for figure in (found["save"]["files"], found["save"]["requests"], found["gather"]["requests"]):
            assert f"{figure:,}" in page
