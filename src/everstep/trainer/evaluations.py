"""Evaluations of a Trainer: of the weights of its open loop, or of weights that are loaded."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.contracts.data import Stream
from everstep.contracts.group import Group, require_same
from everstep.contracts.services import Moment, Service
from everstep.contracts.tasks import Task
from everstep.errors import CheckpointError, ConfigError, NoCheckpointError, RunDirError, UsageError
from everstep.group import find_group
from everstep.record import Evaluation, RunDir, RunJournal, evaluations, located, record_evaluation, to_read
from everstep.schedule import Every
from everstep.services.evaluate import Evaluate, Evaluator, steps
from everstep.supervisor import Loaded, best, load
from everstep.supervisor.data_ranks import divide, read_data_ranks
from everstep.supervisor.opening.configuration import Configuration
from everstep.supervisor.settings import LoopOptions
from everstep.trainer.checkpoint_follower import CheckpointFollower
from everstep.trainer.eval_loop import evaluate, evaluating, prefixed
from everstep.trainer.eval_ranks import EvalRanks, why_whole
from everstep.trainer.named_streams import NamedStreams
from everstep.trainer.trainer_loop import TrainerLoop


class Evaluations:
    """What a Trainer evaluates, in its loop and outside.

    Attributes:
        by_stream: the services that evaluate a stream of the Trainer, by its name.
        loop: the Trainer's loop while it is open.
        weights: source of the task's objects, while they are as the run left them.
        takes: outputs of evaluations that services look at.
    """

    def __init__(
        self,
        task: Task,
        run_dir: str | Path,
        streams: NamedStreams,
        services: Sequence[Service],
        options: LoopOptions,
    ) -> None:
        self.task, self.run_dir = task, run_dir
        self._streams, self._services = streams, services
        self.by_stream = {each.stream: each for each in evaluates(services) if each.evaluator is None}
        self._data_ranks = read_data_ranks(options.get("data_ranks"))
        self._config = Configuration.of(options.get("config")) or Configuration({})
        self._facts: dict[str, Any] | None = None
        self.loop: TrainerLoop | None = None
        self.weights: Loaded | None = None
        looking = [each for each in services if Moment.AFTER_EVAL_STEP in each.moments]
        self.takes = {name for each in looking for name in each.output_names}
        self._looks_at_batches = bool(looking)
        self._printed: set[str] = set()
        """Sentences about evaluations that were printed."""

    def names(self) -> list[str]:
        """List the streams to evaluate: those of services, else "valid"."""
        return list(self.by_stream) or ["valid"]

    def load(self, spec: str | Path | None = None) -> None:
        """Load weights: those asked for, else the newest checkpoint; an open loop has loaded its own."""
        if self.loop is not None:
            if spec is not None:
                raise UsageError(f"weights={str(spec)!r} inside the loop, which has its own; leave it first")
            return
        if spec is not None:
            self.weights = load(weights_of(self.run_dir, spec), self.task.state())
            return
        try:
            self.weights = load(self.run_dir, self.task.state())
        except (NoCheckpointError, RunDirError) as error:
            raise NoCheckpointError(f"nothing to evaluate: {error}; train first") from error

    def _require_weights(self, spec: str | Path | None) -> None:
        if spec is not None or self.weights is None:
            self.load(spec)

    @property
    def _seed(self) -> int:
        if self.loop is not None:
            return self.loop.seed
        assert self.weights is not None
        seed = self.weights.seed
        return RunDir.open(to_read(self.run_dir), create=False).seed if seed is None else seed

    def evaluate(self, stream: Any, num_steps: int, spec: str | Path | None) -> dict[str, float]:
        """Evaluate a stream, by its name, or data; outside the loop a named one is recorded.

        Args:
            num_steps: number of batches, 1 or more; -1: until the stream ends.
            spec: weights to load; None: as they are, or the newest checkpoint.
        """
        self._require_weights(spec)
        ((name, data),) = self._streams.chosen([stream], "valid")
        if self.loop is None and isinstance(stream, str):
            return self._evaluate_saved(name, steps(num_steps)).metrics
        return self.measure(name, data, steps(num_steps), self.by_stream.get(name))

    def due(self, service: Evaluate) -> dict[str, float]:
        """Evaluate the stream of a service that is due in the loop."""
        loop = self.loop
        assert loop is not None
        began = loop.clock()
        metrics = self.measure(service.stream, self._streams.get(service.stream), service.num_steps, service)
        seconds = loop.clock() - began
        loop.evaluated(metrics, seconds)
        return {**metrics, f"{service.stream}/eval_time": seconds}

    def measure(
        self, name: str, stream: Stream, num_steps: int = -1, service: Evaluate | None = None
    ) -> dict[str, float]:
        """Evaluate a stream on the weights as they are, and record nothing."""
        with self._together() as group:
            return self._metrics(group, name, stream, num_steps, service)

    def _evaluate_saved(self, name: str, num_steps: int) -> Evaluation:
        """Evaluate a stream outside the loop, and record it."""
        with self._together() as group:
            weights = self.weights
            assert weights is not None
            began = time.monotonic()
            metrics = self._metrics(group, name, self._streams.get(name), num_steps, self.by_stream.get(name))
            seconds = time.monotonic() - began
            evaluation = Evaluation(
                name,
                weights.name,
                weights.digest,
                weights.step,
                weights.epoch,
                num_steps,
                metrics,
                time.time(),
            )
            if group.writer:
                self._record(evaluation, seconds)
        return evaluation

    def _record(self, evaluation: Evaluation, seconds: float) -> None:
        """Record an evaluation that took some seconds; warn of a disk that refuses."""
        wall = {f"{evaluation.stream}/eval_time": seconds}
        if self._facts is None:
            self._facts = self._config.facts(self._seed, self._services)
        try:
            record_evaluation(to_read(self.run_dir), evaluation, self._facts, wall)
        except OSError as error:
            warnings.warn(
                f"an evaluation is not recorded: {error}; repair the disk, or free space", RuntimeWarning, 4
            )

    @contextmanager
    def _together(self) -> Iterator[Group]:
        """Join the ranks that evaluate the same weights: those of the open loop, else all that call this."""
        if self.loop is not None:
            yield self.loop.group
            return
        weights = self.weights
        assert weights is not None
        with closing(find_group()) as group:
            divide(group, self._data_ranks)
            gathered = group.gather(asdict(weights), title := "the step of the weights to evaluate")
            # not the digests: a rank that was in the loop knows that of its own part
            require_same([each["step"] for each in gathered], title)
            self.weights = Loaded(**gathered[0])
            yield group

    def _metrics(
        self, group: Group, name: str, stream: Stream, num_steps: int, service: Evaluate | None
    ) -> dict[str, float]:
        loop = self.loop
        if loop is not None:  # it would move the training's data; a resume brings that back
            self._streams.require_apart(name, stream, "evaluation")
        comes_again = loop is not None or stream in self._streams.named.values()
        updates = None if loop is None else loop.updates
        look: dict[str, Any] = {"takes": self.takes, "comes_again": comes_again}
        if loop is not None:
            look |= {"say": loop.println, "poll": loop.poll_evaluation, "on_step": loop.look_at}
        ranks = EvalRanks(group, why_whole(self.task, service, self._looks_at_batches))
        metrics = evaluate(self.task, stream, name, num_steps, self._seed, service, **look, ranks=ranks)
        if (notice := ranks.notice(name)) is not None and notice not in self._printed:
            self._printed.add(notice)
            if self.loop is not None:
                self.loop.println(notice)
        if loop is not None and loop.updates != updates:
            raise UsageError(
                f"an optimizer of the state stepped while stream {name!r} was evaluated; train in train_step"
            )
        return prefixed(f"{name}/", metrics)

    def predict(self, name: str, data: Stream, spec: str | Path | None) -> Iterator[Any]:
        """Yield what the task infers from each batch of a stream; weights as for `evaluate`."""
        self._require_weights(spec)
        with closing(data.open(name, 0, seed=self._seed)) as batches:
            for batch in batches:
                # not around the yield: the caller's code must not run in evaluation mode
                with evaluating(self.task, self._seed):
                    prediction = self.task.inference_step(batch)
                yield prediction

    def watch(
        self, follower: CheckpointFollower, names: Sequence[str], max_step: int | None
    ) -> Iterator[Evaluation]:
        """Evaluate checkpoints that another process saves, each stream of each once; yield the results."""
        try:
            earlier = evaluations(located(self.run_dir))
        except RunDirError:  # the run does not exist yet
            earlier = []
        recorded = {(e.stream, e.num_steps, e.checkpoint, e.digest) for e in earlier}
        pairs = {(name, self._num_steps(name)) for name in names}
        on = Counter((checkpoint, digest) for *pair, checkpoint, digest in recorded if tuple(pair) in pairs)
        for committed in follower.checkpoints([key for key, count in on.items() if count == len(pairs)]):
            path = follower.run_dir / "checkpoints" / committed[0]
            try:
                weights = self.weights = load(path, self.task.state())
            except (CheckpointError, OSError) as error:
                reason = "it was deleted while it was read" if not path.exists() else str(error)
                print(f"checkpoint {path.name} is passed over: {reason}", flush=True)
                continue
            for name, num_steps in sorted(pairs, key=lambda one: names.index(one[0])):
                if (name, num_steps, *committed) not in recorded:
                    yield self._evaluate_saved(name, num_steps)
            if max_step is not None and weights.step >= max_step:
                return

    def all(self, *, newest: bool, spec: str | Path | None) -> dict[str, float]:
        """Evaluate each stream of `names`; known metrics of the same weights are not found again."""
        if newest:
            self.load()
        else:
            self._require_weights(spec)
        is_asked = newest or spec is not None or self.loop is not None
        metrics: dict[str, float] = {}
        names = self.names()
        with self._together() as group:
            # the writer's: the others may have read the record before its last pages
            known = group.share(
                [{} if is_asked else self._known_metrics(name) for name in names], "earlier evaluations"
            )
        for name, earlier in zip(names, known, strict=True):
            metrics |= earlier or self.evaluate(name, self._num_steps(name), None)
        return metrics

    def _known_metrics(self, stream: str) -> dict[str, float]:
        """Find the metrics of these weights by the loop's last evaluation or a recorded one; else empty.

        That of the loop is read in the journal: an earlier start may have made it.
        """
        service, weights, run_dir = self.by_stream.get(stream), self.weights, to_read(self.run_dir)
        assert weights is not None
        stats = {} if service is None else service.stats
        required = {f"{stream}/{metric}/{name}" for metric, names in stats.items() for name in names}
        if service is not None and Path(weights.path).resolve().is_relative_to(run_dir.resolve()):
            rows = [row for row in RunJournal(run_dir).rows() if row.phase == f"eval/{service.name}"]
            last = max((row.step for row in rows), default=None)
            metrics = {row.name: row.value for row in rows if row.step == last}
            metrics.pop(f"{stream}/eval_time", None)
            if last == weights.step and required <= metrics.keys():
                return metrics
        key = stream, self._num_steps(stream), weights.digest
        for each in reversed(evaluations(run_dir)):
            if (each.stream, each.num_steps, each.digest) == key and required <= each.metrics.keys():
                return each.metrics
        return {}

    def _num_steps(self, stream: str) -> int:
        service = self.by_stream.get(stream)
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
        paths = {name: record.path for name, record in best(run_dir).items() if record.path is not None}
        names = [name for name in paths if metric in ("", name, name.replace("/", "."))]
        if len(names) != 1:
            known = ", ".join(f"'best/{name}'" for name in paths) or "none; add Best(metric)"
            raise ConfigError(f"weights={str(spec)!r}: give one that the run keeps: {known}")
        return Path(paths[names[0]])
    path = to_read(run_dir) / "checkpoints" / str(spec)
    return path if path.exists() else Path(spec)
