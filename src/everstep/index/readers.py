"""Which run lies in a folder, and whether an index may have it: by its facts, its owner and permissions."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.untrusted_files import LONGEST_ID, facts_checksum, read_note

if TYPE_CHECKING:
    from everstep.index.database import Database


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run directory."""
    return os.path.exists(os.path.join(folder, "run.json"))


def facts_at(folder: str | Path) -> Mapping[str, Any] | None:
    """Return the facts of the run in a folder; None if there is no run, or its facts are damaged."""
    try:
        found = read_note(os.path.join(folder, "run.json"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or "id" not in found or len(str(found["id"])) > LONGEST_ID:
        return None
    return found if found.pop("checksum", None) == facts_checksum(found) else None


def id_at(folder: str | Path) -> str | None:
    """Return the id of the run in a folder; None if there is no run, or it cannot be read."""
    facts = facts_at(folder)
    return None if facts is None else str(facts["id"])


Origins = Mapping[str, tuple[float, int | None]]
"""Name of a run in an index -> when the run was created, in seconds since 1970, and its seed."""


def is_in(origins: Origins, run_dir: Path) -> bool:
    """Whether an index has this very run: it was shipped there by somebody who could read the run.

    A row is not enough, since anybody who may write the index can write a row with the path of a run.  Name,
    time and seed together are known only to those who can read the run.
    """
    facts = facts_at(run_dir)
    if facts is None or str(facts["id"]) not in origins:
        return False
    created, seed = origins[str(facts["id"])]
    return created == facts.get("created") and seed == stored_seed(facts.get("seed"))


def stored_seed(seed: Any) -> int | None:
    """Return a seed as an index has it: None if it is too large for a database."""
    return seed if isinstance(seed, int) and abs(seed) < 1 << 63 else None


def refusal(
    database: Database, origins: Origins, run_dir: Path, *, inside: bool, named: bool = False
) -> str | None:
    """Say why a run is not shipped; None if it may be shipped, "" if that is no fault.

    Args:
        origins: those of the runs in the index.
        inside: whether the run lies in a folder that belongs to the index; otherwise only a row says so.
        named: whether a person has named this folder for the index.
    """
    if _is_strangers_link(run_dir):
        return (
            f"{run_dir} is a link to {os.path.realpath(run_dir)}, not made by you or that run's owner, and "
            "is not read; if you want the run in the index, give the run itself to everstep sync"
        )
    if is_in(origins, run_dir) or (inside and named):
        return None
    if not inside or database.shared:
        return ""
    if confine(database, run_dir):
        return None
    return (
        f"{run_dir} is not in the index {database.name}: others may read the index who may not read the run; "
        f"everstep sync {run_dir} puts it there even so"
    )


def is_strangers(path: Path) -> bool:
    """Whether a path belongs to another user."""
    try:
        return os.stat(path).st_uid != os.geteuid()
    except OSError:
        return True


def _is_strangers_link(path: Path) -> bool:
    """Whether a path is a link that another user made to something that is not that user's."""
    try:
        link, target = os.lstat(path), os.stat(path)
    except OSError:
        return False
    return stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), target.st_uid)


def confine(database: Database, run_dir: Path) -> bool:
    """Take a file from readers who may not read a run; False if others may write it, or own it."""
    index = os.path.realpath(database.place)
    if database.shared:
        return False
    try:
        found, reads = os.stat(index), _readers(index)
    except FileNotFoundError:
        return True  # it is made again, and then confined
    newest = max((run_dir / "journal").glob("segment-*.evj"), default=run_dir)
    try:
        owners = (0, os.geteuid(), os.stat(run_dir).st_uid)
        allowed = _readers(run_dir) & _readers(run_dir / "run.json") & _readers(newest)
    except OSError:
        owners, allowed = (0, os.geteuid(), 0), set()
    if "everybody" in allowed or (found.st_uid in owners and reads <= allowed):
        return True
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    kept = 0o770 if ("group", found.st_gid) in allowed else 0o700
    for end in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(index + end, stat.S_IMODE(found.st_mode) & kept)
    return True


def _readers(path: str | Path) -> set[object]:
    """Tell who may read a file, by the permissions of the folders above, too: users, a group, "everybody"."""
    real = Path(os.path.realpath(path))
    found = os.stat(real)
    group = found.st_mode & stat.S_IRGRP
    everybody = found.st_mode & stat.S_IROTH
    for folder in real.parents:
        above = os.stat(folder)
        passes = above.st_mode & stat.S_IXOTH
        everybody = everybody and passes
        group = group and (passes or (above.st_mode & stat.S_IXGRP and above.st_gid == found.st_gid))
    return ({("group", found.st_gid)} if group else set()) | ({"everybody"} if everybody else set())
