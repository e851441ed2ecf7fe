"""What a run keeps: checkpoints, the journal, a place in the index; and a wait for another run's."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path

from everstep.arguments import integer, number
from everstep.checkpoint import Retention, Store
from everstep.contracts.services import Boundary, BuiltIn, Moment, Outcome, RunView, Save, Stage
from everstep.errors import ServiceError, to_install
from everstep.index.location import as_location, index_of, lacks_credential
from everstep.index.shipping_thread import IndexWriter
from everstep.mirror import MirrorAt
from everstep.polling import wait_until
from everstep.record import user_path
from everstep.schedule import Every, Schedule


class Checkpoints(BuiltIn):
    """Save the whole state on a schedule; the writing happens in the background.

    Besides the schedule, a checkpoint is made at step 0, where the run stops, and at an interruption.  After
    each commit the writer thread deletes those that no rule below keeps.

    Args:
        every: schedule of saves; default `Every(epochs=1) | Every(seconds=600)`.
        keep_last: number of the newest checkpoints that stay (1 or more), None for all.
        keep_every: a schedule of steps or epochs whose checkpoints stay for ever.
        keep_best: (metric, "min" or "max", number): the checkpoints that stay, by the metric's value at the
            checkpoint's own step: from outside steps, or the mean of an epoch's steps; in a loop without
            epochs, the step's value.
        mirror: a folder elsewhere, as a path or "file://...", or a URL such as "s3://BUCKET/RUN" (which needs
            the extra `mirror`), to which what is committed is uploaded in the background; None for none.  A
            start with an empty run directory continues from there.
        mirror_wait: seconds that the end of a start waits for the last upload (more than 0).
        copy: False for a state of which no second copy fits in memory: it is written from the live arrays
            while training waits, and the state that a resume from an epoch's tail needs is kept on disk.
    """

    stage = Stage.SAVE
    runs_last = True
    default_schedule = Every(epochs=1) | Every(seconds=600)

    def __init__(
        self,
        every: Schedule | None = None,
        *,
        keep_last: int | None = 3,
        keep_every: Schedule | None = None,
        keep_best: tuple[str, str, int] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        mirror_wait: float = 60.0,
        copy: bool = True,
    ) -> None:
        super().__init__("checkpoints", every)
        self.retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        self.mirror = None if mirror is None else MirrorAt(mirror)
        self.mirror_wait = number("mirror_wait", mirror_wait, of="seconds")
        self.copy = copy
        self.watches = () if keep_best is None else (keep_best[0],)

    def run(self, boundary: Boundary) -> Outcome:
        return Outcome(actions=(Save(),))


class JournalFlush(BuiltIn):
    """Hand the rows that were read at boundaries to the operating system, in blocks of many rows.

    Every 1.5 s while somebody may look at the curves of a young start, and where that makes blocks of a dozen
    rows; else every 10 s, as slow steps would fill the journal with heads of blocks (docs/guide/ui.md).
    Several ranks have to meet for it: after the first time, they have 10 s.
    """

    def __init__(self) -> None:
        super().__init__("journal flush", Every(steps=1000) | Every(epochs=1))
        self._pause = Every(seconds=1.5)
        self.schedule |= self._pause

    def open(self, run: RunView) -> None:
        super().open(run)
        self._opened = self._flushed = run.clock()
        self._step = run.step

    def run(self, boundary: Boundary) -> None:
        self._run.flush()
        now, steps = self._run.clock(), boundary.step - self._step
        is_soon = now - self._opened < 360 or steps >= 8 * (now - self._flushed)
        self._pause.seconds = 1.5 if is_soon and self._run.ranks == 1 else 10.0
        self._flushed, self._step = now, boundary.step


class Index(BuiltIn):
    """Ship the journal to the index, on a separate thread; every run has this service.

    Args:
        at: a file, or the URL of a PostgreSQL database; None: `everstep.db` beside the run directory.
            EVERSTEP_INDEX overrides this argument.  The password in a URL is not recorded.
    """

    moments = frozenset()

    def __init__(self, at: str | Path | None = None) -> None:
        super().__init__("run index")
        self._at = None if at is None else as_location(str(at))
        self._writer: IndexWriter | None = None

    def open(self, run: RunView) -> None:
        first = run.step
        index, has_library = index_of(run.run_dir, self._at), find_spec("sqlalchemy") is not None
        if lacks_credential(index):
            remedy = "set EVERSTEP_INDEX, or pass --index"
            run.println(f"warning: there is no index, as its password is not recorded: {remedy}")
        elif isinstance(index, str) and not has_library:
            run.println(f"warning: the index is a database, which needs {to_install('postgres')}")
        elif index is not None and has_library:
            self._writer = IndexWriter(index, run.run_dir, lambda: run.step > first, run.println)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class GlobalStepWaiter(BuiltIn):
    """Wait, before the loop begins, until another run has a checkpoint of a step, or of a later step.

    A signal ends the waiting.

    Args:
        run_dir: the other run's directory, which need not exist yet.
        step: the step, 1 or more.
        poll: longest pause between two looks, in seconds.
        timeout: seconds after which the waiting is a `ServiceError`; None to wait for ever.
    """

    stage = Stage.GUARD
    moments = frozenset({Moment.ENTER_LOOP})

    def __init__(
        self,
        run_dir: str | Path,
        step: int,
        *,
        poll: float = 1.0,
        timeout: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "global step waiter")
        self.run_dir = user_path(run_dir, "run_dir")
        self.step = integer("step", step)
        self.poll = number("poll", poll, of="seconds")
        self.timeout = number("timeout", timeout, of="seconds", none="to wait for ever")

    def run(self, boundary: Boundary) -> None:
        if self._has_come():
            return
        self._run.println(f"waiting until the run in {self.run_dir} has a checkpoint of step {self.step}")
        limit = math.inf if self.timeout is None else self.timeout
        if not wait_until(lambda: self._run.interrupted or self._has_come(), limit, self.poll):
            raise ServiceError(
                f"in {limit:g} s the run in {self.run_dir} has come to step {self._newest}, not to step "
                f"{self.step}; look at that run, or give a longer timeout="
            )

    def _has_come(self) -> bool:
        self._newest = max((name.step for name in Store(self.run_dir).names()), default=0)
        return self._newest >= self.step
