"""`everstep tag`"""

from __future__ import annotations

import click

from everstep import labels
from everstep.cli.common_options import index_option, run_argument
from everstep.cli.find_run import find, ship_labels
from everstep.cli.output import say
from everstep.display.cells import in_line


@click.command("tag")
@run_argument
@click.argument("words", nargs=-1, metavar="[+]WORD...")
@click.option("--remove", "removed", multiple=True, metavar="WORD", help="Tag to take away; may be repeated.")
@index_option
def command(run: str, words: tuple[str, ...], removed: tuple[str, ...], index: str | None) -> None:
    """Give RUN tags, and print all that it has.

    \b
      everstep tag digits baseline paper
      everstep tag digits --remove paper
      everstep runs tags=baseline --columns name,tags,note

    The run may be training meanwhile.
    """
    found = find(run, index)
    path = found.path
    given = labels.labels(path)
    if words:
        given = labels.add_tags(path, [word.removeprefix("+") for word in words])
    if removed:
        given = labels.remove_tags(path, list(removed))
    if words or removed:
        ship_labels(found, index)
    say(in_line(" ".join([f"{found.facts['name']}:", *given.tags])))
