"""The command `adopt`: shows a plain PyTorch script under a `TrainLoop`, and compares the two.

Nothing of the script is executed, unless it is compared with its patched form.
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from everstep.cli import common as cli
from everstep.cli.adopt_edits import patched
from everstep.cli.adopt_kinds import TRACKERS


@cli.command()
def adopt_command(
    script: Path = cli.argument(type=click.Path(path_type=Path, exists=True, dir_okay=False)),
    output: Path | None = cli.option(
        cli.PATH, "File for the patched script; it must not exist.", "-o --output"
    ),
    seed: int | None = cli.option(int, "Seed to set, for a script that sets none."),
    by_epoch: bool = cli.flag("Make each epoch one step, whatever is in it."),
    drill: bool = cli.flag("Run both scripts, compare each update, and drill the patched one."),
    args: tuple[str, ...] = cli.argument("[-- ARGUMENT...]", nargs=-1, type=click.UNPROCESSED),
) -> None:
    """Put SCRIPT, a plain PyTorch training script, under a TrainLoop, and show the diff.

    \b
      everstep adopt train.py
      everstep adopt train.py -o adopted.py --drill -- --epochs 2

    SCRIPT is only parsed, and stays as it is.  What no patch can do safely is named with its line, and then
    nothing is written.  With --drill both scripts are executed, with the arguments after --.

    Exit status: 0 patched, 1 not patched, or the patched script trains differently; with --drill then that
    of everstep drill.
    """
    from everstep.cli.proving import drill_command

    if drill and output is None:
        raise click.UsageError("--drill executes the patched script; give it a place: -o FILE")
    if output is not None and (output.exists() or not output.absolute().parent.is_dir()):
        raise click.UsageError(f"-o {output}: give a file that does not exist, in a folder that exists")
    try:
        source = script.read_text(encoding="utf-8")
        patch = patched(source, script.stem, seed, script.parent, by_epoch)
    except SyntaxError as error:
        raise click.UsageError(f"{script} is not Python: line {error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{script} is not Python: {error}") from error
    for line, problem in sorted(patch.refused):
        cli.say(f"line {line}: {problem}", err=True)
    if patch.refused:
        remedy = "change these lines, or write the loop by hand (docs/guide/doors.md)"
        cli.say(f"{script} is not patched: {remedy}", err=True)
        sys.exit(1)
    old, new = (text.splitlines(keepends=True) for text in (source, patch.text))
    cli.say("".join(difflib.unified_diff(old, new, str(script), str(output or script))))
    if output is not None:
        with output.open("x", encoding="utf-8") as file:
            file.write(patch.text)
    notes = [f"line {line} stands in the way of finer steps: {problem}" for line, problem in patch.in_the_way]
    if notes:
        notes.insert(0, "an epoch is one step, so a kill costs the epoch")
    taken = "is taken for a module or a scheduler: if it is a function, take it out of the state"
    notes += [f"{name} {taken}" for name in patch.guessed]
    stays = "this loop stays as it is, and a kill in it costs all of it"
    notes += [f"line {line}: {stays}" for line in patch.outside]
    for package in sorted(TRACKERS.keys() & patch.script.packages):
        problem = f"after a kill some steps run again, and {package} gets their values twice"
        notes.append(f"{problem}: take the service of docs/recipes/loggers.md in place of its calls")
    cli.note(notes)
    if drill and output is not None:
        cli.leave_in_order()
        # beside the script, whose modules it imports
        with tempfile.NamedTemporaryFile("w", dir=script.parent, suffix=".py", encoding="utf-8") as plain:
            plain.write(patch.plain)
            plain.flush()
            difference = compare(Path(plain.name), output, args)
        if difference is not None:
            cli.say(difference.replace(plain.name, str(script)), err=True)
            sys.exit(1)
        cli.say("the two scripts make equal updates\n")
        drill_command.main([str(output), *args], prog_name="everstep drill", standalone_mode=False)


def compare(script: Path, patched: Path, args: Sequence[str]) -> str | None:
    """Run a script twice and its patched form once; return what differs in their updates, None if nothing."""
    from everstep.drill.any_command import Chain, Reference, Start
    from everstep.drill.processes import last_lines, owned_folder
    from everstep.drill.report import UNSTABLE

    starts = list[Start]()
    with owned_folder("everstep-adopt-") as folder:
        for number, file in enumerate((script, script, patched)):
            place = ["env", f"EVERSTEP_ROOT={folder / 'runs'}", "EVERSTEP_INDEX=off"]
            path = file.resolve()  # in the copy of this folder, where a script may write beside itself
            path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            command = [*place, sys.executable, str(path), *args]
            start = Chain(command, command, folder / str(number), 600.0).start()
            if start.status or not start.updates:
                ending = f"status {start.status} after {start.updates} updates of a torch optimizer"
                return f"{file} cannot be compared, as it ended with {ending}:\n{last_lines(start.log)}"
            starts.append(start)
    first, second, changed = starts
    reference = Reference(first)
    reference.look_for_seeds(second)
    if (difference := reference.first_difference(second, {0: 0})) is not None:
        return f"two runs of {script} differ, so it cannot be compared: {difference}; likely: {UNSTABLE}"
    difference = reference.first_difference(changed, {0: 0})
    problems = [] if difference is None else [f"first in {difference}"]
    if changed.updates != first.updates:
        problems.append(f"it makes {changed.updates} updates, and the script {first.updates}")
    return f"{patched} trains differently: {', and '.join(problems)}" if problems else None
