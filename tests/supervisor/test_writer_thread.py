"""The background thread: one job at a time, errors where they belong, no thread left."""

from __future__ import annotations

import errno
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.errors import NoCheckpointError, NonFiniteError, RunDirError, UsageError
from everstep.supervisor.saving.saver import WriterThread
from tiny_runs import Tiny
from waiting import PATIENCE


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(said: list[str]) -> Iterator[WriterThread]:
    writer = WriterThread(said.append)
    yield writer
    writer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "everstep-writer"]


def ignore(value: object) -> None:
    pass


def raising(error: BaseException) -> None:
    raise error


def test_a_job_runs_in_the_background_and_its_result_arrives(writer: WriterThread) -> None:
    results: list[Any] = []
    writer.submit(lambda: 6 * 7, lambda n: results.extend((n, threading.current_thread())))
    writer.wait()
    assert results[0] == 42 and results[1] is not threading.main_thread() and writer.job is None


def test_submit_waits_for_the_running_job(writer: WriterThread) -> None:
    order: list[str] = []
    go = threading.Event()
    writer.submit(lambda: go.wait(PATIENCE), lambda _: order.append("first"))
    assert writer.job == 1
    threading.Timer(0.01, go.set).start()
    writer.submit(lambda: order.append("second"), ignore)
    writer.wait()
    assert order == ["first", "second"]


def test_a_disk_error_is_a_failed_save_and_the_next_one_works(writer: WriterThread, said: list[str]) -> None:
    names = ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "ENOENT")
    for error in (*(OSError(getattr(errno, name), name) for name in names), MemoryError()):
        failures, results = list[BaseException](), list[int]()
        writer.submit(partial(raising, error), ignore, failures.append)
        writer.submit(partial(raising, error), ignore)  # said where nobody else takes it
        writer.submit(lambda: 1, results.append)
        writer.wait()
        assert failures == [error] and results == [1]
        assert said == [f"a save failed, training continues ({type(error).__name__}: {error})"]
        said.clear()


OTHERS = [ValueError("bug"), NonFiniteError("w"), NoCheckpointError("x"), RunDirError("y")]
OTHERS += [OSError(errno.EBADF, "bug"), KeyboardInterrupt()]  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["poll", "wait", "submit", "close"])
def test_any_other_error_is_raised_once_with_its_traceback(said: list[str], how: str) -> None:
    for error in OTHERS:
        failures: list[BaseException] = []

        def a_line_of_the_job(error: BaseException = error) -> None:
            raise error

        writer = WriterThread(said.append)
        writer.submit(a_line_of_the_job, ignore, failures.append)
        writer.wait_idle()
        act = partial(writer.submit, lambda: None, ignore) if how == "submit" else getattr(writer, how)
        with pytest.raises(type(error)) as caught:
            act()
        assert caught.value is error and not failures
        assert "a_line_of_the_job" in "".join(traceback.format_exception(error))
        writer.poll()
        writer.close()


def test_an_error_in_done_is_no_failed_save(writer: WriterThread) -> None:
    writer.submit(lambda: 1, lambda _: raising(OSError(errno.ENOSPC, "of someone else")))
    with pytest.raises(OSError, match="of someone else"):
        writer.wait()


def test_close_finishes_the_running_job(writer: WriterThread) -> None:
    go, results = threading.Event(), []
    writer.submit(lambda: go.wait(PATIENCE), results.append)
    threading.Timer(0.01, go.set).start()
    writer.close()
    assert results == [True]
    writer.close()
    with pytest.raises(UsageError, match="closed"):
        writer.submit(lambda: 1, ignore)


def test_no_memory_for_the_copy_of_the_state_is_a_failed_save(tmp_path: Path) -> None:
    class Scarce:
        at_step = 0

        def state_dict(self) -> dict[str, int]:
            if self.at_step in (1, 2):
                raise MemoryError
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    saves = everstep.Checkpoints(everstep.Every(steps=1), keep_last=None)
    run = Tiny(tmp_path, max_epoch=1, services=[saves], also={"scarce": Scarce()})
    run.train(inside=lambda loop, step: setattr(Scarce, "at_step", step))
    failed = [line for line in run.lines if "a save failed, and the previous checkpoint is intact" in line]
    assert len(failed) == 2 and all("there is too little memory: free some" in line for line in failed)
    assert (tmp_path / "checkpoints" / "epoch-0001-step-00000004").is_dir()
