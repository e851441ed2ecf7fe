"""Law 1 after any step: Hypothesis chooses the program, the cadence, and where it crashes, and how often."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st
from law_support.training import Crash, CrashError, Program

import everstep
import gate
from everstep.errors import Interrupted
from everstep.proof.compare import compare_runs

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS, STEPS_PER_EPOCH = 3, 4
STEPS = EPOCHS * STEPS_PER_EPOCH  # where each epoch is one pass
SHORT = ("--epochs", str(EPOCHS), "--batch", str(128 // STEPS_PER_EPOCH))

DATA = {
    "arrays": ("--data", "arrays"), "prefetch": ("--data", "prefetch"), "loader": ("--data", "loader"),
    "loader, 2 workers": ("--data", "loader", "--workers", "2"), "own, with state": ("--data", "own"),
    "plain": ("--data", "plain"), "plain, own generator": ("--data", "plain", "--generator"),
    "plain, 2 workers": ("--data", "plain", "--workers", "2"),
}  # fmt: skip
IN_PROCESS = [name for name in DATA if "workers" not in name]
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
    "lines and saves by hand": {"busy": 3},
    "stopped by hand": {"busy": 2, "leave": 3, "stop": 7},
}
"""How epochs, passes and step loops lie to each other, and what the body of a step does besides."""

EPOCH_ENDS = st.sampled_from([3, 4, 6, 7, 8, 9, 10, 12])
in_a_step = st.builds(Crash, st.sampled_from(["start", "end"]), st.integers(1, STEPS), st.booleans())
around_steps = st.builds(Crash, st.sampled_from(["head", "tail"]), EPOCH_ENDS, st.booleans())
crashes = st.lists(in_a_step | around_steps, min_size=1, max_size=4)


def program(shape: str, data: str, accumulate: int, evaluate: str, services: str, cadence: str) -> Program:
    def made() -> list[everstep.Service]:
        saves = everstep.Checkpoints(CADENCES[cadence](), copy="live" not in cadence)
        return [*SERVICES[services](), saves]

    given = SHAPES[shape]
    given = {**given, "loop": {"default_services": False, **given.get("loop", {})}}
    arguments = (*SHORT, *DATA[data], "--accumulate", str(accumulate), "--evaluate", evaluate)
    return Program(arguments=arguments, services=made, **given)


RUNS, NUMBERS = TemporaryDirectory(prefix="everstep-law1-"), itertools.count()


def _new_run() -> Path:
    return Path(RUNS.name) / str(next(NUMBERS))


@cache
def undisturbed(shape: str, data: str, accumulate: int, evaluate: str, services: str) -> Path:
    """The run that was never crashed; its cadence is the rarest."""
    run_dir = _new_run()
    program(shape, data, accumulate, evaluate, services, "never").run(run_dir)
    return run_dir


def check(crashes: list[Crash], cadence: str, limit: int = 0, **chosen: Any) -> int:
    """Crash a run and compare it with the one that was not; return how often it crashed.

    `limit`: of steps, for all starts before the last.
    """
    crashed = program(**chosen, cadence=cadence)
    # a start that ends before the first update of the optimizer is an error: the program may lack step()
    if limit >= chosen["accumulate"] and not (crashed.leave or crashed.stop or chosen["services"] != "none"):
        crashes = [*crashes, None]  # type: ignore[list-item]
    else:
        limit = 0  # a limit at a step that is left, or a decision made with it, is another run
    run_dir = _new_run()
    happened = 0
    for number, crash in enumerate([*crashes, None]):
        lower = {"max_step": min(limit, crashed.loop.get("max_step", limit))} if limit else {}
        try:
            crashed.run(run_dir, crash, **(lower if number < len(crashes) else {}))
        except (CrashError, Interrupted):
            happened += 1
            continue
        if not limit:
            break
    assert compare_runs(undisturbed(**chosen), run_dir) == []
    return happened


choices = {
    "shape": st.sampled_from(sorted(SHAPES)), "accumulate": st.integers(1, 3),
    "evaluate": st.sampled_from(["isolated", "bare", "none"]), "services": st.sampled_from(sorted(SERVICES)),
    "cadence": st.sampled_from(sorted(CADENCES)), "crashes": crashes,
    "limit": st.sampled_from([0, 0, 1, 5, 7, 8]),
}  # fmt: skip


def case(*row: Any) -> Any:
    """An example of these choices, in the order of the dictionary, after the data."""
    return example(**dict(zip(["data", *choices], row, strict=True)))


@settings(deadline=None, max_examples=5)
@given(data=st.sampled_from(IN_PROCESS), **choices)
# opening the pass anew draws from the program's generators
@case("plain", "a limit of steps", 1, "isolated", "best", "3 steps", [Crash("start", 5)], 0)
# a raised limit, between two loops
@case("arrays", "two loops in an epoch", 1, "none", "none", "each epoch", [], 4)
# the end of a pass draws from its generator, after a resume inside it too
@case(
    *("plain, own generator", "epochs across passes", 2, "bare", "early stop", "3 steps"),
    *([Crash("tail", 9, by_signal=True)], 5),
)
def test_crashed_anywhere(**chosen: Any) -> None:
    check(**chosen)


@pytest.mark.campaign("random")
@pytest.mark.parametrize("part", range(8))
def test_crashed_anywhere_often(part: int, tally: Any) -> None:
    crashes = 0

    @seed(100 * gate.seed + part)
    @settings(deadline=None, max_examples=50, database=None)
    @given(data=st.sampled_from(sorted(DATA)), **choices)
    def crashed(**chosen: Any) -> None:
        nonlocal crashes
        crashes += check(**chosen)

    crashed()
    tally("crashes in process", crashes, door="TrainLoop")
