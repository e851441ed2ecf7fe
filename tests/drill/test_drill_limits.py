"""Drills of scripts that take hours, and what a drill says of chance, seeds and hash order."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import everstep
import warm
from everstep.checkpoint import Store
from everstep.drill import DrillReport, drill
from everstep.drill.divergence import cause
from everstep.drill.report import KillResult, write_junit
from everstep.errors import ConfigError, Interrupted
from everstep.unattended import LIMIT

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def drilled(name: str, *args: str, **options: object) -> DrillReport:
    return drill(SCRIPTS / f"{name}.py", args, kills=1, **options)  # type: ignore[arg-type]


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "everstep", "drill", *map(str, args)]
    return warm.run(words, capture_output=True, text=True, check=False)


# ----------------------------------------------------------------------------------------- steps


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    ("name", "steps"),
    # in an epoch, at the end of an epoch, without epochs, in the first of two runs, past the end
    [("everything", 9), ("everything", 6), ("supervisor", 7), ("two_runs", 8), ("lines_again", 99)],
)
def test_runs_are_left_at_a_number_of_steps(name: str, steps: int) -> None:
    report = drilled(name, max_steps=steps, hazards=["last step", "tail", "shutdown", "SIGTERM"])
    assert report.exact, report
    is_cut = steps < 24
    assert (report.cut, report.steps) == ((steps, steps) if is_cut else (None, 24))
    assert all(
        sum(start.steps for start in one.starts) - one.again == report.steps
        for one in report.results
        if one.starts
    )
    assert ("the tail of that epoch" in report.verdict()) == is_cut
    if steps == 9 and name == "everything":  # the tail of epoch 1 comes before
        assert report.results[1].verdict == "exact"
    if name == "supervisor":
        assert report.results[1].verdict == "no such place"


@pytest.mark.campaign("long")
def test_a_fault_is_found_before_the_runs_are_left() -> None:
    report = drilled("schedule_outside", max_steps=9, hazards=["last step"])
    assert (report.exit_code, [one.verdict for one in report.results]) == (1, ["differs"])
    assert (first := report.first_divergence) is not None and first.component == "weights"
    assert report.undisturbed == 3 and "not chance: 3 undisturbed runs are equal" in report.verdict()


@pytest.mark.campaign("long")
def test_a_run_that_saves_nothing_before_it_is_left_is_saved_by_the_drill() -> None:
    report = drilled("slow", max_steps=8, hazards=["last step"])
    assert report.exact and report.save_every == 2 and report.kills_resumed, report
    assert "the drill asked for a checkpoint every 2 steps" in report.verdict()


def test_a_limit_leaves_a_run_with_its_state_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, json.dumps({"steps": 5, "save_every": 2}))
    services = [everstep.services.Console(sink=lambda line: None), everstep.Checkpoints(None, keep_last=None)]
    arguments = {"seed": 1, "max_step": 8, "services": services}
    with suppress(Interrupted), everstep.Supervisor("run", {"w": np.zeros(1)}, **arguments) as sv:
        while not sv.should_stop():
            sv.advance()
    assert sv.step == 5
    assert [each.step for each in Store(sv.run_dir).names() if each.step] == [2, 4, 5]


def test_what_cannot_be_is_refused_at_once() -> None:
    Path("train.ipynb").write_text("{}")
    with pytest.raises(ConfigError, match=r"jupyter nbconvert --to script train\.ipynb"):
        drill("train.ipynb")
    for args, said in (
        (("train.ipynb",), "nbconvert"),
        (("--max-steps", "0", "train.ipynb"), "--max-steps"),
    ):
        done = command(*args)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


# --------------------------------------------------------------------- chance, seeds, hash order


@pytest.mark.campaign("long")
def test_a_script_without_a_seed_is_told_so_and_not_failed_for_it() -> None:
    report = drilled("unseeded", hazards=["last step"])
    assert report.exact and not report.seeded, report
    assert "no seed=: the drill gave each run the same seed" in report.verdict()
    assert "no seed=" not in drilled("one_epoch", hazards=["SIGTERM"]).verdict()


@pytest.mark.campaign("long")
def test_chance_is_not_blamed_on_the_state() -> None:
    report = drilled("chance", hazards=["SIGTERM", "last step"])
    assert (report.exit_code, report.undisturbed, len(report.results)) == (3, 3, 1), report
    assert "chance: of three undisturbed runs" in report.verdict()


@pytest.mark.campaign("long")
def test_the_earliest_difference_wins_over_a_later_touch() -> None:
    report = drilled("touched_later", hazards=["last step"], seed=1)
    first = report.first_divergence
    assert first is not None and first.component == "weights" and first.place == "step"
    assert not first.note and first.step < 21
    assert "a learning rate in a variable" in cause(first)


def test_a_junit_file_has_a_case_per_hazard(tmp_path: Path) -> None:
    results = [
        KillResult("commit", "exact"),
        KillResult("commit", "failed", message="out of \x1b order"),
        KillResult("head", "no such place"),
    ]
    file = tmp_path / "cases.xml"
    write_junit(file, "train.py", DrillReport("train.py", [], 0, [], 8, 1.0, results=results))
    suite = ElementTree.parse(file).getroot()[0]
    cases = {case.get("name"): [each.tag for each in case] for case in suite}
    assert cases == {
        "two undisturbed runs": [],
        "commit": [],
        "commit 2": ["failure"],
        "head": ["skipped"],
    }
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "0", "1"]
    assert "out of ? order" in str(suite[2][0].text)
    write_junit(file, "train.py", "it fails without a kill")
    (error,) = ElementTree.parse(file).getroot().iter("error")
    assert error.text == "it fails without a kill"
