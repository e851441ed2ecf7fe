"""Who may read a run and an index, by owner and permissions; and whether an index has a run already."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everstep.untrusted_files import LONGEST_ID, facts_checksum, read_note


class Readers(NamedTuple):
    """Readers of a file: its owner, a group (None: no group), everybody.  Access lists are not looked at."""

    owner: int
    group: int | None
    everybody: bool

    def within(self, others: Readers) -> bool:
        """Whether all of these are among the others, who may be joined by this user and root."""
        if others.everybody:
            return True
        known = self.owner in (0, os.geteuid(), others.owner) or (self.group is not None)
        return not self.everybody and self.group in (None, others.group) and known


def readers(path: str | os.PathLike[str]) -> Readers:
    """Tell who may read a file or a folder: the permissions of the folders above count, too."""
    real = Path(os.path.realpath(path))
    found = os.stat(real)
    group = found.st_gid if found.st_mode & stat.S_IRGRP else None
    everybody = bool(found.st_mode & stat.S_IROTH)
    for folder in real.parents:
        above = os.stat(folder)
        passes = bool(above.st_mode & stat.S_IXOTH)
        everybody = everybody and passes
        if not passes and not (above.st_mode & stat.S_IXGRP and above.st_gid == group):
            group = None
    return Readers(found.st_uid, group, everybody)


def run_readers(run_dir: Path) -> Readers:
    """Tell who may read a run: its directory, its facts and its journal."""
    journal = run_dir / "journal"
    try:
        newest = max(journal.glob("segment-*.evj"), default=journal)
        found = [readers(place) for place in (run_dir, run_dir / "run.json", newest)]
    except OSError:
        return Readers(-1, None, False)
    groups = {one.group for one in found}
    group = groups.pop() if len(groups) == 1 else None
    return Readers(found[0].owner, group, all(one.everybody for one in found))


def is_strangers_link(path: Path) -> bool:
    """Whether a path is a link that another user made to something that is not that user's."""
    try:
        link, target = os.lstat(path), os.stat(path)
    except OSError:
        return False
    return stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), target.st_uid)


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run directory."""
    return os.path.exists(os.path.join(folder, "run.json")) or os.path.exists(
        os.path.join(folder, ".run.json")
    )


def facts_at(folder: str | Path) -> Mapping[str, Any] | None:
    """Return the facts of the run in a folder; None if there is no run, or it cannot be read.

    Of `run.json` and its copy the whole one counts; where both are damaged, the first that can be read.
    """
    damaged = None
    for name in ("run.json", ".run.json"):
        try:
            found = read_note(os.path.join(folder, name))
            if not isinstance(found, dict) or "id" not in found or len(str(found["id"])) > LONGEST_ID:
                continue
            if found.pop("checksum", None) == facts_checksum(found):
                return found
            damaged = damaged or found
        except (OSError, ValueError, RecursionError):
            continue
    return damaged


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
