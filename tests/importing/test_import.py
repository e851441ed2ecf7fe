"""`everstep import`: runs of other programs, as these programs have written them."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep.errors import ConfigError, EverstepError, RunDirError
from everstep.importing.foreign_run import Points, bring
from everstep.importing.sources import FORMATS, found
from everstep.record import RunJournal
from everstep.testing import armed

DATA = Path(__file__).parent / "data"
"""Written by mlflow 3.17 and wandb 0.31, see make_fixtures.py there."""


def nothing_said(text: str) -> None:
    raise AssertionError(text)


def brought(format: str, path: Path, into: Path) -> dict[str, RunJournal]:
    runs = {run.name: bring(run, into).path for run in found(format, path, nothing_said)}
    return {name: RunJournal(place) for name, place in runs.items()}


def how_it_ended(journal: RunJournal) -> str:
    return str([event.data["status"] for event in journal.events("closed")][-1])


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "mlflow.db"
    with sqlite3.connect(path) as connection:
        connection.executescript((DATA / "mlflow.sql").read_text())
    return path


def test_mlflow_from_files_and_from_its_database(tmp_path: Path, database: Path) -> None:
    for place in (DATA / "mlruns", database):
        runs = brought("mlflow", place, tmp_path / f"from {place.name}")
        assert {name: how_it_ended(journal) for name, journal in runs.items()} == {
            "wide": "finished",
            "bad": "failed",
        }
        wide = runs["wide"]
        assert wide.series("train/loss") == ([0, 1, 2, 3, 4], [1.0, 0.5, 1 / 3, 0.25, 0.2])
        assert math.isnan(wide.series("gap")[1][0])
        facts = wide.facts()
        assert facts["config"] == {"lr": 0.1, "layers": [1, 2], "kind": "mlp"}
        assert facts["imported"]["tags"]["who"] == "x" and facts["imported"]["experiment"] == "digits"


def test_wandb_offline(tmp_path: Path) -> None:
    (run,) = found("wandb-offline", DATA / "offline.wandb", nothing_said)
    assert run.left_out["values that are not numbers"] == 20
    assert run.ended - run.created < 60
    journal = RunJournal(bring(run, tmp_path).path)
    steps, values = journal.series("loss")
    assert steps == list(range(20)) and values == [1 / (i + 1) for i in range(20)]
    accuracies = journal.series("val.acc")[1]
    assert [value for value in accuracies if not math.isnan(value)] == [0.0, 0.25, 0.5, 0.75]
    facts = journal.facts()
    assert facts["config"] == {"lr": 0.1, "model": {"width": 64}} and facts["host"] == "node-7"
    assert facts["imported"]["tags"] == ["a"] and facts["imported"]["notes"] == "hello"
    assert how_it_ended(journal) == "finished"


def write_events(folder: Path, first: int, last: int, scale: float = 1.0) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), filename_suffix=f".{first}") as writer:
        for step in range(first, last):
            writer.add_scalar("train/loss", scale / (step + 1), step)
        writer.add_histogram("weights", np.arange(9), last)


def test_tensorboard_where_a_restart_has_drawn_steps_twice(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    write_events(logs / "a" / "train", 0, 10)
    write_events(logs / "b", 0, 10)
    # as after a kill: a later file, which begins before the end of the first one
    (first,) = (logs / "b").iterdir()
    first.rename(first.with_name("events.out.tfevents.1000.node.1"))
    write_events(logs / "b", 6, 15, scale=2.0)
    runs = brought("tensorboard", logs, tmp_path / "runs")
    assert set(runs) == {"a/train", "b"}
    steps, values = runs["b"].series("train/loss")
    assert steps == list(range(15))
    assert values == [np.float32((1 if step < 6 else 2) / (step + 1)).item() for step in range(15)]
    left_out = runs["b"].facts()["imported"]["left_out"]
    assert left_out == {"points of an earlier start": 4, "histograms": 2}


def test_hparams_that_lie_in_a_folder_of_their_own_are_the_runs(tmp_path: Path) -> None:
    """As `add_hparams` writes them: a second run of TensorBoard, named by the time."""
    from torch.utils.tensorboard import SummaryWriter

    for name, rate in (("a", 0.1), ("b", 0.2)):
        with SummaryWriter(str(tmp_path / "logs" / name)) as writer:
            writer.add_scalar("loss", 1.0, 1)
            writer.add_scalar("loss", 0.5, 2)
            writer.add_hparams({"lr": rate}, {"loss": 0.5, "best": 3.0})
    assert len([path for path in (tmp_path / "logs").rglob("*") if path.is_dir()]) == 4
    found = brought("tensorboard", tmp_path / "logs", tmp_path / "runs")
    assert set(found) == {"a", "b"}
    for name, rate in (("a", 0.1), ("b", 0.2)):
        assert found[name].facts()["config"] == {"lr": rate}
        assert found[name].series("loss") == ([1, 2], [1.0, 0.5])
        assert found[name].series("best")[1] == [3.0]


def command(*args: str | Path, cwd: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "everstep", *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.campaign("long")
def test_an_import_repeated_adds_nothing_and_a_longer_record_supersedes(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    write_events(logs, 0, 10)
    into = tmp_path / "runs"
    for is_new in (True, False):
        status, out, err = command("import", "tensorboard", logs, "--json", cwd=tmp_path)
        assert status == 0, err
        (run,) = json.loads(out)["runs"]
        assert run["is_new"] is is_new and run["rows"] == 10
    write_events(logs, 10, 20)
    status, out, err = command("import", "tensorboard", logs, cwd=tmp_path)
    assert status == 0 and "imported, values: 20" in out and "runs: 1, new: 1" in out, out + err
    status, out, err = command("runs", "--where", "{}", "--json", cwd=tmp_path)
    assert status == 0, err
    (path,) = (path for path in into.iterdir() if path.is_dir())
    assert RunJournal(path).series("train/loss")[0] == list(range(20))
    assert RunJournal(path).problems == []
    status, out, err = command("show", path.name, "--json", cwd=tmp_path)
    assert status == 0 and json.loads(out)["status"] == "finished", out + err


@pytest.mark.parametrize("point", ["import.write", "import.fsync", "import.rename", "run.json.rename"])
def test_an_import_that_the_disk_refuses_leaves_no_half_of_a_run(tmp_path: Path, point: str) -> None:
    (run,) = found("wandb-offline", DATA / "offline.wandb", nothing_said)
    remedy = r"free space|give a path that can be written"
    with armed(f"ENOSPC:{point}:1"), pytest.raises(RunDirError, match=remedy):
        bring(run, tmp_path / "runs")
    assert everstep_sees(tmp_path / "runs") == []
    assert RunJournal(bring(run, tmp_path / "runs").path).series("loss")[0] == list(range(20))


def everstep_sees(folder: Path) -> list[Path]:
    from everstep.index.shipping import run_dirs

    return run_dirs(folder)


def test_an_imported_run_cannot_be_trained_on(tmp_path: Path) -> None:
    (run,) = found("wandb-offline", DATA / "offline.wandb", nothing_said)
    path = bring(run, tmp_path).path
    before = sorted(path.rglob("*"))
    with pytest.raises(RunDirError, match=r"imported.*give another directory"):
        with everstep.TrainLoop(path, {"w": np.zeros(1)}, max_step=1):
            pass
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_without_such_runs_is_said(tmp_path: Path, format: str) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    with pytest.raises(ConfigError, match=f"no run of {format} in"):
        list(found(format, tmp_path, nothing_said))


def test_damaged_files_are_said_and_the_others_are_read(tmp_path: Path, database: Path) -> None:
    """Flipped and cut files give what stands before the damage, and words."""
    sources = {"wandb-offline": DATA / "offline.wandb", "mlflow": database}
    write_events(tmp_path / "logs", 0, 10)
    (sources["tensorboard"],) = (tmp_path / "logs").iterdir()
    draw = random.Random(0)
    for format, source in sources.items():
        for turn in range(30):
            data = bytearray(source.read_bytes())
            for _ in range(draw.randint(1, 9)):
                data[draw.randrange(len(data))] ^= draw.randint(1, 255)
            file = tmp_path / "damaged" / source.name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data[: draw.randint(0, len(data))] if turn % 2 else data)
            said: list[str] = []
            try:
                for run in found(format, file, said.append):
                    assert all(isinstance(points, Points) for points in run.metrics.values())
                    bring(run, tmp_path / "runs")
            except EverstepError as error:
                said.append(str(error))


def test_names_of_a_run_lead_nowhere_else(tmp_path: Path, database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("update runs set name = '../../etc/<b>\x1b[31m'")
    into = tmp_path / "runs"
    for run in found("mlflow", database, nothing_said):
        assert bring(run, into).path.parent == into


def test_one_odd_run_does_not_stop_the_others(tmp_path: Path) -> None:
    runs = tmp_path / "mlruns"
    shutil.copytree(DATA / "mlruns", runs)
    wide, bad = (next(runs.rglob(f"{name}*")) for name in ("c9b604b9", "cd3a1a16"))
    (wide / "meta.yaml").write_text((wide / "meta.yaml").read_text().replace("start_time: ", "start_time: x"))
    os.mkfifo(runs / "mlflow.db")
    said: list[str] = []
    assert [run.name for run in found("mlflow", runs, said.append)] == ["bad"]
    assert len(said) == 2 and str(wide) in said[1] and "mlflow.db is left out" in said[0], said
    (bad / "meta.yaml").write_text((bad / "meta.yaml").read_text().replace("stage: active", "stage: deleted"))
    with pytest.raises(ConfigError, match="no run of mlflow"):
        list(found("mlflow", runs, said.append))


def test_a_run_that_cannot_be_written_is_said_and_the_others_are_in_the_index(tmp_path: Path) -> None:
    into = tmp_path / "runs"
    paths = [bring(run, into).path for run in found("mlflow", DATA / "mlruns", nothing_said)]
    shutil.rmtree(paths[0])
    paths[0].write_text("of somebody")
    status, out, err = command("import", "mlflow", DATA / "mlruns", cwd=tmp_path)
    assert status == 1 and "is left out" in err and "runs: 1, new: 0" in out, out + err
    assert paths[0].read_text() == "of somebody"
