"""An index in a SQLite file: made whole or not at all, read and written by many processes at once."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event
from sqlalchemy.pool import NullPool, StaticPool

from everstep.errors import RunIndexError
from everstep.index.schema import VERSION, metadata


class SQLite:
    """Opens the file for each use and keeps nothing open between them.

    Readers wait for nobody (WAL).  A writer takes the write lock at its beginning (BEGIN IMMEDIATE):
    what it reads holds until it commits, and waiting for the lock never fails half way.
    """

    shared = False
    """Whether machines share it; in a file each run's directory is taken to be one of this machine."""

    faults = (sqlite3.Error,)

    def __init__(self, path: Path | None, patience: float) -> None:
        self._path, self._patience = path, patience
        self._driver: sqlite3.Connection | None = None
        self.name = "in memory" if path is None else str(path)
        if path is None:
            self._engine = create_engine(
                "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
            )
        else:
            self._engine = _engine(path, patience)
        _listen(self._engine)
        self._writer = self._engine.execution_options(writes=True)
        if path is None:
            with self._writer.begin() as connection:
                _fill(connection)

    def exists(self) -> bool:
        """Whether there is an index; an empty file is none."""
        return self._path is None or (self._path.exists() and self._path.stat().st_size > 0)

    @contextlib.contextmanager
    def transaction(self, writes: bool) -> Iterator[Connection]:
        """A transaction; one that writes makes the file if there is none."""
        if writes and self._path is not None:
            try:
                if not self.exists():
                    _create(self._path)
            except OSError as error:
                raise RunIndexError(
                    error.errno, f"the index cannot be made: {error.strerror}; see to the disk", self.name
                ) from error
        with (self._writer if writes else self._engine).begin() as connection:
            self._driver = connection.connection.driver_connection
            yield connection

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """With the last connection SQLite closes and tidies up the file."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA user_version")
            connection.rollback()
            yield

    def claim(self, connection: Connection, run: str) -> None:
        """Nothing: one process writes at a time."""

    def version(self, connection: Connection) -> int:
        """The version of its schema.

        Raises:
            RunIndexError: it is another program's database.
        """
        found = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
        if not found:
            raise RunIndexError(
                f"{self.name} has index format 0: it is no index of everstep; move it away and run everstep "
                "sync: one is made from the journals"
            )
        return found

    def set_version(self, connection: Connection) -> None:
        """Note that the schema is that of `VERSION` now."""
        connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")

    def refuses(self, error: object) -> bool:
        """Whether an error is about what was to be written, not about the index."""
        return isinstance(error, sqlite3.DataError | sqlite3.IntegrityError)

    def fault(self, error: object) -> tuple[bool, str]:
        """Whether an error says that another process is writing, and what to say of it."""
        if str(getattr(error, "sqlite_errorname", "")).startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return True, (
                f"the index {self.name} is being written by another process for more than "
                f"{self._patience:g} s; run everstep sync later"
            )
        if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
            return (
                False,
                f"writing the index {self.name} took too long; run everstep sync, which writes it all",
            )
        return False, (
            f"the index {self.name} cannot be used ({error}); if it stays so, move it away and run "
            "everstep sync: it is made again from the journals"
        )

    def interrupt(self) -> None:
        """Let what another thread does fail now."""
        if self._driver is not None:
            with contextlib.suppress(sqlite3.ProgrammingError):  # it is closed
                self._driver.interrupt()


def _engine(path: Path, patience: float) -> Any:
    return create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=NullPool,
        connect_args={"timeout": patience, "uri": False},
    )


def _listen(engine: Any) -> None:
    """Leave transactions to SQLAlchemy: Python's sqlite3 begins them late, and without the write lock."""

    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA synchronous = NORMAL")  # a replica: losing the last second is no loss

    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begin)


def _fill(connection: Connection) -> None:
    metadata.create_all(connection)
    connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")


def _create(path: Path) -> None:
    """Make the file beside its place and give it its name, so that nobody sees it half made.

    (Turning on WAL is what SQLite's waiting does not cover: several processes at once would fail.)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    beside.unlink(missing_ok=True)
    try:
        engine = _engine(beside, 30.0)  # nobody else has it
        _listen(engine)
        with engine.connect() as connection:
            connection.connection.driver_connection.execute("PRAGMA journal_mode = WAL")
            _fill(connection)
            connection.commit()
        if path.exists() and not path.stat().st_size:
            path.unlink(missing_ok=True)
        _name(beside, path)
    finally:
        for name in (beside.name, f"{beside.name}-wal", f"{beside.name}-shm"):
            path.with_name(name).unlink(missing_ok=True)


def _name(beside: Path, path: Path) -> None:
    """Give the file its name, unless another process was first."""
    try:
        os.link(beside, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            os.rename(beside, path)
