"""List of the commands.  The module of a command is imported when the command is called.

The module of a command imports at its top what its help and its options need, which is little; its function
imports the rest.  So help, completion and wrong usage are answered at once.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

import click

from everstep.errors import EverstepError, RunDirError, nearest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_HOMES = {
    "experiments": ("train", "resume", "eval", "predict", "config", "data"),
    "looking": ("show", "compare", "tag", "note", "sql", "report", "ui", "audit"),
    "keeping": ("checkpoints", "export", "prune"),
    "runs": ("runs", "sync"),
    "proving": ("drill", "replay", "diverge", "check", "accept"),
}
"""Module of this package -> commands in it, as `NAME_command`; other commands have a module of their name."""

COMMANDS = {
    "train": "Train a config file, or resume its run.",
    "run": "Start a command again until it is finished: after a crash, a kill, a time budget.",
    "sweep": "Train a config with many settings, several at once.",
    "resume": "Resume a run with the config that it recorded.",
    "eval": "Evaluate the newest checkpoint of a run, or its best weights.",
    "predict": "Write the predictions of the newest checkpoint of a run, or of its best weights.",
    "config": "Check a config, and print it with every default filled in.",
    "data": "Print the first batches of a stream.",
    "runs": "List runs: filter, sort, choose columns.",
    "show": "Show one run: facts, starts, metrics, best weights, checkpoints.",
    "compare": "Compare runs: facts that differ, last and best metrics.",
    "tag": "Give a run tags, or take them away.",
    "note": "Give a run a note.",
    "report": "Write runs as one HTML file that opens from disk.",
    "ui": "Show runs in the browser, live.",
    "checkpoints": "List, verify, pin or prune the checkpoints of a run.",
    "export": "Write the weights of a run for programs without everstep.",
    "accept": "Accept a divergence of a run.",
    "audit": "Prove that a run used every sample once in each pass; say which resumes were verified.",
    "prune": "Delete runs.",
    "drill": "Test whether a script resumes exactly: kill it at every hazard.",
    "replay": "Execute steps of a run again: look at a step, or verify a stretch.",
    "diverge": "Find where two runs, or a run and its replay, part.",
    "check": "Test whether an object comes back from what it saves.",
    "sql": "Ask the index by SQL; nothing can be changed.",
    "sync": "Update the index from the journals, or make it.",
}
"""Name -> help in one line."""


def home_of(command: str) -> str:
    """Return the full name of the module that has a command."""
    home = next((home for home, commands in _HOMES.items() if command in commands), command)
    return f"everstep.cli.{home}"


_ELSEWHERE = {
    "query": "to find runs: everstep runs 'valid_loss<0.3', or everstep runs --where FILTER in MongoDB's "
    "language; to find rows, checkpoints or events: everstep.query(...) in Python"
}
"""Name that people look for among the commands -> what to do instead."""

_LOOKING = (*_HOMES["looking"], *_HOMES["keeping"], "config", "runs", "sync")
"""Commands that only read run directories, whoever wrote them, and call no code of a user."""

_SELDOM = 10_000
"""Objects that are made between two looks for garbage.  Imports leave little; to look as often as usual would
take a tenth of their time."""

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
            if ctx.invoked_subcommand not in (*_LOOKING, "data"):
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
        if cmd_name in _LOOKING:
            gc.set_threshold(_SELDOM)
        module = importlib.import_module(home_of(cmd_name))
        command: click.Command = getattr(module, f"{cmd_name}_command", None) or module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = _ELSEWHERE.get(args[0]) or nearest(args[0], COMMANDS)
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [name for name in COMMANDS if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=COMMANDS[name]) for name in names), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _told(error: Exception) -> str:
    """Describe an error in one line, with the place where it was raised."""
    import os
    import traceback

    place = traceback.extract_tb(error.__traceback__)[-1]
    file = os.path.basename(place.filename)
    return f"{type(error).__name__}: {error} ({file}:{place.lineno}); check the run's files"


@click.command(
    cls=_Commands,
    epilog="Exit status: 0 done, 1 something is wrong or failed, 2 wrong usage.",
    context_settings={"show_default": True},
)
@click.version_option(package_name="everstep", prog_name="everstep")
def commands(**_: Any) -> None:
    """Train from config files, look at runs of everstep, and prove that they resume exactly.

    A RUN is a run directory, or the name of a run in the index (the beginning of the name is enough).  The
    index is ./everstep.db or ./runs/everstep.db unless --index or EVERSTEP_INDEX names another.
    """
