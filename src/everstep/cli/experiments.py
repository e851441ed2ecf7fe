"""Commands on experiments: `train`, `resume`, `eval`, `predict`, `config`, `data`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from everstep.cli import common as cli
from everstep.errors import ChangedError, ConfigError


def ship_to(index: str | None) -> None:
    """Ship the runs of this process and its children to the index that --index names."""
    if index is not None:
        from everstep.index.location import INDEX_VARIABLE
        from everstep.index.query import index_place

        os.environ[INDEX_VARIABLE] = str(index_place(index))


def split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split arguments into config files and overrides: arguments with a "=" that are not files."""
    files = [Path(each) for each in arguments if "=" not in each or Path(each).exists()]
    if not files:
        raise click.UsageError("give a config FILE: a YAML file")
    for file in files[1:]:  # the first one may be a run
        if file.suffix not in (".yaml", ".yml") and not file.exists():
            raise click.UsageError(f"{str(file)!r} is neither a file nor a setting (PATH=VALUE)")
    return files, [each for each in arguments if Path(each) not in files]


@cli.command(
    run_dir=cli.option(cli.PATH, "Run directory, instead of the config's run_dir."),
    profile=cli.PROFILE,
    **cli.TRAINING,
)
def train_command(
    arguments: tuple[str, ...] = cli.CONFIG,
    schedule: str = cli.SCHEDULE,
    dry_run: bool = cli.DRY_RUN,
    index: str | None = cli.INDEX,
    **options: Any,
) -> None:
    """Train, or resume, the experiment of config FILEs.

    A later file overrides earlier files, and PATH=VALUE overrides all.

    \b
      everstep train digits.yaml optimizer.lr=3e-4 'services.0.Evaluate.every={steps: 100}'

    Stop it at any point, by Ctrl-C or kill -9: the same command resumes it, and ends with the same bits.  The
    exit status is 5 if steps that ran again had other results, until everstep accept.
    """
    files, overrides = split(arguments)
    ship_to(index)
    from everstep.experiment import open_config

    _train(open_config(files, overrides, **options), schedule, dry_run, "; or give another --run-dir")


@cli.command(**cli.TRAINING)
def resume_command(
    run: str = cli.RUN,
    overrides: tuple[str, ...] = cli.OVERRIDES,
    schedule: str = cli.SCHEDULE,
    dry_run: bool = cli.DRY_RUN,
    index: str | None = cli.INDEX,
    **options: Any,
) -> None:
    """Resume RUN with the config that it recorded; PATH=VALUE changes the config.

    \b
      everstep resume digits trainer.max_epoch=80
    """
    from everstep.experiment import open_run

    run_dir = cli.find(run, index).path
    ship_to(index)
    _train(open_run(run_dir, overrides, **options), schedule, dry_run, "")


def _train(experiment: Any, schedule: str, dry_run: bool, another: str) -> None:
    from everstep.services.witness import FILE

    try:
        result = experiment.check(schedule) if dry_run else experiment.run(schedule)
    except ChangedError as error:
        raise ConfigError(
            f"{error.differences}use --on-change keep (resume with the run's config), override (resume with "
            f"the given config) or fork (continue with the given config in a new run directory){another}"
        ) from None
    if not dry_run:
        _print_metrics(result.metrics)
        if result.ending is not None and (step := result.ending.diverged) is not None:
            cli.say(
                f"everstep: step {step} had other results when a resume executed it again: everstep drill "
                f"finds the cause, everstep accept RUN --divergence {step} accepts it",
                err=True,
            )
            if FILE not in os.environ:  # a drill finds that by itself
                sys.exit(cli.DIVERGED)
        return
    trainer = experiment.trainer
    state = ", ".join(f"{name} ({type(part).__name__})" for name, part in trainer.task.state().items())
    cli.say(f"run       {trainer.run_dir}\ntask      {type(trainer.task).__name__}: {state}")
    for name, stream in trainer.streams.items():
        cli.say(f"stream    {name}: {stream!r}")
    for service in experiment.config.services:
        cli.say(f"service   {service.name}")
    if result:
        cli.say(result)
    cli.say(f"schedule  {schedule}: nothing was run (--dry-run)")


