"""Law 1 after any step: Hypothesis chooses the program, the cadence, and where it crashes, and how often."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from law_support.training import Crash, CrashError, Program

import everstep
from everstep.proof.compare import compare_runs

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS, STEPS_PER_EPOCH = 3, 4
STEPS = EPOCHS * STEPS_PER_EPOCH  # where each epoch is one pass
SHORT = ("--epochs", str(EPOCHS), "--batch", str(128 // STEPS_PER_EPOCH))

DATA = {
    "arrays": ("--data", "arrays"),
    "prefetch": ("--data", "prefetch"),
    "loader": ("--data", "loader"),
    "loader, 2 workers": ("--data", "loader", "--workers", "2"),
    "own, with state": ("--data", "own"),
    "plain": ("--data", "plain"),
    "plain, own generator": ("--data", "plain", "--generator"),
    "plain, 2 workers": ("--data", "plain", "--workers", "2"),
}
IN_PROCESS = [name for name in DATA if "workers" not in name]
WITH_WORKERS = [name for name in DATA if "workers" in name]
SERVICES = {
    "none": list,
    "early stop": lambda: [everstep.EarlyStop("valid_loss", patience=2, min_delta=0.05)],
    "best": lambda: [everstep.Best("valid_loss"), everstep.EarlyStop("loss", patience=9)],
}
CADENCES = {
    "never": everstep.Never,
    "each step": lambda: everstep.Every(steps=1),
    "3 steps": lambda: everstep.Every(steps=3),
    "5 steps": lambda: everstep.Every(steps=5),
    "each epoch": lambda: everstep.Every(epochs=1),
    "both": lambda: everstep.Every(steps=3) | everstep.Every(epochs=1),
    "5 steps, live arrays": lambda: everstep.Every(steps=5),
    "both, live arrays": lambda: everstep.Every(steps=3) | everstep.Every(epochs=1),
}

SHAPES = {
    "an epoch is a pass": {},
    "epochs across passes": {"loop": {"steps_per_epoch": 3, "max_epoch": 4}},
    "epochs longer than a pass": {"loop": {"steps_per_epoch": 6, "max_epoch": 2}},
    "two loops in an epoch": {"extra": True},
    "left by break": {"leave": 3},
    "two loops, left by break": {"extra": True, "leave": 5},
    "a limit of steps": {"loop": {"max_step": 10}},
}
"""How epochs, passes and step loops lie to each other."""

crashes = st.lists(
    st.one_of(
        st.builds(Crash, st.sampled_from(["start", "end"]), st.integers(1, STEPS)),
        st.builds(Crash, st.just("tail"), st.sampled_from([3, 4, 6, 7, 8, 9, 10, 12])),
    ),
    min_size=1,
    max_size=4,
)


def program(shape: str, data: str, accumulate: int, evaluate: str, services: str, cadence: str) -> Program:
    given = SHAPES[shape]
    return Program(
        arguments=(*SHORT, *DATA[data], "--accumulate", str(accumulate), "--evaluate", evaluate),
        services=lambda: [
            *SERVICES[services](),
            everstep.Checkpoints(CADENCES[cadence](), copy="live" not in cadence),
        ],
        **{**given, "loop": {"default_services": False, **given.get("loop", {})}},
    )


_runs = TemporaryDirectory(prefix="everstep-law1-")
_numbers = itertools.count()


def _new_run() -> Path:
    return Path(_runs.name) / str(next(_numbers))


@cache
def undisturbed(shape: str, data: str, accumulate: int, evaluate: str, services: str) -> Path:
    """The run that was never crashed; its cadence is the rarest."""
    run_dir = _new_run()
    program(shape, data, accumulate, evaluate, services, "never").run(run_dir)
    return run_dir


def check(crashes: list[Crash], cadence: str, **chosen: Any) -> int:
    """Crash a run and compare it with the one that was not; return how often it crashed."""
    crashed = program(**chosen, cadence=cadence)
    run_dir = _new_run()
    happened = 0
    for crash in [*crashes, None]:
        try:
            crashed.run(run_dir, crash)
        except CrashError:
            happened += 1
            continue
        break
    assert compare_runs(undisturbed(**chosen), run_dir) == []
    return happened


choices = {
    "shape": st.sampled_from(sorted(SHAPES)),
    "accumulate": st.integers(1, 3),
    "evaluate": st.sampled_from(["isolated", "bare", "none"]),
    "services": st.sampled_from(sorted(SERVICES)),
    "cadence": st.sampled_from(sorted(CADENCES)),
    "crashes": crashes,
}


in_process = given(data=st.sampled_from(IN_PROCESS), **choices)


@settings(deadline=None, max_examples=8)
@in_process
@example(  # opening the pass anew draws from the program's generators
    data="plain",
    shape="a limit of steps",
    accumulate=1,
    evaluate="isolated",
    services="best",
    cadence="3 steps",
    crashes=[Crash("start", 5)],
)
@example(  # the end of a pass draws from its generator, after a resume inside it too
    data="plain, own generator",
    shape="epochs across passes",
    accumulate=2,
    evaluate="bare",
    services="early stop",
    cadence="3 steps",
    crashes=[Crash("tail", 9)],
)
def test_crashed_anywhere(**chosen: Any) -> None:
    check(**chosen)


@pytest.mark.campaign("long")
@settings(deadline=None, max_examples=40)
@in_process
def test_crashed_anywhere_often(**chosen: Any) -> None:
    check(**chosen)


@pytest.mark.campaign("long")
@settings(deadline=None, max_examples=10)
@given(data=st.sampled_from(WITH_WORKERS), **choices)
@example(
    data="loader, 2 workers",
    shape="epochs across passes",
    accumulate=3,
    evaluate="isolated",
    services="best",
    cadence="3 steps",
    crashes=[Crash("tail", 6), Crash("start", 7), Crash("start", 10)],
)
def test_crashed_anywhere_with_workers(**chosen: Any) -> None:
    check(**chosen)
