"""Files that checkpoints of a run share: RUN/shared/NAME.safetensors, and NAME.copy.safetensors.

A shared file is written once and never changed.  The second physical copy is there before a second checkpoint
refers to the file, so that no single fault takes more than one checkpoint.  Either copy alone is enough.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from everstep.checkpoint import files
from everstep.checkpoint.array_file import (
    Record,
    check_size,
    copy_file,
    unreadable,
    verify_file,
    write_arrays,
)
from everstep.contracts.state import HostArray
from everstep.durable import require_no_link, temporary
from everstep.errors import DamagedCheckpointError
from everstep.untrusted_files import read_regular

T = TypeVar("T")

_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}
"""Errors of file systems without hard links, of another one, and of those that refuse one more."""

FOLDER = "shared"
"""Name of the folder in a run directory, and of the fact in a record that leads there."""

HERE = "."
"""Fact in a record of files that lie in the folder itself, in both copies: best weights."""

_UP = re.compile(r"\.|(\.\./){1,3}shared")
_ENDING, _COPY = ".safetensors", ".copy.safetensors"


class Flaw(NamedTuple):
    """A copy of a shared file that is damaged or missing, where the other copy is whole.

    Attributes:
        path: the copy.
        whole: the other copy.
        record: the file's size and checksum.
        how: what is wrong, as a sentence for the user.
    """

    path: Path
    whole: Path
    record: Record
    how: str


def is_shared(record: Mapping[str, Any]) -> bool:
    """Whether a record is that of a shared file."""
    return FOLDER in record


def leads_up(record: Mapping[str, Any]) -> bool:
    """Whether a record leads nowhere but to the file's own folder, or to a folder of shared files above."""
    if not is_shared(record):
        return True
    up = record[FOLDER]
    return isinstance(up, str) and _UP.fullmatch(up) is not None


def located(folder: Path, name: str, record: Record) -> Path:
    """Return the path of a file of a checkpoint: the first copy of a shared file.

    Args:
        folder: the checkpoint's folder.
    """
    if not is_shared(record):
        return folder / name
    *up, last = str(record[FOLDER]).split("/")
    for step in up:
        # what is above a folder that a link leads to lies above the folder, not above the link
        folder = Path(os.path.normpath((folder.resolve() if folder.is_symlink() else folder) / step))
    return folder / last / name


def copy_of(path: Path) -> Path:
    """Return the path of a shared file's second copy."""
    return path.with_name(path.name.removesuffix(_ENDING) + _COPY)


# ------------------------------------------------------------------------------------- reading


def either(folder: Path, name: str, record: Record, use: Callable[[Path], T], flaws: list[Flaw]) -> T:
    """Use a file of a checkpoint; of a shared file the second copy, where the first is damaged.

    Args:
        use: reads the file at a path.
        flaws: takes what is wrong with the first copy.

    Raises:
        DamagedCheckpointError: the file is damaged, and so is its copy.
    """
    path = located(folder, name, record)
    if not is_shared(record):
        return use(path)
    try:
        return use(path)
    except DamagedCheckpointError as error:
        first = error
    try:
        found = use(copy_of(path))
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder.name} is damaged: {what(first)}, and {what(error)}; checkpoints share "
            f"this file: to copy one elsewhere, use `everstep checkpoints RUN copy`"
        ) from error
    flaws.append(Flaw(path, copy_of(path), record, what(first)))
    return found


def copy_here(folder: Path, name: str, record: Record, target: Path) -> Record:
    """Copy a file of a checkpoint durably, shared or not; returns the record of the copy."""

    def copy(path: Path) -> None:
        try:
            copy_file(path, target, record)
        except DamagedCheckpointError:
            files.discard(target)
            raise

    either(folder, name, record, copy, [])
    return {key: value for key, value in record.items() if key != FOLDER}


def check_there(folder: Path, name: str, record: Record) -> None:
    """Require that a file of a checkpoint, or its copy, is there and has its size."""
    either(folder, name, record, lambda path: _require_size(path, record), [])


def verify_copies(folder: Path, name: str, record: Record) -> list[Flaw]:
    """Verify every byte of a file of a checkpoint, and of its copy; returns what is wrong with one of them.

    Raises:
        DamagedCheckpointError: the file is damaged, and so is its copy.
    """
    flaws: list[Flaw] = []
    either(folder, name, record, lambda path: verify_file(path, record), flaws)
    path = located(folder, name, record)
    if is_shared(record) and not flaws and copy_of(path).exists():
        try:
            verify_file(copy_of(path), record)
        except DamagedCheckpointError as error:
            flaws.append(Flaw(copy_of(path), path, record, what(error)))
    return flaws


