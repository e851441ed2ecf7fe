"""Options that several commands have, and the signals that end a command in order."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a run directory or a name in the index; the index is not updated for a completion."""
    from everstep.cli.find_run import names_beginning

    names = names_beginning(incomplete, ctx.params.get("index"))
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="dir")]


run_argument = click.argument("run", shell_complete=complete_run)
runs_argument = click.argument("runs", nargs=-1, required=True, shell_complete=complete_run)
overrides_argument = click.argument("overrides", nargs=-1, metavar="[PATH=VALUE...]")
index_option = click.option(
    "--index",
    "index",
    metavar="PATH|URL",
    help="Index: a file, a folder of runs that has one, or postgresql://USER@HOST/DATABASE.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
json_file_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="File for the result, as JSON."
)
keep_option = click.option(
    "--keep", type=click.Path(path_type=Path), help="New folder to keep what is made in."
)
where_option = click.option(
    "--where", "filter_text", metavar="JSON", help="Filter in MongoDB's language; see docs/guide/queries.md."
)
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Import and call the code that the run names, though the run is not marked as yours.",
)
profile_option = click.option("--profile", metavar="NAME", help="Profile of the config to apply.")
weights_option = click.option(
    "--weights",
    metavar="best|best/METRIC|CHECKPOINT",
    help="Weights of the run, or a path; default: the newest checkpoint.",
)


def training_options(function: F) -> F:
    """Add the options of `train`, `resume` and `sweep`."""
    for option in (
        click.option("--schedule", default="train", help="Schedule of the Experiment to run."),
        click.option(
            "--on-change",
            type=click.Choice(["error", "keep", "override", "fork"]),
            default="error",
            help="If this config and that of the run differ in what changes training: error refuses, keep "
            "resumes with the run's config, override resumes with this config, fork continues with this "
            "config in a new run.",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Make all objects, but train nothing and leave no files."
        ),
        click.option("--strict-git", is_flag=True, help="Refuse code that is not committed and pushed."),
        click.option("--skip-check", is_flag=True, help="Do not check git."),
        trust_option,
        index_option,
    ):
        function = option(function)
    return function


# ---------------------------------------------------------------------------------------- signals

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a training to save and to end."""

DIVERGED = 5
"""Exit status of a run that has diverged."""
_STATUS = {0: "finished", 3: "out of time", 4: "requirement not met", DIVERGED: "diverged"}


def leave_in_order() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that it ends what it has started."""

    def leave(number: int, frame: object) -> None:
        for other in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, leave)


def in_words(status: int) -> str:
    """Say how a training ended, from its exit status; -N is signal N, and so is 128 + N, as in shells."""
    with suppress(ValueError):  # the status is not a signal's
        number = signal.Signals(-status if status < 0 else status - 128)
        asked = status > 0 and number in ASKING
        return f"{'stopped' if asked else 'killed'} by {number.name}"
    return _STATUS.get(status, "failed")
