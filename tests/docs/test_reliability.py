"""docs/reliability.md says what the stored summary of a campaign says, and nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def filled(page: str, summary: Any) -> str:
    """The page, made again by the tool."""
    sys.path.insert(0, str(ROOT / "tools"))
    import reliability

    return reliability.filled(page, summary, (DOCS / "proof.md").read_text())


def draw(runs: Any) -> str:
    sys.path.insert(0, str(ROOT / "tools"))
    import reliability_picture

    return reliability_picture.draw(runs)


@pytest.fixture(scope="module")
def summary() -> Any:
    return json.loads((DOCS / "reliability.json").read_text())


def test_page_and_picture_are_those_of_the_stored_summary(summary: Any) -> None:
    page = (DOCS / "reliability.md").read_text()
    again = "run python tools/reliability.py"
    assert filled(page, summary) == page, again
    assert draw(summary["runs"]) == (DOCS / "reliability.svg").read_text(), again


def test_a_figure_that_was_changed_by_hand_is_found(summary: Any) -> None:
    page = (DOCS / "reliability.md").read_text()
    changed = page.replace(f"{summary['counts']['kills']['n']:,} kills", "9,999,999 kills")
    assert changed != page == filled(changed, summary)
    with pytest.raises(SystemExit, match="end of counts"):
        filled(page.replace("<!-- end of counts -->", ""), summary)


def test_the_summary_adds_up(summary: Any) -> None:
    for kind, found in summary["counts"].items():
        assert found["n"] == sum(row["counts"].get(kind, 0) for row in summary["tests"].values())
        assert all(sum(classes.values()) <= found["n"] for classes in found["of"].values())
    rows = summary["tests"].values()
    assert sum(row["cases"] for row in rows) == summary["cases"]
    assert sum(row["passed"] for row in rows) == summary["passed"]
    programs = summary["counts"]["kills"]["of"]["program"]
    struck = [run["program"] for run in summary["runs"] for _, _, counted in run["kills"] if counted]
    assert {name: struck.count(name) for name in set(struck)} == programs


def test_the_picture_has_a_stroke_for_each_kill_and_a_dot_for_each_exact_run(summary: Any) -> None:
    picture = (DOCS / "reliability.svg").read_text()
    assert picture.count('stroke-width="2"') == sum(len(run["kills"]) for run in summary["runs"])
    assert picture.count("<circle") == sum(run["ended"] == "exact" for run in summary["runs"])
    assert "prefers-color-scheme: dark" in picture
    lost = draw([{**summary["runs"][0], "ended": "differs"}])
    assert "<circle" not in lost


def test_no_machine_is_named(summary: Any) -> None:
    assert set(summary["machine"]) == {"cores", "memory", "system", "versions"}
    assert re.fullmatch(r"\w+, \w+", summary["machine"]["system"])
