"""Shipping of journals into the index: each row once, by any number of processes, any number of times."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, CursorResult, Table, delete, insert, select, update

from everstep.durable import TMP
from everstep.errors import EverstepError, RunDirError, RunIndexError
from everstep.index.database import Database
from everstep.index.index_errors import RefusedError
from everstep.index.readers import confine, id_at, is_run, refusal, stored_seed
from everstep.index.run_queries import clean, labels_of, lost_parent, short
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
from everstep.redaction import without_credentials

if TYPE_CHECKING:
    from everstep.record import RunDir

ALIVE_SECONDS = 120.0
"""Seconds after its last sign of life for which a run still counts as running, if no lock decides that."""

_BEAT_SECONDS = 30
"""Seconds after which a run that counts as running is looked at though its journal is silent."""

_SEGMENT = re.compile(r"segment-(?!0000)([0-9]{4}|[1-9][0-9]{4,8})\.evj")
"""File name of a segment; `everstep.record.segment_file`, which makes the names, would import NumPy."""

_MOST_PROBLEMS = 3
"""Most problems of a run that are listed."""

EVALUATIONS = "evaluations"
"""Folder of a run directory with the evaluations outside the loop, which is a run directory itself."""

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


def sync(database: Database, folders: Iterable[Path], *, named: bool = True) -> Shipped:
    """Ship every run in some folders: run directories, or folders that hold run directories.

    Runs elsewhere that the index has, and whose status is running, are looked at, too: they may have been
    killed.  A damaged run is listed as a problem, and does not stop the others.

    Args:
        named: whether a person has named the folders.  Otherwise nothing is shipped to readers who may not
            read the run (`refusal`).

    Raises:
        RunDirError: a folder cannot be read.
        RunIndexError: the index cannot be used.
    """
    return Journals(folders, named=named).ship(database)


class Journals:
    """Journals of the runs in some folders, shipped by each call as far as they have changed since the last.

    Args:
        folders, named: as of `sync`.
    """

    def __init__(self, folders: Iterable[Path], *, named: bool) -> None:
        self._folders, self._named = [folder.absolute() for folder in folders], named
        self._marks: dict[Path, object] = {}
        """Run directory -> what differed after the changes of it that were shipped."""
        self._newest: dict[str, tuple[int, str]] = {}
        """Journal's folder -> the time at which it changed last, and its newest file."""
        self._running: set[Path] = set()

    def ship(self, database: Database, only: Collection[Path] | None = None) -> Shipped:
        """Ship what has changed.

        Args:
            only: the run directories to look at; None for all.
        """
        asked = only or [part for each in self._folders for run in run_dirs(each) for part in parts_of(run)]
        if not self._marks:
            self._running = _running(database)
        looked = [*asked, *(path for path in self._running if only is None)]
        # Before the index is read: what changes after that is then seen as a change.
        marks = {path: self._mark(path) for path in looked}
        changed = [
            path for path, mark in marks.items() if self._marks.get(path, ...) != mark and is_run(path)
        ]
        total = Shipped(runs=len(marks))
        known = _known(database) if changed else {}
        changed = [path for path in changed if path in self._marks or not _unchanged(path, known)]
        changed.sort(key=lambda path: os.stat(path).st_uid != os.geteuid())  # of two copies one's own counts
        origins = {row["name"]: (row["created"], row["seed"]) for row in known.values()}
        with database.kept_open() if changed else nullcontext():
            for path in changed:
                inside = any(folder in (path, *path.parents) for folder in self._folders)
                why = refusal(database, origins, path, inside=inside, named=self._named)
                if why is None:
                    _ship_noting(total, database, path)
                elif why:
                    total.problems.append(why)
        if changed:
            self._running = _running(database)
        self._marks |= marks  # after the shipping: where this fails, the next call tries again
        return total

    def _mark(self, path: Path) -> object:
        """Return what differs after a change of a run directory; None if there is none."""
        try:
            changed = os.stat(path).st_mtime_ns  # by a label, too
            if path in self._running:
                beat = int(time.time()) // _BEAT_SECONDS
                return changed, beat, sorted(journal_sizes(path).items()), _is_held(path)
            at = os.stat(path / "journal").st_mtime_ns
            if self._newest.get(str(path), (0, ""))[0] != at:
                newest = max(journal_sizes(path), default=0)
                self._newest[str(path)] = at, f"{path}/journal/segment-{newest:04d}.evj" if newest else ""
            name = self._newest[str(path)][1]
            found = os.stat(name) if name else None
            return changed, at, found and (found.st_mtime_ns, found.st_size)
        except (OSError, RunDirError):
            return None


