"""Shipping of journals into the index: each row once, by any number of processes, any number of times."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection, CursorResult, delete, insert, select, update

from everstep.durable import TMP
from everstep.errors import EverstepError, RunDirError, RunIndexError
from everstep.index.admission import refusal, uncontested
from everstep.index.bulk_insert import insert_rows
from everstep.index.database import Database
from everstep.index.fields import clean, rows_of, short
from everstep.index.index_errors import RefusedError
from everstep.index.readers import id_at, is_run, stored_seed
from everstep.index.run_queries import lost_parent, newest_facts
from everstep.index.sql_tables import blocks, checkpoints, events, fields, metrics, runs, segments, series
from everstep.index.stored_json import stored
from everstep.labels import NAMES as LABELS
from everstep.labels import has_labels, labels
from everstep.redaction import without_credentials

if TYPE_CHECKING:
    from everstep.record import RunDir

ALIVE_SECONDS = 120.0
"""Seconds after its last sign of life for which a run still counts as running, if no lock decides that."""

_SEGMENT = re.compile(r"segment-(?!0000)([0-9]{4}|[1-9][0-9]{4,8})\.evj")
"""File name of a segment; `everstep.record.segment_file`, which makes the names, would import NumPy."""

_MOST_TOLD = 3
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


class _Known(NamedTuple):
    """State of a run in the index: its row, and the bytes of each journal file."""

    id: int
    status: str
    sizes: dict[int, int]


def sync(database: Database, folders: Iterable[Path], *, named: bool = True) -> Shipped:
    """Ship every run in some folders: run directories, or folders that hold run directories.

    Runs elsewhere that the index has, and whose status is running, are looked at, too: they may have been
    killed.  A damaged run is listed as a problem, and does not stop the others.

    Args:
        named: whether a person has named the folders.  Otherwise nothing is shipped to readers who may not
            read the run (`refusal`).

    Raises:
        RunIndexError: the index cannot be used.
    """
    with database.kept_open() if database.shared else nullcontext():
        return _sync(database, folders, named)


def _sync(database: Database, folders: Iterable[Path], named: bool) -> Shipped:
    asked = [found for folder in folders for run in run_dirs(folder.absolute()) for found in parts_of(run)]
    origins: dict[str, tuple[float, int | None]] = {}
    known = _known(database, {str(path) for path in asked}, origins)
    running = [Path(path) for (path, _), run in known.items() if run.status == "running"]
    found = list(dict.fromkeys([*asked, *(path for path in running if is_run(path))]))
    there = {path: known.get((str(path), id_at(path))) for path in found}
    labelled = [run.id for path, run in there.items() if run is not None and has_labels(path)]
    told = _labels(database, labelled) if labelled else {}
    changed = [path for path, run in there.items() if not _unchanged(path, run, told)]
    total, places = Shipped(runs=len(found)), set(asked)
    changed = uncontested(changed, origins, total.problems)
    with database.kept_open() if changed and not database.shared else nullcontext():
        for run_dir in changed:
            said = refusal(database, origins, run_dir, inside=run_dir in places, named=named)
            if said is None:
                ship_noting(total, database, run_dir)
            elif said:
                total.problems.append(said)
    return total


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
        rows = connection.execute(select(runs.c.id, runs.c.name, runs.c.path, runs.c.host)).all()
    gone = [row for row in rows if any(Path(row.path).is_relative_to(folder) for folder in above)]
    gone = [row for row in gone if is_gone(database, row._mapping)]
    if gone:
        with database.write() as connection:
            for row in gone:
                database.claim(connection, row.name)
                _forget(connection, row.id)
                connection.execute(delete(runs).where(runs.c.id == row.id))
    return {row.name: row.path for row in gone}


def ship_noting(total: Shipped, database: Database, run_dir: Path) -> None:
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


def gone_runs(database: Database, connection: Connection) -> list[int]:
    """List the keys of the runs whose directories do not exist any more."""
    found = connection.execute(select(runs.c.id, runs.c.name, runs.c.path, runs.c.host)).mappings()
    return [int(run["id"]) for run in found if is_gone(database, run)]


def _known(
    database: Database, asked: set[str], origins: dict[str, tuple[float, int | None]]
) -> dict[tuple[str, str | None], _Known]:
    """Return (path, name) -> state in the index, for runs on this machine and at the paths `asked`.

    Args:
        origins: gets the origins of all runs in the index.
    """
    if not database.exists():
        return {}
    with database.read() as connection:
        rows = connection.execute(
            select(
                *(runs.c.path, runs.c.id, runs.c.status, runs.c.host, runs.c.name),
                *(runs.c.created, runs.c.seed),
            )
        ).all()
        origins |= {row.name: (row.created, row.seed) for row in rows}
        if len({row.name for row in rows}) < len(rows):
            raise database.distrusted("it lists a run twice")
        found: dict[tuple[str, str | None], _Known] = {
            (row.path, row.name): _Known(row.id, row.status, {})
            for row in rows
            if row.path in asked or is_here(database, row.host)  # asked: the machines may share a disk
        }
        by_id = {run.id: run for run in found.values()}
        for run, number, size in connection.execute(
            select(segments.c.run, segments.c.number, segments.c.size)
        ):
            if run in by_id:
                by_id[run].sizes[number] = size
    return found


def _labels(database: Database, asked: list[int]) -> dict[int, dict[str, Any]]:
    """Return the labels that the index has of some runs."""
    with database.read() as connection:
        facts = newest_facts(connection, asked)
    return {run: _labels_in(found) for run, found in facts.items()}


def _labels_in(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: facts[name] for name in LABELS if name in facts}


def _unchanged(run_dir: Path, known: _Known | None, told: dict[int, dict[str, Any]]) -> bool:
    """Whether the index has a run as it is; `told` has the labels of the runs that were ever given one."""
    if known is None or known.status == "running":
        return False
    try:
        same = known.sizes == journal_sizes(run_dir)
    except RunDirError:
        return False  # shipping reports the fault
    return same and (known.id not in told or told[known.id] == labels(run_dir).told())


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
    with database.write() as connection:
        database.claim(connection, run.id)
        database.confine(run.path)  # before the rows: the file may be new, and readable by everybody
        # Before the journal is read, and after: a start that ends meanwhile, or begins, is not dead.
        held = alive or _is_held(run.path)
        known = _enter(database, connection, run, shipped.problems)
        if known is None:
            return shipped
        for number, size in sorted(journal_sizes(run.path).items()):
            if size != known.sizes.get(number):
                shipped.rows += _ship_segment(connection, known, run, number)
        # After the segments, whose rows decide what is valid and where the run stands.
        _link(connection, known.id)
        _conclude(connection, known.id, run.path, alive, held)
        shipped.problems += _problems(connection, known.id, run.path)
    return shipped


def _enter(database: Database, connection: Connection, run: Any, problems: list[str]) -> _Known | None:
    """Return the run's row, made if needed; None if the index has another directory with the same id."""
    facts, path = run.facts, str(run.path)
    row = connection.execute(select(runs).where(runs.c.name == facts["id"])).one_or_none()
    if row is not None:
        known = _Known(row.id, row.status, _sizes_of(connection, row.id))
        found = journal_sizes(run.path)
        whole = all(found.get(number, -1) >= size for number, size in known.sizes.items())
        if row.path != path and not _same_place(row.path, path):
            here = is_here(database, row.host)
            if id_at(row.path) == facts["id"] if here else not whole or found == known.sizes:
                where = row.path if here else f"{row.host}:{row.path}"
                problems.append(
                    f"{path} is a copy of {where}, the same run {facts['id']}, and is not indexed beside it; "
                    "move one of them elsewhere"
                )
                return None
            connection.execute(update(runs).where(runs.c.id == row.id).values(path=path))
        if whole:
            return known
        _forget(connection, row.id)  # the journal has lost bytes or was replaced, and it is the truth
        return known._replace(sizes={})
    seed = facts["seed"]
    made = connection.execute(
        insert(runs).values(
            name=facts["id"],
            path=path,
            created=facts["created"],
            seed=stored_seed(seed),
            status="running",
            step=0,
            epoch=0,
        )
    )
    return _Known(_key(made), "running", {})


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


