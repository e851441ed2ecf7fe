"""Parts shared by the commands on experiments: config files with overrides, and runs that have a config."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from everstep.cli.common_options import index_option
from everstep.cli.output import say
from everstep.errors import ChangedError, ConfigError
from everstep.index.location import INDEX_VARIABLE
from everstep.index.query import index_place
from everstep.record import values_line

F = TypeVar("F", bound=Callable[..., Any])


def training_options(function: F) -> F:
    """What `train` and `resume` may be told."""
    for option in (
        click.option("--schedule", default="train", show_default=True, help="A schedule of Experiment."),
        click.option(
            "--on-change",
            type=click.Choice(["error", "keep", "override", "fork"]),
            default="error",
            show_default=True,
            help="Where this config and that of the run differ in what touches training: refuse, go on with "
            "the run's, go on with this one, or go on with this one in a run of its own.",
        ),
        click.option("--dry-run", is_flag=True, help="Make everything, run nothing, leave nothing."),
        click.option("--strict-git", is_flag=True, help="Refuse code that is not committed and pushed."),
        click.option("--skip-check", is_flag=True, help="Do not look at git."),
        trust_option,
        index_option,
    ):
        function = option(function)
    return function


def ship_to(index: str | None) -> None:
    """Have what this process and its children train shipped to the index that --index names."""
    if index is not None:
        os.environ[INDEX_VARIABLE] = str(index_place(index))


def trust_option(function: F) -> F:
    """The option --trust."""
    return click.option(
        "--trust", is_flag=True, help="Import and call what the run names, though it is not marked as yours."
    )(function)


def profile_option(function: F) -> F:
    """The option --profile."""
    return click.option("--profile", metavar="NAME", help="Of the config's profiles, laid over it.")(function)


def weights_option(function: F) -> F:
    """The option --weights."""
    return click.option(
        "--weights",
        metavar="best|best/METRIC|CHECKPOINT",
        help="Which of the run's weights, or a path; default: the newest checkpoint.",
    )(function)


def split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Config files, and overrides: arguments with a "=" that are not files.

    Raises:
        UsageError: there is no file, or something that is neither.
    """
    files = [Path(each) for each in arguments if "=" not in each or Path(each).exists()]
    if not files:
        raise click.UsageError("give a config FILE: a YAML file")
    for file in files[1:]:  # the first one may be a run
        if file.suffix not in (".yaml", ".yml") and not file.exists():
            raise click.UsageError(
                f"{str(file)!r} is not a file, and not a setting (PATH=VALUE, as in optimizer.lr=0.1)"
            )
    return files, [each for each in arguments if Path(each) not in files]


def train(experiment: Any, schedule: str, dry_run: bool, *, resumed: bool = False) -> None:
    """Run a schedule, or say what would be run; `resumed`: of a run that was named, not of config files."""
    with _choices(resumed):
        if dry_run:
            _describe(experiment, schedule)
            return
        result = experiment.run(schedule)
    print_metrics(result.metrics)


def print_metrics(metrics: Mapping[str, float]) -> None:
    """Print what was evaluated, if anything was."""
    if metrics:
        say(values_line(metrics))


@contextmanager
def _choices(resumed: bool) -> Iterator[None]:
    try:
        yield
    except ChangedError as error:
        last = "" if resumed else "; or give another --run-dir"
        raise ConfigError(
            f"{error.differences}use --on-change keep (go on with what is stored), override (with what is "
            f"given) or fork (with that, in a run directory of its own){last}"
        ) from None


def _describe(experiment: Any, schedule: str) -> None:
    changes = experiment.check(schedule)
    trainer = experiment.trainer
    state = ", ".join(f"{name} ({type(part).__name__})" for name, part in trainer.task.state().items())
    say(f"run       {trainer.run_dir}")
    say(f"task      {type(trainer.task).__name__}: {state}")
    for name, stream in trainer.streams.items():
        say(f"stream    {name}: {stream!r}")
    for service in experiment.config.services:
        say(f"service   {service.name}")
    if changes:
        say(changes)
    say(f"schedule  {schedule}: nothing was run (--dry-run)")