def what(error: DamagedCheckpointError) -> str:
    """Return what is wrong with a shared file, which belongs to no single checkpoint."""
    return str(error).partition(" is damaged: ")[2]


def _require_size(path: Path, record: Record) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        unreadable(path, error)
    check_size(path, found, record)


# ------------------------------------------------------------------------------------- writing


def make_folder(folder: Path) -> None:
    """Make the folder of the shared files, if it is missing."""
    require_no_link(folder, folder.parent)
    files.make_dirs(folder)


def write_shared(folder: Path, save: str, arrays: Mapping[str, HostArray]) -> tuple[str, Record]:
    """Write a shared file, durably; returns its name and its record.

    Args:
        folder: the folder of the shared files; created if it is missing.
        save: name of the checkpoint that is saved.
    """
    make_folder(folder)
    # a name that was never used: whoever was stopped while it deleted a file finds another one
    path = folder / f"{save}-{secrets.token_hex(4)}{_ENDING}"
    try:
        record = write_arrays(path, arrays)
        files.fsync_folder(folder)
    except BaseException:
        files.discard(path)
        raise
    return path.name, record


def link_here(path: Path, folder: Path) -> bool:
    """Give both copies of a shared file a name in a folder, too; False where the file system cannot.

    The names are as durable as the folder: the caller syncs it.
    """
    copies = (path, copy_of(path))
    try:
        for each in copies:
            files.link(each, folder / each.name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        for each in copies:
            files.discard(folder / each.name)
        return False
    return True


def have_two(path: Path, record: Record) -> bool:
    """Make sure that both copies of a shared file are on the disk; False where there is no whole one."""
    pair = (path, copy_of(path))
    here, lacking = ([each for each in pair if _has_size(each, record) is there] for there in (True, False))
    if here and lacking:
        try:
            _copy_again(here[0], lacking[0], record)
        except DamagedCheckpointError:
            return False
    return bool(here)


def heal(flaw: Flaw) -> str:
    """Make a damaged copy again from the other one; returns a sentence for the user."""
    try:
        _copy_again(flaw.whole, flaw.path, flaw.record)
    except (OSError, DamagedCheckpointError) as error:
        return f"{flaw.how}; {flaw.whole.name} was used, and could not be copied ({error})"
    return f"{flaw.how}; it was made again from {flaw.whole.name}, which is whole"


def _copy_again(whole: Path, target: Path, record: Record) -> None:
    """Replace the other copy of a shared file, durably."""
    require_no_link(target, target.parent.parent)
    new = temporary(target)
    files.discard(new)
    try:
        copy_file(whole, new, record)
        if target.is_dir():
            files.discard(target)  # a rename cannot replace a folder
        files.rename(new, target)
        files.fsync_folder(target.parent)
    finally:
        files.discard(new)


def _has_size(path: Path, record: Record) -> bool:
    try:
        return path.is_file() and path.stat().st_size == record["bytes"]
    except OSError:
        return False


# ------------------------------------------------------------------------------------- deleting


def sweep(
    folder: Path,
    used: Callable[[], Collection[str]],
    manifests: Callable[[], Iterable[Path]],
    ready: Callable[[], None],
) -> None:
    """Delete the shared files to which nothing on the disk refers.

    Args:
        folder: the folder of the shared files.
        used: lists files that are in use, as far as known.
        manifests: lists all manifests that may refer to other files.
        ready: called before each deletion; raises where this process may not delete any more.
    """
    found = sorted(folder.glob(f"*{_ENDING}"))
    known = used() if found else ()
    loose = {path: name for path in found if (name := _first_copy(path.name)) not in known}
    if not loose:
        return
    require_no_link(folder, folder.parent)
    # by the bytes: a manifest that is damaged elsewhere still holds what it names
    texts = [_text(path) for path in manifests()]
    for path, name in loose.items():
        if not any(name.encode() in text for text in texts):
            ready()
            files.unlink(path)


def _first_copy(name: str) -> str:
    return name.removesuffix(_COPY) + _ENDING if name.endswith(_COPY) else name


def _text(path: Path) -> bytes:
    try:
        return read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return b""
