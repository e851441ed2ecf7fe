"""The command `adopt`: puts a plain training script under everstep."""

from __future__ import annotations

import difflib
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from everstep.cli import common as cli
from everstep.errors import ConfigError


@cli.command()
def adopt_command(
    script: Path = cli.argument(type=click.Path(path_type=Path, exists=True, dir_okay=False)),
    output: Path | None = cli.option(cli.PATH, "File to write the result to.", "-o --output"),
    write: bool = cli.flag("Write the result into SCRIPT."),
    drill: bool = cli.flag("Drill the result, with the arguments after --."),
    args: tuple[str, ...] = cli.argument("[-- ARGUMENT...]", nargs=-1, type=click.UNPROCESSED),
) -> None:
    """Put SCRIPT, a plain PyTorch training script, under a TrainLoop or a Supervisor, and show the diff.

    \b
      everstep adopt train.py
      everstep adopt train.py --write
      everstep adopt train.py -o adopted.py --drill -- --epochs 2

    SCRIPT is only parsed.  What has to be done by hand is listed below the diff, with the lines of SCRIPT.

    Exit status: 0 adopted, 1 not adopted, 2 wrong usage; with --drill that of everstep drill.
    """
    from everstep.cli.adopt_patch import patch
    from everstep.cli.adopt_plan import Planner

    if args and not drill:
        raise click.UsageError("arguments after -- are for --drill; give --drill, or leave them out")
    before = script.read_bytes()
    try:
        text = before.decode()
        plan = Planner(text, script.stem).plan
        after = patch(before, plan)
    except (SyntaxError, UnicodeDecodeError, ConfigError) as error:
        cli.say(f"{script} is not adopted: {error}", err=True)
        sys.exit(1)
    lines = (each.splitlines(keepends=True) for each in (text, after.decode()))
    cli.say("".join(difflib.unified_diff(*lines, str(script), str(output or script))))
    if plan.by_hand:
        cli.say("What you must look at by hand:")
    for line, words in sorted(set(plan.by_hand)):
        cli.say(f"  line {line}: {words}")
    if write:
        if script.read_bytes() != before:
            raise click.ClickException(f"{script} was changed meanwhile; nothing is written, adopt it again")
        script.write_bytes(after)
    if output is not None:
        output.write_bytes(after)
    if drill:
        from everstep.cli.proving import drill_command

        with ExitStack() as stack:
            place = output or script
            if not (write or output):  # beside the script, whose modules it imports
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=script.parent, prefix=f"{script.stem}_", suffix=".py")
                )
                file.write(after)
                file.flush()
                place = Path(file.name)
            drill_command.main([str(place), *args], prog_name="everstep drill", standalone_mode=False)
