"""Faults 1 to 10: SIGKILL, at any instant and in each part of a save."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_support import EVERY, PER_EPOCH, STEPS, Run

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]

PARTS = 3
"""Tests that share the operations of a save."""


@pytest.mark.campaign("long")
def test_fault_01_killed_before_the_first_checkpoint(
    run: Run, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """The step 0 checkpoint is the first: killed before it, the run begins again, and from step 1."""
    strikes = ("faults.opening:1", "checkpoint.mkdir:1", "checkpoint.write:5", "checkpoint.rename:1")
    for strike in strikes:
        run.dies(f"kill:{strike}")
        assert run.names() == [], strike
    run.finish()
    assert run.last_bodies() == list(range(1, STEPS + 1))
    run.require_equal(undisturbed())
    tally("kills", len(strikes), fault="01", door=door, phase="start-up")


@pytest.mark.campaign("long")
def test_fault_02_killed_mid_epoch_with_augmentation_from_three_generators(
    run: Run, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    deaths = []
    for nth in (5, 10, 4):
        run.dies(f"kill:faults.body:{nth}")
        deaths.append(run.bodies()[-1])
    assert all(step % PER_EPOCH != 1 for step in deaths), deaths  # inside an epoch
    run.finish()
    assert set(run.bodies()) == set(range(1, STEPS + 1)) and len(run.bodies()) > STEPS
    run.require_equal(undisturbed())
    tally("kills", len(deaths), fault="02", door=door, phase="body")


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
def test_fault_04_killed_between_the_parts_of_an_update(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str, window: str
) -> None:
    """Between the optimizer's step and the schedule's; and, with three steps an update, between backwards."""
    run = another("run", "--accumulate", window)
    strikes = ("faults.updated:4", "faults.updated:2", "faults.end:5", "faults.end:4")
    for strike in strikes:
        run.dies(f"kill:{strike}")
    run.finish()
    run.require_equal(undisturbed("--accumulate", window))
    tally("kills", len(strikes), fault="04", door=door, phase="body")


@pytest.mark.campaign("long")
@pytest.mark.parametrize("data", ["loader", "plain"])
def test_fault_05_killed_with_prefetched_batches_in_two_workers(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str, data: str
) -> None:
    options = ("--data", data, "--workers", "2")
    run = another("run", *options)
    for nth in (6, 7):
        run.dies(f"kill:faults.end:{nth}")
    run.finish()
    run.require_equal(undisturbed(*options))
    tally("kills", 2, fault="05", door=door, phase="body")


@pytest.mark.campaign("long")
def test_fault_06_killed_during_validation(
    run: Run, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    first = {"trainer": 2, "loop": 1, "supervisor": 1}[door]  # a Trainer evaluates three batches
    for strike in (first, 2 * first):
        run.dies(f"kill:faults.evaluation:{strike}")
        assert run.bodies()[-1] % PER_EPOCH == 0
    run.finish()
    run.require_equal(undisturbed())  # each row once
    tally("kills", 2, fault="06", door=door, phase="evaluation")


@pytest.mark.campaign("long")
def test_fault_07_killed_in_the_resume_three_times_in_a_row(
    run: Run, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    run.dies("kill:faults.body:14")
    before = run.committed()
    strikes = (
        "journal.create:1",
        "faults.opening:1",
        "faults.body:1",
        "trail.create:1",
        "lock.json.rename:1",
    )
    for strike in strikes:
        run.dies(f"kill:{strike}")
        assert run.committed() == before, strike
    run.finish()
    run.require_equal(undisturbed())
    tally("kills", 1 + len(strikes), fault="07", door=door, phase="start-up")


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
    another: Another, undisturbed: Undisturbed, tmp_path: Path, tally: Tally, door: str, part: int
) -> None:
    strikes = operations_of_a_save(another("traced"), tmp_path / "trace")
    assert {strike.partition(":")[0] for strike in strikes} >= {
        f"checkpoint.{operation}"
        for operation in ("mkdir", "open", "write", "fsync", "fsync_folder", "rename")
    }
    mine = strikes[part::PARTS]
    for number, strike in enumerate(mine):
        run = another(f"run {number}")
        run.dies(f"kill:{strike}")
        saved, died = run.names()[-1].step, run.bodies()[-1]
        # the newest or the one before: of the steps since, at most those of the save that was struck
        assert saved >= died - 2 * EVERY - 1, f"{strike}: saved {saved}, killed in {died}"
        run.finish()
        assert "passed over" not in run.last_said(), f"{strike}\n{run.last_said()}"
        run.require_equal(undisturbed())
        run.require_clean()
    tally("crash points", len(mine), fault="08", how="SIGKILL", door=door, by="points of everstep.hazard")


@pytest.mark.campaign("long")
def test_fault_09_killed_while_old_checkpoints_are_deleted(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    strikes = ("checkpoint.rmtree:1", "checkpoint.rmtree:3", "checkpoint.rmtree:5")
    for number, strike in enumerate(strikes):
        run = another(f"run {number}")
        run.dies(f"kill:{strike}")
        newest = run.names()[-1].step
        run.finish()
        assert run.last_bodies()[0] == newest + 1 and "passed over" not in run.last_said(), strike
        assert set(run.committed()) == {path.name for path in (undisturbed() / "checkpoints").iterdir()}
        run.require_clean()
        run.require_equal(undisturbed())
    tally("kills", len(strikes), fault="09", door=door, phase="retention")


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