def forget_gone(database: Database, folders: Iterable[Path]) -> dict[str, str]:
    """Forget the runs below some folders whose directories do not exist any more; returns name -> path.

    Call this after `sync` of the folders, which finds runs that moved inside them.

    Raises:
        RunIndexError: the index cannot be used.
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


def _ship_noting(total: Shipped, database: Database, run_dir: Path) -> None:
    """Ship a run and add the result to the total."""
    try:
        shipped = ship(database, run_dir)
    except RefusedError as error:
        total.problems.append(f"{run_dir} is not in the index: {error}")
    except RunIndexError:
        raise
    except (EverstepError, OSError) as error:
        total.problems.append(str(error))
    except Exception as error:  # a run directory may hold anything, and must not stop the others
        total.problems.append(f"{run_dir} is not in the index: its journal holds unknown data ({error!r})")
    else:
        total.rows += shipped.rows
        total.problems += shipped.problems


def run_dirs(folder: Path) -> list[Path]:
    """Return a folder itself if it is a run directory, and the run directories in it, by name.

    The evaluations in a run directory are a part of that run: `parts_of`.
    """
    itself = [folder] if is_run(folder) else []
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(TMP)]  # those are being made
            inside = map(Path, sorted(e.path for e in found if e.is_dir() and is_run(e.path)))
            return [*itself, *(path for path in inside if not itself or path.name != EVALUATIONS)]
    except OSError as error:
        raise RunDirError(
            error.errno, f"cannot look for runs: {error.strerror}; check the path", str(folder)
        ) from error


def parts_of(run_dir: Path) -> list[Path]:
    """Return a run directory, and that of its evaluations outside the loop, if there is one."""
    beside = run_dir / EVALUATIONS
    return [run_dir, beside] if is_run(beside) and not beside.is_symlink() else [run_dir]


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


def gone_runs(database: Database, found: Connection | Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the keys of the runs whose directories do not exist any more, of an index or of some rows."""
    rows = found.execute(select(runs)).mappings().all() if isinstance(found, Connection) else list(found)
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
        told = labels_of(connection)
        rows = {row["id"]: dict(row) for row in connection.execute(select(runs)).mappings()}
        for row in rows.values():
            row |= {"sizes": {}, "labels": told.get(row["id"], {})}
        sizes = select(segments.c.run, segments.c.number, segments.c.size)
        for run, number, size in connection.execute(sizes):
            rows[run]["sizes"][number] = size
    return {(row["path"], row["name"]): row for row in rows.values()}


def _running(database: Database) -> set[Path]:
    """Return the directories of this machine's runs that count as running."""
    if not database.exists():
        return set()
    with database.read() as connection:
        found = connection.execute(select(runs.c.path, runs.c.host).where(runs.c.status == "running"))
        return {Path(row.path) for row in found if is_here(database, row.host)}


