"""`TrainLoop`: epochs, steps, metrics, timers and lines for a loop that you write."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from everstep import backends
from everstep.arguments import checked_keywords, flag, integer
from everstep.contracts.group import Group
from everstep.contracts.services import Moment, Service
from everstep.errors import ConfigError, MetricError, UsageError
from everstep.loop.epochs import Epochs, Steps
from everstep.metrics import MetricFormatter, Window, environment_table, log_line, parameter_table
from everstep.metrics.collector import Reader, all_stats, is_wall, resolve, to_scalar
from everstep.metrics.formatting import checked_formatter
from everstep.metrics.statistics import mean_of_means
from everstep.services.best import Best, direction
from everstep.services.judges import EarlyStop
from everstep.state import isolated
from everstep.supervisor.board import find_service
from everstep.supervisor.door import Door
from everstep.supervisor.engine import Engine
from everstep.supervisor.settings import LoopKind, LoopOptions, Settings, service_list


class TrainLoop(Door):
    """Epochs, steps and metrics, kept as safe as by a `Supervisor`; you write the two `for` loops.

        with TrainLoop("runs/digits", state={"model": model, "optimizer": optimizer}, max_epoch=20) as loop:
            for epoch in loop.iter_epochs():
                for step, (x, y) in loop.iter_steps(train):
                    loss = ...
                    loop.collect_metrics(loss=loss)
                with loop.evaluation(), loop.timeit("valid_time"):
                    loop.collect_metrics(valid_loss=evaluate(model, valid))
                loop.print_logs()

    A second start of the program resumes, also in the middle of an epoch: the epoch is entered again, the
    lines before the inner loop run again (`resumed_mid_epoch` is true), then the remaining steps and the
    lines after the loop run.  After TFSnippet's TrainLoop.

    Args:
        run_dir, state: as for `Supervisor`, like all arguments not listed here.
        max_epoch: total number of epochs, 1 or more; None for no limit.
        steps_per_epoch: number of steps in an epoch; a pass over the data continues in the next epoch.
            None: an epoch is a pass.
        watch: the metric whose best value is tracked, kept and marked ` (*)`, and given by `best`: a
            name, or (name, "min" or "max"); beside any `Best` among the services.  Default: the metric
            of the first `Best` or `EarlyStop` among them, else "valid_loss", of which nothing is kept.
        groups: prefixes of parameter names that get tables of their own in the training summary.
        formatter: how metrics are written in log lines.
        show_eta: whether log lines have the ETA.
    """

    @checked_keywords
    def __init__(
        self,
        run_dir: str | Path,
        state: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
        *,
        services: Iterable[Service] = (),
        streams: Mapping[str, Any] | None = None,
        **options: Unpack[LoopOptions],
    ) -> None:
        settings = loop_settings(self.kind(), run_dir, services, streams, options)
        engine = Engine(settings, settings.state(state))
        self._collector = engine.collector
        self._epoch_lines = self._collector.reader("print epoch", Reader())
        self._step_lines = self._collector.reader("print steps", Reader(outside=False))
        steps_per_epoch = integer("steps_per_epoch", options.get("steps_per_epoch"), none="for no limit")
        show_eta = options.get("show_eta", True)
        self._epochs = Epochs(engine, steps_per_epoch, self._epoch_lines, show_eta)
        super().__init__(engine, self._epochs)
        self._groups = tuple(options.get("groups", ()))
        self._formatter = options.get("formatter") or MetricFormatter()
        self._evaluation_metrics: dict[str, Any] | None = None
        """Metrics collected in the open `evaluation()`; None outside."""

    @classmethod
    def kind(cls) -> LoopKind:
        """Describe loops of this class for the engine."""
        return LoopKind(cls.__name__, frozenset(Moment) - {Moment.AFTER_EVAL_STEP})

    # ------------------------------------------------------------------------------ what it is

    @property
    def max_epoch(self) -> int | None:
        """The limit of `epoch`; may be set while running."""
        return self._engine.limits.max_epoch

    @max_epoch.setter
    def max_epoch(self, value: int | None) -> None:
        self._engine.set_limit("max_epoch", value)

    @property
    def within_epoch(self) -> bool:
        """Whether an epoch is open."""
        return self._epochs.within_epoch

    @property
    def within_step(self) -> bool:
        """Whether the body of a step is running."""
        return self._epochs.within_step

    @property
    def step_data(self) -> Any:
        """Batch of the step that is running; None outside steps, and without data."""
        return self._epochs.batch if self.within_step else None

    @property
    def batch_index(self) -> int | None:
        """Number from 0 of the running step within its `iter_steps` loop; None outside steps.

        A resume counts on, where `enumerate` would begin again with 0.
        """
        progress = self._engine.progress
        return progress.step - progress.call_start if self.within_step else None

    @property
    def resumed_mid_epoch(self) -> bool:
        """Whether a resume has entered this epoch again; true from its first line to its last."""
        self._engine.require_entered("resumed_mid_epoch")
        recovered = self._engine.recovered
        return recovered.mid_epoch and self.epoch == recovered.epoch

    @property
    def best_valid_metric(self) -> float | None:
        """The best value of the watched metric; None if there is none yet."""
        return None if (best := self.best) is None else best.value

    def iter_epochs(self) -> Iterator[int]:
        """Yield the number of each epoch, from 1, until a limit or a stop.

        After a resume inside an epoch it yields that epoch again.

        Raises:
            UsageError: outside the `with` block, or inside another epoch loop.
            Interrupted: a signal, or the time budget; the state is saved.
        """
        return self._epochs.iter_epochs()

    @checked_keywords
    def iter_steps(self, data: Any = None, name: str = "train") -> Steps:
        """Yield (step, batch), or step if there is no data; step counts from 1 over the whole run.

        `len()` of it, and so a bar of tqdm around it, knows how many steps this process has before it in
        the loop, if the data has a length, or a limit of steps is set.

        Args:
            data: a stream, a DataLoader, anything iterable (`everstep.data`); None counts up to
                max_step, or steps_per_epoch steps.
            name: the stream's name; two loops over different data in one epoch need two.

        Raises:
            UsageError: outside an epoch, inside another step loop, or without any end.
            DataError: the data gave no batch at all.
            Interrupted: a signal, or the time budget; the state is saved.
        """
        return self._epochs.iter_steps(data, name)

    # ----------------------------------------------------------------------- metrics and timers

    def collect_metrics(self, metrics: Mapping[str, Any] | None = None, /, **values: Any) -> None:
        """Add metric values: to the step, if one is open, and to the epoch.

        A value is copied; a value on a device stays there until somebody reads it.

        Args:
            metrics: name to value.
            values: the same as keywords.

        Raises:
            MetricError: a value is not one real number, or a name is not a string or given twice.
            UsageError: outside an epoch.
        """
        if metrics is not None:
            if not isinstance(metrics, Mapping):
                raise MetricError(
                    f"collect_metrics({metrics!r}): give a mapping of names to values, or keywords"
                )
            for name in metrics:
                if not isinstance(name, str) or not name:
                    raise MetricError(f"metric name {name!r}: give a string, not empty")
            if both := metrics.keys() & values.keys():
                raise MetricError(
                    f"metric {min(both)!r} is given twice, in the mapping and as a keyword; give it once"
                )
            values = {**metrics, **values}
        step = self._collector.open_step
        if step and not self._epochs.has_broken_step:
            self._engine.collect(step, values)
            return
        self._epochs.enter_outside("collect_metrics")
        values = self._collector.reduced({name: to_scalar(name, value) for name, value in values.items()})
        if self._evaluation_metrics is not None:
            self._evaluation_metrics.update(values)
        if not self._epochs.before_resume_point:  # a head that runs again at a resume has its rows already
            place, at = self._epochs.place, self._engine.progress.step
            for name, value in values.items():
                self._collector.require_alone(place, at, name)
                self._collector.outside(place, at, name, value)
        self._engine.board.announce(Moment.METRICS_COLLECTED, values)

    @contextmanager
    def metric_collector(self, name: str) -> Iterator[MetricMean]:
        """Collect (value, weight) pairs in the block; at its end their mean is collected as `name`."""
        collected = MetricMean(name, self._collector.across)
        yield collected
        if (mean := collected.mean) is not None:
            self.collect_metrics({name: mean})

    @contextmanager
    def timeit(self, name: str) -> Iterator[None]:
        """Time the block, in seconds, as metric `name`; nothing is recorded if it raises.

        Raises:
            ConfigError: the name does not end in time or timer, by which clock values are recognised.
        """
        if not is_wall(name):
            raise ConfigError(f"timeit({name!r}): end the name in time or timer, as in {name + '_time'!r}")
        if not self.within_step:
            self._epochs.enter_outside("timeit")
        began = self.clock()
        yield
        self.collect_metrics({name: self.clock() - began})

    @contextmanager
    def evaluation(self, *, grad: bool = False) -> Iterator[None]:
        """Evaluate in the block, with models in evaluation mode; random state and modes come back afterwards.

        So an evaluation changes nothing in the training.  The block may run
        again after a resume and must not change the state.

        Args:
            grad: whether gradients are recorded in the block, as an evaluation by gradients needs them.

        Raises:
            UsageError: outside an epoch; at the block's end, if an optimizer of the state stepped inside.
        """
        self._epochs.enter_outside("evaluation")
        began, engine = self.clock(), self._engine
        engine.estimator.update(engine.progress.step)
        before = self.updates
        metrics: dict[str, Any] = {}
        outer_metrics, self._evaluation_metrics = self._evaluation_metrics, metrics
        try:
            with isolated(), engine.user.evaluation_mode(grad):
                yield
        finally:
            self._evaluation_metrics = outer_metrics
        if self.updates != before:
            raise UsageError(
                f"an optimizer of the state stepped inside evaluation() ({before} updates before the block, "
                f"{self.updates} after); train in iter_steps(), and evaluate without optimizer.step()"
            )
        engine.note_evaluation(self.clock() - began)
        # read all values together: each read would wait for the device
        values = resolve(list(metrics.values()))
        engine.board.fire(Moment.AFTER_EVALUATION, dict(zip(metrics, values, strict=True)))

    def add_summary(self, summary: Any) -> None:
        """Hand a summary (image, text, histogram ...) to the services that asked for SUMMARY_ADDED.

        Outside steps the call is allowed only in an epoch, and to services at a boundary.  In the head of an
        epoch that a resume enters again, the summary was handed over the first time.
        """
        at_boundary = self._engine.boundaries.inside  # that of an epoch's end lies outside the epoch
        if not (self.within_step or at_boundary):
            self._epochs.enter_outside("add_summary")
        if at_boundary or not self._epochs.before_resume_point:
            super().add_summary(summary)

    # ------------------------------------------------------------------------------- the lines

    def print_logs(self) -> None:
        """Print a line of the metrics since the last such line, and clear them.

        In a step: the values collected in steps.  Otherwise: all values of the epoch.  Call it at the
        end of the step or of the epoch.
        """
        if self.within_step:
            lines = self._step_lines
            self._epochs.note_step_time()
        else:
            self._epochs.enter_outside("print_logs")
            if self._epochs.before_resume_point:
                return  # these values were printed the first time; later values are printed later
            lines = self._epoch_lines
            lines.add_outside("epoch_time", self.step, self._epochs.epoch_seconds)
        self.print_line(lines)

    def print_line(self, readings: Reader) -> None:
        """Print a line of the metrics in a window, tell observers its statistics, and clear the window."""
        stats = all_stats(readings)
        new = {best.metric for best in self._engine.board.bests if best.is_on_line(readings)}
        readings.clear()
        tag, eta = self._epochs.tag(with_eta=False), self._epochs.shown_eta
        self.println(log_line(tag, stats, new, self._formatter, eta), shorten=True)
        announce = self._engine.board.announce
        announce(Moment.METRIC_STATS_PRINTED, {n: s for n, s in stats.items() if not is_wall(n)})
        announce(Moment.TIME_METRIC_STATS_PRINTED, {n: s for n, s in stats.items() if is_wall(n)})

    def print_training_summary(self) -> None:
        """Print the environment and the table of the state's parameters, by groups."""
        self._engine.require_open("print_training_summary")
        facts = {"run": str(self.run_dir), "seed": str(self.seed), "python": platform.python_version()}
        for backend in backends.active():
            facts |= backend.describe()
        self.println(environment_table(facts))
        if parameters := [p for b in backends.active() for p in b.parameters(self._engine.user.objects)]:
            self.println(parameter_table("Trainable Parameters", parameters, self._groups))

    # ----------------------------------------------------------------------- stopping and saving

    def make_checkpoint(self) -> None:
        """Save at the next boundary: the end of this step, or of this epoch.

        Raises:
            UsageError: outside an epoch.
        """
        if not self.within_step:
            self._epochs.enter_outside("make_checkpoint")
        super().make_checkpoint()

    def should_stop(self) -> bool:
        """Whether a stop has been decided; the iterators then end without this call.

        Raises:
            ProgressError: asked 100,000 times, without waiting between, while no step and no epoch ended.
            Interrupted: a signal, where no step is open.
        """
        self._engine.require_open("should_stop")
        if self._engine.progress.stop is not None:
            return True
        self._epochs.poll()
        self._engine.count_round(
            "no step and no epoch was completed",
            "let the loop count them: for epoch in loop.iter_epochs(): "
            "for step, batch in loop.iter_steps(data):",
        )
        return False


