"""Index in a SQLite file: made whole or not at all, read and written by many processes at once."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, StaticPool

from everstep.errors import RunIndexError
from everstep.index.index_errors import (
    IndexBusyError,
    MalformedIndexError,
    RefusedError,
    UnwritableIndexError,
)
from everstep.index.location import FILE
from everstep.index.readers import readers, run_readers
from everstep.index.sql_tables import VERSION, metadata

_FILES = ("", "-wal", "-shm")
"""Endings of the names of a database's files."""

_ROLLBACK = "-journal"
"""Ending of a file that an index never has: by it SQLite restores pages, and deletes a file that it names."""

_DISK = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_FULL", "SQLITE_PERM")
"""Errors of the file system."""

_TWICE = ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")
"""Errors of a row that exists already: rows are shipped once, so perhaps pages of two databases are mixed."""

_LACKS = re.compile("no such (table|column): ")
"""Messages about a file that has our version and lacks our tables."""


_COMPLEX = re.compile("Expression tree is too large|parser stack overflow|too many|at most")
"""Messages about a query that SQLite does not read; they are no fault of the file."""

_TRIES = 10
"""Number of tries to open a file that is replaced meanwhile."""

_TURN = 100_000
"""Instructions of SQLite between two looks at signals: a millisecond or less."""

_LOCK_SECONDS = 2.0
"""Least seconds to wait for another process that makes or sets aside an index in the same folder."""


