"""Runs of TensorBoard: each folder with event files is one run, as in TensorBoard itself.

Where a program was killed and started again, it has written a further file, which begins at an earlier step
than the file before has reached; TensorBoard draws both.  Here the later file counts from its first step on.

PyTorch's `SummaryWriter.add_hparams` writes into a folder of its own inside the run's, named by the time; its
settings and final values are those of the run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from everstep.importing.foreign_run import ForeignRun, Points

_TIME = re.compile(r"[0-9]{9,}\.[0-9]+")
"""Name of a folder of `add_hparams`: seconds since 1970."""


def sources(path: Path, say: Callable[[str], None]) -> Iterator[tuple[Path, Callable[[ForeignRun], object]]]:
    """Yield the folder of each run below a path, or of one file, and the function that reads it."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in [path] if path.is_file() else sorted(path.rglob("*tfevents*")):
        folders[file.parent].append(file)
    top = path.parent if path.is_file() else path
    settings: dict[Path, list[Path]] = defaultdict(list)
    for folder in [folder for folder in folders if folder.parent in folders and _TIME.fullmatch(folder.name)]:
        settings[folder.parent] += sorted(folders.pop(folder))
    for folder, files in folders.items():
        relative = folder.relative_to(top).as_posix()
        name = folder.absolute().name if relative == "." else relative
        yield folder, partial(_read, name, sorted(files, key=_begun), settings[folder], say)


def _begun(file: Path) -> tuple[str, str]:
    """Return the time in a file's name, then the name."""
    return file.name.rpartition("tfevents.")[2].partition(".")[0], file.name


def _read(
    name: str, files: list[Path], settings: list[Path], say: Callable[[str], None], run: ForeignRun
) -> None:
    run.name, run.key, run.status = name, str(run.source.absolute()), "finished"
    run.about = {"event_files": len(files) + len(settings)}
    times: list[float] = []
    for file in files:
        before, run.metrics = run.metrics, {}
        _read_file(file, run, times, say)
        for tag, points in before.items():
            later = run.metrics.get(tag)
            first = min(later.steps) if later else None
            kept = [row for row in zip(*points, strict=True) if first is None or row[0] < first]
            run.left_out["points of an earlier start"] += len(points.steps) - len(kept)
            rows = [*kept, *(zip(*later, strict=True) if later else ())]
            run.metrics[tag] = Points(*(list(column) for column in zip(*rows, strict=True)))
    for file in settings:  # values that the run itself has, too, are there with their steps
        before, run.metrics = run.metrics, {}
        _read_file(file, run, times, say)
        run.metrics |= before
    run.created, run.ended = min(times, default=0.0), max(times, default=0.0)


def _read_file(file: Path, run: ForeignRun, times: list[float], say: Callable[[str], None]) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    try:
        for event in EventFileLoader(str(file)).Load():
            if event.wall_time:
                times.append(event.wall_time)
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                if plugin == "scalars":
                    number = float(tensor_util.make_ndarray(value.tensor).item())
                    run.add(value.tag, event.step, number, event.wall_time)
                elif plugin == "hparams":
                    _read_settings(value.metadata.plugin_data.content, run)
                else:
                    run.left_out[plugin or "unknown"] += 1
    except Exception as error:  # of the library, for a damaged file: what it has read until then counts
        say(f"{file} is read up to its damage: {type(error).__name__}: {error}")


def _read_settings(content: bytes, run: ForeignRun) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    data: Any = plugin_data_pb2.HParamsPluginData.FromString(content)
    for name, value in data.session_start_info.hparams.items():
        run.config[name] = getattr(value, value.WhichOneof("kind") or "string_value")
    if data.session_end_info.status == 2:  # STATUS_FAILURE, in api.proto
        run.status = "failed"
