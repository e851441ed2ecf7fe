"""The mirror of a run, as the parts of a start use it: what is committed is uploaded by a thread."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import xxhash

from everstep import durable
from everstep.checkpoint import CheckpointName, Store, place_apart, read_manifest
from everstep.checkpoint import files as checkpoint_files
from everstep.display.cells import plural
from everstep.errors import CheckpointError, ConfigError, EverstepError, MirrorError, RunLockedError
from everstep.hazard import reach
from everstep.mirror.mirror import NOTES, Committed, Contents, Mirror, Part, Source
from everstep.mirror.place import ROOM, MirrorAt, Place, blocks, digest_of
from everstep.record import Journal, RunDir, segment_number
from everstep.record.rundir import ROOT
from everstep.untrusted_files import LARGEST_NOTE, read_regular

Say = Callable[[str], None]
T = TypeVar("T")

PAUSES = (1.0, 60.0)
"""Seconds before the first try after a failed upload, and the most seconds between two tries."""
GRACE = 5.0
"""Seconds that an upload which is given up has for the file that it is at."""


class RunMirror:
    """Mirror of one run; without an address, as on ranks that do not write, it does nothing.

    What waits while an upload runs is replaced by what is newer.  The end of the run waits some seconds for
    the last upload.  `say` and `warn` take sentences for the user, from any thread.
    """

    def __init__(
        self, at: MirrorAt | None = None, wait: float = 0.0, say: Say = print, warn: Say = print
    ) -> None:
        self._at, self._wait, self._say, self._warn = at, wait, say, warn
        self.facts: dict[str, Any] = {}
        """Content of the mirrored run's `run.json`; empty where there is none."""
        self._changed = threading.Condition()
        self._store: Store | None = None  # until this start has taken the mirror over
        self._segment = 0
        self._takeover: RunLockedError | None = None  # until another start has taken the mirror over
        self._thread: threading.Thread | None = None
        self._next: Committed | None = None
        self._current: Committed | None = None
        self._error = ""
        self._pause = PAUSES[0]
        self._warnings: set[str] = set()
        self._hurry = False
        if at is not None:
            self._mirror = Mirror(at.open())
            contents = self._attempt(self._mirror.look)
            self.facts = {} if contents is None else contents.run

    def _attempt(self, action: Callable[[], T], verb: str = "read") -> T:
        """Do something with the mirror before the training: what fails there, refuses the start."""
        assert self._at is not None
        try:
            return action()
        except EverstepError:
            raise
        except Exception as error:  # of any library
            raise MirrorError(
                f"the mirror {self._at} cannot be {verb} ({self._at.describe(error)}): check its address, "
                "the credentials and the network, or start without mirror="
            ) from None

    def join(self, run_dir: RunDir) -> None:
        """Bring the run directory up to the state of the mirror, if the mirror is ahead."""
        if self._at is None:
            return
        if self.facts and self.facts["id"] != run_dir.id:
            raise MirrorError(
                f"the mirror {self._at} is of the run {self.facts['id']}, and {run_dir.path} holds "
                f"{run_dir.id}: give each run a mirror of its own, or continue in an empty directory"
            )
        self._attempt(lambda: self._bring(run_dir.path))

    def _bring(self, run_dir: Path) -> None:
        while (contents := self._mirror.contents) is not None:
            restoring = Restoring(self._mirror.place, contents, run_dir)
            if not restoring.is_ahead():
                return
            restoring.require_nothing_lost()
            try:
                restoring.bring(self._say)
                return
            except FileNotFoundError:
                # a start that still runs has deleted an old checkpoint: its new list counts
                if self._mirror.look() == contents:
                    raise

    def take_over(self, run_dir: RunDir, store: Store, segment: int) -> None:
        """Take the mirror over for this start, and begin to upload what the mirror lacks."""
        if self._at is None:
            return
        holder = self._attempt(lambda: self._mirror.take_over(run_dir.facts, run_dir.path), "written")
        # the lock of this directory is held: an earlier start here has ended
        own = (platform.node(), str(run_dir.path))
        if holder is not None and not holder.ended and (holder.host, holder.directory) != own:
            self._say(
                f"took over the mirror from process {holder.pid} on host {holder.host}, in "
                f"{holder.directory}, which did not record its end: if it still runs, it saves no more"
            )
        self._store, self._segment = store, segment
        self.retain_and_upload(0, lambda: None)

    @property
    def needed(self) -> frozenset[CheckpointName]:
        """Checkpoints of the upload that runs, which retention leaves; during an outage none."""
        with self._changed:
            return self._missing(self._current)

    def _missing(self, *committed: Committed | None) -> frozenset[CheckpointName]:
        paths = {path for each in committed if each is not None for path in each.files}
        listed = self._mirror.contents.files if paths and self._mirror.contents is not None else {}
        missing = [path for path in paths if path.startswith("checkpoints/") and path not in listed]
        return frozenset(CheckpointName.parse(path.split("/")[1]) for path in missing)

    def require_held(self) -> None:
        """Refuse to save on, if a later start has taken the mirror over."""
        if self._takeover is not None:
            raise self._takeover

    def retain_and_upload(self, durable: int, retain: Callable[[], object], *, ended: bool = False) -> None:
        """Delete what need not stay (`retain`), then hand what is committed over to the uploading thread.

        The writer thread calls this, or the main thread while the writer thread has nothing to do.
        """
        with self._changed:
            retain()
            if self._store is None or self._store.will_set_aside:
                return  # this start may yet end without setting them aside
            try:
                self._next = _list_committed(self._store, self._segment, durable, ended)
                self._hurry = ended
            except OSError as error:  # the save stands
                self._warn(f"the newest state was not handed to the mirror {self._at}: {error}")
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="everstep-mirror", daemon=True)
                self._thread.start()

    def finish(self, journal: Journal, retain: Callable[[], object]) -> None:
        """Hand the rest over, and wait for the upload; nothing is added to the journal after this call."""
        if self._store is None or self._store.will_set_aside:
            return
        end = time.monotonic() + self._wait
        self._await_upload(self._wait)
        try:
            journal.sync()
        except OSError as error:
            self._warn(f"the mirror {self._at} lacks the end of the journal: {error}")
        # it deletes again: a checkpoint has stayed as long as its upload ran
        self.retain_and_upload(journal.durable, retain, ended=True)
        if missing := self._await_upload(max(0.0, end - time.monotonic())):
            with self._changed:
                names = sorted(self._missing(self._current, self._next))
            self._warn(
                f"not in the mirror {self._at}: {', '.join(map(str, names)) or 'the end of the journal'} "
                f"({missing}); start again to upload it, with mirror_wait= for a longer wait"
            )

    def close(self) -> None:
        """End the thread; an upload that runs is given up after the file that it is at."""
        if self._thread is not None:
            with self._changed:
                self._mirror.is_over = True
                self._changed.notify_all()
            self._thread.join(GRACE)

    def _await_upload(self, limit: float) -> str:
        """Wait for what was handed over; say what is missing after `limit` seconds, "" for nothing."""
        with self._changed:
            if self._changed.wait_for(lambda: self._takeover or self._next is self._current is None, limit):
                return ""
            return self._error or f"the upload takes longer than {limit:g} s"

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._error:  # an outage: the next try comes after a pause, but that of the end at once
                    self._changed.wait_for(lambda: self._mirror.is_over or self._hurry, self._pause)
                self._hurry = False
                self._changed.wait_for(lambda: self._next is not None or self._mirror.is_over)
                if self._mirror.is_over:
                    return
                self._current, self._next = self._next, None
            failure = self._upload(self._current)
            if self._takeover is None and not self._mirror.is_over:
                self._note(failure)
            with self._changed:
                if failure is not None and self._next is None:
                    self._next = self._current
                self._current = None
                self._changed.notify_all()
                if self._takeover is not None:
                    return

    def _upload(self, committed: Committed | None) -> Exception | None:
        assert committed is not None
        try:
            for problem in self._mirror.upload(committed):
                if problem not in self._warnings:
                    self._warnings.add(problem)
                    self._warn(problem)
        except RunLockedError as error:
            self._takeover = error
            self._warn(f"{error}; nothing more is uploaded, and the next save is refused")
        except Exception as error:  # of any library: the training does not depend on the mirror
            return error
        return None

    def _note(self, error: Exception | None) -> None:
        """Tell the beginning and the end of an outage, each once."""
        assert self._at is not None
        earlier, self._error = self._error, "" if error is None else self._at.describe(error)
        self._pause = min(2 * self._pause, PAUSES[1]) if earlier else PAUSES[0]
        if error is not None and not earlier:
            self._warn(
                f"the mirror {self._at} cannot be written ({self._error}); the training continues, and what "
                "it commits is uploaded as soon as the mirror can be written again"
            )
        elif error is None and earlier:
            self._say(f"the mirror {self._at} can be written again, and has everything that is committed")