class SQLite:
    """Index in a SQLite file, which is opened for each use and not kept open in between.

    Readers wait for nobody (WAL).  A writer takes the write lock at its beginning (BEGIN IMMEDIATE): what it
    reads stays true until it commits, and waiting for the lock never fails half way.

    A malformed file is set aside by the first process that notices.  A process that has the file open
    continues with the file that was set aside.  A process that is just opening the file checks again, before
    it writes, which file has the name: a `-wal` belongs to a name, and the new file's would be mixed with the
    old file.
    """

    shared = False
    """Whether machines share the index; in a file, each run counts as a run of this machine."""

    faults = (sqlite3.Error,)

    def __init__(self, path: Path | None, patience: float) -> None:
        self._path, self._patience = path, patience
        self._driver: sqlite3.Connection | None = None
        self._left: list[BaseException] = []
        """What a signal's handler raised while SQLite was at work."""
        self._opened: tuple[int, int] | None = None
        """Device and inode of the file that was opened last."""
        self.name = "in memory" if path is None else str(path)
        if path is None:
            self._engine = create_engine(
                "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
            )
        else:
            self._engine = _engine(path, patience)
        _listen(self._engine, self._left)
        self._writer = self._engine.execution_options(writes=True)
        if path is None:
            with self._writer.begin() as connection:
                _fill(connection)

    def exists(self) -> bool:
        """Whether there is an index; an empty file is not an index.

        Raises:
            RunIndexError: the name belongs to something that is not a file.
        """
        if self._path is None:
            return True
        found = _status(self._path)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise RunIndexError(f"{self._path} is not a file, so it cannot be an index; give another path")
        return found is not None and found.st_size > 0

    @contextlib.contextmanager
    def transaction(self, writes: bool) -> Iterator[Connection]:
        """Open a transaction; a writing transaction makes the file if there is none."""
        engine = self._writer if writes else self._engine
        for _ in range(_TRIES):
            if writes and not self.exists():
                self._make()
            with contextlib.ExitStack() as stack:
                self._opened = _identity(self._path)
                connection = stack.enter_context(engine.begin())
                connection.exec_driver_sql("PRAGMA schema_version")  # from here on its -wal is open, too
                if _identity(self._path) == self._opened:
                    self._driver = connection.connection.driver_connection
                    yield connection
                    return
        raise IndexBusyError(f"the index {self.name} is being replaced repeatedly; run everstep sync later")

    def _make(self) -> None:
        """Make the file, and first delete what an earlier one has left beside it."""
        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                if not self.exists():
                    for end in _FILES:
                        self._path.with_name(self._path.name + end).unlink(missing_ok=True)
                    _create(self._path)
        except OSError as error:
            if isinstance(error, RunIndexError):
                raise
            raise UnwritableIndexError(
                error.errno, f"the index cannot be made: {error.strerror}; check the disk", self.name
            ) from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from giving the file its name, or taking it away, by a lock on its folder.

        On a file system without such locks, two processes at once may each make a file: the second file
            counts.
        """
        assert self._path is not None
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        until = time.monotonic() + max(self._patience, _LOCK_SECONDS)
        try:
            while not _locked(descriptor):
                if time.monotonic() > until:
                    raise IndexBusyError(f"the index {self.name} is being made by another process; try again")
                time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep a connection open in the block: SQLite tidies the file up after the last connection."""
        self._opened = _identity(self._path)
        with self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA user_version")
            connection.rollback()
            yield

    def watch(self, runs: frozenset[str]) -> None:
        """Do nothing: whoever reads the file reads the journals, too."""

    def is_watched(self, run: str) -> bool:
        """Return False: nobody waits for a shipping."""
        return False

    def confine(self, run_dir: Path) -> bool:
        """Take the file from readers who may not read a run; False if others may write it, or own it."""
        found = None if self._path is None else _status(self._path)
        if self._path is None or found is None:
            return True
        if readers(self._path).within(theirs := run_readers(run_dir)):
            return True
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        index = os.path.realpath(self._path)
        for kept in (0o770, 0o700):
            for end in _FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(index + end, stat.S_IMODE(found.st_mode) & kept)
            if readers(index).within(theirs):
                break
        return True

    def claim(self, connection: Connection, run: str) -> None:
        """Do nothing: a file has one writer at a time."""

    def version(self, connection: Connection) -> int:
        """Return the version of the schema.

        Raises:
            RunIndexError: the file is another program's database, or would compute without end.
        """
        found = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
        if not found:
            raise RunIndexError(
                f"{self.name} has index format 0: it is not an index of everstep; move it away and run "
                "everstep sync: one is made from the journals"
            )
        if foreign := _foreign(connection):
            raise RunIndexError(
                f"{self.name} is not an index of everstep: {foreign[:100]} is not a table; move it away and "
                "run everstep sync: one is made from the journals"
            )
        return found

    def set_version(self, connection: Connection) -> None:
        """Note that the schema has version `VERSION` now."""
        connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")

    def fault(self, error: object) -> RunIndexError:
        """Translate an error of SQLite.

        Raises:
            BaseException: what a signal's handler raised, as for Ctrl-C, which ended a statement.
        """
        if self._left:
            raise self._left.pop()
        name = str(getattr(error, "sqlite_errorname", ""))
        if name in _TWICE and self._is_damaged():
            return self.distrusted(str(error))
        if isinstance(error, sqlite3.DataError | sqlite3.IntegrityError):
            return RefusedError(f"the index {self.name} does not take it ({error})")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return IndexBusyError(
                f"the index {self.name} is being written by another process for more than "
                f"{self._patience:g} s; run everstep sync later"
            )
        if name.startswith(_DISK):
            if self._opened is not None and _identity(self._path) != self._opened:
                return IndexBusyError(
                    f"the index {self.name} was moved or deleted while it was used; it is made again from "
                    "the journals when the next run ships, or by everstep sync"
                )
            return UnwritableIndexError(f"the index {self.name} cannot be used ({error}); check the disk")
        if name == "SQLITE_INTERRUPT":
            return RunIndexError(
                f"writing the index {self.name} took too long; run everstep sync, which writes the rest"
            )
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or _LACKS.match(str(error)):
            return self.distrusted(str(error))
        if _COMPLEX.search(str(error)):
            return RunIndexError(f"SQLite does not read so large a question ({error}); ask for less at once")
        return RunIndexError(
            f"the index {self.name} cannot be used ({error}); if this error stays, move it away and run "
            "everstep sync: it is made again from the journals"
        )

    def distrusted(self, why: str) -> RunIndexError:
        """Return the error for a malformed file; if the file is an index, it is set aside."""
        if self._path is None or not self._is_ours():
            return RunIndexError(
                f"{self.name} is not an index of everstep ({why}); move it away and run everstep sync: "
                "one is made from the journals"
            )
        try:
            aside = self._set_aside()
        except OSError as error:
            return RunIndexError(
                f"the index {self.name} is malformed ({why}) and cannot be moved away ({error.strerror}); "
                "move it yourself, and run everstep sync: it is made again from the journals"
            )
        return MalformedIndexError(
            f"the index {self.name} was malformed ({why}); it is made again from the journals in its folder, "
            f"runs elsewhere come back with everstep sync FOLDER{aside}"
        )

    def _is_ours(self) -> bool:
        """Whether a damaged file is an index: by its name, or by the version in its header."""
        assert self._path is not None
        if self._path.name == FILE:
            return True
        with contextlib.suppress(DBAPIError), self._engine.connect() as connection:
            return 0 < int(connection.exec_driver_sql("PRAGMA user_version").scalar_one()) <= VERSION
        return False

    def _is_damaged(self) -> bool:
        """Whether SQLite finds a fault in the file; reads the whole file."""
        try:
            with self._engine.connect() as connection:
                return bool(connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one() != "ok")
        except DBAPIError:
            return True

    def _set_aside(self) -> str:
        """Rename the file that was opened, unless another process did; returns words with the new name."""
        assert self._path is not None
        with self._alone():
            if self._opened is None or _identity(self._path) != self._opened:
                return ""
            numbers = (self._path.with_name(f"{self._path.name}.malformed-{n}") for n in itertools.count(1))
            aside = next(path for path in numbers if not path.exists())
            for end in _FILES:  # the file itself comes first: without it no process opens the others
                with contextlib.suppress(FileNotFoundError):
                    self._path.with_name(self._path.name + end).rename(aside.with_name(aside.name + end))
        return f" (the old file is {aside} now)"

    def interrupt(self) -> None:
        """Let what another thread does fail now."""
        if self._driver is not None:
            with contextlib.suppress(sqlite3.ProgrammingError):  # it is closed
                self._driver.interrupt()


