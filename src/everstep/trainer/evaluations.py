"""Evaluations of a Trainer: of the weights of its open loop, or of weights that are loaded."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from everstep import record
from everstep.arguments import checked_keywords, integer, number
from everstep.checkpoint import Store, is_interim, read_manifest
from everstep.contracts.data import Stream
from everstep.contracts.group import Group, require_same
from everstep.contracts.services import Moment, Service
from everstep.contracts.tasks import Task
from everstep.errors import CheckpointError, ConfigError, NoCheckpointError, RunDirError, UsageError, nearest
from everstep.group import find_group, group_size
from everstep.schedule import Every
from everstep.services.evaluate import Evaluate, Evaluator, steps
from everstep.supervisor import Loaded, best, load
from everstep.supervisor.data_ranks import divide
from everstep.supervisor.opening.configuration import Configuration
from everstep.supervisor.settings import Settings
from everstep.trainer.eval_loop import EvalRanks, evaluate, evaluating, refuse_several, whole, why_whole
from everstep.trainer.named_streams import NamedStreams
from everstep.trainer.trainer_loop import TrainerLoop

Which = Literal["each", "newest"]


class Evaluating:
    """The part of a Trainer that evaluates: the weights of its open loop, or weights that are loaded."""

    task: Task
    run_dir: str | Path
    _streams: NamedStreams
    _loop: TrainerLoop | None = None
    """The Trainer's loop while it is open."""
    _weights: Loaded | None = None
    """Source of the task's objects, while they are as the run left them."""
    _facts: dict[str, Any] | None = None

    def __init__(self, services: list[Service], settings: Settings) -> None:
        self._services = services
        self._by_stream = {each.stream: each for each in evaluates(services) if each.evaluator is None}
        """The services that evaluate a stream of the Trainer, by its name."""
        self._data_ranks, self._config = settings.data_ranks, settings.config or Configuration({})
        looking = [each for each in services if Moment.AFTER_EVAL_STEP in each.moments]
        self._takes = {name for each in looking for name in each.output_names}
        """Outputs of evaluations that services look at."""
        self._looks_at_batches = bool(looking)
        self._printed: set[str] = set()
        """Sentences about evaluations that were printed."""

    def _load(self, spec: str | Path | None, *, newest: bool = False) -> None:
        """Load weights: those asked for, or the newest checkpoint, if it is asked for or nothing is loaded.

        An open loop has loaded its own.
        """
        if self._loop is not None:
            if spec is not None:
                raise UsageError(f"weights={str(spec)!r} inside the loop, which has its own; leave it first")
        elif spec is not None:
            self._weights = load(weights_of(self.run_dir, spec), self.task.state())
        elif newest or self._weights is None:
            try:
                self._weights = load(self.run_dir, self.task.state())
            except (NoCheckpointError, RunDirError) as error:
                raise NoCheckpointError(f"nothing to evaluate: {error}; train first") from error

    @property
    def _seed(self) -> int:
        if self._loop is not None:
            return self._loop.seed
        assert self._weights is not None
        seed = self._weights.seed
        return record.RunDir.open(record.to_read(self.run_dir), create=False).seed if seed is None else seed

    def run_evaluation(self, stream: Any = "valid", *, weights: str | Path | None = None) -> dict[str, float]:
        """Evaluate all of a stream on the run's newest checkpoint, and print the metrics.

        Args:
            weights: other weights, as for `evaluate`.
        """
        if weights is None:
            self._load(None, newest=True)
        metrics = self.evaluate(stream, weights=weights)
        print(record.values_line(metrics))
        return metrics

    def evaluate(
        self, stream: Any = "valid", num_steps: int = -1, *, weights: str | Path | None = None
    ) -> dict[str, float]:
        """Evaluate a stream on the task's weights as they are; before any training, on the newest checkpoint.

        Outside the loop, the evaluation of a named stream is recorded with the checkpoint that the weights
        come from: see `everstep.runs.evaluations`.  Weights that you load into the task's objects by hand are
        not noticed: the newest checkpoint overwrites them, or they are recorded as that checkpoint.  Give
        them as `weights=`.

        Args:
            stream: its name, or data, which is called "valid".
            num_steps: number of batches, 1 or more; -1: until the stream ends (an endless stream needs a
                number).
            weights: weights to load for it: "best" or "best/METRIC" of this run, the name of one of its
                checkpoints, or a path as for `everstep.load`.  All of the task's state comes from there, an
                average of the weights, too.

        Returns:
            Names, with the stream's prefix, to values.

        Raises:
            NoCheckpointError: nothing was trained: random weights are not evaluated.
            ConfigError: no stream has that name; the run has no best weights, or those of several metrics.
            UsageError: `weights` in a loop that is open.
        """
        self._load(weights)
        ((name, data),) = self._streams.chosen([stream], "valid")
        if self._loop is None and isinstance(stream, str):
            return self._evaluate_saved(name, steps(num_steps)).metrics
        return self._measure(name, data, steps(num_steps))

    def _due(self, service: Evaluate) -> dict[str, float]:
        """Evaluate the stream of a service that is due in the loop."""
        loop = self._loop
        assert loop is not None
        began = loop.clock()
        metrics = self._measure(service.stream, self._streams.get(service.stream), service.num_steps)
        seconds = loop.clock() - began
        loop.evaluated(metrics, seconds)
        return {**metrics, f"{service.stream}/eval_time": seconds}

    def _measure(self, name: str, stream: Stream, num_steps: int = -1) -> dict[str, float]:
        """Evaluate a stream on the weights as they are, and record nothing."""
        with self._together() as group:
            return self._metrics(group, name, stream, num_steps)

    def _evaluate_saved(self, name: str, num_steps: int) -> record.Evaluation:
        """Evaluate a stream outside the loop, and record it."""
        with self._together() as group:
            weights, began = self._weights, time.monotonic()
            assert weights is not None
            metrics = self._metrics(group, name, self._streams.get(name), num_steps)
            wall = {f"{name}/eval_time": time.monotonic() - began}
            at = weights.name, weights.digest, weights.step, weights.epoch
            evaluation = record.Evaluation(name, *at, num_steps, metrics, time.time())
            if group.writer:
                self._facts = self._facts or self._config.facts(self._seed, self._services)
                try:
                    record.record_evaluation(record.to_read(self.run_dir), evaluation, self._facts, wall)
                except OSError as error:
                    problem = f"an evaluation is not recorded: {error}; repair the disk, or free space"
                    warnings.warn(problem, RuntimeWarning, 3)
        return evaluation

    @contextmanager
    def _together(self) -> Iterator[Group]:
        """Join the ranks that evaluate the same weights: those of the open loop, else all that call this."""
        if self._loop is not None:
            yield self._loop.group
            return
        weights = self._weights
        assert weights is not None
        with closing(find_group()) as group:
            divide(group, self._data_ranks)
            gathered = group.gather(asdict(weights), title := "the step of the weights to evaluate")
            # not the digests: a rank that was in the loop knows that of its own part
            require_same([each["step"] for each in gathered], title)
            self._weights = Loaded(**gathered[0])
            yield group

    def _metrics(self, group: Group, name: str, stream: Stream, num_steps: int) -> dict[str, float]:
        loop, service = self._loop, self._by_stream.get(name)
        if loop is not None:  # it would move the training's data; a resume brings that back
            self._streams.require_apart(name, stream, "evaluation")
        comes_again = loop is not None or stream in self._streams.named.values()
        updates = None if loop is None else loop.updates
        ranks = EvalRanks(group, why_whole(self.task, service, self._looks_at_batches))
        look: dict[str, Any] = {"takes": self._takes, "comes_again": comes_again, "ranks": ranks}
        if loop is not None:
            look |= {"say": loop.println, "poll": loop.poll_evaluation, "on_step": loop.look_at}
        metrics = evaluate(self.task, stream, name, num_steps, self._seed, service, **look)
        if (notice := ranks.notice(name)) is not None and notice not in self._printed:
            self._printed.add(notice)
            if loop is not None:
                loop.println(notice)
        if loop is not None and loop.updates != updates:
            raise UsageError(f"an optimizer stepped while stream {name!r} was evaluated; train in train_step")
        return {f"{name}/{metric}": value for metric, value in metrics.items()}

    def predict(self, stream: Any = "test", *, weights: str | Path | None = None) -> Iterator[Any]:
        """Iterate over what `inference_step` returns for each batch of a stream; weights as for `evaluate`.

        On several ranks each rank predicts the whole stream.

        Raises:
            ConfigError: no stream has that name.
            DataError: the data hands each of several ranks a part.
        """
        ((name, data),) = self._streams.chosen([stream], "test")
        if self._loop is not None:
            self._streams.require_apart(name, data, "evaluation")
        if group_size() > 1:
            data = whole(data, "predict() yields what one process predicts")
        return self._predict(name, data, weights)

    def _predict(self, name: str, data: Stream, spec: str | Path | None) -> Iterator[Any]:
        """Yield what the task infers from each batch of a stream."""
        self._load(spec)
        with closing(data.open(name, 0, seed=self._seed)) as batches:
            for batch in batches:
                # not around the yield: the caller's code must not run in evaluation mode
                with evaluating(self.task, self._seed):
                    prediction = self.task.inference_step(batch)
                yield prediction

    @checked_keywords
    def watch(
        self,
        streams: Iterable[str] | str | None = None,
        *,
        every: Which = "each",
        throttle: float = 0.0,
        timeout: float | None = 3600.0,
        max_step: int | None = None,
    ) -> Iterator[record.Evaluation]:
        """Evaluate the checkpoints of this run while another process trains it; iterate over the results.

            for found in trainer.watch("valid"):
                print(found)

        Only whole checkpoints are read, and the run's lock is left alone.  A checkpoint that
        retention deletes meanwhile is passed over, with a line.  Each result is recorded
        (`everstep.runs.evaluations`): a watch that is killed and started again evaluates no checkpoint twice
        and misses none.

        The watch ends with the last checkpoint of a run that has ended.

        Args:
            streams: names; default those of the `Evaluate` services.
            every: "each" checkpoint, or always the "newest".
            throttle: seconds at least between two checkpoints.
            timeout: seconds after which the watch ends if the run does not exist, or nobody trains it (it was
                killed); None: never.
            max_step: the watch also ends with a checkpoint of that step or a later one.

        Raises:
            UsageError: this Trainer's own loop is open, or several processes call this together.
            ConfigError: no stream has that name, or an argument is out of its range.
        """
        if self._loop is not None:
            raise UsageError("watch() inside the loop; call it in another process than the one that trains")
        refuse_several("watch()", "start a single process beside them, which evaluates their checkpoints")
        max_step = integer("max_step", max_step, none="for no limit")
        follower = CheckpointFollower(record.located(self.run_dir), every, throttle, timeout)
        if streams is None:
            streams = self._evaluated()
        names = [streams] if isinstance(streams, str) else list(streams)
        for name in names:
            self._streams.get(name)
        return self._watch(follower, names, max_step)

    def _watch(
        self, follower: CheckpointFollower, names: Sequence[str], max_step: int | None
    ) -> Iterator[record.Evaluation]:
        """Evaluate checkpoints that another process saves, each stream of each once; yield the results."""
        try:
            earlier = record.evaluations(record.located(self.run_dir))
        except RunDirError:  # the run does not exist yet
            earlier = []
        recorded = {(e.stream, e.num_steps, e.checkpoint, e.digest) for e in earlier}
        pairs = {(name, self._num_steps(name)) for name in names}
        on = Counter((checkpoint, digest) for *pair, checkpoint, digest in recorded if tuple(pair) in pairs)
        for committed in follower.checkpoints([key for key, count in on.items() if count == len(pairs)]):
            path = follower.run_dir / "checkpoints" / committed[0]
            try:
                weights = self._weights = load(path, self.task.state())
            except (CheckpointError, OSError) as error:
                reason = "it was deleted while it was read" if not path.exists() else str(error)
                print(f"checkpoint {path.name} is passed over: {reason}", flush=True)
                continue
            for name, num_steps in sorted(pairs, key=lambda one: names.index(one[0])):
                if (name, num_steps, *committed) not in recorded:
                    yield self._evaluate_saved(name, num_steps)
            if max_step is not None and weights.step >= max_step:
                return

    def evaluate_all(self, *, newest: bool = False, weights: str | Path | None = None) -> dict[str, float]:
        """Evaluate each stream that has an `Evaluate`, else "valid".

        Unless weights are loaded for this call, metrics that the run's loop found at its last step, or
        that are recorded of the same weights, are returned again without a new evaluation.

        Args:
            newest: whether to load the newest checkpoint.
            weights: other weights to load, as for `evaluate`.
        """
        self._load(weights, newest=newest)
        is_asked = newest or weights is not None or self._loop is not None
        metrics: dict[str, float] = {}
        names = self._evaluated()
        with self._together() as group:
            found = {name: {} if is_asked else self._known_metrics(name) for name in names}
            # the writer's: the others may have read the record before its last pages
            found = group.share(found, "earlier evaluations")
        for name in names:
            metrics |= found[name] or self.evaluate(name, self._num_steps(name))
        return metrics

    def _known_metrics(self, stream: str) -> dict[str, float]:
        """Find the metrics of these weights by the loop's last evaluation or a recorded one; else empty.

        That of the loop is read in the journal: an earlier start may have made it.
        """
        service, weights, run_dir = self._by_stream.get(stream), self._weights, record.to_read(self.run_dir)
        assert weights is not None
        stats = {} if service is None else service.stats
        required = {f"{stream}/{metric}/{name}" for metric, names in stats.items() for name in names}
        if service is not None and Path(weights.path).resolve().is_relative_to(run_dir.resolve()):
            rows = [row for row in record.RunJournal(run_dir).rows() if row.phase == f"eval/{service.name}"]
            last = max((row.step for row in rows), default=None)
            metrics = {row.name: row.value for row in rows if row.step == last}
            metrics.pop(f"{stream}/eval_time", None)
            if last == weights.step and required <= metrics.keys():
                return metrics
        key = stream, self._num_steps(stream), weights.digest
        for each in reversed(record.evaluations(run_dir)):
            if (each.stream, each.num_steps, each.digest) == key and required <= each.metrics.keys():
                return each.metrics
        return {}

    def _evaluated(self) -> list[str]:
        """List the streams to evaluate: those of services, else "valid"."""
        return list(self._by_stream) or ["valid"]

    def _num_steps(self, stream: str) -> int:
        service = self._by_stream.get(stream)
        return -1 if service is None else service.num_steps


