"""Commands that prove exactness: `drill`, `replay`, `diverge`, `check`, `accept`."""

from __future__ import annotations

import inspect
import json
import os
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from everstep.cli import common as cli
from everstep.display.cells import in_line
from everstep.errors import ConfigError, DrillError, ReplayError, nearest

_CANNOT = 4
"""Exit status where a script cannot be drilled, or steps cannot be executed again or compared."""
_OWN_FILES = "files that the program writes by itself are written again, as they were at these steps"


def _write_json(file: Path | None, value: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _replaying() -> Iterator[None]:
    """Leave in order by a signal, and with a status of its own where steps cannot be executed again."""
    cli.leave_in_order()
    try:
        yield
    except ReplayError as error:
        cli.say(f"everstep {click.get_current_context().info_name}: {error}", err=True)
        sys.exit(_CANNOT)


_DRILL = {
    "ranks": cli.option(cli.COUNT, "Number of processes, which torchrun starts.", default=1),
    "kills": cli.option(click.IntRange(0), "Number of kills at random instants.", default=3),
    "seed": cli.option(int, "Seed of the instants; the same seed aims the same kills.", default=0),
    "max_steps": cli.option(cli.COUNT, "Step at which the drill stops a run, with its state saved."),
    "hazards": cli.option("NAME", "Only this hazard; may be repeated.", "--hazard", multiple=True),
    "timeout": cli.option(float, "Seconds that one start may take.", default=600.0),
    "budget": cli.option(float, "Minutes after which nothing more is struck."),
    "strikes": cli.option(cli.COUNT, "Of any command: the number of strikes.", default=12),
    "power_cut": cli.flag("Of any command: also lose what is renamed before it is synced."),
    "resume_cmd": cli.option("COMMAND", "Of any command: the one that goes on, if it is another."),
    "keep": cli.KEEP,
}
_OF_ANY_COMMAND = {"strikes", "power_cut", "resume_cmd"}
_OF_A_SCRIPT = {"ranks", "kills", "max_steps", "hazards"}


def _options_of(form: str, options: dict[str, Any], others: set[str], remedy: str) -> dict[str, Any]:
    """Return the options of a form of a drill; refuse those that the other form has."""
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in others and source is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"{option.opts[0]} does nothing in a drill of {form}; {remedy}")
    return {name: value for name, value in options.items() if name not in others}


@cli.command(interspersed=False, **_DRILL)
def drill_command(
    script: Path = cli.argument(type=cli.PATH),
    args: tuple[str, ...] = cli.argument(nargs=-1, type=click.UNPROCESSED),
    json_file: Path | None = cli.JSON_FILE,
    junit_file: Path | None = cli.option(cli.PATH, "File to write a case per hazard to, for CI.", "--junit"),
    summary: Path | None = cli.option(cli.PATH, "File to append the report to, as Markdown, for CI."),
    **options: Any,
) -> None:
    """Kill SCRIPT at every hazard, resume it each time, and compare with an undisturbed run.

    \b
      everstep drill train.py --epochs 2
      everstep drill -- python train.py --output {out}

    SCRIPT is a Python script that uses everstep, or a config file for `everstep train`.  The second form
    takes any command that trains with PyTorch, and compares its updates: {out} stands for a new folder for
    what it writes; without it, each start runs in a copy of the current directory.

    First SCRIPT runs undisturbed, twice; if these two runs differ, nothing is killed.  Then it is killed at
    random instants and at every hazard, and last, its disk is made full.  All runs are written to a
    folder of the drill.

    With --ranks N, torchrun starts SCRIPT as N processes on this machine.  Each hazard strikes one of them,
    chosen by the seed; then all of them, and torchrun itself.  All ranks are compared.

    Exit status: 0 every resume was exact, 1 a resume was not exact or failed, 2 wrong usage, 3 the two
    undisturbed runs differ, 4 the script cannot be drilled (it fails by itself, opens no run, or takes too
    long).
    """
    from everstep.drill import any_command, campaign
    from everstep.drill.report import DrillReport, append_summary, write_junit

    cli.leave_in_order()
    try:
        # of `./train.sh` click leaves train.sh
        program = str(script) if shutil.which(script) else os.path.join(os.curdir, script)
        if script.suffix in (".py", ".yaml", ".yml", ".ipynb") or shutil.which(program) is None:
            remedy = "leave it out, or drill the command: everstep drill [OPTION...] -- python train.py"
            form = f"a script that uses everstep ({script})"
            some = _options_of(form, options, _OF_ANY_COMMAND, remedy)
            report = campaign.drill(script, args, say=cli.say, **some)
        else:
            remedy = "leave it out, or drill a script that uses everstep: everstep drill [OPTION...] train.py"
            some = _options_of(f"any command ({script})", options, _OF_A_SCRIPT, remedy)
            again = some.pop("resume_cmd") or ""
            try:
                some["resume"] = shlex.split(again)
            except ValueError as error:
                raise ConfigError(f"--resume-cmd {again!r}: {error}") from None
            report = any_command.drill_command([program, *args], say=cli.say, **some)
        outcome: DrillReport | str = report
        result, status = report.as_dict(), report.exit_code
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except DrillError as error:
        cli.say(f"error: {error}", err=True)
        outcome, status = str(error), _CANNOT
        result = {"error": outcome, "exit_code": status}
    _write_json(json_file, result)
    if junit_file is not None:
        write_junit(junit_file, str(script), outcome)
    if summary is not None:
        append_summary(summary, outcome)
    sys.exit(status)


