"""Admission of a run to an index that nobody named for it: whose it is, and who would read it there."""

from __future__ import annotations

import filecmp
import os
from pathlib import Path

from everstep.errors import EverstepError
from everstep.index.database import Database
from everstep.index.readers import Origins, id_at, is_in, is_strangers_link


def refusal(
    database: Database, origins: Origins, run_dir: Path, *, inside: bool, named: bool = False
) -> str | None:
    """Say why a run is not shipped; None if it may be shipped, "" if that is no fault.

    Args:
        origins: those of the runs in the index.
        inside: whether the run lies in a folder that belongs to the index; otherwise only a row says so.
        named: whether a person has named this folder for the index.
    """
    if is_strangers_link(run_dir):
        return (
            f"{run_dir} is a link to {os.path.realpath(run_dir)}, not made by you or that run's owner, and "
            "is not read; if you want the run in the index, give the run itself to everstep sync"
        )
    if is_in(origins, run_dir) or (inside and named):
        return None
    if not inside or database.shared:
        return ""
    if database.confine(run_dir):
        return None
    return (
        f"{run_dir} is not in the index {database.name}: others may read the index who may not read the run; "
        f"everstep sync {run_dir} puts it there even so"
    )


def uncontested(found: list[Path], origins: Origins, problems: list[str]) -> list[Path]:
    """Leave out directories that claim to be the same run, new to the index, if none is this user's.

    Otherwise this user's comes first, and the others are told as copies.
    """
    claims: dict[str | None, list[Path]] = {}
    for path in found:
        claims.setdefault(id_at(path), []).append(path)
    chosen = []
    for name, paths in claims.items():
        if name is None or name in origins or len(paths) == 1 or _are_copies(paths):
            chosen += paths
            continue
        mine = [path for path in paths if _is_marked(path)]
        mine = mine if len(mine) == 1 else [path for path in paths if os.stat(path).st_uid == os.geteuid()]
        if len(mine) == 1:
            chosen += [*mine, *(path for path in paths if path not in mine)]
            continue
        places = ", ".join(map(str, paths))
        problems.append(f"{places} all claim to be the run {name}, and none is indexed; move the others away")
    return chosen


def _are_copies(paths: list[Path]) -> bool:
    """Whether run directories have equal journals."""
    journals = [{path.name: path for path in (run / "journal").glob("segment-*.evj")} for run in paths]
    try:
        return all(
            other.keys() == journals[0].keys()
            and all(_is_equal(path, other[name]) for name, path in journals[0].items())
            for other in journals[1:]
        )
    except OSError:
        return False


def _is_equal(one: Path, other: Path) -> bool:
    plain = all(path.is_file() and not path.is_symlink() for path in (one, other))
    return plain and filecmp.cmp(one, other, shallow=False)


def _is_marked(run_dir: Path) -> bool:
    """Whether a start of the run bears this user's mark."""
    from everstep.record import RunJournal
    from everstep.record.trust import distrust

    try:
        starts = RunJournal(run_dir).events("segment", valid=False)
        return any(not distrust(run_dir, start.data.get("facts", {})) for start in starts)
    except (EverstepError, OSError, ValueError):
        return False
