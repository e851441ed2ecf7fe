"""`everstep train`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from everstep.cli import experiment_commands


@click.command("train")
@click.argument("arguments", nargs=-1, metavar="FILE... [PATH=VALUE...]")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Run directory, instead of the config's run_dir."
)
@experiment_commands.profile_option
@experiment_commands.training_options
def command(
    arguments: tuple[str, ...],
    run_dir: Path | None,
    profile: str | None,
    on_change: Any,
    schedule: str,
    dry_run: bool,
    strict_git: bool,
    skip_check: bool,
    trust: bool,
    index: str | None,
) -> None:
    """Train the experiment of config FILEs.

    A later file overrides earlier files, and PATH=VALUE overrides all.

    \b
      everstep train digits.yaml optimizer.lr=3e-4 'services.0.Evaluate.every={steps: 100}'

    Stop it at any point, by Ctrl-C or kill -9: the same command resumes it, and ends with the same bits.
    """
    files, overrides = experiment_commands.split(arguments)
    experiment_commands.ship_to(index)
    from everstep.experiment import open_config

    experiment = open_config(
        files,
        overrides,
        run_dir=run_dir,
        on_change=on_change,
        profile=profile,
        strict_git=strict_git,
        skip_check=skip_check,
        trust=trust,
    )
    experiment_commands.train(experiment, schedule, dry_run)
