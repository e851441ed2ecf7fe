"""`loader` and `prefetch`: the same batches, whatever workers or a thread do, and none is left behind."""

import gc
import multiprocessing
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from everstep.backends.torch.user_dataloader import DataLoaderStream
from everstep.data import arrays, as_stream, loader, prefetch, replay, stateful
from everstep.errors import DataError, NotResumableError
from everstep.testing.checks import check_stream, fingerprint
from waiting import PATIENCE, until


class Augmented(Dataset):
    """11 samples, each with noise from the three global generators."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


def noisy_collate(samples):
    return torch.stack(samples), random.random(), np.random.rand(), torch.rand(2)


def batches(stream, purpose="train", pass_index=0, position=None, seed=0):
    cursor = stream.open(purpose, pass_index, position, seed=seed)
    taken = list(cursor)
    cursor.close()
    return fingerprint(taken)


def make(**options):
    return loader(Augmented(), 3, shuffle=True, collate_fn=noisy_collate, **options)


def test_laws():
    check_stream(make, shares=False)
    check_stream(lambda: loader(Augmented(), 3, shuffle=True))


def test_laws_with_workers():
    full = [batches(make(), pass_index=p) for p in range(2)]
    for pass_index in range(2):
        cursor = make(num_workers=2).open("train", pass_index, seed=0)
        head = [next(cursor), next(cursor)]
        position = cursor.position()
        cursor.close()
        for workers in ({}, {"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 5}):
            rest = batches(make(**workers), "train", pass_index, position)
            assert fingerprint(head)[1] + rest[1] == full[pass_index][1]


def test_augmentation_differs_between_passes_samples_and_seeds():
    def noise(**where):
        return np.concatenate([b[0] for b in make().open(**where)])[:, 1:]

    first = noise(purpose="train", pass_index=0, seed=0)
    assert len(np.unique(first)) == first.size
    for other in ({"pass_index": 1}, {"seed": 1}, {"purpose": "valid"}):
        again = noise(**{"purpose": "train", "pass_index": 0, "seed": 0, **other})
        assert not np.isin(again, first).any()


def mark_dataset(worker_id):
    get_worker_info().dataset.mark = worker_id + 10


class Marked(Augmented):
    mark = 0

    def __getitem__(self, index):
        return self.mark


def test_worker_init_fn_runs_and_sees_the_users_dataset():
    [batch, *_] = loader(Marked(), 3, num_workers=1, worker_init_fn=mark_dataset).open("t", 0, seed=0)
    assert batch.tolist() == [10, 10, 10]


@pytest.mark.campaign("long")
def test_workers_started_anew_give_the_same():
    assert batches(make(num_workers=1, multiprocessing_context="spawn")) == batches(make())


class Drawing(Augmented):
    def __getitem__(self, index):
        torch.rand(3)
        return super().__getitem__(index)


def test_collate_has_random_state_of_its_own():
    one, other = (
        loader(d, 3, collate_fn=noisy_collate).open("t", 0, seed=0) for d in (Augmented(), Drawing())
    )
    for left, right in zip(one, other, strict=True):
        assert fingerprint(left[1:]) == fingerprint(right[1:])


class Broken(Augmented):
    def __getitem__(self, index):
        if index == 4:
            raise KeyError("sample 4 is missing")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_the_datasets_error_arrives_at_its_batch(workers):
    cursor = loader(Broken(), 3, num_workers=workers).open("train", 0, seed=0)
    assert next(cursor).tolist() == [0, 1, 2]
    with pytest.raises(KeyError, match="sample 4 is missing"):
        next(cursor)
    assert cursor.position()["batches"] == 1


ALONE = {
    "arrays": lambda **options: arrays(np.arange(22.0).reshape(11, 2), batch_size=4, **options),
    "loader": lambda **options: loader(Augmented(), 4, **options),
    "workers": lambda **options: loader(Augmented(), 4, num_workers=2, **options),
}


@pytest.mark.parametrize("kind", ALONE)
def test_iterated_by_itself_it_is_as_long_as_it_says_and_each_time_the_same(kind):
    def global_state():
        return fingerprint([random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()])

    stream = ALONE[kind](shuffle=True)
    before = global_state()
    first = list(stream)
    assert (len(first), len(stream), len(ALONE[kind](drop_last=True))) == (3, 3, 2)
    assert fingerprint(list(stream)) == fingerprint(first)
    assert fingerprint(list(ALONE[kind](shuffle=True, seed=1))) != fingerprint(first)
    left = iter(stream)
    next(left)
    left.close()
    assert global_state() == before and not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if "everstep" in thread.name]


X = np.arange(11)


def test_laws_of_prefetching():
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


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_killed_worker_is_an_error_of_the_next_fetch(kind, locked):
    """Also where it holds the lock of torch's event, which it takes to see whether it is to end."""
    cursor = open_pass(kind)
    assert cursor.fetch_error_may_be_signal
    pid = int(next(cursor))
    if locked:  # in the worker's place; a test from inside, a kill seldom meets it
        cursor._batches._batches._workers_done_event._cond.acquire()
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
