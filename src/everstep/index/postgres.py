"""Index in a PostgreSQL database that machines share; its server may go away at any time."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import URL, Connection, Integer, create_engine, event, func, literal, make_url, select, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from everstep.errors import ConfigError, RunIndexError
from everstep.index.index_errors import IndexBusyError, RefusedError, UnwritableIndexError
from everstep.index.location import lacks_credential
from everstep.index.sql_tables import VERSION, is_label, labels, metadata
from everstep.redaction import without_credentials

OLDEST = 15
"""Oldest major version of a server that can be used."""

_SCHEMA = "everstep"
_MAKING = 0x6576657273746570
"""Advisory lock under which the tables are made; the locks of runs are hashes of their names."""
_WATCHING = 0x65767374
"""First half of the advisory locks of runs that somebody looks at; the second half is a hash of the name."""

labels.dialect_options["postgresql"]["where"] = is_label


class PostgreSQL:
    """Index in a PostgreSQL database.

    Each use makes a connection, unless `kept_open` keeps one, as a training and the page do.  A writer claims
    its run, so that other writers wait only if they ship the same run.

    Whoever looks at a run holds a shared advisory lock in the session of the kept connection.  Such a lock
    needs no table and no right to write, and it is gone when the connection is, however it ends.

    Args:
        url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with libpq's options after "?".
        patience: seconds that a writer waits for another writer of the same run, and for a connection (at
            least 2, at most 10).

    Raises:
        ConfigError: `url` is not a URL.
        RunIndexError: psycopg is not installed.
    """

    shared = True

    def __init__(self, url: str, patience: float) -> None:
        if find_spec("psycopg") is None:
            raise RunIndexError(
                "an index in PostgreSQL needs psycopg, which is not installed: pip install "
                "'everstep[postgres]'"
            )
        from psycopg import Error

        self.faults = (Error,)
        address, self._patience = _parsed(url), patience
        self.name = _shown(address)
        self._engine = create_engine(
            address,
            poolclass=NullPool,
            connect_args={
                "connect_timeout": math.ceil(min(max(patience, 2), 10)),
                "prepare_threshold": None,  # a pooler before the server would mix prepared statements up
                "client_encoding": "utf8",
            },
        )
        event.listen(self._engine, "connect", self._connected)
        self._kept: Connection | None = None
        self._watched: frozenset[str] = frozenset()
        """Runs for which the kept connection holds a lock."""
        self._lock = threading.Lock()
        self._driver: Any = None
        self._interrupted = False

    def exists(self) -> bool:
        """Return True: the first to use the database makes the tables."""
        return True

    @contextlib.contextmanager
    def transaction(self, writes: bool) -> Iterator[Connection]:
        """Open a transaction; a reading transaction sees the database as it is at one instant."""
        with contextlib.ExitStack() as stack:
            connection = self._kept or stack.enter_context(self._connection())
            with connection.begin():
                mode = "READ COMMITTED" if writes else "REPEATABLE READ, READ ONLY"
                wait = max(1, round(self._patience * 800))  # ms, 0.8 of patience: the fault is said in time
                connection.exec_driver_sql(
                    f"SET TRANSACTION ISOLATION LEVEL {mode}; SET LOCAL search_path = {_SCHEMA}; "
                    f"SET LOCAL lock_timeout = {wait}"
                )
                yield connection

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep a connection for all transactions in the block."""
        with self._connection() as self._kept:
            try:
                yield
            finally:
                self._kept, self._watched = None, frozenset()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        """Open a connection that `interrupt` can reach as long as it is in use."""
        try:
            with self._engine.connect() as connection:
                try:
                    yield connection
                finally:
                    with self._lock:
                        self._driver = None
        finally:
            self._driver = None

    def _connected(self, driver: Any, _record: Any) -> None:
        with self._lock:
            self._driver = driver
        if self._interrupted:
            self.interrupt()

    def interrupt(self) -> None:
        """Let an operation that another thread waits for fail now, and all later ones."""
        with self._lock:
            self._interrupted = True
            if self._driver is not None and not self._driver.closed:
                with (
                    socket.socket(fileno=os.dup(self._driver.fileno())) as line,
                    contextlib.suppress(OSError),
                ):
                    line.shutdown(socket.SHUT_RDWR)

    def claim(self, connection: Connection, run: str) -> None:
        """Wait until no other process ships this run, and claim it until the transaction ends."""
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(run, 0))))

    def watch(self, runs: frozenset[str]) -> None:
        """Hold the locks of these runs, and no others, in the kept connection.

        It waits for nobody: a lock that another session has alone, as a training that is just asking, is
        tried again by the next call.
        """
        assert self._kept is not None, "enter kept_open() first"
        if runs != self._watched:
            with self._kept.begin():
                for run in runs - self._watched:
                    if self._kept.execute(select(func.pg_try_advisory_lock_shared(*_lock_of(run)))).scalar():
                        self._watched |= {run}
                for run in self._watched - runs:
                    self._kept.execute(select(func.pg_advisory_unlock_shared(*_lock_of(run))))
                    self._watched -= {run}

    def is_watched(self, run: str) -> bool:
        """Whether somebody holds the lock of this run."""
        with self.transaction(writes=False) as connection:
            return not connection.execute(select(func.pg_try_advisory_xact_lock(*_lock_of(run)))).scalar()

    def version(self, connection: Connection) -> int | None:
        """Return the version of the schema; None if there is no schema yet."""
        # The catalog is read as it is now: to_regclass() may answer from before the wait for a lock.
        found = text(
            "SELECT 1 FROM pg_catalog.pg_tables WHERE (schemaname, tablename) = (:schema, 'version')"
        )
        if connection.execute(found, {"schema": _SCHEMA}).scalar() is None:
            return None
        return int(connection.execute(text(f"SELECT number FROM {_SCHEMA}.version")).scalar_one())

    def set_version(self, connection: Connection) -> None:
        """Note that the schema has version `VERSION` now."""
        connection.execute(text("UPDATE version SET number = :number"), {"number": VERSION})

    def create(self, connection: Connection) -> None:
        """Make the tables, unless another process just did.

        Raises:
            RunIndexError: the server is too old, or the database's encoding is not UTF-8.
        """
        server = int(connection.execute(text("SHOW server_version_num")).scalar_one()) // 10_000
        if server < OLDEST:
            raise RunIndexError(f"{self.name} is PostgreSQL {server}; give a server of {OLDEST} or newer")
        encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
        if encoding != "UTF8":
            raise RunIndexError(f"{self.name} has the encoding {encoding}; give a database with UTF8")
        # Locked before the version is read again: another process may be making the tables.
        connection.execute(select(func.pg_advisory_xact_lock(_MAKING)))
        if self.version(connection) is None:
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {_SCHEMA}"))
            metadata.create_all(connection)
            connection.execute(text("CREATE TABLE version (number integer NOT NULL)"))
            connection.execute(text("INSERT INTO version VALUES (:number)"), {"number": VERSION})

    def fault(self, error: object) -> RunIndexError:
        """Translate an error of the driver."""
        from psycopg import DataError, IntegrityError
        from psycopg.errors import ProgramLimitExceeded

        if isinstance(error, DataError | IntegrityError | ProgramLimitExceeded):
            return RefusedError(f"the index {self.name} does not take it ({error})")
        state = getattr(error, "sqlstate", None)
        if state == "55P03":  # lock_not_available
            return IndexBusyError(
                f"the index {self.name} is being written by another process for more than "
                f"{self._patience:g} s; run everstep sync later"
            )
        said = without_credentials(" ".join(str(error).split()))
        if state in ("42501", "25006"):  # insufficient_privilege, read_only_sql_transaction
            return UnwritableIndexError(
                f"this user may not write the index {self.name} ({said}); whoever may brings it up to date "
                "with everstep sync"
            )
        said = "it did not answer in time" if self._interrupted else said
        return RunIndexError(
            f"the index {self.name} cannot be used ({said}); check the server, and then run everstep sync: "
            "it brings the index up to what the journals say"
        )

    def confine(self, run_dir: Path) -> bool:
        """Return False: the database decides who reads."""
        return False

    def distrusted(self, why: str) -> RunIndexError:
        """Return the error for impossible contents."""
        return RunIndexError(
            f"the index {self.name} cannot be right ({why}); drop its schema {_SCHEMA} and run everstep "
            "sync: it is made again from the journals"
        )


