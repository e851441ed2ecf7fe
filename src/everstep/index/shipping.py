"""Shipping of journals into the index: each row once, by any number of processes, any number of times."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, delete, insert, select, update

from everstep.durable import TMP
from everstep.errors import EverstepError, RunDirError, RunIndexError
from everstep.index.database import Database
from everstep.index.readers import confine, id_at, is_run, is_strangers, refusal, stored_seed
from everstep.index.run_facts import RefusedError
from everstep.index.run_queries import clean, lost_parent, newest_facts, short
from everstep.index.sql_tables import (
    blocks,
    checkpoints,
    events,
    facts,
    metrics,
    runs,
    segments,
    series,
    stored,
)
from everstep.labels import NAMES as LABELS
from everstep.labels import has_labels, labels

if TYPE_CHECKING:
    from everstep.record import Event, RunDir
    from everstep.record.segment_file import StoredBlock

ALIVE_SECONDS = 120.0
"""Seconds after its last sign of life for which a run still counts as running, if no lock decides that."""

_SEGMENT = re.compile(r"segment-(?!0000)([0-9]{4}|[1-9][0-9]{4,8})\.evj")
"""File name of a segment; `everstep.record.segment_file`, which makes the names, would import NumPy."""

_MOST_PROBLEMS = 3
"""Most problems of a run that are listed."""

_FOREVER = 1 << 62
_BATCH = 50_000


@dataclass
class Shipped:
    """Result of shipping.

    Attributes:
        runs: number of runs that were looked at.
        rows: number of metric rows that are new in the index.
        problems: descriptions of torn, damaged and conflicting runs.
    """

    runs: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)


def sync(
    database: Database,
    folders: Iterable[Path],
    *,
    named: bool = True,
    only: Collection[Path] | None = None,
) -> Shipped:
    """Ship every run in some folders: run directories, or folders that hold run directories.

    Runs elsewhere that the index has, and whose status is running, are looked at, too: they may have been
    killed.  A damaged run is listed as a problem, and does not stop the others.

    Args:
        named: whether a person has named the folders.  Otherwise nothing is shipped to readers who may not
            read the run (`refusal`).
        only: the run directories to look at; None for all.
    """
    folders, known = [folder.absolute() for folder in folders], _known(database)
    if only is None:
        running = (row for row in known.values() if row["status"] == "running")
        elsewhere = (Path(row["path"]) for row in running if is_here(database, row["host"]))
        only = dict.fromkeys([*(run for folder in folders for run in run_dirs(folder)), *elsewhere])
    total = Shipped(runs=len(only))
    changed = [path for path in only if is_run(path) and not _unchanged(path, known)]
    origins = {row["name"]: (row["created"], row["seed"]) for row in known.values()}
    for path in sorted(changed, key=is_strangers):  # of two copies one's own counts
        inside = any(folder in (path, *path.parents) for folder in folders)
        why = refusal(database, origins, path, inside=inside, named=named)
        try:
            shipped = Shipped(problems=[why] if why else []) if why is not None else ship(database, path)
        except RefusedError as error:
            total.problems.append(f"{path} is not in the index: {error}")
        except RunIndexError:
            raise
        except (EverstepError, OSError) as error:
            total.problems.append(str(error))
        except Exception as error:  # a run directory may hold anything, and must not stop the others
            total.problems.append(f"{path} is not in the index: its journal holds unknown data ({error!r})")
        else:
            total.rows += shipped.rows
            total.problems += shipped.problems
    return total


def forget_gone(database: Database, folders: Iterable[Path]) -> dict[str, str]:
    """Forget the runs below some folders whose directories do not exist any more; returns name -> path.

    Call this after `sync` of the folders, which finds runs that moved inside them.
    """
    if not database.exists():
        return {}
    above = [folder.absolute() for folder in folders]
    with database.read() as connection:
        rows = connection.execute(select(runs)).mappings().all()
    below = [row for row in rows if any(Path(row["path"]).is_relative_to(folder) for folder in above)]
    gone = [row for row in below if is_gone(database, row)]
    for row in gone:
        with database.write(row["name"]) as connection:
            _forget(connection, row["id"])
            connection.execute(delete(runs).where(runs.c.id == row["id"]))
    return {row["name"]: row["path"] for row in gone}


def run_dirs(folder: Path) -> list[Path]:
    """Return a folder itself if it is a run directory, and the run directories in it, by name."""
    itself = [folder] if is_run(folder) else []
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(TMP)]  # those are being made
            return [*itself, *map(Path, sorted(e.path for e in found if e.is_dir() and is_run(e.path)))]
    except OSError as error:
        raise RunDirError(
            error.errno, f"cannot look for runs: {error.strerror}; check the path", str(folder)
        ) from error


def is_here(database: Database, host: str | None) -> bool:
    """Whether a run whose newest start was on `host` counts as a run of this machine."""
    return not database.shared or host in (None, platform.node())


def is_gone(database: Database, run: Any) -> bool:
    """Whether a run's directory does not exist any more, or has another run.

    The directory of another machine's run counts as existing, and so does a damaged one.  `run` is a mapping
    with the keys name, host and path.
    """
    if not is_here(database, run["host"]):
        return False
    there = id_at(run["path"])
    return not is_run(run["path"]) if there is None else there != run["name"]


def gone_runs(database: Database, connection: Connection) -> set[int]:
    """Return the keys of the runs whose directories do not exist any more."""
    rows = connection.execute(select(runs)).mappings().all()
    paths = Counter(row["path"] for row in rows)  # several: one was made anew in the place of another
    return {
        int(row["id"])
        for row in rows
        if is_here(database, row["host"])
        and (is_gone(database, row) if paths[row["path"]] > 1 else not is_run(row["path"]))
    }


def _known(database: Database) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (path, name) -> row of a run, with the sizes of its journal's files, and its labels."""
    if not database.exists():
        return {}
    with database.read() as connection:
        known = newest_facts(connection, names=LABELS)
        rows = {row["id"]: dict(row) for row in connection.execute(select(runs)).mappings()}
        for row in rows.values():
            row |= {"sizes": {}, "labels": known.get(row["id"], {})}
        sizes = select(segments.c.run, segments.c.number, segments.c.size)
        for run, number, size in connection.execute(sizes):
            rows[run]["sizes"][number] = size
    return {(row["path"], row["name"]): row for row in rows.values()}


