"""The command `everstep`: it owns no logic of training.

Exit status: 0 done; 1 something is wrong or failed; 2 wrong usage (an unknown command, run, metric or
option, a filter that is not a comparison, a config with a mistake).  Training also has: 3 the time budget is
used up, 4 a requirement is not met, 5 the run has diverged, 128 + N it was ended by signal N.  After 3 or a
signal it can be resumed.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

EXTRAS = {
    **dict.fromkeys(("click", "sqlalchemy"), "cli"),
    **dict.fromkeys(("pydantic", "ruamel"), "experiment"),
    **dict.fromkeys(("starlette", "uvicorn", "orjson"), "ui"),
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Package -> the extra of everstep that brings it."""


def main() -> NoReturn:
    """Run the command of this process's arguments, and exit."""
    status = 0
    try:
        status = _run()
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        from everstep.errors import to_install

        remedy = to_install(EXTRAS[package])
        print(f"everstep: this needs {package}, which is not installed: {remedy}", file=sys.stderr)
        status = 1
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def leave_run() -> None:
    """Inside a run directory, take no module from the working directory: Python may look there first."""
    cwd = os.getcwd()
    above = cwd
    while not os.path.lexists(os.path.join(above, "run.json")):
        if above == (above := os.path.dirname(above)):
            return
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or cwd) != cwd]


def _run() -> int:
    leave_run()
    import click

    from everstep.cli.group import commands
    from everstep.errors import ConfigError, DivergenceError, EverstepError

    try:
        return commands.main(prog_name="everstep", standalone_mode=False) or 0
    except click.exceptions.Abort:
        return 130
    except (click.ClickException, EverstepError) as error:
        from everstep.cli.common import DIVERGED, say
        from everstep.display.cells import shown
        from everstep.redaction import redacted
        from everstep.unattended import tell_error

        if isinstance(error, click.ClickException):
            click.UsageError(shown(redacted(error.format_message())), getattr(error, "ctx", None)).show()
            return error.exit_code
        tell_error(error)
        say(f"everstep: {redacted(str(error))}", err=True)
        return 2 if isinstance(error, ConfigError) else DIVERGED if isinstance(error, DivergenceError) else 1
