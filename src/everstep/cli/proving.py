"""Commands that prove exactness: `drill`, `replay`, `diverge`, `check`, `accept`."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from everstep.cli.common_options import (
    index_option,
    json_file_option,
    json_option,
    keep_option,
    leave_in_order,
    run_argument,
    runs_argument,
    trust_option,
)
from everstep.cli.find_run import find, find_all
from everstep.cli.output import note, print_json, say
from everstep.display.cells import in_line
from everstep.errors import ConfigError, nearest


def _write_json(file: Path | None, value: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------ drill

_DRILL = """Kill SCRIPT at every hazard, resume it each time, and compare with an undisturbed run.

\b
  everstep drill train.py --epochs 2
  everstep drill -- python train.py --output {out}

SCRIPT is a Python script that uses everstep, or a config file for `everstep train`.  The second form takes
any command that trains with PyTorch: {out} stands for a new folder for what it writes (without it, each
start runs in a copy of the current directory), and its updates are compared.

First SCRIPT runs undisturbed, twice; if the runs differ, the difference is reported and nothing is killed.
Then it is killed at random instants and
at every hazard, and last, its disk is made full.  All runs are written to a folder of the drill.

A script that takes hours: --max-steps N leaves each run at step N.

With --ranks N, torchrun starts SCRIPT as N processes on this machine.  Each hazard strikes one of them,
chosen by the seed; then all of them, and torchrun itself.  All ranks are compared.

\b
Exit status:
  0  every resume was exact
  1  a resume was not exact, or failed
  2  wrong usage
  3  the two undisturbed runs differ
  4  the script cannot be drilled: it fails by itself, opens no run, or takes too long
"""


@click.command("drill", help=_DRILL, context_settings={"allow_interspersed_args": False})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    help="Number of processes that train together, started by torchrun.",
)
@click.option("--kills", type=click.IntRange(0), default=3, help="Number of kills at random instants.")
@click.option("--seed", type=int, default=0, help="Seed of the instants; the same seed aims the same kills.")
@click.option("--max-steps", type=click.IntRange(1), help="Step at which the drill leaves each run.")
@click.option("--hazard", "hazards", multiple=True, metavar="NAME", help="Only this hazard; may be repeated.")
@click.option("--timeout", type=float, default=600.0, help="Seconds that one start may take.")
@click.option("--strikes", type=click.IntRange(1), default=12, help="Of any command: the number of strikes.")
@click.option(
    "--resume-cmd", metavar="COMMAND", help="Of any command: the one that goes on, if it is another."
)
@keep_option
@json_file_option
@click.option(
    "--junit",
    "junit_file",
    type=click.Path(path_type=Path),
    help="File to write a case per hazard to, for CI.",
)
def drill_command(
    script: Path,
    args: tuple[str, ...],
    json_file: Path | None,
    junit_file: Path | None,
    strikes: int,
    resume_cmd: str | None,
    **options: Any,
) -> None:
    from everstep.drill import any_command, campaign
    from everstep.drill.report import NOT_DRILLED, DrillReport, write_junit
    from everstep.errors import DrillError

    leave_in_order()
    try:
        if script.is_file() or shutil.which(str(script)) is None:
            report = campaign.drill(script, args, say=say, **options)
        else:
            resume = shlex.split(resume_cmd or "")
            some = {name: options[name] for name in ("seed", "timeout", "keep")}
            words = [str(script), *args]
            report = any_command.drill_command(words, resume=resume, strikes=strikes, say=say, **some)
        outcome: DrillReport | str = report
        result, status = report.as_dict(), report.exit_code
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except DrillError as error:
        say(f"error: {error}", err=True)
        outcome, status = str(error), NOT_DRILLED
        result = {"error": outcome, "exit_code": status}
    _write_json(json_file, result)
    if junit_file is not None:
        write_junit(junit_file, str(script), outcome)
    sys.exit(status)


# ---------------------------------------------------------------------------------------- replay

_CANNOT = 4
"""Exit status where steps cannot be executed again."""

_REPLAY = """Execute steps of RUN again, exactly, in a copy of it; RUN itself is only read.

\b
  everstep replay digits --verify 4000:5000
  everstep replay digits --step 4711
  everstep replay digits --step 4711 -- train.py --lr 0.1

The program that the run has recorded is started from the nearest checkpoint before the steps, and every
value that was recorded of them is compared.  A: goes on to the last step, : is all that can be executed.
--step N also prints the batch and the metrics of step N.  Nothing is saved, and no service reports.

\b
Exit status:
  0  every recorded value was found again
  1  a recorded value was not found again, or none is recorded
  2  wrong usage
  4  the steps cannot be executed again