def _unchanged(run_dir: Path, known: dict[tuple[str, str], dict[str, Any]]) -> bool:
    """Whether the index has a run as it is."""
    row = known.get((str(run_dir), str(id_at(run_dir))))
    if row is None or (row["status"] == "running" and not _is_held(run_dir)):
        return False
    try:
        same = bool(row["sizes"] == journal_sizes(run_dir))
    except RunDirError:
        return False  # shipping reports the fault
    return same and (not has_labels(run_dir) or row["labels"] == labels(run_dir).told())


def journal_sizes(run_dir: Path) -> dict[int, int]:
    """Return segment number -> bytes of its file."""
    try:
        with os.scandir(run_dir / "journal") as entries:
            return {
                int(entry.name[8:-4]): _size(entry) for entry in entries if _SEGMENT.fullmatch(entry.name)
            }
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(error, run_dir / "journal") from error


def _size(entry: os.DirEntry[str]) -> int:
    if not entry.is_file(follow_symlinks=False):  # a link may lead to a run of somebody else
        raise OSError(errno.EINVAL, f"{entry.name} is not a regular file")
    return entry.stat().st_size


def _unreadable(error: OSError, path: Path) -> RunDirError:
    what = f"the journal cannot be read: {error.strerror}; check the disk"
    return RunDirError(error.errno, what, str(path))