def _unchanged(run_dir: Path, known: dict[tuple[str, str], dict[str, Any]]) -> bool:
    """Whether the index has a run as it is."""
    row = known.get((str(run_dir), str(id_at(run_dir))))
    if row is None or row["status"] == "running":
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

    Raises:
        RunDirError: `run_dir` is not a run directory, or is damaged.
        JournalError: a newer everstep wrote the journal.
        RunIndexError: the index cannot be written.
    """
    from everstep.record import RunDir

    run = RunDir.open(run_dir, create=False)
    for part in (run.path / "journal", run.path / EVALUATIONS):
        if part.is_symlink():
            raise RunDirError(
                f"{part} is a link, to {os.readlink(part)}: no part of a run is read through a link; put the "
                "folder itself there (the run directory as a whole may be a link)"
            )
    said = clean(str(run.path))
    if said != str(run.path):
        raise RunDirError(
            f"{said} is not indexed: its name is not UTF-8; change the name and run everstep sync"
        )
    shipped = Shipped(runs=1)
    with database.write(run.id) as connection:
        confine(database, run.path)  # before the rows: the file may be new, and readable by everybody
        # Before the journal is read, and after: a start that ends meanwhile, or begins, is not dead.
        held = alive or _is_held(run.path)
        entered = _enter(database, connection, run, shipped.problems)
        if entered is None:
            return shipped
        key, sizes = entered
        for number, size in sorted(journal_sizes(run.path).items()):
            if size != sizes.get(number):
                shipped.rows += _ship_segment(connection, key, run, number, sizes.get(number, 0))
        # After the segments, whose rows decide what is valid and where the run stands.
        _link(connection, key)
        _conclude(connection, key, run.path, alive, held)
        shipped.problems += _problems(connection, key, run.path)
    return shipped


def _enter(
    database: Database, connection: Connection, run: RunDir, problems: list[str]
) -> tuple[int, dict[int, int]] | None:
    """Return the run's key, and the sizes of its files here; None if another directory has its id."""
    path, seed = str(run.path), stored_seed(run.facts["seed"])
    row = connection.execute(select(runs).where(runs.c.name == run.id)).one_or_none()
    if row is None:
        begun = {"status": "running", "step": 0, "epoch": 0}
        made = insert(runs).values(name=run.id, path=path, created=run.facts["created"], seed=seed, **begun)
        return _key(connection.execute(made)), {}
    chosen = select(segments.c.number, segments.c.size).where(segments.c.run == row.id)
    sizes = {number: size for number, size in connection.execute(chosen)}
    found = journal_sizes(run.path)
    whole = all(found.get(number, -1) >= size for number, size in sizes.items())
    if row.path != path and not _same_place(row.path, path):
        here = is_here(database, row.host)
        if id_at(row.path) == run.id if here else not whole or found == sizes:
            where = row.path if here else f"{row.host}:{row.path}"
            problems.append(
                f"{path} is a copy of {where}, the same run {run.id}, and is not indexed beside it; "
                "move one of them elsewhere"
            )
            return None
        connection.execute(update(runs).where(runs.c.id == row.id).values(path=path))
    if whole:
        return row.id, sizes
    _forget(connection, row.id)  # the journal has lost bytes or was replaced, and it is the truth
    return row.id, {}


def _same_place(one: str, other: str) -> bool:
    """Whether two paths, perhaps through links, lead to the same directory."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _key(made: CursorResult[Any]) -> int:
    """Return the primary key of the inserted row."""
    keys = made.inserted_primary_key
    assert keys is not None
    return int(keys[0])


def _forget(connection: Connection, run: int) -> None:
    mine = select(series.c.id).where(series.c.run == run)
    for table in (metrics, blocks):
        connection.execute(delete(table).where(table.c.series.in_(mine)))
    for table in (series, facts, checkpoints, events, segments):
        connection.execute(delete(table).where(table.c.run == run))
    connection.execute(update(runs).where(runs.c.id == run).values(started=None))


# ----------------------------------------------------------------------------------- one segment


def _ship_segment(connection: Connection, run: int, home: RunDir, number: int, start: int) -> int:
    """Ship a file of the journal from a place on; return the number of its rows of metrics."""
    from everstep.record import read_segment
    from everstep.record.segment_file import segment_path

    path = segment_path(home.path, number)
    try:
        found = read_segment(path, start, home.id)
        torn = found.size < path.stat().st_size
    except OSError as error:
        raise _unreadable(error, path) from error
    problems = found.problems[:-1] if torn and found.problems else found.problems
    new: dict[str, Any] = {"run": run, "number": number, "valid_to": 0, "step": 0, "epoch": 0}
    new |= {"parent": None, "parent_offset": None, "started": None, "last": None, "end": found.end}
    new |= {"status": None, "reason": None, "facts": "{}", "problems": "[]"}
    old = connection.execute(
        select(segments).where(segments.c.run == run, segments.c.number == number)
    ).one_or_none()
    values = new if old is None else dict(old._mapping)
    if start:
        problems = [problem for problem in problems if "the header" not in problem]
    values["problems"] = json.dumps(stored(values["problems"], list) + problems)
    values["torn"] = found.problems[-1] if torn and found.problems else None
    values["size"], values["begun"] = found.size, max(int(found.started), values.get("begun", 0))
    values["end"] = max(values["end"], found.end)
    if found.parent is not None:
        values["parent"], values["parent_offset"] = found.parent
    times = [event.time for event in found.events] + [block.time for block in found.blocks]
    values["last"] = max([values["last"] or 0.0, *times]) or None
    _ship_events(connection, run, found.events, values)
    rows = _ship_blocks(connection, run, number, found.blocks, values)
    if old is not None:
        connection.execute(delete(segments).where(segments.c.run == run, segments.c.number == number))
    connection.execute(insert(segments).values(**values))
    return rows


def _ship_events(connection: Connection, run: int, found: list[Any], segment: dict[str, Any]) -> None:
    """Insert the events, and update the segment's row from them."""
    from everstep.record import ACCEPTED

    for event in found:
        step, epoch = event.completed
        segment["step"], segment["epoch"] = max(segment["step"], step), max(segment["epoch"], epoch)
        if event.kind == "segment":
            recorded = without_credentials(event.data.get("facts", {}))
            segment["started"], segment["facts"] = event.time, json.dumps(recorded)
        elif event.kind == "ended":
            segment["status"], segment["reason"] = "finished", _text(event.data.get("reason"))
        elif event.kind == "interrupted":
            segment["status"], segment["reason"] = "stopped", _text(event.data.get("reason"))
        elif event.kind == "decision" and event.data.get("what") == ACCEPTED:
            segment["status"], segment["started"] = "accepted", event.time
            segment["reason"] = f"the divergence at step {event.data['step']}"
        elif event.kind == "closed":
            segment["status"], segment["reason"] = event.data["status"], _text(event.data.get("reason"))
    _insert(
        connection,
        events,
        [
            (run, e.segment, e.offset, _text(e.kind), e.time, int(e.wall), json.dumps(e.data))
            for e in found
            if e.kind not in ("segment", "progress")  # the segment's row has their content
        ],
    )
    _insert(
        connection,
        checkpoints,
        [
            (run, e.segment, e.offset, e.data["name"], e.data["bytes"], e.time, e.completed[0])
            for e in found
            if e.kind == "checkpoint"
        ],
    )


