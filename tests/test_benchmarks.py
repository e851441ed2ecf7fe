"""The benchmarks run, each with sizes that take seconds, and their page says what their figures say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"
TINY: dict[str, tuple[str, ...]] = {
    "steps": ("--only", "bare loop", "TrainLoop, all", "Trainer, all", "--repeats", "2", "--steps", "30"),
    "checkpoint": ("--only", "whole", "--millions", "7", "--repeats", "2"),
    "metrics": ("--steps", "400", "--repeats", "1"),
    "start": ("--repeats", "1"),
    "growth": ("--steps", "1000", "--segments", "20", "--rows", "2000", "--repeats", "1"),
    "data": ("--repeats", "1"),
    "trail": ("--repeats", "1", "--steps", "10"),
    "ledger": ("--pairs", "1", "--steps", "35"),
    "index": ("--runs", "3", "--rows", "200", "--repeats", "1"),
    "page": ("--runs", "12", "--overlay", "3", "--points", "100"),
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)


@pytest.mark.campaign("long")
@pytest.mark.parametrize("name", TINY)
def test_it_runs_and_its_figures_are_numbers(name: str, tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    command = [sys.executable, str(BENCH / f"{name}.py"), "--json", str(file), *TINY[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = json.loads(file.read_text())["tables"]
    assert tables
    for table in tables:
        assert table["title"] in done.stdout and table["figures"]
        for figure in table["figures"]:
            assert figure["values"] and all(map(math.isfinite, figure["values"])), figure


def test_each_part_of_the_suite_is_tried(bench: None) -> None:
    from suite import PARTS

    assert {part.file for part in PARTS} == set(TINY)


def test_the_page_is_that_of_the_stored_figures(bench: None, tmp_path: Path) -> None:
    from benchmarks_page import write
    from suite import PARTS

    found = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    (tmp_path / "images").mkdir()
    write({part.file: found[part.file] for part in PARTS if part.file in found}, tmp_path)
    for made in tmp_path.rglob("*.*"):
        stored = ROOT / "docs" / made.relative_to(tmp_path)
        assert made.read_text() == stored.read_text(), f'{stored}: run make bench ARGS="--page"'
