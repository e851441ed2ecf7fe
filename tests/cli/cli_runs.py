"""The command: what only looks is called in this process, the rest in processes of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import warm
from everstep import cli
from everstep.record import RunJournal

for room in ("index", "experiment"):  # index_runs, tiny_experiment
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

LOOKING = {"runs", "show", "watch", "compare", "checkpoints", "export", "du", "prune", "import", "sync"}
LOOKING |= {"tag", "report", "note"}


def everstep(*command: str, cwd: Path, status: int = 0, **environment: str) -> tuple[str, str]:
    """What it prints to standard output and to standard error; its exit status is as expected."""
    environment = {"EVERSTEP_INDEX": "", "COLUMNS": "", **environment}
    is_here = {*command[:1]} <= LOOKING and environment.keys() == {"EVERSTEP_INDEX", "COLUMNS"}
    code, told, said = (here if is_here else in_a_process)(*command, cwd=cwd, **environment)
    assert code == status, told + said
    assert "Traceback" not in said
    return told, said


def here(*command: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """Call a command in this process: exit status, standard output, standard error."""
    told, said, folder = io.StringIO(), io.StringIO(), os.getcwd()
    before, arguments = dict(os.environ), sys.argv
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = ["everstep", *command]
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(said):
            try:
                code = cli._run()
            except SystemExit as left:
                code = int(left.code or 0)
    finally:
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)
    return code, told.getvalue(), said.getvalue()


def in_a_process(*command: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    line, given = [sys.executable, "-m", "everstep", *command], {**os.environ, **environment}
    done = warm.run(line, cwd=cwd, env=given, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def completed(folder: Path, *words: str) -> list[str]:
    """What the shell offers after these words, in that folder."""
    asked = {"COMP_WORDS": " ".join(["everstep", *words]), "COMP_CWORD": str(len(words))}
    told, _ = everstep(cwd=folder, _EVERSTEP_COMPLETE="bash_complete", **asked)
    return [line.partition(",")[2] for line in told.splitlines()]


def as_json(*command: str, cwd: Path, status: int = 0) -> Any:
    """What it prints with --json."""
    return json.loads(everstep(*command, "--json", cwd=cwd, status=status)[0])


def values(run: Path) -> list[Any]:
    """What equal runs have in common: each row that is not of the clock, but for its start."""
    return [row[1:] for row in RunJournal(run).rows() if not row.wall]
