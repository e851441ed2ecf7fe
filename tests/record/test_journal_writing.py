"""The writer: what is durable when, and a disk that refuses."""

import contextlib
import subprocess
import sys
import time

import pytest

from everstep import hazard
from everstep.errors import JournalError, UsageError
from everstep.record import Block, Journal, RunJournal, read_segment
from everstep.record.journal_format import HEADER_SIZE, StoredBlock
from everstep.testing import ManualClock


def block(*steps, name="loss"):
    return Block(
        1, "step", name, False, list(steps), [float(s) for s in steps], [1] * len(steps), [0] * len(steps)
    )


def steps_of(run_dir):
    return [row.step for row in RunJournal(run_dir).rows()]


@pytest.fixture
def told():
    return []


@pytest.fixture
def journal(tmp_path, told):
    journal = Journal.open(tmp_path, 1, None, {}, warn=told.append)
    yield journal
    journal.close()


def test_nothing_reaches_the_file_before_a_flush(journal):
    journal.append(block(1))
    journal.event("hello", {"a": 1})
    assert journal.path.read_bytes() == b""
    position = journal.flush()
    assert position == (1, journal.path.stat().st_size)
    assert [event.kind for event in read_segment(journal.path).events] == ["segment", "hello"]


def test_a_block_has_the_time_of_its_own_newest_row(journal, monkeypatch):
    clock = ManualClock(1e9)
    monkeypatch.setattr(time, "time", clock)
    for step, name in ((1, "valid_loss"), (1, "loss"), (2, "loss")):
        clock.advance(1)
        journal.append(block(step, name=name))
    clock.advance(1)
    journal.flush()
    assert [found.time - 1e9 for found in read_segment(journal.path).blocks] == [1, 3]


def test_misuse_is_refused(journal, tmp_path):
    with pytest.raises(JournalError, match=r"segment-0001.evj exists; open the next segment"):
        Journal.open(tmp_path, 1, None, {})
    with pytest.raises(JournalError, match=r"event 'x' cannot be recorded.*set is not JSON.*give dicts"):
        journal.event("x", {"a": {1}})
    with pytest.raises(JournalError, match=r"'loss' has columns of lengths \[2, 2, 1, 2\]; give equal"):
        journal.append(block(1, 2)._replace(counts=[1]))
    journal.append(block(1))
    journal.close()
    journal.close()
    for use in (lambda: journal.append(block(2)), journal.sync):
        with pytest.raises(UsageError, match="is closed; call it before"):
            use()


def points(tmp_path, action):
    """The hazards that `action` passes."""
    trace = tmp_path / "trace"
    trace.unlink(missing_ok=True)
    hazard.arm(f"trace:{trace}")
    action()
    hazard.arm(None)
    return trace.read_text().split() if trace.exists() else []


def test_the_first_sync_also_makes_the_names_durable(journal, tmp_path):
    journal.append(block(1))
    folders = ["journal.fsync_folder"] * 2
    assert points(tmp_path, journal.sync) == ["journal.write", "journal.fsync", *folders]
    assert points(tmp_path, lambda: journal.decide({"skip": 3})) == ["journal.write", "journal.fsync"]


def test_fsync_only_writes_no_later_row(journal, tmp_path):
    journal.sync()
    journal.append(block(1))
    position = journal.flush()
    journal.append(block(2))
    assert points(tmp_path, lambda: journal.fsync_only(position)) == ["journal.fsync"]
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize("point", ["write", "fsync"])
def test_a_decision_that_is_not_durable_is_an_error(journal, point):
    hazard.arm(f"EIO:journal.{point}:1")
    with pytest.raises(OSError, match=r"Input/output|waits to be"):
        journal.decide({"skip": 3})


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_refusing_disk_loses_nothing_and_is_told_once(journal, tmp_path, told, error):
    journal.append(block(1))
    journal.flush()
    hazard.arm(f"{error}:journal.write:1-3")
    for step in (2, 3, 4):
        journal.append(block(step))
        journal.flush()
    assert steps_of(tmp_path) == [1]
    assert len(told) == 1 and "training continues" in told[0]
    journal.append(block(5))
    position = journal.flush()
    assert position.offset == journal.path.stat().st_size
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    journal.fsync_only(position)
    assert len(told) == 2 and "can be written again" in told[1]


def test_an_fsync_of_what_was_written_before_says_nothing_of_what_waits(journal, told):
    journal.append(block(1))
    position = journal.flush()
    hazard.arm("ENOSPC:journal.write:1-2")
    journal.append(block(2))
    for _ in range(2):
        journal.flush()
        journal.fsync_only(position)
    assert len(told) == 1
    journal.sync()
    assert len(told) == 2


def test_a_position_behind_unwritten_rows_cannot_be_made_durable_until_they_are(journal):
    hazard.arm("ENOSPC:journal.write:1")
    journal.append(block(1))
    position = journal.flush()
    with pytest.raises(OSError, match="waits to be written"):
        journal.fsync_only(position)
    assert journal.flush() == position
    journal.fsync_only(position)


