"""Diverge: runs with one planted fault each part at its step, in its component."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_replay import PROGRAM, as_it_is, start

import everstep
from everstep import Every
from everstep.metrics.collector import is_wall
from everstep.record import Trail
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