def _ship_blocks(
    connection: Connection, run: int, number: int, new: list[Any], segment: dict[str, Any]
) -> int:
    ids = {
        (name, phase): key
        for key, name, phase in connection.execute(
            select(series.c.id, series.c.name, series.c.phase).where(series.c.run == run)
        )
    }
    count = 0
    batch: list[tuple[Any, ...]] = []
    packed: list[tuple[Any, ...]] = []

    def insert_batch() -> None:
        _insert(connection, metrics, batch)
        _insert(connection, blocks, packed)
        batch.clear()
        packed.clear()

    for found in new:
        block = found.block
        key = (short(block.name), short(block.phase))
        if key not in ids:
            made = connection.execute(insert(series).values(run=run, name=key[0], phase=key[1]))
            ids[key] = _key(made)
        segment["step"] = max(segment["step"], *block.steps)
        segment["epoch"] = max(segment["epoch"], block.epoch)
        count += len(block.steps)
        packed.append((ids[key], number, found.offset, bytes(found.payload)))
        batch += zip(
            repeat(ids[key]),
            repeat(number),
            repeat(found.offset),
            range(len(block.steps)),
            repeat(block.epoch),
            block.steps,
            block.seqs,
            block.counts,
            [None if value != value else value + 0.0 for value in block.values],  # -0.0: SQLite has none
            repeat(int(block.wall)),
            strict=False,
        )
        if len(batch) >= _BATCH:
            insert_batch()
    insert_batch()
    return count


