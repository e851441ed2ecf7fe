"""The journal: which rows are valid (a model of its segments), what is durable when, what is damaged."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import hazard
from everstep.errors import ConfigError, JournalError, RunDirError, UsageError
from everstep.record import Block, Journal, Position, RunDir, RunJournal, journal_format, read_segment
from everstep.record.event_fields import DEEPEST, levels
from everstep.record.journal_format import HEADER_SIZE, StoredBlock, pack_frame, scan, segment_path
from everstep.testing import ManualClock
from tiny_runs import Tiny

INT64 = st.integers(-(2**63), 2**63 - 1)
ANY_BITS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])

EVENTS = st.one_of(
    st.tuples(st.just("rows"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("decision"), st.just(0), st.just(False)),
    st.tuples(st.just("note"), st.just(0), st.just(False)),
)
RUNS = st.lists(st.tuples(st.integers(0, 1000), st.lists(EVENTS, max_size=6)), max_size=6)


def record(journal, segment, things):
    """Append `things`; returns (position after each, its model: (segment, kind, first value))."""
    written = []
    for number, (kind, rows, wall) in enumerate(things):
        value = segment * 100.0 + number
        if kind == "rows":
            steps = list(range(number * 4, number * 4 + rows))
            journal.append(Block(1, "step", "loss", wall, steps, [value] * rows, [1] * rows, [0] * rows))
        else:
            journal.event(kind, {"value": value})
        written.append((journal.flush(), (kind, rows, wall, value)))
    return written


@settings(max_examples=60, deadline=None)
@given(runs=RUNS)
def test_the_valid_view_is_the_chain_of_parents(runs):
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        (run_dir / "journal").mkdir()
        histories = {None: []}  # position -> the things that are valid for a start from there
        decisions, total, last = [], 0, []
        for segment, (choice, things) in enumerate(runs, 1):
            parent = list(histories)[choice % len(histories)]
            journal = Journal.open(run_dir, segment, parent, {})
            last = list(histories[parent])
            histories[journal.flush()] = list(last)
            for position, thing in record(journal, segment, things):
                last.append(thing)
                total += thing[1]
                decisions += [thing[3]] * (thing[0] == "decision")
                histories[position] = list(last)
            journal.close()
        run = RunJournal(run_dir)
        assert run.problems == []
        model = [thing[3] for thing in last if thing[0] == "rows" for _ in range(thing[1])]
        assert [row.value for row in run.rows()] == model
        assert [event.data["value"] for event in run.events("note")] == [t[3] for t in last if t[0] == "note"]
        assert [event.data["value"] for event in run.events("decision")] == decisions
        assert sum(1 for _ in run.rows(valid=False)) == total
        for position, kept in histories.items():
            items = [] if position is None else [item for _, part in run.parts(position) for item in part]
            blocks = [item.block for item in items if isinstance(item, StoredBlock)]
            model = [thing[3] for thing in kept if thing[0] == "rows" for _ in range(thing[1])]
            assert [value for one in blocks for value in one.values] == model


def block(*steps, name="loss", phase="step"):
    """Each step's value is the step."""
    n = len(steps)
    return Block(1, phase, name, False, list(steps), [float(step) for step in steps], [1] * n, [0] * n)


def blocks(names):
    return [block(1, 2, 3, name=name) for name in names]


def segment(run_dir, number, parent, *blocks, ended=None):
    journal = Journal.open(run_dir, number, parent, {})
    positions = [journal.flush()]
    for one in blocks:
        journal.append(one)
        positions.append(journal.flush())
    if ended is not None:
        journal.event("ended", ended)
    journal.close()
    return positions


def test_a_path_that_is_no_run_names_the_nearest(tmp_path):
    for name in ("digits", "moons"):
        RunDir.open(tmp_path / name)
    for name, said in {
        "digitz": r"digitz is not a run: it does not exist; did you mean '\S+/digits'",
        "": r"it has neither run.json nor journal/; .*/digits",
    }.items():
        with pytest.raises(RunDirError, match=said):
            RunJournal(tmp_path / name)


def test_a_start_without_a_flush_supersedes_nothing_and_the_newest_tells_the_end(tmp_path):
    positions = segment(tmp_path, 1, None, block(1, 2), ended={"reason": "max_epoch"})
    run = RunJournal(tmp_path)
    assert run.ended() == run.status().ended == {"reason": "max_epoch"}
    segment_path(tmp_path, 2).touch()
    run = RunJournal(tmp_path)
    assert run.series("loss")[0] == [1, 2] and run.problems == []
    assert [one.started for one in run.segments()] == [True, False]
    segment(tmp_path, 3, positions[1], block(3))
    assert RunJournal(tmp_path).ended() is None


