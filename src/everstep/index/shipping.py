"""Shipping of journals into the index: each row once, by any number of processes, any number of times."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, bindparam, delete, insert, select, update

from everstep.durable import TMP, no_disk_error
from everstep.errors import JournalError, RunDirError, RunIndexError
from everstep.index import GONE
from everstep.index.database import Database
from everstep.index.location import facts_at, id_at, is_run
from everstep.index.run_queries import newest_facts, run_rows
from everstep.index.sql_tables import blocks, events, facts, metrics, runs, segments, series, stored
from everstep.labels import NAMES as LABELS
from everstep.labels import clean, has_labels, labels

if TYPE_CHECKING:
    from everstep.record import Event, RunDir
    from everstep.record.journal_format import StoredBlock

_ALIVE_SECONDS = 120.0
"""Seconds after its last sign of life for which a run still counts as running, if no lock decides that."""
_SEGMENT = re.compile(r"segment-(?!0000)([0-9]{4}|[1-9][0-9]{4,8})\.evj")
"""File name of a segment; `everstep.record.journal_format`, which makes the names, would import NumPy."""
_MOST_PROBLEMS = 3
_FOREVER = 1 << 62
_BATCH = 50_000
_Starts = dict[int, dict[str, Any]]
"""Number of a start -> its row in `segments`."""


@dataclass
class Shipped:
    """Result of shipping: runs that were looked at, metric rows that are new, faults of runs in words."""

    runs: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)


def sync(
    database: Database,
    folders: Iterable[Path],
    *,
    explicit: bool = True,
    only: Collection[Path] | None = None,
    pause: Callable[[], object] = lambda: None,
) -> Shipped:
    """Ship every run in some folders, and note which runs of this machine are gone.

    Runs elsewhere that the index has, and whose status is running, are looked at, too: they may have been
    killed.  A damaged run is listed as a problem, and does not stop the others.

    Args:
        folders: run directories, or folders that hold run directories.
        explicit: whether a person named them; otherwise only an index that nobody else can read gets runs.
        only: the run directories to look at; None for all.
        pause: called before each look at a run; it may wait while the caller has more urgent work.
    """
    folders, known = [folder.absolute() for folder in folders], _known_runs(database)
    paths = only
    if paths is None:
        running = (row for row in known.values() if row["status"] == "running")
        elsewhere = (Path(row["path"]) for row in running if is_here(database, row["host"]))
        paths = dict.fromkeys([*(run for folder in folders for run in run_dirs(folder)), *elsewhere])
    total = Shipped(runs=len(paths))
    changed = [path for path in paths if is_run(path) and not _unchanged(path, known, pause)]
    changed.sort(key=_is_foreign)  # own runs count first
    for path in changed:
        pause()
        inside = any(folder in (path, *path.parents) for folder in folders)
        try:
            link = os.lstat(path)
            if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), os.stat(path).st_uid):
                total.problems.append(
                    f"{path} is a link to {os.path.realpath(path)}, not made by you or that run's owner, and "
                    "is not read; if you want the run in the index, give the run itself to everstep sync"
                )
            elif _is_in(known, path) or (inside and (explicit or database.is_private())):
                shipped = ship(database, path)
                total.rows += shipped.rows
                total.problems += shipped.problems
            elif inside and not database.shared:
                total.problems.append(
                    f"{path} is not in the index {database.name}, which others can read; "
                    f"everstep sync {path} puts it there even so"
                )
        except RunIndexError:
            raise
        except Exception as error:  # a run directory may hold anything, and must not stop the others
            says_where = isinstance(error, RunDirError | JournalError | OSError)
            total.problems.append(str(error) if says_where else f"{path} is not in the index: {error!r}")
    if only is None and database.exists() and (keys := [{"key": row["id"]} for row in _gone_runs(database)]):
        condition = (segments.c.run == bindparam("key")) & (segments.c.status == "running")
        with database.write() as connection:
            connection.execute(update(runs).where(runs.c.id == bindparam("key")).values(status=GONE), keys)
            connection.execute(update(segments).where(condition).values(status="killed"), keys)
    return total


def forget_gone(database: Database, folders: Iterable[Path]) -> dict[str, str]:
    """Forget the runs below some folders whose directories do not exist any more; returns name -> path."""
    above = [folder.absolute() for folder in folders]
    rows = _gone_runs(database, with_noted=True) if database.exists() else []
    gone_rows = [row for row in rows if any(Path(row["path"]).is_relative_to(folder) for folder in above)]
    for row in gone_rows:
        with database.write(row["name"]) as connection:
            _forget(connection, row["id"])
            connection.execute(delete(runs).where(runs.c.id == row["id"]))
    return {row["name"]: row["path"] for row in gone_rows}


def _gone_runs(database: Database, with_noted: bool = False) -> list[dict[str, Any]]:
    """Return the runs here whose directories are gone or have another run; `with_noted`: known ones, too."""
    with database.read() as connection:
        rows = [row for row in run_rows(connection).values() if is_here(database, row["host"])]
    # Several runs of one path: one was made anew in the place of another.
    ids = {path: id_at(path) for path, n in Counter(row["path"] for row in rows).items() if n > 1}
    return [
        row
        for row in rows
        if (with_noted or row["status"] != GONE)
        and (not is_run(row["path"]) or ids.get(row["path"]) not in (None, row["name"]))
    ]


def run_dirs(folder: Path) -> list[Path]:
    """Return a folder itself if it is a run directory, and the run directories in it, by name."""
    itself = [folder] if is_run(folder) else []
    with no_disk_error("cannot look for runs", folder, "check the path"), os.scandir(folder) as entries:
        children = [entry for entry in entries if not entry.name.startswith(TMP)]  # those are being made
        return [*itself, *map(Path, sorted(e.path for e in children if e.is_dir() and is_run(e.path)))]


def is_here(database: Database, host: str | None) -> bool:
    """Whether a run whose newest start was on `host` counts as a run of this machine."""
    return not database.shared or host in (None, platform.node())


def _known_runs(database: Database) -> dict[str, dict[str, Any]]:
    """Return name -> row of a run, with the sizes of its journal's files, and its labels."""
    if not database.exists():
        return {}
    with database.read() as connection:
        labelled, rows = newest_facts(connection, names=LABELS), run_rows(connection)
        for key, row in rows.items():
            row |= {"sizes": {}, "labels": labelled.get(key, {})}
        for run, number, size in connection.execute(select(*segments.c["run", "number", "size"])):
            rows[run]["sizes"][number] = size
    return {row["name"]: row for row in rows.values()}


