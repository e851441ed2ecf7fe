"""`everstep config`"""

from __future__ import annotations

import click

from everstep.cli import experiments
from everstep.cli.finding import find
from everstep.cli.options import index_option, json_option
from everstep.cli.output import print_json


@click.command("config")
@click.argument("arguments", nargs=-1, metavar="FILE...|RUN [PATH=VALUE...]")
@experiments.profile_option
@index_option
@json_option
def command(arguments: tuple[str, ...], profile: str | None, index: str | None, as_json: bool) -> None:
    """Print the config of FILEs or of a RUN as it counts: checked, and every default filled in.

    What is printed is a config file of the same experiment.
    """
    files, overrides = experiments.split(arguments)
    from everstep.experiment import as_yaml, open_config, open_run

    if len(files) == 1 and not files[0].is_file() and files[0].suffix not in (".yaml", ".yml"):
        tree = open_run(find(str(files[0]), index).path, overrides, profile=profile).tree
    else:
        tree = open_config(files, overrides, profile=profile).tree
    if as_json:
        print_json(tree)
    else:
        click.echo(as_yaml(tree), nl=False)
