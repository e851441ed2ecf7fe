"""The index beside a training: up to date while it runs, and no harm to it whatever becomes of the index."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from index_runs import all_runs, everything, index_rows, journal_rows, start, train
from sqlalchemy import make_url

import everstep
from everstep.index import shipping_thread
from everstep.index.database import SCHEMA, Database
from everstep.index.location import Location
from everstep.index.shipping import sync
from postgres_server import Server, running_server
from tiny_runs import Tiny
from waiting import left_open, until


def statuses(database: Database) -> dict[str, str]:
    return {Path(run["path"]).name: run["status"] for run in all_runs(database)}


@pytest.mark.campaign("long")
def test_eight_processes_train_into_one_index(tmp_path: Path, place: Location) -> None:
    """With shipping all the time: every row is there, none twice, and nobody hears of a lock."""
    always = {"TEST_SECONDS": "0.01", "EVERSTEP_INDEX": str(place)}
    victims = [start(tmp_path / f"run{n}", 12, **always) for n in range(8)]
    for victim in victims:
        output, errors = victim.communicate()
        assert victim.returncode == 0
        assert not errors and "warning" not in output
    database = Database(place)
    for n in range(8):
        assert index_rows(database, f"run{n}") == journal_rows(tmp_path / f"run{n}")
        assert len(index_rows(database, f"run{n}")) == 12 * 6
    assert sync(database, [tmp_path]).rows == 0
    sync(Database(tmp_path / "again.db"), [tmp_path])
    assert everything(tmp_path / "again.db") == everything(place)


def test_of_two_that_make_an_index_neither_sees_an_empty_file(tmp_path: Path, monkeypatch: Any) -> None:
    place, link, made = tmp_path / "everstep.db", os.link, list[Path]()

    def first(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        assert not place.exists() and Path(source).read_bytes().startswith(b"SQLite format 3\0")
        with Database(place).write():
            made.append(place)
        link(source, target)

    monkeypatch.setattr(os, "link", first)
    with Database(place).write():
        assert made == [place]
    assert [*tmp_path.iterdir()] == [place]


def test_an_index_is_made_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(source: str, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with Database(tmp_path / "everstep.db").write():
        assert (tmp_path / "everstep.db").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["everstep.db"]


def test_a_second_database_in_the_process_takes_no_lock_from_the_first(tmp_path: Path) -> None:
    """Where a process closes a file, its locks are given back: others would take the index for closed."""
    place = tmp_path / "everstep.db"
    lock = "fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002"  # the bytes of SQLite's shared lock
    take = [sys.executable, "-c", f"import fcntl; fcntl.lockf(open({str(place)!r}, 'r+'), {lock})"]
    with Database(place).write():
        Database(place)
        done = subprocess.run(take, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in done.stderr
    assert not subprocess.run(take, check=True, capture_output=True).stderr


def test_a_server_has_new_rows_before_a_heartbeat_by_one_connection(server, tmp_path, monkeypatch) -> None:
    """Each step waits until another machine sees the one before the last; a heartbeat comes in a day."""
    monkeypatch.setattr(shipping_thread, "SECONDS", 86_400.0)
    monkeypatch.setattr(shipping_thread, "PAUSE", 0.01)
    monkeypatch.setenv("EVERSTEP_INDEX", url := server.database())
    seen, clients = list[int](), set[int]()
    with psycopg.connect(url, autocommit=True) as connection:

        def answer(question: str) -> list[Any]:
            return [row[0] for row in connection.execute(question)]  # type: ignore[arg-type]

        def has(step: int) -> bool:
            there = answer(f"SELECT to_regclass('{SCHEMA}.metrics')::text")[0]
            return there is not None and (answer(f"SELECT max(step) FROM {there}")[0] or 0) >= step

        def inside(loop: Any, step: int) -> None:
            loop.make_checkpoint()
            if step > 2:
                until(lambda: has(step - 2))
                seen.append(step)
                asked = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                clients.update(answer(f"SELECT pid {asked} AND backend_type = 'client backend'"))

        Tiny(tmp_path / "run", max_epoch=2).train(inside)
    assert seen == [*range(3, 9)] and len(clients) == 1
    assert index_rows(Database(url), "run") == journal_rows(tmp_path / "run")


def test_a_run_is_running_until_it_is_killed_and_its_rows_are_there_meanwhile(tmp_path: Path) -> None:
    victim = start(tmp_path / "run", 4, 6, "wait", TEST_SECONDS="0.01")
    assert "waiting\n" in iter(victim.stdout.readline, "")
    database = Database(tmp_path / "everstep.db")
    until(lambda: (tmp_path / "everstep.db").exists() and statuses(database))
    assert statuses(database) == {"run": "running"}
    sync(database, [tmp_path])
    assert statuses(database) == {"run": "running"}
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    sync(database, [])  # wherever it lies
    assert statuses(database) == {"run": "killed"}
    assert index_rows(database, "run") == journal_rows(tmp_path / "run")
    assert train(tmp_path / "run", 4) == 0 and statuses(database) == {"run": "finished"}


AWAY = "postgresql://me:secret@/db?host={}&sslpassword=secret", "the index postgresql://{}/db cannot"


@pytest.mark.parametrize(("index", "said"), [("{}/broken.db", "the index {}"), AWAY])
def test_a_broken_index_costs_one_line(tmp_path: Path, monkeypatch: Any, index: str, said: str) -> None:
    """A file that is none, and a server that was never there, whose password is not shown."""
    straight = Tiny(tmp_path / "a" / "run", max_epoch=2).train().result()
    (tmp_path / "broken.db").write_text("no database" * 1000)
    monkeypatch.setenv("EVERSTEP_INDEX", index.format(tmp_path))
    broken = Tiny(tmp_path / "b" / "run", max_epoch=2).train()
    assert broken.result() == straight
    (line,) = [line for line in broken.lines if "index" in line]
    assert line.startswith(f"warning: {said.format(tmp_path)}") and "nothing is lost" in line
    assert "everstep sync" in line and "secret" not in line
    assert broken.loop.ending.finished


def test_a_busy_index_costs_a_moment_at_the_end_and_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("EVERSTEP_INDEX", "")
    Tiny(tmp_path / "first", max_epoch=1).train()
    monkeypatch.setattr(shipping_thread, "PATIENCE", 0.05)
    monkeypatch.setattr(shipping_thread, "FILE_PATIENCE", 120.0)
    somebody = sqlite3.connect(tmp_path / "everstep.db", isolation_level=None)
    somebody.execute("BEGIN IMMEDIATE")
    run = Tiny(tmp_path / "second", max_epoch=1).train()
    lines = [line for line in run.lines if "everstep.db" in line or "warning" in line]
    assert len(lines) == 1, run.lines
    assert lines[0].startswith("the rest of this run is not in the index yet: another process writes")
    assert run.loop.ending.warnings == ()
    somebody.execute("ROLLBACK")
    somebody.close()
    database = Database(tmp_path / "everstep.db")
    assert statuses(database) == {"first": "finished"}
    sync(database, [tmp_path])
    assert index_rows(database, "second") == journal_rows(tmp_path / "second")


# once in a gate 31 descriptors of the run and its index were still open, and never alone: not explained yet
@pytest.mark.campaign("timed")
def test_no_thread_and_no_file_outlives_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_INDEX", "")
    monkeypatch.setattr(shipping_thread, "SECONDS", 0.001)
    monkeypatch.chdir(tmp_path)
    Tiny(Path("run"), max_epoch=3).train(tail=lambda loop, epoch: os.chdir("/"))
    left = left_open(tmp_path)
    assert not left, sorted(left)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["everstep.db", "run"]


def test_where_the_index_lies_and_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_INDEX", "off")
    Tiny(tmp_path / "runs" / "a", max_epoch=1).train()
    monkeypatch.setenv("EVERSTEP_INDEX", str(tmp_path / "elsewhere" / "my.db"))
    Tiny(tmp_path / "runs" / "b", max_epoch=1).train()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]
    assert statuses(Database(tmp_path / "elsewhere" / "my.db")) == {"b": "finished"}


def test_sqlalchemy_comes_after_the_first_step_and_is_not_needed(tmp_path: Path) -> None:
    program = """