def ship(database: Database, run_dir: Path, *, alive: bool = False) -> Shipped:
    """Ship the part of a run's journal that the index lacks.

    Any number of processes may do so at once: the place up to which a file was shipped is read and
    written in the same transaction as its rows.

    Args:
        run_dir: the run directory.
        alive: whether the caller is the process that trains the run.
    """
    from everstep.record import RunDir

    run = RunDir.open(run_dir, create=False)
    if (journal := run.path / "journal").is_symlink():
        raise RunDirError(
            f"{journal} is a link, to {os.readlink(journal)}: no part of a run is read through a link; put "
            "the folder itself there (the run directory as a whole may be a link)"
        )
    if (name := clean(str(run.path))) != str(run.path):
        raise RunDirError(
            f"{name} is not indexed: its name is not UTF-8; change the name and run everstep sync"
        )
    shipped = Shipped(runs=1)
    with database.write(run.id) as connection:
        confine(database, run.path)  # before the rows: the file may be new, and readable by everybody
        # Before the journal is read, and after: a start that ends meanwhile, or begins, is not dead.
        held = alive or _is_held(run.path)
        row, before = _enter(connection, run)
        sizes, known = journal_sizes(run.path), {number: start["size"] for number, start in before.items()}
        whole = all(sizes.get(number, -1) >= size for number, size in known.items())
        if copied := _copied_from(database, connection, run, row, whole and sizes != known):
            shipped.problems.append(copied)
            return shipped
        if not whole:  # the journal has lost bytes or was replaced, and it is the truth
            _forget(connection, row["id"])
            before = {}
        starts = {number: dict(start) for number, start in before.items()}
        for number, size in sorted(sizes.items()):
            if number not in starts or size != starts[number]["size"]:
                starts[number], rows = _read_on(connection, row["id"], run, number, starts.get(number))
                shipped.rows += rows
        _link(starts)
        status = _conclude(connection, row, run.path, dict(sorted(starts.items())), alive, held)
        for number, start in starts.items():
            if start != before.get(number):
                mine = (segments.c.run == row["id"]) & (segments.c.number == number)
                connection.execute(delete(segments).where(mine))
                connection.execute(insert(segments).values(**start))
    shipped.problems += _problems(run, starts, status)
    return shipped


def _enter(connection: Connection, run: RunDir) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the run's row, made if needed, and those of its segments by number."""
    mine = select(runs).where(runs.c.name == run.id)
    if connection.execute(mine).first() is None:
        known = {"name": run.id, "path": str(run.path), "created": run.facts["created"]}
        known |= {"seed": stored_seed(run.facts["seed"]), "status": "running", "step": 0, "epoch": 0}
        connection.execute(insert(runs).values(**known))
    row = dict(connection.execute(mine).mappings().one())
    found = connection.execute(select(segments).where(segments.c.run == row["id"])).mappings()
    return row, {start["number"]: dict(start) for start in found}


def _copied_from(
    database: Database, connection: Connection, run: RunDir, row: dict[str, Any], went_on: bool
) -> str:
    """Note where a run is now; or say of which directory this one is a copy.

    Args:
        went_on: whether the journal here has all that the index has, and more.
    """
    here = is_here(database, row["host"])
    if str(run.path) == row["path"] or _same_place(run.path, row["path"]):
        return ""
    if id_at(row["path"]) == run.id if here else not went_on:
        where = row["path"] if here else f"{row['host']}:{row['path']}"
        return (
            f"{run.path} is a copy of {where}, the same run {run.id}, and is not indexed beside it; "
            "move one of them elsewhere"
        )
    connection.execute(update(runs).where(runs.c.id == row["id"]).values(path=str(run.path)))
    return ""


