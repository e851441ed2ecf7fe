"""Index in a database: SQLite or PostgreSQL by one path, its transactions, and errors with remedies."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sqlite3
import stat
import tempfile
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, func, make_url, select, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from everstep.errors import ConfigError, EverstepError, RunIndexError, to_install
from everstep.index import IndexBusyError, RefusedError, UnwritableIndexError
from everstep.index.location import FILE, Location, lacks_credential
from everstep.index.sql_tables import VERSION, VIEWS, UnknownContentError, metadata
from everstep.redaction import without_credentials

BUSY_SECONDS = 30.0
"""Seconds that a command that writes waits for another writer."""
SCHEMA = f"everstep_{VERSION}"
"""Schema of the tables in PostgreSQL."""
_MAKING = 0x6576657273746570  # advisory lock; the locks of runs are hashes of their names
_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY_DBMOVED", "55P03")  # lock_not_available
_MALFORMED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")
"""Errors of a damaged file; rows are shipped once, so a row that exists is of another database's pages."""


class Database:
    """Index in a database, made when it is first written.

    Tables of another version stay as they are: this version's lie in a file, or a schema, beside them.

    Args:
        place: a file, the URL of a PostgreSQL database, or None for a file that is deleted with this object.
        patience: seconds that a writer waits for another writer, 0 or more.

    Attributes:
        name: the place for messages, without a password.
        shared: whether the index may have other machines' runs: it is not a file.
    """

    def __init__(self, place: Location | None, patience: float = BUSY_SECONDS) -> None:
        self.shared, self._patience = isinstance(place, str), patience
        if isinstance(place, str):
            address = _parse_url(place)
            self.place: Location = place
            host = address.query.get("host", "") if address.host is None else address.host
            hosts = host if isinstance(host, str) else ",".join(host)
            port = f":{address.port}" if address.port else ""
            self.name = f"postgresql://{hosts}{port}/{address.database or ''}"
            self._engine = _postgres(address, patience)
            weakref.finalize(self, self._engine.dispose)
        else:
            if place is None:
                place = Path(tempfile.mkdtemp(prefix="everstep-index-")) / FILE
                weakref.finalize(self, shutil.rmtree, place.parent, ignore_errors=True)
            if _version_of(place) not in (0, VERSION):
                place = place.with_name(f"{place.stem}-{VERSION}{place.suffix}")
            self.place = self._file = place
            self.name = str(place)
            self._engine = _sqlite(place, patience)

    def exists(self) -> bool:
        """Whether there is an index: no empty file is one, and PostgreSQL's tables are made when used."""
        if self.shared:
            return True
        try:
            status = os.stat(self._file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if not stat.S_ISREG(status.st_mode):
            raise RunIndexError(f"{self.name} is not a file, so it cannot be an index; give another path")
        return status.st_size > 0

    def is_private(self) -> bool:
        """Whether nobody else may read the index: a file as everstep makes it, or one that is not there."""
        if self.shared or not self.exists():
            return not self.shared
        status = os.stat(self._file)
        return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads the database as it is at one instant."""
        if not self.exists():
            raise RunIndexError(f"there is no index {self.name}; run everstep sync to make it")
        with self._explain_errors():
            with self._transaction(writes=False) as connection:
                if self._has_tables(connection):
                    yield connection
                    return
            with self.write():
                pass
            with self._transaction(writes=False) as connection:
                yield connection

    @contextlib.contextmanager
    def write(self, run: str | None = None) -> Iterator[Connection]:
        """Open a transaction that writes; no other process writes `run` (a name) meanwhile."""
        with self._explain_errors():
            if not self.exists():
                self._make_file()
            with self._transaction(writes=True) as connection:
                if not self._has_tables(connection):
                    self._make_tables(connection)
                if self.shared and run is not None:
                    connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(run, 0))))
                yield connection

    @contextlib.contextmanager
    def _transaction(self, writes: bool) -> Iterator[Connection]:
        with self._engine.connect() as connection, connection.begin():
            for statement in self._opening(writes):
                connection.exec_driver_sql(statement)
            yield connection

    def _opening(self, writes: bool) -> tuple[str, ...]:
        """Return the statements with which a transaction begins: in SQLite a writer locks at once."""
        if not self.shared:
            return f"PRAGMA query_only = {int(not writes)}", "BEGIN IMMEDIATE" if writes else "BEGIN"
        mode = "READ COMMITTED" if writes else "REPEATABLE READ, READ ONLY"
        wait = max(1, round(self._patience * 800))  # ms, 0.8 of the patience: the fault is said in time
        return (
            f"SET TRANSACTION ISOLATION LEVEL {mode}; SET LOCAL search_path = {SCHEMA}; "
            f"SET LOCAL lock_timeout = {wait}",
        )

    def _has_tables(self, connection: Connection) -> bool:
        if self.shared:
            # The catalog is read as it is now: to_regclass() may answer from before the wait for a lock.
            query = text("SELECT 1 FROM pg_catalog.pg_tables WHERE (schemaname, tablename) = (:at, 'runs')")
            return connection.execute(query, {"at": SCHEMA}).scalar() is not None
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        tables = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one()
        if version != VERSION and (version or tables):
            raise self._malformed_error(f"index format {version}")
        return bool(version == VERSION)

    def _make_file(self) -> None:
        """Make a file without tables, in WAL mode: to change the mode SQLite writes a rollback journal."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # which nobody else can read: it gets the values of private runs.  And which is whole at once: in
            # an empty one another process would change the mode
            with tempfile.NamedTemporaryFile(dir=self._file.parent, prefix=f"{self._file.name}.") as file:
                with contextlib.closing(sqlite3.connect(file.name)) as empty:
                    empty.execute("PRAGMA journal_mode = WAL")
                try:
                    os.link(file.name, self._file)
                except FileExistsError:
                    raise
                except OSError:  # a file system without hard links
                    with open(os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
                        out.write(file.read())
        except FileExistsError:
            return  # another process was first
        except OSError as error:
            message = f"the index {self.name} cannot be made: {error.strerror}; check the disk"
            raise UnwritableIndexError(message) from error

    def _make_tables(self, connection: Connection) -> None:
        if self.shared:
            connection.execute(select(func.pg_advisory_xact_lock(_MAKING)))
            if self._has_tables(connection):
                return
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        metadata.create_all(connection)
        for view in VIEWS:
            connection.exec_driver_sql(view)
        if not self.shared:
            connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, sqlite3.Error) as error:
            raise self._fault(error) from error
        except UnknownContentError as error:
            raise self._malformed_error(str(error)) from error

    def _fault(self, error: Exception) -> EverstepError:
        driver = getattr(error, "orig", error)
        code = str(getattr(driver, "sqlite_errorname", None) or getattr(driver, "sqlstate", None) or "")
        message = without_credentials(" ".join(str(driver).split()))
        if code.startswith(_MALFORMED) or (not self.shared and message.startswith("no such ")):
            return self._malformed_error(message)
        if isinstance(error, DataError | IntegrityError) or code == "54000":  # program_limit_exceeded
            return RefusedError(f"the index {self.name} does not take a value of the run ({message})")
        if code.startswith(_BUSY):
            problem = f"another process writes the index {self.name}, or has moved it ({message})"
            return IndexBusyError(f"{problem}; run everstep sync later")
        remedy = "the server" if self.shared else "the disk"
        problem = f"the index {self.name} cannot be used ({message})"
        return UnwritableIndexError(f"{problem}; check {remedy} and your rights there, and run everstep sync")

    def _malformed_error(self, reason: str) -> RunIndexError:
        remove = f"drop its schema {SCHEMA}" if self.shared else "delete it (or move it away, if it is yours)"
        problem = f"the index {self.name} is malformed, or not one of everstep's ({reason})"
        return RunIndexError(f"{problem}; {remove} and run everstep sync: the journals have it all")


def _sqlite(path: Path, patience: float) -> Engine:
    """Make an engine for a file, which is opened for each use."""
    address = f"file:{quote(os.fsencode(path))}?mode=rw"

    def connect() -> sqlite3.Connection:
        _require_own_files(path)
        connection = sqlite3.connect(
            address, uri=True, timeout=patience, isolation_level=None, check_same_thread=False
        )
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(connection.close)
            # other software may have left another mode, which needs a file that `_require_own_files` refuses
            try:  # to its end: else it may stay open beside other processes, and SQLAlchemy's functions fail
                connection.execute("PRAGMA journal_mode = WAL").fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname.startswith("SQLITE_BUSY"):  # else this user may only read
                    raise
            connection.execute("PRAGMA synchronous = NORMAL")  # a replica: losing the last second is no loss
            if_it_fails.pop_all()
        return connection

    return create_engine("sqlite://", creator=connect, poolclass=NullPool)


def _require_own_files(path: Path) -> None:
    """Refuse files beside the index that everstep does not make: SQLite acts on what they say."""
    index = os.path.realpath(path)  # SQLite looks beside the file, not beside a link to the file
    for end in ("-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):  # the last connection of another process deletes them
            if not stat.S_ISREG(os.lstat(index + end).st_mode) or end == "-journal":
                raise UnwritableIndexError(
                    f"the index {path} is not opened: {index}{end} is not of everstep, and SQLite acts on "
                    "it. Move both files away and run everstep sync: the journals have it all"
                )


def _version_of(path: Path) -> int:
    """Read the version of the tables from a file's header; 0 for what is not an index."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return 0
        # by SQLite: who else opens and closes the file gives back the locks of this process's connections
        header = sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=ro&immutable=1", uri=True)
        with contextlib.closing(header):
            return int(header.execute("PRAGMA user_version").fetchone()[0])
    except (OSError, sqlite3.Error):
        return 0


def _postgres(address: URL, patience: float) -> Engine:
    """Make an engine that keeps connections; a lock is waited for `patience`, a server 2 to 10 s."""
    if find_spec("psycopg") is None:
        raise RunIndexError(f"an index in PostgreSQL needs psycopg: {to_install('postgres')}")
    return create_engine(
        address,
        pool_pre_ping=True,  # a server may have been away meanwhile
        paramstyle="format",
        connect_args={
            "connect_timeout": math.ceil(min(max(patience, 2), 10)),
            "prepare_threshold": None,  # a pooler before the server would mix prepared statements up
            "client_encoding": "utf8",
        },
    )


def _parse_url(url: str) -> URL:
    if lacks_credential(url):
        raise ConfigError(
            f"{url} is an index's URL as a run has recorded it, without the password; give it by --index"
        )
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):
        address = None
    if address is None or "@" in (address.host or ""):  # of a password that is not encoded
        raise ConfigError(
            "the index's URL cannot be read (it is not shown: it may hold a password); give "
            "postgresql://USER@HOST/DATABASE, with %40 for an @ in a password"
        )
    return address.set(drivername="postgresql+psycopg")
