"""Worker processes of a torch DataLoader: protected from signals, and watched.

Three habits of a bare DataLoader are changed here, because a run has to survive them:

- Ctrl-C (or `scancel`, or a closed terminal) reaches the whole process group and kills the workers,
  while the main process still wants to finish its step and save.  Workers here ignore those signals.
- A worker that dies raises in the main thread at any bytecode, in the middle of a step or of a
  commit.  Here its death is an error of the next fetch.
- A killed parent leaves workers behind for seconds, or for ever if their pipe is full.  Here the
  kernel ends them with their parent (Linux; elsewhere torch's own check does, in seconds).
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader

from everstep.errors import DataError

WorkerInit: TypeAlias = Callable[[int], object]

# Signals that a terminal, a scheduler or a shell sends to a whole process group.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


def start(loader: DataLoader[Any], what: str, dataset: Any = None) -> WorkerBatches:
    """Open an iterator over a DataLoader that has workers, by the same random draws as `iter(loader)`.

    Its `worker_init_fn` runs after ours.  `what` names the data in messages; `dataset`, unless None, is what
    `get_worker_info().dataset` is in the workers.
    """
    init = loader.worker_init_fn
    in_main_thread = threading.current_thread() is threading.main_thread()
    # a partial function, not a closure: start methods other than fork pickle it
    loader.worker_init_fn = partial(_begin_worker, init, dataset, in_main_thread)
    # Workers start with the signals blocked, and unblock them when they have learnt to ignore them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        loader.worker_init_fn = init
    return WorkerBatches(batches, what, persistent=loader.persistent_workers)


def end_persistent(loader: DataLoader[Any]) -> None:
    """End the workers that a loader keeps from pass to pass; its next pass starts others."""
    if loader.persistent_workers and loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None


def _begin_worker(init: WorkerInit | None, dataset: Any, from_main_thread: bool, worker_id: int) -> None:
    """Run first in a worker."""
    for number in GROUP_SIGNALS:
        # A handler, not SIG_IGN: programs that the user's dataset starts must not inherit it.
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    # The kernel ends a worker with the thread that started it: a side thread may end before its process.
    if from_main_thread and sys.platform.startswith("linux"):
        # before the look at the parent: a parent that dies in between is noticed either way
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(1)
    info = torch_worker._worker_info
    if dataset is not None and info is not None:
        changed = copy.copy(info)
        object.__setattr__(changed, "dataset", dataset)  # its own __setattr__ refuses
        torch_worker._worker_info = changed
    if init is not None:
        init(worker_id)


class WorkerBatches:
    """Batches of an iterator with workers; a worker's death is an error of the next fetch."""

    def __init__(self, batches: Any, what: str, *, persistent: bool) -> None:
        self._batches, self._what, self._persistent = batches, what, persistent
        self.workers = list(batches._workers)
        self.fetching = False  # in the main thread, where the signal handler may raise into it
        self.died = False
        for worker in self.workers:
            # Workers ignore SIGTERM, with which torch and multiprocessing would end one that hangs.
            worker._popen.terminate = worker._popen.kill
        _watch.add(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.died:
            raise self.death()
        self.fetching = threading.current_thread() is threading.main_thread()
        try:
            return next(self._batches)
        except (StopIteration, DataError):  # a DataError: the signal handler's, or the user's own
            raise
        except Exception as error:
            self.fetching = False
            if isinstance(error, OSError | EOFError):  # files close before the worker counts as dead
                for worker in self.workers:
                    worker.join(0.1)
            if self.dead():
                raise self.death() from error
            raise
        finally:
            self.fetching = False

    def dead(self) -> list[Any]:
        """List the workers that failed or were killed before the iterator ended them."""
        if getattr(self._batches, "_shutdown", False):
            return []
        return [worker for worker in self.workers if worker.exitcode not in (None, 0)]

    def death(self) -> DataError:
        """Make the error that names the dead workers and the reasons."""
        ends = [(worker.pid, worker.exitcode) for worker in self.dead()]
        how = ", ".join(
            f"pid {pid} ended with exit status {code}"
            if code >= 0
            else f"pid {pid} was killed by signal {-code} ({signal.Signals(-code).name})"
            for pid, code in ends
        )
        return DataError(
            f"{self._what}: a loader worker died: {how}. Workers are killed when memory runs out: give a "
            "smaller num_workers or prefetch_factor, then start the run again: it continues at this batch"
        )

    def close(self) -> None:
        """End the workers; persistent workers belong to the loader and end with the loader."""
        batches, self._batches = self._batches, iter(())
        try:
            if hasattr(batches, "_shutdown_workers") and not self._persistent:
                if self.dead():
                    # one that was killed may hold the lock of torch's event, whose set() would wait for ever
                    batches._workers_done_event = threading.Event()
                    for worker in self.workers:
                        worker.kill()
                batches._shutdown_workers()
        finally:
            _watch.remove(self)


class _Watch:
    """SIGCHLD handler while loaders with workers are open; then the previous handler comes back."""

    def __init__(self) -> None:
        self._open: list[WorkerBatches] = []
        self._previous: Any = None

    def add(self, batches: WorkerBatches) -> None:
        # Signal handlers belong to the main thread; elsewhere torch looks for dead workers itself.
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGCHLD) != self._on_death:
            self._previous = signal.getsignal(signal.SIGCHLD)
            signal.signal(signal.SIGCHLD, self._on_death)
        self._open.append(batches)

    def remove(self, batches: WorkerBatches) -> None:
        if batches not in self._open:
            return
        self._open.remove(batches)
        is_ours = signal.getsignal(signal.SIGCHLD) == self._on_death
        if not self._open and is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, self._previous)

    def _on_death(self, number: int, frame: FrameType | None) -> None:
        error: RuntimeError | None = None
        try:
            if callable(self._previous):
                self._previous(number, frame)  # torch's own handler, which raises if one of its workers died
        except RuntimeError as raised:
            error = raised
        struck = [batches for batches in self._open if batches.dead()]
        # all are marked before an error is raised: the others raise theirs at their next fetch
        for batches in struck:
            batches.died = True
        for batches in struck:
            if batches.fetching:
                raise batches.death() from error
        if error is not None and not struck:
            raise error  # a worker of a loader that is not ours


_watch = _Watch()
