"""Runs of MLflow: a folder `mlruns` of files, or an SQLite database.

Source: the file store (EXPERIMENT/RUN/{meta.yaml,metrics/NAME,params/NAME,tags/NAME}; a line of a metric
is "milliseconds value step") and the tables of its SQL store, https://mlflow.org/docs/latest/tracking.html
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

from everstep.importing.foreign_run import ForeignRun, plain
from everstep.untrusted_files import open_regular, read_regular

_STATUS: Mapping[str, Literal["finished", "failed", "killed"]] = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "3": "finished",
    "4": "failed",
}
"""Status as the database and the files tell it; any other run was killed."""

_LARGEST = 1 << 30
_MAGIC = b"SQLite format 3\0"


def sources(path: Path, say: Callable[[str], None]) -> Iterator[tuple[Path, Callable[[ForeignRun], object]]]:
    """Yield the place of each run in a folder, or in a database, and the function that reads it."""
    for file in [path] if path.is_file() else sorted(path.rglob("*.db")):
        try:
            yield from _in_database(file)
        except OSError as error:
            say(f"{file} is left out: {error.strerror}")
        except Exception as error:  # a damaged database may hold anything
            say(f"{file} is not a database of MLflow, or is damaged: {type(error).__name__}: {error}")
    for meta in sorted(path.rglob("meta.yaml")) if path.is_dir() else ():
        if ".trash" not in meta.parts and any((meta.parent / n).is_dir() for n in ("metrics", "params")):
            yield meta.parent, _read_folder


def _read_folder(run: ForeignRun) -> None:
    about = _yaml(run.source / "meta.yaml")
    if about.get("lifecycle_stage") == "deleted":
        return
    for name, text in _texts(run.source / "metrics"):
        for line in filter(None, map(str.split, text.splitlines())):
            milliseconds, value, *step = line
            run.add(name, step[0] if step else 0, float(value), int(milliseconds) / 1000)
    above = run.source.parent / "meta.yaml"
    about["experiment"] = _yaml(above).get("name") if above.is_file() else None
    _fill(run, about, dict(_texts(run.source / "params")), dict(_texts(run.source / "tags")))


def _yaml(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        tree = YAML(typ="safe").load(read_regular(path, _LARGEST))
    except YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} has no fields")
    return tree


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and content of each file; a slash in a name is a folder."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            yield file.relative_to(folder).as_posix(), read_regular(file, _LARGEST).decode("utf-8", "replace")


def _in_database(path: Path) -> Iterator[tuple[Path, Callable[[ForeignRun], object]]]:
    with open_regular(path) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute(
            "select runs.*, experiments.name as experiment from runs "
            "left join experiments on experiments.experiment_id = runs.experiment_id "
            "where runs.lifecycle_stage = 'active' order by start_time, run_uuid"
        ).fetchall()
        for row in rows:
            yield path, partial(_read_row, connection, dict(row))


def _read_row(connection: sqlite3.Connection, row: dict[str, Any], run: ForeignRun) -> None:
    key = (row["run_uuid"],)
    query = (
        "select key, timestamp, value, is_nan, step from metrics where run_uuid = ? order by timestamp, step"
    )
    for name, time, value, is_nan, step in connection.execute(query, key):
        # the database has no NaN, and the largest float for an infinity
        run.add(name, step, math.nan if is_nan else float(value), int(time) / 1000)
    params, tags = (
        dict(map(tuple, connection.execute(f"select key, value from {table} where run_uuid = ?", key)))
        for table in ("params", "tags")
    )
    _fill(run, {**row, "run_id": row["run_uuid"], "run_name": row["name"]}, params, tags)


def _fill(
    run: ForeignRun, about: Mapping[str, Any], params: Mapping[str, str], tags: Mapping[str, str]
) -> None:
    last = max((time for points in run.metrics.values() for time in points.times), default=0.0)
    run.created = (about.get("start_time") or 0) / 1000
    run.ended = (about.get("end_time") or 0) / 1000 or last or run.created
    run.status = _STATUS.get(str(about.get("status")), "killed")
    run.config = {name: plain(text) for name, text in params.items()}
    run.about = {"experiment": about.get("experiment"), "user": about.get("user_id"), "tags": dict(tags)}
    run.name = str(about.get("run_name") or tags.get("mlflow.runName") or about["run_id"])
    run.key = str(about["run_id"])