def open_mirror(at: MirrorAt | None, wait: float, run_dir: Path, say: Say, warn: Say) -> RunMirror:
    """Open the mirror of a run, if there is one."""
    if at is not None and at.folder is not None:
        folder, home = at.folder.resolve(), run_dir.resolve()
        if folder.is_relative_to(home) or home.is_relative_to(folder):
            raise ConfigError(
                f"mirror={at} and the run directory {run_dir} lie in each other: give a folder elsewhere"
            )
    if at is not None and at.folder is None and os.environ.get(ROOT):
        say(f"{ROOT} is set, as for a drill: the mirror {at} is left alone")
        at = None
    return RunMirror(at, wait, say, warn)


def _list_committed(store: Store, segment: int, durable: int, ended: bool) -> Committed:
    """List the committed files of a run; its writer thread, or nobody, changes them meanwhile."""
    top, files = store.run_dir, dict[str, Source]()
    for folder in (*store.best_folders(), *(store.path(facts.name) for facts in store.facts())):
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            continue  # it is damaged
        at = folder.relative_to(top).as_posix()
        for name, record in manifest["files"].items():
            files[f"{at}/{name}"] = Source(folder / name, record["bytes"], record["xxh3_128"])
        data = read_regular(folder / "manifest.json")
        digest = xxhash.xxh3_128_hexdigest(data)
        files[f"{at}/manifest.json"] = Source(folder / "manifest.json", len(data), digest)
    for path in sorted((top / "journal").glob("segment-*.evj")):
        number = segment_number(path)
        if number is not None and number <= segment:
            size = durable if number == segment else path.stat().st_size
            if size:
                files[f"journal/{path.name}"] = Source(path, size, None)
    notes = {}
    for name in NOTES:
        with suppress(FileNotFoundError):
            notes[name] = read_regular(top / name, LARGEST_NOTE).decode("latin-1")
    return Committed(files, notes, ended)


