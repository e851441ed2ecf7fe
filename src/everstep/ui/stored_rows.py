"""Rows of metrics as arrays, from the index.

It holds the values of a block as packed numbers, so reading them takes no time per row; and what was read is
kept: later calls read what is new.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, select, tuple_

from everstep.index.database import Database
from everstep.index.run_queries import one_of
from everstep.index.sql_tables import UnknownContentError, blocks, segments, series
from everstep.record.journal_format import block_columns, is_block
from everstep.record.segment_file import StoredBlock

LARGEST = 512 << 20
"""Most bytes of rows that are kept."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Rows(NamedTuple):
    """Rows of one metric in one phase, as they were written, superseded rows included.

    Attributes:
        steps: the step of each row.
        values: float64.
        times: seconds since 1970 at which each row was measured, interpolated between the times at which
            blocks were written.
        valid: whether the row belongs to the run as it is now.
        segments: number of the start that wrote each row.
    """

    steps: Integers
    values: Floats
    times: Floats
    valid: NDArray[np.bool_]
    segments: Integers


class Start(NamedTuple):
    """Start of a run, as the index has it; `size`: bytes of its file that are in the index."""

    number: int
    size: int
    valid_to: int
    started: float


class StoredRows:
    """Reader of rows that keeps what it has read.  May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: OrderedDict[tuple[str, str, str], _Blocks] = OrderedDict()

    def read(
        self,
        database: Database,
        connection: Connection,
        runs: Sequence[Mapping[str, Any]],
        phase: str,
        name: str,
    ) -> list[Rows]:
        """Return the rows of a metric of each run; empty for a run without the metric.

        Args:
            runs: rows of the table `runs`.
        """
        starts = _starts(connection, [run["id"] for run in runs])
        with self._lock:
            found = {run["id"]: self._kept((database.name, run["name"], f"{phase}/{name}")) for run in runs}
            _read_on(connection, found, starts, phase, name)
            return [_rows(found[run["id"]].pieces, starts[run["id"]]) for run in runs]

    def _kept(self, key: tuple[str, str, str]) -> _Blocks:
        self._read[key] = found = self._read.pop(key, None) or _Blocks()
        while len(self._read) > 1 and sum(one.bytes for one in self._read.values()) > LARGEST:
            self._read.popitem(last=False)
        return found


class _Piece(NamedTuple):
    """Rows of a segment, and its blocks: a run that was looked at while it trained has a block each second.

    Attributes:
        offsets: of the block of each row.
        counts: number of rows of each block.
        ends: when each block was written.
    """

    segment: int
    offsets: Integers
    steps: Integers
    values: Floats
    counts: Integers
    ends: Floats


class _Blocks:
    """Blocks of a metric in the index, those up to `place`."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.bytes = 0
        self.series: int | None = None
        self.place = (0, 0)
        """Segment and offset of the newest block that was read."""
        self.sizes: dict[int, int] = {}
        """Bytes of each segment that the index had at that time."""

    def add(self, segment: int, found: list[StoredBlock]) -> None:
        """Add blocks of a segment; those of a segment are one piece."""
        same = self.pieces[-1:] if self.pieces and self.pieces[-1].segment == segment else []
        self.pieces[len(self.pieces) - len(same) :] = [_joined([*same, _unpacked(segment, found)])]
        self.place = segment, found[-1].offset
        self.bytes += sum(2 * len(one.payload) for one in found)