import importlib.machinery, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tiny_runs import Tiny
if {lacking}:
    class Lacking:
        def find_spec(self, name, path=None, target=None):
            if name == "sqlalchemy":
                raise ModuleNotFoundError("none", name=name)
    sys.meta_path.insert(0, Lacking())
    import importlib.util, everstep.services.checkpoints as service
    find = importlib.util.find_spec
    service.find_spec = lambda name: None if name == "sqlalchemy" else find(name)
def inside(loop, step):
    assert "sqlalchemy" not in sys.modules and "click" not in sys.modules
run = Tiny(Path({run!r}), max_epoch=1).train(inside)
assert run.loop.ending.finished and not [line for line in run.lines if "index" in line]
assert not {{"psycopg"}} & set(sys.modules)
"""
    for lacking in (False, True):
        folder = tmp_path / str(lacking)
        text = program.format(tests=str(Path(__file__).parents[1]), lacking=lacking, run=str(folder / "run"))
        environment = os.environ | {"EVERSTEP_INDEX": ""}
        subprocess.run([sys.executable, "-c", text], env=environment, check=True)
        assert (folder / "everstep.db").exists() != lacking


@pytest.fixture(scope="module")
def fragile() -> Iterator[Server]:
    """A server that the tests stop, and leave running."""
    with running_server() as found:
        yield found


def read_until(victim: Any, found: Callable[[str], bool]) -> list[str]:
    """The lines that a process prints, up to the first one that is looked for."""
    lines: list[str] = []
    for line in victim.stdout:
        lines.append(line)
        if found(line):
            return lines
    raise AssertionError("".join(lines) + victim.stderr.read())


def rows_there(url: str, run: str, more_than: int = 0) -> int:
    """Wait until the index has more than so many rows of a run; how many it has."""
    count = 0
    while count <= more_than:
        with psycopg.connect(url) as connection:
            there = connection.execute(f"SELECT to_regclass('{SCHEMA}.metrics')").fetchone()
            if there and there[0]:
                asked = f"SELECT count(*) FROM {SCHEMA}.metrics"
                count = connection.execute(asked).fetchone()[0]  # type: ignore[index]
    return count


def warnings(lines: list[str]) -> list[str]:
    return [line for line in lines if "warning" in line]


@pytest.mark.campaign("machine")
@pytest.mark.parametrize("end", [Server.stop, Server.kill])
def test_rows_arrive_when_the_server_is_back(fragile: Server, tmp_path: Path, end: Any) -> None:
    """It goes away in the middle of a run and comes back: one warning, every row once."""
    url = fragile.database()
    victim = start(tmp_path / "run", 6, 6, "ask", TEST_SECONDS="0.01", EVERSTEP_INDEX=url)
    lines = read_until(victim, lambda line: line == "asks at 6\n")
    before = rows_there(url, "run")
    end(fragile)
    for step in range(7, 13):
        print(file=victim.stdin, flush=True)
        lines += read_until(victim, lambda line, step=step: line == f"asks at {step}\n")  # type: ignore[misc]
    if not warnings(lines):
        lines += read_until(victim, lambda line: "warning" in line)
    fragile.start()
    assert rows_there(url, "run", before) > before
    output, errors = victim.communicate("\n" * 20)
    assert victim.returncode == 0 and not errors
    (warning,) = warnings([*lines, *output.splitlines()])
    assert "cannot be used" in warning and "nothing is lost" in warning
    assert index_rows(Database(url), "run") == journal_rows(tmp_path / "run")
    assert len(journal_rows(tmp_path / "run")) == 6 * 6 and sync(Database(url), [tmp_path]).rows == 0


@pytest.mark.campaign("machine")
def test_a_server_that_is_away_at_the_end_gets_the_rows_by_sync(fragile: Server, tmp_path: Path) -> None:
    url = fragile.database()
    victim = start(tmp_path / "run", 2, 6, "ask", TEST_SECONDS="0.01", EVERSTEP_INDEX=url)
    read_until(victim, lambda line: line == "asks at 6\n")
    rows_there(url, "run")
    fragile.stop()
    output, _ = victim.communicate("\n" * 20)
    assert victim.returncode == 0 and len(warnings(output.splitlines())) == 1
    fragile.start()
    found = sync(Database(url), [tmp_path])
    assert found.rows and not found.problems
    assert index_rows(Database(url), "run") == journal_rows(tmp_path / "run")


@pytest.mark.campaign("machine")
def test_a_statement_that_never_ends_is_given_up(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    url = server.database()
    with Database(url).write():
        pass
    with psycopg.connect(url, autocommit=True) as connection:
        body = "$$ BEGIN PERFORM pg_sleep(3600); RETURN NEW; END $$"
        connection.execute(f"CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS {body}")
        trigger = f"sleep BEFORE INSERT ON {SCHEMA}.runs FOR EACH ROW EXECUTE FUNCTION sleep()"
        connection.execute(f"CREATE TRIGGER {trigger}")
    monkeypatch.setenv("EVERSTEP_INDEX", url)
    monkeypatch.setattr(shipping_thread, "PATIENCE", 0.2)
    run = Tiny(tmp_path / "run", max_epoch=1).train()
    (warning,) = warnings(run.lines)
    assert "did not answer in time" in warning and run.loop.ending.finished


def test_who_may_only_read_gets_a_list_with_a_note(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    url = server.database()
    monkeypatch.chdir(tmp_path)
    Tiny(tmp_path / "first", max_epoch=1).train()
    sync(Database(url), [tmp_path])
    Tiny(tmp_path / "first", max_epoch=2).train()  # has more now
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute(f"GRANT USAGE ON SCHEMA {SCHEMA} TO reader")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {SCHEMA} TO reader")
    reading = make_url(url).set(username="reader").render_as_string(hide_password=False)
    for address in (reading, f"{url}&options=-c%20default_transaction_read_only%3Don"):
        with pytest.warns(RuntimeWarning, match="may lack the newest rows.*cannot be used.*your rights"):
            found = everstep.query("runs", index=address)
        assert [run["name"].partition("-")[0] for run in found] == ["first"]
