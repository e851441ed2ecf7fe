"""Worker processes: signals pass them by, their death is an error at the fetch, none is left behind."""

import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from everstep.backends.torch.user_dataloader import DataLoaderStream
from everstep.data import loader
from everstep.errors import DataError
from waiting import PATIENCE, until

STREAMS = {
    "keyed": lambda data: loader(data, 1, num_workers=2),
    "plain": lambda data: DataLoaderStream(DataLoader(data, num_workers=2)),
}


class Pids(Dataset):
    """Samples that say in which process they were made, which dies at sample 8 as soon as a file is there."""

    def __init__(self, die_at=None):
        self.die_at = die_at

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 8 and self.die_at is not None:
            until(self.die_at.exists)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()


def open_pass(kind, data=None):
    return STREAMS[kind](data or Pids()).open("train", 0, seed=0)


def wait_until_gone(pid):
    """Until the process has ended, reaped or not."""

    def is_gone():
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    until(is_gone)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_killed_worker_is_an_error_of_the_next_fetch(kind):
    cursor = open_pass(kind)
    assert cursor.fetch_error_may_be_signal
    pid = int(next(cursor))
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    total = sum(range(1000))  # the user's step: undisturbed
    assert total == 499500
    with pytest.raises(
        DataError, match=rf"'train'.* worker died: pid {pid} was killed by signal 9 \(SIGKILL\)"
    ):
        next(cursor)
    assert cursor.position()["batches"] == 1
    cursor.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", STREAMS)
def test_a_worker_that_is_killed_with_the_lock_of_torchs_event_ends_no_less(kind):
    """Each worker takes it to see whether it is to end; a test from inside, a kill seldom meets it."""
    cursor = open_pass(kind)
    pid = int(next(cursor))
    cursor._batches._batches._workers_done_event._cond.acquire()  # in the worker's place
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(DataError, match=f"pid {pid} was killed by signal 9"):
        next(cursor)
    cursor.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", STREAMS)
def test_a_worker_killed_while_the_main_thread_waits_for_it(kind, tmp_path):
    cursor = open_pass(kind, Pids(tmp_path / "now"))
    pids = [int(next(cursor)) for _ in range(8)]
    (tmp_path / "now").touch()
    with pytest.raises(DataError, match=f"pid {pids[0]} was killed by signal 9"):
        next(cursor)


@pytest.mark.campaign("long", gate=4)
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_to_the_group_pass_workers_by(kind, number):
    cursor = open_pass(kind)
    pids = {worker.pid for worker in multiprocessing.active_children()}
    for pid in pids:
        os.kill(pid, number)  # a worker may not have come to its first line yet
    assert {int(next(cursor)), int(next(cursor))} == pids
    for pid in pids:
        os.kill(pid, number)
    assert {int(batch) for batch in cursor} == pids
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", STREAMS)
def test_handlers_and_processes_are_gone_after_close(kind):
    list(open_pass(kind))  # torch sets its own SIGCHLD handler once, for good
    before = [signal.getsignal(number) for number in range(1, 32)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    outer, inner = open_pass(kind), open_pass(kind)
    next(outer), next(inner)
    outer.close()
    next(inner)
    inner.close()
    assert [signal.getsignal(number) for number in range(1, 32)] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert not multiprocessing.active_children()


def test_the_users_init_function_is_put_back():
    def init(worker_id):
        torch.set_num_threads(1)

    mine = DataLoader(Pids(), num_workers=1, worker_init_fn=init)
    DataLoaderStream(mine).open("train", 0, seed=0).close()
    assert mine.worker_init_fn is init


class Hanging(Pids):
    """The worker hangs in its fifth sample."""

    def __getitem__(self, index):
        while index > 3:
            signal.pause()
        return os.getpid()


def open_and_leave(pipe, stays):
    """Program of a process that has a worker."""
    cursor = loader(Hanging(), 1, num_workers=1).open("train", 0, seed=0)
    pipe.send(int(next(cursor)))
    if stays:
        pipe.recv()


@pytest.mark.parametrize("killed", [True, False])
def test_no_worker_outlives_its_parent(killed):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=open_and_leave, args=(theirs, killed))
    child.start()
    worker = ours.recv()
    if killed:
        child.kill()
    child.join(PATIENCE)
    assert child.exitcode == (-signal.SIGKILL if killed else 0)
    wait_until_gone(worker)