def evaluates(services: Sequence[Service]) -> list[Evaluate]:
    """List the services that evaluate a stream."""
    return [service for service in services if isinstance(service, Evaluate)]


def one_batch(service: Evaluate, evaluator: Evaluator) -> Evaluate:
    """Copy a service for a smoke test: the same statistics and functions, of the first batch."""
    one = copy(service)
    one.num_steps, one.schedule = 1, Every(epochs=1)
    one.evaluator = None if service.evaluator == evaluator else service.evaluator
    return one


def require_one_each(services: Sequence[Evaluate]) -> None:
    """Refuse two evaluations of a stream, which would one day write the same metrics at the same step."""
    by_stream: dict[str, Evaluate] = {}
    for service in services:
        first = by_stream.setdefault(service.stream, service)
        if first is not service:
            raise ConfigError(
                f"services {first.name!r} and {service.name!r} both evaluate stream {service.stream!r}; give "
                "one of them both schedules (Every(steps=100) | Every(epochs=1)), or the data a second name"
            )


def weights_of(run_dir: str | Path, spec: str | Path) -> Path:
    """Return the path of best weights ("best", "best/METRIC"), of a checkpoint by its name, or as given."""
    first, _, metric = str(spec).partition("/")
    if first == "best":
        paths = {name: each.path for name, each in best(run_dir).items() if each.path is not None}
        names = [name for name in paths if metric in ("", name, name.replace("/", "."))]
        if len(names) != 1:
            known = ", ".join(f"'best/{name}'" for name in paths) or "none; add Best(metric)"
            raise ConfigError(f"weights={str(spec)!r}: give one that the run keeps: {known}")
        return Path(paths[names[0]])
    path = record.to_read(run_dir) / "checkpoints" / str(spec)
    return path if path.exists() else Path(spec)


