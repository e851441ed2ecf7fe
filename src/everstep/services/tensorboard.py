"""Event files of the record for TensorBoard."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep import backends
from everstep.arguments import integer
from everstep.contracts.services import SCHEDULED, Boundary, Moment, RunView
from everstep.contracts.state import HostArray
from everstep.durable import require_no_link, write_whole
from everstep.errors import MetricError
from everstep.record import Event, Item
from everstep.schedule import Schedule
from everstep.services.best import matches
from everstep.services.sink import Parts, Sink, require_package

_NOTE = "summary"
_BARE = ("head", "step", "tail")
_BINS = 64
_CHANNELS = (1, 3, 4)
_STRING = 7  # TensorFlow's DT_STRING


class Image(NamedTuple):
    """Picture for `loop.add_summary`.

    `pixels`: on the host or a device, (height, width) or with 1, 3 or 4 channels, which are the last or the
    first axis; uint8, or real numbers from 0 to 1.
    """

    pixels: Any


class Histogram(NamedTuple):
    """Distribution of `values` (numbers, any shape) for `loop.add_summary`; only finite ones count."""

    values: Any


class TensorBoard(Sink):
    """Write the record, and summaries from `loop.add_summary`, as event files for TensorBoard.

        loop.add_summary({"samples": Image(pixels), "weights": Histogram(w), "text": "Once upon ..."})

    Metrics collected in steps and outside them have their own names as tags; means over an epoch's
    steps are "epoch/NAME", metrics of a service "eval/SERVICE/NAME".  There is a file for each start.  Needs
    `everstep[tensorboard]`.

    Args:
        path: the folder, in `logs/` of the run directory.
        prefix: prefix of each tag.
        skip: patterns ("*_time") of metrics that are left out.
        throttle: n, to write values in steps only at every n-th step; for all metrics, or by name.
        every: as in `JSONLines`.
    """

    moments = SCHEDULED | {Moment.SUMMARY_ADDED}
    binary = True
    whole_steps = False  # its points have no order

    isolate = False  # it draws no random numbers

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
        require_package("TensorBoard", "tensorboard")
        self._prefix, self._skip = prefix, (skip,) if isinstance(skip, str) else tuple(skip)
        by_name = throttle if isinstance(throttle, Mapping) else {"*": throttle}
        self._throttle = {name: integer("throttle", count) for name, count in by_name.items()}

    def run(self, boundary: Boundary) -> None:
        if boundary.moment is Moment.SUMMARY_ADDED:
            self._note_summary(boundary.payload, "")
        else:
            self.catch_up()

    def _note_summary(self, summary: Any, name: str) -> None:
        """Note a summary in the journal, which saves and supersedes it with all other values."""
        if isinstance(summary, Mapping):
            for key, value in summary.items():
                self._note_summary(value, f"{name}/{key}" if name else str(key))
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
        # a name of a file has 255 bytes, and a character up to four
        stem, digest = re.sub(r"[^\w-]+", ".", name)[:50], xxhash.xxh3_64_hexdigest(png)[:8]
        place = Path("logs", "media", f"{stem}-{self._run.step:08d}-{digest}.png")
        target = self._run.run_dir / place
        require_no_link(target, self._run.run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, png, "media", replace=False)
        height, width, channels = pixels.shape
        return {"file": place.as_posix(), "height": height, "width": width, "channels": channels}

    def open(self, run: RunView) -> None:
        super().open(run)
        self._first = run.step + 1

    def begin(self, parts: Parts) -> None:
        """Make a file for each earlier start, unless it has just these points, and that of this start."""
        settings = xxhash.xxh3_64_hexdigest(repr((self._prefix, self._skip, self._throttle)).encode())[:8]
        *older, (number, news) = parts
        files = {self._file_path(f"{n:010d}.{len(items)}.{settings}"): items for n, items in older}
        for path, items in files.items():
            if not path.exists():
                self.make(path, items)
        new_file = self._file_path(f"{number:010d}.new")
        self.make(new_file, news)
        for path in {*self.path.glob("events.out.tfevents.*.everstep")} - {*files, new_file}:
            if path.is_symlink() or not path.stat().st_size:
                path.unlink()
            else:
                os.truncate(path, 0)  # an open TensorBoard never leaves a file that is gone

    def _file_path(self, part: str) -> Path:
        return self.path / f"events.out.tfevents.{part}.everstep"

    def head(self, file: IO[bytes]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog

        # a restart: an open TensorBoard forgets the points that this start makes again
        start = SessionLog(status=SessionLog.START)
        _append(file, [Record(file_version="brain.Event:2"), Record(step=self._first, session_log=start)])

    def write(self, file: IO[bytes], items: Iterable[Item]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        records = (
            Record(
                wall_time=item.time,
                step=step,
                summary={"value": [{"tag": _text(self._prefix + name).decode(), **fields}]},
            )
            for item in items
            for name, step, fields in self._points(item)
        )
        _append(file, records)

    def _points(self, item: Item) -> Iterator[tuple[str, int, dict[str, Any]]]:
        if isinstance(item, Event):
            if item.kind == _NOTE:
                yield item.data["name"], item.data["step"], self._summary(item.data)
            return
        block = item.block
        if matches(block.name, self._skip):
            return
        name = block.name if block.phase in _BARE else f"{block.phase}/{block.name}"
        thin = self._throttle.get(block.name, self._throttle.get("*", 1))
        for step, value in zip(block.steps, block.values, strict=True):
            if block.phase != "step" or step % thin == 0:
                yield name, step, {"simple_value": value}

    def _summary(self, data: dict[str, Any]) -> dict[str, Any]:
        if "text" in data:
            tensor = {"tensor_shape": {"dim": [{"size": 1}]}, "string_val": [_text(data["text"])]}
            plugin = {"plugin_data": {"plugin_name": "text"}}
            return {"metadata": plugin, "tensor": {"dtype": _STRING, **tensor}}
        if "histogram" in data:
            return {"histo": data["histogram"]}
        image = data["image"]
        fields = {"height": image["height"], "width": image["width"], "colorspace": image["channels"]}
        with suppress(FileNotFoundError):  # the picture's file was deleted: the point stays without it
            fields["encoded_image_string"] = (self._run.run_dir / image["file"]).read_bytes()
        return {"image": fields}


def _append(file: IO[bytes], records: Iterable[Any]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file)
    for record in records:
        writer.write(record.SerializeToString())


def _on_host(array: Any) -> NDArray[Any]:
    backend = backends.of(array)
    if backend is None:
        raise MetricError(f"{array!r} is not an array; give a NumPy array or a tensor")
    host = backend.to_host(array, None)
    try:
        pixels: NDArray[Any] = backends.get("numpy").from_host(
            HostArray(host.dtype, host.shape, host.data, "numpy")
        )
    except KeyError:
        raise MetricError(f"an array of {host.dtype} cannot be shown; convert it, to float32 say") from None
    return pixels


def _as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
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


def _text(text: str) -> bytes:
    return text.encode(errors="replace")  # a bad character must not stop the other records
