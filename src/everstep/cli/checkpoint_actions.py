"""What `everstep checkpoints` does with the checkpoints of a run, and the checkpoint that a NAME means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.checkpoint import CheckpointName, Retention, Store, verify_checkpoint
from everstep.cli.output import note
from everstep.durable import require_no_link, write_whole
from everstep.errors import CheckpointError, ConfigError, NoCheckpointError, nearest
from everstep.record import RunDir, RunLock
from everstep.views.checkpoint_tables import asked_for, checkpoints_of, store_of


def act(
    run_dir: Path,
    action: str,
    names: tuple[str, ...],
    *,
    to: str | None,
    keep_last: int,
    keep_best: str | None,
    delete: bool,
) -> list[dict[str, Any]]:
    """Do what the command was asked for; return the checkpoints that it is about, as rows of its table."""
    RunDir.open(run_dir, create=False)
    if action == "copy":
        return _copy(run_dir, names, to)
    if action in ("pin", "unpin"):
        return _pin(run_dir, names, action)
    if action == "prune":
        return _prune(run_dir, Retention(keep_last, None, _best(keep_best, store_of(run_dir))), delete)
    rows = checkpoints_of(run_dir)
    if names:
        known = [row["name"] for row in rows]
        rows = [rows[known.index(str(chosen_name(run_dir, name)))] for name in names]
    elif action == "list":
        rows = _listed(rows)
    if action == "verify":
        rows = [_verified(row) for row in [*rows, *([] if names else _best_folders(run_dir))]]
    return rows


def chosen_name(run_dir: Path, text: str) -> CheckpointName:
    """Find the checkpoint that a NAME means."""
    store = store_of(run_dir)
    try:
        if text == "latest":
            return store.newest()
        return store.at_step(int(text)) if text.isdecimal() else store.named(text)
    except NoCheckpointError as error:
        raise ConfigError(str(error)) from None


def _listed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave interim checkpoints out; print a note if a start resumes from an interim checkpoint."""
    note(
        f"a start resumes from {row['name']}, which stands in for the checkpoint at its epoch's end"
        for row in rows[-1:]
        if row not in asked_for(rows)
    )
    return asked_for(rows)


def _best_folders(run_dir: Path) -> list[dict[str, Any]]:
    """Return the folders of best weights as rows of the table."""
    paths = store_of(run_dir).best_folders()
    return [{"name": str(path.relative_to(run_dir)), "path": str(path), "whole": True} for path in paths]


def _verified(row: dict[str, Any]) -> dict[str, Any]:
    try:
        flaws = verify_checkpoint(Path(row["path"]))
    except CheckpointError as error:
        return {**row, "whole": False, "verified": "damaged", "problem": str(error)}
    found = {**row, "verified": "whole"}
    if flaws:
        how = "; ".join(f"{flaw.how} ({flaw.whole.name} is whole)" for flaw in flaws)
        found["problem"] = f"{how}: the next start makes that copy again"
    return found


def _pin(run_dir: Path, names: tuple[str, ...], action: str) -> list[dict[str, Any]]:
    if not names:
        raise ConfigError(f"{action} needs a NAME: give names that everstep checkpoints RUN lists")
    store = store_of(run_dir)
    for name in [chosen_name(run_dir, text) for text in names]:
        store.pin(name) if action == "pin" else store.unpin(name)
    return asked_for(checkpoints_of(run_dir))


def _copy(run_dir: Path, names: tuple[str, ...], to: str | None) -> list[dict[str, Any]]:
    """Copy checkpoints out of the run; returns their rows, with the paths of the copies."""
    if not names or to is None:
        raise ConfigError("copy needs a NAME and --to FOLDER: give names that everstep checkpoints RUN lists")
    store, known = store_of(run_dir), {row["name"]: row for row in checkpoints_of(run_dir)}
    parsed = [chosen_name(run_dir, text) for text in names]
    return [known[str(name)] | {"path": str(store.copy(name, Path(to)))} for name in parsed]


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
