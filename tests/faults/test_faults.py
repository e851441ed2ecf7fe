"""Faults of a training: kills, clocks, errors of the user's code, what comes after a run's end; at each door.

Kills at each point, signals, workers that die and a disk that refuses are in `laws`.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults_support import PER_EPOCH, STEPS, Run
from index_runs import index_rows, journal_rows

from everstep.index.database import Database
from everstep.index.shipping import sync
from everstep.record import failures

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]
Struck = Callable[..., Run]

STRUCK = PER_EPOCH + 3
"""A step inside an epoch, at which no save is due."""


@pytest.fixture
def struck(another: Another, undisturbed: Undisturbed, tally: Tally, door: str, request: Any) -> Struck:
    """Kills starts of a run one after the other, looks after each; the run ends as the undisturbed."""
    count = itertools.count()

    def strike(*strikes: str, options: tuple[str, ...] = (), each: Any = lambda run: None) -> Run:
        run = another(f"run {next(count)}", *options)
        for how in strikes:
            run.dies(how if how.startswith("SIG") else f"kill:{how}")
            each(run)
        run.finish()
        assert "passed over" not in run.last_said(), f"{strikes}\n{run.last_said()}"
        run.require_equal(undisturbed(*options))
        run.require_clean()
        tally("kills", len(strikes), fault=request.node.originalname[11:13], door=door)
        return run

    return strike


@pytest.mark.campaign("long")
def test_fault_03_killed_when_the_checkpoint_is_on_an_epochs_last_step(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """In the tail, where one of the step before is on disk; and in the next epoch, after the epoch's own."""
    aimed = ("--every", "4")
    supervisor = door == "supervisor"  # it evaluates inside the epoch's last step
    places = (
        (("--slow", "evaluation:60"), PER_EPOCH // 2 if supervisor else PER_EPOCH - 1),
        (("--do", f"wait:{PER_EPOCH + 1}"), PER_EPOCH),
    )
    for number, (lingers, saved) in enumerate(places):
        run = another(f"run {number}", *aimed)
        victim = run.start(*lingers)
        run.wait_for(victim, lambda run=run, saved=saved: bool(run.names()) and run.saved_step() == saved)
        if saved != PER_EPOCH:
            run.wait_for(victim, "evaluation")
        victim.kill()
        victim.wait(120)
        run.finish()
        assert run.last_bodies() == list(range(saved + 1, STEPS + 1))
        run.require_equal(undisturbed(*aimed))
    tally("kills", 2, fault="03", door=door, phase="tail")


@pytest.mark.campaign("long")
@pytest.mark.parametrize("window", ["1", "3"])
def test_fault_04_killed_between_the_parts_of_an_update(struck: Struck, window: str) -> None:
    """Between the optimizer's step and the schedule's; and, with three steps an update, between backwards."""
    strikes = ("faults.updated:4", "faults.updated:2", "faults.end:5", "faults.end:4")
    struck(*strikes, options=("--accumulate", window))


@pytest.mark.campaign("long")
def test_fault_07_killed_in_the_resume_several_times_in_a_row(struck: Struck) -> None:
    before: list[object] = []

    def unchanged(run: Run) -> None:
        before.append(run.committed())
        assert before[0] == before[-1]

    in_a_resume = (
        "journal.create:1",
        "faults.opening:1",
        "faults.body:1",
        "trail.create:1",
        "lock.json.rename:1",
    )
    struck("faults.body:14", *in_a_resume, each=unchanged)


@pytest.mark.campaign("long")
def test_fault_10_killed_in_a_save_beside_which_steps_went_on(
    run: Run, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """What the slow disk gets is the state of the save's own step; no later update leaks into it."""
    run.dies("kill:checkpoint.rename:5", "--do", "slow:4:0.004")  # the third save
    struck, last = run.names()[-1].step, run.bodies()[-1]
    assert last > struck, "no step went on beside the save"
    run.dies("kill:faults.body:8", "--do", f"slow:{struck + 1}:0.002")
    run.finish()
    run.require_equal(undisturbed())
    tally("kills", 2, fault="10", door=door, phase="commit")


@pytest.mark.campaign("long")
def test_fault_30_stopped_for_long_and_the_clock_jumps(
    run: Run, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Stopped for longer than what is a hang; the clock is set a year ahead, and two back; then killed."""
    jumps = ("--do", "clock:12:3e7", "--do", "clock:18:-6e7")
    victim = run.start("--hang", "2", "--sleep", "0.01", *jumps)
    run.wait_for(victim, "body", step=STRUCK)
    victim.send_signal(signal.SIGSTOP)
    time.sleep(3.2)
    victim.send_signal(signal.SIGCONT)
    run.wait_for(victim, "body", step=20)
    victim.kill()
    victim.wait(120)
    run.finish()
    assert not re.search(r"\bhang", run.said()) and run.last_bodies()[0] > STRUCK, run.said()
    run.require_equal(undisturbed())
    tally("kills", 1, fault="30", door=door, phase="body", signal="SIGSTOP, SIGKILL")


@pytest.mark.campaign("long")
def test_fault_33_an_exception_in_the_users_code_or_in_a_callback(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """The save that was being written is finished, none is begun, and the traceback is the user's.

    A callback only looks: the training goes on without it, with a warning.
    """
    for deed, words in (("fail", "the user's own code failed"), ("service", "the user's service failed")):
        run = another(deed)
        # in step 10 the slow save of step 9 is still being written
        said = run.ends(1, "--do", "slow:8:0.01", "--do", f"{deed}:10")
        assert "Traceback" in said and f"ZeroDivisionError: {words}" in said, said
        assert "faults_victim.py" in said, said
        assert run.names()[-1].step == 9
        run.require_clean()
        (page,) = failures(run.run_dir)
        assert page.kind == "error" and f"ZeroDivisionError: {words}" in page.lines
        run.finish()
        assert run.last_bodies() == list(range(10, STEPS + 1))
        run.require_equal(undisturbed())
    run = another("callback")
    said = run.ends(0, "--do", "callback:2")
    assert "failed and is skipped: ZeroDivisionError: the user's callback failed" in said, said
    run.require_equal(undisturbed())
    tally("crashes in process", 3, fault="33", door=door, error="ZeroDivisionError")


@pytest.mark.campaign("long")
def test_fault_36_the_database_comes_back_with_half_of_the_rows(
    run: Run, undisturbed: Undisturbed, tmp_path: Path, tally: Tally, door: str
) -> None:
    index = tmp_path / "index.db"
    assert run.once(hazard="kill:faults.body:14", EVERSTEP_INDEX=str(index)) == -9
    sync(Database(index), [run.run_dir])
    half = index_rows(Database(index), "run")
    backup = index.with_name("backup.db")
    with sqlite3.connect(index) as source, sqlite3.connect(backup) as target:
        source.backup(target)
    run.ends(0, EVERSTEP_INDEX=str(index))
    whole = journal_rows(run.run_dir)
    assert index_rows(Database(index), "run") == whole and 0 < len(half) < len(whole)
    for path in index.parent.glob("index.db*"):
        path.unlink()
    backup.rename(index)  # the server has lost what came after the kill
    run.ends(0, EVERSTEP_INDEX=str(index))  # a start of the finished run
    database = Database(index)
    sync(database, [run.run_dir])
    assert index_rows(database, run.run_dir.name) == journal_rows(run.run_dir)
    assert sync(database, [run.run_dir]).rows == 0
    run.require_equal(undisturbed())
    tally("kills", 1, fault="36", door=door, phase="body")


def ends_as(said: str) -> list[dict[str, Any]]:
    """The program's live objects after each of its loops: weights, updates, learning rate, epochs."""
    lines = [line for line in said.splitlines() if line.startswith("ends as ")]
    return [json.loads(line.removeprefix("ends as ")) for line in lines]


@pytest.mark.campaign("long", gate=1)
def test_fault_40_stopped_early_with_the_best_restored_and_trained_on(
    another: Another, made_once: Callable[..., Run], undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """The best weights are for the program's end; the run goes on from its last state, and all of that.

    Trained on by another process, and by the same one with the same objects.
    """
    (after_one,) = ends_as(made_once(door, "--epochs", "1").said())
    (after_three,) = ends_as(made_once(door).said())
    for again in (0, 3):
        run = another(f"again {again}", "--worsens")
        said = run.ends(0, "--restore", "--patience", "1", "--epochs", "9", "--again", str(again))
        best, *rest = ends_as(said)
        assert best["weights"] == after_one["weights"] and best["updates"] == 2 * PER_EPOCH, said
        if again:
            assert rest[0]["weights"] == after_one["weights"] and rest[0]["updates"] == STEPS, said
        else:
            run.dies("kill:faults.opening:1")
            assert ends_as(run.ends(0)) == [after_three]
            assert run.last_bodies() == list(range(2 * PER_EPOCH + 1, STEPS + 1))
        run.require_equal(undisturbed("--worsens"))  # the last state: all of the last step
    tally("kills", 1, fault="40", door=door, phase="start-up")


@pytest.mark.campaign("long")
def test_fault_41_a_finished_run_is_started_again(
    run: Run, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    first = ends_as(run.ends(0))
    before = run.committed()
    for strike in ("faults.opening:1", "faults.shutdown:1"):
        run.dies(f"kill:{strike}")
        said = run.ends(0)
        assert run.last_bodies() == [] and ends_as(said) == first and run.committed() == before, said
    run.require_equal(undisturbed())
    tally("kills", 2, fault="41", door=door, phase="start-up")
