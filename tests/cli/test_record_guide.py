"""Every command that docs/guide/record.md shows runs as it stands there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from cli_runs import everstep

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "docs"))


def test_every_command_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snippet_setups import SETUPS

    monkeypatch.chdir(tmp_path)
    SETUPS["trained"]()
    commands = re.findall(r"^\$ (.+)$", (ROOT / "docs" / "guide" / "record.md").read_text(), re.MULTILINE)
    assert len(commands) > 15
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name == "everstep"
        assert everstep(*arguments, cwd=tmp_path)[0]
    assert (tmp_path / "loss.svg").exists()