def test_a_partial_write_goes_on_where_it_ended(tmp_path, told):
    """A real refusal in the middle of a write: RLIMIT_FSIZE, in a child because it is for good."""
    code = """
import resource, signal, sys
from pathlib import Path
from everstep.record import Block, Journal, read_segment
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal.open(Path(sys.argv[1]), 1, None, {}, warn=print)
start = journal.flush().offset
soft = start + 500
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
journal.append(Block(1, "step", "loss", False, [1], [1.0], [1], [0]))
journal.flush()
rows = [float(i) for i in range(1000)]
journal.append(Block(1, "step", "loss", False, list(range(2, 1002)), rows, [1] * 1000, [0] * 1000))
journal.flush()
assert journal.path.stat().st_size == soft, journal.path.stat().st_size
assert read_segment(journal.path).torn and not read_segment(journal.path).problems
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.flush()
assert not read_segment(journal.path).torn
print(sum(len(stored.block.steps) for stored in read_segment(journal.path).blocks))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "File too large" in lines[0] and lines[-1] == "1001"


@pytest.mark.parametrize("failing", ["ENOSPC:journal.write:1-1000", "EIO:journal.fsync:1-1000"])
def test_rows_beyond_the_limit_are_dropped_and_declared_and_positions_stay_true(
    tmp_path, told, monkeypatch, failing
):
    monkeypatch.setattr("everstep.record.journal.PENDING_LIMIT", 2000)
    journal = Journal.open(tmp_path, 1, None, {}, warn=told.append)
    journal.append(block(0))
    journal.sync()
    step, positions = 0, {}
    for _ in range(2):  # two outages
        hazard.arm(failing)
        journal.event("kept", {})
        for _ in range(60):
            step += 1
            journal.append(block(step))
            with contextlib.suppress(OSError):
                journal.sync()
            positions[step] = journal.flush()
        journal.event("kept", {})
        hazard.arm(None)
        step += 1
        journal.append(block(step))
        positions[step] = journal.flush()
        journal.fsync_only(positions[step])
        ends = [event.data for event in RunJournal(tmp_path).events("gap")]
        assert ends[-1]["last_step"] <= step, "a checkpoint of this position knows of the gap"
    assert len(list(RunJournal(tmp_path).events("gap"))) == 2
    journal.close()
    run, rows = RunJournal(tmp_path), steps_of(tmp_path)
    gaps = [event.data for event in run.events("gap")]
    assert len(gaps) == 2 and len(told) == 4 and run.problems == []
    lost = {n for gap in gaps for n in range(gap["first_step"], gap["last_step"] + 1)}
    assert sorted([*rows, *lost]) == list(range(step + 1)) and len(lost) == sum(gap["rows"] for gap in gaps)
    assert len(list(run.events("kept"))) == 4
    for at, position in positions.items():
        kept = [entry.block.steps for entry in dict(run.parts(position))[1] if isinstance(entry, StoredBlock)]
        assert sorted(step for steps in kept for step in steps) == [
            each for each in sorted(rows) if each <= at
        ]


def test_after_a_failed_fsync_the_frames_are_written_again(journal, tmp_path, told):
    journal.append(block(1))
    journal.sync()
    journal.append(block(2))
    position = journal.flush()
    hazard.arm("EIO:journal.fsync:1")
    with pytest.raises(OSError, match="Input/output error"):
        journal.fsync_only(position)
    with pytest.raises(OSError, match="waits to be written"):
        journal.fsync_only(position)
    journal.append(block(3))
    assert points(tmp_path, journal.sync) == ["journal.write", "journal.fsync"]
    journal.fsync_only(position)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert len(told) == 2


def test_rows_are_synced_before_what_is_kept_for_writing_again_outgrows_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("everstep.record.journal.PENDING_LIMIT", 1000)
    journal = Journal.open(tmp_path, 1, None, {})
    journal.sync()

    def fill():
        for step in range(100):
            journal.append(block(step))
            journal.flush()

    assert points(tmp_path, fill).count("journal.fsync") >= 5
    journal.close()


def test_a_write_torn_anywhere_and_a_resume_leave_every_row_once(tmp_path):
    """What a kill in the middle of a write leaves: any prefix of the file beyond the last fsync."""
    (tmp_path / "whole").mkdir()
    whole = Journal.open(tmp_path / "whole", 1, None, {})
    positions = []
    for step in (1, 2, 3):
        whole.append(block(step))
        positions.append(whole.flush())
    whole.close()
    data = whole.path.read_bytes()
    for size in (*range(HEADER_SIZE), *range(positions[1].offset, len(data))):
        run_dir = tmp_path / str(size)
        (run_dir / "journal").mkdir(parents=True)
        (run_dir / "journal" / whole.path.name).write_bytes(data[:size])
        saved = 2 if size >= positions[1].offset else 0  # the step of the checkpoint
        again = Journal.open(run_dir, 2, positions[saved - 1] if saved else None, {})
        again.append(block(*range(saved + 1, 4)))
        again.close()
        assert RunJournal(run_dir).series("loss") == ([1, 2, 3], [1.0, 2.0, 3.0])
