"""`everstep diverge`: the step and the component at which two runs, or a run and its replay, part."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click

from everstep.cli.common_options import complete_run, index_option
from everstep.cli.exit_signals import leave_in_order
from everstep.cli.experiment_commands import trust_option
from everstep.cli.find_run import find_all
from everstep.cli.output import say

HELP = """Find where two runs part: the first step, and the first component of that step.

\b
  everstep diverge digits-3 digits-4
  everstep diverge digits-3 --again
  everstep diverge digits-3 digits-4 --script-b "train.py --lr 0.1"

First the records are compared: settings, metrics of each step, digests of batches, and the states in
checkpoints that both runs have.  Then both programs execute the steps between the last equal checkpoint and
the first difference again, in copies, and each part of each step is compared: data, random state, weights,
loss, gradient, optimizer, update.  Numbers come with their distance in units in the last place.  Nothing is
written into a run.

With --again, RUN is compared with its own replay.

\b
Exit status:
  0  equal in all that both have recorded
  1  the runs differ
  2  wrong usage
  4  nothing was recorded that can be compared; RUN cannot be executed again (--again)
"""


@click.command("diverge", help=HELP)
@click.argument("runs", nargs=-1, required=True, shell_complete=complete_run)
@click.option("--again", is_flag=True, help="Compare one RUN with its own replay.")
@click.option(
    "--steps", metavar="A:B", help="With --again: the steps to execute; default: all that is possible."
)
@click.option("--script-a", metavar="COMMAND", default="", help="Script and arguments of the first run.")
@click.option("--script-b", metavar="COMMAND", default="", help="Script and arguments of the second run.")
@click.option("--recorded", "only_recorded", is_flag=True, help="Compare the records; execute nothing.")
@click.option("--keep", type=click.Path(path_type=Path), help="New folder to keep the copies in.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File for the result, as JSON.")
@trust_option
@index_option
def command(
    runs: tuple[str, ...],
    again: bool,
    steps: str | None,
    script_a: str,
    script_b: str,
    only_recorded: bool,
    keep: Path | None,
    json_file: Path | None,
    trust: bool,
    index: str | None,
) -> None:
    from everstep.errors import ReplayError
    from everstep.replaying import diverge as room
    from everstep.replaying.execution import folder_for
    from everstep.replaying.verify import asked_steps

    if len(runs) != (1 if again else 2):
        raise click.UsageError("give two runs, or one run and --again")
    if steps and not again:
        raise click.UsageError("--steps goes with --again; two runs are executed where they differ")
    leave_in_order()
    paths = [found.path.absolute() for found in find_all(runs, index)]
    subjects = [
        room.Subject(name, path, tuple(shlex.split(given)))
        for name, path, given in zip("AB", paths, (script_a, script_b), strict=False)
    ]
    try:
        with folder_for(keep) as folder:
            if again:
                asked = asked_steps(steps or ":", paths[0])
                report = room.diverge_again(subjects[0], folder, asked, trust=trust)
            elif only_recorded:
                report = room.compare_recorded(*paths)
            else:
                report = room.diverge(subjects[0], subjects[1], folder, trust=trust)
    except ReplayError as error:
        say(f"everstep diverge: {error}", err=True)
        sys.exit(4)
    say(str(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    sys.exit(int(report.step is not None) if report.compared else 4)
