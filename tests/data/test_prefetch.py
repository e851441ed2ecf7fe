"""`prefetch`: the same batches, made ahead by a thread."""

import gc
import threading

import numpy as np
import pytest

from everstep.data import arrays, as_stream, prefetch, replay, stateful
from everstep.errors import NotResumableError
from everstep.testing.checks import check_stream
from waiting import PATIENCE

X = np.arange(11)


def test_laws():
    check_stream(lambda: prefetch(arrays(X, batch_size=3, shuffle=True), buffer=2))
    check_stream(lambda: prefetch(replay(range(4)), buffer=9))


def test_the_error_is_the_original_at_its_batch():
    error = KeyError("disk")

    def broken():
        yield 1
        yield 2
        raise error

    cursor = prefetch(broken()).open("train", 0, seed=0)
    assert [next(cursor), next(cursor)] == [1, 2]
    with pytest.raises(KeyError) as caught:
        next(cursor)
    assert caught.value is error
    assert not _threads()


def test_refuses_a_position_that_the_source_refuses():
    class Plain:
        def __iter__(self):
            return iter(range(5))

    cursor = prefetch(stateful(Plain())).open("train", 0, seed=0)
    next(cursor)
    with pytest.raises(NotResumableError, match="neither state_dict"):
        cursor.position()
    cursor.close()


def _threads():
    return [thread for thread in threading.enumerate() if "everstep prefetch" in thread.name]


def test_no_thread_is_left():
    cursor = prefetch(as_stream(range(100)), buffer=1).open("train", 0, seed=0)
    next(cursor)
    assert len(_threads()) == 1
    cursor.close()
    assert not _threads()
    cursor = prefetch(as_stream(range(100)), buffer=1).open("train", 0, seed=0)
    thread = _threads()[0]
    del cursor
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
