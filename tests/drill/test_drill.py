"""The drill's own test: scripts with one planted fault each, and sound ones, as a user would drill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import everstep
import warm
from drill_counts import count_strikes
from everstep.checkpoint import Store
from everstep.drill import HAZARDS, DrillReport, KillResult, drill
from everstep.drill.program import cause, in_entry
from everstep.drill.report import append_summary, write_junit
from everstep.errors import ConfigError, Interrupted
from everstep.record import Difference
from everstep.unattended import LIMIT

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON_M = [sys.executable, "-m", "everstep", "drill"]

FAULTS = {
    "cached_draw": ("random state", "numpy"),
    "counter_outside": ("loss", "loss"),
    "data_generator": ("samples", "train"),
    "ema_outside": ("loss", "valid_loss"),
    "forgetful_service": ("service", "total"),
    "notes_by_hand": ("state", "notes.seen"),
    "rate_by_hand": ("weights", "w"),
    "rows_by_chance": ("journal", "row norm"),
    "schedule_outside": ("weights", "w"),
    "torch_rate": ("optimizer", "optimizer"),
}
"""Script -> the component that its resume spoils first, and its name."""


@pytest.mark.parametrize("component", ["weights", "state"])
def test_values_kept_between_steps_are_named_where_only_the_state_differs(component: str) -> None:
    """Before them come samples, random state and metrics, so these are equal."""
    assert "kept between steps outside state=: a counter" in cause(Difference(component, "w", "1", "2"))


@pytest.mark.parametrize(
    ("entry", "leaves", "more", "name", "words"),
    [
        ("kept", {"times/0": "0.25", "times/1": "1e-05"}, True, "kept.times[0]", ""),
        (
            "kept",
            {"times/0": "0.25", "times/1": "2.5e-05"},
            True,
            "kept.times[0]",
            "the name says: kept.times[0] and 1",
        ),
        (
            "kept",
            {"fit": "0.25"},
            False,
            "kept.fit",
            "the clock, as all else agrees: kept.fit (0.25 and 1.0 at",
        ),
        ("kept", {"fit": "0.25"}, True, "kept.fit", ""),
        ("kept", {"times#": '["list",2]', "times/0": "0.25"}, False, "kept.times", ""),
        ("kept", {"n": "2"}, False, "kept.n", ""),
        ("other", {"seconds": "0.25"}, True, "other.seconds", "as the name says"),
        ("kept", {}, True, "kept", ""),
    ],
)
def test_it_names_what_differs_in_an_entry_and_a_clock(
    entry: str, leaves: dict[str, str], more: bool, name: str, words: str
) -> None:
    first = Difference("state", entry, "ab", "cd", 10)
    ends = [
        Difference("state", f"{entry}/{leaf}".removesuffix("#"), old, "1.0") for leaf, old in leaves.items()
    ]
    found = in_entry(first, ends, more)
    assert found.name == name and words in found.note and bool(words) == bool(found.note), found
    assert str(found) == f"state ({name}) step 10"
    weights = in_entry(first._replace(component="weights"), ends, more)
    assert weights.name == (name if words else entry), "which of many leaves was first is not known"


NONDETERMINISM = {
    "unseeded_start": ("weights", "w"),
    "clock_augmentation": ("samples", "train"),
    "set_order": ("samples", "train"),
    "thread": ("weights", "w"),
    "clock_in_state": ("state", "kept.times[0]"),
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def drilled(name: str, *args: str, **options: Any) -> DrillReport:
    return drill(SCRIPTS / f"{name}.py", args, kills=1, **options)


def verdicts(report: DrillReport) -> list[str]:
    return [one.verdict for one in report.results]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", FAULTS)
def test_it_names_the_component_that_a_resume_spoils(name: str) -> None:
    report = drilled(name, hazards=["last step"])
    first = report.first_divergence
    assert report.exit_code == 1 and first is not None, report
    assert (first.component, first.name) == FAULTS[name], report
    assert first.step > 1
    assert report.undisturbed == 3 and "not chance: 3 undisturbed runs are equal" in report.verdict()


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", NONDETERMINISM)
def test_two_undisturbed_runs_that_differ_are_no_fault_of_the_resume(name: str) -> None:
    report = drilled(name)
    first = report.nondeterminism
    assert report.exit_code == 3 and first is not None and not report.results, report
    assert (first.component, first.name) == NONDETERMINISM[name], report
    assert ("give seed=" in str(report)) == (name == "unseeded_start")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", ["supervisor", "bare_evaluation", "lines_again", "two_runs", "unseeded"])
def test_a_sound_script_is_exact(name: str) -> None:
    hazards = ("tail", "commit") if name == "bare_evaluation" else ("last step", "SIGTERM+SIGKILL")
    report = drilled(name, hazards=hazards)
    assert report.exit_code == 0 and verdicts(report) == ["exact"] * 2, report
    # a script without a seed is told so, and not failed for it
    assert report.seeded == (name != "unseeded") == ("no seed=: the drill gave" not in report.verdict())


@pytest.mark.campaign("long")
def test_the_head_of_an_epoch_is_reached_from_the_checkpoint_before_it() -> None:
    report = drilled("carried_over", hazards=["last step", "head"])
    assert verdicts(report) == ["exact", "differs"], report
    _, killed, last = report.results[1].starts
    assert (killed.status, killed.steps) == (-9, 0)
    assert last.resumed_from[0] % 6 == 0
    assert (first := report.first_divergence) is not None
    assert (first.component, first.step % 6) == ("loss", 1)


@pytest.mark.campaign("long")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["bare_evaluation", "everything", "lines_again", "supervisor", "two_runs"])
def test_sound_scripts_are_exact_at_every_hazard_many_times(name: str, seed: int, tally: Any) -> None:
    report = drill(SCRIPTS / f"{name}.py", kills=5, seed=seed)
    assert report.exit_code == 0, report
    count_strikes(report, tally)


@pytest.mark.campaign("long")
@pytest.mark.parametrize("hazard", ["start-up", "resume"])
def test_exact_says_where_no_kill_was_followed_by_a_resume_from_a_later_checkpoint(hazard: str) -> None:
    """The resume is killed after the first checkpoint of a step."""
    report = drilled("saved_late", hazards=[hazard])
    assert report.exact and (report.kills_resumed > 0) == (hazard == "resume"), report
    assert ("not covered: after no kill" in report.verdict()) == (hazard == "start-up")


@pytest.mark.campaign("long")
def test_chance_is_not_blamed_on_the_state_and_a_failure_is_shown_with_its_output() -> None:
    report = drilled("chance", hazards=["SIGTERM", "last step"])
    assert (report.exit_code, report.undisturbed, len(report.results)) == (3, 3, 1), report
    assert "chance, not the resume: of three" in report.verdict()
    report = drilled("refuses_to_resume", hazards=["SIGTERM"])
    assert (report.exit_code, verdicts(report)) == (1, ["failed"])
    assert "RuntimeError: there is no way back" in str(report)


@pytest.mark.campaign("long")
def test_runs_of_the_user_are_not_touched(tmp_path: Path) -> None:
    for run_dir in (str(tmp_path / "absolute"), "../up"):
        report = drilled("everything", run_dir, hazards=("commit",))
        assert report.exact and report.runs == [str((tmp_path / run_dir).resolve())], report
    assert list(tmp_path.iterdir()) == []
    assert not (tmp_path.parent / "up").exists()


# ------------------------------------------------------------------------- scripts that take hours


@pytest.mark.campaign("long", gate=1)
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
    for one in report.results:
        assert not one.starts or sum(start.steps for start in one.starts) - one.again == report.steps
    assert ("the tail of that epoch" in report.verdict()) == is_cut
    if steps == 9 and name == "everything":  # the tail of epoch 1 comes before
        assert verdicts(report)[1] == "exact"
    if name == "supervisor":
        assert verdicts(report)[1] == "no such place"


@pytest.mark.campaign("long")
def test_a_run_that_is_left_before_it_saves_is_saved_by_the_drill() -> None:
    report = drilled("slow", max_steps=8, hazards=["last step"])
    assert report.exact and report.kills_resumed, report
    assert drilled("slow", "fault", max_steps=8, hazards=["last step"]).exit_code == 1


def test_a_limit_leaves_a_run_with_its_state_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, json.dumps({"steps": 5, "save_every": 2}))
    services = [everstep.services.Console(sink=lambda line: None), everstep.Checkpoints(None, keep_last=None)]
    arguments: dict[str, Any] = {"seed": 1, "max_step": 8, "services": services}
    with suppress(Interrupted), everstep.Supervisor("run", {"w": np.zeros(1)}, **arguments) as sv:
        while not sv.should_stop():
            sv.advance()
    assert sv.step == 5
    assert [each.step for each in Store(sv.run_dir).names() if each.step] == [2, 4, 5]


# ------------------------------------------------------------------------------------ the command


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return warm.run([*PYTHON_M, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.mark.campaign("long")
def test_the_command_prints_a_table_and_writes_json() -> None:
    done = command("--kills", "0", "--json", "report.json", "--keep", "kept", SCRIPTS / "everything.py")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(Path("report.json").read_text())["results"]
    assert [one["hazard"] for one in results] == [*HAZARDS][1:]
    statuses = {one["hazard"]: [start["status"] for start in one["starts"]] for one in results}
    assert statuses["head"] == [143, -9, 0]
    assert statuses["resume"] == [-9, -9, -9, -9, 0]
    assert (statuses["SIGTERM"], statuses["SIGINT"]) == ([143, 0], [130, 0])
    assert (statuses["SIGTERM+SIGKILL"], statuses["disk full"]) == ([-9, 0], [1, 0])
    for one in results:
        assert one["verdict"] == "exact"
        assert f"{one['hazard']:<16} {one['struck']:<34} {one['timeline']}" in done.stdout
    assert "✗" in done.stdout and "exact: 11 of 11" in done.stdout
    assert list(Path("kept").rglob("run.json"))


def test_what_cannot_be_drilled_is_said() -> None:
    for program, why in (
        ("print('no training here')", "opened no run"),
        ("raise SystemExit('out of order')", "out of order"),
        ("while True: pass", "ran longer than 0.5 s"),
    ):
        Path("script.py").write_text(program)
        done = command("--timeout", "0.5" if "while" in program else "120", "script.py")
        assert (done.returncode, why in done.stderr) == (4, True), done.stderr


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_drill_ends_what_it_started(tmp_path: Path, number: signal.Signals) -> None:
    """Also a trainer in a session of its own; nothing of the drill is left."""
    victim, folders = tmp_path / "pipe", tmp_path / "tmp"
    os.mkfifo(victim)
    folders.mkdir()
    child = (
        f"import signal; f = open({str(victim)!r}, 'w'); print('here', file=f, flush=True); signal.pause()"
    )
    Path("detached.py").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)\n"
    )
    with warm.Popen([*PYTHON_M, "detached.py"], env=os.environ | {"TMPDIR": str(folders)}) as process:
        with victim.open() as pipe:
            assert pipe.readline() == "here\n" and list(folders.iterdir())
            process.send_signal(number)
            assert process.wait(120) == 128 + number
            assert pipe.read() == ""  # nobody has its other side open
    assert not list(folders.iterdir())


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    r"jupyter nbconvert --to script train\.ipynb": ("train.ipynb", {}),
    "did you mean 'SIGTERM'": ("train.py", {"hazards": ["SIGERM"]}),
    "--ranks 2 or more": ("train.py", {"hazards": ["torchrun"]}),
    "ranks": ("train.py", {"ranks": 0}),
    "max_steps": ("train.py", {"max_steps": 0}),
    "exists; give --keep": ("train.py", {"keep": "."}),
    "is not a file": ("gone.py", {}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_is_refused_at_once(why: str) -> None:
    script, options = REFUSED[why]
    for name in ("train.ipynb", "train.py"):
        Path(name).write_text("{}")
    with pytest.raises(ConfigError, match=why):
        drill(script, **options)


def test_wrong_usage() -> None:
    for args, why in (
        (("train.ipynb",), "nbconvert"),
        (("gone.py",), "gone.py"),
        (("--kils", "3", __file__), "--kills"),
        (("--power-cut", __file__), "--power-cut does nothing in a drill of a script that uses everstep"),
        (("--strikes", "12", __file__), "drill the command: everstep drill [OPTION...] -- python train.py"),
        (("--hazard", "SIGTERM", "--", sys.executable, "train.py"), "--hazard does nothing in a drill of"),
        (("--resume-cmd", "pyhton train.py", "--", sys.executable, "t.py"), "'pyhton' is no command"),
        (("--resume-cmd", "python 't.py", "--", sys.executable, "t.py"), "'t.py\": No closing quotation"),
    ):
        Path("train.ipynb").write_text("{}")
        done = command(*args)
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr


def test_a_program_of_the_current_folder_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\ntouch made\nprintf \'\\033[1mgone\\033[0m\'\nexit 7\n'
    )
    Path("train.sh").chmod(0o755)
    done = command("--strikes", "1", "--", "./train.sh")
    assert done.returncode == 4 and "train.sh ended with status 7" in done.stderr
    assert done.stderr.endswith("gone\n") and not Path("made").exists(), "it ran in the folder itself"


def test_a_junit_file_has_a_case_per_hazard_and_a_summary_the_report(tmp_path: Path) -> None:
    results = [
        KillResult("commit", "exact"),
        KillResult("commit", "failed", message="out of \x1b order"),
        KillResult("head", "no time"),
    ]
    file = tmp_path / "cases.xml"
    report = DrillReport("train.py", [], 0, [], 8, 1.0, results=results)
    write_junit(file, "train.py", report)
    suite = ElementTree.parse(file).getroot()[0]
    cases = [(case.get("name"), [each.tag for each in case]) for case in suite]
    outcomes = [[], [], ["failure"], ["skipped"]]
    assert cases == [*zip(("two undisturbed runs", "commit", "commit 2", "head"), outcomes, strict=True)]
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "0", "1"]
    assert "out of ? order" in str(suite[2][0].text)
    write_junit(file, "train.py", "it fails without a kill")
    (error,) = ElementTree.parse(file).getroot().iter("error")
    assert error.text == "it fails without a kill"
    page = tmp_path / "summary.md"
    append_summary(page, "it fails without a kill")
    append_summary(page, report)
    titles = [line for line in page.read_text().splitlines() if line.startswith("#")]
    assert titles == ["### everstep drill: failed", "### everstep drill: not exact"]
    assert str(report) in page.read_text() and "not covered: 1 strikes, as the budget" in str(report)
