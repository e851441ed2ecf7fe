"""Labels of a run: the tags and the note that people give it, in the file `labels.json` of its directory.

    {"tags": ["baseline", "paper"], "note": "with the old data"}

The file is no part of the training, so anybody may change it at any time, also while the run trains: it is
written whole, under a lock of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from everstep.durable import no_disk_error, require_no_link, write_whole
from everstep.errors import ConfigError, RunDirError, nearest
from everstep.redaction import redacted
from everstep.untrusted_files import misfits, read_note

FILE = "labels.json"
NAMES = ("tags", "note")
"""Names by which queries find the labels of a run."""
_LOCK = ".labels.lock"
_MOST_TAGS, _LONGEST_TAG, _LONGEST_NOTE = 100, 100, 10_000


class Labels(NamedTuple):
    """Tags of a run, in the order in which they were given, and its note; both may be empty."""

    tags: tuple[str, ...] = ()
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return what there is, as JSON, for a record."""
        return ({"tags": list(self.tags)} if self.tags else {}) | ({"note": self.note} if self.note else {})


def has_labels(run_dir: str | os.PathLike[str]) -> bool:
    return os.path.exists(os.path.join(run_dir, FILE))


def labels(run_dir: str | os.PathLike[str]) -> Labels:
    """Return the labels of a run; none of a file that somebody else made, and that holds something else."""
    try:
        return _read(Path(run_dir))
    except (OSError, ValueError):
        return Labels()


def add_tags(run_dir: Path, tags: Sequence[str]) -> Labels:
    """Give a run more tags; a tag that it has stays where it is."""
    for tag in tags:
        if not tag or not tag.isprintable() or set(tag) & set(" ,\"'") or len(tag) > _LONGEST_TAG:
            raise ConfigError(
                f"tag {tag[:20]!r}: give a word without blanks, commas, quotes and control characters, of "
                f"{_LONGEST_TAG} characters at most"
            )
    with _changing(run_dir) as (old, write):
        new = tuple(dict.fromkeys([*old.tags, *map(redacted, tags)]))
        if len(new) > _MOST_TAGS:
            raise ConfigError(f"{len(new)} tags are too many for a run; give {_MOST_TAGS} at most")
        return write(old._replace(tags=new))


def remove_tags(run_dir: Path, tags: Sequence[str]) -> Labels:
    """Take tags from a run."""
    with _changing(run_dir) as (old, write):
        for tag in tags:
            if tag not in old.tags:
                raise ConfigError(f"the run has no tag {tag!r}; {nearest(tag, old.tags)}")
        return write(old._replace(tags=tuple(tag for tag in old.tags if tag not in tags)))


def set_note(run_dir: Path, note: str) -> Labels:
    """Give a run a note in place of the old one; an empty one removes it."""
    if len(note) > _LONGEST_NOTE:
        raise ConfigError(f"a note of {len(note):,} characters is too long; give {_LONGEST_NOTE:,} at most")
    with _changing(run_dir) as (old, write):
        return write(old._replace(note=clean(redacted(note))))


@contextmanager
def _changing(run_dir: Path) -> Iterator[tuple[Labels, Callable[[Labels], Labels]]]:
    """Give the labels, and a function that writes others, while other writers are kept out."""
    path, lock = run_dir / FILE, run_dir / _LOCK  # the lock's file stays: another writer may wait for it

    def write(new: Labels) -> Labels:
        write_whole(path, json.dumps(new._asdict(), indent=1).encode() + b"\n", "labels")
        return new

    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with no_disk_error("the labels cannot be written", path):
            for each in (path, lock):
                require_no_link(each, run_dir)
            with open(os.open(lock, flags, 0o666)) as locked:
                fcntl.lockf(locked, fcntl.LOCK_EX)
                yield _read(run_dir), write
    except ConfigError:
        raise
    except ValueError as error:
        raise RunDirError(f"{path} is damaged ({error}): correct or delete it") from error


def _read(run_dir: Path) -> Labels:
    if (run_dir / FILE).is_symlink():
        raise ValueError("it is a link")
    try:
        content = read_note(run_dir / FILE)
    except FileNotFoundError:
        return Labels()
    if not isinstance(content, dict) or any(misfits(content, {"tags?": list[str], "note?": str})):
        raise ValueError("it is not an object of tags, a list of strings, and a note")
    tags = (clean(tag)[:_LONGEST_TAG] for tag in content.get("tags", [])[:_MOST_TAGS])
    return Labels(tuple(tags), clean(content.get("note", ""))[:_LONGEST_NOTE])


def clean(text: str) -> str:
    """Replace what a database refuses, so that the index has what the file has: lone surrogates, and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