def _unchanged(run_dir: Path, known: Mapping[str, Mapping[str, Any]], pause: Callable[[], object]) -> bool:
    pause()
    row = known.get(str(id_at(run_dir)))
    if row is None or row["path"] != str(run_dir) or row["status"] == GONE:
        return False
    if row["status"] == "running" and not _is_held(run_dir):
        return False
    with contextlib.suppress(RunDirError):  # shipping reports the fault
        labelled = labels(run_dir).as_json() if has_labels(run_dir) else {}
        return bool(row["sizes"] == journal_sizes(run_dir) and row["labels"] == labelled)
    return False


def _is_foreign(run_dir: Path) -> bool:
    try:
        return os.stat(run_dir).st_uid != os.geteuid()
    except OSError:  # removed since it was listed
        return True


def _is_in(known: Mapping[str, Mapping[str, Any]], run_dir: Path) -> bool:
    """Whether the index has this very run: who cannot read a run does not know its time and seed."""
    record = facts_at(run_dir) or {"id": None}
    row = known.get(str(record["id"]))
    return row is not None and (row["created"], row["seed"]) == (record.get("created"), _seed(record))


def _seed(facts: Mapping[str, Any]) -> int | None:
    """Return a run's seed as an index has it: None of an import, or if it is too large for a database."""
    seed = None if facts.get("imported") else facts.get("seed")
    return seed if isinstance(seed, int) and abs(seed) < 1 << 63 else None


def journal_sizes(run_dir: Path) -> dict[int, int]:
    """Return segment number -> bytes of its file; no part of a run is read through a link."""
    journal, sizes = run_dir / "journal", {}
    if journal.is_symlink():
        raise RunDirError(f"{journal} is a link, and is not read; put the folder itself there")
    with _readable(journal), contextlib.suppress(FileNotFoundError), os.scandir(journal) as entries:
        for entry in entries:
            if _SEGMENT.fullmatch(entry.name):
                if not entry.is_file(follow_symlinks=False):
                    raise OSError(errno.EINVAL, f"{entry.name} is not a regular file")
                sizes[int(entry.name[8:-4])] = entry.stat().st_size
    return sizes


def _readable(path: Path) -> contextlib.AbstractContextManager[None]:
    return no_disk_error("the journal cannot be read", path, "check the disk")


