"""`everstep accept`"""

from __future__ import annotations

import click

from everstep.cli.common_options import index_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import in_line, say
from everstep.record import accept


@click.command("accept")
@run_argument
@click.option(
    "--divergence", metavar="STEP", type=int, required=True, help="The step, as everstep show has it."
)
@index_option
def command(run: str, divergence: int, index: str | None) -> None:
    """Take a divergence of RUN as it is: the mark goes, and what follows it is the run's.

    A resume whose steps found something else than the first time marks the run as diverged at the first such
    step.  Find out why before (everstep drill).  After this, starts do not compare that step, and later ones,
    with the executions before.  The decision lies in the journal; no process may hold the run.
    """
    found = find(run, index)
    accept(found.path, divergence)
    say(f"{in_line(found.facts['name'])}: the divergence at step {divergence} is accepted")
