"""The bytes of a journal file: what goes in comes out, whatever is torn or damaged around it."""

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import JournalError
from everstep.record import Block, Journal, Position, RunJournal, read_segment
from everstep.record.journal_format import (
    HEADER_SIZE,
    METRICS,
    float_bits,
    pack_block,
    pack_frame,
    scan,
    unpack_block,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
ANY_BITS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])


def block(name="loss", steps=(1, 2, 3), phase="step", wall=False):
    n = len(steps)
    return Block(1, phase, name, wall, list(steps), [0.5 * s for s in steps], [1] * n, [0] * n)


def write(run_dir, blocks, parent=None, segment=1):
    """A segment with these blocks, flushed one by one; the positions after the start and each of them."""
    journal = Journal.open(run_dir, segment, parent, {"seed": 1})
    positions = [journal.flush()]
    for one in blocks:
        journal.append(one)
        positions.append(journal.flush())
    journal.close()
    return journal.path, positions


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
    path, _ = write(tmp_path, [Block(3, "step", f"metric_{k}", False, *columns) for k in range(10)])
    assert (path.stat().st_size - 200) / (10 * n) <= most


def test_a_torn_tail_costs_only_the_last_frame_wherever_it_is_torn(tmp_path):
    path, positions = write(tmp_path, [block("a"), block("b")])
    whole = path.read_bytes()
    for size in range(positions[1].offset, len(whole)):
        path.write_bytes(whole[:size])
        read = read_segment(path)
        assert [stored.block.name for stored in read.blocks] == ["a"]
        torn = size - positions[1].offset
        words = f"segment-0001.evj: the last {torn} bytes, from {positions[1].offset} on, are torn; they "
        assert (read.problems, read.torn) == ([], f"{words}are dropped" if torn else "")


def test_a_file_torn_in_its_start_has_not_started(tmp_path):
    path, _ = write(tmp_path, [])
    whole = path.read_bytes()
    for size in range(HEADER_SIZE):
        path.write_bytes(whole[:size])
        read = read_segment(path)
        assert (read.started, read.events, read.blocks) == (False, [], [])
        assert bool(read.problems) == bool(size)


def test_a_flipped_byte_costs_one_frame_is_named_and_the_rest_is_read(tmp_path):
    path, positions = write(tmp_path, [block("a"), block("b"), block("c")], parent=Position(7, 99), segment=8)
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


def test_a_newer_format_is_refused_naming_both_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("everstep.record.journal_format.VERSION", 3)
    path, _ = write(tmp_path, [])
    monkeypatch.undo()
    with pytest.raises(JournalError, match="has journal format 3, this everstep reads up to 1; upgrade"):
        read_segment(path)


def test_a_journal_of_version_1_is_read_for_ever():
    """Written by the first everstep and committed: never write this fixture again."""
    run = RunJournal(Path(__file__).parent / "fixtures" / "journal-version-1")
    rows = [(row.segment, row.epoch, row.step, row.phase, row.name, row.seq, row.count) for row in run.rows()]
    assert rows == [
        (1, 1, 1, "step", "loss", 0, 1),
        (1, 1, 2, "step", "loss", 0, 1),
        (1, 1, 3, "step", "loss", 0, 1),
        (1, 1, 3, "tail", "valid_loss", 0, 5),
        (1, 1, 3, "tail", "valid_loss", 1, 7),
        (2, 2, 4, "step", "loss", 0, 64),
    ]
    assert [repr(row.value) for row in run.rows()] == ["0.5", "0.25", "nan", "2.0", "1.0", "0.125"]
    assert run.status() == (2, 2, 4, 6, 2, {"reason": "max_step"})
    assert run.problems == []
