"""Pages in `failures/`: what went wrong in a start, by which rank, and where its threads stood.

Each page is one JSON file, written whole.  Every rank writes its own, as only one of them has the journal.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from everstep.arguments import checked_keywords
from everstep.durable import TMP, discard, require_no_link, write_whole
from everstep.record.journal_format import LATEST
from everstep.record.rundir import to_read, user_path
from everstep.redaction import redacted
from everstep.untrusted_files import read_note

FOLDER = "failures"
KEPT = 50
"""Number of pages of one rank that stay; a run that fails at each of a thousand starts needs no more."""
_LONGEST = 200_000
"""Most characters of a page's lines: a recursion has thousands of equal ones."""
_NAME = re.compile(r"segment-\d{4,}-rank-\d+-[a-z]+-\d{3,}\.json")

Kind = Literal["error", "hang", "lost"]


class Failure(NamedTuple):
    """A page: one thing that went wrong on one rank.

    Attributes:
        kind: "error" (an exception left the loop), "hang" (nothing moved), "lost" (another rank failed, and
            this one ended itself).
        segment: number of the start, from 1.
        rank: number of the process, 0 for the only one.
        step, epoch: where the rank stood: last completed step, current epoch.
        what: what happened, in a sentence.
        cause: the first failure of another rank, if this is its consequence: "rank 1: REASON"; else None.
        lines: the traceback, or the stacks of all threads, line by line.
        time: seconds since 1970.
        host, pid: the process.
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
    """Writes the pages of one process.

    Args:
        run_dir: the run's directory.
        segment: number of this start, from 1.
        rank: number of this process.
    """

    def __init__(self, run_dir: Path, segment: int, rank: int) -> None:
        self._run_dir, self._segment, self._rank = run_dir, segment, rank
        self._count = 0

    def write(
        self, kind: Kind, what: str, lines: list[str], *, step: int, epoch: int, cause: str | None = None
    ) -> Path:
        """Write a page, and delete this rank's oldest ones beyond `KEPT`; return its path.

        Args:
            kind, what, lines, step, epoch, cause: as in `Failure`; credentials are left out.

        Raises:
            OSError: the page cannot be written.
        """
        self._count += 1
        place = (self._segment, self._rank, step, epoch)
        here = (time.time(), socket.gethostname(), os.getpid())
        page = Failure(kind, *place, what, cause, _shortened(lines), *here)
        folder = self._run_dir / FOLDER
        require_no_link(folder, self._run_dir)
        folder.mkdir(exist_ok=True)  # not its parents: a run directory that is gone is not made again
        path = folder / f"segment-{self._segment:04}-rank-{self._rank}-{kind}-{self._count:03}.json"
        text = json.dumps(redacted(page._asdict()), indent=2)
        write_whole(path, text.encode() + b"\n", FOLDER)
        self._forget(folder)
        return path

    def _forget(self, folder: Path) -> None:
        own = sorted(folder.glob(f"segment-*-rank-{self._rank}-*.json"), key=_age)
        leftovers = folder.glob(f"{TMP}segment-*-rank-{self._rank}-*")  # of a process that died meanwhile
        for path in (*own[:-KEPT], *leftovers):
            discard(path, FOLDER)


@checked_keywords
def failures(run_dir: str | Path) -> list[Failure]:
    """List what went wrong in a run, oldest first: errors, hangs and lost ranks.

        for failure in everstep.record.failures("runs/digits"):
            print(failure, *failure.lines, sep="\\n")

    Files that are not such pages are passed over.
    """
    folder = to_read(user_path(run_dir, "run_dir")) / FOLDER
    return sorted(_read(folder), key=lambda page: (page.segment, page.time))


def traceback_lines(error: BaseException) -> list[str]:
    """Return the traceback of an error as Python prints it, line by line."""
    return "".join(traceback.format_exception(error)).splitlines()


def _read(folder: Path) -> Iterator[Failure]:
    for path in folder.glob("segment-*.json"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            yield _page(read_note(path))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # not a page: anybody may have put it there


_KINDS: dict[str, Any] = {
    "kind": str,
    "what": str,
    "cause": str | None,
    "lines": list,
    "host": str,
    "time": int | float,
    **dict.fromkeys(("segment", "rank", "step", "epoch", "pid"), int),
}


def _page(found: dict[str, Any]) -> Failure:
    """Make a page of a file's content.

    Raises:
        KeyError, TypeError, ValueError: something is missing, or has another type.
    """
    page = Failure(**{name: found[name] for name in Failure._fields})
    told = page._asdict()
    right = all(isinstance(told[name], kind) for name, kind in _KINDS.items())
    if not right or not all(isinstance(line, str) for line in page.lines) or not 0 <= page.time < LATEST:
        raise ValueError("it is not a page")
    return page


def _age(path: Path) -> tuple[int, int]:
    """Order of a page among those of its rank: by start, then by its number in the start."""
    numbers = re.findall(r"\d+", path.name)
    return int(numbers[0]), int(numbers[-1])


def _shortened(lines: list[str]) -> list[str]:
    """Leave out lines from the middle of what is too long for a page."""
    length = sum(map(len, lines))
    if length <= _LONGEST:
        return lines
    part = max(1, len(lines) * _LONGEST // (2 * length))
    return [*(line[:2000] for line in lines[:part]), "...", *(line[:2000] for line in lines[-part:])]
