"""Smoke tests: a training is tried in a directory of its own, which is deleted afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from everstep.contracts.data import Stream
from everstep.contracts.tasks import Task
from everstep.record import located
from everstep.state import decode, encode, isolated
from everstep.supervisor.saving.user_state import UserState
from everstep.trainer.eval_loop import drawn_again, places_kept


@contextmanager
def unchanged(task: Task, streams: Collection[Stream]) -> Iterator[None]:
    """Bring the task's state and gradients, the data and random state back after the block."""
    user = UserState(task.state())
    with isolated(), places_kept(streams), drawn_again(streams), ExitStack() as stack:
        user.open(stack)
        for stream in streams:
            stack.callback(stream.end_workers)
        before = encode(user.save())
        try:
            yield
        finally:
            user.load(decode(before), 0)


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory for runs, also where EVERSTEP_ROOT moves them; it is deleted afterwards."""
    with TemporaryDirectory(prefix="everstep-smoke-") as folder:
        moved = located(folder)
        try:
            yield moved
        finally:
            rmtree(moved, ignore_errors=True)