def ship(database: Database, run_dir: Path, *, alive: bool = False) -> Shipped:
    """Ship the part of a run's journal that the index lacks; any number of processes may do so at once.

    `alive`: the caller is the process that trains the run.
    """
    from everstep.record import Position, RunDir
    from everstep.record.journal_reader import chain_to

    run = RunDir.open(run_dir, create=False)
    if (name := clean(str(run.path))) != str(run.path):
        raise RunDirError(f"{name} is not indexed: its name is not UTF-8; change it and run everstep sync")
    shipped = Shipped(runs=1)
    with database.write(run.id) as connection:
        # Before the journal is read, and after: a start that ends meanwhile, or begins, is not dead.
        is_held = alive or _is_held(run.path)
        query = select(runs).where(runs.c.name == run.id)
        if (entry := connection.execute(query).mappings().first()) is None:
            new = {"name": run.id, "path": str(run.path), "created": run.facts["created"]}
            new |= {"seed": _seed(run.facts), "status": "running", "step": 0, "epoch": 0}
            connection.execute(insert(runs).values(**new))
            entry = connection.execute(query).mappings().one()
        row = dict(entry)
        known = connection.execute(select(segments).where(segments.c.run == row["id"])).mappings()
        earlier = {start["number"]: dict(start) for start in known}
        sizes = journal_sizes(run.path)
        is_intact = all(sizes.get(number, -1) >= start["size"] for number, start in earlier.items())
        numbers = {n for n, size in sizes.items() if size != earlier.get(n, {"size": -1})["size"]}
        if fault := _copied_from(database, connection, run, row, is_intact and bool(numbers)):
            shipped.problems.append(fault)
            return shipped
        if not is_intact:  # the journal has lost bytes or was replaced, and it is the truth
            _forget(connection, row["id"])
            earlier, numbers = {}, set(sizes)
        starts = {number: dict(start) for number, start in earlier.items()}
        for number in sorted(numbers):
            starts[number], rows = _read_on(connection, row["id"], run, number, starts.get(number))
            shipped.rows += rows
        starts = dict(sorted(starts.items()))
        parents = {
            number: None if start["parent"] is None else Position(start["parent"], start["parent_offset"])
            for number, start in starts.items()
        }
        newest = max((number for number, start in starts.items() if start["begun"]), default=0)
        valid = chain_to(parents, Position(newest, _FOREVER))
        for number, start in starts.items():
            start["valid_to"] = valid.get(number, 0)
        problems = _conclude(connection, row, run.path, starts, alive, is_held)
        for number, start in starts.items():
            if start != earlier.get(number):
                place = (segments.c.run == row["id"]) & (segments.c.number == number)
                connection.execute(delete(segments).where(place))
                connection.execute(insert(segments).values(**start))
    if len(problems) > _MOST_PROBLEMS:
        more = len(problems) - _MOST_PROBLEMS
        problems[_MOST_PROBLEMS:] = [f"{more} more problems; everstep show {run.path} --json lists them"]
    shipped.problems += [f"{run.id}: {problem}" for problem in problems]
    return shipped


def _copied_from(
    database: Database, connection: Connection, run: RunDir, row: dict[str, Any], went_on: bool
) -> str:
    """Note where a run is now, or say of which directory this is a copy; `went_on`: there is more here."""
    is_local, path = is_here(database, row["host"]), row["path"]
    if str(run.path) == path or (os.path.exists(path) and os.path.samefile(run.path, path)):
        return ""
    if id_at(path) == run.id if is_local else not went_on:
        place = path if is_local else f"{row['host']}:{path}"
        return (
            f"{run.path} is a copy of {place}, the same run {run.id}, and not indexed; move one of them out "
            "of the folders that you sync"
        )
    connection.execute(update(runs).where(runs.c.id == row["id"]).values(path=str(run.path)))
    return ""


def _forget(connection: Connection, run: int) -> None:
    keys = select(series.c.id).where(series.c.run == run)
    for table in (metrics, blocks):
        connection.execute(delete(table).where(table.c.series.in_(keys)))
    for table in (series, facts, events, segments):
        connection.execute(delete(table).where(table.c.run == run))


def _read_on(
    connection: Connection, run: int, home: RunDir, number: int, earlier: dict[str, Any] | None
) -> tuple[dict[str, Any], int]:
    """Ship a file of the journal from where it was shipped; return its row, and the number of new values."""
    from everstep.record import read_segment
    from everstep.record.journal_format import segment_path

    path = segment_path(home.path, number)
    start = earlier or _NEW | {"run": run, "number": number}
    with _readable(path):
        segment = read_segment(path, start["size"], home.id)
    problems = segment.problems
    if start["size"]:  # the faults of the bytes before are known, and the header is one of these
        problems = stored(start["problems"], list) + [text for text in problems if "the header" not in text]
    start["torn"], start["problems"] = segment.torn or None, json.dumps(problems)
    start["size"], start["begun"] = segment.size, max(int(segment.started), start["begun"])
    if segment.parent is not None:
        start["parent"], start["parent_offset"] = segment.parent
    times = [event.time for event in segment.events] + [block.time for block in segment.blocks]
    start["last"] = max([start["last"] or 0.0, *times]) or None
    for event in segment.events:
        _note(start, event)
    new = [event for event in segment.events if event.kind not in ("segment", "progress")]
    _insert(
        connection,
        events,
        [(run, number, e.offset, clean(e.kind), e.time, int(e.wall), json.dumps(e.data)) for e in new],
    )
    return start, _ship_blocks(connection, run, start, segment.blocks)


