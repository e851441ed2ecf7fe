"""List of the commands.  The module of a command is imported when the command is called.

The module of a command imports at its top what its help and its options need, which is little; its function
imports the rest.  So help, completion and wrong usage are answered at once.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import Any

import click

from everstep.errors import EverstepError, RunDirError, nearest

COMMANDS = {
    "train": ("experiments", "Train a config file, or resume its run."),
    "run": ("run", "Start a command again until it is finished: after a crash, a kill, a time budget."),
    "sweep": ("sweep", "Train a config with many settings, several at once."),
    "resume": ("experiments", "Resume a run with the config that it recorded."),
    "eval": ("experiments", "Evaluate the newest checkpoint of a run, or its best weights."),
    "predict": ("experiments", "Write the predictions of the newest checkpoint, or of the best weights."),
    "config": ("experiments", "Check a config, and print it with every default filled in."),
    "data": ("experiments", "Print the first batches of a stream."),
    "runs": ("runs", "List runs: filter, sort, choose columns."),
    "show": ("looking", "Show one run: facts, starts, metrics, best weights, checkpoints."),
    "watch": ("looking", "Follow one run in the terminal until it ends."),
    "compare": ("looking", "Compare runs: facts that differ, last and best metrics."),
    "tag": ("looking", "Give a run tags, or take them away."),
    "note": ("looking", "Give a run a note."),
    "report": ("looking", "Write runs as one HTML file that opens from disk."),
    "ui": ("looking", "Show runs in the browser, live."),
    "checkpoints": ("keeping", "List, verify, pin or prune the checkpoints of a run."),
    "export": ("keeping", "Write the weights of a run for programs without everstep."),
    "accept": ("proving", "Accept a divergence of a run."),
    "audit": ("looking", "Prove that a run used every sample once in each pass."),
    "du": ("keeping", "Show the sizes of the files of runs, and what can be deleted."),
    "prune": ("keeping", "Delete runs."),
    "import": ("keeping", "Make runs of what TensorBoard, MLflow or W&B has recorded."),
    "adopt": ("adopting", "Put a plain PyTorch script under a TrainLoop, and show the diff."),
    "drill": ("proving", "Test whether a script resumes exactly: kill it at every hazard."),
    "replay": ("proving", "Execute steps of a run again: look at a step, or verify a stretch."),
    "diverge": ("proving", "Find where two runs, or a run and its replay, part."),
    "check": ("proving", "Test whether an object comes back from what it saves."),
    "sql": ("runs", "Ask the index by SQL; nothing can be changed."),
    "sync": ("runs", "Update the index from the journals, or make it."),
}
"""Name -> the module of this package that has it as `NAME_command`, and its help in one line."""


def home_of(command: str) -> str:
    """Return the full name of the module that has a command."""
    return f"everstep.cli.{COMMANDS[command][0]}"


def _only_looks(command: str | None) -> bool:
    """Whether a command only reads run directories, whoever wrote them, and calls no code of a user."""
    home, _ = COMMANDS.get(command or "", ("", ""))
    return command == "config" or home in ("looking", "keeping", "runs")


class _Commands(click.Group):
    """Group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = COMMANDS.get(cmd_name)
        return None if known is None else click.Command(cmd_name, short_help=known[1])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS:
            if not name.startswith("-"):
                raise click.UsageError(f"no command {name!r}; {nearest(name, COMMANDS)}", ctx)
            return super().resolve_command(ctx, args)
        if _only_looks(name):
            # Imports leave little garbage, and looking for it would take a tenth of the time.
            gc.set_threshold(10_000)
        return name, getattr(importlib.import_module(home_of(name)), f"{name}_command"), args[1:]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (EverstepError, ImportError, click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except BrokenPipeError:  # the reader, such as head, has seen enough; click's status would be 1
            if not _only_looks(ctx.invoked_subcommand):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except Exception as error:
            if not _only_looks(ctx.invoked_subcommand):
                raise
            import traceback

            place = traceback.extract_tb(error.__traceback__)[-1]
            location = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            raise RunDirError(
                f"a file of the run is damaged, or not everstep's: {error!r} ({location}); "
                "check the files in the run directory"
            ) from error


@click.command(
    cls=_Commands,
    epilog="Exit status: 0 done, 1 something is wrong or failed, 2 wrong usage.",
    context_settings={"show_default": True},
    invoke_without_command=True,
)
@click.version_option(package_name="everstep", prog_name="everstep")
@click.pass_context
def commands(context: click.Context, /, **_: Any) -> None:
    """Train from config files, look at runs of everstep, and prove that they resume exactly.

    A RUN is a run directory, or the name of a run in the index (the beginning of the name is enough).  The
    index is ./everstep.db or ./runs/everstep.db unless --index or EVERSTEP_INDEX names another.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
