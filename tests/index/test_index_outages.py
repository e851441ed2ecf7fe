"""A database that goes away, hangs, is killed or has no room: the training goes on, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from index_runs import index_rows, journal_rows, start
from sqlalchemy import make_url

import everstep
from everstep.index import shipping_thread
from everstep.index.database import SCHEMA, Database
from everstep.index.shipping import sync
from postgres_server import Server, running_server
from tiny_runs import Tiny


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
def test_rows_arrive_when_the_server_is_back(
    fragile: Server, tmp_path: Path, end: Callable[[Server], None]
) -> None:
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
    assert len(journal_rows(tmp_path / "run")) == 6 * 6
    assert sync(Database(url), [tmp_path]).rows == 0


@pytest.mark.campaign("machine")
def test_a_server_that_is_away_at_the_end_gets_the_rows_by_sync(fragile: Server, tmp_path: Path) -> None:
    url = fragile.database()
    victim = start(tmp_path / "run", 2, 6, "ask", TEST_SECONDS="0.01", EVERSTEP_INDEX=url)
    read_until(victim, lambda line: line == "asks at 6\n")
    rows_there(url, "run")
    fragile.stop()
    output, _ = victim.communicate("\n" * 20)
    assert victim.returncode == 0
    assert len(warnings(output.splitlines())) == 1
    fragile.start()
    found = sync(Database(url), [tmp_path])
    assert found.rows and not found.problems
    assert index_rows(Database(url), "run") == journal_rows(tmp_path / "run")


@pytest.mark.campaign("machine")
def test_a_statement_that_never_ends_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.database()
    with Database(url).write():
        pass
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(3600); RETURN NEW; END $$"
        )
        connection.execute(
            f"CREATE TRIGGER sleep BEFORE INSERT ON {SCHEMA}.runs FOR EACH ROW EXECUTE FUNCTION sleep()"
        )
    monkeypatch.setenv("EVERSTEP_INDEX", url)
    monkeypatch.setattr(shipping_thread, "PATIENCE", 0.2)
    run = Tiny(tmp_path / "run", max_epoch=1).train()
    (warning,) = warnings(run.lines)
    assert "did not answer in time" in warning
    assert run.loop.ending.finished


def test_who_may_only_read_gets_his_list_with_a_note(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with pytest.warns(
            RuntimeWarning, match="may lack the newest rows.*cannot be used.*your rights there"
        ):
            found = everstep.query("runs", index=address)
        assert [run["name"].partition("-")[0] for run in found] == ["first"]