_NEW: dict[str, Any] = {
    **dict.fromkeys(segments.c.keys()),
    **dict.fromkeys(("size", "begun", "valid_to", "step", "epoch", "zero"), 0),
    "facts": "{}",
    "problems": "[]",
}
"""Row of a segment of which nothing is shipped."""

_ENDS = {"ended": "finished", "interrupted": "stopped", "closed": ""}
"""Event at a start's end -> the status that it means; "" where its data has the status."""


def _note(start: dict[str, Any], event: Event) -> None:
    from everstep.record import ACCEPTED

    step, epoch = event.completed
    start["step"], start["epoch"] = max(start["step"], step), max(start["epoch"], epoch)
    if event.kind == "segment":
        start["started"], start["facts"] = event.time, json.dumps(event.data.get("facts", {}))
    elif event.kind == "decision" and event.data.get("what") == ACCEPTED:
        start["said"], start["started"] = "accepted", event.time
        start["reason"] = f"the divergence at step {event.data['step']}"
    elif event.kind in _ENDS:
        start["said"] = _ENDS[event.kind] or event.data["status"]
        start["reason"] = None if (reason := event.data.get("reason")) is None else clean(str(reason))


def _ship_blocks(connection: Connection, run: int, start: dict[str, Any], new: list[StoredBlock]) -> int:
    from everstep.record.journal_format import sketch

    known = connection.execute(select(series.c.id, series.c.name, series.c.phase).where(series.c.run == run))
    ids = {(name, phase): key for key, name, phase in known}
    number, count = start["number"], 0
    batch: list[tuple[Any, ...]] = []
    packed: list[tuple[Any, ...]] = []
    for entry in new:
        block = entry.block
        key = (clean(block.name), clean(block.phase))
        if key not in ids:
            result = connection.execute(insert(series).values(run=run, name=key[0], phase=key[1]))
            assert result.inserted_primary_key is not None
            ids[key] = int(result.inserted_primary_key[0])
        start["step"] = max(start["step"], *block.steps)
        start["epoch"] = max(start["epoch"], block.epoch)
        count += len(block.steps)
        batch += zip(
            *(repeat(ids[key]), repeat(number), repeat(entry.offset), range(len(block.steps))),
            *(repeat(block.epoch), block.steps, block.seqs, block.counts),
            [None if value != value else value + 0.0 for value in block.values],  # -0.0: SQLite has none
            repeat(int(block.wall)),
            strict=False,
        )
        packed.append((ids[key], number, entry.offset, sketch(entry.payload), bytes(entry.payload)))
        if len(batch) >= _BATCH:
            _insert(connection, metrics, batch)
            batch.clear()
    _insert(connection, metrics, batch)
    _insert(connection, blocks, packed)
    return count


