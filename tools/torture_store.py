"""The records of `make torture`: what each case of one commit has counted, over several sittings.

A store is a file of JSON lines.  The first is its head: commit, seed, all cases.  Each further line is one
case that has ended.  A line is written whole or, by a kill, torn; a torn last line is left out and cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("kills", "crash points", "power-cut states", "damages", "fuzz inputs")
"""What the closing line counts.  Further kinds ("signals", ...) are counted on the page alone."""


class Store:
    """The records of one commit's campaign."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, head: dict[str, Any]) -> None:
        """Make the store; whoever is killed here leaves none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        unfinished.write_text(json.dumps(head) + "\n")
        unfinished.rename(self.path)

    def read(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the head and the records, in the order in which the cases ended."""
        head, *records = (json.loads(line) for line in self.path.read_text().split("\n")[:-1])
        return head, records

    def last(self) -> dict[str, dict[str, Any]]:
        """Return the last record of each case."""
        return {record["case"]: record for record in self.read()[1]}

    def passed(self) -> set[str]:
        """Return the cases that need not run again."""
        return {case for case, record in self.last().items() if record["outcome"] == "passed"}

    def open(self) -> Writer:
        """Open the store for one sitting.

        Raises:
            SystemExit: another sitting writes into it.
        """
        return Writer(self.path)


class Writer:
    """Appends records; each is on the disk when `add` returns."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "r+b")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another make torture writes {path}: wait until it has ended") from None
        whole = self._file.read().rfind(b"\n") + 1
        self._file.seek(whole)
        self._file.truncate()

    def add(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Tally(NamedTuple):
    """What a case has survived: `n` of a kind, and its classes."""

    kind: str
    n: int
    of: dict[str, str]


def tallies(records: Sequence[dict[str, Any]]) -> Iterator[Tally]:
    """Yield what passed cases have counted; a case that failed counts nothing."""
    for record in records:
        if record["outcome"] == "passed":
            yield from (Tally(**each) for each in record["tallies"])


def machine() -> dict[str, Any]:
    """Describe this machine without a name of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "memory": f"{memory / 2**30:.0f} GB",
        "system": f"{platform.system()}, {platform.machine()}",
        "versions": f"Python {platform.python_version()}, torch {metadata.version('torch')}",
    }


def summed(store: Store) -> dict[str, Any]:
    """Sum up what docs/reliability.md says of a store."""
    head, records = store.read()
    last = store.last()
    kept = [last[case] for case in head["cases"] if case in last]
    failed = [record["case"] for record in kept if record["outcome"] != "passed"]
    kinds: dict[str, Any] = {}
    for kind, n, of in tallies(kept):
        found = kinds.setdefault(kind, {"n": 0, "of": {}})
        found["n"] += n
        for name, value in of.items():
            classes = found["of"].setdefault(name, {})
            classes[value] = classes.get(value, 0) + n
    tests: dict[str, Any] = {}
    for case in head["cases"]:
        none = {"cases": 0, "passed": 0, "example": case, "counts": {}}
        row = tests.setdefault(case.partition("[")[0], none)
        row["cases"] += 1
        if case in last and last[case]["outcome"] == "passed":
            row["passed"] += 1
            counted = Counter(row["counts"])
            for kind, n, _ in tallies([last[case]]):
                counted[kind] += n
            row["counts"] = dict(counted)
    return {
        "commit": head["commit"],
        "seed": head["seed"],
        "machine": head["machine"],
        "days": sorted({_day(record["ended"]) for record in records}),
        "sittings": len({record["sitting"] for record in records}),
        "seconds": round(_elapsed(records)),
        "cases": len(head["cases"]),
        "passed": len(kept) - len(failed),
        "failed": failed,
        "passed again": sorted(_failures(records) - set(failed)),
        "counts": {kind: kinds.get(kind, {"n": 0, "of": {}}) for kind in (*KINDS, *sorted(kinds))},
        "tests": tests,
        "runs": [run for record in kept if record["outcome"] == "passed" for run in record["runs"]],
    }


def _failures(records: Sequence[dict[str, Any]]) -> set[str]:
    return {record["case"] for record in records if record["outcome"] != "passed"}


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _elapsed(records: Sequence[dict[str, Any]]) -> float:
    ends: dict[float, float] = {}
    for record in records:
        ends[record["sitting"]] = max(record["ended"], ends.get(record["sitting"], 0.0))
    return sum(end - began for began, end in ends.items())


def line(summary: dict[str, Any]) -> str:
    """Say in one line what the campaign has counted, and whether that is all."""
    counts = ", ".join(f"{summary['counts'][kind]['n']:,} {kind}" for kind in KINDS)
    failed, again = summary["failed"], summary["passed again"]
    todo = summary["cases"] - summary["passed"] - len(failed)
    said = f"{len(failed)} FAILED: {' '.join(failed)}" if failed else "0 lost, 0 inexact, 0 silent"
    if again:
        said += f"; failed and passed when run again: {' '.join(again)}"
    if todo:
        said += f" (partial: {todo:,} of {summary['cases']:,} cases are still to do)"
    return f"{counts}: {said}"