@pytest.mark.parametrize(("parent", "problem"), [
    (Position(1, 10**6), "continues segment-0001.evj from 1000000, but that file ends at"),
    (Position(9, 50), "continues segment-0009.evj, which is missing"),
    (Position(2, 50), "continues segment-0002.evj, which is missing"),
])  # fmt: skip
def test_a_broken_chain_is_noticed(tmp_path, parent, problem):
    segment(tmp_path, 1, None, block(1))
    segment(tmp_path, 2, parent, block(2))
    run = RunJournal(tmp_path)
    assert list(run.rows())[-1].step == 2 and problem in run.problems[0]


def test_a_series_is_found_by_name_and_phase(tmp_path):
    rows = [block(1), block(1, name="valid_loss", phase="tail"), block(2, name="a/b"), block(3)]
    segment(tmp_path, 1, None, *rows, block(4, name="a/b", phase="eval/valid"))
    run = RunJournal(tmp_path)
    assert run.series("loss") == ([1, 3], [1.0, 3.0])
    assert run.series("valid_loss") == run.series("valid_loss", "tail") == ([1], [1.0])  # its only phase
    assert run.series("step/a/b") == run.series("a/b", "step") == run.series("a/b") == ([2], [2.0])
    assert run.series("eval/valid/a/b")[0] == [4]
    for asked, words in {
        ("loss", "steps"): r"no rows in phase 'steps'; did you mean 'step'",
        ("valid_los", "tail"): r"no metric 'valid_los'; did you mean 'valid_loss'",
        ("valid_loss", "step"): r"no rows in phase 'step'; known: tail$",
    }.items():
        with pytest.raises(ConfigError, match=words):
            run.series(*asked)


def test_a_segment_under_another_number_counts_for_nothing(tmp_path):
    segment(tmp_path, 1, None, block(1))
    segment(tmp_path, 2, None, block(2))
    segment_path(tmp_path, 1).rename(segment_path(tmp_path, 3))
    run = RunJournal(tmp_path)
    assert [row.step for row in run.rows()] == [2]
    (told,) = run.problems
    assert told.startswith("segment-0003.evj: its header says segment 1; was it renamed?")
    segment_path(tmp_path, 3).rename(segment_path(tmp_path, 1))
    assert RunJournal(tmp_path).problems == []


def test_a_segment_of_another_run_counts_for_nothing(tmp_path):
    """It has the right number: only its first event says whose it is."""
    runs = [RunDir.open(tmp_path / name, seed=1) for name in ("mine", "other")]
    for run in runs:
        segment(run.path, 1, None, block(1, 2))
    mine, other = (segment_path(run.path, 1) for run in runs)
    own = mine.read_bytes()
    mine.write_bytes(other.read_bytes())
    read = RunJournal(runs[0].path)
    assert list(read.rows()) == [] and read.segments()[0].started is False
    said = f"the run {runs[1].id} has written it, and this is {runs[0].id}; no row of it is read"
    assert read.problems == [f"segment-0001.evj: {said}"]
    (runs[0].path / "run.json").unlink()
    assert len(list(RunJournal(runs[0].path).rows())) == 2, "a run that has lost its name refuses nothing"
    mine.write_bytes(own)
    assert RunJournal(runs[0].path).problems == []


ROWS = st.lists(st.tuples(INT64, ANY_BITS, INT64, INT64), min_size=1, max_size=30)
NAMES = st.text(st.characters(), max_size=50)


@given(rows=ROWS, epoch=INT64, phase=st.text(), name=NAMES, wall=st.booleans())
def test_every_block_comes_back_bit_for_bit(rows, epoch, phase, name, wall):
    steps, values, counts, seqs = (list(column) for column in zip(*rows, strict=True))
    given = Block(epoch, phase, name, wall, steps, values, counts, seqs)
    (frame,) = scan(pack_frame(journal_format.METRICS, 2**40, journal_format.pack_block(given, 1.5)), 0)
    assert (frame.kind, frame.offset) == (journal_format.METRICS, 2**40)
    back = journal_format.unpack_block(frame.payload)
    assert journal_format.float_bits(back.values) == journal_format.float_bits(values)
    assert back._replace(values=[]) == given._replace(values=[])


