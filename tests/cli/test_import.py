"""`everstep import`: histories of TensorBoard, MLflow and W&B, as these have written them, become runs."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorboard.summary
from cli_runs import as_json, everstep

import everstep as library
from everstep.contracts.metrics import better_when
from everstep.errors import ConfigError, JournalError, RunDirError
from everstep.formats.histories import History, bring, mlflow, wandb_offline
from everstep.formats.histories import tensorboard as tensorboard_runs
from everstep.index.shipping import run_dirs
from everstep.record import RunJournal
from everstep.testing import armed
from postgres_server import Server

MLFLOW = Path(__file__).parent / "data" / "mlflow.sql"
"""Tables that mlflow 3.17 has written: the runs "wide" and "bad" of the experiment "digits"."""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    edit(path := tmp_path / "mlflow.db", MLFLOW.read_text())
    return path


def edit(database: Path, script: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(script)


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
    assert [row["new"] for row in imported("tensorboard", "logs", cwd=tmp_path)] == [False, False]
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
    told, _ = everstep("show", wide["name"], cwd=tmp_path)
    assert "imported from mlflow" in told and "seed" not in told and wide["seed"] is shown["seed"] is None


def test_an_index_that_others_can_read_goes_on_with_an_import_that_it_has(tmp_path: Path) -> None:
    for count in (3, 6):
        write_events(tmp_path / "logs", range(count))
        imported("tensorboard", "logs", cwd=tmp_path)
        (run,) = as_json("runs", cwd=tmp_path)
        assert run["step"] == count - 1 and run["seed"] is None
        (tmp_path / "runs" / "everstep.db").chmod(0o644)  # what others can read gets no further runs


def test_a_metric_whose_name_begins_with_loss_has_a_best_value(tmp_path: Path) -> None:
    for name, steps, metric in (("a", 5, "loss/val"), ("b", 9, "loss/val"), ("b", 9, "bleu/val")):
        write_events(tmp_path / "logs" / name, range(steps), metric=metric)
    imported("tensorboard", "logs", cwd=tmp_path)
    rows = as_json("runs", "--sort", "best/loss/val", cwd=tmp_path)
    assert [row["best/loss/val"] for row in rows] == [np.float32(1 / 9).item(), np.float32(0.2).item()]
    problem = everstep("runs", "--sort", "best/bleu/val", cwd=tmp_path, status=2)[1]
    assert "give 'bleu/val' for the last value; one run with watch=('bleu/val', \"min\") or" in problem


BETTER: dict[str | None, list[str]] = {
    "min": ["loss", "valid_loss", "loss/val", "Loss/test", "val.loss", "acc/loss", "x-Loss"],
    "max": ["acc/val", "accuracy/valid", "top1 acc", "loss_acc"],
    None: ["f1", "glossary", "accept", "loss_scale", "accuracy_time", "valid/loss/std", "loss/lr", "val", ""],
}


def test_a_word_of_a_name_tells_which_value_is_better() -> None:
    for better, known in BETTER.items():
        assert {name: better_when(name) for name in known} == dict.fromkeys(known, better)


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
    ends = [end.data["status"] for run in (wide, bad) for end in run.events("closed")]
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
    edit(database, "update runs set start_time = 'x', name = '../../etc/<b>\x1b[31m' where name = 'bad'")
    told, said = everstep("import", "mlflow", "mlflow.db", cwd=tmp_path, status=1)
    assert "wide-" in told and "is left out: TypeError" in said and "\x1b" not in told + said
    edit(database, "update runs set start_time = 1 where name != 'wide'")
    rows = imported("mlflow", "mlflow.db", cwd=tmp_path)
    assert [Path(row["run"]).parent for row in rows] == [tmp_path / "runs"] * 2
    (tmp_path / "notes.txt").write_text("no run")
    assert "no run of tensorboard in" in everstep("import", "tensorboard", ".", cwd=tmp_path, status=2)[1]
    assert "notes.txt is left out" in everstep("import", "mlflow", "notes.txt", cwd=tmp_path, status=1)[1]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mlflow.db").write_text("no database" * 99)
    bad, *good = mlflow(tmp_path)
    assert bad[0] == str(tmp_path / "a" / "mlflow.db") and len(good) == 2
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        bad[1]()
    edit(database, "alter table tags rename to others; create view tags as select * from others")
    ((_, read),) = mlflow(database)
    with pytest.raises(ConfigError, match="no tables tags"):
        read()


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
            rows = [(*each, key) for each in given.items()]
            connection.executemany(f"insert into {table} values (?, ?, ?)", rows)
    path, _ = bring(next(read() for _, read in mlflow(database)), tmp_path / "runs")
    assert RunJournal(path).series("train/loss")[1][:3] == [1.0, -math.inf, 1 / 3]
    facts = RunJournal(path).facts()
    shown = {"hf_token": "***", "db.password": "***", "api_key": "", "max_tokens": 9, "tokenizer": "gpt2"}
    assert shown.items() <= facts["config"].items()
    assert (shown | {"max_tokens": "9"}).items() <= facts["imported"]["tags"].items()
    config = {"net": {"lr": 0.1, "api_key": "x", "db": {"password": "y"}}}
    path, _ = bring(History("wandb", "1", "a", config=config), tmp_path / "runs")
    hidden = {"lr": 0.1, "api_key": "***", "db": {"password": "***"}}
    assert RunJournal(path).facts()["config"] == {"net": hidden}


def test_a_folder_of_files_of_mlflow_names_the_command_that_makes_a_database(tmp_path: Path) -> None:
    run = tmp_path / "mlruns" / "304994089346212349" / "wide0123"
    (run / "params").mkdir(parents=True)
    (run / "meta.yaml").write_text("run_id: wide0123\nlifecycle_stage: active\n")
    said = everstep("import", "mlflow", "mlruns", cwd=tmp_path, status=2)[1]
    assert "mlflow migrate-filestore --source FOLDER --target sqlite:///mlflow.db" in said
    assert not (tmp_path / "runs").exists()


WANDB = """
import os, sys, math, numpy, wandb
folder, name, first, last, end = sys.argv[1:]
config = {"lr": 0.1, "net": {"layers": [1, 2], "api_key": "x"}}
run = wandb.init(
    project="digits", id=name, name=name, tags=["a"], config=config, mode="offline", dir=folder,
    resume="allow",
)
for step in range(int(first), int(last)):
    run.log({"train/loss": 1 / (step + 1), "nested": {"a": step}}, step=step)
