"""Diverge names where runs part; and replay, diverge and audit on runs with a history."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_replay import PROGRAM, as_it_is, replay, start

import everstep
from everstep import Every
from everstep.metrics.collector import is_wall
from everstep.proof.audit import audit
from everstep.record import RunJournal, Trail
from everstep.replaying.comparing import compare_recorded
from tiny_runs import Tiny

FAULTS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "another order from epoch 2": (("--fault", "order"), 7, "samples"),
    "weight decay": (("--decay", "0.02"), 0, "optimizer"),
    "a flipped weight after the update": (("--fault", "weight", "--at", "9"), 9, "weights"),
    "another draw": (("--fault", "draw", "--at", "14"), 14, "random state"),
    "a clipped gradient": (("--fault", "clipped", "--at", "8"), 8, "weights"),
    "another seed": (("--seed", "4"), 1, "samples"),
    "a Supervisor's clipped gradient": (
        ("--door", "Supervisor", "--fault", "clipped", "--at", "8"),
        8,
        "weights",
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run(
        [sys.executable, PROGRAM, "run"], cwd=folder, env={**os.environ, "EVERSTEP_INDEX": "off"}, check=True
    )
    before = as_it_is(folder / "run")
    yield folder / "run"
    assert as_it_is(folder / "run") == before


def diverge(*arguments: str | Path, status: int = 1, **environment: str) -> tuple[str, dict[str, Any]]:
    told = start(
        "-m", "everstep", "diverge", *arguments, "--json", "found.json", status=status, **environment
    )
    return told, json.loads(Path("found.json").read_text())


def place(found: dict[str, Any]) -> tuple[int, str]:
    """The step and the component of the first difference."""
    return found["first"]["step"], found["first"]["component"]


def test_the_batches_of_every_rank_are_compared(tmp_path: Path) -> None:
    for name, digest in (("a", 1), ("b", 2)):
        Tiny(tmp_path / name, max_epoch=1).train()
        trail = Trail(tmp_path / name, 1, 0, is_wall, pytest.fail, rank=1)
        for step in (1, 2):
            trail.note(step, "batch", "train", digest * step)
            trail.step(step, 1, [], {})
        trail.close()
    first = compare_recorded(tmp_path / "a", tmp_path / "b").first
    assert first is not None and (first.component, first.step, first.rank) == ("samples", 1, 1)


def test_steps_whose_batch_digests_a_later_start_has_deleted_are_told(tmp_path: Path) -> None:
    Tiny(tmp_path / "straight", max_epoch=3).train()
    for max_epoch in (1, 2, 3):
        Tiny(tmp_path / "resumed", max_epoch=max_epoch).train()
    found = compare_recorded(tmp_path / "straight", tmp_path / "resumed")
    assert found.verified and 0 < found.equal["batch digest"] < len(found.steps) == found.equal["loss"]
    assert f"not each of the {len(found.steps)} steps has a batch digest" in str(found)
    alone = compare_recorded(tmp_path / "straight", tmp_path / "straight")
    assert alone.equal["batch digest"] == len(alone.steps) and "not each" not in str(alone)


@pytest.mark.campaign("long")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_step_and_component(plain: Path, name: str) -> None:
    arguments, step, component = FAULTS[name]
    if "--door" in arguments:
        plain = Path("plain")
        start(PROGRAM, "plain", *arguments[:2])
    start(PROGRAM, "faulty", *arguments)
    before = as_it_is(Path("faulty"))
    told, found = diverge(plain, "faulty")
    assert place(found) == (step, component), told
    assert found["executed"] is not None, told
    assert as_it_is(Path("faulty")) == before


@pytest.mark.campaign("long")
def test_equal_runs_are_equal_and_another_cadence_of_saves_changes_nothing(plain: Path) -> None:
    start(PROGRAM, "other", "--keep", "2")
    told, found = diverge(plain, "other", status=0)
    assert found["first"] is None and "verified: all recorded values are equal" in told
    assert found["equal"]["loss"] == 24 and found["equal"]["state of a checkpoint"] >= 2


@pytest.mark.campaign("long")
def test_a_resume_that_is_not_exact_is_told_of_one_program(plain: Path) -> None:
    """Both runs have one program, whose resume loses the moments; one of them was never resumed."""
    fault = ("--fault", "moment", "--at", "14")
    start(PROGRAM, "straight", *fault)
    start(PROGRAM, "resumed", *fault, "--stop", "13")
    start(PROGRAM, "resumed", *fault)
    told, found = diverge("straight", "resumed")
    assert place(found) == (14, "weights"), told
    assert "a resume of this program is not exact" in told


@pytest.mark.campaign("long")
def test_records_alone_are_compared_where_nothing_can_be_executed(plain: Path) -> None:
    start(PROGRAM, "faulty", "--fault", "weight", "--at", "9")
    told, found = diverge(plain, "faulty", "--recorded")
    assert (*place(found), found["executed"]) == (10, "loss", None), told
    assert found["last_equal"] == "epoch-0001-step-00000006", told
    usage = start("-m", "everstep", "diverge", plain, status=2)
    assert "give two runs" in usage


def supervised(run: str, metric: str, weight: Callable[[int], float]) -> Path:
    w = np.zeros(1)
    services = [
        everstep.services.Console(sink=lambda line: None),
        everstep.Checkpoints(Every(steps=1), keep_last=None),
    ]
    with everstep.Supervisor(run, {"w": w}, services=services, seed=5, max_step=16) as sv:
        while not sv.should_stop():
            w[0] = weight(sv.step + 1)
            sv.advance(**{metric: 1.0})
    return Path(run)


def test_states_that_differ_for_a_while_are_found() -> None:
    a = supervised("a", "x", lambda step: step)
    b = supervised("b", "x", lambda step: step + 100 * (step == 4))
    report = compare_recorded(a, b)
    assert report.first is not None and (report.first.step, report.first.component) == (4, "state")
    assert report.facts["last_equal"] == "step-00000003"
    assert report.equal["state of a checkpoint"] == 4


def test_runs_that_have_nothing_in_common_are_not_comparable() -> None:
    a, b = supervised("a", "x", float), supervised("b", "y", float)
    shutil.rmtree(b / "checkpoints")
    assert "not comparable: nothing is recorded" in str(compare_recorded(a, b))
    start("-m", "everstep", "diverge", "a", "b", status=4)


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