def _insert(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows whose values are in the order of the table's columns."""
    if rows:  # as the driver takes them: SQLAlchemy would make a dictionary of each
        connection.exec_driver_sql(str(insert(table).compile(connection)), rows)


def _text(text: Any) -> str | None:
    return None if text is None else clean(str(text))


# ------------------------------------------------------------------------------------- the run


def _link(connection: Connection, run: int) -> None:
    """Compute again up to where each segment is valid, by the chain of `everstep.record.journal_reader`."""
    found = connection.execute(select(segments).where(segments.c.run == run).order_by(segments.c.number))
    by_number = {row.number: row for row in found}
    valid: dict[int, int] = {}
    at = max((number for number, row in by_number.items() if row.begun), default=None)
    end = _FOREVER
    while at is not None and at in by_number:
        valid[at] = end
        row = by_number[at]
        if row.parent is not None and row.parent >= at:
            break
        at, end = row.parent, row.parent_offset
    for number, row in by_number.items():
        if row.valid_to != valid.get(number, 0):
            connection.execute(
                update(segments)
                .where(segments.c.run == run, segments.c.number == number)
                .values(valid_to=valid.get(number, 0))
            )


def _is_held(run_dir: Path) -> bool:
    """Whether a process holds the run; False on a file system without locks: the heartbeat decides."""
    from everstep.record import is_held

    try:
        return is_held(run_dir)
    except OSError:
        return False


def _conclude(connection: Connection, run: int, run_dir: Path, alive: bool, held: bool) -> None:
    """Update the run's row: status, times, step and epoch; and its labels, as facts of its newest start."""
    found = connection.execute(
        select(segments).where(segments.c.run == run, segments.c.begun == 1).order_by(segments.c.number)
    ).all()
    row = connection.execute(select(runs).where(runs.c.id == run)).one()
    newest = found[-1] if found else None
    seen = [segment.last for segment in found if segment.last is not None]
    beat = time.time() if alive else max([row.heartbeat or 0.0, *seen]) or None
    status = newest.status if newest is not None else None
    recorded = {} if newest is None else stored(newest.facts)
    told = {name: value for name, value in recorded.items() if name not in LABELS} | labels(run_dir).told()
    if status is None:
        alive = held or _is_held(run_dir)
        status = "running" if alive else _status_of_silent(run_dir, beat, recorded.get("lock", True))
    values = {
        "status": status,
        "reason": None if newest is None else newest.reason,
        "started": None if newest is None else newest.started,
        "heartbeat": beat,
        "step": 0 if newest is None else newest.step,
        "diverged": _diverged(connection, run),
        "epoch": next((segment.epoch for segment in reversed(found) if segment.epoch), 0),
    }
    if newest is not None and (newest.started != row.started or told != recorded):
        values["host"] = _text(recorded.get("host"))
        mine = (segments.c.run == run) & (segments.c.number == newest.number)
        connection.execute(update(segments).where(mine).values(facts=json.dumps(told)))
        connection.execute(delete(facts).where(facts.c.run == run))
        _insert(connection, facts, [(clean(name), run, json.dumps(value)) for name, value in told.items()])
    connection.execute(update(runs).where(runs.c.id == run).values(**values))


def _diverged(connection: Connection, run: int) -> int | None:
    """Return the first step of a divergence that nobody has accepted; None if there is none."""
    from everstep.record import ACCEPTED, DIVERGED
    from everstep.record.journal_reader import is_accepted

    mine = select(events.c.segment, events.c.data).where(events.c.run == run)
    valid = (segments.c.number == events.c.segment) & (events.c.offset < segments.c.valid_to)
    marks = connection.execute(
        mine.join(segments, valid & (segments.c.run == run)).where(events.c.kind == DIVERGED)
    ).all()
    if not marks:
        return None
    decisions = connection.execute(mine.where(events.c.kind == "decision")).all()
    accepted = [
        (row.segment, data["step"]) for row in decisions if (data := stored(row.data)).get("what") == ACCEPTED
    ]
    steps = [(row.segment, int(stored(row.data)["step"])) for row in marks]
    return min((step for at, step in steps if not is_accepted(at, step, accepted)), default=None)


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


def _problems(connection: Connection, run: int, run_dir: Path) -> list[str]:
    found = connection.execute(
        select(
            *(segments.c.number, segments.c.parent, segments.c.problems, segments.c.torn),
            *(runs.c.name, runs.c.status),
        )
        .join(runs, runs.c.id == segments.c.run)
        .where(runs.c.id == run)
        .order_by(segments.c.number)
    ).all()
    numbers = {row.number for row in found}
    told = []
    for number, parent, problems, torn, name, status in found:
        lost = lost_parent(number, parent, numbers)
        told += [f"{name}: {problem}" for problem in stored(problems, list) + lost]
        if torn is not None and status != "running":  # a running start is still writing there
            told.append(f"{name}: {torn}")
    if len(told) > _MOST_PROBLEMS:
        told[_MOST_PROBLEMS:] = [
            f"{name}: {len(told) - _MOST_PROBLEMS} more problems; everstep show {run_dir} lists them"
        ]
    return told
