"""Commands on what runs keep: `checkpoints`, `export`, `prune`."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.cli.common_options import (
    complete_run,
    index_option,
    json_option,
    run_argument,
    where_option,
)
from everstep.cli.find_run import find, find_all, index_with
from everstep.cli.output import note, print_json, print_table, say
from everstep.display.cells import in_line
from everstep.durable import require_no_link, write_whole
from everstep.errors import (
    CheckpointError,
    ConfigError,
    NoCheckpointError,
    RunDirError,
    RunIndexError,
    nearest,
)
from everstep.index.run_facts import GONE

if TYPE_CHECKING:
    from everstep.checkpoint import CheckpointName
    from everstep.index.database import Database


def _deleted(count: int, what: str, deleted: bool) -> str:
    things = f"{count} {what}{'s' * (count != 1)}"
    return f"{things} deleted" if deleted else f"{things} would be deleted; pass --delete to delete"


# ------------------------------------------------------------------------------------ checkpoints

_ACTIONS = ("list", "verify", "copy", "pin", "unpin", "prune")
_COLUMNS = ("name", "step", "epoch", "phase", "bytes", "created", "pinned", "next")


@click.command("checkpoints")
@run_argument
@click.argument("action", type=click.Choice(_ACTIONS), default="list")
@click.argument("names", nargs=-1)
@click.option(
    "--keep-last", type=click.IntRange(min=1), default=3, help="prune: number of newest checkpoints to keep."
)
@click.option("--keep-best", metavar="METRIC:min|max:N", help="prune: also keep the N best by a metric.")
@click.option("--to", type=click.Path(file_okay=False), help="copy: the folder that takes the copies.")
@click.option(
    "--delete", is_flag=True, help="prune: delete; without --delete, only list what would be deleted."
)
@index_option
@json_option
def checkpoints_command(
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
    verify          read every byte, of the best weights too; exit status 1 if one is damaged
    copy NAME...    copy these checkpoints to FOLDER/NAME (--to FOLDER), each byte verified
    pin NAME...     never delete these checkpoints
    unpin NAME...   remove the pin
    prune           list the checkpoints that are not needed, by the rules of a run; --delete
                    deletes them.  Checkpoints that are pinned, damaged or "next" stay.  A run
                    that is running is not pruned.
    """
    from everstep.record import RunDir
    from everstep.views.checkpoint_tables import BEST, asked_for, best_weights, checkpoints_of, store_of

    run_dir = find(run, index).path
    RunDir.open(run_dir, create=False)
    store, rows = store_of(run_dir), checkpoints_of(run_dir)
    by_name = {row["name"]: row for row in rows}
    if action in ("copy", "pin", "unpin") and (not names or (action == "copy" and to is None)):
        needs = "a NAME and --to FOLDER" if action == "copy" else "a NAME"
        raise ConfigError(f"{action} needs {needs}: give names that everstep checkpoints RUN lists")
    chosen = [chosen_name(run_dir, text) for text in names] if action != "prune" else []
    if action == "copy":
        rows = [by_name[str(name)] | {"path": str(store.copy(name, Path(str(to))))} for name in chosen]
    elif action in ("pin", "unpin"):
        for name in chosen:
            store.pin(name) if action == "pin" else store.unpin(name)
        rows = asked_for(checkpoints_of(run_dir))
    elif action == "prune":
        rows = [by_name[name] for name in _prune_checkpoints(run_dir, keep_last, keep_best, delete)]
    elif names:
        rows = [by_name[str(name)] for name in chosen]
    elif action == "list":
        asked = asked_for(rows)
        note(
            f"a start resumes from {row['name']}, which stands in for the checkpoint at its epoch's end"
            for row in rows[-1:]
            if row not in asked
        )
        rows = asked
    else:
        rows += [
            {"name": str(path.relative_to(run_dir)), "path": str(path), "whole": True}
            for path in store.best_folders()
        ]
    if action == "verify":
        rows = [_verified(row) for row in rows]
    if as_json:
        print_json(rows)
    else:
        print_table(rows, ("verified", *_COLUMNS) if action == "verify" else _COLUMNS)
        for row in rows:
            if "problem" in row:
                say(in_line(row["problem"]))
        if action == "prune":
            say(_deleted(len(rows), "checkpoint", delete))
        if action == "list" and not names and (best := best_weights(run_dir)):
            say("\nbest weights")
            print_table(best, BEST)
    if action == "verify" and not all(row["whole"] for row in rows):
        sys.exit(1)