@pytest.mark.parametrize("case", [(1, 1, 10), (3, 1, 10), (0, 1, 12), (1, 0, 11), (0, 0, 13)])
def test_a_scalar_takes_few_bytes(tmp_path, case):
    (steps, counts, most), n = case, 200
    strides = [i * steps or i * i for i in range(n)]
    columns = (strides, [math.pi] * n, [counts or i % 7 for i in range(n)], [0] * n)
    segment(tmp_path, 1, None, *(Block(3, "step", f"metric_{k}", False, *columns) for k in range(10)))
    assert (segment_path(tmp_path, 1).stat().st_size - 200) / (10 * n) <= most


def test_a_torn_tail_costs_only_the_last_frame_wherever_it_is_torn(tmp_path):
    positions, path = segment(tmp_path, 1, None, *blocks("ab")), segment_path(tmp_path, 1)
    whole = path.read_bytes()
    for size in range(positions[1].offset, len(whole)):
        path.write_bytes(whole[:size])
        read = read_segment(path)
        assert [stored.block.name for stored in read.blocks] == ["a"]
        torn = size - positions[1].offset
        words = f"segment-0001.evj: the last {torn} bytes, from {positions[1].offset} on, are torn; they "
        assert (read.problems, read.torn) == ([], f"{words}are dropped" if torn else "")
    for size in range(HEADER_SIZE):  # torn in its start, it has not started
        path.write_bytes(whole[:size])
        read = read_segment(path)
        assert (read.started, read.events, read.blocks) == (False, [], [])
        assert bool(read.problems) == bool(size)


def test_a_flipped_byte_costs_one_frame_is_named_and_the_rest_is_read(tmp_path):
    positions, path = segment(tmp_path, 8, Position(7, 99), *blocks("abc")), segment_path(tmp_path, 8)
    whole = bytearray(path.read_bytes())
    starts = [0, HEADER_SIZE, *(position.offset for position in positions)]
    for at in range(len(whole)):
        whole[at] ^= 0x40
        path.write_bytes(whole)
        read = read_segment(path)
        whole[at] ^= 0x40
        hit = max(i for i, start in enumerate(starts[:-1]) if start <= at)
        names = [stored.block.name for stored in read.blocks]
        assert names == [name for i, name in enumerate("abc", 2) if i != hit]
        assert (read.started, read.parent) == (True, Position(7, 99))  # kept twice: header and event
        (problem,) = [*read.problems, *filter(None, [read.torn])]
        assert str(starts[hit]) in problem


def test_another_format_is_refused_naming_both_versions(tmp_path, monkeypatch):
    for number, other in enumerate((1, 3), 1):
        monkeypatch.setattr("everstep.record.journal_format.VERSION", other)
        segment(tmp_path, number, None)
        monkeypatch.undo()
        with pytest.raises(JournalError, match=f"journal format {other}, this everstep reads only 2; use"):
            read_segment(segment_path(tmp_path, number))


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
    assert journal.path.read_bytes() == b"" and journal.flush() == (1, journal.path.stat().st_size)
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


def test_fsync_only_writes_no_later_row_and_a_decision_that_is_not_durable_is_an_error(journal, tmp_path):
    journal.sync()
    journal.append(block(1))
    position = journal.flush()
    journal.append(block(2))
    assert points(tmp_path, lambda: journal.fsync_only(position)) == ["journal.fsync"]
    assert steps_of(tmp_path) == [1]
    for point in ("write", "fsync"):
        hazard.arm(f"EIO:journal.{point}:1")
        with pytest.raises(OSError, match=r"Input/output|waits to be"):
            journal.decide({"skip": 3})


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_refusing_disk_loses_nothing_and_is_told_once(journal, tmp_path, told, error):
    journal.append(block(1))
    written = journal.flush()
    hazard.arm(f"{error}:journal.write:1-3")
    for step in (2, 3, 4):
        journal.append(block(step))
        position = journal.flush()
        journal.fsync_only(written)  # says nothing of what waits
    with pytest.raises(OSError, match="waits to be written"):
        journal.fsync_only(position)
    assert steps_of(tmp_path) == [1]
    assert len(told) == 1 and "training continues" in told[0]
    journal.append(block(5))
    position = journal.flush()
    assert position.offset == journal.path.stat().st_size and steps_of(tmp_path) == [1, 2, 3, 4, 5]
    journal.fsync_only(position)
    assert len(told) == 2 and "can be written again" in told[1]


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
def test_rows_beyond_the_limit_are_dropped_and_told(tmp_path, told, monkeypatch, failing):
    """And positions stay true."""
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
        assert sorted(step for steps in kept for step in steps) == [n for n in sorted(rows) if n <= at]


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
    assert steps_of(tmp_path) == [1, 2, 3] and len(told) == 2


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
    positions = segment(tmp_path / "whole", 1, None, *map(block, (1, 2, 3)))[1:]
    path = segment_path(tmp_path / "whole", 1)
    data = path.read_bytes()
    for size in (*range(HEADER_SIZE), *range(positions[1].offset, len(data))):
        run_dir = tmp_path / str(size)
        (run_dir / "journal").mkdir(parents=True)
        (run_dir / "journal" / path.name).write_bytes(data[:size])
        saved = 2 if size >= positions[1].offset else 0  # the step of the checkpoint
        segment(run_dir, 2, positions[saved - 1] if saved else None, block(*range(saved + 1, 4)))
        assert RunJournal(run_dir).series("loss") == ([1, 2, 3], [1.0, 2.0, 3.0])


