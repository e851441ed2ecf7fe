"""Reader of a run that another process trains: its checkpoints as they are committed, until it ends."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from everstep.arguments import number
from everstep.checkpoint import Store, is_interim, read_manifest
from everstep.errors import CheckpointError, ConfigError, RunDirError, nearest
from everstep.record import RunJournal, is_held

POLL = 0.25
"""Seconds between two looks at the run directory."""

Which = Literal["each", "newest"]


Committed: TypeAlias = tuple[str, str]
"""Name of a committed checkpoint, and the digest of its state."""


class CheckpointFollower:
    """Reader of a run that another process trains: takes no lock, waits for none, writes nothing."""

    def __init__(self, run_dir: Path, which: Which, throttle: float, timeout: float | None) -> None:
        if which not in get_args(Which):
            raise ConfigError(f"every={which!r}: give one of two; {nearest(str(which), get_args(Which))}")
        throttle = number("throttle", throttle, of="seconds", zero=True)
        timeout = number("timeout", timeout, of="seconds", zero=True, none="for no limit")
        self.run_dir, self._which, self._throttle, self._timeout = run_dir, which, throttle, timeout
        self._store = Store(run_dir)
        self._known: dict[object, Committed | None] = {}
        """Mark of each folder that was looked at -> its checkpoint, None for an interim one."""
        self._newest_file: object = None
        """Name and size of the newest journal file when the end was looked for last."""
        self._over = False
        self._alive_at = time.monotonic()

    def checkpoints(self, skipped: Collection[Committed]) -> Iterator[Committed]:
        """Yield each committed checkpoint once, or always the newest, until the run has ended."""
        yielded = set(skipped)
        last = float("-inf")
        while True:
            # asked first, so that a run that has ended has its last checkpoint in the list made next
            over = self.has_ended()
            committed = self._committed()
            candidates = committed[-1:] if self._which == "newest" else committed
            waiting = [one for one in candidates if one not in yielded]
            now = time.monotonic()
            if waiting and now - last >= self._throttle:
                last = self._alive_at = now
                yielded.add(waiting[0])
                yield waiting[0]
                continue
            if not waiting and (over or self._has_given_up()):
                return
            time.sleep(POLL)

    def _committed(self) -> list[Committed]:
        """List the checkpoints on disk, oldest first; those that vanish meanwhile are left out."""
        committed = []
        for name in self._store.names():
            path = self._store.path(name)
            try:
                status = path.stat()
                mark = (name, status.st_ino, status.st_ctime_ns)
                if mark not in self._known:
                    body = read_manifest(path)
                    self._known[mark] = None if is_interim(body["meta"]) else (str(name), str(body["digest"]))
            except (OSError, CheckpointError):
                continue
            committed.append(self._known[mark])
        return [one for one in committed if one is not None]

    def has_ended(self) -> bool:
        """Whether the run came to its end and nobody has it open."""
        try:
            is_open = is_held(self.run_dir)
        except OSError:  # a file system without locks: the journal alone tells
            is_open = False
        files = sorted((self.run_dir / "journal").glob("segment-*.evj"))
        newest_file = [(path.name, path.stat().st_size) for path in files[-1:]]
        if is_open or newest_file != self._newest_file:
            self._alive_at = time.monotonic()
        if is_open:
            return False
        if newest_file != self._newest_file:
            self._newest_file = newest_file
            try:
                self._over = RunJournal(self.run_dir).ended() is not None
            except RunDirError:
                self._over = False
        return self._over

    def _has_given_up(self) -> bool:
        if self._timeout is None or time.monotonic() - self._alive_at < self._timeout:
            return False
        state = "nobody trains it" if self.run_dir.exists() else "it is not there"
        print(f"{self.run_dir} has not ended, and {state} for {self._timeout:g} s: the watch ends here")
        return True