def _same_place(one: Path, other: str) -> bool:
    """Whether two paths, perhaps through links, lead to the same directory."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _forget(connection: Connection, run: int) -> None:
    mine = select(series.c.id).where(series.c.run == run)
    for table in (metrics, blocks):
        connection.execute(delete(table).where(table.c.series.in_(mine)))
    for table in (series, facts, checkpoints, events, segments):
        connection.execute(delete(table).where(table.c.run == run))
    connection.execute(update(runs).where(runs.c.id == run).values(started=None))


# ----------------------------------------------------------------------------------- one segment


def _read_on(
    connection: Connection, run: int, home: RunDir, number: int, before: dict[str, Any] | None
) -> tuple[dict[str, Any], int]:
    """Ship a file of the journal from where it was shipped; return its row, and the number of new values."""
    from everstep.record import read_segment
    from everstep.record.segment_file import segment_path

    path = segment_path(home.path, number)
    start = before or _NEW | {"run": run, "number": number}
    try:
        found = read_segment(path, start["size"], home.id)
    except OSError as error:
        raise _unreadable(error, path) from error
    problems = [text for text in found.problems if not start["size"] or "the header" not in text]
    start["torn"] = found.torn or None
    start["problems"] = json.dumps(stored(start["problems"], list) + problems)
    start["size"], start["begun"] = found.size, max(int(found.started), start["begun"])
    start["end"] = max(start["end"], found.end)
    if found.parent is not None:
        start["parent"], start["parent_offset"] = found.parent
    times = [event.time for event in found.events] + [block.time for block in found.blocks]
    start["last"] = max([start["last"] or 0.0, *times]) or None
    for event in found.events:
        _note(start, event)
    kept = [event for event in found.events if event.kind not in ("segment", "progress")]  # `start` has them
    columns = ((e.segment, e.offset, _text(e.kind), e.time, int(e.wall), json.dumps(e.data)) for e in kept)
    _insert(connection, events, [(run, *column) for column in columns])
    saves = (event for event in kept if event.kind == "checkpoint")
    places = ((e.segment, e.offset, e.data["name"], e.data["bytes"], e.time, e.completed[0]) for e in saves)
    _insert(connection, checkpoints, [(run, *place) for place in places])
    return start, _ship_blocks(connection, run, start, found.blocks)


_NEW: dict[str, Any] = {
    **dict.fromkeys(("parent", "parent_offset", "started", "last", "status", "reason", "torn")),
    **dict.fromkeys(("size", "end", "begun", "valid_to", "step", "epoch"), 0),
    "facts": "{}",
    "problems": "[]",
}
"""Row of a segment of which nothing is shipped."""


def _note(start: dict[str, Any], event: Event) -> None:
    """Update a segment's row from an event."""
    from everstep.record import ACCEPTED

    step, epoch = event.completed
    start["step"], start["epoch"] = max(start["step"], step), max(start["epoch"], epoch)
    if event.kind == "segment":
        start["started"], start["facts"] = event.time, json.dumps(event.data.get("facts", {}))
    elif event.kind == "decision" and event.data.get("what") == ACCEPTED:
        start["status"], start["started"] = "accepted", event.time
        start["reason"] = f"the divergence at step {event.data['step']}"
    elif event.kind in _ENDS:
        start["status"] = _ENDS[event.kind] or event.data["status"]
        start["reason"] = _text(event.data.get("reason"))


_ENDS = {"ended": "finished", "interrupted": "stopped", "closed": ""}
"""Event at a start's end -> the status that it means; "" where its data has the status."""


def _ship_blocks(connection: Connection, run: int, start: dict[str, Any], new: list[StoredBlock]) -> int:
    known = connection.execute(select(series.c.id, series.c.name, series.c.phase).where(series.c.run == run))
    ids = {(name, phase): key for key, name, phase in known}
    number, count = start["number"], 0
    batch: list[tuple[Any, ...]] = []
    packed: list[tuple[Any, ...]] = []
    for found in new:
        block = found.block
        key = (short(block.name), short(block.phase))
        if key not in ids:
            made = connection.execute(insert(series).values(run=run, name=key[0], phase=key[1]))
            assert made.inserted_primary_key is not None
            ids[key] = int(made.inserted_primary_key[0])
        start["step"] = max(start["step"], *block.steps)
        start["epoch"] = max(start["epoch"], block.epoch)
        count += len(block.steps)
        batch += zip(
            *(repeat(ids[key]), repeat(number), repeat(found.offset), range(len(block.steps))),
            *(repeat(block.epoch), block.steps, block.seqs, block.counts),
            [None if value != value else value + 0.0 for value in block.values],  # -0.0: SQLite has none
            repeat(int(block.wall)),
            strict=False,
        )
        packed.append((ids[key], number, found.offset, bytes(found.payload)))
        if len(batch) >= _BATCH:
            _insert(connection, metrics, batch)
            batch.clear()
    _insert(connection, metrics, batch)
    _insert(connection, blocks, packed)
    return count


