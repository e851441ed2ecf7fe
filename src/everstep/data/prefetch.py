"""Thread that makes the next batches while the step runs (`prefetch`)."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from everstep.arguments import checked_keywords, integer
from everstep.contracts.data import Cursor, Stream
from everstep.data.adapt import as_stream, describe
from everstep.data.cursor import PassCursor, StreamWrapper
from everstep.errors import ConfigError
from everstep.state import capture, digest, encode


@checked_keywords
def prefetch(data: Any, buffer: int = 2) -> Prefetched:
    """Make a stream whose batches one thread makes ahead of time; same batches, same order.

    An error in the source is raised, as itself, at the batch where it belongs.  The position counts
    the batches handed out, not the batches that wait in the buffer.

    The source must not draw from the global random state of Python, NumPy or torch: the thread would
    mix its draws with the step's.  Give it a generator of its own.  A pass whose first batch changes that
    state is a ConfigError.

    Args:
        data: a stream, or anything `as_stream` takes, but a torch loader, which has processes of its own.
        buffer: batches that may wait, 1 or more.
    """
    buffer = integer("buffer", buffer)
    stream = as_stream(data)
    if stream.no_thread is not None:
        raise ConfigError(f"prefetch({stream!r}) would {stream.no_thread}")
    return Prefetched(stream, buffer)


class Prefetched(StreamWrapper):
    def __init__(self, stream: Stream, buffer: int) -> None:
        super().__init__(stream)
        self._buffer = buffer

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> PrefetchCursor:
        cursor = self.stream.open(purpose, pass_index, position, seed=seed)
        return PrefetchCursor(f"data {purpose!r}", cursor, self._buffer)

    def describe(self, seed: int) -> dict[str, Any]:
        return describe(self.stream, seed)


class _PreparedBatch(NamedTuple):
    batch: Any
    position: Any  # the position after the batch
    weight: float = 1.0
    done: int | None = None  # `Cursor.done` after the batch
    passed_over: Sequence[int] = ()
    error: BaseException | None = None  # the end of the pass (StopIteration) or an error of the source


class _Buffer(queue.Queue[_PreparedBatch]):
    """Batches between the two threads, at most `maxsize`."""

    stopped = False

    def stop(self) -> None:
        """Let the thread that makes them end: it puts at most one more, for which there is room then."""
        self.stopped = True
        with suppress(queue.Empty):
            while True:
                self.get_nowait()


def _prepare(cursor: Cursor) -> _PreparedBatch:
    batch, end = None, None
    try:
        try:
            batch = next(cursor)
        except StopIteration:
            end = StopIteration()
        # The position goes with its batch: the cursor runs ahead of the batches handed out.
        return _PreparedBatch(batch, cursor.position(), cursor.weight, cursor.done, cursor.passed_over(), end)
    except BaseException as error:  # any error belongs to the thread that asks for the batch
        return _PreparedBatch(None, None, error=error)


def _differs(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether random state has changed, but for what was not in use before (a framework, a device)."""
    return any(
        _differs(old, new) if isinstance(old, dict) else digest(encode(old)) != digest(encode(new))
        for name, old in before.items()
        if (new := after.get(name)) is not None and name != "device"
    )


def _produce(cursor: Cursor, buffer: _Buffer, item: _PreparedBatch) -> None:
    buffer.put(item)
    while item.error is None and not buffer.stopped:
        buffer.put(item := _prepare(cursor))


class PrefetchCursor(PassCursor):
    """Cursor of one pass; a thread makes its batches ahead."""

    def __init__(self, what: str, cursor: Cursor, buffer: int) -> None:
        self._cursor, self._buffer = cursor, _Buffer(buffer)
        self._position = cursor.position()  # before the thread starts, which moves the cursor
        self._passed_over: list[int] = []
        done, left = cursor.done or 0, cursor.remaining()
        total = None if left is None else done + left
        knows = cursor.done is not None
        super().__init__(what, self._take(), done=done, total=total, knows_done=knows, closer=self._stop)
        self.note, self.fetch_error_may_be_signal = cursor.note, cursor.fetch_error_may_be_signal
        self.weight = cursor.weight
        before, first, after = capture(), _prepare(cursor), capture()
        if first.error is not None and not isinstance(first.error, Exception):
            raise first.error  # Ctrl-C
        if _differs(before, after):
            cursor.close()
            raise ConfigError(
                f"{what} draws from the global random state, and prefetch() would do so in a thread: give it "
                "a generator of its own, or leave prefetch() out"
            )
        self._thread = threading.Thread(
            target=_produce, args=(cursor, self._buffer, first), name=f"everstep prefetch {what}", daemon=True
        )
        # The thread holds the buffer, not this cursor, so that dropping an unclosed cursor stops the thread.
        weakref.finalize(self, self._buffer.stop)
        self._thread.start()

    def _take(self) -> Iterator[Any]:
        while True:
            item = self._buffer.get()
            if item.error is not None and not isinstance(item.error, StopIteration):
                raise item.error
            self._position = item.position
            self._passed_over += item.passed_over
            if item.error is not None:
                self._handed_out = self._handed_out if item.done is None else item.done
                return
            self.weight = item.weight
            if item.done is not None:
                self._handed_out = item.done - 1  # the batch itself is one more
            yield item.batch

    def sample_numbers(self, first: int, end: int) -> Sequence[Any] | None:
        return self._cursor.sample_numbers(first, end)

    def passed_over(self) -> list[int]:
        numbers, self._passed_over = self._passed_over, []
        return numbers

    def position(self) -> Any:
        return self._position

    def _stop(self) -> None:
        self._buffer.stop()
        self._thread.join()  # before the source is closed: the thread may still be drawing from it
        self._cursor.close()
