"""Runs of TensorBoard: each folder with event files is one run, as in TensorBoard itself.

Where a program was killed and started again, it has written a further file, which begins at an earlier step
than the file before has reached; TensorBoard draws both.  Here the later file counts from its first step on.

PyTorch's `SummaryWriter.add_hparams` writes into a folder of its own inside the run's, named by the time; its
settings and final values are those of the run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from everstep.importing.foreign_run import ForeignRun, Points
from everstep.importing.values import as_step

Say = Callable[[str], None]

_TIME = re.compile(r"[0-9]{9,}\.[0-9]+")
"""Name of a folder of `add_hparams`: seconds since 1970."""


def runs(path: Path, say: Say) -> Iterator[ForeignRun]:
    """Read the runs of a folder, or of one file."""
    files = [path] if path.is_file() else sorted(path.rglob("*tfevents*"))
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        folders[file.parent].append(file)
    top = path.parent if path.is_file() else path
    settings: dict[Path, list[Path]] = defaultdict(list)
    for folder in [folder for folder in folders if folder.parent in folders and _TIME.fullmatch(folder.name)]:
        settings[folder.parent] += sorted(folders.pop(folder))
    for folder, found in folders.items():
        relative = folder.relative_to(top).as_posix()
        name = folder.absolute().name if relative == "." else relative
        yield _Folder(folder, name, sorted(found, key=_begun), settings[folder], say).run()


def _begun(file: Path) -> tuple[str, str]:
    """Return the time in a file's name, then the name."""
    return file.name.rpartition("tfevents.")[2].partition(".")[0], file.name


class _Folder:
    def __init__(self, folder: Path, name: str, files: list[Path], settings: list[Path], say: Say) -> None:
        self._folder, self._name, self._say = folder, name, say
        self._files, self._settings = files, settings
        self._metrics: dict[str, Points] = {}
        self._config: dict[str, Any] = {}
        self._left_out: Counter[str] = Counter()
        self._times: list[float] = []
        self._status: Literal["finished", "failed", "killed"] = "finished"

    def run(self) -> ForeignRun:
        for file in self._files:
            self._join(self._read(file))
        for file in self._settings:  # values that the run itself has, too, are there with their steps
            self._metrics = {**self._read(file), **self._metrics}
        return ForeignRun(
            format="tensorboard",
            source=self._folder,
            name=self._name,
            key=str(self._folder.absolute()),
            created=min(self._times, default=0.0),
            ended=max(self._times, default=0.0),
            status=self._status,
            config=self._config,
            metrics=self._metrics,
            about={"event_files": len(self._files) + len(self._settings)},
            left_out=self._left_out,
        )

    def _read(self, file: Path) -> dict[str, Points]:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        found: dict[str, Points] = defaultdict(lambda: Points([], [], []))
        try:
            for event in EventFileLoader(str(file)).Load():
                if event.wall_time:
                    self._times.append(event.wall_time)
                for value in event.summary.value:
                    self._take(found, event, value)
        except Exception as error:  # of the library, for a damaged file: what it has read until then counts
            self._say(f"{file} is read up to its damage: {type(error).__name__}: {error}")
        return dict(found)

    def _join(self, found: dict[str, Points]) -> None:
        for tag, points in found.items():
            self._metrics[tag] = self._joined(self._metrics.get(tag), points)

    def _joined(self, before: Points | None, later: Points) -> Points:
        if before is None:
            return later
        first = min(later.steps)
        kept = [row for row in zip(*before, strict=True) if row[0] < first]
        self._left_out["points of an earlier start"] += len(before.steps) - len(kept)
        rows = [*kept, *zip(*later, strict=True)]
        return Points(*(list(column) for column in zip(*rows, strict=True)))

    def _take(self, found: dict[str, Points], event: Any, value: Any) -> None:
        from tensorboard.util import tensor_util

        plugin = value.metadata.plugin_data.plugin_name
        if plugin == "scalars":
            points = found[value.tag]
            points.steps.append(as_step(event.step))
            points.values.append(float(tensor_util.make_ndarray(value.tensor).item()))
            points.times.append(event.wall_time)
        elif plugin == "hparams":
            self._take_settings(value.metadata.plugin_data.content)
        else:
            self._left_out[plugin or "unknown"] += 1

    def _take_settings(self, content: bytes) -> None:
        from tensorboard.plugins.hparams import plugin_data_pb2

        told = plugin_data_pb2.HParamsPluginData.FromString(content)
        for name, value in told.session_start_info.hparams.items():
            self._config[name] = getattr(value, value.WhichOneof("kind") or "string_value")
        if told.session_end_info.status == 2:  # STATUS_FAILURE, in api.proto
            self._status = "failed"
