"""Pages of a run: JSON files, each written whole by whichever process has something to say, at any time.

`failures/` has what went wrong in a start, by which rank, and where its threads stood; `evaluations/` has
evaluations outside a loop.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_type_hints

from everstep.arguments import checked_keywords
from everstep.durable import TMP, discard, require_no_link, write_whole
from everstep.record.journal_format import LATEST
from everstep.record.journal_reader import RunJournal
from everstep.record.rundir import RunDir, to_read, user_path
from everstep.redaction import redacted, without_credentials
from everstep.untrusted_files import fits, read_note

FAILURES, EVALUATIONS = "failures", "evaluations"
KEPT = 50
"""Number of pages of one rank that stay; a run that fails at each of a thousand starts needs no more."""
_LONGEST = 200_000
"""Most characters of a page's lines: a recursion has thousands of equal ones."""

Kind = Literal["error", "hang", "lost"]


class Failure(NamedTuple):
    """A page: one thing that went wrong on one rank.

    Attributes:
        kind: "error" (an exception left the loop), "hang" (nothing moved), "lost" (another rank failed, and
            this one ended itself).
        segment, rank: number of the start, from 1, and of the process, 0 for the only one.
        step, epoch: where the rank stood: last completed step, current epoch.
        what, lines: what happened, in a sentence; the traceback, or the stacks of all threads.
        cause: the first failure of another rank, if this is its consequence: "rank 1: REASON"; else None.
        time: seconds since 1970.
    """

    kind: Kind
    segment: int
    rank: int
    step: int
    epoch: int
    what: str
    cause: str | None
    lines: list[str]
    time: float
    host: str
    pid: int

    def __str__(self) -> str:
        return self.what if self.cause is None else f"{self.what} (a consequence of {self.cause})"


class FailurePages:
    """Writes the pages of one process."""

    def __init__(self, run_dir: Path, segment: int, rank: int) -> None:
        self._run_dir, self._segment, self._rank = run_dir, segment, rank
        self._count = 0

    def write(
        self, kind: Kind, message: str, lines: list[str], *, step: int, epoch: int, cause: str | None = None
    ) -> Path:
        """Write a page, and delete this rank's oldest ones beyond `KEPT`; return its path."""
        self._count += 1
        text = "\n".join(lines)
        if len(text) > _LONGEST:
            lines = f"{text[: _LONGEST // 2]}\n...\n{text[-_LONGEST // 2 :]}".split("\n")
        place, process = (self._segment, self._rank, step, epoch), (socket.gethostname(), os.getpid())
        page = Failure(kind, *place, message, cause, lines, time.time(), *process)
        name = f"segment-{self._segment:04}-rank-{self._rank}-{kind}-{self._count:03}.json"
        path = write_page(self._run_dir, FAILURES, name, redacted(page._asdict()))
        names = f"segment-*-rank-{self._rank}-*"
        paths = path.parent.glob(f"{names}.json")
        oldest = sorted(paths, key=lambda page: [*map(int, re.findall(r"\d+", page.name))])[:-KEPT]
        for each in (*oldest, *path.parent.glob(f"{TMP}{names}")):  # of a process that died meanwhile
            discard(each, FAILURES)
        return path


@checked_keywords
def failures(run_dir: str | Path) -> list[Failure]:
    """List what went wrong in a run, oldest first: errors, hangs and lost ranks.

        for failure in everstep.record.failures("runs/digits"):
            print(failure, *failure.lines, sep="\\n")

    Files that are not such pages are passed over.
    """
    folder = to_read(user_path(run_dir, "run_dir")) / FAILURES
    return sorted(read_pages(folder, Failure, "segment-*.json"), key=lambda page: (page.segment, page.time))


def traceback_lines(error: BaseException) -> list[str]:
    """Return the traceback of an error as Python prints it, line by line."""
    return "".join(traceback.format_exception(error)).splitlines()


class Evaluation(NamedTuple):
    """Metrics of one stream on one checkpoint.

    Attributes:
        stream: name of the stream.
        checkpoint, digest: its name, for best weights "best/METRIC/NAME"; its digest.
        step, epoch: the run's, when the checkpoint was saved.
        num_steps: requested number of batches, -1 for all.
        metrics: name to value; the names have the stream's prefix.
        time: when the evaluation was recorded, in seconds since 1970.
    """

    stream: str
    checkpoint: str
    digest: str
    step: int
    epoch: int
    num_steps: int
    metrics: dict[str, float]
    time: float

    def __str__(self) -> str:
        return f"{self.checkpoint}: {values_line(self.metrics)}"


def values_line(metrics: Mapping[str, float]) -> str:
    return "; ".join(f"{name}: {value:.6g}" for name, value in metrics.items())


@checked_keywords
def evaluations(run_dir: str | Path) -> list[Evaluation]:
    """List the evaluations of a run that were made outside its loop, oldest first.

        everstep.runs.evaluations("runs/digits")[-1].metrics["test/accuracy"]

    The loop's own evaluations are rows of the run's journal.
    """
    folder = RunJournal(to_read(user_path(run_dir, "run_dir"))).run_dir / EVALUATIONS
    return [] if folder.is_symlink() else sorted(read_pages(folder, Evaluation), key=lambda page: page.time)


def record_evaluation(
    run_dir: Path, evaluation: Evaluation, facts: Mapping[str, Any], wall: Mapping[str, float]
) -> None:
    """Add an evaluation to a run's record, with its provenance and with metrics that depend on the clock.

    One that finds what an earlier one has found takes its place: a program that was killed makes it again.
    """
    run = RunDir.open(run_dir, create=False)
    key = hashlib.sha256(repr(evaluation._replace(time=0.0)).encode()).hexdigest()
    name = f"step-{evaluation.step:08}-{key[:12]}.json"
    more = {"run": run.id, "wall": dict(wall), "facts": dict(facts)}
    write_page(run.path, EVALUATIONS, name, without_credentials({**evaluation._asdict(), **more}))


_Page = TypeVar("_Page", bound=NamedTuple)


def write_page(run_dir: Path, folder: str, name: str, content: Mapping[str, Any]) -> Path:
    """Write a page whole into a folder of a run, which is made if it is missing; return its path."""
    path = run_dir / folder / name
    require_no_link(path.parent, run_dir)
    path.parent.mkdir(exist_ok=True)  # not its parents: a run directory that is gone is not made again
    write_whole(path, json.dumps(content, indent=2).encode() + b"\n", folder)
    return path


def read_pages(folder: Path, kind: type[_Page], names: str = "*.json") -> Iterator[_Page]:
    """Yield the pages of a kind in a folder; any other file is passed over: anybody may have put it there."""
    hints, page = get_type_hints(kind), cast(Any, kind)
    for path in folder.glob(names):
        with suppress(OSError, ValueError):
            content = read_note(path)
            if fits(content, hints) and 0 <= content["time"] < LATEST:
                yield page(**{name: content[name] for name in hints})