_CHOICE = (
    "to continue from the mirror, give an empty run directory; to continue from this directory, give another "
    "mirror; neither loses anything"
)


class Restoring:
    """Brings a run directory up to the state of its mirror, if the mirror is ahead.

    Journals tell which one is ahead: each start writes a segment of its own, and only ever longer.  They are
    brought last, so after a kill the mirror is still ahead, and the next start brings the rest.  The lock of
    the run directory is held.
    """

    def __init__(self, place: Place, contents: Contents, run_dir: Path) -> None:
        self._place, self._contents, self._top = place, contents, run_dir
        self._journals = [path for path in sorted(contents.files) if path.startswith("journal/")]
        names = {path.split("/")[1] for path in contents.files if path.startswith("checkpoints/")}
        checkpoints = [CheckpointName.parse(name) for name in names if CheckpointName.matches(name)]
        self._newest = str(max(checkpoints)) if checkpoints else "no checkpoint"
        self._apart = f"{run_dir} and its mirror {place.name} were trained apart"

    def is_ahead(self) -> bool:
        """Whether the mirror has a part of the journal that the directory lacks."""
        for path in self._journals:
            self._require_same_history(path)
        return any(self._size(path) < self._contents.size(path) for path in self._journals)

    def _size(self, path: str) -> int:
        try:
            return (self._top / path).stat().st_size
        except FileNotFoundError:
            return 0

    def _require_same_history(self, path: str) -> None:
        at, size = 0, self._size(path)
        for part in self._contents.files[path]:
            end = min(at + part.bytes, size)
            if at < end and digest_of(self._top / path, at, end) != self._digest(part, end - at):
                raise MirrorError(f"{self._apart}: {path} differs from byte {at:,} on; {_CHOICE}")
            at += part.bytes

    def _digest(self, part: Part, size: int) -> str:
        """Digest of the first bytes of a part; of all, as the list says."""
        if size == part.bytes:
            return part.digest
        with TemporaryDirectory(prefix="everstep-mirror-") as folder:
            return digest_of(self._fetch_part(part, Path(folder, "part")), 0, size)

    def _fetch_part(self, part: Part, file: Path) -> Path:
        self._place.fetch(part.key, file)
        if file.stat().st_size != part.bytes or digest_of(file) != part.digest:
            raise MirrorError(
                f"{part.key} in the mirror {self._place.name} is damaged: it is not the {part.bytes:,} bytes "
                "that were uploaded; restore it from a copy, or give another mirror"
            )
        return file

    def require_nothing_lost(self) -> None:
        """Refuse to bring anything over a directory with a checkpoint that the mirror has never had."""
        store = Store(self._top)
        for facts in store.facts():
            if not self._is_known(store.path(facts.name)):
                raise MirrorError(
                    f"{self._apart}: only the directory has {facts.name}, and the mirror went on without it, "
                    f"up to {self._newest}; {_CHOICE}"
                )

    def _is_known(self, folder: Path) -> bool:
        """Whether a checkpoint is in the mirror, or was there: then the mirror has the rows up to it."""
        if self._is_there(folder):
            return True
        meta = read_manifest(folder)["meta"]
        position = meta.get("journal") if isinstance(meta, dict) else None
        if position is None:
            return False
        return int(position[1]) <= self._contents.size(f"journal/segment-{position[0]:04d}.evj")

    def _is_there(self, folder: Path) -> bool:
        path = (folder / "manifest.json").relative_to(self._top).as_posix()
        parts = self._contents.files.get(path)
        return parts is not None and parts[0].digest == digest_of(folder / "manifest.json")

    def bring(self, say: Callable[[str], None]) -> None:
        """Bring everything that the directory lacks; what only the directory has moves to superseded/.

        A FileNotFoundError says that a file is gone from the mirror: its list is not the newest any more.
        """
        durable.discard_leftovers(self._top / "journal", ROOM)  # of an earlier start that was killed here
        folders: dict[str, list[str]] = {}
        for path in self._contents.files.keys() - set(self._journals):
            folders.setdefault(path.rpartition("/")[0], []).append(path)
        restored = [folder for folder, paths in sorted(folders.items()) if self._bring_folder(folder, paths)]
        for folder in (self._top / "checkpoints").glob("*"):  # the mirror's newest is the newest
            if CheckpointName.matches(folder.name) and f"checkpoints/{folder.name}" not in folders:
                self._set_aside(folder)
        for name, note in self._contents.notes.items():
            durable.write_whole(self._top / name, note.encode("latin-1"), ROOM)
        for path in self._journals:
            if self._size(path) < self._contents.size(path):
                durable.require_no_link(self._top / path, self._top)
                durable.make_dirs((self._top / path).parent, ROOM)
                with durable.placed(self._top / path, ROOM) as new:
                    self._fetch(path, new)
        count = sum(folder.startswith("checkpoints/") for folder in restored)
        say(
            f"the run comes from its mirror {self._place.name}, which is ahead of {self._top}: "
            f"{plural(count, 'checkpoint')} brought, the newest is {self._newest}"
        )

    def _bring_folder(self, folder: str, paths: list[str]) -> bool:
        """Bring a checkpoint whole, unless it is there; returns whether it was brought."""
        target = self._top / folder
        with suppress(CheckpointError):
            read_manifest(target)
            if self._is_there(target):
                return False
        self._set_aside(target)

        def write(new: Path) -> int:
            return sum(self._fetch(path, new / path.rpartition("/")[2]) for path in sorted(paths))

        place_apart(target, write, top=self._top)
        return True

    def _set_aside(self, path: Path) -> None:
        if path.exists():
            name = f"{path.name}.before-the-mirror"
            checkpoint_files.move(path, self._top / "superseded", name, top=self._top)

    def _fetch(self, path: str, file: Path) -> int:
        """Write a file of the run from its parts, each verified, and make it durable; returns its size."""
        piece = durable.temporary(file.with_name(f"{file.name}.part"))
        try:
            with durable.create(file, ROOM) as target:
                for part in self._contents.files[path]:
                    reach("mirror.fetch")
                    for block in blocks(self._fetch_part(part, piece)):
                        durable.write(target, block, ROOM)
        finally:
            durable.discard(piece, ROOM)
        return self._contents.size(path)
