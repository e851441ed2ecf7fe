"""`everstep checkpoints`"""

from __future__ import annotations

import sys
from typing import Any

import click

from everstep.cli.common_options import index_option, json_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import print_json, print_table, say
from everstep.display.cells import in_line

_ACTIONS = ("list", "verify", "copy", "pin", "unpin", "prune")
_COLUMNS = ("name", "step", "epoch", "phase", "bytes", "shared", "created", "pinned", "next")


@click.command("checkpoints")
@run_argument
@click.argument("action", type=click.Choice(_ACTIONS), default="list")
@click.argument("names", nargs=-1)
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="prune: number of newest checkpoints to keep.",
)
@click.option("--keep-best", metavar="METRIC:min|max:N", help="prune: also keep the N best by a metric.")
@click.option("--to", type=click.Path(file_okay=False), help="copy: the folder that takes the copies.")
@click.option(
    "--delete", is_flag=True, help="prune: delete; without --delete, only list what would be deleted."
)
@index_option
@json_option
def command(
    run: str,
    action: str,
    names: tuple[str, ...],
    keep_last: int,
    keep_best: str | None,
    to: str | None,
    delete: bool,
    index: str | None,
    as_json: bool,
) -> None:
    """List, verify, copy, pin or prune the checkpoints of RUN.

    A NAME is the name of a checkpoint, a step, or "latest" for the newest undamaged checkpoint.

    \b
    list            list the checkpoints and the best weights; a start resumes from "next".
                    "bytes" are in the checkpoint's folder; "shared", in files that several
                    checkpoints have in common
    verify          read every byte, of the best weights too; exit status 1 if one is damaged
    copy NAME...    copy these checkpoints to FOLDER/NAME (--to FOLDER), with what they share with
                    others, so that each folder is complete in itself
    pin NAME...     never delete these checkpoints
    unpin NAME...   remove the pin
    prune           list the checkpoints that are not needed, by the rules of a run; --delete
                    deletes them.  Checkpoints that are pinned, damaged or "next" stay.  A run
                    that is running is not pruned.
    """
    from everstep.cli.checkpoint_actions import act
    from everstep.views.checkpoint_tables import BEST, best_weights

    run_dir = find(run, index).path
    rows = act(run_dir, action, names, to=to, keep_last=keep_last, keep_best=keep_best, delete=delete)
    if as_json:
        print_json(rows)
    else:
        print_table(rows, ("verified", *_COLUMNS) if action == "verify" else _COLUMNS)
        for row in rows:
            if "problem" in row:
                say(in_line(row["problem"]))
        if action == "prune":
            _say_pruned(rows, delete)
        if action == "list" and not names and (best := best_weights(run_dir)):
            say("\nbest weights")
            print_table(best, BEST)
    if action == "verify" and not all(row["whole"] for row in rows):
        sys.exit(1)


def _say_pruned(rows: list[dict[str, Any]], deleted: bool) -> None:
    count = f"{len(rows)} checkpoint{'s' * (len(rows) != 1)}"
    say(f"{count} deleted" if deleted else f"{count} would be deleted; pass --delete to delete")
