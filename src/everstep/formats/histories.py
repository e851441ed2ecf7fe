"""Histories that TensorBoard, MLflow or W&B has recorded, made into runs: metrics, settings, the end.

Such a directory has `run.json` and a journal, and nothing to resume from.  An import that is repeated leaves
a run alone whose records are the same; where there are more by now, they become a further start of the run,
from nothing, which supersedes the rows of the import before.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sqlite3
import struct
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from everstep.contracts.metrics import Block
from everstep.display.cells import flat
from everstep.durable import fsync_folder, make_dirs, rename, temporary, write_whole
from everstep.errors import ConfigError
from everstep.labels import add_tags
from everstep.record import RunDir
from everstep.record import journal_format as journal
from everstep.redaction import without_credentials, without_secrets
from everstep.untrusted_files import open_regular, read_regular

_ROWS = 100
"""Most rows of a block: all of its rows have one time."""
_EVALUATED = re.compile(r"(?<![a-z])(val|valid|validation|eval|evaluation|test)(?![a-z])", re.IGNORECASE)
"""Names of metrics that measure a run and no single step, and so have a best value."""
_SETTINGS_FOLDER = re.compile(r"[0-9]{9,}\.[0-9]+")
"""Folder of `SummaryWriter.add_hparams` in the folder of its run: seconds since 1970."""
_TABLES = {"runs", "experiments", "metrics", "params", "tags"}
WANDB_BLOCK, WANDB_HEAD, WANDB_BEGINNING = 32768, 7, struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
"""Bytes of a block of W&B's files, and of the head of a record in it; and what such a file begins with."""
_INFINITE = {sys.float_info.max: math.inf, -sys.float_info.max: -math.inf}
"""What MLflow writes into its database in place of an infinity."""

Points: TypeAlias = list[tuple[int, float, float]]
"""(step, value, seconds since 1970) of a metric."""


@dataclass
class History:
    """Run as another program has recorded it; `key` tells it from all others of that program."""

    format: str
    key: str
    name: str
    points: dict[str, Points] = field(default_factory=lambda: defaultdict(list))
    config: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"
    began: float = 0.0
    ended: float = 0.0


Source: TypeAlias = tuple[str, Callable[[], History]]
"""Place of a run, and the function that reads it."""


def bring(history: History, folder: Path) -> tuple[Path, bool]:
    """Write a history into a run directory below `folder`, whole or not at all.

    Returns:
        The directory; False if it had the same records.
    """
    safe = re.sub(r"[^\w.-]+", "-", history.name).strip("-.").encode()[:80].decode(errors="ignore")
    name = f"{safe or 'run'}-{xxhash.xxh3_64_hexdigest(f'{history.format} {history.key}'.encode())[:12]}"
    path = folder.absolute() / name
    if path.exists():
        number = RunDir.open(path, create=False).next_segment()
        newest, place = journal.segment_path(path, number - 1), journal.segment_path(path, number)
        if newest.exists() and read_regular(newest) == _segment(history, name, number - 1):
            return path, False
        write_whole(place, _segment(history, name, number), "import", replace=False)
        return path, True
    data = _segment(history, name, 1)
    make_dirs(folder.absolute(), "import")
    unfinished = temporary(path)  # no reader finds a half of it
    shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process that had the same number
    about = {"id": name, "created": _time(history.began), "imported": history.format}
    RunDir.open(unfinished, seed=0, about={**about, "seed_given": False})
    add_tags(unfinished, ["imported"])
    make_dirs(unfinished / "journal", "import")
    write_whole(journal.segment_path(unfinished, 1), data, "import")
    rename(unfinished, path, "import")
    fsync_folder(path.parent, "import")
    return path, True


def _segment(history: History, run: str, number: int) -> bytes:
    """Return the bytes of a start's file; equal histories have equal bytes."""
    about = {"format": history.format, "source": history.key, **history.about}
    facts = {"argv": [], "config": without_secrets(history.config), "lock": False, "imported": about}
    start = {"run": run, "parent": None, "facts": without_credentials(facts)}
    step = max((step for points in history.points.values() for step, _, _ in points), default=0)
    end = {"status": history.status, "reason": f"imported from {history.format}", "step": max(0, step)}
    frames = [(journal.EVENT, journal.pack_event("segment", start, True, _time(history.began)))]
    frames += [(journal.METRICS, journal.pack_block(*timed)) for timed in _blocks(history)]
    frames.append((journal.EVENT, journal.pack_event("closed", end, True, _time(history.ended))))
    data = bytearray(journal.pack_header(number, None))
    for kind, payload in frames:
        data += journal.pack_frame(kind, len(data), payload)
    return bytes(data)