image = wandb.Image(numpy.zeros((2, 2, 3), "uint8"))
run.log({"gap": -math.inf, "text": "x", "image": image, "image_loss": 0.5})
run.config.update({"late": 3})
run.finish(exit_code=int(end))
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of W&B's with two runs, one of which was resumed; its package can be imported meanwhile."""
    folder = tmp_path_factory.mktemp("wandb")
    install = [sys.executable, "-m", "pip", "-q", "install", "--target", str(folder / "package"), "wandb"]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder / "package")])
    quiet = {**os.environ, "PYTHONPATH": paths, "WANDB_SILENT": "true"}
    for row in ("wide 0 9 1", "narrow 0 3 0", "wide 6 12 0", "anew 0 4 0", "anew 0 3 0"):
        command = [sys.executable, "-c", WANDB, str(folder), *row.split()]
        subprocess.run(command, check=True, env=quiet, cwd=folder)
    sys.path.append(str(folder / "package"))
    yield folder / "wandb"
    sys.path.remove(str(folder / "package"))


@pytest.mark.campaign("machine")
def test_offline_runs_of_wandb_are_imported_and_a_resume_goes_on(tmp_path: Path, offline: Path) -> None:
    rows = imported("wandb-offline", str(offline), cwd=tmp_path)
    assert sorted(names(rows)) == ["anew", "narrow", "wide"]
    (anew,) = (RunJournal(row["run"]) for row in rows if "/anew-" in row["run"])
    assert anew.series("train/loss") == ([0, 1, 2, 3, 4, 5, 6], [1, 1 / 2, 1 / 3, 1 / 4, 1, 1 / 2, 1 / 3])
    (wide,) = (RunJournal(row["run"]) for row in rows if "/wide-" in row["run"])
    facts = wide.facts()
    assert wide.series("train/loss") == (list(range(12)), [1 / (step + 1) for step in range(12)])
    assert wide.series("image_loss")[1] == [0.5, 0.5]  # no part of the medium "image"
    assert wide.series("nested.a")[1] == list(range(12)) and wide.series("gap") == ([8, 11], [-math.inf] * 2)
    assert facts["config"] == {"lr": 0.1, "net": {"layers": [1, 2], "api_key": "***"}, "late": 3}
    assert facts["imported"]["source"] == "/digits/wide" and facts["imported"]["tags"] == ["a"]
    assert facts["imported"]["left_out"] == {"image-file": 2, "text": 2}
    assert [event.data["status"] for event in wide.events("closed")] == ["finished"]
    assert [row["new"] for row in imported("wandb-offline", str(offline), cwd=tmp_path)] == [False] * 3


