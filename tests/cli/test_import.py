"""`everstep import`: histories of TensorBoard and MLflow, as these have written them, become runs."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorboard.summary
from cli_runs import as_json, everstep

import everstep as library
from everstep.errors import ConfigError, JournalError, RunDirError
from everstep.formats.histories import History, bring, mlflow
from everstep.formats.histories import tensorboard as tensorboard_runs
from everstep.index.shipping import run_dirs
from everstep.record import RunJournal
from everstep.testing import armed

MLFLOW = Path(__file__).parent / "data" / "mlflow.sql"
"""Tables that mlflow 3.17 has written: the runs "wide" and "bad" of the experiment "digits"."""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(MLFLOW.read_text())
    return path


def write_events(folder: Path, steps: range, scale: float = 1.0, metric: str = "train/loss") -> None:
    writer = tensorboard.summary.Writer(str(folder))
    for step in steps:
        writer.add_scalar(metric, scale / (step + 1), step)
    writer.close()


def imported(*words: str, cwd: Path, status: int = 0) -> list[Any]:
    rows: list[Any] = as_json("import", *words, cwd=cwd, status=status)
    return rows


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [Path(row["run"]).name.rpartition("-")[0] for row in rows]


def test_folders_of_event_files_are_runs_and_the_same_again_adds_nothing(tmp_path: Path) -> None:
    write_events(tmp_path / "logs" / "a" / "train", range(10))
    write_events(tmp_path / "logs" / "b", range(4))
    rows = imported("tensorboard", "logs", cwd=tmp_path)
    assert names(rows) == ["a-train", "b"]
    assert [(row["values"], row["new"]) for row in rows] == [(10, True), (4, True)]
    files = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    again = imported("tensorboard", "logs", cwd=tmp_path)
    assert [row["new"] for row in again] == [False, False]
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == files
    # more by now: a further start, which supersedes the rows of the first
    write_events(tmp_path / "logs" / "b", range(4, 9))
    assert [row["new"] for row in imported("tensorboard", "logs", cwd=tmp_path)] == [False, True]
    journal = RunJournal(rows[1]["run"])
    assert journal.series("train/loss")[0] == list(range(9)) and journal.problems == []
    assert journal.series("train/loss")[1] == [np.float32(1 / (step + 1)).item() for step in range(9)]


def test_an_imported_run_is_found_compared_and_never_verified(tmp_path: Path, database: Path) -> None:
    write_events(tmp_path / "logs", range(5), metric="valid_loss")
    imported("tensorboard", "logs", cwd=tmp_path)
    imported("mlflow", "mlflow.db", cwd=tmp_path)
    for row in as_json("runs", "tags=imported", "--columns", "name,status,verified,reason", cwd=tmp_path):
        assert row["verified"] is None and row["reason"].startswith("imported from ")
    (best,) = as_json("runs", "best/valid_loss<0.3", "--columns", "name,status", cwd=tmp_path)
    assert best["name"].startswith("logs-") and best["status"] == "finished"
    (wide,) = library.query("runs", {"config.lr": 0.1}, index=tmp_path / "runs")
    assert wide["config"]["layers"] == [1, 2] and wide["imported"]["tags"]["who"] == "x"
    compared = as_json("compare", best["name"], wide["name"], cwd=tmp_path)
    assert compared["metrics"]["tail/valid_loss last"][best["name"]] == np.float32(0.2).item()
    shown = as_json("show", wide["name"], cwd=tmp_path)
    assert shown["tags"] == ["imported"] and [start["badge"] for start in shown["segments"]] == ["first"]
    assert "imported from mlflow" in everstep("show", wide["name"], cwd=tmp_path)[0]


def test_a_database_of_mlflow_is_read_without_mlflow(tmp_path: Path, database: Path) -> None:
    before = database.read_bytes()
    rows = imported("mlflow", ".", "--into", "here", cwd=tmp_path)
    assert names(rows) == ["wide", "bad"] and database.read_bytes() == before
    wide, bad = (RunJournal(row["run"]) for row in rows)
    assert wide.series("train/loss") == ([0, 1, 2, 3, 4], [1.0, 0.5, 1 / 3, 0.25, 0.2])
    assert math.isnan(wide.series("gap")[1][0])
    facts = wide.facts()
    assert facts["config"] == {"lr": 0.1, "layers": [1, 2], "kind": "mlp"}
    assert facts["imported"]["experiment"] == "digits"
    ends = [event.data["status"] for run in (wide, bad) for event in run.events("closed")]
    assert ends == ["finished", "failed"]


def test_of_steps_that_a_restart_has_drawn_again_the_later_ones_count(tmp_path: Path) -> None:
    write_events(tmp_path / "logs", range(10))
    (first,) = (tmp_path / "logs").iterdir()
    first.rename(first.with_name("events.out.tfevents.1000.node.1"))
    write_events(tmp_path / "logs", range(6, 15), scale=2.0)
    (row,) = imported("tensorboard", "logs", cwd=tmp_path)
    steps, values = RunJournal(row["run"]).series("train/loss")
    assert steps == list(range(15))
    assert values == [np.float32((1 if step < 6 else 2) / (step + 1)).item() for step in range(15)]


def test_settings_of_add_hparams_are_those_of_the_run_above(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "logs" / "a")) as writer:
        writer.add_scalar("loss", 1.0, 1)
        writer.add_scalar("loss", 0.5, 2)
        writer.add_histogram("weights", np.arange(9), 2)
        writer.add_hparams({"lr": 0.1}, {"loss": 0.5, "best": 3.0})
    (row,) = imported("tensorboard", "logs", cwd=tmp_path)
    journal = RunJournal(row["run"])
    assert journal.facts()["config"] == {"lr": 0.1}
    assert journal.series("loss") == ([1, 2], [1.0, 0.5]) and journal.series("best")[1] == [3.0]
    assert journal.facts()["imported"]["left_out"] == {"histograms": 1}


def test_what_cannot_be_read_is_named_and_the_others_are_imported(tmp_path: Path, database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(
            "update runs set start_time = 'x', name = '../../etc/<b>\x1b[31m' where name = 'bad'"
        )
    told, said = everstep("import", "mlflow", "mlflow.db", cwd=tmp_path, status=1)
    assert "wide-" in told and "is left out: TypeError" in said and "\x1b" not in told + said
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("update runs set start_time = 1 where name != 'wide'")
    rows = imported("mlflow", "mlflow.db", cwd=tmp_path)
    assert [Path(row["run"]).parent for row in rows] == [tmp_path / "runs"] * 2
    (tmp_path / "notes.txt").write_text("no run")
    assert "no run of tensorboard in" in everstep("import", "tensorboard", ".", cwd=tmp_path, status=2)[1]
    assert "notes.txt is left out" in everstep("import", "mlflow", "notes.txt", cwd=tmp_path, status=1)[1]


@pytest.mark.parametrize("point", ["import.write", "import.fsync", "import.rename", "run.json.rename"])
def test_a_full_disk_leaves_no_half_of_a_run(tmp_path: Path, database: Path, point: str) -> None:
    history = next(read() for _, read in mlflow(database))
    with armed(f"ENOSPC:{point}:1"), pytest.raises(OSError):
        bring(history, tmp_path / "runs")
    assert not (tmp_path / "runs").exists() or run_dirs(tmp_path / "runs") == []
    path, is_new = bring(history, tmp_path / "runs")
    assert is_new and RunJournal(path).series("train/loss")[0] == [0, 1, 2, 3, 4]


def test_an_imported_run_cannot_be_trained_on(tmp_path: Path, database: Path) -> None:
    row = imported("mlflow", "mlflow.db", cwd=tmp_path)[0]
    before = {path: path.read_bytes() for path in Path(row["run"]).rglob("*") if path.is_file()}
    with pytest.raises(RunDirError, match=r"imported.*give another directory"):
        with library.TrainLoop(row["run"], {"w": np.zeros(1)}, max_step=1):
            pass
    assert {path: path.read_bytes() for path in Path(row["run"]).rglob("*") if path.is_file()} == before
    assert json.loads((Path(row["run"]) / "run.json").read_text())["imported"] == "mlflow"


def test_a_tensor_of_more_than_one_element_is_left_out_and_not_made(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    with (tmp_path / "events.out.tfevents.1").open("wb") as file:
        for sides in ([], [1, 1], [2**20], [0]):
            event = Event(step=1, wall_time=1.0)
            value = event.summary.value.add(tag=f"loss{len(sides)}")
            value.metadata.plugin_data.plugin_name = "scalars"
            value.tensor.dtype = 1
            value.tensor.tensor_content = struct.pack("<f", 0.5) if sides in ([], [1, 1]) else b""
            value.tensor.float_val.extend([0.5] if sides == [2**20] else [])
            for side in sides:
                value.tensor.tensor_shape.dim.add(size=side)
            RecordWriter(file).write(event.SerializeToString())
    ((_, read),) = tensorboard_runs(tmp_path)
    history = read()
    assert {name: [row[1] for row in rows] for name, rows in history.points.items()} == {
        "loss0": [0.5], "loss2": [0.5]
    }  # fmt: skip
    assert history.about["left_out"] == {"scalars": 2}


@pytest.mark.timeout(60)
def test_pipes_and_folders_are_no_event_files(tmp_path: Path) -> None:
    write_events(tmp_path / "a", range(2))
    os.mkfifo(tmp_path / "a" / "pipe.tfevents")
    (tmp_path / "b" / "old.tfevents").mkdir(parents=True)
    ((place, read),) = tensorboard_runs(tmp_path)
    assert place == str(tmp_path / "a")
    for file in (tmp_path / "a").glob("events*"):  # one comes after the search
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(OSError, match="regular"):
        read()


def test_a_database_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path, database: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mlflow.db").write_text("no database" * 99)
    bad, *good = mlflow(tmp_path)
    assert bad[0] == str(tmp_path / "a" / "mlflow.db") and len(good) == 2
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        bad[1]()


def test_a_view_is_not_read(tmp_path: Path, database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(
            "alter table tags rename to others; create view tags as select * from others"
        )
    ((_, read),) = mlflow(database)
    with pytest.raises(ConfigError, match="no tables tags"):
        read()


def test_a_history_that_cannot_be_written_leaves_nothing_and_long_names_are_cut(tmp_path: Path) -> None:
    history = History("mlflow", "1", "\u6f22" * 80, about={"x": object()})
    with pytest.raises(JournalError):
        bring(history, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    path, _ = bring(History("mlflow", "1", "\u6f22" * 80), tmp_path / "runs")
    assert path.name.rpartition("-")[0] == "\u6f22" * 26 and run_dirs(tmp_path / "runs") == [path]


def test_infinities_come_back_and_secrets_do_not(tmp_path: Path, database: Path) -> None:
    given = {"hf_token": "x", "db.password": "1", "api_key": "", "max_tokens": "9", "tokenizer": "gpt2"}
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("update metrics set value = -1.7976931348623157e308 where step = 1")
        (key,) = connection.execute("select run_uuid from runs where name = 'wide'").fetchone()
        for table in ("params", "tags"):
            connection.executemany(
                f"insert into {table} values (?, ?, ?)", [(*each, key) for each in given.items()]
            )
    path, _ = bring(next(read() for _, read in mlflow(database)), tmp_path / "runs")
    assert RunJournal(path).series("train/loss")[1][:3] == [1.0, -math.inf, 1 / 3]
    facts = RunJournal(path).facts()
    shown = {"hf_token": "***", "db.password": "***", "api_key": "", "max_tokens": 9, "tokenizer": "gpt2"}
    assert shown.items() <= facts["config"].items()
    assert (shown | {"max_tokens": "9"}).items() <= facts["imported"]["tags"].items()