def _insert(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows whose values are in the order of the table's columns."""
    if rows:  # as the driver takes them: SQLAlchemy would make a dictionary of each
        connection.exec_driver_sql(str(insert(table).compile(connection)), rows)


def _text(text: Any) -> str | None:
    return None if text is None else clean(str(text))


# ------------------------------------------------------------------------------------- the run


def _link(starts: dict[int, dict[str, Any]]) -> None:
    """Note up to where each segment is valid."""
    from everstep.record import Position
    from everstep.record.journal_reader import chain_to

    parents = {
        number: None if start["parent"] is None else Position(start["parent"], start["parent_offset"])
        for number, start in starts.items()
    }
    newest = max((number for number, start in starts.items() if start["begun"]), default=0)
    valid = chain_to(parents, Position(newest, _FOREVER))
    for number, start in starts.items():
        start["valid_to"] = valid.get(number, 0)


def _is_held(run_dir: Path) -> bool:
    """Whether a process holds the run; False on a file system without locks: the heartbeat decides."""
    from everstep.record import is_held

    try:
        return is_held(run_dir)
    except OSError:
        return False


def _conclude(
    connection: Connection,
    row: dict[str, Any],
    run_dir: Path,
    starts: dict[int, dict[str, Any]],
    alive: bool,
    held: bool,
) -> str:
    """Update the run's row, and the facts of its newest start with its labels; return its status."""
    begun = [start for start in starts.values() if start["begun"]]
    newest = begun[-1] if begun else dict(_NEW)
    seen = [start["last"] for start in begun if start["last"] is not None]
    beat = time.time() if alive else max([row["heartbeat"] or 0.0, *seen]) or None
    recorded = stored(newest["facts"])
    known = {name: value for name, value in recorded.items() if name not in LABELS} | labels(run_dir).told()
    status = newest["status"]
    if status is None:
        alive = held or _is_held(run_dir)
        status = "running" if alive else _status_of_silent(run_dir, beat, recorded.get("lock", True))
    values = {
        "status": status,
        "reason": newest["reason"],
        "started": newest["started"],
        "heartbeat": beat,
        "step": newest["step"],
        "diverged": _diverged(connection, row["id"], starts),
        "epoch": next((start["epoch"] for start in reversed(begun) if start["epoch"]), 0),
        "host": _text(recorded.get("host")),
    }
    if newest["started"] != row["started"] or known != recorded:
        newest["facts"] = json.dumps(known)
        connection.execute(delete(facts).where(facts.c.run == row["id"]))
        named = [(clean(name), row["id"], json.dumps(value)) for name, value in known.items()]
        _insert(connection, facts, named)
    if any(row[name] != value for name, value in values.items()):  # or the file would change at each look
        connection.execute(update(runs).where(runs.c.id == row["id"]).values(**values))
    return str(status)


def _diverged(connection: Connection, run: int, starts: dict[int, dict[str, Any]]) -> int | None:
    """Return the first step of a divergence that nobody has accepted; None if there is none."""
    from everstep.record import ACCEPTED, DIVERGED
    from everstep.record.journal_reader import is_accepted

    chosen = select(events).where(events.c.run == run, events.c.kind.in_((DIVERGED, "decision")))
    found = [(row, stored(row.data)) for row in connection.execute(chosen)]
    accepted = [(row.segment, data["step"]) for row, data in found if data.get("what") == ACCEPTED]
    steps = (
        int(data["step"])
        for row, data in found
        if row.kind == DIVERGED and row.offset < starts[row.segment]["valid_to"]
        if not is_accepted(row.segment, int(data["step"]), accepted)
    )
    return min(steps, default=None)


def _status_of_silent(run_dir: Path, heartbeat: float | None, locked: bool) -> str:
    """Return the status of a start that nobody holds and that did not record its end.

    That is killed, or failed before it could record anything; without a lock perhaps running.

    Args:
        locked: whether the start took the lock; the lock's files may be those of an earlier start.
    """
    recent = heartbeat is not None and time.time() - heartbeat < ALIVE_SECONDS
    if not (locked and (run_dir / "lock").exists()):
        return "running" if recent else "killed"
    return "killed" if (run_dir / "lock.json").exists() else "failed"


def _problems(run: RunDir, starts: dict[int, dict[str, Any]], status: str) -> list[str]:
    found = []
    for number, start in sorted(starts.items()):
        found += stored(start["problems"], list) + lost_parent(number, start["parent"], starts)
        if start["torn"] is not None and status != "running":  # a running start is still writing there
            found.append(start["torn"])
    if len(found) > _MOST_PROBLEMS:
        more = len(found) - _MOST_PROBLEMS
        found[_MOST_PROBLEMS:] = [f"{more} more problems; everstep show {run.path} lists them"]
    return [f"{run.id}: {problem}" for problem in found]
