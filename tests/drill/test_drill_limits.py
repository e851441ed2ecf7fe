"""Drills of scripts that take hours, and what a drill says of chance, seeds, hash order and other files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import everstep
import warm
from everstep.checkpoint import Store
from everstep.drill import DrillReport, drill
from everstep.drill.report import Ordeal, write_junit
from everstep.drilled import LIMIT
from everstep.errors import ConfigError, DrillError, Interrupted

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


# ------------------------------------------------------------------------------- steps and budget


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
        for one in report.ordeals
        if one.starts
    )
    assert ("the tail of that epoch" in report.verdict()) == is_cut
    if steps == 9 and name == "everything":  # the tail of epoch 1 comes before
        assert report.ordeals[1].verdict == "exact"
    if name == "supervisor":
        assert report.not_struck["tail"] == "not reached before the drill left"


@pytest.mark.campaign("long")
def test_a_fault_is_found_before_the_runs_are_left() -> None:
    report = drilled("schedule_outside", max_steps=9, hazards=["last step", "SIGTERM"], fail_fast=True)
    assert (report.exit_code, [one.verdict for one in report.ordeals]) == (1, ["differs", "not reached"])
    assert (first := report.first_divergence) is not None and first.component == "weights"
    assert report.undisturbed == 3 and "not chance: 3 undisturbed runs are equal" in report.verdict()
    assert report.not_struck["commit"] == "not asked for"
    assert "not tried: SIGTERM (the drill ended at the first failure)" in report.verdict()


@pytest.mark.campaign("long")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [False, True])
def test_a_verdict_comes_within_the_budget_on_a_script_whose_epoch_takes_longer(fault: bool) -> None:
    began = time.monotonic()
    done = command("--budget", "30s", "--json", "found.json", SCRIPTS / "slow.py", *["fault"] * fault)
    # ten seconds for a busy machine: the command's own start, and the end of what it stops
    assert time.monotonic() - began < 40
    assert done.returncode == int(fault), done.stdout + done.stderr
    found = json.loads(Path("found.json").read_text())
    assert found["steps"] == found["cut"] < 3000 and found["strikes"] > 0
    assert found["not_struck"]["tail"] == "not reached before the drill left"
    assert "not struck: tail, head (not reached before the drill left)" in done.stdout
    assert "(the budget of 30 s was used up)" in done.stdout
    assert f"the drill asked for a checkpoint every {found['save_every']} steps" in done.stdout
    if fault:
        assert "likely: samples, random state and loss are equal" in done.stdout


def test_a_limit_is_that_of_one_run_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run is neither left early, nor saved more often than the script asks for."""
    limit = {"steps": 5, "save_every": 2, "run": str(Path("one").resolve())}
    monkeypatch.setenv(LIMIT, json.dumps(limit))
    monkeypatch.setenv("EVERSTEP_ROOT", str(Path("root").resolve()))
    for name, reached, saved in (("other", 8, [8]), ("one", 5, [2, 4, 5])):
        services = [
            everstep.services.Console(sink=lambda line: None),
            everstep.Checkpoints(None, keep_last=None),
        ]
        with (
            suppress(Interrupted),
            everstep.Supervisor(name, {"w": np.zeros(1)}, seed=1, max_step=8, services=services) as sv,
        ):
            while not sv.should_stop():
                sv.advance()
        assert sv.step == reached
        assert [each.step for each in Store(sv.run_dir).names() if each.step] == saved


def test_a_budget_that_is_too_small_is_said() -> None:
    with pytest.raises(DrillError, match=r"the budget of 0\.01 s ended before two undisturbed runs"):
        drilled("supervisor", budget=0.01)


def test_a_junit_file_has_a_case_per_hazard(tmp_path: Path) -> None:
    ordeals = [
        Ordeal("commit", "exact"),
        Ordeal("commit", "failed", message="out of \x1b order"),
        Ordeal("head", "no such place"),
    ]
    file = tmp_path / "cases.xml"
    write_junit(file, "train.py", DrillReport("train.py", [], 0, [], 8, 1.0, ordeals=ordeals))
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


def test_what_cannot_be_is_refused_at_once() -> None:
    Path("train.ipynb").write_text("{}")
    with pytest.raises(ConfigError, match=r"jupyter nbconvert --to script train\.ipynb"):
        drill("train.ipynb")
    for args, said in (
        (("train.ipynb",), "nbconvert"),
        (("--budget", "soon", "train.ipynb"), "as 90s, 10m or 2h"),
        (("--max-steps", "0", "train.ipynb"), "--max-steps"),
        (("--json", "no/folder.json", "train.ipynb"), "make the folder first"),
    ):
        done = command(*args)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


# -------------------------------------------------------------- chance, seeds, hash order, files


@pytest.mark.campaign("long")
def test_a_script_without_a_seed_is_told_so_and_not_failed_for_it() -> None:
    report = drilled("unseeded", hazards=["last step"])
    assert report.exact and not report.seeded, report
    assert "no seed=: the drill gave each run the same seed" in report.verdict()
    assert "no seed=" not in drilled("one_epoch", hazards=["SIGTERM"]).verdict()


@pytest.mark.campaign("long")
def test_chance_is_not_blamed_on_the_state() -> None:
    report = drilled("chance", hazards=["SIGTERM", "last step"])
    assert (report.exit_code, report.undisturbed, len(report.ordeals)) == (3, 3, 1), report
    assert "chance: of three undisturbed runs" in report.verdict()
    assert report.outside == ["starts.txt"]
    assert "written outside the run directory: starts.txt" in report.verdict()


@pytest.mark.campaign("long")
def test_files_outside_the_run_are_named_and_left() -> None:
    Path("mine.txt").write_text("not the script's")
    report = drilled("writes_outside", hazards=["SIGTERM"])
    assert report.exact
    assert report.outside == ["tables/weights.txt"]
    assert "written outside the run directory: tables/weights.txt:" in report.verdict()
    assert sorted(path.name for path in Path().iterdir()) == ["by_a_child.txt", "mine.txt", "tables"]


@pytest.mark.campaign("long")
def test_the_earliest_difference_wins_over_a_later_touch() -> None:
    report = drilled("touched_later", hazards=["last step"], seed=1)
    first = report.first_divergence
    assert first is not None and first.component == "weights" and first.place == "step"
    assert not first.note and first.step < 21
    assert "a learning rate in a variable" in first.cause
