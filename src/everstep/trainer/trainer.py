"""`Trainer`: your step, your streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from everstep.contracts import EvalStep, Moment, Service, Stream, Task
from everstep.data import as_stream
from everstep.errors import ConfigError, MetricError, NoCheckpointError, RunDirError, UsageError, nearest
from everstep.keywords import checked_keywords
from everstep.loop import TrainLoop
from everstep.record import located
from everstep.services.best import Best
from everstep.services.console import Console
from everstep.services.epoch_line import EpochLine
from everstep.services.evaluate import Evaluate, steps
from everstep.state import isolated, seed_all
from everstep.supervisor import Ending, load
from everstep.supervisor.board import listed
from everstep.trainer.evaluation import drawn_again, evaluate, evaluating, mapping, unchanged
from everstep.trainer.inputs import Inputs

Data = Any
"""A stream, a DataLoader, anything iterable (`everstep.data`)."""


class TrainerLoop(TrainLoop):
    """The loop that a Trainer opens: it has moments of evaluations, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._found: set[str] = set()
        """Metrics that the program's own evaluations found."""

    def look_at(self, step: EvalStep) -> None:
        """Show a batch of an evaluation to the observers."""
        self._announce(Moment.AFTER_EVAL_STEP, step)

    def collect_found(self, found: Mapping[str, float]) -> None:
        """Collect what an evaluation of the program's found."""
        if not self._replaying:
            self._require_new(found)
        self._found.update(found)
        self.collect_metrics(found)

    def evaluated(self, found: Mapping[str, float], seconds: float) -> None:
        """A service has evaluated, which is no time of steps; the boundary at which it did goes on."""
        self._require_new(found)
        self._estimator.exclude(seconds)
        self._evaluated += seconds
        self._at_boundaries -= seconds
        self._fire(Moment.AFTER_EVALUATION, found)

    def _require_new(self, found: Mapping[str, float]) -> None:
        """A name of an evaluation's is nobody else's: best values and early stops would mix them."""
        if clash := found.keys() & (self._collector.given() - self._found):
            raise MetricError(
                f"{min(clash)!r} is what an evaluation found and a metric that the program collects itself; "
                "give one of them another name, or leave it to the evaluation"
            )

    @property
    def bests(self) -> list[Best]:
        """The services that track a best value, the default one included."""
        return self._board.all(Best)


