"""What a command imports: nothing heavy for its help, for a completion and for wrong usage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.cli.group import COMMANDS, home_of
from everstep.record import Journal, RunDir

PROGRAM = """
import sys
before = {*sys.modules}
import everstep.cli
try:
    everstep.cli.main()
finally:
    print("\\n", *{*sys.modules} - before, file=sys.stderr)
"""
"""Calls the command, and ends with a line of the modules that it has imported."""

HEAVY = {
    *("asyncio", "numpy", "sqlalchemy", "torch", "pydantic"),
    *("everstep.record", "everstep.checkpoint", "everstep.index.database"),
}


def imported(*command: str, status: int = 0, cwd: Path | None = None, **environment: str) -> set[str]:
    """The modules that a command imports in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command],
        cwd=cwd,
        env={**os.environ, "EVERSTEP_INDEX": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def of_others(modules: set[str]) -> set[str]:
    """Packages that are neither Python's nor ours."""
    return {name.partition(".")[0] for name in modules} - {"everstep", *sys.stdlib_module_names}


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_needs_click_and_nothing_heavy(command: str) -> None:
    modules = imported(command, "--help")
    assert home_of(command) in modules
    assert of_others(modules) == {"click"}
    assert not modules & HEAVY


def test_the_list_of_commands_imports_none_of_them() -> None:
    modules = imported("--help")
    assert of_others(modules) == {"click"}
    assert not modules & set(map(home_of, COMMANDS))
    assert not modules & {"difflib", "importlib.metadata", "json", "pathlib"}


def test_a_completion_of_options_imports_nothing_heavy() -> None:
    asked = {"COMP_WORDS": "everstep runs --so", "COMP_CWORD": "2"}
    modules = imported(_EVERSTEP_COMPLETE="bash_complete", **asked)
    assert "everstep.cli.runs" in modules
    assert of_others(modules) == {"click"} and not modules & HEAVY


@pytest.mark.parametrize("command", [["runs", "--limit", "0"], ["import", "csv", "."]])
def test_wrong_usage_imports_nothing_heavy(command: list[str]) -> None:
    modules = imported(*command, status=2)
    assert of_others(modules) == {"click"} and not modules & HEAVY


def test_a_list_of_runs_needs_neither_numpy_nor_another_database(tmp_path: Path) -> None:
    journal = Journal.open(RunDir.open(tmp_path / "run", seed=1).path, 1, None, {})
    journal.event("closed", {"status": "finished", "reason": "max_step 1 is reached"}, wall=True)
    journal.close()
    imported("sync", cwd=tmp_path)
    modules = imported("runs", cwd=tmp_path)
    assert "sqlalchemy.dialects.sqlite" in modules
    assert not modules & {"numpy", "sqlalchemy.dialects.postgresql", "everstep.record", "everstep.checkpoint"}
