"""The reader: which rows are valid (a model of the chain of segments), and whatever is torn or damaged."""

import math
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import ConfigError, JournalError, RunDirError
from everstep.record import Block, Journal, Position, RunDir, RunJournal, read_segment
from everstep.record.journal_format import (
    HEADER_SIZE,
    METRICS,
    StoredBlock,
    float_bits,
    pack_block,
    pack_frame,
    scan,
    segment_path,
    unpack_block,
)

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


def block(*steps, value=0.0, name="loss", phase="step", epoch=1):
    n = len(steps)
    return Block(epoch, phase, name, False, list(steps), [value] * n, [1] * n, [0] * n)


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
    with pytest.raises(
        RunDirError, match=r"digitz is not a run: it does not exist; did you mean '\S+/digits'"
    ):
        RunJournal(tmp_path / "digitz")
    with pytest.raises(RunDirError, match=r"it has neither run.json nor journal/; .*/digits"):
        RunJournal(tmp_path)


def test_a_start_killed_before_its_first_flush_supersedes_nothing(tmp_path):
    segment(tmp_path, 1, None, block(1, 2))
    segment_path(tmp_path, 2).touch()
    run = RunJournal(tmp_path)
    assert run.series("loss")[0] == [1, 2]
    assert [one.started for one in run.segments()] == [True, False]
    assert run.problems == []


def test_a_run_has_ended_only_if_its_newest_start_did(tmp_path):
    positions = segment(tmp_path, 1, None, block(1), ended={"reason": "max_epoch"})
    run = RunJournal(tmp_path)
    assert run.ended() == {"reason": "max_epoch"}
    assert run.status().ended == {"reason": "max_epoch"}
    segment(tmp_path, 2, positions[1], block(2))
    assert RunJournal(tmp_path).ended() is None


@pytest.mark.parametrize(
    ("parent", "problem"),
    [
        (Position(1, 10**6), "continues segment-0001.evj from 1000000, but that file ends at"),
        (Position(9, 50), "continues segment-0009.evj, which is missing"),
        (Position(2, 50), "continues segment-0002.evj, which is missing"),
    ],
)
def test_a_broken_chain_is_noticed(tmp_path, parent, problem):
    segment(tmp_path, 1, None, block(1))
    segment(tmp_path, 2, parent, block(2))
    run = RunJournal(tmp_path)
    assert list(run.rows())[-1].step == 2
    assert problem in run.problems[0]


def test_a_series_is_found_by_name_and_phase(tmp_path):
    rows = [block(1), block(1, name="valid_loss", phase="tail"), block(2, name="a/b"), block(3)]
    segment(tmp_path, 1, None, *rows, block(4, name="a/b", phase="eval/valid"))
    run = RunJournal(tmp_path)
    assert run.series("loss") == ([1, 3], [0.0, 0.0])
    assert run.series("valid_loss") == run.series("valid_loss", "tail") == ([1], [0.0])  # its only phase
    assert run.series("step/a/b") == run.series("a/b", "step") == run.series("a/b") == ([2], [0.0])
    assert run.series("eval/valid/a/b")[0] == [4]
    for asked, words in {
        ("loss", "steps"): r"no rows in phase 'steps'; did you mean 'step'",
        ("valid_los", "tail"): r"no metric 'valid_los'; did you mean 'valid_loss'",
        ("valid_loss", "step"): r"no rows in phase 'step'; known: tail$",
    }.items():
        with pytest.raises(ConfigError, match=words):
            run.series(*asked)


def test_a_segment_under_another_number_counts_for_nothing(tmp_path):
    (tmp_path / "journal").mkdir()
    for segment in (1, 2):
        journal = Journal.open(tmp_path, segment, None, {})
        record(journal, segment, [("rows", 2, False)])
        journal.close()
    segment_path(tmp_path, 1).rename(segment_path(tmp_path, 3))
    run = RunJournal(tmp_path)
    assert [row.value for row in run.rows()] == [200.0, 200.0]
    (told,) = run.problems
    assert told.startswith("segment-0003.evj: its header says segment 1; was it renamed?")
    segment_path(tmp_path, 3).rename(segment_path(tmp_path, 1))
    assert RunJournal(tmp_path).problems == []


def test_a_segment_of_another_run_counts_for_nothing(tmp_path):
    """It has the right number: only its first event says whose it is."""
    runs = [RunDir.open(tmp_path / name, seed=1) for name in ("mine", "other")]
    for value, run in enumerate(runs):
        journal = Journal.open(run.path, 1, None, {})
        record(journal, value, [("rows", 2, False)])
        journal.close()
    mine, other = (segment_path(run.path, 1) for run in runs)
    own = mine.read_bytes()
    mine.write_bytes(other.read_bytes())
    read = RunJournal(runs[0].path)
    assert list(read.rows()) == [] and read.segments()[0].started is False
    (told,) = read.problems
    said = f"the run {runs[1].id} has written it, and this is {runs[0].id}; no row of it is read"
    assert told == f"segment-0001.evj: {said}"
    (runs[0].path / "run.json").unlink()
    assert len(list(RunJournal(runs[0].path).rows())) == 2, "a run that has lost its name refuses nothing"
    mine.write_bytes(own)
    assert RunJournal(runs[0].path).problems == []


@given(
    rows=st.lists(st.tuples(INT64, ANY_BITS, INT64, INT64), min_size=1, max_size=30),
    epoch=INT64,
    phase=st.text(),
    name=st.text(st.characters(), max_size=50),
    wall=st.booleans(),
)
def test_every_block_comes_back_bit_for_bit(rows, epoch, phase, name, wall):
    steps, values, counts, seqs = (list(column) for column in zip(*rows, strict=True))
    given = Block(epoch, phase, name, wall, steps, values, counts, seqs)
    (frame,) = scan(pack_frame(METRICS, 2**40, pack_block(given, 1.5)), 0)
    assert (frame.kind, frame.offset) == (METRICS, 2**40)
    back = unpack_block(frame.payload)
    assert float_bits(back.values) == float_bits(values)
    assert back._replace(values=[]) == given._replace(values=[])


@pytest.mark.parametrize(
    ("steps", "counts", "most"), [(1, 1, 10), (3, 1, 10), (0, 1, 12), (1, 0, 11), (0, 0, 13)]
)
def test_a_scalar_takes_few_bytes(tmp_path, steps, counts, most):
    n = 200
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


def test_a_file_torn_in_its_start_has_not_started(tmp_path):
    segment(tmp_path, 1, None)
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    for size in range(HEADER_SIZE):
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


@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_refused_naming_both_versions(tmp_path, monkeypatch, other):
    monkeypatch.setattr("everstep.record.journal_format.VERSION", other)
    segment(tmp_path, 1, None)
    monkeypatch.undo()
    with pytest.raises(JournalError, match=f"has journal format {other}, this everstep reads only 2; use"):
        read_segment(segment_path(tmp_path, 1))
