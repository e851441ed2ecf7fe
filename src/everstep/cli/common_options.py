"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


def index_option(function: F) -> F:
    """Add the option --index, for commands that read the index."""
    option = click.option(
        "--index",
        "index",
        metavar="PATH|URL",
        help="Index: a file, a folder of runs that has one, or postgresql://USER@HOST/DATABASE.",
    )
    return option(function)


def json_option(function: F) -> F:
    """Add the option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def where_option(function: F) -> F:
    """Add the option --where, for commands that choose runs."""
    option = click.option(
        "--where",
        "filter_text",
        metavar="JSON",
        help="Filter in MongoDB's language; see docs/guide/queries.md.",
    )
    return option(function)


def run_argument(function: F) -> F:
    """Add the argument RUN, with completion in the shell."""
    return click.argument("run", shell_complete=complete_run)(function)


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a run directory or a name in the index; the index is not updated for a completion."""
    from everstep.cli.find_run import names_beginning

    names = names_beginning(incomplete, ctx.params.get("index"))
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="dir")]
