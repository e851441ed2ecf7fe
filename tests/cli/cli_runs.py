"""The command in processes of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import warm

sys.path.insert(0, str(Path(__file__).parent.parent / "index"))  # index_runs


def everstep(*command: str, cwd: Path, status: int = 0, **environment: str) -> tuple[str, str]:
    """What it prints to standard output and to standard error; its exit status is as expected."""
    done = warm.run(
        [sys.executable, "-m", "everstep", *command],
        cwd=cwd,
        env={**os.environ, "EVERSTEP_INDEX": "", "COLUMNS": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def completed(folder: Path, *words: str) -> list[str]:
    """What the shell offers after these words, in that folder."""
    asked = {"COMP_WORDS": " ".join(["everstep", *words]), "COMP_CWORD": str(len(words))}
    told, _ = everstep(cwd=folder, _EVERSTEP_COMPLETE="bash_complete", **asked)
    return [line.partition(",")[2] for line in told.splitlines()]


def as_json(*command: str, cwd: Path, status: int = 0) -> Any:
    """What it prints with --json."""
    return json.loads(everstep(*command, "--json", cwd=cwd, status=status)[0])
