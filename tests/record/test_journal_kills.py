"""Processes killed at every write and fsync of a journal, and restarted; real files, real SIGKILL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from everstep.record import Block, Journal, Position, RunJournal, read_segment
from everstep.record.journal_format import HEADER_SIZE

VICTIM = """
import sys
from pathlib import Path
from everstep.record import Block, Journal, Position, RunDir

run_dir, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
parent = eval(sys.argv[4])
journal = Journal.open(run_dir, RunDir(run_dir, {}).next_segment(), parent and Position(*parent), {})
for step in range(first, last + 1):
    journal.append(Block(1, "step", "loss", False, [step], [step / 7], [1], [0]))
    position = journal.flush()
    if step % 2 == 0:  # a checkpoint: durable first, then announced
        journal.fsync_only(position)
        print("saved", step, tuple(position), flush=True)
journal.event("ended", {"step": last})
journal.sync()
journal.close()
"""


def run(run_dir, first, last, parent=None, hazard=None):
    """Run the victim; (exit status, the last checkpoint that it announced as (step, position) or None)."""
    environment = os.environ | ({"EVERSTEP_HAZARD": hazard} if hazard else {})
    command = [sys.executable, "-c", VICTIM, str(run_dir), str(first), str(last), repr(parent)]
    done = warm.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    saved = [line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()]
    return done.returncode, (int(saved[-1][0]), eval(saved[-1][1])) if saved else None


def test_the_points_of_a_run_are_those_that_are_killed_below(tmp_path):
    trace = tmp_path / "trace"
    assert run(tmp_path, 1, 6, hazard=f"trace:{trace}")[0] == 0
    names = trace.read_text().split()
    counts = {name: names.count(name) for name in names}
    assert counts == {
        "journal.create": 1,
        "journal.write": 7,
        "journal.fsync": 4,
        "journal.fsync_folder": 2,
    }


KILLS = [
    *(f"kill:journal.write:{n}" for n in range(1, 8)),
    *(f"kill:journal.fsync:{n}" for n in range(1, 5)),
    "kill:journal.create:1",
    "kill:journal.fsync_folder:1",
]


@pytest.mark.campaign("long", gate=5)
@pytest.mark.parametrize("hazard", KILLS)
def test_a_kill_at_any_operation_then_a_resume_leaves_every_row_once(tmp_path, hazard):
    (tmp_path / "run.json").touch()
    status, saved = run(tmp_path, 1, 6, hazard=hazard)
    assert status == -9
    if hazard != "kill:journal.fsync:4":  # the last operation: the end is written by then
        assert RunJournal(tmp_path).ended() is None
    step, position = saved or (0, None)
    assert run(tmp_path, step + 1, 6, position)[0] == 0
    after = RunJournal(tmp_path)
    assert after.series("loss") == ([1, 2, 3, 4, 5, 6], [step / 7 for step in range(1, 7)])
    assert after.ended() == {"step": 6}
    assert after.problems == []


def test_a_write_torn_anywhere_and_a_resume_leave_every_row_once(tmp_path):
    """What a kill in the middle of a write leaves: any prefix of the file beyond the last fsync."""
    whole_dir, torn_dir = tmp_path / "whole", tmp_path / "torn"
    whole_dir.mkdir()
    _, saved = run(whole_dir, 1, 3)
    path = whole_dir / "journal" / "segment-0001.evj"
    whole = path.read_bytes()
    step, (_, durable) = saved
    assert (step, read_segment(path).end) == (2, len(whole))
    for size in range(durable, len(whole)):
        folder = torn_dir / str(size) / "journal"
        folder.mkdir(parents=True)
        (folder / path.name).write_bytes(whole[:size])
        resumed(torn_dir / str(size), saved)
    for size in range(HEADER_SIZE):
        folder = torn_dir / str(size) / "journal"
        folder.mkdir(parents=True)
        (folder / path.name).write_bytes(whole[:size])
        resumed(torn_dir / str(size), None)


def resumed(run_dir: Path, saved):
    step, position = saved or (0, None)
    journal = Journal.open(run_dir, 2, position and Position(*position), {})
    steps = list(range(step + 1, 4))
    journal.append(
        Block(1, "step", "loss", False, steps, [s / 7 for s in steps], [1] * len(steps), [0] * len(steps))
    )
    journal.close()
    assert RunJournal(run_dir).series("loss") == ([1, 2, 3], [1 / 7, 2 / 7, 3 / 7])
