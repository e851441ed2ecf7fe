"""Event files of the record for TensorBoard."""

from __future__ import annotations

import errno
import io
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep import backends, hazard
from everstep.arguments import integer
from everstep.contracts.metrics import Block
from everstep.contracts.services import SCHEDULED, Boundary, Moment
from everstep.contracts.state import HostArray
from everstep.durable import require_no_link, write_whole
from everstep.errors import ConfigError, MetricError
from everstep.record import Event, Item
from everstep.schedule import Schedule
from everstep.services.sink import Parts, Sink

_NOTE = "summary"
_BARE = ("head", "step", "tail")
_BINS = 64
_CHANNELS = (1, 3, 4)
_STRING = 7  # TensorFlow's DT_STRING
_LENGTH = struct.Struct("<Q")
_FRAME = 16
"""Bytes of a record besides its data: the length before the data, and two checksums."""


class Image:
    """Picture for `loop.add_summary`.

    Args:
        pixels: on the host or a device, (height, width), (height, width, channels) or (channels,
            height, width); 1, 3 or 4 channels; uint8, or real numbers from 0 to 1.
    """

    def __init__(self, pixels: Any) -> None:
        self.pixels = pixels


class Histogram:
    """Distribution of values, for `loop.add_summary`.

    Args:
        values: an array or tensor of real numbers, any shape; NaN and infinities are left out.
    """

    def __init__(self, values: Any) -> None:
        self.values = values


