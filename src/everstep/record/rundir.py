"""Run directory: its layout, and `run.json`, which identifies the run."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.durable import fsync_folder, make_dirs, no_disk_error, require_no_link, write_whole
from everstep.errors import ConfigError, RunDirError, RunLockedError, some
from everstep.record import journal_format
from everstep.record.journal_format import segment_number
from everstep.untrusted_files import LONGEST_ID, Seconds, facts_checksum, fits, read_note

VERSION = 1
"""Version of the layout of run directories."""

ROOT = "EVERSTEP_ROOT"
"""Environment variable that moves every run directory of a process below another folder."""

_FILES = ("run.json", "lock", "lock.json", "checkpoint", "pins.json", "labels.json")
_FOLDERS = (
    *("checkpoints", "journal", "evaluations"),
    *("best", "damaged", "superseded", "exports", "dumps", "logs", "failures"),
)
_LOCK, _OURS = ("lock", "lock.json"), ("run.json", "checkpoint", "checkpoints", "journal", "evaluations")
_FACTS = {"id": str, "created": Seconds, "versions": {"run": int}}


def user_path(path: object, argument: str) -> Path:
    """Return the path, with a leading "~" as the user's home."""
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes) or not os.fspath(path):
        raise ConfigError(f'{argument}={path!r} is not a path; give a path, as in {argument}="runs/first"')
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{argument}={str(path)!r}: {error}; give the path without '~'") from error


def located(path: str | os.PathLike[str]) -> Path:
    """Locate the run directory that a program calls `path`.

    Without EVERSTEP_ROOT this is `path` itself.  With EVERSTEP_ROOT it lies below that folder, under its
    absolute path, so that drilling a program leaves its runs alone.  A path below that folder stays as it is.
    """
    root = os.environ.get(ROOT)
    if not root:
        return Path(path)
    top, folder = Path(os.path.abspath(root)), Path(os.path.abspath(path))
    return folder if folder.is_relative_to(top) else top.joinpath(*folder.parts[1:])


def to_read(path: str | os.PathLike[str]) -> Path:
    """Locate a run directory for reading: as `located`, or `path` itself if the located one is missing."""
    folder = located(path)
    return folder if folder.exists() else Path(path)


@dataclass(frozen=True)
class RunDir:
    """Directory of one run.  The writers of the folders inside create them.

    Attributes:
        path: the directory, absolute.
        facts: the content of `run.json`: id, created (seconds since 1970), seed, seed_given, versions.
    """

    path: Path
    facts: dict[str, Any]

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        seed: int | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> RunDir:
        """Open a run directory; make a new run if the directory is missing or empty.

        Args:
            path: the directory; missing parents are made.  See `located`.
            create: False to only look: nothing is made or written.
            seed: the seed of a new run; drawn if None.  An existing run keeps its own seed: compare.
            about: further facts of a new run; they may replace its id.
        """
        folder = located(path).absolute()
        hint = "give a path that can be written"
        with no_disk_error("the run directory cannot be used", folder, hint):
            if create:
                _make(folder)
            elif not folder.is_dir():
                problem = "is a file" if folder.exists() else "does not exist"
                raise RunDirError(f"{folder} {problem}; check the path")
            entries = os.listdir(folder)  # before run.json is read: another process may begin the run now
            facts, damage = _read(folder / "run.json")
            if facts is None and not create:
                damage = damage or f"{folder} is not a run directory: it has no run.json; check the path"
            if damage:
                raise RunDirError(damage)
            if facts is None:
                _require_empty(folder, entries)
                facts = _create(folder, seed, about or {})
        if create and entries and facts.get("imported"):
            raise RunDirError(
                f"{folder} was imported from another program, and has nothing to resume from; give another "
                "directory"
            )
        if (version := facts["versions"]["run"]) > VERSION:
            raise RunDirError(
                f"{folder} has run directory format {version}, this everstep reads up to {VERSION}; "
                "upgrade everstep"
            )
        return cls(folder, facts)

    @property
    def id(self) -> str:
        """Name of the run and six random hexadecimal digits, unique among runs."""
        return str(self.facts["id"])

    @property
    def seed(self) -> int:
        """Seed that the run was created with, given or drawn."""
        return int(self.facts["seed"])

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def require_same(self) -> None:
        """Check, once the lock is held, that the directory still holds the run that was read before."""
        if (current := certain_id(self.path)) != self.id:
            what = "removed" if current is None else f"replaced by {current}"
            raise RunDirError(f"the run {self.id} in {self.path} was {what} while it was opened; start again")

    def next_segment(self) -> int:
        """Number of the segment that a start would write now, from 1."""
        numbers = [segment_number(path) or 0 for path in self.path.glob("journal/segment-*.evj")]
        return max(numbers, default=0) + 1

    def require_newest(self, segment: int) -> None:
        """Refuse a start that a later one has replaced: it was stopped, and has lost the lock meanwhile."""
        newest = self.next_segment() - 1
        if newest > segment:
            raise RunLockedError(
                f"start {newest} of the run in {self.path} has taken over from this one, which is start "
                f"{segment} and saves no more: leave the run to the later one, or stop both and start again"
            )


