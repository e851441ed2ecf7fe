"""Replay, diverge and audit on runs with a history: kills, a rollback, a fork, workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_diverge import diverge, place
from test_replay import as_it_is, replay, start

import everstep
from everstep.proof.audit import audit
from everstep.record import RunJournal

HISTORY = """
import os
import sys
import numpy as np
import everstep

run, bad = sys.argv[1], float(os.environ.get("BAD", -1))
data = everstep.data.arrays(np.arange(48.0), batch_size=4, shuffle=True)


def main():
    w = np.zeros(2)
    services = [everstep.Checkpoints(everstep.Every(steps=4), keep_last=None), everstep.services.Recovery()]
    with everstep.TrainLoop(run, {"w": w}, seed=2, max_epoch=4, services=services) as loop:
        for epoch in loop.iter_epochs():
            for step, (x,) in loop.iter_steps(data):
                w += 0.01 * x[:2] * np.random.random(2)
                loop.collect_metrics(loss=float("nan") if bad in x and epoch == 3 else float(w.sum()))


everstep.recovering(main)
"""


KEEP = "services.1.Checkpoints.keep_last=null"


def killed(times: int, *command: str | Path, **environment: str) -> None:
    """Start a program, killed some times in commits, and a last time to its end."""
    for _ in range(times):
        start(*command, EVERSTEP_HAZARD="kill:checkpoint.rename:2", status=-signal.SIGKILL, **environment)
    start(*command, **environment)


def found_by_audit(run: str | Path) -> list[tuple[str, str, str]]:
    """What an audit finds of each pass, in a record in which nothing is wrong."""
    found = audit(run)
    assert (found.problems, found.notes, found.finished) == ([], [], True)
    return [(each.passes, each.verdict, each.found) for each in found.passes]


@pytest.mark.campaign("long")
def test_a_run_that_was_killed_three_times_is_equal_to_its_twin() -> None:
    Path("history.py").write_text(HISTORY)
    start("history.py", "twin")
    killed(3, "history.py", "killed")
    assert len(RunJournal("killed").segments()) == 4
    before = as_it_is(Path("killed"))
    told, found = diverge("twin", "killed", status=0)
    assert found["first"] is None, told
    assert found["equal"]["loss"] == found["equal"]["batch digest"] == 48
    assert "\nverified: " in replay("killed", "--verify", ":")
    assert found_by_audit("killed") == found_by_audit("twin")
    assert found_by_audit("killed") == [
        ("passes 1 to 4", "proven", "each sample of 48 exactly once, in 12 batches")
    ]
    assert as_it_is(Path("killed")) == before


@pytest.mark.campaign("long")
def test_a_rollback_is_another_batch_from_its_step_on_and_is_named() -> None:
    """Also where the run was killed three times before."""
    Path("history.py").write_text(HISTORY)
    start("history.py", "twin")
    killed(3, "history.py", "back", BAD="17")
    (rollback,) = RunJournal("back").rollbacks()
    told, found = diverge("twin", "back")
    assert place(found) == (rollback.first, "samples"), told
    assert found["recorded"]["component"] == "samples" and found["last_equal"] == rollback.checkpoint
    assert diverge("back", "back", "--recorded", status=0)[1]["first"] is None
    assert "\nverified: " in replay("back", "--verify", ":")
    assert found_by_audit("back")[1] == (
        "pass 3",
        "proven",
        "44 of 48 samples, each exactly once, in 11 batches; left out: batch 6 (rollback 1)",
    )


def everstep_train(*arguments: str) -> None:
    command = [sys.executable, "-m", "everstep", "train", "tiny.yaml", "--run-dir", "runs/tiny", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def test_steps_are_executed_again_under_the_config_of_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "experiment"))
    from tiny_experiment import write

    write(tmp_path)
    monkeypatch.setattr(sys, "argv", ["everstep", "train", "tiny.yaml"])
    for epochs in (1, 2):
        everstep.experiment.open_config("tiny.yaml", [f"trainer.max_epoch={epochs}", KEEP]).train()
    assert "\nverified: " in replay("runs/tiny", "--verify", "5:6")


@pytest.mark.campaign("long")
@pytest.mark.parametrize(("change", "component"), [("seed=9", "samples"), ("optimizer.lr=0.05", "weights")])
def test_a_fork_and_its_parent_are_compared_from_the_fork_on(
    tmp_path: Path, change: str, component: str
) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "experiment"))
    from tiny_experiment import write

    write(tmp_path)
    everstep_train("trainer.max_epoch=1", KEEP)
    everstep_train("trainer.max_epoch=3", change, "--on-change", "fork", KEEP)
    everstep_train("trainer.max_epoch=3", KEEP)
    (fork,) = Path("runs").glob("tiny-fork-*")
    told, found = diverge("runs/tiny", fork)
    assert place(found) == (5, component), told
    assert found["last_equal"] == "epoch-0001-step-00000004" and found["executed"] is not None, told
    assert "B began with epoch-0001-step-00000004 of another run: compared from step 5 on" in told
    assert "\nverified: " in replay(fork, "--verify", ":")

    parent = json.loads((fork / "run.json").read_text())["parent"]["run"]
    assert found_by_audit(fork) == [
        ("pass 1", "not provable", f"in the journal of {parent}, of which this run is a fork"),
        ("passes 2 to 3", "proven", "each sample of 8 exactly once, in 4 batches"),
    ]
    assert found_by_audit("runs/tiny")[0][:2] == ("passes 1 to 3", "proven")
