"""The command `adopt`: puts a plain training script under a `TrainLoop`."""

from __future__ import annotations

import difflib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from everstep.cli import common as cli


@cli.command()
def adopt_command(
    script: Path = cli.argument(type=click.Path(path_type=Path, exists=True, dir_okay=False)),
    output: Path | None = cli.option(
        cli.PATH, "File for the patched script; it must not exist.", "-o --output"
    ),
    seed: int | None = cli.option(int, "Seed to set, for a script that sets none."),
    drill: bool = cli.flag("Run both scripts, compare each update, and drill the patched one."),
    args: tuple[str, ...] = cli.argument("[-- ARGUMENT...]", nargs=-1, type=click.UNPROCESSED),
) -> None:
    """Put SCRIPT, a plain PyTorch training script, under a TrainLoop, and show the diff.

    \b
      everstep adopt train.py
      everstep adopt train.py -o adopted.py --drill -- --epochs 2

    SCRIPT is only parsed, and stays as it is.  What no patch can do safely is named with its line, and then
    nothing is written.  With --drill both scripts are executed, with the arguments after --.

    Exit status: 0 patched, 1 not patched, or the patched script trains otherwise; with --drill then that of
    everstep drill.
    """
    from everstep.cli.adopt_patch import Patch
    from everstep.cli.proving import drill_command

    if drill and output is None:
        raise click.UsageError("--drill executes the patched script; give it a place: -o FILE")
    before = script.read_text(encoding="utf-8")
    try:
        patch = Patch(before, script.stem, seed)
    except SyntaxError as error:
        raise click.UsageError(f"{script} is not Python: line {error.lineno}: {error.msg}") from error
    for line, words in sorted(patch.refused):
        cli.say(f"line {line}: {words}", err=True)
    if patch.refused:
        cli.say(f"{script} is not patched; change these lines, or wrap it by hand", err=True)
        sys.exit(1)
    old, new = (text.splitlines(keepends=True) for text in (before, patch.text))
    cli.say("".join(difflib.unified_diff(old, new, str(script), str(output or script))))
    if output is not None:
        with output.open("x", encoding="utf-8") as file:
            file.write(patch.text)
    if drill and output is not None:
        cli.leave_in_order()
        # beside the script, whose modules it imports
        with tempfile.NamedTemporaryFile("w", dir=script.parent, suffix=".py", encoding="utf-8") as plain:
            plain.write(patch.plain)
            plain.flush()
            problem = compare(Path(plain.name), output, args)
        if problem is not None:
            cli.say(problem, err=True)
            sys.exit(1)
        cli.say("the two scripts make equal updates\n")
        drill_command.main([str(output), *args], prog_name="everstep drill", standalone_mode=False)


def compare(script: Path, patched: Path, args: Sequence[str]) -> str | None:
    """Run a script twice and its patched form once; return what differs in their updates, None if nothing."""
    from everstep.drill.any_command import Chain, Reference, Start
    from everstep.drill.processes import last_lines, owned_folder

    starts = list[Start]()
    with owned_folder("everstep-adopt-") as folder:
        for number, file in enumerate((script, script, patched)):
            place = ["env", f"EVERSTEP_ROOT={folder / 'runs'}", "EVERSTEP_INDEX=off"]
            command = [*place, sys.executable, str(file.resolve()), *args]
            start = Chain(command, command, folder / str(number), 600.0).start()
            if start.status or not start.updates:
                how = f"status {start.status}, {start.updates} updates of a torch optimizer"
                return f"{file} cannot be compared: {how}\n{last_lines(start.log)}"
            starts.append(start)
    first, again, now = starts
    reference = Reference(first)
    reference.look_for_seeds(again)
    if (difference := reference.first_difference(again, {0: 0})) is not None:
        return f"two runs of {script} differ, so nothing can be compared; seed it: {difference}"
    difference = reference.first_difference(now, {0: 0})
    if difference is None and now.updates == first.updates:
        return None
    return f"{patched} trains otherwise: {now.updates} updates, not {first.updates}; {difference}"
