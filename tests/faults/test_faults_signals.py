"""Faults 25 to 30: signals, and time that stands still or jumps."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_support import EVERY, PER_EPOCH, STEPS, Run

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]

STRUCK = PER_EPOCH + 3
"""A step inside an epoch, at which no save is due."""


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
def test_fault_27_sigterm_and_after_a_short_grace_sigkill(
    another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    strikes = (
        "SIGTERM:checkpoint.write:50 then kill:checkpoint.write:1",
        "SIGTERM:checkpoint.write:50 then kill:checkpoint.rename:1",
        f"SIGTERM:faults.body:{STRUCK} then kill:faults.end:1",
        f"SIGTERM:faults.body:{STRUCK} then kill:checkpoint.fsync:1",
        f"SIGTERM:faults.body:{STRUCK} then kill:loop.exit:1",
    )
    for number, strike in enumerate(strikes):
        run = another(f"run {number}")
        run.dies(strike)
        assert run.names()[-1].step >= run.bodies()[-1] - 2 * EVERY, f"{strike}: {run.names()}"
        run.finish()
        assert "passed over" not in run.last_said()
        run.require_equal(undisturbed())
    tally("kills", len(strikes), fault="27", door=door, phase="commit", signal="SIGTERM")


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
