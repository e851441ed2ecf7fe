"""`Experiment`: a task and its data, made when they are needed, and run by a schedule's name."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from everstep.arguments import checked_keywords, integer, number
from everstep.contracts.services import Service
from everstep.contracts.tasks import Task
from everstep.data.order import pass_key
from everstep.errors import ConfigError, UsageError, nearest
from everstep.experiment.import_paths import imported
from everstep.record.provenance import code_folder, git_facts
from everstep.schedule import Every, Never
from everstep.state import isolated, seed_all
from everstep.supervisor import Ending
from everstep.supervisor.settings import LoopOptions
from everstep.trainer import Trainer
from everstep.trainer.evaluations import Which
from everstep.unattended import seed_or_drilled

Maker = Callable[[], Any] | str
"""A function without arguments, or its import path `module:name`."""

SCHEDULES = (
    *("train", "evaluate", "train_and_evaluate"),
    *("continuous_eval", "continuous_train_and_eval", "test"),
)
"""The schedules: methods of `Experiment`, which `run` and `everstep train --schedule` take by name."""


def require_schedule(name: str) -> None:
    if name not in SCHEDULES:
        raise ConfigError(f"there is no schedule {name!r}; {nearest(name, SCHEDULES)}")


class RunResult(NamedTuple):
    """Result of a schedule: how its training ended, if it trains, and the newest evaluated metrics."""

    ending: Ending | None
    metrics: dict[str, float]


class Experiment:
    """A task, its streams, and schedules to run them by.  Nothing is made before a schedule runs.

        experiment = Experiment(Digits, train_data, valid_data, "runs/digits", max_epoch=20, seed=7)
        experiment.train_and_evaluate()

    Most experiments are config files: `everstep.experiment.open_config`, `everstep train`.  After
    TensorFlow's Experiment and learn_runner, Model Garden's ExperimentConfig, and emloop.

    Args:
        task: makes the `Task`: its class, or a function.  This and the next two may be import paths.
        train_stream_fn: makes the data to train on.
        eval_stream_fn: makes the data to evaluate, stream "valid"; or a mapping of names to functions.
        run_dir: the run's directory.
        services: as for `Trainer`; a function among them makes one.
        export_strategies: further services, such as `services.Export`.
        seed: seed of the run.  If given, the functions above draw random numbers that follow from it: the
            task's from the seed itself, each stream's from the seed and the stream's name.
        strict_git: refuse to train where the code has changes that are not committed and pushed.
        skip_check: do not look at git at all.
        options: more arguments of `Trainer`: max_epoch, max_step, max_time ...

    Attributes:
        run_dir, seed: as given.
    """

    @checked_keywords
    def __init__(
        self,
        task: Maker,
        train_stream_fn: Maker,
        eval_stream_fn: Maker | Mapping[str, Maker] | None = None,
        run_dir: str | Path = "runs/experiment",
        *,
        services: Iterable[Service | Maker] = (),
        export_strategies: Iterable[Service | Maker] = (),
        strict_git: bool = False,
        skip_check: bool = False,
        **options: Unpack[LoopOptions],
    ) -> None:
        if strict_git and skip_check:
            raise ConfigError("strict_git and skip_check contradict each other; give one of them")
        if eval_stream_fn is None:
            eval_stream_fn = {}
        elif not isinstance(eval_stream_fn, Mapping):
            eval_stream_fn = {"valid": eval_stream_fn}
        self.run_dir = run_dir
        self._task = _maker("task", task)
        makers = {"train": train_stream_fn, **eval_stream_fn}
        self._streams = {name: _maker(f"stream {name!r}", maker) for name, maker in makers.items()}
        self._services = [_maker("a service", each) for each in (*services, *export_strategies)]
        self.seed = seed_or_drilled(integer("seed", options.get("seed"), 0, none="to draw one"))
        self._strict_git, self._skip_check = strict_git, skip_check
        self._options: LoopOptions = {**options, "seed": self.seed}
        """Further arguments of the Trainer."""
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """Trainer of the experiment; made at the first access."""
        if self._trainer is None:
            task = self._make_seeded(self._task, self.seed)
            # The same seed again: weights do not depend on how much the task's own function draws.
            self._make_seeded(partial(self._build, task), self.seed)
            streams = {name: self.stream(name) for name in self._streams}
            services = [make() for make in self._services]
            self._trainer = Trainer(task, streams, self.run_dir, services=services, **self._options)
        return self._trainer

    def stream(self, name: str) -> Any:
        """Make the data of a stream."""
        if name not in self._streams:
            raise ConfigError(f"no stream is named {name!r}; {nearest(name, self._streams)}")
        seed = None if self.seed is None else pass_key("made", self.seed, name, 0) % 2**32
        return self._make_seeded(self._streams[name], seed)

    def _make_seeded(self, make: Callable[[], Any], seed: int | None) -> Any:
        if seed is None:
            return make()
        with isolated():
            seed_all(seed)
            return make()

    def _build(self, task: Any) -> None:
        """Let the task make its parts; does nothing here, so that the Trainer does it."""

    def _code_folder(self) -> Path:
        return code_folder(sys.argv)

    def run(self, schedule: str, **arguments: Any) -> RunResult:
        """Run a schedule by its name, with arguments of its method."""
        require_schedule(schedule)
        result: RunResult = checked_keywords(getattr(self, schedule))(**arguments)
        return result

    def train(self, evaluate: bool = True) -> RunResult:
        """Train, or resume; False leaves out every `Evaluate`, as where another process evaluates."""
        return RunResult(self._to_train().run_training(evaluate=evaluate), {})

    def evaluate(self, weights: str | Path | None = None) -> RunResult:
        """Evaluate the streams of the `Evaluate` services, else "valid", with the newest or other weights."""
        return RunResult(None, self.trainer.evaluate_all(newest=weights is None, weights=weights))

    def train_and_evaluate(self, min_eval_frequency: int | None = None) -> RunResult:
        """Train, evaluate in between, and evaluate at the end unless that was just done.

        Args:
            min_eval_frequency: steps from one evaluation to the next; None: as the `Evaluate` services
                are scheduled; 0: only at the end.
        """
        name, none = "min_eval_frequency", "for the services' own schedules"
        frequency = integer(name, min_eval_frequency, 0, none=none)
        when = frequency is None or (Every(steps=frequency) if frequency else Never())
        trainer = self._to_train()
        return RunResult(trainer.run_training(evaluate=when, evaluate_end=True), trainer.evaluate_all())

    def continuous_eval(
        self,
        delay_secs: float = 0.0,
        throttle_secs: float = 60.0,
        every: Which = "newest",
        timeout: float | None = None,
    ) -> RunResult:
        """Evaluate the checkpoints of this run while another process trains it, until it ends.

        Args:
            delay_secs: seconds to wait before the first evaluation.
            throttle_secs: least seconds from one evaluation to the next.
            every: "newest" to skip older checkpoints, or "each".
            timeout: seconds without a trainer after which to stop waiting; None: never.
        """
        time.sleep(number("delay_secs", delay_secs, of="seconds", zero=True))
        metrics: dict[str, float] = {}
        trainer = self.trainer
        watch = trainer.watch(every=every, throttle=throttle_secs, timeout=timeout, max_step=trainer.max_step)
        for evaluation in watch:
            print(evaluation, flush=True)
            metrics |= evaluation.metrics
        return RunResult(None, metrics)

    def continuous_train_and_eval(self, train_steps_per_iteration: int | None = None) -> RunResult:
        """Train and evaluate in turns of n steps; None: a tenth of max_step, 1000 without a max_step."""
        name = "train_steps_per_iteration"
        steps = integer(name, train_steps_per_iteration, none="for a tenth of max_step")
        return self.train_and_evaluate(steps or max((self._options.get("max_step") or 10_000) // 10, 1))

    def test(self) -> RunResult:
        """Make a step, a batch of each evaluation, a save and a restore; nothing is left on the disk."""
        self.trainer.smoke_test()
        return RunResult(None, {})

    def _to_train(self) -> Trainer:
        if not self._skip_check:
            note_uncommitted(self._code_folder(), strict=self._strict_git)
        return self.trainer


def note_uncommitted(folder: Path, *, strict: bool = False) -> None:
    """Print which code of a folder git could not restore; outside a repository, nothing unless `strict`."""
    git = git_facts(folder)
    faults = []
    if git is None:
        faults.append(f"{folder} is in no git repository")
    elif "problem" in git:
        faults.append(f"git cannot tell about {folder}: {git['problem']}")
    else:
        if git["dirty"] or git["commit"] is None:
            faults.append(f"{folder} has changes that are not committed")
        if git["commit"] is not None and not git["pushed"]:
            faults.append(f"commit {git['commit'][:10]} is on no remote")
    missing = " and ".join(faults)
    if strict and missing:
        raise UsageError(f"strict_git: {missing}; commit and push first, or leave out strict_git")
    if missing and git is not None:
        print(f"note: {missing}; commit and push, and the run can be made again", file=sys.stderr)


def _maker(name: str, maker: Any) -> Callable[[], Any]:
    if isinstance(maker, Service):
        return lambda: maker
    if isinstance(maker, str):
        return lambda: imported(maker)()
    if isinstance(maker, Task) or not callable(maker):
        raise ConfigError(f"{name} is {maker!r}; give a function that makes it, or an import path")
    make: Callable[[], Any] = maker
    return make
