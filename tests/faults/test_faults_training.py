"""Faults 31 to 34, 40 and 41: what the training itself does, and what comes after its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults_support import PER_EPOCH, STEPS, Run

from everstep.checkpoint import read_checkpoint
from everstep.record import RunJournal, failures

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]

BAD = ("--bad", "7")
"""A sample whose loss is NaN; it comes once in each epoch."""


def require_finite(run: Run) -> None:
    """Everything of the user's that is committed is finite."""
    for manifest in run.run_dir.rglob("manifest.json"):
        for name, array in read_checkpoint(manifest.parent).arrays.items():
            if name.startswith("user/") and array.dtype == "F32":
                assert np.isfinite(array.data.view(np.float32)).all(), f"{manifest}: {name}"


@pytest.mark.campaign("long")
def test_fault_31_a_loss_that_is_not_a_number(another: Another, tally: Tally, door: str) -> None:
    """Each policy ends otherwise; none commits a state that is not finite, and the one before it stays."""
    steps = []
    for policy in ("raise", "stop"):
        run = another(policy, *BAD, "--policy", policy, "--every", "1")
        for again in (False, True):  # started again, it comes to the same step
            said = run.ends(1)
            steps.append(run.bodies()[-1])
            assert f"at step {steps[-1]}" in said and "nan" in said, said
            assert run.names()[-1].step == steps[-1] - 1
            if not again:
                run.dies("kill:faults.end:1")  # in the very step, behind the NaN
        require_finite(run)
    assert len(set(steps)) == 1 and steps[0] < PER_EPOCH, steps
    undone = another("undone", *BAD)
    undone.ends(0)
    require_finite(undone)
    tally("losses that are no numbers", 5, fault="31", door=door)


@pytest.mark.campaign("long")
def test_fault_32_rolled_back_after_a_nan_and_killed(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Each epoch's bad batch is undone and recorded; killed around it, the run ends in the same bits."""
    whole = undisturbed(*BAD)
    strikes = ("loop.rollback:1", "loop.rolled_back:1", "loop.rollback:2", "faults.body:15", "faults.body:20")
    for number, strike in enumerate(strikes):
        run = another(f"run {number}", *BAD)
        run.dies(f"kill:{strike}")
        run.finish()
        run.require_equal(whole)
        told = [line for line in run.said().splitlines() if "roll" in line]
        assert told, run.said()
        require_finite(run)
    assert len(RunJournal(whole).rollbacks()) == 3
    tally("kills", len(strikes), fault="32", door=door, phase="rollback")


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
def test_fault_34_a_workers_process_is_killed(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    for data in ("loader", "plain"):
        options = ("--data", data, "--workers", "2")
        run = another(data, *options)
        said = run.ends(1, "--do", "worker:4", "--slow", "sample:0.01")
        assert "a loader worker died" in said and "SIGKILL" in said and "start the run again" in said, said
        saved = run.names()[-1].step
        run.finish()
        assert run.last_bodies() == list(range(saved + 1, STEPS + 1))
        run.require_equal(undisturbed(*options))
    tally("workers killed", 2, fault="34", door=door)


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
