"""Runs of MLflow: a folder `mlruns` of files, or an SQLite database.

Source: the file store (EXPERIMENT/RUN/{meta.yaml,metrics/NAME,params/NAME,tags/NAME}; a line of a metric
is "milliseconds value step") and the tables of its SQL store, https://mlflow.org/docs/latest/tracking.html
"""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from everstep.importing.foreign_run import ForeignRun, Points
from everstep.importing.values import as_step, plain
from everstep.untrusted_files import open_regular, read_regular

Say = Callable[[str], None]

_STATUS: Mapping[str, Literal["finished", "failed", "killed"]] = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "killed",
    "3": "finished",
    "4": "failed",
    "5": "killed",
}
"""Status as the database and the files tell it; a run without an end was killed."""

_LARGEST = 1 << 30
_MAGIC = b"SQLite format 3\0"


def runs(path: Path, say: Say) -> Iterator[ForeignRun]:
    """Read the runs of a folder, or of a database."""
    if path.is_file():
        yield from _of_database(path, say)
        return
    for file in sorted(path.rglob("*.db")):
        yield from _of_database(file, say)
    for meta in sorted(path.rglob("meta.yaml")):
        if (meta.parent / "metrics").is_dir() or (meta.parent / "params").is_dir():
            try:
                run = None if ".trash" in meta.parts else _of_folder(meta)
            except Exception as error:  # a file may hold anything, and must not stop the others
                say(f"{meta.parent} is left out: {type(error).__name__}: {error}")
            else:
                if run is not None:
                    yield run


def _of_folder(meta: Path) -> ForeignRun | None:
    """Read a run; None if it was deleted."""
    folder = meta.parent
    about = _yaml(meta)
    if about.get("lifecycle_stage") == "deleted":
        return None
    tags = {name: text for name, text in _texts(folder / "tags")}
    metrics = {}
    for name, text in _texts(folder / "metrics"):
        metrics[name] = _points(line.split() for line in text.splitlines() if line.strip())
    above = folder.parent / "meta.yaml"
    experiment = _yaml(above).get("name") if above.is_file() else None
    return _run(
        folder,
        {**about, "status": str(about.get("status")), "experiment": experiment},
        dict(_texts(folder / "params")),
        tags,
        metrics,
    )


def _yaml(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe").load(read_regular(path, _LARGEST))
    except YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has no fields")
    return found


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and content of each file; a slash in a name is a folder."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            yield file.relative_to(folder).as_posix(), read_regular(file, _LARGEST).decode("utf-8", "replace")


def _points(rows: Iterable[Iterable[Any]]) -> Points:
    points = Points([], [], [])
    for milliseconds, value, *step in rows:
        points.times.append(int(milliseconds) / 1000)
        points.values.append(float(value))
        points.steps.append(as_step(step[0] if step else 0))
    return points


def _of_database(path: Path, say: Say) -> Iterator[ForeignRun]:
    try:
        with open_regular(path) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return
    except OSError as error:
        say(f"{path} is left out: {error.strerror}")
        return
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        try:
            found = connection.execute(
                "select runs.*, experiments.name as experiment from runs "
                "left join experiments on experiments.experiment_id = runs.experiment_id "
                "where runs.lifecycle_stage = 'active' order by start_time, run_uuid"
            ).fetchall()
            for run in found:
                yield _of_rows(connection, path, dict(run))
        except Exception as error:  # a damaged database may hold anything
            say(f"{path} is not a database of MLflow, or is damaged: {type(error).__name__}: {error}")


def _of_rows(connection: sqlite3.Connection, path: Path, run: dict[str, Any]) -> ForeignRun:
    def pairs(table: str) -> dict[str, str]:
        return dict(
            connection.execute(f"select key, value from {table} where run_uuid = ?", (run["run_uuid"],))
        )

    rows = defaultdict(list)
    query = (
        "select key, timestamp, value, is_nan, step from metrics where run_uuid = ? order by timestamp, step"
    )
    for key, time, value, is_nan, step in connection.execute(query, (run["run_uuid"],)):
        # the database has no NaN, and the largest float for an infinity
        rows[key].append((time, math.nan if is_nan else value, step))
    metrics = {key: _points(found) for key, found in rows.items()}
    told = {**run, "run_id": run["run_uuid"], "run_name": run["name"]}
    return _run(path, told, pairs("params"), pairs("tags"), metrics)


def _run(
    source: Path,
    told: Mapping[str, Any],
    params: Mapping[str, str],
    tags: Mapping[str, str],
    metrics: Mapping[str, Points],
) -> ForeignRun:
    last = max((time for points in metrics.values() for time in points.times), default=0.0)
    created = (told.get("start_time") or 0) / 1000
    return ForeignRun(
        format="mlflow",
        source=source,
        name=str(told.get("run_name") or tags.get("mlflow.runName") or told["run_id"]),
        key=str(told["run_id"]),
        created=created,
        ended=(told.get("end_time") or 0) / 1000 or last or created,
        status=_STATUS.get(str(told.get("status")), "killed"),
        config={name: plain(text) for name, text in params.items()},
        metrics=metrics,
        about={"experiment": told.get("experiment"), "user": told.get("user_id"), "tags": dict(tags)},
    )
