"""The index's file: made whole or not at all, read and written by many processes at once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, StaticPool

from everstep.errors import EverstepError, RunIndexError
from everstep.index.schema import VERSION, metadata

BUSY_SECONDS = 30.0
"""How long a command that writes waits for another writer."""


class Database:
    """One index.  Opens the file for each use and keeps nothing open between them.

    Readers wait for nobody (WAL).  A writer takes the write lock at its beginning (BEGIN IMMEDIATE):
    what it reads holds until it commits, and waiting for the lock never fails half way.

    Args:
        path: the file, made with the first use; None for an index in memory.
        patience: seconds that a writer waits for another one, 0 or more.
    """

    def __init__(self, path: Path | None, patience: float = BUSY_SECONDS) -> None:
        self.path, self.patience = path, patience
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
                metadata.create_all(connection)

    def exists(self) -> bool:
        """Whether there is an index; an empty file is none."""
        return self.path is None or (self.path.exists() and self.path.stat().st_size > 0)

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads.

        Raises:
            RunIndexError: there is no index, or it cannot be read.
        """
        if not self.exists():
            raise RunIndexError(f"there is no index {self.path}; run everstep sync to make it")
        with self._explained(), self._engine.begin() as connection:
            self._check(connection)
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that nobody else's writing comes between.

        Raises:
            RunIndexError: it cannot be written.
            IndexBusyError: another process has been writing for longer than `patience`.
        """
        with self._explained():
            if self.path is not None and not self.exists():
                _create(self.path)
            with self._writer.begin() as connection:
                self._check(connection)
                yield connection

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """For many transactions in a row: with the last connection SQLite closes and tidies up the file."""
        if not self.exists():
            with self.write():
                pass
        with self._explained(), self._engine.connect() as connection:
            self._check(connection)
            connection.rollback()
            yield

    def _check(self, connection: Connection) -> None:
        if self.path is None:
            return
        found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if found != VERSION:
            raise RunIndexError(
                f"{self.path} has index format {found}, this everstep has {VERSION}; move it away and run "
                "everstep sync: it is made again from the journals"
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if _is_busy(error):
                raise IndexBusyError(
                    f"the index {self.path} is being written by another process for more than "
                    f"{self.patience:g} s; run everstep sync later"
                ) from error
            raise RunIndexError(
                f"the index {self.path} cannot be used ({error.orig}); if it stays so, move it away and run "
                "everstep sync: it is made again from the journals"
            ) from error
        except EverstepError:
            raise
        except OSError as error:
            raise RunIndexError(
                error.errno, f"the index cannot be used: {error.strerror}; see to the disk", str(self.path)
            ) from error


class IndexBusyError(RunIndexError):
    """Another process is writing; nothing is lost, later is early enough."""


def _engine(path: Path, patience: float) -> Any:
    return create_engine(
        f"sqlite:///{path}", poolclass=NullPool, connect_args={"timeout": patience, "uri": False}
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


def _is_busy(error: DBAPIError) -> bool:
    return str(getattr(error.orig, "sqlite_errorname", "")).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _create(path: Path) -> None:
    """Make the file beside its place and give it its name, so that nobody sees it half made.

    (Turning on WAL is what SQLite's waiting does not cover: several processes at once would fail.)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    beside.unlink(missing_ok=True)
    try:
        engine = _engine(beside, BUSY_SECONDS)  # nobody else has it
        _listen(engine)
        with engine.connect() as connection:
            connection.connection.driver_connection.execute("PRAGMA journal_mode = WAL")
            metadata.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")
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