"""


@click.command("replay", help=_REPLAY)
@run_argument
@click.option("--step", type=click.IntRange(1), metavar="N", help="Print the batch and metrics of this step.")
@click.option("--verify", "steps", metavar="A:B", help="Execute these steps, and compare.")
@click.option(
    "--opened-as",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Path under which the program opens the run, if the run has moved.",
)
@keep_option
@json_file_option
@trust_option
@index_option
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT [ARGUMENT...]]")
def replay_command(
    run: str,
    step: int | None,
    steps: str | None,
    opened_as: Path | None,
    keep: Path | None,
    json_file: Path | None,
    trust: bool,
    index: str | None,
    program: tuple[str, ...],
) -> None:
    from everstep.errors import ReplayError
    from everstep.replaying.execution import folder_for
    from everstep.replaying.recorded_program import program_of
    from everstep.replaying.verify import parse_steps, verify

    if (step is None) == (steps is None):
        raise click.UsageError("give one of --step N and --verify A:B")
    leave_in_order()
    run_dir = find(run, index).path.absolute()
    wanted = parse_steps(steps or f"{step}:{step}", run_dir)
    try:
        recorded = program_of(run_dir, wanted[-1], program, trust=trust)
        with folder_for(keep) as folder:
            result = verify(run_dir, wanted, recorded, folder, opened_as, shown=step or 0)
    except ReplayError as error:
        say(f"everstep replay: {error}", err=True)
        sys.exit(_CANNOT)
    note(result.notes)
    say(str(result))
    _write_json(json_file, result.as_json())
    sys.exit(int(not result.verified))


# ---------------------------------------------------------------------------------------- diverge

_DIVERGE = """Find where two runs part: the first step, and the first component of that step.

\b
  everstep diverge digits-3 digits-4
  everstep diverge digits-3 digits-4 --script-b "train.py --lr 0.1"

First the records are compared.  Then both programs execute the steps between the last equal checkpoint and
the first difference again, in copies, and the parts of each step are compared: samples, random state, loss,
weights, optimizer, state.  Nothing is written into a run.

\b
Exit status:
  0  equal in all that both have recorded
  1  the runs differ
  2  wrong usage
  4  nothing was recorded that can be compared
"""


@click.command("diverge", help=_DIVERGE)
@runs_argument
@click.option("--script-a", metavar="COMMAND", default="", help="Script and arguments of the first run.")
@click.option("--script-b", metavar="COMMAND", default="", help="Script and arguments of the second run.")
@click.option("--recorded", "only_recorded", is_flag=True, help="Compare the records; execute nothing.")
@keep_option
@json_file_option
@trust_option
@index_option
def diverge_command(
    runs: tuple[str, ...],
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

    if len(runs) != 2:
        raise click.UsageError(
            "give two runs; one run is compared with its replay by everstep replay --verify"
        )
    leave_in_order()
    paths = [found.path.absolute() for found in find_all(runs, index)]
    subjects = [
        room.Subject(name, path, tuple(shlex.split(script)))
        for name, path, script in zip("AB", paths, (script_a, script_b), strict=True)
    ]
    try:
        with folder_for(keep) as folder:
            if only_recorded:
                report = room.compare_recorded(*paths)
            else:
                report = room.diverge(subjects[0], subjects[1], folder, trust=trust)
    except ReplayError as error:
        say(f"everstep diverge: {error}", err=True)
        sys.exit(_CANNOT)
    say(str(report))
    _write_json(json_file, report.as_json())
    sys.exit(int(report.first is not None) if report.compared else _CANNOT)


# --------------------------------------------------------------------------------- check, accept


@click.command("check")
@click.argument("spec", metavar="OBJECT")
@click.option(
    "--change",
    metavar="FUNCTION",
    help="Function that changes OBJECT as training does; OBJECT is then checked as state.",
)
@json_option
def check_command(spec: str, change: str | None, as_json: bool) -> None:
    """Test whether OBJECT comes back from what it saves.  The test works on copies.

    OBJECT is MODULE:NAME or FILE.py:NAME.  It is data (a loader, a dataset, any iterable of batches), or
    state if --change names a function (in the same form) that is called with the object.  A function or
    class is called without arguments.  The module or file is imported.  Exit status 1 if a run could not
    restore OBJECT.
    """
    obj = _named(spec)
    if isinstance(obj, type) or type(obj).__name__ == "function":
        obj = obj()
    from everstep.testing import check

    result = check(obj, None if change is None else _named(change))
    if as_json:
        word = None if result.word is None else result.word._asdict()
        print_json({"kind": result.kind, "word": word, "run": result.run._asdict()})
    else:
        click.echo(f"{spec}: a {type(obj).__name__}, as {result.kind}\n{result}")
    if not result.run.kept:
        sys.exit(1)


def _named(spec: str) -> Any:
    """Import the object that MODULE:NAME or FILE.py:NAME names."""
    from everstep.experiment.import_paths import imported

    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        sys.path.insert(0, "")  # as for python -m
        return imported(spec)
    if not Path(file).is_file():
        raise ConfigError(f"file {file} does not exist; give MODULE:NAME or FILE.py:NAME")
    names = runpy.run_path(file)
    if name not in names:
        raise ConfigError(f"{file} has no {name!r}; {nearest(name, names)}")
    return names[name]


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
def accept_command(run: str, divergence: int, index: str | None) -> None:
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
