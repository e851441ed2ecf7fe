"""Where an index is, by the words of a person, and which run lies in a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from everstep.errors import ConfigError
from everstep.redaction import HIDDEN
from everstep.untrusted_files import LONGEST_ID, facts_checksum, read_note

INDEX_VARIABLE = "EVERSTEP_INDEX"
FILE = "everstep.db"

_NO_FILE = re.compile(r"postgres(ql)?:|(^|\s)(host|dbname|user|password)=")
"""Forms that a person means for a database, and that would become the name of a file."""

Location: TypeAlias = Path | str
"""Path of a file, or URL of a PostgreSQL database."""


def as_location(text: str) -> Location:
    """Read a person's name for the index: a file's path, made absolute, or a URL."""
    scheme, separator, _ = text.partition("://")
    if not separator and _NO_FILE.search(text):
        raise ConfigError(
            "the index is not a URL (not shown: it may hold a password); give postgresql://USER@HOST/DATABASE"
        )
    if not separator:
        return Path(text).absolute()
    if scheme not in ("postgresql", "postgres"):
        raise ConfigError(f"the index cannot be in {scheme}://...; give a file, or postgresql://...")
    return text


def lacks_credential(at: Location | None) -> bool:
    """Whether a URL comes from a record, where its password is removed."""
    return isinstance(at, str) and HIDDEN in at


def index_of(run_dir: Path, default: Location | None = None) -> Location | None:
    """Return the index of a run: that of EVERSTEP_INDEX, else the given index, else a file beside the run.

    EVERSTEP_INDEX is a file, the URL of a PostgreSQL database, or "off" for no index (then None is returned).
    """
    value = os.environ.get(INDEX_VARIABLE, "")
    if value == "off":
        return None
    return as_location(value) if value else default or run_dir.absolute().parent / FILE


def index_from_here() -> Location:
    """Return a command's default index: EVERSTEP_INDEX, ./everstep.db, or ./runs/everstep.db.

    If none exists, return the index that the runs in ./runs would have, or those here without such a folder.
    """
    if (variable := os.environ.get(INDEX_VARIABLE, "")) not in ("", "off"):
        return as_location(variable)
    folder, runs = _folder(), _folder() / "runs"
    return folder / FILE if (folder / FILE).exists() or not runs.is_dir() else runs / FILE


def runs_of(index: Location) -> Path:
    """Return the folder whose runs an index should have: its own folder; for a database ./runs, or here."""
    if isinstance(index, Path):
        return index.parent
    folder, runs = _folder(), _folder() / "runs"
    return runs if folder == Path.cwd() and runs.is_dir() else folder


def _folder() -> Path:
    """Return the current folder; inside a run directory the one above, where its index lies."""
    folder = Path.cwd()
    return folder.parent if is_run(folder) else folder


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run directory."""
    return os.path.exists(os.path.join(folder, "run.json"))


def facts_at(folder: str | Path) -> Mapping[str, Any] | None:
    """Return the facts of the run in a folder; None if there is no run, or its facts are damaged."""
    try:
        facts = read_note(os.path.join(folder, "run.json"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or "id" not in facts or len(str(facts["id"])) > LONGEST_ID:
        return None
    return facts if facts.pop("checksum", None) == facts_checksum(facts) else None


def id_at(folder: str | Path) -> str | None:
    """Return the id of the run in a folder; None if there is no run, or it cannot be read."""
    path = os.path.join(folder, "run.json")
    try:
        file = os.lstat(path)
    except OSError:
        return None
    version = (file.st_dev, file.st_ino, file.st_ctime_ns, file.st_size)
    if _ids.get(path, (None,))[0] != version:
        facts = facts_at(folder)
        _ids[path] = version, None if facts is None else str(facts["id"])
    return _ids[path][1]


_ids: dict[str, tuple[tuple[int, ...], str | None]] = {}
"""Ids by path, and which file they were read from: the page looks at thousands of runs, again and again."""
