"""Every command that the guide's pages on runs show runs as it stands there."""

from __future__ import annotations

import re
import shlex
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import tensorboard.summary
from cli_runs import everstep

from everstep.cli import main
from postgres_server import Server

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "docs"))
URL = "postgresql://me@db.example/runs"


def commands(page: str) -> list[str]:
    return re.findall(r"^\$ (.+)$", (ROOT / "docs" / "guide" / page).read_text(), re.MULTILINE)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `runs/digits`."""
    from snippet_setups import SETUPS

    monkeypatch.chdir(tmp_path)
    SETUPS["trained"]()
    return tmp_path


def test_every_command_of_the_record_runs(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: there are many, and the imports would take longest."""
    monkeypatch.setenv("EVERSTEP_INDEX", "")
    other = tensorboard.summary.Writer("logs")
    other.add_scalar("loss", 1.0, 1)
    other.close()
    with closing(sqlite3.connect("mlflow.db")) as database, database:
        database.executescript((Path(__file__).parent / "data" / "mlflow.sql").read_text())
    Path("wandb").mkdir()  # set-up has no W&B, which reads its files: test_import.py reads some
    assert len(commands("record.md")) > 15
    for command in commands("record.md"):
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        assert sys.argv[0] == "everstep"
        with pytest.raises(SystemExit) as ending:
            main()
        said = capsys.readouterr()
        if "wandb-offline" in command:
            assert ending.value.code == 2 and "no run of wandb-offline in wandb" in said.err
        else:
            assert ending.value.code == 0 and said.out


@pytest.mark.campaign("machine")
def test_every_command_of_the_queries_runs_and_finds_the_run(trained: Path, server: Server) -> None:
    url, environment = server.database(), {}
    assert len(commands("queries.md")) == 7
    for command in commands("queries.md"):
        name, *arguments = shlex.split(command.replace(URL, url))
        if name == "export":
            environment = dict([arguments[0].split("=", 1)])
        else:
            assert name == "everstep"
            said = everstep(*arguments, cwd=trained, **environment)[0]
            assert "digits" in said or arguments == ["sync"]