class TensorBoard(Sink):
    """Write the record, and summaries from `loop.add_summary`, as event files for TensorBoard.

        loop.add_summary({"samples": Image(pixels), "weights": Histogram(w), "text": "Once upon ..."})

    Metrics collected in steps and outside them have their own names as tags; means over an epoch's
    steps are "epoch/NAME", metrics of a service "eval/SERVICE/NAME".  There is a file for each start of
    the process; on resume, points beyond the restored step are cut off the older files, to the byte, so
    that each point is there once.  Needs `everstep[tensorboard]`.

    Args:
        path: the folder, inside the run directory.
        prefix: prefix of each tag.
        skip: patterns ("*_time") of metrics that are left out.
        throttle: n, to write a metric's values in steps only at every n-th step; for all metrics, or by
            name.
        every: when to append new rows; default as often as the journal itself, and at the end.

    Raises:
        ConfigError: the package tensorboard is not installed; `throttle` is not 1 or more.
    """

    moments = SCHEDULED | {Moment.SUMMARY_ADDED}

    def __init__(
        self,
        path: str | Path = "logs/tensorboard",
        *,
        prefix: str = "",
        skip: Sequence[str] = (),
        throttle: int | Mapping[str, int] = 1,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(path, every=every, name=name)
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "TensorBoard() needs the package tensorboard, which is not installed: "
                "pip install 'everstep[tensorboard]'"
            )
        self._prefix, self._skip = prefix, (skip,) if isinstance(skip, str) else tuple(skip)
        self._throttle: int | dict[str, int]
        if isinstance(throttle, Mapping):
            self._throttle = {metric: integer("throttle", count) for metric, count in throttle.items()}
        else:
            self._throttle = integer("throttle", throttle)
        self._last_step = -1

    def run(self, boundary: Boundary) -> None:
        if boundary.moment is Moment.SUMMARY_ADDED:
            self._take(boundary.payload, "")
        else:
            self.catch_up()

    # ------------------------------------------------------------------------------- summaries

    def _take(self, summary: Any, name: str) -> None:
        """Note a summary in the journal, which saves and supersedes it with all other values."""
        if isinstance(summary, Mapping):
            for key, value in summary.items():
                self._take(value, f"{name}/{key}" if name else str(key))
            return
        if not name or not isinstance(summary, Image | Histogram | str):
            raise MetricError(
                f"add_summary({summary!r}): give a mapping from names to Image, Histogram or str "
                "(numbers go to collect_metrics)"
            )
        data: dict[str, Any] = {"name": name, "step": self._run.step}
        if isinstance(summary, str):
            data["text"] = summary
        elif isinstance(summary, Histogram):
            data["histogram"] = _histogram(_on_host(summary.values))
        else:
            data["image"] = self._save_image(name, _on_host(summary.pixels))
        self._run.note(_NOTE, data)

    def _save_image(self, name: str, pixels: NDArray[Any]) -> dict[str, Any]:
        """Keep a picture beside the journal, as a PNG; return the journal's description of it."""
        from PIL import Image as Pillow

        pixels = _as_bytes(pixels)
        file = io.BytesIO()
        Pillow.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
        png = file.getvalue()
        place = Path("logs", "media", f"{_file_name(name)}-{self._run.step:08d}-{_digest(png)}.png")
        target = Path(self._run.run_dir) / place
        require_no_link(target, Path(self._run.run_dir))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, png, "media", replace=False)
        height, width, channels = pixels.shape
        return {"file": place.as_posix(), "height": height, "width": width, "channels": channels}

    # ------------------------------------------------------------------------------ event files

    def begin(self, older: Parts) -> None:
        self.path.mkdir(exist_ok=True)
        self._last_step = -1
        wanted = set()
        for number, items in older:
            path = self._event_file(number)
            wanted.add(path)
            self._mend(path, items)
        for path in self.path.glob("events.out.tfevents.*.everstep"):
            if path not in wanted:
                path.unlink()
        hazard.reach("tensorboard.create")
        self._file = open(self.file_path(), "ab", buffering=0)  # noqa: SIM115
        self._append(self._file, self._heading())

    def _event_file(self, number: int) -> Path:
        """Return a segment's file; other settings give other files, made anew from the journal."""
        settings = repr((self._prefix, self._skip, self._throttle)).encode()
        file = self.path / f"events.out.tfevents.{number:010d}.{_digest(settings)}.everstep"
        require_no_link(file, Path(self._run.run_dir))
        return file

    def _mend(self, path: Path, items: list[Item]) -> None:
        """Make the file of an earlier start hold exactly its valid records: cut off, or add."""
        heading = self._heading()
        needed = len(heading) + sum(1 for _ in self._points(items))
        hazard.reach("tensorboard.mend")
        with open(path, "ab+") as file:
            present, end = _whole_records(file, needed)
            if present < len(heading):
                present = end = 0
            file.truncate(end)
            if not present:
                self._append(file, heading)
            lacking = islice(self._points(items), max(present - len(heading), 0), None)
            self._append(file, map(self._encode, lacking))

    def _heading(self) -> list[bytes]:
        """Return the first records: the file's version, and a restart: TensorBoard forgets later steps."""
        from tensorboard.compat.proto import event_pb2

        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        records = [
            event_pb2.Event(file_version="brain.Event:2"),
            event_pb2.Event(step=self._last_step + 1, session_log=restart),
        ]
        return [record.SerializeToString() for record in records]

    def add(self, news: Iterable[Item]) -> None:
        assert self._file is not None
        self.write(self._file, news)

    def write(self, file: IO[bytes], items: Iterable[Item]) -> None:
        self._append(file, map(self._encode, self._points(items)))

    def _append(self, file: IO[bytes], records: Iterable[bytes]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        memory = io.BytesIO()
        writer = RecordWriter(memory)
        for record in records:
            writer.write(record)
        hazard.reach("tensorboard.write")
        if file.write(memory.getvalue()) != memory.tell():
            raise OSError(errno.ENOSPC, "only a part was written", str(self.path))

    def _points(self, items: Iterable[Item]) -> Iterator[_Point]:
        """Yield these items as points for TensorBoard, in their order."""
        for item in items:
            if not isinstance(item, Event):
                yield from self._scalars(item.block, item.time)
            elif item.kind == _NOTE:
                data = item.data
                self._last_step = max(self._last_step, data["step"])
                yield _Point(item.time, data["step"], self._prefix + data["name"], data)

    def _scalars(self, block: Block, time: float) -> Iterator[_Point]:
        self._last_step = max(self._last_step, *block.steps)
        if any(fnmatchcase(block.name, pattern) for pattern in self._skip):
            return
        name = block.name if block.phase in _BARE else f"{block.phase}/{block.name}"
        thin = self._throttle.get(block.name, 1) if isinstance(self._throttle, dict) else self._throttle
        for step, value in zip(block.steps, block.values, strict=True):
            if block.phase != "step" or step % thin == 0:
                yield _Point(time, step, self._prefix + name, value)

    def _encode(self, point: _Point) -> bytes:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        record = Record(wall_time=point.time, step=point.step)
        value = record.summary.value.add(tag=_text(point.tag).decode())
        if isinstance(point.value, float):
            value.simple_value = point.value
        elif "text" in point.value:
            value.metadata.plugin_data.plugin_name = "text"
            value.tensor.dtype = _STRING
            value.tensor.tensor_shape.dim.add(size=1)
            value.tensor.string_val.append(_text(point.value["text"]))
        elif "histogram" in point.value:
            _fill_histogram(value.histo, point.value["histogram"])
        else:
            self._fill_image(value.image, point.value["image"])
        encoded: bytes = record.SerializeToString()
        return encoded

    def _fill_image(self, image: Any, data: dict[str, Any]) -> None:
        image.height, image.width, image.colorspace = data["height"], data["width"], data["channels"]
        with suppress(FileNotFoundError):  # the picture's file was deleted: the point stays without it
            image.encoded_image_string = (Path(self._run.run_dir) / data["file"]).read_bytes()

    def file_path(self) -> Path:
        return self._event_file(self._run.segment)


class _Point(NamedTuple):
    time: float
    step: int
    tag: str
    value: float | dict[str, Any]
    """Number, or the journal's description of a summary."""


def _whole_records(file: BinaryIO, limit: int) -> tuple[int, int]:
    """Count the whole records at the start of an event file, at most `limit`, and find their end."""
    size = file.seek(0, os.SEEK_END)
    count = end = 0
    while count < limit and end + _LENGTH.size <= size:
        file.seek(end)
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if not 0 < length <= size - end - _FRAME:
            break
        count, end = count + 1, end + length + _FRAME
    return count, end


def _on_host(array: Any) -> NDArray[Any]:
    """Copy an array or tensor to a NumPy array."""
    backend = backends.of(array)
    if backend is None:
        raise MetricError(f"{array!r} is not an array; give a NumPy array or a tensor")
    host = backend.to_host(array, None)
    try:
        copied: NDArray[Any] = backends.get("numpy").from_host(
            HostArray(host.dtype, host.shape, host.data, "numpy")
        )
    except KeyError:
        raise MetricError(f"an array of {host.dtype} cannot be shown; convert it, to float32 say") from None
    return copied


def _as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert pixels to (height, width, channels) of uint8."""
    shape = pixels.shape
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.ndim == 3 and shape[0] in _CHANNELS and shape[2] not in _CHANNELS:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] not in _CHANNELS or not pixels.size:
        raise MetricError(
            f"an image of shape {shape}: give (height, width), (height, width, channels) or "
            "(channels, height, width), with 1, 3 or 4 channels"
        )
    if pixels.dtype != np.uint8:
        pixels = np.rint(255 * np.nan_to_num(pixels.astype(np.float64)).clip(0, 1)).astype(np.uint8)
    return np.ascontiguousarray(pixels)


def _histogram(values: NDArray[Any]) -> dict[str, Any]:
    finite = values[np.isfinite(values)].astype(np.float64).ravel()
    if not finite.size:
        raise MetricError(f"a histogram of {values.size} values, none of them finite; give finite values")
    counts, edges = np.histogram(finite, bins=_BINS)
    return {
        "min": float(finite.min()),
        "max": float(finite.max()),
        "num": float(finite.size),
        "sum": float(finite.sum()),
        "sum_squares": float(finite @ finite),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.astype(float).tolist(),
    }


def _fill_histogram(histo: Any, data: dict[str, Any]) -> None:
    for field, value in data.items():
        if isinstance(value, list):
            getattr(histo, field).extend(value)
        else:
            setattr(histo, field, value)


def _text(text: str) -> bytes:
    """Encode a string as UTF-8, whatever it holds: a bad character must not stop the other records."""
    return text.encode(errors="replace")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w-]+", ".", name)[:80]


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)[:8]