def _blocks(history: History) -> Iterator[tuple[Block, float]]:
    """Divide the rows of each metric, in the order of steps, into blocks, with the time of the last row."""
    for name, points in history.points.items():
        phase, rows = "tail" if _EVALUATED.search(name) else "step", sorted(points, key=itemgetter(0))
        numbers = [number for _, same in groupby(rows, itemgetter(0)) for number, _ in enumerate(same)]
        for begin in range(0, len(rows), _ROWS):
            steps, values, times = (list(column) for column in zip(*rows[begin : begin + _ROWS], strict=True))
            ones, seqs = [1] * len(steps), numbers[begin : begin + _ROWS]
            yield Block(0, phase, name, False, steps, values, ones, seqs), _time(times[-1])


def _time(seconds: float) -> float:
    return min(max(0.0, seconds), journal.LATEST - 1)


def tensorboard(path: Path) -> Iterator[Source]:
    """Yield the runs in a file or a folder: each folder with event files is one, as in TensorBoard itself."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in [path] if path.is_file() else path.rglob("*tfevents*"):
        if os.path.isfile(file):  # no pipe, which would be waited for
            folders[file.parent].append(file)
    settings: dict[Path, list[Path]] = defaultdict(list)
    for folder in [each for each in folders if each.parent in folders]:
        if _SETTINGS_FOLDER.fullmatch(folder.name):
            settings[folder.parent] += folders.pop(folder)
    for folder, files in sorted(folders.items()):
        name = "/".join(folder.relative_to(path).parts) if path.is_dir() else ""
        history = History("tensorboard", str(folder.resolve()), name or folder.resolve().name)
        yield str(folder), partial(_read_events, history, sorted(files), sorted(settings[folder]))


def _read_events(history: History, files: Iterable[Path], settings: Iterable[Path]) -> History:
    times: list[float] = []
    for file in files:
        _supersede(history.points, _events_in(file, history, times))
    for file in settings:
        for tag, points in _events_in(file, history, times).items():
            history.points.setdefault(tag, points)  # the run's own values have their steps
    history.began, history.ended = min(times, default=0.0), max(times, default=0.0)
    return history


def _supersede(points: dict[str, Points], by: dict[str, Points]) -> None:
    """Add a later file's points: a program that was killed, and started again, has drawn some steps twice."""
    for tag, later in by.items():
        points[tag] = [row for row in points[tag] if row[0] < later[0][0]] + later


def _events_in(file: Path, history: History, times: list[float]) -> dict[str, Points]:
    """Return the points of a file; take its settings and times, and count what is left out."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.util.tensor_util import make_ndarray

    points: dict[str, Points] = defaultdict(list)
    open_regular(file).close()
    for event in EventFileLoader(str(file)).Load():
        times += [event.wall_time] * bool(event.wall_time)
        for value in event.summary.value:
            plugin = value.metadata.plugin_data
            size = math.prod(side.size for side in value.tensor.tensor_shape.dim)
            if plugin.plugin_name == "scalars" and size == 1:  # a few bytes can stand for many elements
                points[value.tag].append((event.step, make_ndarray(value.tensor).item(), event.wall_time))
            elif plugin.plugin_name == "hparams":
                hparams = HParamsPluginData.FromString(plugin.content).session_start_info.hparams
                for name, kinds in hparams.items():
                    history.config[name] = getattr(kinds, kinds.WhichOneof("kind") or "string_value")
            else:
                history.about.setdefault("left_out", Counter())[plugin.plugin_name] += 1
    return points


def mlflow(path: Path) -> Iterator[Source]:
    """Yield the runs in a database, or in the files mlflow.db of a folder."""
    databases = [path] if path.is_file() else sorted(path.rglob("mlflow.db"))
    if not databases and any((each.parent / "params").is_dir() for each in path.rglob("meta.yaml")):
        raise ConfigError(
            f"{path} has runs in MLflow's older folders of files, which are not read; make a database: "
            "mlflow migrate-filestore --source FOLDER --target sqlite:///mlflow.db (FOLDER has the mlruns)"
        )
    for file in databases:
        try:
            yield from _runs_in(file)
        except Exception as error:  # a file may hold anything, and must not stop the others
            yield str(file), partial(_fail, error)


def _fail(error: Exception) -> History:
    raise error


def _runs_in(file: Path) -> Iterator[Source]:
    open_regular(file).close()
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        database.execute("pragma trusted_schema = off")
        tables = database.execute("select name from sqlite_master where type = 'table' and rootpage > 0")
        if missing := _TABLES - {name for (name,) in tables}:  # a view may have no end
            raise ConfigError(f"no tables {', '.join(sorted(missing))}; give a database that MLflow has made")
        runs = database.execute(
            "select runs.*, experiments.name as experiment from runs left join experiments "
            "using (experiment_id) where runs.lifecycle_stage = 'active' order by start_time, run_uuid"
        )
        for run in runs.fetchall():
            yield f"{file}, run {run['run_uuid']}", partial(_read_tables, database, run)


def _read_tables(database: sqlite3.Connection, run: sqlite3.Row) -> History:
    def rows(columns: str, table: str) -> list[Any]:
        query = f"select {columns} from {table} where run_uuid = ? order by rowid"
        return [tuple(row) for row in database.execute(query, (run["run_uuid"],))]

    history = History("mlflow", run["run_uuid"], run["name"] or run["run_uuid"])
    for name, step, value, is_nan, time in rows("key, step, value, is_nan, timestamp", "metrics"):
        number = math.nan if is_nan else _INFINITE.get(float(value), float(value))
        history.points[name].append((int(step), number, int(time) / 1000))
    history.config = {name: _setting(text) for name, text in rows("key, value", "params")}
    tags = dict(rows("key, value", "tags"))
    history.about = {"experiment": run["experiment"], "user": run["user_id"], "tags": without_secrets(tags)}
    history.status = run["status"].lower() if run["status"] in ("FINISHED", "FAILED") else "killed"
    history.began = (run["start_time"] or 0) / 1000
    last = max((time for points in history.points.values() for _, _, time in points), default=0.0)
    history.ended = (run["end_time"] or 0) / 1000 or max(last, history.began)
    return history


def _setting(text: str) -> Any:
    """Return the number, list ... that MLflow keeps as a string, to be compared: "config.lr<0.1"."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def wandb_offline(path: Path) -> Iterator[Source]:
    """Yield the runs in a file, or in the files `run-ID.wandb` of a folder; a resume has its own file."""
    files = [path] if path.is_file() else filter(os.path.isfile, path.rglob("run-*.wandb"))  # no pipe
    by_time = sorted(files, key=lambda file: (file.name, file.parent.name.removeprefix("offline-")))
    for _, same in groupby(by_time, lambda file: file.name):
        parts = list(same)
        yield str(parts[-1]), partial(_read_records, parts)