ROLLBACK = {"what": "rollback", "number": 1, "step": 3, "reason": "r", "first": 2, "batches": []}
ROLLBACK |= {"checkpoint": "step-00000001"}
BATCH = {"stream": "train", "pass_index": 0, "batch_index": 1, "samples": [1, 2]}

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("decision", {**ROLLBACK, "step": "Infinity"}, "'step' is 'Infinity'"),
    ("decision", {**ROLLBACK, "batches": [{**BATCH, "batch_index": "x"}]}, "'batches' is [{'stream'"),
    ("decision", {"what": "rollback"}, "'number' is missing"),
    ("decision", {"what": "accepted", "step": True}, "'step' is True"),
    ("verified", {"steps": "e400", "report": "resume verified"}, "'steps' is 'e400'"),
    ("verified", {"report": ["x"]}, "'report' is ['x']"),
    ("times", {"seconds": float("nan")}, "'seconds' is nan"),
    ("summary", {"name": ["x"], "step": 1, "text": "x"}, "'name' is ['x']"),
    ("summary", {"name": "x", "step": 1, "image": {"file": ["x"]}}, "'image' is {'file'"),
    ("checkpoint", {"name": "step-00000001", "bytes": 10**30}, "'bytes' is 1000000"),
    ("closed", {"status": "constructor"}, "'status' is 'constructor'"),
    ("segment", {"parent": None, "facts": {"resumed_from": ["x"]}}, "'facts' is {'resumed_from'"),
]


def test_events_of_wrong_types_are_told_and_skipped(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run")
    journal = Journal.open(run.path, 1, None, {"resumed_from": None})
    for kind, data, _ in WRONG:
        journal.event(kind, data)
    journal.event("ended", {"step": 1, "epoch": 0})
    journal.close()
    segment = read_segment(journal.path)
    assert [event.kind for event in segment.events] == ["segment", "ended"]
    for problem, (kind, _, told) in zip(segment.problems, WRONG, strict=True):
        assert f"is not an event of kind {kind!r} ({told}" in problem
    read = RunJournal(run.path)
    assert (read.rollbacks(), read.divergences(), read.problems) == ([], [], segment.problems)


def test_further_fields_and_kinds_are_kept(tmp_path: Path) -> None:
    journal = Journal.open(RunDir.open(tmp_path / "run").path, 1, None, {})
    journal.event("decision", {**ROLLBACK, "batches": [{**BATCH, "why": "later"}], "segment": 9, "also": [1]})
    journal.event("my own", {"step": "any"})
    journal.close()
    (rollback,) = RunJournal(tmp_path / "run").rollbacks()
    assert (rollback.segment, rollback.batches[0].batch_index) == (1, 1)
    assert read_segment(journal.path).problems == []


def test_a_service_cannot_write_what_nobody_reads(tmp_path: Path) -> None:
    def noted(loop: Any, step: int) -> None:
        loop.note("seen", {"step": "any"})
        with pytest.raises(ConfigError, match="'step' is 'any'; give another kind"):
            loop.note("diverged", {"step": "any"})

    Tiny(tmp_path / "run", max_epoch=1).train(noted)
    assert RunJournal(tmp_path / "run").problems == []


def test_deep_values_are_refused_and_not_read(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(DEEPEST):
        deep = {"a": deep}
    assert levels(deep) == DEEPEST
    journal = Journal.open(RunDir.open(tmp_path / "run").path, 1, None, {})
    with pytest.raises(JournalError, match="more than 200 levels"):
        journal.event("seen", {"config": deep})
    journal.event("seen", {"config": 10})
    journal.close()
    assert read_segment(journal.path).problems == []
    # as a later version, or a stranger, may have written it
    payload = json.dumps({"kind": "seen", "time": 1.0, "wall": True, "data": {"config": deep}}).encode()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + pack_frame(journal_format.EVENT, len(whole), payload))
    (problem,) = read_segment(journal.path).problems
    assert "is not an event" in problem
