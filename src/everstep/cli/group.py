"""List of the commands.  Each is in a module of its name, imported when the command is called."""

from __future__ import annotations

import gc
import importlib
import traceback
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from everstep.errors import EverstepError, RunDirError, nearest

COMMANDS = {
    "train": "Train a config file, or resume its run.",
    "sweep": "Train a config with many settings, several at once.",
    "resume": "Resume a run with the config that it recorded.",
    "eval": "Evaluate the newest checkpoint of a run, or its best weights.",
    "predict": "Write the predictions of the newest checkpoint of a run, or of its best weights.",
    "config": "Check a config, and print it with every default filled in.",
    "data": "Print the first batches of a stream.",
    "runs": "List runs: filter, sort, choose columns.",
    "show": "Show one run: facts, starts, metrics, best weights, checkpoints.",
    "compare": "Compare runs: facts that differ, last and best metrics.",
    "plot": "Plot a metric of one or more runs.",
    "checkpoints": "List, verify, pin or prune the checkpoints of a run.",
    "export": "Write the weights of a run for programs without everstep.",
    "accept": "Accept a divergence of a run.",
    "prune": "Delete runs.",
    "drill": "Test whether a script resumes exactly: kill it at every hazard.",
    "check": "Test whether an object comes back from what it saves.",
    "sync": "Update the index from the journals, or make it.",
    "doctor": "Check this machine: devices, determinism, disk, locks.",
}
"""Name -> help in one line.  The module `everstep.cli.NAME` has the command as `command`."""


_LOOKING = ("runs", "show", "compare", "plot", "checkpoints", "export", "prune", "sync", "config")
"""Commands that only read run directories, whoever wrote them, and call no code of a user."""

_ODD = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that damaged values in a file can cause."""


class _Commands(click.Group):
    """Group that lists its commands without importing them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EverstepError:
            raise
        except BrokenPipeError:  # the reader, such as head, has seen enough
            if ctx.invoked_subcommand not in (*_LOOKING, "data", "doctor"):
                raise
            ctx.exit(0)
        except _ODD as error:
            if ctx.invoked_subcommand not in _LOOKING:
                raise
            raise RunDirError(f"a file was not written by everstep, or is damaged: {_told(error)}") from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        gc.disable()  # imports leave little garbage, and looking for it takes a tenth of their time
        try:
            command: click.Command = importlib.import_module(f"everstep.cli.{cmd_name}").command
        finally:
            gc.enable()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; {nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=COMMANDS[name]) for name in names), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _told(error: Exception) -> str:
    """Describe an error in one line, with the place where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno}); check the run's files"
    )


@click.command(cls=_Commands, epilog="Exit status: 0 done, 1 something is wrong or failed, 2 wrong usage.")
@click.version_option(package_name="everstep", prog_name="everstep")
def commands(**_: Any) -> None:
    """Train from config files, look at runs of everstep, and prove that they resume exactly.

    A RUN is a run directory, or the name of a run in the index (the beginning of the name is enough).  The
    index is ./everstep.db or ./runs/everstep.db unless --index or EVERSTEP_INDEX names another.
    """