def certain_id(folder: Path) -> str | None:
    """Return the id of the run in a folder; None if `run.json` is not whole."""
    facts, _ = _read(folder / "run.json")
    return None if facts is None else str(facts["id"])


def new_id(folder: Path) -> str:
    """Make an id for a run in `folder`: the folder's name, and six random hexadecimal digits."""
    name = re.sub(r"[^\w.-]+", "-", folder.name).strip("-.") or "run"
    return f"{name}-{secrets.token_hex(3)}"


def _make(folder: Path) -> None:
    """Make a folder that can be written; refuse links and other things in the places of a run's files."""
    if folder.exists() and not folder.is_dir():
        raise RunDirError(f"{folder} is a file; give a directory for the run")
    make_dirs(folder, "run.json")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise RunDirError(
            f"{folder} cannot be written (read-only); change its permissions, or choose another directory"
        )
    for names, kind, is_kind in ((_FILES, "file", Path.is_file), (_FOLDERS, "folder", Path.is_dir)):
        for path in (folder / name for name in names):
            require_no_link(path, folder)
            if os.path.lexists(path) and not is_kind(path):
                raise RunDirError(
                    f"{path} is no {kind}, and a run has a {kind} of that name: move it away and start again"
                )


def _require_empty(folder: Path, entries: list[str]) -> None:
    """Refuse a folder without `run.json` that was not empty before `run.json` was looked for."""
    names = sorted(name for name in entries if not name.startswith(".") and name not in _LOCK)
    if files := [name for name in names if name in _OURS]:
        raise RunDirError(
            f"{folder} holds a run ({', '.join(files)}) but no run.json; restore it from a backup, or move "
            "the directory away to start anew"
        )
    if names:
        problem = f"{folder} is not a run directory: it holds {some(names)} and no run.json"
        raise RunDirError(f"{problem}; give an empty or new directory")


def _create(folder: Path, seed: int | None, about: Mapping[str, Any]) -> dict[str, Any]:
    facts = {
        "id": new_id(folder),
        "created": round(time.time(), 3),
        "seed": secrets.randbits(31) if seed is None else seed,
        "seed_given": seed is not None,
        "versions": {"run": VERSION, "journal": journal_format.VERSION},
        **about,
    }
    write_whole(folder / "run.json", _encode(facts), "run.json", replace=False)
    # The folder may be as new as the file, so its name is made durable too, if its parent may be opened.
    with suppress(PermissionError):
        fsync_folder(folder.parent, "run.json")
    stored, damage = _read(folder / "run.json")  # two processes may create at once: the first file counts
    if stored is None:
        raise RunDirError(damage or f"{folder / 'run.json'} disappeared while it was made; start again")
    return stored


def _encode(facts: dict[str, Any]) -> bytes:
    return json.dumps({**facts, "checksum": facts_checksum(facts)}, indent=2).encode() + b"\n"


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Read the facts of a file; or return None, and the fault of the file, which is "" if it is missing."""
    try:
        facts = read_note(path)
        is_whole = facts.pop("checksum") == facts_checksum(facts) and fits(facts, _FACTS)
        is_whole = is_whole and isinstance(facts["seed"], int) and facts["created"] >= 0
        if is_whole and 0 < len(facts["id"]) <= LONGEST_ID:
            return facts, ""
        fault = "its checksum is wrong, or a fact is missing or too long"
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        fault = f"it cannot be read ({error.strerror})"
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        fault = "its content was changed"
    return None, f"{path} is damaged: {fault}; restore it from a backup"
