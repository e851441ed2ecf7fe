"""The suite judges any program: an exact one is exact, and each of nine planted faults is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "conformance"
sys.path.insert(0, str(ADAPTERS))
import verdicts  # noqa: E402
from score import table  # noqa: E402
from starts import Start, Step  # noqa: E402
from strikes import CHAIN, FULL, IN_SAVE, KINDS, MID_EPOCH, TERM  # noqa: E402
from witness import Witness  # noqa: E402

from faults import FLIPPED, TRUNCATED, ZEROED  # noqa: E402

PROGRAM = Path(__file__).parent / "conformance_program.py"
TINY = ("--save-every", "6", "--epoch", "10", "--kills", "1")


def judged(
    tmp_path: Path, command: list[str], *options: str, **environment: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status of the suite, the score, and what it printed."""
    score = tmp_path / "score.json"
    suite = [sys.executable, str(ADAPTERS / "judge.py"), "--json", str(score), *options, "--"]
    with tempfile.TemporaryDirectory() as short:  # a socket's path has an end, and that of a test is long
        done = subprocess.run(
            [*suite, sys.executable, *command],
            env={**os.environ, "TMPDIR": short, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert not [*Path(short).glob("conformance-*")], "runs are deleted"
    assert score.exists(), done.stdout
    return done.returncode, json.loads(score.read_text()), done.stdout


def tiny(tmp_path: Path, fault: str, *options: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    return judged(tmp_path, [str(PROGRAM), fault], *TINY, "--preload", "numpy", *options, **environment)


@pytest.mark.campaign("timed")
def test_an_exact_program_is_exact_under_every_kind_of_strike(tmp_path: Path) -> None:
    status, score, said = tiny(tmp_path, "none")
    assert status == 0, said
    assert {each["kind"] for each in score["strikes"]} == set(KINDS)
    assert {each["outcome"] for each in score["strikes"]} == {verdicts.EXACT}
    assert score["judged"] and score["schema"] == 1 and score["steps"] == 60 and "numpy" in score["versions"]
    inside = [each for each in score["strikes"] if each["kind"] in (MID_EPOCH, CHAIN)]
    assert all(each["struck_status"] == -9 and each["resumed_after"] > 0 for each in inside)


PLANTED = {
    "loses random state": (MID_EPOCH, verdicts.INEXACT, "loss"),
    "repeats samples": (MID_EPOCH, verdicts.INEXACT, "samples"),
    "skips steps": (MID_EPOCH, verdicts.INEXACT, "steps"),
    "starts over": (MID_EPOCH, verdicts.STARTED_OVER, None),
    "writes in place": (IN_SAVE, verdicts.CRASHED, None),
    "leaves at SIGTERM": (TERM, verdicts.UNFINISHED, None),
    "loads what is torn": (TRUNCATED, verdicts.LOADED, "weights"),
    "keeps one": (FLIPPED, verdicts.REFUSED, None),
}


@pytest.mark.campaign("timed")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    kind, outcome, difference = PLANTED[fault]
    status, score, said = tiny(tmp_path, fault, "--only", kind)
    assert status == 1
    (found,) = score["strikes"]
    assert (found["kind"], found["outcome"]) == (kind, outcome), said
    assert (found["difference"] or {}).get("what") == difference, said
    assert bool(found["used_too_often"]) == (fault == "repeats samples"), said
    assert f'--only "{kind}:0"' in said, "how to repeat it"


def test_a_program_that_does_not_repeat_itself_cannot_be_judged(tmp_path: Path) -> None:
    status, score, said = tiny(tmp_path, "chance")
    assert status == 3 and not score["judged"] and score["strikes"] == []
    assert "two undisturbed runs differ in loss at step 1" in score["why_not"] and "cannot be judged" in said


@pytest.mark.campaign("long")
def test_a_run_without_files_is_not_damaged_and_that_is_no_success(tmp_path: Path) -> None:
    status, score, said = tiny(tmp_path, "saves nothing", "--only", FLIPPED)
    assert status == 1 and score["score"] == {FLIPPED: {verdicts.NOT_DONE: 1}}, said


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    command = [sys.executable, str(ADAPTERS / "judge.py"), *TINY, "--preload", "json"]
    done = subprocess.run(
        [*command, "--", sys.executable, str(PROGRAM), "none"],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and f"it is {folder}: set TMPDIR to a shorter one" in done.stderr


@pytest.mark.campaign("machine")
@pytest.mark.parametrize(
    ("fault", "outcome"), [("none", verdicts.NOT_DONE), ("has large files", verdicts.EXACT)]
)
def test_where_nothing_can_be_mounted_files_are_limited_or_it_is_said(
    fault: str, outcome: str, tmp_path: Path
) -> None:
    """Small files pass under the limit: that strike would have been none, and is no success."""
    status, score, said = tiny(tmp_path, fault, "--only", FULL, PATH=str(tmp_path))
    (found,) = score["strikes"]
    assert score["full_disk"] == "RLIMIT_FSIZE" and found["outcome"] == outcome, said
    assert status == (0 if outcome == verdicts.EXACT else 1)
    assert outcome == verdicts.NOT_DONE or "File too large" in found["words"]


# -------------------------------------------------------------------------------------- verdicts


def steps(*numbers: int, loss: str = "00") -> list[Step]:
    return [Step(number, (number % 3,), loss) for number in numbers]


def test_a_resume_replaces_what_it_executes_again() -> None:
    struck, resumed = Start(steps(1, 2, 3, 4)), Start(steps(3, 4, 5, 6))
    assert verdicts.followed([struck, resumed]) == steps(1, 2, 3, 4, 5, 6)
    assert verdicts.miscounted(Start(steps(1, 2, 3, 4, 5, 6)), [struck, resumed]) == (0, 0)
    assert verdicts.miscounted(Start(steps(1, 2, 3)), [Start(steps(1, 2, 3, 3))]) == (1, 0)


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1\n    load("x.pt")'


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (Start(steps(3, 4), {"weights/w": "a"}, status=0), verdicts.EXACT),
        (Start(steps(3, 4, loss="01"), {"weights/w": "a"}, status=0), verdicts.INEXACT),
        (Start(steps(3, 4), {"weights/w": "b"}, status=0), verdicts.INEXACT),
        (Start(steps(1, 2, 3, 4), {"weights/w": "a"}, status=0), verdicts.STARTED_OVER),
        (Start(steps(3, 4), None, status=0), verdicts.UNFINISHED),
        (Start(steps(3), None, status=1, words="Traceback (most recent call last):\nE"), verdicts.CRASHED),
        (Start([], None, status=-11), verdicts.CRASHED),
        (Start([], None, status=1, words="the file x.pt is damaged"), verdicts.REFUSED),
        (Start([], None, status=1, words="Traceback (most recent call last):\nx.pt"), verdicts.REFUSED),
        (Start([], None, status=1, words=f"loading x.pt\n{TRACEBACK}\nE: corrupt"), verdicts.CRASHED),
        (Start([], None, status=None), verdicts.HUNG),
    ],
)
def test_outcomes(last: Start, outcome: str) -> None:
    undisturbed = Start(steps(1, 2, 3, 4), {"weights/w": "a"}, status=0)
    struck = Start(steps(1, 2, 3), status=-9)
    assert verdicts.outcome(undisturbed, [struck, last], 1, "x.pt")[0] == outcome
    assert outcome in verdicts.MEANING


def test_who_is_struck_and_goes_on_to_the_end_is_not_started_again() -> None:
    undisturbed = whole = Start(steps(1, 2, 3), {}, status=0)
    left, killed = Start(steps(1, 2), {}, status=0), Start(steps(1, 2), None, status=-15)
    assert [verdicts.came_to_its_end(undisturbed, each) for each in (whole, left)] == [True, False]
    assert [verdicts.is_left_unfinished(undisturbed, each) for each in (left, killed)] == [True, False]


def test_the_witness_writes_nothing_where_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERSTEP_CONFORMANCE", raising=False)
    Witness(numpy="2").step(1, [1], 0.5)
    monkeypatch.setenv("EVERSTEP_CONFORMANCE", str(tmp_path / "trace"))
    witness = Witness(numpy="2")
    witness.step(1, [1, 2], 0.5)
    witness.end(weights={"w": 1})
    about, step, end = map(json.loads, (tmp_path / "trace").read_text().splitlines())
    assert about == {"about": {"numpy": "2"}}
    assert step == {"step": 1, "samples": [1, 2], "loss": "3fe0000000000000"}
    assert list(end["end"]) == ["weights/w"]


# -------------------------------------------------------------------- the adapters and the page


@pytest.mark.campaign("long")
@pytest.mark.timeout(900)
def test_everstep_is_exact_under_every_kind_of_strike(tmp_path: Path, tally: Callable[..., None]) -> None:
    options = ("--save-every", "20", "--epoch", "50", "--kills", "5", "--preload", "torch,everstep.torch")
    status, score, said = judged(tmp_path, [str(ADAPTERS / "everstep_loop.py")], *options)
    assert status == 0, said
    phases = {MID_EPOCH: "body", IN_SAVE: "commit", CHAIN: "any"}
    for each in score["strikes"]:
        if phase := phases.get(each["kind"]):
            tally("kills", 3 if phase == "any" else 1, phase=phase, door="TrainLoop")
    tally("damages", sum(each["kind"] in (FLIPPED, TRUNCATED, ZEROED) for each in score["strikes"]))


def test_the_page_shows_the_stored_scores() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    from conformance_page import PAGE, SETUPS, page, stored

    text = PAGE.read_text()
    assert page(text) == text, "make conformance ARGS=--page"
    assert stored().keys() <= SETUPS.keys() and {"everstep", "by_hand"} < stored().keys()
    files = {setup.file for setup in SETUPS.values()}
    assert all((ADAPTERS / name).exists() for name in files)
    assert max(len((ADAPTERS / name).read_text().splitlines()) for name in files) <= 120


def test_what_cannot_be_judged_or_done_is_no_success_in_the_table() -> None:
    strike = {"kind": FULL, "outcome": verdicts.NOT_DONE, "struck_status": None}
    rows = table(
        [{"name": "a", "judged": False, "why_not": "why"}, {"name": "b", "judged": True, "strikes": [strike]}]
    )
    assert "| a | cannot be judged: why |" in rows and "**0 of 0**: not done" in rows