def _print_metrics(metrics: Mapping[str, float]) -> None:
    if metrics:
        from everstep.record import values_line

        cli.say(values_line(metrics))


@cli.command(profile=cli.PROFILE, trust=cli.TRUST)
def eval_command(
    run: str = cli.RUN,
    overrides: tuple[str, ...] = cli.OVERRIDES,
    streams: tuple[str, ...] = cli.option("NAME", "Only this stream; repeatable.", "--stream", multiple=True),
    weights: str | None = cli.WEIGHTS,
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
    **options: Any,
) -> None:
    """Evaluate the newest checkpoint of RUN, or other --weights, on the streams of its Evaluate services.

    The config is that of the run; its profile "eval", if there is one, changes it first, then PATH=VALUE.
    The result is recorded beside the run.
    """
    from everstep.experiment import open_run

    experiment = open_run(cli.find(run, index).path, overrides, default_profile="eval", **options)
    metrics: dict[str, float] = {}
    for stream in streams:
        metrics |= experiment.trainer.evaluate(stream, weights=weights)
    if not streams:
        metrics = experiment.evaluate(weights).metrics
    cli.print_json(metrics) if as_json else _print_metrics(metrics)


@cli.command(profile=cli.PROFILE, trust=cli.TRUST)
def predict_command(
    run: str = cli.RUN,
    overrides: tuple[str, ...] = cli.OVERRIDES,
    stream: str = cli.option("NAME", "Stream to predict for.", required=True),
    out: Path = cli.option(cli.PATH, "File to write: .npy, .npz or .jsonl.", required=True),
    overwrite: bool = cli.flag("Replace the file if it exists."),
    weights: str | None = cli.WEIGHTS,
    index: str | None = cli.INDEX,
    **options: Any,
) -> None:
    """Write the predictions of the newest checkpoint of RUN, or of other --weights.

    They are the results of the task's `inference_step` for each batch.

    \b
    FILE.npy    an array, all batches one after another
    FILE.npz    arrays by name if a batch's predictions are a mapping, else "predictions"
    FILE.jsonl  one line per sample

    The config is that of the run; its profile "predict", if there is one, changes it first, then PATH=VALUE.
    """
    from everstep.experiment import open_run
    from everstep.experiment.predictions import check, write

    check(out, overwrite)
    experiment = open_run(cli.find(run, index).path, overrides, default_profile="predict", **options)
    samples = write(out, experiment.trainer.predict(stream, weights=weights))
    cli.say(f"{out}: {samples} predictions for {stream!r}")


@cli.command()
def config_command(
    arguments: tuple[str, ...] = cli.argument("FILE...|RUN [PATH=VALUE...]", nargs=-1),
    profile: str | None = cli.PROFILE,
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
) -> None:
    """Check the config of FILEs or of a RUN, and print it with every default filled in.

    The output is a config file of the same experiment.  For a RUN it is the config that the run recorded:
    nothing that it names is imported, so the arguments of calls in PATH=VALUE are not checked.
    """
    files, overrides = split(arguments)
    from everstep.experiment import as_yaml, open_config
    from everstep.experiment.open_experiment import look

    if len(files) == 1 and not files[0].is_file() and files[0].suffix not in (".yaml", ".yml"):
        tree = look(cli.find(str(files[0]), index).path, overrides, profile=profile)
    else:
        tree = open_config(files, overrides, profile=profile).tree
    cli.print_json(tree) if as_json else click.echo(as_yaml(tree), nl=False)


@cli.command()
def data_command(
    arguments: tuple[str, ...] = cli.CONFIG,
    stream: str = cli.option("NAME", "Name of the stream.", default="train"),
    count: int = cli.option(cli.COUNT, "Number of batches.", "-n", default=2),
    profile: str | None = cli.PROFILE,
) -> None:
    """Print the first batches of a stream of config FILEs: shapes, types, values.  Nothing is trained."""
    files, overrides = split(arguments)
    from everstep.experiment import open_config
    from everstep.experiment.predictions import batches, describe_batch

    experiment = open_config(files, overrides, profile=profile)
    for number, batch in enumerate(islice(batches(experiment, stream), count), 1):
        cli.say(f"{stream}, batch {number}")
        for line in describe_batch(batch):
            cli.say(f"  {line}")
