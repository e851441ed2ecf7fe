"""Commands on what runs keep: `checkpoints`, `export`, `du`, `prune`; and `import`."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.cli import common as cli
from everstep.display.cells import in_line, plural
from everstep.durable import require_no_link, write_whole
from everstep.errors import (
    CheckpointError,
    ConfigError,
    EverstepError,
    NoCheckpointError,
    RunDirError,
    RunIndexError,
    nearest,
)
from everstep.index import GONE

if TYPE_CHECKING:
    from everstep.checkpoint import CheckpointName, Store
    from everstep.index.database import Database


def _say_deleted(count: int, noun: str, deleted: bool) -> None:
    action = "deleted" if deleted else "would be deleted; pass --delete to delete"
    cli.say(f"{plural(count, noun)} {action}")


_ACTIONS = ("list", "verify", "pin", "unpin", "prune")
_COLUMNS = ("name", "step", "epoch", "phase", "bytes", "created", "pinned", "next")


@cli.command()
def checkpoints_command(
    run: str = cli.RUN,
    action: str = cli.argument(type=click.Choice(_ACTIONS), default="list"),
    names: tuple[str, ...] = cli.argument(nargs=-1),
    keep_last: int = cli.option(cli.COUNT, "prune: number of newest checkpoints to keep.", default=3),
    delete: bool = cli.flag("prune: delete; without --delete, only list what would be deleted."),
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
) -> None:
    """List, verify, pin or prune the checkpoints of RUN.

    A NAME is the name of a checkpoint, a step, or "latest" for the newest undamaged checkpoint.

    \b
    list            list the checkpoints and the best weights; a start resumes from "next".
    verify          read every byte, of the best weights too; exit status 1 if one is damaged
    pin NAME...     never delete these checkpoints
    unpin NAME...   remove the pin
    prune           list the checkpoints that are not needed; --delete deletes them.  Those that
                    are pinned, damaged or "next" stay.  A run that is running is not pruned.
    """
    from everstep.checkpoint import Store, verify_checkpoint
    from everstep.record import RunDir
    from everstep.views.checkpoint_tables import BEST, asked_for, best_weights, checkpoints_of

    run_dir = cli.find(run, index).path
    RunDir.open(run_dir, create=False)
    store = Store(run_dir, say=lambda text: cli.note([text]))
    chosen = [chosen_name(store, text) for text in names]
    if action in ("pin", "unpin"):
        if not names:
            raise ConfigError(f"{action} needs a NAME: give names that everstep checkpoints RUN lists")
        for name in chosen:
            store.pin(name) if action == "pin" else store.unpin(name)
        chosen = []
    rows = checkpoints_of(run_dir)
    if action == "prune":
        chosen = _prune_checkpoints(store, keep_last, delete)
    if chosen or action == "prune":
        by_name = {row["name"]: row for row in rows}
        rows = [by_name[str(name)] for name in chosen]
    elif action == "verify":
        rows += [{"name": str(path.relative_to(run_dir)), "path": str(path)} for path in store.best_folders()]
    else:
        rows = asked_for(rows)
    if action == "verify":
        for row in rows:
            try:
                verify_checkpoint(Path(row["path"]))
                row |= {"whole": True, "verified": "whole"}
            except CheckpointError as error:
                row |= {"whole": False, "verified": "damaged", "problem": str(error)}
    if as_json:
        cli.print_json(rows)
    else:
        cli.print_table(rows, ("verified", *_COLUMNS) if action == "verify" else _COLUMNS)
        for row in rows:
            if "problem" in row:
                cli.say(in_line(row["problem"]))
        if action == "prune":
            _say_deleted(len(rows), "checkpoint", delete)
        if action == "list" and not names and (best := best_weights(run_dir)):
            cli.say("\nbest weights")
            cli.print_table(best, BEST)
    if action == "verify" and not all(row["whole"] for row in rows):
        sys.exit(1)


def chosen_name(store: Store, text: str) -> CheckpointName:
    try:
        if text == "latest":
            return store.newest()
        return store.at_step(int(text)) if text.isdecimal() else store.parse(text)
    except NoCheckpointError as error:  # the name is wrong, not the disk
        raise ConfigError(str(error)) from None


def _prune_checkpoints(store: Store, keep_last: int, delete: bool) -> list[CheckpointName]:
    """Return the names of the checkpoints that retention does not keep; delete these if `delete`."""
    from everstep.checkpoint import Retention
    from everstep.record import RunLock

    policy = Retention(keep_last)
    require_no_link(store.run_dir / "checkpoints", store.run_dir)
    if not delete:
        return store.expendable(policy)
    holder = store.run_dir / "lock.json"
    dead = holder.read_bytes() if holder.exists() else None
    lock = RunLock(store.run_dir)
    lock.acquire()
    try:
        return store.retain(policy)
    finally:
        lock.release()
        if dead is not None:  # a run that was killed is told from a failed run by this file
            write_whole(holder, dead, "lock.json")


@cli.command()
def export_command(
    run: str = cli.RUN,
    out: Path = cli.option(cli.PATH, "Folder to write; whole or not at all.", required=True),
    best: str | None = cli.option("METRIC", "Best weights by this metric; default: the newest checkpoint."),
    checkpoint: str | None = cli.option("NAME", "Checkpoint with this name, or at this step."),
    entry: str = cli.option(str, "Entry of the run's state, such as ema.", default="model"),
    format: str = cli.option(str, "Or torch.distributed.checkpoint.", default="safetensors"),
    max_shard_size: str | None = cli.option("SIZE", "Largest file, as in 5GB; default: one file."),
    index: str | None = cli.INDEX,
) -> None:
    """Write the weights of RUN into the folder --out, for programs without everstep.

    \b
      everstep export digits --best valid_loss --out digits-weights
      everstep export digits --max-shard-size 5GB --out digits-weights

    model.safetensors has the arrays by the names of the model's state_dict (or shards and an index, as
    Hugging Face writes them); export.json has the run, the step and the metrics.  An earlier export in the
    folder is replaced; a folder with anything else is refused.
    """
    from everstep.checkpoint import Store
    from everstep.services.export import export

    run_dir = cli.find(run, index).path
    store, source = Store(run_dir), run_dir
    if best is not None and checkpoint is not None:
        raise ConfigError("give --best or --checkpoint, not both")
    if checkpoint is not None:
        source = store.path(chosen_name(store, checkpoint))
    elif best is not None:
        if best not in (weights := store.best()):
            raise ConfigError(f"the run has kept no best weights by {best!r}; {nearest(best, weights)}")
        source = weights[best]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = export(source, out, entry=entry, format=format, max_shard_size=max_shard_size)
    cli.note(str(each.message) for each in caught)
    cli.say(f"{out}: {result.arrays} arrays of {entry!r} at step {result.step}, from {result.source}")


_PARTS = ("checkpoints", "journal", "best", "exports")


@cli.command()
def du_command(
    folder: Path | None = cli.argument(required=False, type=cli.FOLDER), as_json: bool = cli.JSON
) -> None:
    """Show the sizes of the files of the runs in FOLDER, the largest run first.

    FOLDER is a folder of runs, or a run; default: that of the index.  A file with several hard links counts
    each time.  `everstep checkpoints RUN prune` deletes the `prunable_bytes`, `everstep prune RUN` all.
    """
    from everstep.checkpoint import Retention, Store
    from everstep.index.location import index_from_here, runs_of
    from everstep.index.shipping import run_dirs

    rows = []
    for run_dir in run_dirs((folder or runs_of(index_from_here())).absolute()):
        parts, prunable = bytes_by_part(run_dir), 0
        row: dict[str, Any] = {"run": str(run_dir), "bytes": parts.total()}
        row |= {f"{part}_bytes": parts.pop(part, 0) for part in _PARTS}
        try:
            store = Store(run_dir)
            prunable = sum(bytes_by_part(store.path(name)).total() for name in store.expendable(Retention()))
        except (EverstepError, OSError) as error:
            cli.note([str(error)])
        rows.append({**row, "other_bytes": parts.total(), "prunable_bytes": prunable})
    rows.sort(key=itemgetter("bytes"), reverse=True)
    if as_json:
        cli.print_json(rows)
    elif rows:
        columns = [*rows[0]]
        total = {name: sum(map(itemgetter(name), rows)) for name in columns[1:]}
        cli.print_table([*rows, {"run": plural(len(rows), "run"), **total}], columns)
    else:
        cli.say("there are no runs")


def bytes_by_part(folder: Path) -> Counter[str]:
    """Return the bytes of all files below a folder, by the folder inside it; "" for those in none."""
    sizes = Counter[str]()
    for place, _, names in os.walk(folder):
        part = "".join(Path(place).relative_to(folder).parts[:1])
        for name in names:
            with suppress(FileNotFoundError):  # a training may have replaced it
                sizes[part] += os.lstat(os.path.join(place, name)).st_size
    return sizes


_PRUNED = ("name", "status", "step", "epoch", "started", "bytes", "path")


@cli.command()
def prune_command(
    chosen: tuple[str, ...] = cli.argument("RUN...|CONDITION...", nargs=-1),
    filter_text: str | None = cli.WHERE,
    delete: bool = cli.flag("Delete; without --delete, only list what would be deleted."),
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
) -> None:
    """Delete RUNs, or the runs that fulfil all CONDITIONS (as in `everstep runs`).

    \b
      everstep prune 'epoch<1'                # list what would be deleted
      everstep prune status=failed --delete

    RUN is a directory or a whole name; the beginning of a name is not enough.  Only run directories are
    deleted, each as a whole.  A run that is running stays.  Exit status 1 if a named RUN stays.
    """
    conditions = [each for each in chosen if re.search("[<>=]", each) and not Path(each).exists()]
    names = [each for each in chosen if each not in conditions]
    if bool(names) == bool(conditions or filter_text):
        raise click.UsageError("give either RUNs, or CONDITIONS such as 'epoch<1' and --where JSON")
    targets: Sequence[tuple[Database, Mapping[str, Any]]]
    if names:
        targets = [(run.database, run.facts) for run in cli.find_all(names, index, exactly=True)]
    else:
        from everstep.cli.runs import search

        columns, runs, _ = search(index, conditions, filter_text)
        targets = [(columns.database, run) for run in runs if run["status"] != GONE]
    rows = [_prune_run(database, run, delete, index) for database, run in targets]
    stay = [row for row in rows if row["stays"]]
    if as_json:
        cli.print_json(rows)
    else:
        cli.note(f"{row['name']} stays: {row['stays']}" for row in stay)
        go = [row for row in rows if not row["stays"]]
        if go:
            cli.print_table(go, _PRUNED)
        _say_deleted(len(go), "run", delete)
    if stay and names:
        sys.exit(1)


def _prune_run(database: Database, run: Mapping[str, Any], delete: bool, index: str | None) -> dict[str, Any]:
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
    row["bytes"] = bytes_by_part(path).total()
    if not delete:
        return row
    try:
        remove(path, run["name"])
    except RunDirError as error:
        return row | {"stays": str(error)}
    # A run given by its directory was read without an index.
    for place in (database, cli.index_with(path, index)):
        try:
            if place is not None:
                forget_gone(place, [path])
        except RunIndexError as error:
            cli.note([f"the index still has {path}: {error}; everstep sync takes the run out"])
    return row | {"deleted": True}


@cli.command()
def import_command(
    format: str = cli.argument(type=click.Choice(["tensorboard", "mlflow", "wandb-offline"])),
    path: Path = cli.argument(type=click.Path(exists=True, path_type=Path)),
    into: Path = cli.option(cli.PATH, "Folder for the run directories.", default="runs"),
    as_json: bool = cli.JSON,
) -> None:
    """Make runs of what TensorBoard, MLflow or W&B has recorded in PATH, to compare them with others.

    PATH is a file, or a folder that is searched with all folders below; nothing there is changed.  An import
    can be repeated: only what is new is added.  Exit status 1 if a run is left out.
    """
    from everstep.formats.histories import FORMATS, bring

    rows, problems = [], []
    for place, read in FORMATS[format](path):
        try:
            history = read()
            run_dir, is_new = bring(history, into)
            values = sum(map(len, history.points.values()))
            rows.append({"run": str(run_dir), "values": values, "new": is_new})
        except ImportError:
            raise
        except Exception as error:  # a file may hold anything, and must not stop the others
            problems.append(f"{place} is left out: {type(error).__name__}: {error}")
    cli.note(problems)
    if not rows and not problems:
        raise ConfigError(f"no run of {format} in {path}; give the folder into which it has recorded")
    cli.print_json(rows) if as_json else cli.print_table(rows, ("run", "values", "new"))
    sys.exit(bool(problems))
