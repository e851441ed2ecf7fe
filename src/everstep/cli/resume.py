"""`everstep resume`"""

from __future__ import annotations

from typing import Any

import click

from everstep.cli import experiment_commands
from everstep.cli.common_options import run_argument
from everstep.cli.find_run import find


@click.command("resume")
@run_argument
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE...]")
@experiment_commands.training_options
def command(
    run: str,
    overrides: tuple[str, ...],
    on_change: Any,
    schedule: str,
    dry_run: bool,
    strict_git: bool,
    skip_check: bool,
    trust: bool,
    index: str | None,
) -> None:
    """Resume RUN with the config that it recorded; PATH=VALUE changes the config.

    \b
      everstep resume digits trainer.max_epoch=80
    """
    from everstep.experiment import open_run

    found = find(run, index)
    experiment_commands.ship_to(index)
    experiment = open_run(
        found.path,
        overrides,
        on_change=on_change,
        strict_git=strict_git,
        skip_check=skip_check,
        trust=trust,
    )
    experiment_commands.train(experiment, schedule, dry_run, resumed=True)
