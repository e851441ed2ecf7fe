"""`Supervisor`: process-level care for any loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from everstep.arguments import checked_keywords, integer
from everstep.contracts.services import Moment, Service
from everstep.errors import ConfigError, UsageError
from everstep.services.witness import Witness
from everstep.supervisor.board import find_service
from everstep.supervisor.door import Door
from everstep.supervisor.engine import Engine
from everstep.supervisor.settings import LoopDriver, LoopKind, RunOptions, Settings
from everstep.supervisor.streams.run_stream import RunStream, no_batch
from everstep.timing import progress

_MOMENTS = frozenset(
    {
        Moment.ENTER_LOOP,
        Moment.BEFORE_STEP,
        Moment.AFTER_STEP,
        Moment.METRICS_COLLECTED,
        Moment.SUMMARY_ADDED,
        Moment.AFTER_CHECKPOINT,
        Moment.EXIT_LOOP,
    }
)


class Supervisor(Door):
    """Keeps any loop safe: lock, recovery, checkpoints, signals, services, a record, an ending.

        with Supervisor("runs/x", state={"model": model, "optimizer": optimizer}) as sv:
            batches = sv.stream(train)
            while not sv.should_stop():
                sv.advance(loss=train_step(next(batches)))

    Run twice, it resumes.  Carries on TensorFlow's Supervisor and MonitoredSession.

    Args:
        run_dir: the run's directory, made if needed.
        state: name to object, or pairs of them: everything that must survive.  Models, optimizers,
            schedulers, scalers, anything with state_dict/load_state_dict, arrays, dictionaries of
            JSON values, random generators, `Slot`.
        services: services around steps, beyond the default ones.
        seed: seed of the run; drawn and recorded if None.  A given seed also seeds the global generators
            of Python, NumPy and the framework at a fresh start.
        max_step: total number of steps of the run, 1 or more; None for no limit.
        max_time: seconds for this start of the process; then the run is interrupted, exit status 3.
        resume: True: continue where the run is; a step, a checkpoint's name or path: continue from
            there, and at later starts that ask for the same from what was saved since; False: start over, at
            every start (earlier checkpoints move to `superseded/`).
        init_from: a checkpoint to take weights from where the run has none of its own.
        init_fn: called only when there is nothing to recover.
        local_init_fn: called at every start.
        ready: returns what is not ready: None, True or an empty list if all is, else a message or a
            list of names.  Called before and after `local_init_fn`.
        default_services: False leaves out the console, the NaN guard and the hang watch.
        on_change: action where the stored `config`, the configuration of a controller, the seed, or the data
            (kind, length, batch size, order) differs from what is given: "error" raises with both,
            "override" continues with what is given; a pass that was open over other data begins anew.
        on_divergence: action where steps that run again find something else than the first time: "stop" or
            "warn"; None: other batches stop the run, other numbers are a warning.  The divergence is
            recorded in any case.
        config: the run's configuration, a dictionary of JSON values, such as the arguments of the command
            line: recorded (queries find it as config.NAME) and compared at a resume.
        config_free: names in `config` that may change between two starts, beside limits (epochs ...) and
            settings of the loader (num_workers ...), which may change anyway.
        streams: names to data that the loop is going to be given.  Needed where lines at the head of an epoch
            set generators of the data or draw from them: a resume at the end of an epoch brings those back
            before the lines run.
        lock: False where the file system has no locks and you are sure that nobody else runs this.
        uneven: on several ranks, what becomes of a batch that their number does not divide: "weight" (the
            parts differ by one sample; multiply the loss by `batch_weight`) or "drop" (its last samples are
            left out); None: such data is an error.
        data_ranks: on several ranks, who reads which part of each batch.  None: each rank a part of its own.
            Ranks that compute with one batch together (tensor parallelism) read the same part: a DeviceMesh
            over the ranks that read different samples, as `mesh["dp"]`; or (this rank's part, number of
            parts); or 1: all ranks read the whole batch.
        clock: monotonic seconds; for tests.  A clock of your own is asked after each step, so that due
            services run at the very step, without a thread.

    Raises:
        ConfigError: an argument is out of range, unknown or contradicts another.
        StateError: a state entry cannot be saved.
    """

    @checked_keywords
    def __init__(
        self,
        run_dir: str | Path,
        state: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
        *,
        services: Iterable[Service] = (),
        streams: Mapping[str, Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        kind = LoopKind(type(self).__name__, _MOMENTS)
        settings = Settings(kind, run_dir, services, streams, options)
        engine = Engine(settings, settings.state(state))
        self._draws = Draws(engine)
        super().__init__(engine, self._draws)
        self._reads_no_data = False
        """Whether the program has called `stream(None)`."""

    def should_stop(self) -> bool:
        """Whether the loop is to end.  The run begins, or resumes, at the first call.

        Raises:
            ProgressError: the loop makes no progress: in one step it asked 10,000 times while an optimizer of
                the state made updates, or with a batch drawn each time, or 100,000 times without waiting
                between.
            Interrupted: a signal has come to a loop that makes no progress.
        """
        engine = self._engine
        if engine.status != "open":
            engine.require_open("should_stop")
        if not engine.begun:
            if not self._draws.streams and not self._reads_no_data:
                engine.voice.warn(
                    "no stream is registered, so no data position is saved; take the batches from "
                    "sv.stream(data) if the loop reads data, or call sv.stream(None) if it reads none"
                )
            engine.streams.require_bound()
            engine.begin()
            engine.variables.steps_begin()
        for endless in self._draws.streams:
            if endless.passes is not None:
                endless.look_ahead()
        if engine.progress.stop is not None:
            return True
        engine.count_round(
            "sv.advance() was not called",
            "call it at the end of each step: while not sv.should_stop(): ...; sv.advance()",
        )
        if engine.board.synchronous and not self._draws.streams:
            self._draws.begin_step()
        return False

    def advance(self, **metrics: Any) -> None:
        """Complete a step; every batch handed out so far is finished.

        Args:
            metrics: one real number each; a tensor stays on its device until somebody reads it.

        Raises:
            UsageError: before the first `should_stop()`, or after the step at which the loop was to end.
            MetricError: a value is not one real number.
            Interrupted: a signal, or the time budget; the state is saved.
        """
        engine, draws = self._engine, self._draws
        if engine.status != "open" or not engine.begun:
            draws.require_begun()
        # a stop that was requested, or by a stream that ended, may come inside a step
        if (stop := engine.progress.stop) is not None and stop.kind not in ("request", "stream"):
            raise UsageError(
                f"advance() after the loop should have ended ({stop.reason}); check before each step: "
                "while not sv.should_stop()"
            )
        if engine.board.synchronous:
            draws.begin_step()  # where the step drew no batch
        if metrics:
            engine.collect(engine.progress.step + 1, metrics)
        draws.complete_step()

    @checked_keywords
    def stream(self, data: Any, name: str = "train", *, passes: int | None = None) -> Iterator[Any]:
        """Endless batches of `data`, pass after pass; their position is part of the state.

        Args:
            data: a stream, a DataLoader, anything iterable (see `everstep.data`).  None declares that
                the loop reads no data, or keeps its position in the data in `state`.
            name: unique in the run.
            passes: number of passes after which the run stops, 1 or more; None: never.

        Raises:
            ConfigError: the name is taken, or `passes` is not positive.
        """
        self._engine.require_open("stream")
        if data is None:
            self._reads_no_data = True
            return _no_batches()
        passes = integer("passes", passes, none="for no limit")
        if self._engine.streams.bound(name):
            raise ConfigError(f'stream {name!r} is in use; give this data another name, as in name="{name}2"')
        run_stream = self._engine.streams.bind(data, name)
        stop = self._engine.progress.stop
        more = passes is None or run_stream.pass_index + run_stream.in_pass < passes
        if more and stop is not None and (stop.kind, stop.by) == ("stream", name):
            self._engine.progress.stop = None
            self._engine.voice.say(f"stream {name!r} has more passes now; the run continues")
        endless = Endless(self._engine, self._draws, run_stream, passes)
        self._draws.streams.append(endless)
        witness = find_service(Witness, self._engine.board)
        return endless if witness is None else witness.watching(name, endless)


def _no_batches() -> Iterator[Any]:
    raise UsageError(
        "a batch was drawn from stream(None), which declares that the loop reads no data; give it data"
    )
    yield


class Draws(LoopDriver):
    """Batches that a Supervisor's streams have handed out; answers the engine for a loop without epochs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.streams: list[Endless] = []
        self.batch: Any = None
        """The batch of the open step; with several streams, the newest of each by its name."""
        self._batches: dict[str, Any] = {}
        self._completed = 0
        """Number of batches in complete steps."""
        self._announced = 0
        """Number of the newest step that was announced."""

    def require_begun(self) -> None:
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
            self._engine.board.announce(Moment.BEFORE_STEP, self.batch)

    def hand_out(self, run_stream: RunStream, batch: Any) -> None:
        engine = self._engine
        # first: the program may change the batch, and so may a service at BEFORE_STEP
        engine.verifier.note_batch(engine.progress.step + 1, run_stream.name, run_stream.pass_index, batch)
        self._batches[run_stream.name] = batch
        self.batch = batch if len(self.streams) == 1 else self._batches
        if engine.board.synchronous:
            self.begin_step()

    def complete_step(self) -> None:
        """Complete the step: every batch handed out so far is part of it."""
        self._completed = self._drawn()
        self._engine.complete_step(self.batch)
        self.batch, self._batches = None, {}

    def batches(self) -> tuple[int, int]:
        return self._drawn(), self._completed

    def _drawn(self) -> int:
        drawn = 0
        for endless in self.streams:  # a generator would be a call more for each step
            drawn += endless.drawn
        return drawn

    def reads_on(self) -> bool:
        return bool(self.streams) and not any(each.has_ended() for each in self.streams)

    def data_wait(self) -> float:
        return sum(endless.waited for endless in self.streams)

    def tag(self) -> str:
        limit = self._engine.limits.max_step
        return f"[Step {self._engine.step}{'' if limit is None else f'/{limit}'}]"

    def get_progress(self) -> float | None:
        return progress(self._engine.progress.step, 0, self._engine.limits.max_step, None)


