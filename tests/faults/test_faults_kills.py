"""Faults 1 to 10 and 25 to 30: SIGKILL and other signals, at any instant and in each part of a save."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults_support import EVERY, PER_EPOCH, STEPS, Run

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]
Struck = Callable[..., Run]

PARTS = 3
"""Tests that share the operations of a save."""
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


# ------------------------------------------------------------------------------------------ SIGKILL


@pytest.mark.campaign("long")
def test_fault_01_killed_before_the_first_checkpoint(struck: Struck) -> None:
    """The step 0 checkpoint is the first: killed before it, the run begins again, and from step 1."""

    def none(run: Run) -> None:
        assert run.names() == []

    strikes = ("faults.opening:1", "checkpoint.mkdir:1", "checkpoint.write:5", "checkpoint.rename:1")
    assert struck(*strikes, each=none).last_bodies() == list(range(1, STEPS + 1))


@pytest.mark.campaign("long")
def test_fault_02_killed_mid_epoch_with_augmentation_from_three_generators(struck: Struck) -> None:
    def inside_an_epoch(run: Run) -> None:
        assert run.bodies()[-1] % PER_EPOCH != 1, run.bodies()

    run = struck("faults.body:5", "faults.body:10", "faults.body:4", each=inside_an_epoch)
    assert set(run.bodies()) == set(range(1, STEPS + 1)) and len(run.bodies()) > STEPS


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
@pytest.mark.parametrize("data", ["loader", "plain"])
def test_fault_05_killed_with_prefetched_batches_in_two_workers(struck: Struck, data: str) -> None:
    struck("faults.end:6", "faults.end:7", options=("--data", data, "--workers", "2"))


@pytest.mark.campaign("long")
def test_fault_06_killed_during_validation(struck: Struck, door: str) -> None:
    def at_an_end(run: Run) -> None:
        assert run.bodies()[-1] % PER_EPOCH == 0

    first = {"trainer": 2, "loop": 1, "supervisor": 1}[door]  # a Trainer evaluates three batches
    struck(f"faults.evaluation:{first}", f"faults.evaluation:{2 * first}", each=at_an_end)  # each row once


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


def operations_of_a_save(run: Run, trace: Path) -> list[str]:
    """POINT:COUNT of each operation of a save about the middle of the run; of many writes three."""
    run.ends(0, hazard=f"trace:{trace}")
    counts, saves = Counter[str](), [list[str]()]
    for point in trace.read_text().split():
        if point.startswith("checkpoint."):
            counts[point] += 1
            if point == "checkpoint.mkdir":
                saves.append([])
            saves[-1].append(f"{point}:{counts[point]}")
    whole = [save for save in saves if sum("rename" in each for each in save) == 2]
    same = itertools.groupby(whole[len(whole) // 2], lambda each: each.partition(":")[0])
    groups = [list(group) for _, group in same]
    return [group[index] for group in groups for index in sorted({0, len(group) // 2, len(group) - 1})]


@pytest.mark.campaign("long")
@pytest.mark.parametrize("part", range(PARTS))
def test_fault_08_killed_at_each_operation_of_a_save(
    another: Another, struck: Struck, tmp_path: Path, part: int
) -> None:
    strikes = operations_of_a_save(another("traced"), tmp_path / "trace")
    operations = ("mkdir", "open", "write", "fsync", "fsync_folder", "rename")
    assert {strike.partition(":")[0] for strike in strikes} >= {f"checkpoint.{each}" for each in operations}

    def saved_lately(run: Run) -> None:
        # the newest or the one before: of the steps since, at most those of the save that was struck
        assert run.names()[-1].step >= run.bodies()[-1] - 2 * EVERY - 1

    for strike in strikes[part::PARTS]:
        struck(strike, each=saved_lately)


@pytest.mark.campaign("long")
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_fault_09_killed_while_old_checkpoints_are_deleted(
    struck: Struck, undisturbed: Undisturbed, nth: int
) -> None:
    newest: list[int] = []
    run = struck(f"checkpoint.rmtree:{nth}", each=lambda run: newest.append(run.names()[-1].step))
    assert run.last_bodies()[0] == newest[0] + 1
    assert set(run.committed()) == {path.name for path in (undisturbed() / "checkpoints").iterdir()}


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


# ------------------------------------------------------------------------------------------ signals


def no_step_is_lost(run: Run, undisturbed: Undisturbed) -> None:
    """The step in which the signal came is saved, and the next start goes on behind it."""
    assert run.names()[-1].step == run.bodies()[-1], run.said()
    run.finish()
    assert run.bodies() == list(range(1, STEPS + 1))
    run.require_equal(undisturbed())


@pytest.mark.campaign("long")
def test_fault_25_sigterm_in_a_step(run: Run, undisturbed: Undisturbed, tally: Tally, door: str) -> None:
    run.ends(128 + signal.SIGTERM, hazard=f"SIGTERM:faults.body:{STRUCK}")
    assert run.bodies()[-1] == STRUCK
    no_step_is_lost(run, undisturbed)
    tally("signals", 1, fault="25", door=door, phase="body", signal="SIGTERM")


@pytest.mark.campaign("long")
def test_fault_26_sigterm_inside_a_save(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """The save is finished; it belongs to a step that is at most one save back, and no step is lost."""
    strikes = ("checkpoint.write:50", "checkpoint.fsync:6", "checkpoint.rename:3", "journal.fsync:4")
    for number, strike in enumerate(strikes):
        run = another(f"run {number}")
        run.ends(128 + signal.SIGTERM, hazard=f"SIGTERM:{strike}")
        run.require_clean()
        done, saved = run.bodies()[-1], run.names()[-1].step
        again = saved == done - 1 and done % PER_EPOCH == 0  # an epoch's last step, for its tail
        assert again or saved == done, run.said()
        run.finish()
        assert run.last_bodies() == list(range(saved + 1, STEPS + 1))
        run.require_equal(undisturbed())
    tally("signals", len(strikes), fault="26", door=door, phase="commit", signal="SIGTERM")


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    "strike",
    [
        "SIGTERM:checkpoint.write:50 then kill:checkpoint.write:1",
        "SIGTERM:checkpoint.write:50 then kill:checkpoint.rename:1",
        f"SIGTERM:faults.body:{STRUCK} then kill:faults.end:1",
        f"SIGTERM:faults.body:{STRUCK} then kill:checkpoint.fsync:1",
        f"SIGTERM:faults.body:{STRUCK} then kill:loop.exit:1",
    ],
)
def test_fault_27_sigterm_and_after_a_short_grace_sigkill(struck: Struck, strike: str) -> None:
    def saved_lately(run: Run) -> None:
        assert run.names()[-1].step >= run.bodies()[-1] - 2 * EVERY, f"{strike}: {run.names()}"

    struck(strike, each=saved_lately)


@pytest.mark.campaign("long")
def test_fault_28_ctrl_c_once_and_twice(
    run: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    run.ends(128 + signal.SIGINT, hazard=f"SIGINT:faults.body:{STRUCK}")
    no_step_is_lost(run, undisturbed)
    twice = another("twice")
    twice.ends(-signal.SIGINT, hazard=f"SIGINT:faults.body:{STRUCK} then SIGINT:faults.end:1")
    before = twice.names()
    assert before[-1].step < STRUCK  # the step was left at once
    twice.finish()
    assert twice.last_bodies()[0] == before[-1].step + 1 and "passed over" not in twice.last_said()
    twice.require_equal(undisturbed())
    tally("signals", 2, fault="28", door=door, phase="body", signal="SIGINT")


@pytest.mark.campaign("long")
def test_fault_29_the_connection_drops_or_the_scheduler_warns(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    for number in (signal.SIGHUP, signal.SIGUSR1):
        run = another(number.name)
        run.ends(128 + number, hazard=f"{number.name}:faults.body:{STRUCK}")
        no_step_is_lost(run, undisturbed)
    tally("signals", 2, fault="29", door=door, phase="body", signal="SIGHUP, SIGUSR1")


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
    assert "hang" not in run.said() and run.last_bodies()[0] > STRUCK, run.said()
    run.require_equal(undisturbed())
    tally("kills", 1, fault="30", door=door, phase="body", signal="SIGSTOP, SIGKILL")