def _read_on(
    connection: Connection,
    known: dict[int, _Blocks],
    starts: dict[int, list[Start]],
    phase: str,
    name: str,
) -> None:
    """Read the blocks of a metric that are new in the index, for all runs at once."""
    mine = one_of(connection, series.c.run, known) & (series.c.phase == phase) & (series.c.name == name)
    keys = {run: key for run, key in connection.execute(select(series.c.run, series.c.id).where(mine))}
    sizes = {run: {start.number: start.size for start in starts[run]} for run in known}
    grown: dict[tuple[int, int], dict[int, _Blocks]] = {}
    for run, one in known.items():
        if one.series != keys.get(run) or any(sizes[run].get(n, 0) < size for n, size in one.sizes.items()):
            one.__init__()  # type: ignore[misc]  # the index was made again
            one.series = keys.get(run)
        if one.series is not None and one.sizes != sizes[run]:
            grown.setdefault(one.place, {})[one.series] = one
    for place, group in grown.items():
        after = tuple_(blocks.c.segment, blocks.c.offset) > tuple_(*place)
        chosen = select(blocks).where(one_of(connection, blocks.c.series, group), after)
        order = blocks.c.series, blocks.c.segment, blocks.c.offset
        rows = connection.execute(chosen.order_by(*order)).cursor.fetchall()
        for (key, number), found in groupby(rows, itemgetter(0, 1)):
            group[key].add(number, [_stored(offset, packed) for _, _, offset, packed in found])
    for run, one in known.items():
        one.sizes = sizes[run]


def _stored(offset: int, packed: Any) -> StoredBlock:
    """Return a block of the index."""
    if not isinstance(packed, bytes) or not is_block(memoryview(packed)):
        raise UnknownContentError(f"a block at {offset} holds no values")
    return StoredBlock(offset, memoryview(packed))


def _unpacked(segment: int, blocks: list[StoredBlock]) -> _Piece:
    steps, values = zip(*(block_columns(stored.payload) for stored in blocks), strict=True)
    counts = np.array([len(one) for one in steps])
    offsets = np.repeat([stored.offset for stored in blocks], counts)
    ends = np.array([stored.time for stored in blocks])
    return _Piece(segment, offsets, np.concatenate(steps), np.concatenate(values), counts, ends)


def _joined(pieces: list[_Piece]) -> _Piece:
    """Join pieces of one segment."""
    columns = zip(*(piece[1:] for piece in pieces), strict=True)
    return _Piece(pieces[0].segment, *(np.concatenate(column) for column in columns))


def _starts(connection: Connection, runs: list[int]) -> dict[int, list[Start]]:
    """Return run -> its starts, oldest first."""
    columns = segments.c.number, segments.c.size, segments.c.valid_to, segments.c.started, segments.c.last
    chosen = select(segments.c.run, *columns).where(one_of(connection, segments.c.run, runs))
    found: dict[int, list[Start]] = {run: [] for run in runs}
    for run, number, size, valid_to, started, last in connection.execute(chosen.order_by(segments.c.number)):
        found[run].append(Start(number, size, valid_to, started or last or 0.0))
    return found


def _rows(pieces: list[_Piece], starts: list[Start]) -> Rows:
    """Join pieces, and find out which rows are valid and when they were measured."""
    if not pieces:
        none = np.empty(0, np.int64)
        return Rows(none, np.empty(0), np.empty(0), np.empty(0, np.bool_), none)
    by_number = {start.number: start for start in starts}
    if any(piece.segment not in by_number for piece in pieces):
        raise UnknownContentError("a block belongs to no start")
    times = [_times(piece, by_number[piece.segment]) for piece in pieces]
    valid = [piece.offsets < by_number[piece.segment].valid_to for piece in pieces]
    numbers = [np.full(len(piece.steps), piece.segment) for piece in pieces]
    return Rows(
        np.concatenate([piece.steps for piece in pieces]),
        np.concatenate([piece.values for piece in pieces]),
        np.concatenate(times),
        np.concatenate(valid),
        np.concatenate(numbers),
    )


def _times(piece: _Piece, start: Start) -> Floats:
    """Interpolate when each row was measured: a block's rows came since the block before."""
    counts, ends = piece.counts, piece.ends
    begins = np.minimum(np.append(start.started, ends[:-1]), ends)
    place = np.arange(1, len(piece.steps) + 1) - np.repeat(np.cumsum(counts) - counts, counts)
    times: Floats = np.repeat(begins, counts) + np.repeat((ends - begins) / counts, counts) * place
    return times
