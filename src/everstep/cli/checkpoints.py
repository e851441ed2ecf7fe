"""`everstep checkpoints`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from everstep.checkpoint import CheckpointName, Retention, Store, verify_checkpoint
from everstep.cli.checkpoint_tables import BEST, asked_for, best_weights, checkpoints_of, store_of
from everstep.cli.common_options import index_option, json_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import in_line, note, print_json, print_table, say
from everstep.durable import require_no_link, write_whole
from everstep.errors import CheckpointError, ConfigError, NoCheckpointError, nearest
from everstep.record import RunDir, RunLock

_COLUMNS = ("name", "step", "epoch", "phase", "bytes", "created", "pinned", "next")


@click.command("checkpoints")
@run_argument
@click.argument("action", type=click.Choice(["list", "verify", "pin", "unpin", "prune"]), default="list")
@click.argument("names", nargs=-1)
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="prune: number of newest checkpoints to keep.",
)
@click.option("--keep-best", metavar="METRIC:min|max:N", help="prune: also keep the N best by a metric.")
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
    delete: bool,
    index: str | None,
    as_json: bool,
) -> None:
    """List, verify, pin or prune the checkpoints of RUN.

    A NAME is the name of a checkpoint, a step, or "latest" for the newest undamaged checkpoint.

    \b
    list            list the checkpoints and the best weights; a start resumes from "next"
    verify          read every byte, of the best weights too; exit status 1 if one is damaged
    pin NAME...     never delete these checkpoints
    unpin NAME...   remove the pin
    prune           list the checkpoints that are not needed, by the rules of a run; --delete
                    deletes them.  Checkpoints that are pinned, damaged or "next" stay.  A run
                    that is running is not pruned.
    """
    run_dir = find(run, index).path
    RunDir.open(run_dir, create=False)
    if action in ("pin", "unpin"):
        rows = _pin(run_dir, names, action)
    elif action == "prune":
        rows = _prune(run_dir, Retention(keep_last, None, _best(keep_best, store_of(run_dir))), delete)
    else:
        rows = checkpoints_of(run_dir)
        if names:
            known = [row["name"] for row in rows]
            rows = [rows[known.index(str(_parse(run_dir, name)))] for name in names]
        elif action == "list":
            rows = _listed(rows)
        if action == "verify":
            rows = [_verified(row) for row in [*rows, *([] if names else _best_folders(run_dir))]]
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


def _listed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave interim checkpoints out; print a note if a start resumes from an interim checkpoint."""
    note(
        f"a start resumes from {row['name']}, which stands in for the checkpoint at its epoch's end"
        for row in rows[-1:]
        if row not in asked_for(rows)
    )
    return asked_for(rows)


def _parse(run_dir: Path, text: str) -> CheckpointName:
    """Find the checkpoint that a NAME means."""
    store = store_of(run_dir)
    try:
        if text == "latest":
            return store.newest()
        return store.at_step(int(text)) if text.isdecimal() else store.named(text)
    except NoCheckpointError as error:
        raise ConfigError(str(error)) from None


def _best_folders(run_dir: Path) -> list[dict[str, Any]]:
    """Return the folders of best weights as rows of the table."""
    paths = store_of(run_dir).best_folders()
    return [{"name": str(path.relative_to(run_dir)), "path": str(path), "whole": True} for path in paths]


def _verified(row: dict[str, Any]) -> dict[str, Any]:
    try:
        verify_checkpoint(Path(row["path"]))
    except CheckpointError as error:
        return {**row, "whole": False, "verified": "damaged", "problem": str(error)}
    return {**row, "verified": "whole"}


def _pin(run_dir: Path, names: tuple[str, ...], action: str) -> list[dict[str, Any]]:
    if not names:
        raise ConfigError(f"{action} needs a NAME: give names that everstep checkpoints RUN lists")
    store = store_of(run_dir)
    for name in [_parse(run_dir, text) for text in names]:
        store.pin(name) if action == "pin" else store.unpin(name)
    return asked_for(checkpoints_of(run_dir))


def _prune(run_dir: Path, policy: Retention, delete: bool) -> list[dict[str, Any]]:
    """Return the rows of the checkpoints that retention does not keep; delete these if `delete`."""
    before = {row["name"]: row for row in checkpoints_of(run_dir)}
    store = store_of(run_dir, lambda text: note([text]))
    require_no_link(run_dir / "checkpoints", run_dir)
    if not delete:
        return [before[str(name)] for name in store.expendable(policy)]
    holder = run_dir / "lock.json"
    dead = holder.read_bytes() if holder.exists() else None
    lock = RunLock(run_dir)
    lock.acquire()
    try:
        return [before[str(name)] for name in store.retain(policy)]
    finally:
        lock.release()
        if dead is not None:  # a run that was killed is told from a failed run by this file
            write_whole(holder, dead, "lock.json")


def _best(text: str | None, store: Store) -> tuple[str, str, int] | None:
    """Parse --keep-best; refuse a metric without values, since a typing error would delete the best."""
    if text is None:
        return None
    parts = text.rsplit(":", 2)
    if len(parts) != 3 or parts[1] not in ("min", "max") or not parts[2].isdecimal():
        raise ConfigError(f"--keep-best {text!r}: give METRIC:min:N or METRIC:max:N")
    known = {name for facts in store.facts() for name in facts.metrics}
    if parts[0] not in known:
        raise ConfigError(
            f"--keep-best {text!r}: no checkpoint has a value of {parts[0]!r}; {nearest(parts[0], known)}"
        )
    return parts[0], parts[1], int(parts[2])


def _say_pruned(rows: list[dict[str, Any]], deleted: bool) -> None:
    count = f"{len(rows)} checkpoint{'s' * (len(rows) != 1)}"
    say(f"{count} deleted" if deleted else f"{count} would be deleted; pass --delete to delete")
