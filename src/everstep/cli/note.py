"""`everstep note`"""

from __future__ import annotations

import click

from everstep import labels
from everstep.cli.common_options import index_option, run_argument
from everstep.cli.find_run import find, ship_labels
from everstep.cli.output import say


@click.command("note")
@run_argument
@click.argument("text", required=False)
@index_option
def command(run: str, text: str | None, index: str | None) -> None:
    """Give RUN a note in place of its old one, or print it.

    \b
      everstep note digits "with the old data; see lab book, page 12"
      everstep note digits ""

    An empty TEXT removes the note.  The run may be training meanwhile.
    """
    found = find(run, index)
    if text is None:
        say(labels.labels(found.path).note)
        return
    labels.set_note(found.path, text)
    ship_labels(found, index)