def loop_settings(
    kind: LoopKind,
    run_dir: str | Path,
    services: Iterable[Service],
    streams: Mapping[str, Any] | None,
    options: LoopOptions,
) -> Settings:
    """Check the arguments of a loop, and add the `Best` of the watched metric to its services."""
    services = with_best(options.get("watch"), service_list(services))
    flag("show_eta", options.get("show_eta", True))
    checked_formatter(options.get("formatter"))
    groups = options.get("groups", ())
    if not isinstance(groups, list | tuple) or not all(isinstance(each, str) for each in groups):
        raise ConfigError(
            f"groups={groups!r}: give a list of prefixes, as in groups=['encoder', 'model.head']"
        )
    return Settings(kind, run_dir, services, streams, options, options.get("max_epoch"))


def with_best(watch: str | tuple[str, str] | None, services: list[Service]) -> list[Service]:
    """Return the services, with the `Best` of the watched metric before every other `Best`."""
    bests = [service for service in services if isinstance(service, Best)]
    if watch is None:
        return services if bests else [*services, _default_best(services)]
    if isinstance(watch, str):
        metric, mode = watch, None
    elif isinstance(watch, tuple) and len(watch) == 2:
        metric, mode = watch
    else:
        raise ConfigError(f'watch={watch!r}: give a name, or a pair as in watch=("valid_acc", "max")')
    best = next((b for b in bests if b.metric == metric), None)
    if best is None:
        direction(metric, mode, f'give watch=("{metric}", "min") or "max"')
        best = Best(metric, mode)
    elif mode not in (None, best.mode):
        raise ConfigError(f"watch={watch!r} and {best!r} with mode={best.mode!r}: give one of the two")
    return [best, *(service for service in services if service is not best)]


def _default_best(services: Sequence[Service]) -> Best:
    """Make the `Best` of the metric that stops the run, else one of "valid_loss" that keeps no weights."""
    stopper = find_service(EarlyStop, services)
    metric, mode = ("valid_loss", None) if stopper is None else (stopper.metric, stopper.mode)
    best = Best(metric, mode, save=stopper is not None)
    best.watches = ()  # nobody asked for it
    return best


class MetricMean:
    """The weighted mean of what was collected, on all ranks."""

    def __init__(self, name: str, across: Group | None = None) -> None:
        self._name, self._across = name, across
        self._window = Window()

    def collect(self, value: Any, weight: float = 1.0) -> None:
        """Add one value with a weight of 0 or more.

        Raises:
            MetricError: the value is not one real number, or the weight is negative.
        """
        self._window.add(float(to_scalar(self._name, value)), weight)

    @property
    def mean(self) -> float | None:
        """The mean so far, None before the first value; every rank asks for it."""
        stats = self._window.stats()
        mean, weight = (None, 0.0) if stats is None else (stats.mean, stats.weight)
        return mean if self._across is None else mean_of_means(self._across, self._name, mean, weight)
