"""Index in a database: its transactions, its version, and errors with remedies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from everstep.errors import RunIndexError
from everstep.index.location import Location
from everstep.index.sql_tables import VERSION
from everstep.index.sqlite import SQLite
from everstep.index.stored_json import UnknownContentError

BUSY_SECONDS = 30.0
"""Seconds that a command that writes waits for another writer."""


class Database:
    """Index in a database, made at the first use, and migrated to this version of its tables.

    Args:
        place: a file, the URL of a PostgreSQL database, or None for an index in memory.
        patience: seconds that a writer waits for another writer, 0 or more.

    Attributes:
        place: as given.
        name: the place for messages, without a password.
        shared: whether the index may have other machines' runs.

    Raises:
        ConfigError: the URL cannot be read.
        RunIndexError: the database needs a package that is not installed.
    """

    def __init__(self, place: Location | None, patience: float = BUSY_SECONDS) -> None:
        self.place = place
        if isinstance(place, str):
            from everstep.index.postgres import PostgreSQL

            self._home: PostgreSQL | SQLite = PostgreSQL(place, patience)
        else:
            self._home = SQLite(place, patience)
        self.name, self.shared = self._home.name, self._home.shared

    def exists(self) -> bool:
        """Whether there is an index to read; PostgreSQL's tables are made at the first use."""
        return self._home.exists()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads.

        Raises:
            RunIndexError: there is no index, or it cannot be read.
        """
        if not self.exists():
            raise RunIndexError(f"there is no index {self.name}; run everstep sync to make it")
        with self._explained():
            with self._home.transaction(writes=False) as connection:
                if self._version(connection) == VERSION:
                    yield connection
                    return
            with self.write():
                pass  # entering is enough: the tables are made, or migrated
            with self._home.transaction(writes=False) as connection:
                yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that writes; after `claim`, no other process writes the same run meanwhile.

        Raises:
            RunIndexError: the index cannot be written.
            IndexBusyError: another process has been writing for longer than `patience`.
            UnwritableIndexError: this user may not write the index.
            MalformedIndexError: (reading, too) the file was damaged, and is set aside.
        """
        with self._explained(), self._home.transaction(writes=True) as connection:
            if self._version(connection) != VERSION:
                self._bring_up(connection)
            yield connection

    def claim(self, connection: Connection, run: str) -> None:
        """Lock the run of this name until the writing transaction ends."""
        self._home.claim(connection, run)

    def confine(self, run_dir: Path) -> bool:
        """Take the index from readers who may not read a run; False if that cannot be done, or must not."""
        return self._home.confine(run_dir)

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep the connection open for many transactions in a row."""
        if not self.exists():
            with self.write():
                pass
        with self._explained(), self._home.kept_open():
            yield

    def watch(self, runs: frozenset[str]) -> None:
        """Tell the trainings of these runs on other machines that somebody looks at them, and no others.

        They are told as long as the connection is kept open, so `kept_open` has to be entered.  Call it again
        and again: what cannot be told at once is told by a later call.

        Args:
            runs: names of runs.
        """
        with self._explained():
            self._home.watch(runs)

    def is_watched(self, run: str) -> bool:
        """Whether somebody on any machine looks at the run of this name."""
        with self._explained():
            return self._home.is_watched(run)

    def distrusted(self, why: str) -> RunIndexError:
        """Return the error for impossible contents; a file is set aside."""
        return self._home.distrusted(why)

    def interrupt(self) -> None:
        """Let an operation that another thread waits for fail now."""
        self._home.interrupt()

    def _version(self, connection: Connection) -> int | None:
        found = self._home.version(connection)
        if found is not None and found > VERSION:
            raise RunIndexError(
                f"{self.name} has index format {found}, this everstep has {VERSION}; upgrade everstep, or "
                "give another index: everstep sync makes it from the journals"
            )
        return found

    def _bring_up(self, connection: Connection) -> None:
        """Make the tables, or migrate them, unless another process just did."""
        home = self._home
        if not isinstance(home, SQLite):
            home.create(connection)
        found = self._version(connection)
        if found is not None and found < VERSION:
            from everstep.index.migrations import migrate

            migrate(connection, found)
            home.set_version(connection)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, *self._home.faults) as error:
            raise self._home.fault(getattr(error, "orig", error)) from error
        except UnknownContentError as error:
            raise self._home.distrusted(str(error)) from error