@cli.command()
def replay_command(
    run: str = cli.RUN,
    step: int | None = cli.option(cli.COUNT, "Print the batch and metrics of this step."),
    steps: str | None = cli.option("A:B", "Execute these steps, and compare.", "--verify"),
    opened_as: Path | None = cli.option(cli.PATH, "Path under which the program opens a run that has moved."),
    keep: Path | None = cli.KEEP,
    json_file: Path | None = cli.JSON_FILE,
    trust: bool = cli.TRUST,
    index: str | None = cli.INDEX,
    program: tuple[str, ...] = cli.argument("[-- SCRIPT [ARGUMENT...]]", nargs=-1, type=click.UNPROCESSED),
) -> None:
    """Execute steps of RUN again, exactly, in a copy of it; RUN itself is only read.

    \b
      everstep replay digits --verify 4000:5000
      everstep replay digits --step 4711
      everstep replay digits --step 4711 -- train.py --lr 0.1

    The program that the run has recorded is started from the nearest checkpoint before the steps, and every
    value that was recorded of them is compared.  A: goes on to the last step, : is all that can be executed.
    --step N also prints the batch and the metrics of step N.  Nothing is saved, and no service reports; but
    files that the program writes by itself, in its loop too, are written again, where they always are.

    Exit status: 0 every recorded value was found again, 1 one was not, or none is recorded, 2 wrong usage,
    4 the steps cannot be executed again.
    """
    from everstep.replaying.comparing import parse_steps, verify
    from everstep.replaying.execution import folder_for, program_of

    if (step is None) == (steps is None):
        raise click.UsageError("give one of --step N and --verify A:B")
    run_dir = cli.find(run, index).path.absolute()
    span = parse_steps(steps or f"{step}:{step}", run_dir)
    cli.note([_OWN_FILES])
    with _replaying(), folder_for(keep) as folder:
        recorded_program = program_of(run_dir, span[-1], program, trust=trust)
        result = verify(run_dir, span, recorded_program, folder, opened_as, shown=step or 0)
    cli.note(result.notes)
    cli.say(str(result))
    _write_json(json_file, result.as_json())
    sys.exit(int(not result.verified))


