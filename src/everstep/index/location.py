"""Where an index is, by the words of a person."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeAlias

from everstep.errors import ConfigError
from everstep.redaction import HIDDEN

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
            "the index is not a URL (it is not shown: it may hold a password); give "
            "postgresql://USER@HOST/DATABASE"
        )
    if not separator:
        return Path(text).absolute()
    if scheme not in ("postgresql", "postgres"):
        raise ConfigError(
            f"the index cannot be in {scheme}://...; give a file, or postgresql://USER@HOST/DATABASE"
        )
    return text


def lacks_credential(at: Location | None) -> bool:
    """Whether a URL comes from a record, where its password is removed."""
    return isinstance(at, str) and HIDDEN in at


def index_of(run_dir: Path, given: Location | None = None) -> Location | None:
    """Return the index of a run: that of EVERSTEP_INDEX, else the given index, else a file beside the run.

    EVERSTEP_INDEX is a file, the URL of a PostgreSQL database, or "off" for no index (then None is returned).
    """
    said = os.environ.get(INDEX_VARIABLE, "")
    if said == "off":
        return None
    return as_location(said) if said else given or run_dir.absolute().parent / FILE


def is_said() -> bool:
    """Whether EVERSTEP_INDEX names an index."""
    return os.environ.get(INDEX_VARIABLE, "") not in ("", "off")


def index_from_here() -> Location:
    """Return a command's default index: EVERSTEP_INDEX, ./everstep.db, or ./runs/everstep.db.

    If none exists, return the index that the runs in ./runs would have, or those here without such a folder.
    """
    if is_said():
        return as_location(os.environ[INDEX_VARIABLE])
    here = Path.cwd()
    if (here / "run.json").exists():  # inside a run directory: its index lies beside it
        here = here.parent
    candidates = [here / FILE, here / "runs" / FILE]
    found = [path for path in candidates if path.exists()]
    if found:
        return found[0]
    return candidates[1] if (here / "runs").is_dir() else candidates[0]


def runs_of(index: Location) -> Path:
    """Return the folder whose runs an index should have: its own folder; for a database ./runs, or here."""
    if isinstance(index, Path):
        return index.parent
    here = Path.cwd()
    if (here / "run.json").exists():
        return here.parent
    return here / "runs" if (here / "runs").is_dir() else here