class Trainer:
    """Runs a task's steps over named streams.

        trainer = Trainer(Digits(), {"train": train, "valid": valid}, "runs/digits", max_epoch=20,
                          services=[EarlyStop("valid/accuracy", "max", patience=3)])
        ending = trainer.run_training()

    Run twice, it resumes.  `run_training` is a short program over `TrainLoop`; if it is not yours, write
    your own, with `open` and `epoch`.  Carries on Model Garden's Trainer, Orbit and emloop's MainLoop.

    Args:
        task: your steps.
        streams: name to data.  `run_training` trains on "train".  What is evaluated gets its stream's
            name as prefix ("valid/loss"), and so do the metrics of steps on any stream but "train".
        run_dir, services, and all arguments not listed here: as for `TrainLoop`; its state is the task's.
            Without any `Evaluate` among the services, a stream "valid" is evaluated each epoch.
        seed: as for `TrainLoop`; what the task builds follows from it, too.

    Raises:
        ConfigError: the task is no `Task`, or an argument is unknown or out of range.
    """

    @partial(checked_keywords, forwards_to=TrainLoop.__init__)
    def __init__(
        self,
        task: Task,
        streams: Mapping[str, Data],
        run_dir: str | Path,
        *,
        services: Iterable[Service] = (),
        seed: int | None = None,
        **loop: Any,
    ) -> None:
        if not isinstance(task, Task):
            raise ConfigError(f"{task!r} is no Task; give an object of a class that is derived from Task")
        if "state" in loop:
            raise ConfigError("state= of a Trainer is its task's: return it from the task's state() method")
        self.task, self.run_dir = task, run_dir
        self.streams = {name: as_stream(data) for name, data in _named(streams).items()}
        self._unnamed: dict[str, tuple[Data, Stream]] = {}
        """In a loop, data that was given where a name could be, by the name that it got, and its stream."""
        self._inputs: dict[str, Inputs] = {}
        """In a loop, what the steps get of each stream, where the task makes that of several batches."""
        self._places: dict[int, tuple[Any, str, str]] = {}
        """By id, what keeps its own place in the data, what it is used for, and as which stream."""
        self._loop: TrainerLoop | None = None
        self._has_weights = False
        """Whether the task's objects are as the run left them."""
        self._seed = seed
        self._options = loop
        self._line = EpochLine()
        self._services = self._with_evaluation(listed(services), loop.get("default_services", True))
        self._build()
        TrainLoop(run_dir, task.state(), services=self._services, seed=seed, **loop)  # refuses what is wrong

    def _build(self) -> None:
        with nullcontext() if self._seed is None else isolated():
            if self._seed is not None:
                seed_all(self._seed)
            self.task.build()

    def _with_evaluation(self, services: list[Service], defaults: bool) -> list[Service]:
        given = [service for service in services if isinstance(service, Evaluate)]
        can = type(self.task).eval_step is not Task.eval_step
        if "train" in self.streams:
            self._require_apart("train", self.streams["train"], "training")
        if defaults and not given and can and "valid" in self.streams:
            given = [Evaluate("valid")]
            services = [*given, *services]
        for service in given:
            self._require_apart(service.stream, self._stream(service.stream), "evaluation")
            service.evaluator = self._evaluate_due
        return [*services, self._line] if defaults else services

    # ------------------------------------------------------------------------------- training

    def run_training(self, *, max_step: int | None = None) -> Ending:
        """Train, or go on training, until a limit or a stop; a finished run runs no step.

        Args:
            max_step: total number of steps of the run, instead of the Trainer's own limit.

        Raises:
            Interrupted: a signal, or the time budget; the state is saved.
        """
        with self.open(max_step=max_step) as loop:
            loop.print_training_summary()
            for _ in loop.iter_epochs():
                self.epoch()
        return loop.ending

    def train(self, num_steps: int) -> Ending:
        """Train until the run has made `num_steps` steps in all."""
        return self.run_training(max_step=num_steps)

    @contextmanager
    def open(self, *, max_step: int | None = None) -> Iterator[TrainerLoop]:
        """The loop that `run_training` runs, for a program of your own around `epoch`."""
        if self._loop is not None:
            raise UsageError("this Trainer's loop is open; leave its with block before you open another")
        options = self._options if max_step is None else self._options | {"max_step": max_step}
        options = {"init_fn": self.task.initialize, **options}
        loop = TrainerLoop(
            self.run_dir, self.task.state(), services=self._services, seed=self._seed, **options
        )
        self._line.bests = loop.bests
        places = dict(self._places)
        try:
            with loop:
                self._loop, self._has_weights = loop, True
                yield loop
        except BaseException:
            self._has_weights = False
            raise
        finally:
            self._loop, self._places = None, places
            self._unnamed.clear()
            self._inputs.clear()

    def epoch(
        self, train_streams: Iterable[Any] | str = "train", eval_streams: Iterable[Any] | str = ()
    ) -> None:
        """Train on some streams, one after another, then evaluate others; for use in an epoch of `open`.

        Args:
            train_streams: names, data, or name to data; data without a name is "train", "train2" ...
            eval_streams: the same; data without a name is "valid", "valid2" ...

        Raises:
            UsageError: no loop is open.
            ConfigError: no stream has that name.
        """
        loop, task = self._loop, self.task
        if loop is None:
            raise UsageError(
                "epoch() outside a loop; call it inside: with trainer.open() as loop: "
                "for _ in loop.iter_epochs(): trainer.epoch()"
            )
        for name, stream in self._chosen(train_streams, "train"):
            self._require_apart(name, stream, "training")
            prefix = "" if name == "train" else f"{name}/"
            task.train_loop_begin()
            for _, batch in loop.iter_steps(self._inputs_of(name, stream), name):
                metrics = task.train_step(batch)
                if prefix or type(metrics) is not dict:
                    metrics = _prefixed(prefix, mapping(metrics, task, "train_step"))
                loop.collect_metrics(metrics)
            if (last := task.train_loop_end()) is not None:
                loop.collect_metrics(_prefixed(prefix, mapping(last, task, "train_loop_end")))
        for name, stream in self._chosen(eval_streams, "valid"):
            with loop.evaluation():
                loop.collect_found(self._evaluate(name, stream))

    def _inputs_of(self, name: str, stream: Stream) -> Stream:
        """What the steps get of a stream, the same object in every epoch."""
        if type(self.task).next_train_inputs is Task.next_train_inputs:
            return stream
        known = self._inputs.get(name)
        if known is None or known.stream is not stream:
            known = self._inputs[name] = Inputs(stream, self.task.next_train_inputs)
        return known

    def smoke_test(self) -> None:
        """Try everything once: a training step, a batch of each evaluated stream, a save and a restore.

        It happens in a directory of its own, without the services; afterwards nothing is left of it: the
        task's state, the random state and the data's place are as they were, and no worker runs.  (An
        iterator of a class of your own, without `state_dict`, has given its first batches.)

        Raises:
            UsageError: this Trainer's loop is open.
            Exception: whatever fails; the run is not begun.
        """
        if self._loop is not None:
            raise UsageError("smoke_test() inside the loop; call it before: trainer.smoke_test()")
        task = self.task
        evaluated = [service for service in self._services if isinstance(service, Evaluate)]
        with unchanged(task, self.streams.values()), _scratch() as folder:
            services: list[Service] = [Console(sink=lambda line: None)]
            services += [Evaluate(each.stream, num_steps=1, name=each.name) for each in evaluated]
            trainer = Trainer(task, self.streams, f"{folder}/run", services=services, seed=self._seed)
            trainer.train(1)
            load(f"{folder}/run", task.state())

    # ----------------------------------------------------------------------------- evaluation

    def run_evaluation(self, stream: Any = "valid") -> dict[str, float]:
        """Evaluate all of a stream on the run's newest checkpoint, and print what was found."""
        self._load()
        found = self.evaluate(stream)
        print("; ".join(f"{name}: {value:.6g}" for name, value in found.items()))
        return found

    def evaluate(self, stream: Any = "valid", num_steps: int = -1) -> dict[str, float]:
        """Evaluate a stream on the task's weights as they are; before any training, on the newest checkpoint.

        Args:
            stream: its name, or data, which is called "valid".
            num_steps: batches, 1 or more; -1: until the stream ends (one without an end needs a number).

        Returns:
            Names, with the stream's prefix, to values.

        Raises:
            NoCheckpointError: nothing was trained: random weights are not evaluated.
        """
        self._require_weights()
        ((name, data),) = self._chosen([stream], "valid")
        return self._evaluate(name, data, steps(num_steps))

    def predict(self, stream: Any = "test") -> Iterator[Any]:
        """What `inference_step` returns for each batch of a stream; the weights as for `evaluate`."""
        self._require_weights()
        ((name, data),) = self._chosen([stream], "test")
        self._require_apart(name, data, "evaluation")
        with closing(data.open(name, 0, seed=self._stream_seed)) as batches:
            for batch in batches:
                with evaluating(self.task):  # not around the yield: what the caller does is not ours
                    prediction = self.task.inference_step(batch)
                yield prediction

    def _evaluate_due(self, name: str, num_steps: int) -> dict[str, float]:
        loop = self._loop
        assert loop is not None
        began = loop.clock()
        found = self._evaluate(name, self._stream(name), num_steps)
        seconds = loop.clock() - began
        loop.evaluated(found, seconds)
        return {**found, f"{name}/eval_time": seconds}

    def _evaluate(self, name: str, stream: Stream, num_steps: int = -1) -> dict[str, float]:
        loop = self._loop
        before = None if loop is None else loop.updates
        seen = _nobody if loop is None else loop.look_at
        self._require_apart(name, stream, "evaluation")
        comes_again = loop is not None or stream in self.streams.values()
        with drawn_again([stream] if comes_again else []):
            found = evaluate(self.task, stream, name, num_steps, self._stream_seed, seen)
        if loop is not None and loop.updates != before:
            raise UsageError(
                f"an optimizer of the state stepped while stream {name!r} was evaluated; train in "
                "train_step, and leave optimizer.step() out of eval_step"
            )
        return _prefixed(f"{name}/", found)

    @property
    def _stream_seed(self) -> int:
        return self._loop.seed if self._loop is not None else self._seed or 0

    def _require_weights(self) -> None:
        if not self._has_weights:
            self._load()

    def _load(self) -> None:
        if self._loop is not None:
            return  # what is open has loaded them, and goes on
        try:
            load(self.run_dir, self.task.state())
        except (NoCheckpointError, RunDirError) as error:
            raise NoCheckpointError(
                f"nothing to evaluate: {error}; train first: weights that no run has made are not evaluated"
            ) from error
        self._has_weights = True

    # -------------------------------------------------------------------------------- streams

    def _require_apart(self, name: str, stream: Stream, use: str) -> None:
        """Data that keeps its own place has one: an evaluation would move the training's.

        Asked in a loop, and of what is known before it; outside, a checkpoint knows the place.
        """
        place = getattr(stream, "keeps_place", None)
        if place is None or (self._loop is None and self._has_weights):
            return
        _, its_use, its_name = self._places.setdefault(id(place), (place, use, name))
        if its_use != use:
            raise ConfigError(
                f"the {use} on stream {name!r} reads the {type(place).__name__} that the {its_use} on "
                f"stream {its_name!r} reads, which keeps its own place in the data and would lose it; "
                "give a second one over the same samples as a stream of its own"
            )

    def _stream(self, name: str) -> Stream:
        if name not in self.streams:
            raise ConfigError(f"no stream is named {name!r}; {nearest(name, self.streams)}")
        return self.streams[name]

    def _chosen(self, given: Iterable[Any] | str, default: str) -> list[tuple[str, Stream]]:
        """(name, stream) of each that was given by name, as data or as name to data."""
        if isinstance(given, Mapping):
            return [(name, self._stream_over(name, data)) for name, data in _named(given).items()]
        if not isinstance(given, str | list | tuple):
            raise ConfigError(
                f"a {type(given).__name__} was given as the streams of an epoch; give a list, as in "
                "[loader], a name, or names to data"
            )
        named: dict[str, Stream] = {}
        for number, each in enumerate([given] if isinstance(given, str) else given, 1):
            name = each if isinstance(each, str) else default if number == 1 else f"{default}{number}"
            stream = self._stream(name) if isinstance(each, str) else self._stream_over(name, each)
            if named.setdefault(name, stream) is not stream:
                raise ConfigError(
                    f"two streams are called {name!r}; give names to data, as in {{'train': a, 'more': b}}"
                )
        return list(named.items())

    def _stream_over(self, name: str, data: Data) -> Stream:
        """The stream over data that was given where a name could be: in a loop the same for the same data."""
        if self._loop is None:
            return as_stream(data)
        known = self._unnamed.get(name)
        if known is None or known[0] is not data:
            known = self._unnamed[name] = (data, as_stream(data))
        return known[1]


def _nobody(step: EvalStep) -> None:
    """Looks at the batches of an evaluation outside a loop."""


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory for runs, also where EVERSTEP_ROOT moves them; gone afterwards."""
    with TemporaryDirectory(prefix="everstep-smoke-") as folder:
        moved = located(folder)
        try:
            yield moved
        finally:
            rmtree(moved, ignore_errors=True)


def _prefixed(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in metrics.items()}


def _named(streams: Any) -> Mapping[str, Data]:
    if not isinstance(streams, Mapping):
        raise ConfigError(
            f"streams is a {type(streams).__name__}; give names to data, as in "
            '{"train": train, "valid": valid}'
        )
    for name in streams:
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"stream name {name!r}: give a text without '/', not empty")
    return streams