def chosen_name(run_dir: Path, text: str) -> CheckpointName:
    """Find the checkpoint that a NAME means."""
    from everstep.views.checkpoint_tables import store_of

    store = store_of(run_dir)
    try:
        if text == "latest":
            return store.newest()
        return store.at_step(int(text)) if text.isdecimal() else store.named(text)
    except NoCheckpointError as error:
        raise ConfigError(str(error)) from None


def _verified(row: dict[str, Any]) -> dict[str, Any]:
    from everstep.checkpoint import verify_checkpoint

    try:
        verify_checkpoint(Path(row["path"]))
    except CheckpointError as error:
        return {**row, "whole": False, "verified": "damaged", "problem": str(error)}
    return {**row, "verified": "whole"}


def _prune_checkpoints(run_dir: Path, keep_last: int, keep_best: str | None, delete: bool) -> list[str]:
    """Return the names of the checkpoints that retention does not keep; delete these if `delete`."""
    from everstep.checkpoint import Retention
    from everstep.record import RunLock
    from everstep.views.checkpoint_tables import store_of

    store, best = store_of(run_dir, lambda text: note([text])), None
    if keep_best is not None:
        # a metric without values is refused: a typing error would delete the best
        found = re.fullmatch(r"(.+):(min|max):(\d+)", keep_best)
        if found is None:
            raise ConfigError(f"--keep-best {keep_best!r}: give METRIC:min:N or METRIC:max:N")
        best = found[1], found[2], int(found[3])
        known = {name for facts in store.facts() for name in facts.metrics}
        if best[0] not in known:
            hint = nearest(best[0], known)
            raise ConfigError(f"--keep-best {keep_best!r}: no checkpoint has a value of {best[0]!r}; {hint}")
    policy = Retention(keep_last, None, best)
    require_no_link(run_dir / "checkpoints", run_dir)
    if not delete:
        return list(map(str, store.expendable(policy)))
    holder = run_dir / "lock.json"
    dead = holder.read_bytes() if holder.exists() else None
    lock = RunLock(run_dir)
    lock.acquire()
    try:
        return list(map(str, store.retain(policy)))
    finally:
        lock.release()
        if dead is not None:  # a run that was killed is told from a failed run by this file
            write_whole(holder, dead, "lock.json")


# ----------------------------------------------------------------------------------------- export


@click.command("export")
@run_argument
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder to write; whole or not at all.",
)
@click.option("--best", metavar="METRIC", help="Best weights by this metric; default: the newest checkpoint.")
@click.option("--checkpoint", metavar="NAME", help="Checkpoint with this name, or at this step.")
@click.option("--entry", default="model", help="Entry of the run's state, such as ema.")
@click.option("--format", default="safetensors", help="Or torch.distributed.checkpoint.")
@click.option(
    "--max-shard-size", metavar="SIZE", help="Largest safetensors file, as in 5GB; default: one file."
)
@index_option
def export_command(
    run: str, out: Path, best: str | None, checkpoint: str | None, index: str | None, **options: Any
) -> None:
    """Write the weights of RUN into FOLDER, for programs without everstep.

    \b
      everstep export digits --best valid_loss --out digits-weights
      everstep export digits --max-shard-size 5GB --out digits-weights

    model.safetensors has the arrays by the names of the model's state_dict (or shards and an index, as
    Hugging Face writes them); export.json has the run, the step and the metrics.  If the entry is an
    average of weights, the averaged model is written.  An earlier export in FOLDER is replaced; a folder
    with anything else is refused.
    """
    if best is not None and checkpoint is not None:
        raise ConfigError("give --best or --checkpoint, not both")
    from everstep.services.export import export
    from everstep.views.checkpoint_tables import store_of

    run_dir = find(run, index).path
    store, source = store_of(run_dir), run_dir
    if checkpoint is not None:
        source = store.path(chosen_name(run_dir, checkpoint))
    elif best is not None:
        kept = store.best()
        if best not in kept:
            raise ConfigError(f"the run has kept no best weights by {best!r}; {nearest(best, kept)}")
        source = kept[best]
    elif not store.names():
        raise NoCheckpointError(f"the run in {run_dir} has no checkpoint yet; train it first")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        done = export(source, out, **options)
    note(str(each.message) for each in told)
    say(f"{out}: {done.arrays} arrays of {options['entry']!r} at step {done.step}, from {done.source}")