def _insert(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    if rows:  # as the driver takes them: SQLAlchemy would make a dictionary of each
        connection.exec_driver_sql(str(insert(table).compile(connection)), rows)


def _conclude(
    connection: Connection, row: dict[str, Any], run_dir: Path, starts: _Starts, alive: bool, is_held: bool
) -> list[str]:
    """Update the run's row, its starts, and the facts of the newest with its labels; return its problems."""
    begun_starts = [start for start in starts.values() if start["begun"]]
    newest = begun_starts[-1] if begun_starts else dict(_NEW)
    times = [start["last"] for start in begun_starts if start["last"] is not None]
    beat = time.time() if alive else max([row["heartbeat"] or 0.0, *times]) or None
    record = stored(newest["facts"])
    known = {clean(name): value for name, value in record.items() if name not in LABELS}
    known |= labels(run_dir).as_json()
    status = newest["said"]
    if status is None:
        locks = record.get("lock", True) and (run_dir / "lock").exists()
        recent = beat is not None and time.time() - beat < _ALIVE_SECONDS
        # Nobody holds it: killed, or failed before it could record anything; without a lock perhaps running.
        ends = "failed" if locks and not (run_dir / "lock.json").exists() else "killed"
        status = "running" if is_held or _is_held(run_dir) or (recent and not locks) else ends
    for start in starts.values():
        start["status"] = start["said"] or (status if start is newest else "killed")
    problems = list[str]()
    for number, start in starts.items():
        problems += stored(start["problems"], list)
        if (parent := start["parent"]) is not None:
            size = starts[parent]["size"] if parent in starts else -1
            has_problem = parent in starts and stored(starts[parent]["problems"], list)
            if size < start["parent_offset"] and not has_problem:
                short = f"of which only {size} bytes are left: the lost metrics"
                lost = "which is missing: its metrics" if size < 0 else short
                problems.append(
                    f"segment-{number:04d}.evj continues segment-{parent:04d}.evj, {lost} "
                    "are not shown; restore the file from a copy"
                )
        if start["torn"] is not None and status != "running":  # a running start is still writing there
            problems.append(start["torn"])
    values = {
        "status": status,
        "reason": newest["reason"],
        "started": newest["started"],
        "heartbeat": beat,
        "epoch": next((start["epoch"] for start in reversed(begun_starts) if start["epoch"]), 0),
        "host": None if (host := record.get("host")) is None else clean(str(host)),
        **_note_verification(connection, row["id"], run_dir, starts),
        "duration": _note_zeros(starts),
        "step": newest["step"],
        "problems": json.dumps(problems),
    }
    if known != newest_facts(connection, [row["id"]]).get(row["id"], {}):
        connection.execute(delete(facts).where(facts.c.run == row["id"]))
        _insert(connection, facts, [(name, row["id"], json.dumps(value)) for name, value in known.items()])
    if any(row[name] != value for name, value in values.items()):  # or the file would change at each look
        connection.execute(update(runs).where(runs.c.id == row["id"]).values(**values))
    return problems


def _note_zeros(starts: _Starts) -> float | None:
    """Note of each start the pauses before it; return the seconds in which starts were alive."""
    zero = latest = 0.0
    for start in starts.values():
        begin = start["started"] or start["last"] or 0.0
        zero += max(0.0, begin - latest)  # imports overlap: each second counts once
        start["zero"], latest = zero, max(latest, start["last"] or begin)
    return latest - zero if any(start["started"] for start in starts.values()) else None


def _note_verification(connection: Connection, run: int, run_dir: Path, starts: _Starts) -> dict[str, Any]:
    """Note of each start how its resume was verified; return the run's totals over its starts."""
    from everstep.record import ACCEPTED, DIVERGED, newest_step
    from everstep.record.badges import WORST_FIRST, Start, badges_in, judge_starts
    from everstep.record.journal_format import step_of
    from everstep.record.journal_reader import is_accepted

    query = select(*events.c["segment", "offset", "kind", "data"]).where(events.c.run == run)
    query = query.where(events.c.kind.in_((DIVERGED, "verified", "decision")))
    query = query.order_by(events.c.segment, events.c.offset)
    rows = [(*row[:3], stored(row[3])) for row in connection.execute(query)]
    trained = [s for s in starts.values() if s["begun"] and s["started"] and s["said"] != "accepted"]
    entries = []
    for start in trained:
        if start["said"] is None:  # a killed process wrote its last steps to its trail alone
            start["step"] = max(start["step"], newest_step(run_dir, start["number"]))
        checkpoint = stored(start["facts"]).get("resumed_from")
        began = None if checkpoint is None else step_of(checkpoint)
        entries.append(Start(start["number"], began, start["step"], start["status"] == "running"))
    reported = badges_in((start, kind, data) for start, _, kind, data in rows if kind != "decision")
    for start, (step, badge) in zip(trained, judge_starts(entries, reported), strict=True):
        count = reported.get(start["number"], badge).steps
        start |= {"step": step or 0, "badge": badge.kind, "how": badge.report, "again": count}
        start["diverged_at"] = badge.at
    kinds = {start["badge"] for start in trained}
    accepted = [(start, data["step"]) for start, _, _, data in rows if data.get("what") == ACCEPTED]
    diverged = [
        int(data["step"])
        for start, offset, kind, data in rows
        if kind == DIVERGED and offset < starts[start]["valid_to"]
        if not is_accepted(start, int(data["step"]), accepted)
    ]
    return {
        "diverged": min(diverged, default=None),
        "starts": len(trained),
        "kills": sum(start["status"] == "killed" for start in trained),
        "verified": next((kind for kind in WORST_FIRST if kind in kinds), None),
    }


def _is_held(run_dir: Path) -> bool:
    """Whether a process holds the run; False on a file system without locks: the heartbeat decides."""
    from everstep.record import is_held

    try:
        return is_held(run_dir)
    except OSError:
        return False
