"""Where a rank is lost, all others leave within 10 seconds, also out of a collective that waits for hours."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from processes import started, under_torchrun

from everstep.record import RunJournal, failures

pytestmark = pytest.mark.campaign("timed")

PARTS = """
import torch, torch.distributed as dist
from pathlib import Path
from everstep.group import Agreement, Peers
from everstep.record import FailurePages, Journal
from everstep.supervisor.leaving.failure_reporter import FailureReporter
from everstep.supervisor.leaving.lost_group import LostGroup
from everstep.supervisor.saving.state_tree import Progress
from everstep.supervisor.threads.signals import SignalWatch
from everstep.supervisor.voice import Voice

run = Path("{run}")
os.environ["TORCHELASTIC_ERROR_FILE"] = str(run / f"error-{{rank}}.json")
dist.init_process_group("gloo")
group = find_group(limit=60)
signals = SignalWatch(lambda: None)
signals.install()
journal = Journal.open(run, rank + 1, None, {{}})
pages, progress = FailurePages(run, 1, rank), Progress(seed=1, step=12, epoch=2)
words = FailureReporter(pages, group, progress, journal, Voice())
lost = LostGroup(group, words, signals.give_up)
agreement = Agreement(group, lambda: 12, lambda: None, lost.lost)
peers = Peers(group)
group.barrier("all are here")
if rank == 2:
    print(flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def left(program: str, run: Path, statuses: list[int]) -> list[str]:
    """Run on 3 ranks, of which the last one is killed; what the others print.  All have left soon."""
    run.mkdir()
    with started(PARTS.format(run=run) + program, 3) as processes:
        processes[2].wait(timeout=60)
        killed = time.monotonic()
        said = [process.communicate(timeout=60)[0] for process in processes[:2]]
        took = time.monotonic() - killed
    assert [process.returncode for process in processes[:2]] == statuses, said
    assert took < 30, said  # 8 s at most where nothing else runs; gloo waits for 30 minutes
    return said


def test_a_main_thread_inside_a_collective(tmp_path: Path) -> None:
    """Both wait for each other, and not for the lost rank: gloo knows of no fault."""
    said = left("dist.recv(torch.ones(1), 1 - rank)", tmp_path / "run", [1, 1])
    pages = failures(tmp_path / "run")
    assert sorted((page.rank, page.kind, page.step, page.epoch) for page in pages) == [
        (0, "lost", 12, 2),
        (1, "lost", 12, 2),
    ]
    for page in pages:
        assert page.cause is not None and page.cause.startswith("rank 2: its process is gone")
        assert page.what.startswith("the main thread did not come back within 3 s of the loss: rank 2 has")
        assert page.lines[0].startswith("Thread 'MainThread'")
        assert any(line.endswith("in recv") for line in page.lines)
        told = json.loads((tmp_path / "run" / f"error-{page.rank}.json").read_text())["message"]
        assert told["message"] == str(page) and "in recv" in told["extraInfo"]["py_callstack"]
        assert "in recv" in said[page.rank] and page.cause in said[page.rank]
    ends = [event.data for event in RunJournal(tmp_path / "run").events("closed", valid=False)]
    assert {end["status"] for end in ends} == {"failed"} and "rank 2: its process" in ends[0]["reason"]


def test_sigterm_after_a_loss_is_no_preemption(tmp_path: Path) -> None:
    """As torchrun sends it to the others: nothing is saved, and the process still leaves with its pages."""
    said = left(
        """
while signals.hopeless is None:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
say("received", signals.received)
time.sleep(60)
""",
        tmp_path / "run",
        [1, 1],
    )
    for text in said:
        assert "SIGTERM: nothing can be saved, and this process ends by itself: rank 2 has failed" in text
        assert "received None" in text
    assert [page.kind for page in failures(tmp_path / "run")] == ["lost", "lost"]


def test_a_main_thread_that_comes_back_leaves_by_itself(tmp_path: Path) -> None:
    """Rank 1 comes back, and hangs while it leaves."""
    left(
        """
while signals.hopeless is None:
    time.sleep(0.01)
lost.leaving()
if rank == 1:
    time.sleep(60)
agreement.close()
lost.close()
peers.close()
signals.restore()
say(threading.active_count())
time.sleep(5)  # it hosts the store
os._exit(7)
""",
        tmp_path / "run",
        [7, 1],
    )
    (page,) = failures(tmp_path / "run")
    assert page.rank == 1 and page.what.startswith("the main thread did not leave the loop within 5 s of")


def test_a_rank_that_fails_leaves_though_its_leaving_hangs(tmp_path: Path) -> None:
    """Rank 0 raises an error of its own; its last commit hangs."""
    left(
        """
if rank == 0:
    lost.leaving(ValueError("mine"))
time.sleep(60)
""",
        tmp_path / "run",
        [1, 1],
    )
    pages = {page.rank: page for page in failures(tmp_path / "run")}
    assert pages[0].what == "the main thread did not leave the loop within 5 s of the loss: mine"


def test_torchrun_is_not_held_by_the_others(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to them, and would wait for 30 seconds."""
    run = tmp_path / "run"
    run.mkdir()
    program = PARTS.format(run=run).replace('os.environ["TORCHELASTIC_ERROR_FILE"]', "_")
    with under_torchrun(program + "dist.recv(torch.ones(1), 1 - rank)", 3, tmp_path) as torchrun:
        assert torchrun.stdout is not None
        while torchrun.stdout.readline() != "\n":
            assert torchrun.poll() is None
        killed = time.monotonic()
        printed, _ = torchrun.communicate(timeout=90)
        took = time.monotonic() - killed
    assert torchrun.returncode == 1 and took < 25, (took, printed)
    assert {page.rank for page in failures(run)} == {0, 1}
    assert "SIGKILL" in printed.partition("Root Cause")[2], printed
