"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


def index_option(function: F) -> F:
    """The option --index of every command that asks the index."""
    option = click.option(
        "--index",
        "index",
        metavar="PATH|URL",
        help="The index: a file, the folder of runs that it lies in, or postgresql://USER@HOST/DATABASE.",
    )
    return option(function)


def json_option(function: F) -> F:
    """The option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def where_option(function: F) -> F:
    """The option --where of the commands that choose runs."""
    option = click.option(
        "--where", "filter_text", metavar="JSON", help="MongoDB's filter language: docs/guide/queries.md."
    )
    return option(function)


def run_argument(function: F) -> F:
    """The argument RUN, which the shell completes."""
    return click.argument("run", shell_complete=complete_run)(function)


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Run directories, and names of runs as the index has them; nothing is brought up to date meanwhile."""
    from everstep.cli.find_run import names_beginning

    names = names_beginning(incomplete, ctx.params.get("index"))
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="dir")]
