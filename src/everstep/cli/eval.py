"""`everstep eval`"""

from __future__ import annotations

import click

from everstep.cli import experiment_commands
from everstep.cli.common_options import index_option, json_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import print_json


@click.command("eval")
@run_argument
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE...]")
@click.option("--stream", "streams", multiple=True, metavar="NAME", help="Only this stream; may be repeated.")
@experiment_commands.weights_option
@experiment_commands.profile_option
@experiment_commands.trust_option
@index_option
@json_option
def command(
    run: str,
    overrides: tuple[str, ...],
    streams: tuple[str, ...],
    weights: str | None,
    profile: str | None,
    trust: bool,
    index: str | None,
    as_json: bool,
) -> None:
    """Evaluate the newest checkpoint of RUN, or other --weights, on the streams of its Evaluate services.

    The config is that of the run; its profile "eval", if there is one, changes it first, then PATH=VALUE.
    The result is recorded beside the run.
    """
    from everstep.experiment import open_run

    experiment = open_run(
        find(run, index).path, overrides, profile=profile, default_profile="eval", trust=trust
    )
    if streams:
        found: dict[str, float] = {}
        for each in streams:
            found |= experiment.trainer.evaluate(each, weights=weights)
    else:
        found = experiment.evaluate(weights).metrics
    if as_json:
        print_json(found)
    else:
        experiment_commands.print_metrics(found)
