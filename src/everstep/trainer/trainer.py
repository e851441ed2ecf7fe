"""`Trainer`: your step, your streams."""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Unpack

from everstep.arguments import checked_keywords
from everstep.contracts.data import Stream
from everstep.contracts.services import Service
from everstep.contracts.tasks import Task
from everstep.errors import ConfigError, RolledBack, UsageError
from everstep.loop.train_loop import loop_settings
from everstep.record import located
from everstep.schedule import Schedule
from everstep.services.console import Console, EpochLine
from everstep.services.evaluate import Evaluate
from everstep.state import decode, encode, isolated, seed_all
from everstep.supervisor import Ending, load
from everstep.supervisor.saving.user_state import UserState
from everstep.supervisor.settings import LoopOptions, service_list
from everstep.trainer.eval_loop import mapping, places_kept, prefixed, refuse_several
from everstep.trainer.evaluations import Evaluating, evaluates, one_batch, require_one_each
from everstep.trainer.named_streams import Data, NamedStreams
from everstep.trainer.trainer_loop import TrainerLoop


class Trainer(Evaluating):
    """Runs a task's steps over named streams.

        trainer = Trainer(Digits(), {"train": train, "valid": valid}, "runs/digits", max_epoch=20,
                          services=[EarlyStop("valid/accuracy", "max", patience=3)])
        ending = trainer.run_training()

    A second start of the program resumes.  `run_training` is a short program over `TrainLoop`; if it does not
    suit you, write your own with `open` and `epoch`.  After Model Garden's Trainer, Orbit and emloop's
    MainLoop.

    Args:
        task: your steps.
        streams: name to data.  `run_training` trains on "train".  Evaluated metrics get their stream's
            name as prefix ("valid/loss"), and so do the metrics of steps on any stream but "train".
        run_dir, services, and all arguments not listed here: as for `TrainLoop`; its state is the task's.
            Without any `Evaluate` among the services, a stream "valid" is evaluated each epoch.  `resume`
            counts for the first loop of this Trainer; later loops continue where the run is.
        seed: as for `TrainLoop`; what the task builds follows from it, too.

    Raises:
        ConfigError: the task is not a `Task`, or an argument is unknown or out of range.
    """

    @checked_keywords
    def __init__(
        self,
        task: Task,
        streams: Mapping[str, Data],
        run_dir: str | Path,
        *,
        services: Iterable[Service] = (),
        **options: Unpack[LoopOptions],
    ) -> None:
        if not isinstance(task, Task):
            raise ConfigError(f"{task!r} is not a Task; give an object of a class derived from everstep.Task")
        require_our_names(task)
        if task.applies_weight:
            options.setdefault("uneven", "weight")
        self.task, self.run_dir = task, run_dir
        self._streams = NamedStreams(streams)
        self.streams = self._streams.named
        self._options = options
        self._line = EpochLine()
        self._services = self._with_evaluation(service_list(services), options.get("default_services", True))
        settings = loop_settings(TrainerLoop.kind(), run_dir, self._services, self.streams, options)
        super().__init__(self._services, settings)
        self.seed, self._clock = settings.seed, settings.clock
        if not task.is_built:
            with nullcontext() if self.seed is None else isolated():
                if self.seed is not None:
                    seed_all(self.seed)
                task.build()
            task.is_built = True
        settings.state(task.state())  # refused here, before any loop is opened
        for service in evaluates(self._services):
            service.evaluator = service.evaluator or self._due

    def _with_evaluation(self, services: list[Service], defaults: bool) -> list[Service]:
        # copies: each evaluates for one Trainer
        services = [copy.copy(each) if isinstance(each, Evaluate) else each for each in services]
        evaluations = evaluates(services)
        can_evaluate = type(self.task).eval_step is not Task.eval_step
        if "train" in self.streams:
            self._streams.require_apart("train", self.streams["train"], "training")
        if defaults and not evaluations and can_evaluate and "valid" in self.streams:
            evaluations = [Evaluate("valid")]
            evaluations[0].is_default = True
            services = [*evaluations, *services]
        require_one_each(evaluations)
        for service in (each for each in evaluations if each.evaluator is None):
            self._streams.require_apart(service.stream, self._streams.get(service.stream), "evaluation")
        return [*services, self._line] if defaults else services

    @property
    def max_step(self) -> int | None:
        """The limit that was given."""
        return self._options.get("max_step")

    def run_training(
        self, *, max_step: int | None = None, evaluate: bool | Schedule = True, evaluate_end: bool = False
    ) -> Ending:
        """Train, or continue training, until a limit or a stop; a finished run runs no step.

        After a rollback by `Recovery` the training continues in this call; objects of the task outside
        its `state()` are then as the failed try left them; its plain attributes are restored.

        Args:
            max_step: total number of steps of the run, instead of the Trainer's own limit.
            evaluate: False to leave out every `Evaluate` (another process watches the run); a schedule
                to have them at other times than their own.
            evaluate_end: whether each also evaluates at the end by a limit, if it was not due there.

        Raises:
            ConfigError: `evaluate` is neither True, False nor a schedule.
            Interrupted: a signal, or the time budget; the state is saved.
        """
        services, began, again = self._evaluating(evaluate, evaluate_end), self._clock(), False
        while True:
            with suppress(RolledBack):
                with self._open_loop(max_step, services, began, again) as loop:
                    for _ in loop.iter_epochs():
                        for _ in self._epoch(loop, "train"):
                            pass
                return loop.ending
            again = True

    def in_turns(self, stream: Stream) -> Generator[TrainerLoop, None, Ending]:
        """Run a training on a stream in turns: yield the open loop after each step."""
        began, again = self._clock(), False
        while True:
            with suppress(RolledBack):
                with self._open_loop(None, self._services, began, again) as loop:
                    for _ in loop.iter_epochs():
                        yield from self._epoch(loop, {"train": stream})
                return loop.ending
            again = True

    def _evaluating(self, when: bool | Schedule, end: bool) -> list[Service]:
        """Return the services: without evaluations, with these at other times, or (True) as they are."""
        if not isinstance(when, bool | Schedule):
            raise ConfigError(f"evaluate={when!r}: give True, False or a schedule, such as Every(epochs=5)")
        services: list[Service] = []
        for service in self._services:
            if isinstance(service, Evaluate):
                if when is False:
                    continue
                # a copy: the user's service keeps its own schedule for other trainings
                service = copy.copy(service)
                service.schedule = copy.deepcopy(when) if isinstance(when, Schedule) else service.schedule
                service.ends = (lambda: self._loop is not None and self._loop.should_stop()) if end else None
            services.append(service)
        return services

    def _introduce(self, loop: TrainerLoop) -> None:
        """Say at the start of a training what is trained, and what may have been forgotten."""
        loop.print_training_summary()
        if loop.should_stop():
            return  # the run is finished
        if not loop.may_end:
            loop.println(
                "no limit is given: the training continues until it is interrupted; to end it, give "
                "max_epoch=, max_step= or max_time=, or a service such as StopAfter or EarlyStop"
            )
        if others := self.streams.keys() - {"train", *(each.stream for each in evaluates(self._services))}:
            names, one = ", ".join(sorted(others)), f"everstep.Evaluate({min(others)!r})"
            loop.println(f"streams not evaluated while training: {names}; to evaluate one: services=[{one}]")

    def train(self, num_steps: int) -> Ending:
        """Train until the run has made `num_steps` steps in all."""
        return self.run_training(max_step=num_steps)

    def open(self, *, max_step: int | None = None) -> AbstractContextManager[TrainerLoop]:
        """Open the loop of `run_training`, for a program of your own around `epoch`."""
        return self._open_loop(max_step, self._services)

    @contextmanager
    def _open_loop(
        self, max_step: int | None, services: list[Service], began: float | None = None, again: bool = False
    ) -> Iterator[TrainerLoop]:
        """Open a loop; for a training that `began` at a time, and that goes on `again` after a rollback."""
        if self._loop is not None:
            raise UsageError("this Trainer's loop is open; leave its with block before you open another")
        options: LoopOptions = {"init_fn": self.task.initialize, **self._options, "seed": self.seed}
        if max_step is not None:
            options["max_step"] = max_step
        if began is not None and again and (limit := options.get("max_time")) is not None:
            # never 0, which max_time refuses: a loop without time left is interrupted at once
            options["max_time"] = max(limit + began - self._clock(), 1e-9)
        loop = TrainerLoop(
            self.run_dir, self.task.state(), services=services, streams=self.streams, **options
        )
        loop.belongs_to(self.task)
        self._line.print_line = loop.print_line
        # the loop changes the objects: the source of their weights is not known from here on
        self._weights = None
        try:
            with self._streams.in_a_loop(), loop:
                self._loop = loop
                self.task.epoch = loop.epoch  # an evaluation may come before an epoch
                if began is not None and not again:
                    self._introduce(loop)
                yield loop
        finally:
            if self._loop is not None and self._options.get("resume") is False and loop.is_continued:
                self._options["resume"] = True  # it has started over; from here on the run continues
            self._loop = None
        self._weights = loop.loaded_weights()

    def epoch(
        self, train_streams: Iterable[Any] | str = "train", eval_streams: Iterable[Any] | str = ()
    ) -> None:
        """Train on some streams, one after another, then evaluate others: one epoch of the run.

        Inside the loop of `open` this is the body of an epoch.  Outside, the run is opened, trained for one
        epoch and closed; a finished run runs no step.

        Args:
            train_streams: names, data, or name to data; data without a name is "train", "train2" ...
            eval_streams: the same; data without a name is "valid", "valid2" ...  A Trainer's
                default `Evaluate` leaves out what is evaluated here.

        Raises:
            ConfigError: no stream has that name.
            MetricError: a service evaluates the same stream at the same step.
        """
        if self._loop is not None:
            for _ in self._epoch(self._loop, train_streams, eval_streams):
                pass
            return
        with self.open() as loop:
            for _ in loop.iter_epochs():
                self.epoch(train_streams, eval_streams)
                break  # the epoch is closed, and saved, where the loop is left; the run is not finished

    def _epoch(
        self, loop: TrainerLoop, train_streams: Iterable[Any] | str, eval_streams: Iterable[Any] | str = ()
    ) -> Generator[TrainerLoop, None, None]:
        task, together, prefix = self.task, loop.ranks > 1, ""
        trained = self._streams.chosen(train_streams, "train")
        for name, stream in trained:
            self._streams.require_apart(name, stream, "training")
        task.epoch = loop.epoch
        if trained:
            task.train_loop_begin()
            require_epoch(task, loop.epoch)
        for name, stream in trained:
            prefix = "" if name == "train" else f"{name}/"
            if type(task).next_train_inputs is not Task.next_train_inputs:
                stream = self._streams.inputs(name, stream, task.next_train_inputs)
            for _, batch in loop.iter_steps(stream, name):
                if together:
                    task.batch_weight = loop.batch_weight
                metrics = task.train_step(batch)
                # a plain dictionary of "train" passes as it is: collect_metrics checks it
                if prefix or type(metrics) is not dict:
                    metrics = prefixed(prefix, mapping(metrics, task, "train_step"))
                loop.collect_metrics(metrics)
                yield loop
        if trained:
            prefix = prefix if len(trained) == 1 else ""
            if (last := task.train_loop_end()) is not None:
                loop.collect_metrics(prefixed(prefix, mapping(last, task, "train_loop_end")))
            require_epoch(task, loop.epoch)
        for name, stream in self._streams.chosen(eval_streams, "valid"):
            service = self._by_stream.get(name)
            with loop.evaluation():
                loop.collect_evaluation(self._measure(name, stream))
            if service is not None and service.is_default:
                service.left_out_at = loop.step

    def smoke_test(self) -> None:
        """Try each part once: a training step, a batch of each evaluated stream, a save and a restore.

        The test runs in a directory of its own, without the services; afterwards nothing is left of it: the
        task's state, the random state and the data's place are as they were, and no worker runs.  (An
        iterator of a class of your own, without `state_dict`, has given its first batches.)

        Raises:
            UsageError: this Trainer's loop is open, or this is one of several processes that train together.
            Exception: whatever fails; the run is not begun.
        """
        refuse_several("smoke_test()", "call it in a single process, before the job is started")
        if self._loop is not None:
            raise UsageError("smoke_test() inside the loop; call it before: trainer.smoke_test()")
        task = self.task
        top = located(gettempdir())  # a drill has one of its own
        top.mkdir(parents=True, exist_ok=True)
        services: list[Service] = [Console(sink=lambda line: None)]
        services += [one_batch(each, self._due) for each in evaluates(self._services)]
        folder = TemporaryDirectory(prefix="everstep-smoke-", dir=top)
        with unchanged(task, self.streams.values()), folder as run:
            trainer = Trainer(task, self.streams, run, services=services, seed=self.seed)
            trainer._takes = self._takes
            trainer.train(1)
            load(run, task.state())


