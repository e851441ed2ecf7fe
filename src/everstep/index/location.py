"""Where the index of a run lies."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "EVERSTEP_INDEX"
FILE = "everstep.db"


def index_of(run_dir: Path) -> Path | None:
    """The index that a run is shipped to: beside its directory, unless EVERSTEP_INDEX says otherwise.

    EVERSTEP_INDEX is a file, or "off" for no index (then None is returned).
    """
    said = os.environ.get(VARIABLE, "")
    if said == "off":
        return None
    return Path(said).absolute() if said else run_dir.absolute().parent / FILE


def index_from_here() -> Path:
    """The index that a command means which was not told: EVERSTEP_INDEX, ./everstep.db, ./runs/everstep.db.

    Where there is none yet, the one that the runs in ./runs, or else here, would have.
    """
    said = os.environ.get(VARIABLE, "")
    if said not in ("", "off"):
        return Path(said).absolute()
    here = Path.cwd()
    if (here / "run.json").exists():  # inside a run directory: its index lies beside it
        here = here.parent
    candidates = [here / FILE, here / "runs" / FILE]
    found = [path for path in candidates if path.exists()]
    if found:
        return found[0]
    return candidates[1] if (here / "runs").is_dir() else candidates[0]
