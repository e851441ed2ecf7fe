"""No credential is recorded or printed: every byte of the runs, both databases, and all that was said."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import cli_runs
import psycopg
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "experiment"))
from tiny_experiment import write

from everstep.errors import ConfigError
from everstep.index.database import SCHEMA, Database
from everstep.index.location import as_location
from everstep.record import RunJournal
from postgres_server import Server

SECRET = "hunter2"
PASSWORD = f"{SECRET}%40{SECRET}"
TOKEN = f"https://{SECRET}@example.org/a.git?access_token={SECRET}"


def test_neither_runs_nor_databases_nor_what_is_printed_hold_a_password(
    tmp_path: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    """A training, a resume, a fork, a sweep, an evaluation, and an outage of the database."""
    write(tmp_path)
    for command in (("init", "-q"), ("remote", "add", "origin", TOKEN)):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    public = server.database()
    url = f"{public.replace('everstep@', f'everstep:{PASSWORD}@')}&sslpassword={SECRET}"
    away = f"postgresql://me:{PASSWORD}@/db?host={tmp_path}"
    step = "trainer.max_step={}"
    at = "services=[{{Index: {{at: '{}'}}}}, Evaluate: {{stream: valid}}]"
    said: list[str] = []

    def run(*command: str, status: int = 0, index: str = "") -> str:
        code, told, beside = cli_runs.here(*command, cwd=tmp_path, EVERSTEP_INDEX=index)
        assert code == status, beside
        said.extend((told, beside, *capfd.readouterr()))
        return told

    run("train", "tiny.yaml", step.format(1), at.format(url))
    assert "set EVERSTEP_INDEX, or pass --index" in run("resume", "runs/tiny", step.format(2))
    told = run("resume", "runs/tiny", step.format(3), "--index", url)
    assert "resuming" in told and "config.services" not in told  # another password is no other config
    run("resume", "runs/tiny", step.format(4), index=url)
    told = run("train", "tiny.yaml", step.format(5), at.format(away), f"--index={away}")
    assert "cannot be used" in told
    run("train", "tiny.yaml", "optimizer.lr=0.2", at.format(url), "--on-change=fork")
    run("sync", "runs", "--index", "all.db")
    run("show", "runs/tiny")
    run("show", "runs/tiny", "--json")
    run("show", "tiny", "--json", "--index", url)
    run("config", "runs/tiny")
    run("compare", "runs/tiny", "runs/tiny-fork-1", "--all")
    run("runs", "--json", "--columns", "argv,config.services,git.remote", "--index", url)
    run("runs", "--index", away, status=1)
    run("runs", f"status={url}", "--index", url, status=2)
    run("train", "tiny.yaml", url, status=2)
    assert [text for text in said if SECRET in text] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert len(files) > 30 and tmp_path / "all.db" in files
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    with sqlite3.connect(tmp_path / "all.db") as connection:
        assert SECRET not in "\n".join(connection.iterdump())
    assert "***" in dump(public) and SECRET not in dump(public)
    facts = RunJournal(tmp_path / "runs" / "tiny").facts()
    assert facts["git"]["remote"] == "https://***@example.org/a.git?access_token=***"
    assert f"--index=postgresql://me:***@/db?host={tmp_path}" in facts["argv"]


def dump(url: str) -> str:
    """Every row of a database."""
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            f"SELECT tablename FROM pg_tables WHERE schemaname = '{SCHEMA}'"
        ).fetchall()
        rows = [
            str(connection.execute(f'SELECT * FROM {SCHEMA}."{name}"').fetchall())  # type: ignore[arg-type]
            for (name,) in tables
        ]
    assert len(rows) > 5
    return "\n".join(rows)


def test_a_url_as_it_is_recorded_is_no_url_to_connect_with() -> None:
    with pytest.raises(ConfigError, match="as a run has recorded it, without the password"):
        Database("postgresql://me:***@host/db")


@pytest.mark.parametrize("text", [f"postgres:/me:{SECRET}@host/db", f"host=h password={SECRET} dbname=d"])
def test_what_is_nearly_a_url_becomes_no_file_of_that_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL") as raised:
        as_location(text)
    assert SECRET not in str(raised.value)