@contextmanager
def unchanged(task: Task, streams: Collection[Stream]) -> Iterator[None]:
    """Bring the task's state and gradients, the data and random state back after the block."""
    user = UserState(task.state())
    user.set_task(task, saved=True)
    with isolated(), places_kept(streams), ExitStack() as stack:
        user.open(stack)
        for stream in streams:
            stack.callback(stream.end_workers)
        state = encode(user.save())
        try:
            yield
        finally:
            user.load(decode(state), 0)


_TASK = {
    "training_step": "train_step",
    "validation_step": "eval_step",
    "predict_step": "inference_step",
    "configure_optimizers": "build_optimizer",
}


def require_epoch(task: Task, epoch: int) -> None:
    """Refuse a task that counts epochs in the attribute that has their number."""
    if task.epoch != epoch:
        raise ConfigError(
            f"{type(task).__name__} has set its attribute epoch to {task.epoch!r} in epoch {epoch}: the "
            "Trainer sets it, also after a resume; only read it, or give a count of your own another name"
        )


def require_our_names(task: Task) -> None:
    """Refuse a name that is another library's method, which nothing calls, or that no Trainer can set."""
    for foreign, name in _TASK.items():
        inherited = getattr(getattr(task, name), "__module__", "").startswith("everstep.")
        if inherited and hasattr(type(task), foreign):
            raise ConfigError(f"{type(task).__name__}.{foreign} is not called by a Trainer; name it {name}")
    epoch = getattr(type(task), "epoch", None)
    if isinstance(epoch, property) and epoch.fset is None:
        raise ConfigError(f"{type(task).__name__}.epoch is a property that no Trainer can set; rename it")