@cli.command()
def diverge_command(
    runs: tuple[str, ...] = cli.RUNS,
    script_a: str = cli.option("COMMAND", "Script and arguments of the first run.", default=""),
    script_b: str = cli.option("COMMAND", "Script and arguments of the second run.", default=""),
    only_recorded: bool = cli.flag("Compare the records; execute nothing.", "--recorded"),
    keep: Path | None = cli.KEEP,
    json_file: Path | None = cli.JSON_FILE,
    trust: bool = cli.TRUST,
    index: str | None = cli.INDEX,
) -> None:
    """Find where two runs part: the first step, and the first component of that step.

    \b
      everstep diverge digits-3 digits-4
      everstep diverge digits-3 digits-4 --script-b "train.py --lr 0.1"

    First the rows of both records are compared (everstep compare has facts and checkpoints).  Then both
    programs execute the steps between the last equal checkpoint and the first difference again, in copies,
    and the parts of each step are compared: samples, random state, loss, weights, optimizer, state.  Nothing
    is written into a run; files that a program writes by itself are written again.

    Exit status: 0 equal in all that both have recorded, 1 the runs differ, 2 wrong usage, 4 nothing was
    recorded that can be compared.
    """
    from everstep.replaying import comparing as room
    from everstep.replaying.execution import folder_for

    if len(runs) != 2:
        raise click.UsageError("give two runs; everstep replay --verify compares one with its replay")
    paths = [entry.path.absolute() for entry in cli.find_all(runs, index)]
    first, second = (
        room.Subject(name, path, tuple(shlex.split(script)))
        for name, path, script in zip("AB", paths, (script_a, script_b), strict=True)
    )
    with _replaying(), folder_for(keep) as folder:
        if only_recorded:
            report = room.compare_recorded(*paths)
        else:
            cli.note([_OWN_FILES])
            report = room.diverge(first, second, folder, trust=trust)
    cli.say(str(report))
    _write_json(json_file, report.as_json())
    sys.exit(int(report.first is not None) if report.compared else _CANNOT)


@cli.command()
def check_command(
    spec: str = cli.argument("OBJECT"),
    change: str | None = cli.option("FUNCTION", "Changes OBJECT, which is then checked as state."),
    as_json: bool = cli.JSON,
) -> None:
    """Test whether OBJECT comes back from what it saves.  The test works on copies.

    OBJECT is MODULE:NAME or FILE.py:NAME.  It is data (a loader, a dataset, any iterable of batches), or
    state if --change names a function (in the same form) that is called with the object.  A function or
    class is called without arguments.  The module or file is imported.  Exit status 1 if a run could not
    restore OBJECT.
    """
    obj = _load_object(spec)
    if isinstance(obj, type) or type(obj).__name__ == "function":
        try:
            inspect.signature(obj).bind()
        except TypeError as error:
            problem = f"{spec} cannot be called without arguments ({error})"
            raise ConfigError(f"{problem}; give a function that makes the object") from None
        except ValueError:  # a class in C has no signature
            pass
        obj = obj()
    from everstep.testing import check

    result = check(obj, None if change is None else _load_object(change))
    if as_json:
        word = None if result.word is None else result.word._asdict()
        cli.print_json({"kind": result.kind, "word": word, "run": result.run._asdict()})
    else:
        cli.say(f"{spec}: a {type(obj).__name__}, as {result.kind}\n{result}")
    if not result.run.kept:
        sys.exit(1)


def _load_object(spec: str) -> Any:
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


@cli.command()
def accept_command(
    run: str = cli.RUN,
    divergence: int = cli.option(int, "Step of the divergence; everstep show prints it.", required=True),
    index: str | None = cli.INDEX,
) -> None:
    """Accept a divergence of RUN: remove the mark, and count the later steps as the run's own.

    A resume executes some steps again.  If a step then gives another result than the first time, the run is
    marked as diverged at that step.  Find the cause first (everstep drill).  Later starts do not compare that
    step and those after it with earlier executions.  No process may hold the run.
    """
    from everstep.record import accept

    entry = cli.find(run, index)
    accept(entry.path, divergence)
    cli.say(f"{in_line(entry.facts['name'])}: the divergence at step {divergence} is accepted")
