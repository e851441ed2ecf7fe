"""The list of commands.  Each lies in a module of its name, which is imported when it is called."""

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
    "train": "Train what a config file says, or go on with it.",
    "sweep": "Train a config with many settings, several at once.",
    "resume": "Go on with a run, by the config that it has recorded.",
    "eval": "Evaluate a run: its newest checkpoint, or its best.",
    "predict": "Write what a run predicts: its newest checkpoint, or its best.",
    "config": "Print a config as it counts, checked.",
    "data": "Look at the first batches of a stream.",
    "runs": "List runs: filter, sort, choose columns.",
    "show": "Show one run: facts, starts, metrics, best, checkpoints.",
    "compare": "Differences of facts and of last and best metrics.",
    "plot": "Draw a metric of one or more runs.",
    "checkpoints": "List, verify, pin or prune the checkpoints of a run.",
    "export": "Write the weights of a run for programs without everstep.",
    "accept": "Take a divergence of a run as it is.",
    "prune": "Delete runs that are not needed any more.",
    "drill": "Kill a script at every hazard: is its resume exact?",
    "check": "Does what an object saves bring it back?",
    "sync": "Bring the index up to what the journals say.",
    "doctor": "Examine this machine: devices, determinism, disk, locks.",
}
"""Name -> what it does.  `everstep.cli.NAME` has it as `command`."""


_LOOKING = ("runs", "show", "compare", "plot", "checkpoints", "export", "prune", "sync", "config")
"""Commands that read what a run directory holds, whoever wrote it, and call nothing of a user's."""

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
"""What comes of values that are not what they should be."""


class _Commands(click.Group):
    """Knows its commands without importing them."""

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
            raise RunDirError(f"what was read there is not as everstep writes it: {_told(error)}") from error

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
    """An error in one line, and where it arose."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno}); check the run's files"
    )


@click.command(cls=_Commands, epilog="Exit status: 0 done, 1 something is wrong, 2 wrong usage.")
@click.version_option(package_name="everstep", prog_name="everstep")
def commands(**_: Any) -> None:
    """Trains from config files, looks at runs of everstep, and proves their promise.

    A RUN is a run directory, or the name of a run in the index (its beginning is enough).  The index
    is ./everstep.db or ./runs/everstep.db unless --index or EVERSTEP_INDEX names another.
    """