# ------------------------------------------------------------------------------------------ prune

_PRUNED = ("name", "status", "step", "epoch", "started", "bytes", "path")


@click.command("prune")
@click.argument("chosen", nargs=-1, metavar="RUN...|CONDITION...", shell_complete=complete_run)
@where_option
@click.option("--delete", is_flag=True, help="Delete; without --delete, only list what would be deleted.")
@index_option
@json_option
def prune_command(
    chosen: tuple[str, ...], filter_text: str | None, delete: bool, index: str | None, as_json: bool
) -> None:
    """Delete RUNs, or the runs that fulfil all CONDITIONS (as in `everstep runs`).

    \b
      everstep prune 'epoch<1'                # list what would be deleted
      everstep prune status=failed --delete

    RUN is a directory or a whole name, with or without its six digits; the beginning of a name is not
    enough.

    Only run directories are deleted, each as a whole.  A run that is running stays.  Exit status 1 if a named
    RUN stays.
    """
    conditions = [each for each in chosen if re.search("[<>=]", each) and not Path(each).exists()]
    names = [each for each in chosen if each not in conditions]
    if not names and not conditions and not filter_text:
        raise click.UsageError("give RUNs, CONDITIONS such as 'epoch<1', or --where JSON")
    if names and (conditions or filter_text):
        raise click.UsageError("give RUNs, or CONDITIONS and --where, not both")
    found: Sequence[tuple[Database, Mapping[str, Any]]]
    if names:
        found = [(run.database, run.facts) for run in find_all(names, index, exactly=True)]
    else:
        from everstep.cli.runs import search

        searched = search(index, conditions, filter_text)
        found = [(searched.database, run) for run in searched.runs if run["status"] != GONE]
    rows = [_pruned(database, run, delete, index) for database, run in found]
    stay = [row for row in rows if row["stays"]]
    if as_json:
        print_json(rows)
    else:
        note(f"{row['name']} stays: {row['stays']}" for row in stay)
        go = [row for row in rows if not row["stays"]]
        if go:
            print_table(go, _PRUNED)
        say(_deleted(len(go), "run", delete))
    if stay and names:
        sys.exit(1)


def _pruned(database: Database, run: Mapping[str, Any], delete: bool, index: str | None) -> dict[str, Any]:
    """Delete a run if `delete`; return its row, with the reason if it stays."""
    from everstep.index.shipping import forget_gone, is_here
    from everstep.record import remove, why_stays

    path = Path(run["path"])
    row = {name: run.get(name) for name in _PRUNED} | {"stays": "", "deleted": False}
    if run["status"] == GONE:
        return row | {"stays": "its directory is gone; everstep sync removes it from the index"}
    if not is_here(database, run["host"]):
        return row | {"stays": f"it is on {run['host']}"}
    if stays := "it is running" if run["status"] == "running" else why_stays(path, run["name"]):
        return row | {"stays": stays}
    row["bytes"] = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    if not delete:
        return row
    try:
        remove(path, run["name"])
    except RunDirError as error:
        return row | {"stays": str(error)}
    for place in (database, index_with(path, index)):  # one given by its directory was read without an index
        try:
            if place is not None:
                forget_gone(place, [path])
        except RunIndexError as error:
            note([f"the index still has {path}: {error}; everstep sync takes the run out"])
    return row | {"deleted": True}
