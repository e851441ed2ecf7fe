"""`everstep eval`"""

from __future__ import annotations

import click

from everstep.cli import experiments
from everstep.cli.finding import find, index_option, json_option
from everstep.cli.output import print_json


@click.command("eval")
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE...]")
@click.option("--stream", "streams", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@experiments.profile_option
@index_option
@json_option
def command(
    run: str,
    overrides: tuple[str, ...],
    streams: tuple[str, ...],
    profile: str | None,
    index: str | None,
    as_json: bool,
) -> None:
    """Evaluate the newest checkpoint of RUN, on the streams that its Evaluate services name.

    The config is the run's, with its profile "eval" laid over it if it has one, and PATH=VALUE over that.
    The result is recorded beside the run.
    """
    from everstep.experiment import open_run

    experiment = open_run(find(run, index).path, overrides, profile=profile, default_profile="eval")
    if streams:
        found = {name: value for each in streams for name, value in experiment.trainer.evaluate(each).items()}
    else:
        found = experiment.evaluate().metrics
    if as_json:
        print_json(found)
    else:
        experiments.print_metrics(found)