def _lock_of(run: str) -> tuple[Any, Any]:
    return literal(_WATCHING, Integer), func.hashtext(run)


def _parsed(url: str) -> URL:
    if lacks_credential(url):
        raise ConfigError(
            f"{url} is an index's URL as a run has recorded it, without the password; give the URL with it, "
            "by --index or EVERSTEP_INDEX"
        )
    try:
        address = make_url(_quoted(url))
    except (ArgumentError, ValueError):
        raise ConfigError(
            "the index's URL cannot be read (it is not shown: it may hold a password); give "
            "postgresql://USER@HOST/DATABASE"
        ) from None
    return address.set(drivername="postgresql+psycopg")


def _quoted(url: str) -> str:
    """Encode an "@" in the password of a URL: a person may have written the password as it is."""
    scheme, _, rest = url.partition("://")
    area = rest.partition("?")[0]
    if area.count("@") < 2:
        return url
    info = area[: area.rindex("@")]
    user, _, password = info.partition(":")
    return f"{scheme}://{user}:{quote(unquote(password), safe='')}{rest[len(info) :]}"


def _shown(address: URL) -> str:
    """Return the URL without password and options."""
    host = address.query.get("host", "") if address.host is None else address.host
    port = f":{address.port}" if address.port else ""
    return f"postgresql://{host if isinstance(host, str) else ','.join(host)}{port}/{address.database or ''}"
