"""The drill's own test: scripts with one planted fault each, and sound ones, as a user would drill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from drill_counts import count_strikes
from everstep.drill import DrillReport, drill

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON_M = [sys.executable, "-m", "everstep", "drill"]

FAULTS = {
    "cached_draw": ("random state", "numpy"),
    "counter_outside": ("loss", "loss"),
    "data_generator": ("samples", "train"),
    "ema_outside": ("loss", "valid_loss"),
    "forgetful_service": ("service", "total"),
    "notes_by_hand": ("state", "notes"),
    "rate_by_hand": ("weights", "w"),
    "rows_by_chance": ("journal", "row norm"),
    "schedule_outside": ("weights", "w"),
    "torch_rate": ("optimizer", "optimizer"),
}
"""Script -> the component that its resume spoils first, and its name."""

NONDETERMINISM = {
    "unseeded_start": ("weights", "w"),
    "clock_augmentation": ("samples", "train"),
    "set_order": ("samples", "train"),
    "thread": ("weights", "w"),
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def drilled(name: str, *args: str, **options: object) -> DrillReport:
    return drill(SCRIPTS / f"{name}.py", args, kills=1, **options)  # type: ignore[arg-type]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", FAULTS)
def test_it_names_the_component_that_a_resume_spoils(name: str) -> None:
    report = drilled(name, hazards=["last step"])
    first = report.first_divergence
    assert report.exit_code == 1, report
    assert first is not None
    assert (first.component, first.name) == FAULTS[name], report
    assert first.step > 1


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", NONDETERMINISM)
def test_two_undisturbed_runs_that_differ_are_no_fault_of_the_resume(name: str) -> None:
    report = drilled(name)
    assert report.exit_code == 3, report
    assert report.nondeterminism is not None
    assert (report.nondeterminism.component, report.nondeterminism.name) == NONDETERMINISM[name], report
    assert not report.results
    assert ("give seed=" in str(report)) == (name == "unseeded_start")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", ["supervisor", "bare_evaluation", "lines_again", "two_runs"])
def test_a_sound_script_is_exact(name: str) -> None:
    hazards = ("tail", "commit") if name == "bare_evaluation" else ("last step", "SIGTERM+SIGKILL")
    report = drilled(name, hazards=hazards)
    assert report.exit_code == 0, report
    assert [one.verdict for one in report.results] == ["exact"] * len(hazards), report


@pytest.mark.campaign("long")
def test_the_head_of_an_epoch_is_reached_from_the_checkpoint_before_it() -> None:
    report = drilled("carried_over", hazards=["last step", "head"])
    assert [one.verdict for one in report.results] == ["exact", "differs"], report
    _, killed, last = report.results[1].starts
    assert (killed.status, killed.steps) == (-9, 0)
    assert last.resumed_from[0].startswith("epoch-")
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
def test_exact_says_where_no_kill_was_followed_by_a_resume_from_a_later_checkpoint() -> None:
    report = drilled("saved_late", hazards=["start-up"])
    assert report.exact and report.kills_resumed == 0
    assert "not covered: after no kill" in report.verdict() and "Checkpoints(Every(" in report.verdict()


@pytest.mark.campaign("long")
def test_the_resume_is_killed_after_the_first_checkpoint_of_a_step() -> None:
    report = drilled("saved_late", hazards=["resume"])
    assert report.exact and report.kills_resumed > 0, report
    assert "not covered" not in report.verdict()


# ------------------------------------------------------------------------------------ the command


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return warm.run([*PYTHON_M, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.mark.campaign("long")
def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    done = command("--kills", "0", "--json", "report.json", "--keep", "kept", SCRIPTS / "everything.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(Path("report.json").read_text())
    hazards = [one["hazard"] for one in found["results"]]
    assert hazards == [
        "start-up",
        "commit",
        "tail",
        "last step",
        "head",
        "shutdown",
        "resume",
        "SIGTERM",
        "SIGINT",
        "SIGTERM+SIGKILL",
        "disk full",
    ]
    statuses = {one["hazard"]: [start["status"] for start in one["starts"]] for one in found["results"]}
    assert statuses["head"] == [143, -9, 0]
    assert statuses["resume"] == [-9, -9, -9, -9, 0]
    assert (statuses["SIGTERM"], statuses["SIGINT"]) == ([143, 0], [130, 0])
    assert (statuses["SIGTERM+SIGKILL"], statuses["disk full"]) == ([-9, 0], [1, 0])
    for one in found["results"]:
        assert one["verdict"] == "exact"
        assert f"{one['hazard']:<16} {one['struck']:<34} {one['timeline']}" in done.stdout
    assert "✗" in done.stdout
    assert "exact: 11 of 11" in done.stdout
    assert list(Path("kept").rglob("run.json"))


@pytest.mark.campaign("long")
def test_a_resume_that_fails_is_shown_with_its_output() -> None:
    report = drilled("refuses_to_resume", hazards=["SIGTERM"])
    assert (report.exit_code, [one.verdict for one in report.results]) == (1, ["failed"])
    assert "RuntimeError: there is no way back" in str(report)


@pytest.mark.campaign("long")
def test_runs_of_the_user_are_not_touched(tmp_path: Path) -> None:
    for run_dir in (str(tmp_path / "absolute"), "../up"):
        report = drilled("everything", run_dir, hazards=("commit",))
        assert report.exact, report
        assert report.runs == [str((tmp_path / run_dir).resolve())]
    assert list(tmp_path.iterdir()) == []
    assert not (tmp_path.parent / "up").exists()


def test_what_cannot_be_drilled_is_said(tmp_path: Path) -> None:
    for program, said in (
        ("print('no training here')", "opened no run"),
        ("raise SystemExit('out of order')", "out of order"),
        ("while True: pass", "ran longer than 0.5 s"),
    ):
        Path("script.py").write_text(program)
        done = command("--timeout", "0.5" if "while" in program else "120", "script.py")
        assert (done.returncode, said in done.stderr) == (4, True), done.stderr


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_drill_ends_what_it_started(tmp_path: Path, number: signal.Signals) -> None:
    """Also a trainer in a session of its own; nothing of the drill is left."""
    victim, folders = write_endless(tmp_path)
    with warm.Popen([*PYTHON_M, "detached.py"], env=os.environ | {"TMPDIR": str(folders)}) as process:
        with victim.open() as said:
            assert said.readline() == "here\n" and list(folders.iterdir())
            process.send_signal(number)
            assert process.wait(120) == 128 + number
            assert said.read() == ""  # nobody has its other side open
    assert not list(folders.iterdir())


def write_endless(tmp_path: Path) -> tuple[Path, Path]:
    """Write detached.py, whose child never ends and holds a pipe open; the pipe, and a folder for TMPDIR."""
    victim, folders = tmp_path / "pipe", tmp_path / "tmp"
    os.mkfifo(victim)
    folders.mkdir()
    child = (
        f"import signal; f = open({str(victim)!r}, 'w'); print('here', file=f, flush=True); signal.pause()"
    )
    Path("detached.py").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)\n"
    )
    return victim, folders


def test_wrong_usage() -> None:
    assert "did you mean 'SIGTERM'" in (done := command("--hazard", "SIGERM", __file__)).stderr
    assert done.returncode == 2
    assert command("gone.py").returncode == 2
    assert "exists" in command("--keep", ".", __file__).stderr
    assert "--kills" in command("--kils", "3", __file__).stderr