@pytest.mark.campaign("machine")
def test_a_file_of_wandb_counts_up_to_its_end_and_damage_is_named(tmp_path: Path, offline: Path) -> None:
    (file,) = offline.rglob("run-narrow.wandb")
    data, copy = file.read_bytes(), tmp_path / "run-narrow.wandb"

    def read(content: bytes) -> History | str:
        copy.write_bytes(content)
        ((_, found),) = wandb_offline(copy)
        try:
            return found()
        except ConfigError as error:
            return str(error)

    whole = read(data)
    assert isinstance(whole, History) and whole.status == "finished"
    assert read(data + bytes(100)) == whole, "a power cut has left zeros"
    cut = [read(data[:size]) for size in range(7, len(data))]  # a kill cuts it anywhere
    texts = [each for each in cut if isinstance(each, str)]
    assert {text.partition(";")[0] for text in texts} == {"it has no record of a run"}
    counts = [len(each.points["train/loss"]) for each in cut[len(texts) :] if isinstance(each, History)]
    assert len(texts) + len(counts) == len(cut) and counts == sorted(counts) and {0, 3} <= {*counts}
    for at in range(0, len(data), 41):
        found = read(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        if isinstance(found, History):
            assert found.status == "killed", "a length that leads beyond the end is as a cut"
        else:
            assert re.search("damaged at|begin|no rec", found)


def test_without_its_package_an_import_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "run-a.wandb").touch()
    (tmp_path / "stubs" / "wandb").mkdir(parents=True)  # stands before one that may be installed here
    (tmp_path / "stubs" / "wandb" / "__init__.py").write_text("raise ModuleNotFoundError('x', name='wandb')")
    path = os.pathsep.join([str(tmp_path / "stubs"), os.environ.get("PYTHONPATH", "")])
    said = everstep("import", "wandb-offline", ".", cwd=tmp_path, status=1, PYTHONPATH=path)[1]
    assert "needs wandb, which is not installed: pip install 'wandb>=0.31'" in said


ROOT = Path(__file__).parents[2]
URL = "postgresql://me@db.example/runs"


def commands(page: str) -> list[str]:
    return re.findall(r"^\$ (.+)$", (ROOT / "docs" / "guide" / page).read_text(), re.MULTILINE)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `runs/digits`, where this process is."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "docs"))
    from snippet_setups import SETUPS

    monkeypatch.chdir(tmp_path)
    SETUPS["trained"]()
    return tmp_path


def test_every_command_of_the_guides_page_on_records_runs(trained: Path, database: Path) -> None:
    write_events(trained / "logs", range(1))
    Path("wandb").mkdir()  # set-up has no W&B, which reads its files: the tests above read some
    assert len(commands("record.md")) > 15
    for name, *command in map(shlex.split, commands("record.md")):
        is_wandb = "wandb-offline" in command
        told, said = everstep(*command, cwd=trained, status=2 if is_wandb else 0)
        assert name == "everstep" and ("no run of wandb-offline in wandb" in said if is_wandb else told)


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
