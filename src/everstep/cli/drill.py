"""`everstep drill`: test whether a script resumes exactly, by killing it at every hazard."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from everstep.cli.exit_signals import leave_in_order
from everstep.cli.output import say

HELP = """Kill SCRIPT at every hazard, resume it each time, and compare with a run that nobody killed.

SCRIPT is a Python script, or a config file for `everstep train`.  First it runs undisturbed, twice; if these
two runs differ, the difference is reported and nothing is killed.  Then it is killed: at random instants,
during start-up, inside the commit of a checkpoint, in the tail of an epoch, at the last step of an epoch,
in the head of the next epoch, during shutdown, three times in a row during resume, by SIGTERM, by SIGINT,
and by SIGKILL shortly after SIGTERM.  Last, its disk is made full.  All runs are written to a folder of the
drill.

A script that takes hours: --budget 10m ends the drill in time, and leaves each run after the steps that fit;
--max-steps N leaves each run at step N.  What was not reached is named.

With --ranks N, torchrun starts SCRIPT as N processes on this machine.  Each hazard strikes one of them,
chosen by the seed.  Then all of them are killed, torchrun itself, the writer and another rank at a message
of a commit, and a rank for which the others wait in a collective.  All ranks are compared.

\b
Exit status:
  0  every resume was exact
  1  a resume was not exact, or failed
  2  wrong usage
  3  the two undisturbed runs differ
  4  the script cannot be drilled: it fails by itself, opens no run, or takes too long
"""


class Duration(click.ParamType[float]):
    """A time as 90, 90s, 10m or 2h, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is not a time; give seconds, minutes or hours, as 90s, 10m or 2h")
        return float(found[1]) * _SECONDS[found[2]]


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


class NewFile(click.Path):
    """A file to write at the end; refused at once where it could not be made."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        if not path.absolute().parent.is_dir():
            self.fail(f"{path} cannot be written: its folder does not exist; make the folder first")
        return path


@click.command("drill", help=HELP, context_settings={"allow_interspersed_args": False})
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of processes that train together, started by torchrun.",
)
@click.option(
    "--kills",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Number of kills at random instants.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the instants; the same seed aims the same kills.",
)
@click.option("--budget", type=Duration(), metavar="TIME", help="Most time for the drill: 90s, 10m, 2h.")
@click.option("--max-steps", type=click.IntRange(1), help="Step at which the drill leaves each run.")
@click.option("--fail-fast", is_flag=True, help="End at the first resume that differs or fails.")
@click.option("--hazard", "hazards", multiple=True, metavar="NAME", help="Only this hazard; may be repeated.")
@click.option(
    "--timeout", type=float, default=600.0, show_default=True, help="Seconds that one start may take."
)
@click.option("--keep", type=click.Path(path_type=Path), help="New folder to keep the runs and logs in.")
@click.option("--json", "json_file", type=NewFile(), help="File to write the report to, as JSON.")
@click.option("--junit", "junit_file", type=NewFile(), help="File to write a case per hazard to, for CI.")
def command(
    script: Path,
    args: tuple[str, ...],
    ranks: int,
    kills: int,
    seed: int,
    hazards: tuple[str, ...],
    timeout: float,
    budget: float | None,
    max_steps: int | None,
    fail_fast: bool,
    keep: Path | None,
    json_file: Path | None,
    junit_file: Path | None,
) -> None:
    from everstep.drill import DrillReport, campaign
    from everstep.drill.junit import write_junit
    from everstep.drill.report import NOT_DRILLED
    from everstep.errors import ConfigError, DrillError

    leave_in_order()
    try:
        report = campaign.drill(
            script,
            args,
            ranks=ranks,
            kills=kills,
            seed=seed,
            hazards=hazards,
            timeout=timeout,
            budget=budget,
            max_steps=max_steps,
            fail_fast=fail_fast,
            keep=keep,
            say=say,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except DrillError as error:
        say(f"error: {error}", err=True)
        found, status = {"error": str(error), "exit_code": NOT_DRILLED}, NOT_DRILLED
        cases: DrillReport | str = str(error)
    else:
        found, status, cases = report.as_dict(), report.exit_code, report
    if junit_file is not None:
        write_junit(junit_file, str(script), cases)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.exit(status)