def _engine(path: Path, patience: float, mode: str = "rw") -> Any:
    """Make an engine for an existing file; the mode "rwc" makes the file."""
    address = f"file:{quote(os.fsencode(path))}?mode={mode}"

    def connect() -> sqlite3.Connection:
        _require_own_files(path)
        return sqlite3.connect(address, uri=True, timeout=patience, check_same_thread=False)

    return create_engine("sqlite://", creator=connect, poolclass=NullPool)


def _foreign(connection: Connection) -> str | None:
    """Name what is not a table of rows in the place of a table, or acts when a row is written."""
    schema = connection.exec_driver_sql("SELECT name, type, sql FROM sqlite_master").all()
    tables = {name.lower() for name, _, sql in schema if sql and sql.startswith("CREATE TABLE")}
    for name, kind, _ in schema:
        if kind == "trigger" or (kind != "index" and name.lower() in metadata.tables.keys() - tables):
            return str(name)
    return None


def _require_own_files(path: Path) -> None:
    """Refuse files beside the index that everstep does not make: SQLite believes what they say.

    Raises:
        UnwritableIndexError: there is such a file.  The journals of the runs can be read all the same.
    """
    index = os.path.realpath(path)  # SQLite looks beside the file, not beside a link to the file
    if os.path.lexists(index + _ROLLBACK):
        raise UnwritableIndexError(
            f"the index {path} is not opened: {index}{_ROLLBACK} is there, which no index of everstep has, "
            "and by which SQLite would change and delete files; other software left it, or somebody put it "
            "there. Move both files away and run everstep sync: the index is made again from the journals"
        )
    for end in _FILES[1:]:
        with contextlib.suppress(FileNotFoundError):  # the last connection of another process deletes both
            if not stat.S_ISREG(os.lstat(index + end).st_mode):
                raise UnwritableIndexError(
                    f"the index {path} is not opened: {index}{end} is not a file; move it away"
                )


def _status(path: Path) -> os.stat_result | None:
    """Stat a file; None if there is none."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunIndexError(
            error.errno, f"the index cannot be reached: {error.strerror}", str(path)
        ) from error


def _identity(path: Path | None) -> tuple[int, int] | None:
    """Return device and inode of the file that has the name now; None if there is none."""
    found = None if path is None else _status(path)
    return None if found is None else (found.st_dev, found.st_ino)


def _locked(folder: int) -> bool:
    """Whether this process now has the lock on an open folder; true on file systems without such locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _listen(engine: Any, left: list[BaseException]) -> None:
    """Leave transactions to SQLAlchemy: Python's sqlite3 begins them late, and without the write lock.

    Args:
        left: takes what a signal's handler raises while SQLite is at work.
    """

    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        looks = _looks(left)
        next(looks)
        connection.set_progress_handler(looks.__next__, _TURN)
        # Other software may have left another mode, which needs the file that `_require_own_files` refuses.
        with contextlib.suppress(sqlite3.OperationalError):  # this user may only read
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # a replica: losing the last second is no loss

    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begin)


def _looks(left: list[BaseException]) -> Iterator[int]:
    """Let Python call the handlers of signals at each turn of a statement; Ctrl-C would wait for its end.

    SQLite forgets what is raised below it.  So an exception is kept here: Python calls a handler where a
    generator goes on, inside the `try`.  A value other than 0 ends the statement.
    """
    answer = 0
    while True:
        try:
            yield answer
            answer = 0
        except GeneratorExit:
            raise
        except BaseException as error:
            left.append(error)
            answer = 1


def _fill(connection: Connection) -> None:
    metadata.create_all(connection)
    connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")


def _create(path: Path) -> None:
    """Make the file under another name and rename it, so that no process sees it half made.

    (SQLite's waiting does not cover turning on WAL: several processes at once would fail.)
    """
    # Nobody can foresee the name, and so put other files of a database beside it.
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        engine = _engine(beside, 30.0, "rwc")  # no other process uses this name
        _listen(engine, [])
        with engine.connect() as connection:
            _fill(connection)
            connection.commit()
        _name(beside, path)
    finally:
        for end in _FILES:
            path.with_name(beside.name + end).unlink(missing_ok=True)


def _name(beside: Path, path: Path) -> None:
    """Give the file its name, unless another process was first."""
    try:
        os.link(beside, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            os.rename(beside, path)
