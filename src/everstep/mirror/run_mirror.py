"""The mirror of a run, as the parts of a start use it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from everstep.checkpoint import CheckpointName, Store, read_manifest
from everstep.checkpoint.shared import copies_of
from everstep.errors import CheckpointError, ConfigError, EverstepError, MirrorError
from everstep.mirror.address import MirrorAt
from everstep.mirror.contents import NOTES, Holder
from everstep.mirror.mirror import Committed, Mirror, Source
from everstep.mirror.restoring import Restoring
from everstep.mirror.uploads import Uploads
from everstep.record import Journal, RunDir, segment_number
from everstep.record.rundir import ROOT
from everstep.untrusted_files import LARGEST_NOTE, read_regular

Say = Callable[[str], None]


class NoMirror:
    """Mirror of a run without one, and of the ranks that do not write.

    Attributes:
        facts: content of the mirrored run's `run.json`; empty where there is none.
    """

    facts: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def join(self, run_dir: RunDir) -> None:
        """Bring the run directory up to the state of the mirror, if the mirror is ahead.

        Raises:
            MirrorError: the mirror is of another run, of another history, damaged, or cannot be read.
        """

    def take(self, run_dir: RunDir, store: Store, segment: int) -> None:
        """Take the mirror over for this start, and begin to upload what the mirror lacks.

        Raises:
            MirrorError: the mirror cannot be written, or another start uses it at this moment.
        """

    @property
    def needed(self) -> frozenset[CheckpointName]:
        """Checkpoints that retention must leave until they are uploaded."""
        return frozenset()

    def require_held(self) -> None:
        """Refuse to save on, if a later start has taken the mirror over.

        Raises:
            RunLockedError: names that start.
        """

    def committed(self, durable: int, retain: Callable[[], object]) -> None:
        """Delete what need not stay, then hand what is committed over to the uploading thread.

        The writer thread calls this, or the main thread while the writer thread has nothing to do.

        Args:
            durable: number of bytes of this start's journal that are on the disk.
            retain: deletes the checkpoints that need not stay.
        """
        retain()

    def finish(self, journal: Journal, retain: Callable[[], object]) -> None:
        """Hand the rest over, and wait for the upload; warn if it is not complete after the limit.

        Args:
            journal: of this start; nothing is added to it after this call.
            retain: as for `committed`.
        """

    def close(self) -> None:
        """End the thread."""


class RunMirror(NoMirror):
    """Mirror of one run.

    Args:
        at: its address.
        wait: seconds that the end of the run waits for the last upload.
        say, warn: take sentences for the user, from any thread.

    Raises:
        ConfigError, MirrorError: the mirror cannot be read.
    """

    def __init__(self, at: MirrorAt, wait: float, say: Say, warn: Say) -> None:
        self._at, self._wait, self._say, self._warn = at, wait, say, warn
        self._mirror = Mirror(at.open())
        self._uploads: Uploads | None = None
        found = self._tried(self._mirror.look)
        self.facts = {} if found is None else found.run

    def _tried(self, action: Callable[[], Any], what: str = "read") -> Any:
        """Do something with the mirror before the training: what fails there, refuses the start."""
        try:
            return action()
        except EverstepError:
            raise
        except Exception as error:  # of any library
            raise MirrorError(
                f"the mirror {self._at} cannot be {what} ({self._at.told(error)}): check its address, the "
                "credentials and the network, or start without mirror="
            ) from None

    def join(self, run_dir: RunDir) -> None:
        if self.facts and self.facts["id"] != run_dir.id:
            raise MirrorError(
                f"the mirror {self._at} is of the run {self.facts['id']}, and {run_dir.path} holds "
                f"{run_dir.id}: give each run a mirror of its own; to continue the mirrored run, give an "
                "empty directory"
            )
        self._tried(lambda: self._bring(run_dir))

    def _bring(self, run_dir: RunDir) -> None:
        while (contents := self._mirror.contents) is not None:
            restoring = Restoring(self._mirror.place, contents, run_dir.path)
            if not restoring.is_ahead():
                return
            restoring.require_nothing_lost()
            try:
                restoring.bring(self._say)
            except FileNotFoundError:
                if self._mirror.look() == contents:
                    raise
                continue  # a start that still runs has deleted an old checkpoint: its new list counts
            return

    def take(self, run_dir: RunDir, store: Store, segment: int) -> None:
        before = self._tried(lambda: self._mirror.take(run_dir.facts, run_dir.path), "written")
        if before is not None and not before.ended and not _is_here(before, run_dir):
            self._say(
                f"took over the mirror from process {before.pid} on host {before.host}, in "
                f"{before.directory}, which did not say that it ended: if it still runs, it saves no more"
            )
        self._store, self._files = store, RunFiles(store, segment)
        self._uploads = Uploads(self._mirror, self._at.told, self._say, self._warn)
        self.committed(0, lambda: None)

    @property
    def needed(self) -> frozenset[CheckpointName]:
        return frozenset() if self._uploads is None else self._uploads.needed

    def require_held(self) -> None:
        if self._uploads is not None and self._uploads.taken is not None:
            raise self._uploads.taken

    def committed(self, durable: int, retain: Callable[[], object], *, ended: bool = False) -> None:
        assert self._uploads is not None
        with self._uploads.changing():
            retain()
            if self._store.leaves_some:
                return  # this start may yet end without setting them aside
            try:
                self._uploads.hand_over(self._files.now(durable, ended=ended))
            except OSError as error:  # the save stands
                self._warn(f"the newest state was not handed to the mirror {self._at}: {error}")

    def finish(self, journal: Journal, retain: Callable[[], object]) -> None:
        if self._uploads is None or self._store.leaves_some:
            return
        end = time.monotonic() + self._wait
        self._uploads.wait(self._wait)
        try:
            journal.sync()
        except OSError as error:
            self._warn(f"the mirror {self._at} lacks the end of the journal: {error}")
        # it deletes again: a checkpoint has stayed as long as its upload ran
        self.committed(journal.durable, retain, ended=True)
        if missing := self._uploads.wait(max(0.0, end - time.monotonic())):
            names = ", ".join(map(str, sorted(self._uploads.missing))) or "the end of the journal"
            self._warn(
                f"not in the mirror {self._at}: {names} ({missing}); the run directory has everything: start "
                "again to upload it, with mirror_wait= for a longer wait"
            )

    def close(self) -> None:
        if self._uploads is not None:
            self._uploads.close()


def _is_here(holder: Holder, run_dir: RunDir) -> bool:
    """Whether a holder used this directory, whose lock is held now: then it has ended."""
    return (holder.host, holder.directory) == (platform.node(), str(run_dir.path))


def open_mirror(at: MirrorAt | None, wait: float, run_dir: Path, say: Say, warn: Say) -> NoMirror:
    """Open the mirror of a run, if there is one.

    Raises:
        ConfigError, MirrorError: the mirror cannot be read, or is not apart from the run directory.
    """
    if at is None:
        return NoMirror()
    if at.folder is not None:
        folder, own = at.folder.resolve(), run_dir.resolve()
        if folder.is_relative_to(own) or own.is_relative_to(folder):
            raise ConfigError(
                f"mirror={at} and the run directory {run_dir} lie in each other: give a folder elsewhere, "
                "best on another disk"
            )
    if at.folder is None and os.environ.get(ROOT):
        say(f"{ROOT} is set, as for a drill: the mirror {at} is left alone")
        return NoMirror()
    return RunMirror(at, wait, say, warn)


# ------------------------------------------------------------------------------- what is committed


class RunFiles:
    """List of the committed files; manifests are read once.

    Args:
        store: the checkpoints of the run; its writer thread, or nobody, changes them meanwhile.
        segment: number of this start.
    """

    def __init__(self, store: Store, segment: int) -> None:
        self._store, self._segment = store, segment
        self._known: dict[tuple[Path, int], dict[str, Source]] = {}

    def now(self, durable: int, *, ended: bool = False) -> Committed:
        """List the files.

        Args:
            durable: number of bytes of this start's journal that are on the disk.
            ended: whether the start ends now.

        Raises:
            OSError: a file cannot be read.
        """
        store, top = self._store, self._store.run_dir
        found: dict[str, Source] = {}
        wholes = []
        folders = [*store.best_folders(), *(store.path(facts.name) for facts in store.facts())]
        known = self._known
        self._known = {}
        for folder in folders:
            key = folder, (folder / "manifest.json").stat().st_mtime_ns
            self._known[key] = known.get(key) or _listed(folder, top)
            found |= self._known[key]
            wholes.append(frozenset(self._known[key]))
        for path in sorted((top / "journal").glob("segment-*.evj")):
            number = segment_number(path)
            if number is not None and number <= self._segment:
                size = durable if number == self._segment else path.stat().st_size
                if size:
                    found[f"journal/{path.name}"] = Source(path, size, None)
        notes = {name: note for name in NOTES if (note := _note(top / name)) is not None}
        return Committed(found, notes, ended, wholes)


def _listed(folder: Path, top: Path) -> dict[str, Source]:
    """List the files of a checkpoint, as its manifest does; none if that is damaged."""
    manifest = folder / "manifest.json"
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError:
        return {}
    found = {}
    for name, record in files.items():
        path, *copy = copies_of(folder, name, record)
        found[path.relative_to(top).as_posix()] = Source(path, record["bytes"], record["xxh3_128"], *copy)
    data = read_regular(manifest)
    return found | {
        manifest.relative_to(top).as_posix(): Source(manifest, len(data), xxhash.xxh3_128_hexdigest(data))
    }


def _note(path: Path) -> str | None:
    """Read a small file, which may change while an upload runs."""
    try:
        return read_regular(path, LARGEST_NOTE).decode("latin-1")
    except FileNotFoundError:
        return None