def _read_records(files: Iterable[Path]) -> History:
    history, left_out = History("wandb", "", ""), Counter[str]()
    for file in files:
        points: dict[str, Points] = defaultdict(list)
        history.status = "killed"
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = record.run
                history.key = f"{run.entity}/{run.project}/{run.run_id}"
                history.name = run.display_name or run.run_id
                history.began = history.began or run.start_time.ToMicroseconds() / 1e6
                history.about = {"project": run.project, "group": run.run_group, "tags": list(run.tags)}
            if kind in ("run", "config"):
                history.config |= _values((run.config if kind == "run" else record.config).update)
            elif kind == "history":
                row = dict(flat(_values(record.history.item)))
                step, time = int(row.get("_step", record.history.step.num)), float(row.get("_timestamp", 0))
                media = {n.removesuffix("_type"): kind for n, kind in row.items() if n.endswith("._type")}
                plain = {name: value for name, value in row.items() if not name.startswith(("_", *media))}
                for name, value in plain.items():
                    if isinstance(value, int | float):
                        points[name].append((step, float(value), time))
                left_out.update([*media.values(), *("text" for v in plain.values() if isinstance(v, str))])
                history.ended = max(history.ended, time)
            elif kind == "exit":
                history.status = "failed" if record.exit.exit_code else "finished"
        before, now = ([row[0] for rows in of.values() for row in rows] for of in (history.points, points))
        shift = max(before) + 1 if before and now and min(now) <= min(before) else 0  # they begin again
        later = {name: [(n + shift, value, time) for n, value, time in rows] for name, rows in points.items()}
        _supersede(history.points, later)
    if not history.key:
        raise ConfigError("it has no record of a run; give a file that W&B has written")
    history.config.pop("_wandb", None)
    history.about["left_out"] = left_out
    return history


def _values(items: Iterable[Any]) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a file of W&B, a log as LevelDB has them, up to where a kill has cut it off.

    Raises:
        ConfigError: W&B has not written it, or it was damaged since.
    """
    from wandb.proto import wandb_internal_pb2

    form: Any = wandb_internal_pb2
    with BufferedReader(open_regular(file)) as log:
        if log.read(WANDB_HEAD) != WANDB_BEGINNING:
            raise ConfigError("it does not begin as a file of W&B; give one that W&B has written")
        record, at = bytearray(), WANDB_HEAD
        while True:
            if (room := WANDB_BLOCK - at % WANDB_BLOCK) < WANDB_HEAD:
                at += len(log.read(room))
            if len(head := log.read(WANDB_HEAD)) < WANDB_HEAD or not any(head):  # a power cut leaves zeros
                return
            checksum, size, kind = struct.unpack("<IHB", head)
            if len(part := log.read(size)) < size:
                return
            if zlib.crc32(part, zlib.crc32(head[6:])) != checksum:
                raise ConfigError(f"it is damaged at byte {at:,}; give the file as W&B has written it")
            if kind == 2:  # the first piece, perhaps after a record that has no end
                record.clear()
            record += part
            at += WANDB_HEAD + size
            if kind in (1, 4):  # whole, or the last piece
                yield form.Record.FromString(bytes(record))
                record.clear()


FORMATS = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb-offline": wandb_offline}
"""Name of a format -> function that finds its runs in a file, or in a folder and all folders below."""
