"""Batches that a `Supervisor` hands out: endless streams, and the step that draws from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everstep.contracts.services import Moment
from everstep.errors import UsageError
from everstep.supervisor.engine import Engine
from everstep.supervisor.settings import LoopDriver
from everstep.supervisor.streams.run_stream import RunStream, no_batch
from everstep.timing import progress


class Draws(LoopDriver):
    """Batches that a Supervisor's streams have handed out; answers the engine for a loop without epochs.

    Attributes:
        streams: the streams that the program reads.
        batch: the batch of the open step; with several streams, the newest of each by its name.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.streams: list[Endless] = []
        self.batch: Any = None
        self._batches: dict[str, Any] = {}
        self._completed = 0
        """Number of batches in complete steps."""
        self._announced = 0
        """Number of the newest step that was announced."""

    def require_begun(self) -> None:
        """Refuse a step before the place at which the run begins or resumes."""
        self._engine.require_open("advance")
        if not self._engine.begun:
            raise UsageError(
                "a batch was drawn, or advance() called, before the first should_stop(), where the run's "
                "state comes back; loop with: while not sv.should_stop()"
            )

    def begin_step(self) -> None:
        """Announce the next step, once: with its first batch, or without data where the loop continues."""
        step = self._engine.progress.step + 1
        if self._announced < step:
            self._announced = step
            self._engine.announcer.announce(Moment.BEFORE_STEP, self.batch)

    def hand_out(self, run_stream: RunStream, batch: Any) -> None:
        """Note a batch that a stream gives to the program for the open step."""
        engine = self._engine
        # first: the program may change the batch, and so may a service at BEFORE_STEP
        engine.verifier.drew(engine.progress.step + 1, run_stream.name, run_stream.pass_index, batch)
        self._batches[run_stream.name] = batch
        self.batch = batch if len(self.streams) == 1 else self._batches
        if engine.announcer.synchronous:
            self.begin_step()

    def complete(self) -> None:
        """Count every batch handed out so far as part of a complete step."""
        self._completed = self._drawn()

    def clear(self) -> None:
        """Forget the batches of the step that is complete."""
        self.batch, self._batches = None, {}

    def batches(self) -> tuple[int, int]:
        return self._drawn(), self._completed

    def _drawn(self) -> int:
        drawn = 0
        for endless in self.streams:  # a generator would be a call more for each step
            drawn += endless.drawn
        return drawn

    def data_wait(self) -> float:
        return sum(endless.waited for endless in self.streams)

    def tag(self) -> str:
        limit = self._engine.limits.max_step
        return f"[Step {self._engine.step}{'' if limit is None else f'/{limit}'}]"

    def get_progress(self) -> float | None:
        return progress(self._engine.progress.step, 0, self._engine.limits.max_step, None)


class Endless:
    """Batches of a stream, pass after pass, for `Supervisor.stream`.

    Attributes:
        passes: as given.
        drawn: number of batches handed out in this start.
        waited: seconds waited for batches.
    """

    def __init__(self, engine: Engine, draws: Draws, run_stream: RunStream, passes: int | None) -> None:
        self._engine, self._draws, self._run_stream, self.passes = engine, draws, run_stream, passes
        self.drawn = 0
        self.waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def look_ahead(self) -> None:
        """Stop the run if the last pass is known to be used up, without drawing from it."""
        if self.passes is None or self._run_stream.pass_index < self.passes - 1:
            return
        cursor = self._run_stream.cursor
        if self._used_up or (cursor is not None and cursor.remaining() == 0):
            self._stop()

    def __next__(self) -> Any:
        engine, run_stream = self._engine, self._run_stream
        # each step comes here: no call of which the answer is known
        if engine.status != "open" or not engine.begun:
            self._draws.require_begun()
        began = engine.clock()
        empty_passes = 0
        while empty_passes < 2:  # an open pass may have no batch left; the next pass must have one
            if self.passes is not None and self._used_up:
                self._stop()
                raise StopIteration
            try:
                batch = next(run_stream.cursor or run_stream.open())
            except StopIteration:
                empty_passes += not run_stream.skipped  # a pass of quarantined batches alone is not empty
                engine.verifier.pass_ended(engine.progress.step, run_stream.name, run_stream.pass_index)
                run_stream.end_pass()
                continue
            except Exception:
                # without a save: the step that draws may have changed the state
                if engine.killed_by_signal(run_stream.cursor):
                    engine.leave()
                raise
            self.drawn += 1
            self.waited += engine.clock() - began
            self._draws.hand_out(run_stream, batch)
            return batch
        raise no_batch(run_stream.name)

    @property
    def _used_up(self) -> bool:
        return self.passes is not None and self._run_stream.pass_index >= self.passes

    def _stop(self) -> None:
        name = self._run_stream.name
        self._engine.decisions.stop(f"stream {name!r} ended after {self.passes} passes", "stream", name)
