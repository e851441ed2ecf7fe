"""The drill of programs that have never heard of everstep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from everstep.drill.any_command import drill_command
from everstep.drill.report import DrillReport

LOOP = Path(__file__).with_name("plain_loop.py")

WRONG = {
    "nothing": None,
    "optimizer": ("optimizer", "moments"),
    "schedule": ("optimizer", "settings"),
    "buffers": ("weights", "buffers"),
    "random": ("samples", "samples"),
    "anew": ("journal", "the place"),
    "quits": ("journal", "updates"),
}
"""What the loop does wrong -> component and name of the first difference."""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def drilled(wrong: str, **options: int) -> DrillReport:
    return drill_command([sys.executable, str(LOOP), wrong], **options)


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("wrong", WRONG)
def test_it_names_what_a_resume_forgets(wrong: str) -> None:
    report = drilled(wrong, strikes=1, seed=5)
    (result,) = report.results
    first = result.divergence
    assert report.steps == 16 and report.nondeterminism is None
    assert (first and (first.component, first.name)) == WRONG[wrong], report
    assert report.exit_code == (wrong != "nothing")
