"""Parts shared by the commands on experiments: options, config files with overrides, training."""

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

F = TypeVar("F", bound=Callable[..., Any])


def training_options(function: F) -> F:
    """Add the options of `train`, `resume` and `sweep`."""
    for option in (
        click.option(
            "--schedule", default="train", show_default=True, help="Schedule of the Experiment to run."
        ),
        click.option(
            "--on-change",
            type=click.Choice(["error", "keep", "override", "fork"]),
            default="error",
            show_default=True,
            help="If this config and that of the run differ in what changes training: error refuses, keep "
            "resumes with the run's config, override resumes with this config, fork continues with this "
            "config in a new run.",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Make all objects, but train nothing and leave no files."
        ),
        click.option("--strict-git", is_flag=True, help="Refuse code that is not committed and pushed."),
        click.option("--skip-check", is_flag=True, help="Do not check git."),
        trust_option,
        index_option,
    ):
        function = option(function)
    return function


def ship_to(index: str | None) -> None:
    """Ship the runs of this process and its children to the index that --index names."""
    if index is not None:
        from everstep.index.location import INDEX_VARIABLE
        from everstep.index.query import index_place

        os.environ[INDEX_VARIABLE] = str(index_place(index))


def trust_option(function: F) -> F:
    """Add the option --trust."""
    return click.option(
        "--trust",
        is_flag=True,
        help="Import and call the code that the run names, though the run is not marked as yours.",
    )(function)


def profile_option(function: F) -> F:
    """Add the option --profile."""
    return click.option("--profile", metavar="NAME", help="Profile of the config to apply.")(function)


def weights_option(function: F) -> F:
    """Add the option --weights."""
    return click.option(
        "--weights",
        metavar="best|best/METRIC|CHECKPOINT",
        help="Weights of the run, or a path; default: the newest checkpoint.",
    )(function)


def split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split arguments into config files and overrides: arguments with a "=" that are not files.

    Raises:
        UsageError: there is no file, or an argument is neither a file nor an override.
    """
    files = [Path(each) for each in arguments if "=" not in each or Path(each).exists()]
    if not files:
        raise click.UsageError("give a config FILE: a YAML file")
    for file in files[1:]:  # the first one may be a run
        if file.suffix not in (".yaml", ".yml") and not file.exists():
            raise click.UsageError(
                f"{str(file)!r} is neither a file nor a setting (PATH=VALUE, as in optimizer.lr=0.1)"
            )
    return files, [each for each in arguments if Path(each) not in files]


def train(experiment: Any, schedule: str, dry_run: bool, *, resumed: bool = False) -> None:
    """Run a schedule, or only describe it; `resumed`: the experiment is that of a named run."""
    with _choices(resumed):
        if dry_run:
            _describe(experiment, schedule)
            return
        result = experiment.run(schedule)
    print_metrics(result.metrics)


def print_metrics(metrics: Mapping[str, float]) -> None:
    """Print metrics in one line, if there are any."""
    if metrics:
        from everstep.record import values_line

        say(values_line(metrics))


@contextmanager
def _choices(resumed: bool) -> Iterator[None]:
    try:
        yield
    except ChangedError as error:
        last = "" if resumed else "; or give another --run-dir"
        raise ConfigError(
            f"{error.differences}use --on-change keep (resume with the run's config), override (resume with "
            f"the given config) or fork (continue with the given config in a new run directory){last}"
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
