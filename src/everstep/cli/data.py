"""`everstep data`"""

from __future__ import annotations

from itertools import islice

import click

from everstep.cli import experiment_commands
from everstep.cli.output import say


@click.command("data")
@click.argument("arguments", nargs=-1, metavar="FILE... [PATH=VALUE...]")
@click.option("--stream", default="train", show_default=True, metavar="NAME", help="Name of the stream.")
@click.option(
    "-n", "count", type=click.IntRange(min=1), default=2, show_default=True, help="Number of batches."
)
@experiment_commands.profile_option
def command(arguments: tuple[str, ...], stream: str, count: int, profile: str | None) -> None:
    """Print the first batches of a stream of config FILEs: shapes, types, values.  Nothing is trained."""
    files, overrides = experiment_commands.split(arguments)
    from everstep.experiment import open_config
    from everstep.experiment.preview import batches, described

    experiment = open_config(files, overrides, profile=profile)
    for number, batch in enumerate(islice(batches(experiment, stream), count), 1):
        say(f"{stream}, batch {number}")
        for line in described(batch):
            say(f"  {line}")