# ------------------------------------------------------------------------- a run that another process trains

POLL = 0.25
"""Seconds between two looks at the run directory."""

Committed: TypeAlias = tuple[str, str]
"""Name of a committed checkpoint, and the digest of its state."""


class CheckpointFollower:
    """Reader of a run that another process trains: takes no lock, waits for none, writes nothing."""

    def __init__(self, run_dir: Path, which: Which, throttle: float, timeout: float | None) -> None:
        if which not in get_args(Which):
            raise ConfigError(f"every={which!r}: give one of two; {nearest(str(which), get_args(Which))}")
        throttle = number("throttle", throttle, of="seconds", zero=True)
        timeout = number("timeout", timeout, of="seconds", zero=True, none="for no limit")
        self.run_dir, self._which, self._throttle, self._timeout = run_dir, which, throttle, timeout
        self._store = Store(run_dir)
        self._known: dict[object, Committed | None] = {}
        """Mark of each folder that was looked at -> its checkpoint, None for an interim one."""
        self._newest_file: object = None
        """Name and size of the newest journal file when the end was looked for last."""
        self._over = False
        self._alive_at = time.monotonic()

    def checkpoints(self, skipped: Collection[Committed]) -> Iterator[Committed]:
        """Yield each committed checkpoint once, or always the newest, until the run has ended."""
        yielded = set(skipped)
        last = float("-inf")
        while True:
            # asked first, so that a run that has ended has its last checkpoint in the list made next
            over = self.has_ended()
            committed = self._committed()
            candidates = committed[-1:] if self._which == "newest" else committed
            waiting = [one for one in candidates if one not in yielded]
            now = time.monotonic()
            if waiting and now - last >= self._throttle:
                last = self._alive_at = now
                yielded.add(waiting[0])
                yield waiting[0]
                continue
            if not waiting and (over or self._has_given_up()):
                return
            time.sleep(POLL)

    def _committed(self) -> list[Committed]:
        """List the checkpoints on disk, oldest first; those that vanish meanwhile are left out."""
        committed = []
        for name in self._store.names():
            path = self._store.path(name)
            try:
                status = path.stat()
                mark = (name, status.st_ino, status.st_ctime_ns)
                if mark not in self._known:
                    body = read_manifest(path)
                    self._known[mark] = None if is_interim(body["meta"]) else (str(name), str(body["digest"]))
            except (OSError, CheckpointError):
                continue
            committed.append(self._known[mark])
        return [one for one in committed if one is not None]

    def has_ended(self) -> bool:
        """Whether the run came to its end and nobody has it open."""
        try:
            is_open = record.is_held(self.run_dir)
        except OSError:  # a file system without locks: the journal alone tells
            is_open = False
        files = sorted((self.run_dir / "journal").glob("segment-*.evj"))
        newest_file = [(path.name, path.stat().st_size) for path in files[-1:]]
        if is_open or newest_file != self._newest_file:
            self._alive_at = time.monotonic()
        if is_open:
            return False
        if newest_file != self._newest_file:
            self._newest_file = newest_file
            try:
                self._over = record.RunJournal(self.run_dir).ended() is not None
            except RunDirError:
                self._over = False
        return self._over

    def _has_given_up(self) -> bool:
        if self._timeout is None or time.monotonic() - self._alive_at < self._timeout:
            return False
        state = "nobody trains it" if self.run_dir.exists() else "it is not there"
        print(f"{self.run_dir} has not ended, and {state} for {self._timeout:g} s: the watch ends here")
        return True
