"""Runs that W&B has recorded offline: files `run-ID.wandb`.

Source: the file is a log of LevelDB (https://github.com/google/leveldb/blob/main/doc/log_format.md) after 7
bytes of its own (":W&B", a magic number, a version), and its checksums are CRC-32; each record is a protobuf
message `Record` of `wandb_internal.proto`.  The package wandb has no public reader of such files any more.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from everstep.display.cells import flat
from everstep.importing.foreign_run import ForeignRun
from everstep.untrusted_files import parse_json, read_regular

_LARGEST = 1 << 32
_BLOCK = 1 << 15
_HEADER = b":W&B\xe1\xbe"
_HEADER_SIZE = 7
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

_HISTORY, _SUMMARY, _CONFIG, _RUN, _EXIT = 2, 3, 5, 17, 18
"""Fields of `Record`."""
_OTHERS = {4: "lines of output", 6: "files", 7: "system statistics", 8: "artifacts", 13: "lines of output"}


_TEXTS = {1: "run_id", 2: "entity", 3: "project", 6: "group", 8: "display_name", 9: "notes", 13: "host"}
"""Fields of a run's message."""


def sources(path: Path, say: Callable[[str], None]) -> Iterator[tuple[Path, Callable[[ForeignRun], object]]]:
    """Yield the file of each run in a folder, or one file, and the function that reads it."""
    files = [path] if path.is_file() else sorted(path.rglob("run-*.wandb"))
    for file in dict.fromkeys(file.resolve() for file in files):  # latest-run is a link to the newest one
        yield file, _read


def _read(run: ForeignRun) -> None:
    data = read_regular(run.source, _LARGEST)
    if not data.startswith(_HEADER):
        raise ValueError("it is not a file of W&B")
    run.name = run.key = run.source.stem
    run.about = {"tags": [], "summary": {}}
    for record in _records(data):
        for field, value in _fields(record):
            if field == _HISTORY:
                _read_history(value, run)
            elif field == _SUMMARY:
                run.about["summary"] |= dict(_items(value, 1))
            elif field == _CONFIG:
                _read_config(value, run)
            elif field == _RUN:
                _read_run(value, run)
            elif field == _EXIT:
                run.status = "failed" if dict(_fields(value)).get(1, 0) else "finished"
            elif field in _OTHERS:
                run.left_out[_OTHERS[field]] += 1


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of the log."""
    at, parts = _HEADER_SIZE, b""
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD.size:
            at += left
            continue
        if at + _RECORD.size > len(data):
            raise ValueError(f"it ends inside a record, at byte {at:,}")
        checksum, length, kind = _RECORD.unpack_from(data, at)
        if (checksum, length, kind) == (0, 0, 0):  # the rest of a block that was made in advance
            at += left
            continue
        body = data[at + _RECORD.size : at + _RECORD.size + length]
        if len(body) != length or zlib.crc32(bytes([kind]) + body) != checksum:
            raise ValueError(f"the record at byte {at:,} is torn or damaged")
        at += _RECORD.size + length
        parts = parts + body if kind in (_MIDDLE, _LAST) else body
        if kind in (_FULL, _LAST):
            yield parts


def _read_history(message: bytes, run: ForeignRun) -> None:
    row = dict(_items(message, 1))
    number = next((dict(_fields(value)).get(1, 0) for field, value in _fields(message) if field == 2), 0)
    step, time = row.pop("_step", number), float(row.pop("_timestamp", run.ended))
    run.ended = max(run.ended, time)
    row.pop("_runtime", None)  # the time since the beginning, once more
    for name, value in flat(row, is_leaf=lambda value: "_type" in value):
        if isinstance(value, bool) or not isinstance(value, int | float):
            run.left_out["values that are not numbers"] += 1
        else:
            run.add(name, step, float(value), time)


def _read_config(message: bytes, run: ForeignRun) -> None:
    run.config |= {name: value for name, value in _items(message, 1) if name != "_wandb"}


def _read_run(message: bytes, run: ForeignRun) -> None:
    for field, value in _fields(message):
        if field in _TEXTS:
            run.about[_TEXTS[field]] = value.decode("utf-8", "replace")
        elif field == 4:
            _read_config(value, run)
        elif field == 10:
            run.about["tags"].append(value.decode("utf-8", "replace"))
        elif field == 17:
            time = dict(_fields(value))
            run.created = time.get(1, 0) + time.get(2, 0) / 1e9
            run.ended = max(run.ended, run.created)
    run.key = run.about.get("run_id") or run.key
    run.name = run.about.get("display_name") or run.key


def _items(message: bytes, field: int) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the items in a message: of history, of a summary, of a config."""
    for number, item in _fields(message):
        if number == field:
            names: list[str] = []
            value: Any = None
            for part, content in _fields(item):
                if part in (1, 2):
                    names.append(content.decode("utf-8", "replace"))
                elif part in _ITEM:
                    value = _ITEM[part](content)
            yield ".".join(name for name in names if name), value


_ITEM: dict[int, Callable[[Any], Any]] = {
    4: bool,
    5: lambda number: (number >> 1) ^ -(number & 1),  # sint64 of protobuf
    6: lambda content: struct.unpack("<d", content)[0],
    7: lambda content: content.decode("utf-8", "replace"),
    8: parse_json,
    16: parse_json,
}
"""Field of an item -> how its content is read."""


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and content of a protobuf message's fields: an integer, or bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if size < 0 or at + size > len(message):
            raise ValueError("a record is not a protobuf message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a record is not a protobuf message")
