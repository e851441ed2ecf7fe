"""A run that another program has recorded, and the run directory that is made of it.

The directory has `run.json` and a journal, nothing to resume from.  An import that is repeated leaves a run
alone whose records are the same; where there are more by now, they become a further start of the run, from
nothing, which supersedes the rows of the import before.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from everstep.contracts.metrics import Block
from everstep.durable import fsync_folder, make_dirs, remedy, rename, temporary, write_whole
from everstep.errors import RunDirError
from everstep.record import RunDir, RunJournal
from everstep.record.journal_format import (
    EVENT,
    LATEST,
    METRICS,
    pack_block,
    pack_event,
    pack_frame,
    pack_header,
)
from everstep.record.provenance import as_json
from everstep.record.segment_file import segment_path
from everstep.redaction import without_credentials

_ROWS = 100
"""Rows of a block: each block has one time, that of its first row."""


class Points(NamedTuple):
    """Values of one metric, columns of equal length.

    Attributes:
        steps: int64 numbers, in any order, also more than once.
        values: float64 values.
        times: seconds since 1970.
    """

    steps: list[int]
    values: list[float]
    times: list[float]


@dataclass
class ForeignRun:
    """Run as another program has recorded it, filled in while its records are read.

    Attributes:
        format: name of the program's format, as in `FORMATS`.
        source: the file or folder.
        name: name for people; the run's folder is named after it.
        key: what tells the run from all others of its program, such as an id; "" before it is known.
        created, ended: seconds since 1970.
        status: how it ended.
        config: the settings, JSON.
        metrics: name to points.
        about: what else is known, such as tags, JSON.
        left_out: kind of record to number of records that cannot be brought, such as "images".
    """

    format: str
    source: Path
    name: str = ""
    key: str = ""
    created: float = 0.0
    ended: float = 0.0
    status: Literal["finished", "failed", "killed"] = "killed"
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Points] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, metric: str, step: Any, value: float, time: float) -> None:
        """Add a value of a metric."""
        points = self.metrics.setdefault(metric, Points([], [], []))
        points.steps.append(as_step(step))
        points.values.append(value)
        points.times.append(time)

    @property
    def rows(self) -> int:
        """Number of values."""
        return sum(len(points.steps) for points in self.metrics.values())


class Imported(NamedTuple):
    """What became of a run.

    Attributes:
        path: its run directory.
        is_new: False where it was there, and had the same records.
    """

    path: Path
    is_new: bool


def bring(run: ForeignRun, folder: Path) -> Imported:
    """Write a run into a run directory of its own below `folder`; a kill leaves it whole or not there."""
    safe = re.sub(r"[^\w.-]+", "-", run.name).strip("-.")[:80] or "run"
    name = f"{safe}-{xxhash.xxh3_64_hexdigest(f'{run.format} {run.key}'.encode())[:12]}"
    path, origin = folder.absolute() / name, {"format": run.format, "key": run.key}
    record = _Record(run)
    try:
        if not path.exists():
            _begin(path, record, origin)
            return Imported(path, is_new=True)
        if RunDir.open(path, create=False).facts.get("imported") != origin:
            raise RunDirError(f"{path} is another run; move it away, or give another folder with --into")
        if RunJournal(path).facts().get("imported", {}).get("digest") == record.digest:
            return Imported(path, is_new=False)
        number = RunDir.open(path, create=False).next_segment()
        write_whole(segment_path(path, number), record.segment(number), "import", replace=False)
    except RunDirError:
        raise
    except OSError as error:
        raise RunDirError(
            error.errno, f"a run cannot be imported: {error.strerror}; {remedy(error)}", str(path)
        ) from error
    return Imported(path, is_new=True)


def _begin(path: Path, record: _Record, origin: dict[str, str]) -> None:
    """Make the directory under a temporary name first: no reader finds a half of it."""
    make_dirs(path.parent, "import")
    made = temporary(path)
    shutil.rmtree(made, ignore_errors=True)  # of a killed process that had the same number
    about = {"id": path.name, "created": round(_time(record.run.created), 3), "imported": origin}
    RunDir.open(made, seed=0, about={**about, "seed_given": False})
    make_dirs(made / "journal", "import")
    write_whole(segment_path(made, 1), record.segment(1), "import")
    rename(made, path, "import")
    fsync_folder(path.parent, "import")


class _Record:
    """What a run's journal will hold.

    Attributes:
        run: the run.
        digest: of all that was recorded.
    """

    def __init__(self, run: ForeignRun) -> None:
        self.run = run
        self._facts = {"argv": [], "config": as_json(run.config), "lock": False}
        self._facts["host"] = str(run.about.get("host") or "elsewhere")
        blocks = sorted(_blocks(run), key=lambda found: found[0])
        self._payloads = [pack_block(block, at) for at, block in blocks]
        whole = xxhash.xxh3_128(json.dumps([self._facts, as_json(run.about), run.status, run.ended]).encode())
        for payload in self._payloads:
            whole.update(payload)
        self.digest = whole.hexdigest()

    def segment(self, number: int) -> bytes:
        """Return the bytes of a start's file."""
        run = self.run
        told = {**run.about, "format": run.format, "source": str(run.source.absolute())}
        told |= {"left_out": dict(run.left_out), "digest": self.digest}
        facts = without_credentials({**self._facts, "imported": as_json(told)})
        step = max((step for points in run.metrics.values() for step in points.steps), default=0)
        end = {
            "status": run.status,
            "reason": f"imported from {run.format}",
            "step": max(0, step),
            "epoch": 0,
        }
        data = bytearray(pack_header(number, None))
        begin = pack_event("segment", {"parent": None, "facts": facts}, True, _time(run.created))
        closed = pack_event("closed", end, True, _time(run.ended))
        for kind, payload in ((EVENT, begin), *((METRICS, each) for each in self._payloads), (EVENT, closed)):
            data += pack_frame(kind, len(data), payload)
        return bytes(data)


def _blocks(run: ForeignRun) -> Iterator[tuple[float, Block]]:
    """Divide the rows of each metric, in the order of steps, into blocks; yields the time of each."""
    for name, points in run.metrics.items():
        rows = sorted(zip(*points, strict=True), key=lambda row: row[0])
        seen: Counter[int] = Counter()
        for begin in range(0, len(rows), _ROWS):
            steps, values, times = (list(column) for column in zip(*rows[begin : begin + _ROWS], strict=True))
            seqs = []
            for step in steps:
                seqs.append(seen[step])
                seen[step] += 1
            yield _time(times[0]), Block(0, "step", name, False, steps, values, [1] * len(steps), seqs)


def _time(seconds: float) -> float:
    return min(max(0.0, seconds), LATEST - 1)


def plain(text: str) -> Any:
    """Return the number, list, ... that a program has written as a string; the string where it is none.

    Settings are compared as numbers then: `everstep runs "config.lr < 0.1"`.
    """
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def as_step(value: Any) -> int:
    """Return a step as an integer of 64 bits."""
    number = float(value)
    if not math.isfinite(number) or abs(number) >= 1 << 63:
        raise ValueError(f"{value!r} is not a step")
    return int(value)