def _sizes_of(connection: Connection, run: int) -> dict[int, int]:
    found = connection.execute(select(segments.c.number, segments.c.size).where(segments.c.run == run))
    return {number: size for number, size in found}


def _forget(connection: Connection, run: int) -> None:
    mine = select(series.c.id).where(series.c.run == run)
    for table in (metrics, blocks):
        connection.execute(delete(table).where(table.c.series.in_(mine)))
    for table in (series, fields, checkpoints, events, segments):
        connection.execute(delete(table).where(table.c.run == run))
    connection.execute(update(runs).where(runs.c.id == run).values(started=None))


# ----------------------------------------------------------------------------------- one segment


def _ship_segment(connection: Connection, known: _Known, home: RunDir, number: int) -> int:
    from everstep.record import read_segment
    from everstep.record.segment_file import segment_path

    path, run = segment_path(home.path, number), known.id
    start = known.sizes.get(number, 0)
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
            facts = without_credentials(event.data.get("facts", {}))  # older versions recorded them
            segment["started"], segment["facts"] = event.time, json.dumps(facts)
        elif event.kind == "ended":
            segment["status"], segment["reason"] = "finished", _text(event.data.get("reason"))
        elif event.kind == "interrupted":
            segment["status"], segment["reason"] = "stopped", _text(event.data.get("reason"))
        elif event.kind == "decision" and event.data.get("what") == ACCEPTED:
            segment["status"], segment["started"] = "accepted", event.time
            segment["reason"] = f"the divergence at step {event.data['step']}"
        elif event.kind == "closed":
            segment["status"], segment["reason"] = event.data["status"], _text(event.data.get("reason"))
    insert_rows(
        connection,
        events,
        [
            (run, e.segment, e.offset, _text(e.kind), e.time, int(e.wall), json.dumps(e.data))
            for e in found
            if e.kind not in ("segment", "progress")  # the segment's row has their content
        ],
    )
    insert_rows(
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
        insert_rows(connection, metrics, batch)
        insert_rows(connection, blocks, packed)
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
    facts = {} if newest is None else stored(newest.facts)
    told = {name: value for name, value in facts.items() if name not in LABELS} | labels(run_dir).told()
    if status is None:
        alive = held or _is_held(run_dir)
        status = "running" if alive else _status_of_silent(run_dir, beat, facts.get("lock", True))
    values = {
        "status": status,
        "reason": None if newest is None else newest.reason,
        "started": None if newest is None else newest.started,
        "heartbeat": beat,
        "step": 0 if newest is None else newest.step,
        "diverged": _diverged(connection, run),
        "epoch": next((segment.epoch for segment in reversed(found) if segment.epoch), 0),
    }
    if newest is not None and (newest.started != row.started or told != facts):
        values["host"] = _text(facts.get("host"))
        mine = (segments.c.run == run) & (segments.c.number == newest.number)
        connection.execute(update(segments).where(mine).values(facts=json.dumps(told)))
        connection.execute(delete(fields).where(fields.c.run == run))
        insert_rows(connection, fields, rows_of(run, told))
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
    if len(told) > _MOST_TOLD:
        told[_MOST_TOLD:] = [
            f"{name}: {len(told) - _MOST_TOLD} more problems; everstep show {run_dir} lists them"
        ]
    return told