class Endless:
    """Batches of a stream, pass after pass, for `Supervisor.stream`."""

    def __init__(self, engine: Engine, draws: Draws, run_stream: RunStream, passes: int | None) -> None:
        self._engine, self._draws, self._run_stream, self.passes = engine, draws, run_stream, passes
        self.drawn, self.waited = 0, 0.0
        """Number of batches handed out in this start, and seconds waited for them."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def look_ahead(self) -> None:
        """Stop the run if the last pass is known to be used up."""
        if self.has_ended():
            self._stop()

    def has_ended(self) -> bool:
        """Whether the last pass is known to be used up, without drawing from it."""
        if self.passes is None or self._run_stream.pass_index < self.passes - 1:
            return False
        cursor = self._run_stream.cursor
        return self._used_up or (cursor is not None and cursor.remaining() == 0)

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
                engine.boundaries.leave_saved()  # Ctrl-C has killed the workers, too
                # without a save: the step that draws may have changed the state
                if engine.killed_by_signal(run_stream.cursor):
                    engine.announce_leaving()
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
        self._engine.boundaries.leave_saved()
        name, passes = self._run_stream.name, "1 pass" if self.passes == 1 else f"{self.passes} passes"
        self._engine.decisions.stop(f"stream {name!r} ended after {passes}", "stream", name)
