"""Base of the services that write the record to other files.

The journal is the truth, and alone decides what the files hold.  At the start of a process the files are made
to agree with the rows that are valid now, whatever a kill, a resume from an older checkpoint or a full disk
has left; from then on, new rows are appended.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar

from everstep import hazard
from everstep.contracts.services import Boundary, RunView, Service, Stage
from everstep.durable import require_no_link
from everstep.errors import ConfigError
from everstep.record import Follower, Item
from everstep.schedule import Every, Schedule
from everstep.services.record_lines import lines

Parts = Iterator[tuple[int, list[Item]]]
"""Valid part of each earlier start of the run: its number, and its rows and events."""


_RUNS = {
    *("best", "checkpoint", "checkpoints", "damaged", "dumps", "evaluations", "exports", "failures"),
    *("journal", "labels.json", "lock", "lock.json", "pins.json", "run.json", "shared", "superseded"),
}
_LOGS = {Path("logs/run.log"), Path("logs/media")}


def _is_the_runs(place: Path) -> bool:
    """Whether a path in the run directory is hidden, or belongs to the run, or lies in a folder that does."""
    first = place.parts[0]
    return first in _RUNS or first.startswith(".") or not _LOGS.isdisjoint((place, *place.parents))


class Sink(Service, ABC):
    """Follow the journal and write its content to a file.  Subclass it, and give `write`.

    At each start the file is made anew from the whole journal, beside the old file, and takes its place
    when it is whole; then new rows are added.  A file that is deleted or changed meanwhile is made anew.
    A sink of several files also overrides `begin` and `file_path`, and with more than one open file `add`,
    `is_intact` and `release`.

    Args:
        path: the file or folder, inside the run directory.
        every: when to write; default as often as the journal itself, and at the end in any case.

    Raises:
        ConfigError: `path` leads out of the run directory, or is a place that the run itself uses.
    """

    stage = Stage.REPORT
    isolate: ClassVar[bool] = False
    window = "none"
    default_schedule = Every(steps=1000) | Every(epochs=1) | Every(seconds=30)

    def __init__(self, path: str | Path, *, every: Schedule | None = None, name: str | None = None) -> None:
        super().__init__(name, every)
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ConfigError(
                f"path={str(path)!r} of service {self.name!r}: give a path inside the run directory, "
                'as in "logs/mine"'
            )
        self._place = Path(path)
        if not self._place.parts or _is_the_runs(self._place):
            raise ConfigError(
                f"path={str(path)!r} of service {self.name!r} belongs to the run itself; give another path, "
                'as in "logs/mine"'
            )
        self._run: RunView
        """Set while the loop is open."""
        self._file: IO[Any] | None = None
        """File for new rows, while it is open."""
        self._follower: Follower | None = None
        self._said = False

    @property
    def path(self) -> Path:
        """Place of the files, while the loop is open."""
        return Path(self._run.run_dir) / self._place

    lines = staticmethod(lines)
    """Lines of a journal's items: a dictionary for each step, tail or epoch, with its metrics by name."""

    # ------------------------------------------------------------------------- what a subclass gives

    @abstractmethod
    def write(self, file: IO[Any], items: Iterable[Item]) -> None:
        """Add rows and events to the file; `self.lines(items)` has the rows as dictionaries."""

    def head(self, file: IO[Any]) -> None:
        """Write the heading of a new file, if any."""

    def begin(self, older: Parts) -> None:
        """Make the file, with the rows of the earlier starts."""
        with self.new_file() as file:
            for _, items in older:
                self.write(file, items)

    def add(self, news: Iterable[Item]) -> None:
        """Append new rows of this start; they reach the operating system before this method returns."""
        assert self._file is not None
        hazard.reach("sink.write")
        self.write(self._file, news)
        self._file.flush()

    def file_path(self) -> Path:
        """Return the path of the file for new rows."""
        return self.path

    def is_intact(self) -> bool:
        """Whether the file for new rows is there, and has the length that it was left with."""
        try:
            return self._file is not None and self.file_path().stat().st_size == self._file.tell()
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Close the file.  May be called twice."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    @contextmanager
    def new_file(self) -> Iterator[IO[str]]:
        """Put what the block writes in the place of the old file, whole or not at all; it stays open."""
        self.release()
        beside = self.path.with_name(f".{self.path.name}.tmp")
        beside.unlink(missing_ok=True)  # a link with this name would lead the rows to another file
        hazard.reach("sink.create")
        self._file = open(beside, "w", encoding="utf-8", errors="replace", newline="")  # noqa: SIM115
        self.head(self._file)
        hazard.reach("sink.write")
        yield self._file
        self._file.flush()
        hazard.reach("sink.rename")
        os.replace(beside, self.path)

    # ------------------------------------------------------------------------------ as a service

    def open(self, run: RunView) -> None:
        self._run, self._follower, self._said = run, None, False

    def run(self, boundary: Boundary) -> None:
        self.catch_up()

    def finish(self, boundary: Boundary) -> None:
        self.catch_up()

    def close(self) -> None:
        try:
            self.catch_up()
        except OSError as error:
            self._run.println(
                f"warning: {self.path} is not complete ({error}); repair the cause and start the run again"
            )
        finally:
            self.release()

    def catch_up(self) -> None:
        """Write the journal's new rows to the files; after a failure, or damage, all rows anew."""
        self._run.flush()  # first: the follower reads the journal's file
        try:
            if self._follower is None or not self._append_to(self._follower):
                self._begin_anew()
        except BaseException:
            self._follower = None
            self.release()
            raise

    def _append_to(self, follower: Follower) -> bool:
        """Append new rows; False if the file was changed or deleted by anything else."""
        if self.is_intact():
            self.add(follower.news())
            # checked again: our rows do not reach a file that was replaced by an equal file meanwhile
            if self.is_intact():
                return True
        if not self._said:
            self._said = True
            self._run.println(
                f"warning: {self.path} was deleted or changed during the run; the file is made anew from "
                "the journal"
            )
        return False

    def _begin_anew(self) -> None:
        self.release()
        follower = Follower(Path(self._run.run_dir), self._run.segment)
        require_no_link(self.path, Path(self._run.run_dir))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.begin(follower.older())
        self.add(follower.news())
        self._follower = follower
