"""`everstep accept`"""

from __future__ import annotations

import click

from everstep.cli.common_options import index_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import say
from everstep.display.cells import in_line


@click.command("accept")
@run_argument
@click.option(
    "--divergence",
    metavar="STEP",
    type=int,
    required=True,
    help="Step of the divergence; everstep show prints it.",
)
@index_option
def command(run: str, divergence: int, index: str | None) -> None:
    """Accept a divergence of RUN: remove the mark, and count the later steps as the run's own.

    A resume executes some steps again.  If a step then gives another result than the first time, the run is
    marked as diverged at that step.  Find the cause first (everstep drill).  Later starts do not compare that
    step and the steps after it with earlier executions.  The decision is written to the journal; no process
    may hold the run.
    """
    from everstep.record import accept

    found = find(run, index)
    accept(found.path, divergence)
    say(f"{in_line(found.facts['name'])}: the divergence at step {divergence} is accepted")
