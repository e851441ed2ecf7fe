"""Who looks at a run holds a lock on its journal: the training then writes its rows each second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import everstep
from everstep.record import Block, Journal, RunDir, RunJournal, Watch, read_segment
from everstep.record.segment_file import segment_path
from everstep.testing import ManualClock

LOOK = """
import sys
from everstep.record import Watch
watch = Watch()
watch.over(sys.argv[1:])
print("looks", flush=True)
sys.stdin.read()
"""


def opened(run: RunDir, segment: int = 1) -> Journal:
    journal = Journal.open(run.path, segment, None, {}, warn=print)
    journal.flush()
    return journal


def test_a_journal_knows_that_somebody_looks_however_he_leaves(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run", seed=1)
    with closing(opened(run)) as journal, closing(Watch()) as watch:
        assert not journal.is_watched()
        watch.over([str(run.path), str(tmp_path / "nothing")])
        assert journal.is_watched()
        watch.over([])
        assert not journal.is_watched()
        command = [sys.executable, "-c", LOOK, str(run.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline() == b"looks\n"
            assert journal.is_watched()
            other.send_signal(signal.SIGKILL)
            other.wait()
        assert not journal.is_watched()
        watch.over([str(run.path)])
        with closing(opened(run, 2)) as newer:  # the run starts again
            assert not newer.is_watched()
            watch.over([str(run.path)])
            assert newer.is_watched() and not journal.is_watched()


@pytest.mark.parametrize("looks", [False, True])
def test_rows_reach_the_file_each_second_if_somebody_looks(tmp_path: Path, looks: bool) -> None:
    """Else after 30 seconds, in a single block; the rows are the same."""
    clock = ManualClock()
    file = segment_path(tmp_path / "run", 1)
    found = []
    with (
        everstep.TrainLoop(tmp_path / "run", seed=1, max_step=50, clock=clock) as loop,
        closing(Watch()) as watch,
    ):
        for _ in loop.iter_epochs():
            for step, _ in loop.iter_steps(everstep.data.arrays(np.zeros(60), batch_size=1)):
                if looks:
                    watch.over([str(tmp_path / "run")])
                loop.collect_metrics(loss=step)
                clock.advance(1)
                found.append([len(stored.block.steps) for stored in read_segment(file).blocks])
    rows = RunJournal(tmp_path / "run").series("loss", "step")
    assert rows == ([*range(1, 51)], [*map(float, range(1, 51))])
    if looks:
        assert [sum(sizes) for sizes in found] == [*range(50)]
    else:
        assert found[:30] == [[]] * 30 and found[30:49] == [[30]] * 19


def test_a_lock_ends_with_the_look_though_a_forked_worker_has_its_file(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run", seed=1)
    with closing(opened(run)) as journal, closing(Watch()) as watch:
        watch.over([str(run.path)])
        ends, begins = os.pipe()
        worker = os.fork()
        if not worker:
            os.close(begins)
            os.read(ends, 1)  # until the test is over
            os._exit(0)
        try:
            assert journal.is_watched()
            watch.over([])
            assert not journal.is_watched()
        finally:
            os.close(begins)
            os.waitpid(worker, 0)
            os.close(ends)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/locks is Linux's")
def test_the_lock_covers_no_byte_of_the_file(tmp_path: Path) -> None:
    """On an SMB share a lock forbids all others to write what it covers."""
    run = RunDir.open(tmp_path / "run", seed=1)
    with closing(opened(run)) as journal, closing(Watch()) as watch:
        watch.over([str(run.path)])
        inode = f":{journal.path.stat().st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        assert any(
            each[5].endswith(inode) and each[3] == "READ" and int(each[6]) >= 1 << 40 for each in locks
        )


def test_a_journal_that_was_moved_away_is_watched_where_it_is_written_again(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run", seed=1)
    with closing(opened(run)) as journal, closing(Watch()) as watch:
        watch.over([str(run.path)])
        journal.path.rename(tmp_path / "away")
        journal.event("noted", {})
        journal.sync()
        assert not journal.is_watched()
        watch.over([str(run.path)])
        assert journal.is_watched()


def test_what_boundaries_read_in_parts_is_one_block_and_stays_in_order(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run", seed=1)
    with closing(opened(run)) as journal:
        for step in range(1, 5):
            for name in ("loss", "accuracy"):
                journal.append(Block(1, "step", name, False, [step], [step / 2], [1], [0]))
        journal.event("noted", {})
        journal.append(Block(1, "step", "loss", False, [5], [2.5], [1], [0]))
        journal.append(Block(2, "step", "loss", False, [6], [3.0], [1], [0]))
    found = read_segment(segment_path(run.path, 1))
    blocks = [(each.block.epoch, each.block.name, each.block.steps) for each in found.blocks]
    assert blocks == [
        (1, "loss", [1, 2, 3, 4]),
        (1, "accuracy", [1, 2, 3, 4]),
        (1, "loss", [5]),
        (2, "loss", [6]),
    ]
    (noted,) = (event for event in found.events if event.kind == "noted")
    assert found.blocks[1].offset < noted.offset < found.blocks[2].offset
