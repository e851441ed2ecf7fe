"""`everstep config`"""

from __future__ import annotations

import click

from everstep.cli import experiment_commands
from everstep.cli.common_options import index_option, json_option
from everstep.cli.find_run import find
from everstep.cli.output import print_json


@click.command("config")
@click.argument("arguments", nargs=-1, metavar="FILE...|RUN [PATH=VALUE...]")
@experiment_commands.profile_option
@index_option
@json_option
def command(arguments: tuple[str, ...], profile: str | None, index: str | None, as_json: bool) -> None:
    """Check the config of FILEs or of a RUN, and print it with every default filled in.

    The output is a config file of the same experiment.  For a RUN it is the config that the run recorded:
    nothing that it names is imported, so the arguments of calls in PATH=VALUE are not checked.
    """
    files, overrides = experiment_commands.split(arguments)
    from everstep.experiment import as_yaml, open_config
    from everstep.experiment.open_experiment import look

    if len(files) == 1 and not files[0].is_file() and files[0].suffix not in (".yaml", ".yml"):
        tree = look(find(str(files[0]), index).path, overrides, profile=profile)
    else:
        tree = open_config(files, overrides, profile=profile).tree
    if as_json:
        print_json(tree)
    else:
        click.echo(as_yaml(tree), nl=False)
