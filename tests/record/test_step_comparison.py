"""Self-verifying resume: the comparator."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from everstep.metrics.collector import is_wall
from everstep.record import (
    Block,
    EarlierSteps,
    Journal,
    Position,
    RunJournal,
    StepComparison,
    Trail,
    read_earlier_steps,
)

DEVICE = object()
STEPS: list[Any] = [([7, 8], [0.5, 0.25]), ([9], [0.125]), ([10], [])]
"""Batches (digests) and values of loss of each step."""


def start(run_dir: Path, segment: int = 1, first: int = 0) -> Trail:
    Journal.open(run_dir, segment, None if segment == 1 else Position(1, 0), {}).close()
    return Trail(run_dir, segment, first, is_wall, pytest.fail)


def execute(trail: Trail, steps: list[Any], comparison: StepComparison | None = None, first: int = 0) -> None:
    """Execute steps, each of which is a boundary."""
    for step, (batches, losses) in enumerate(steps, first + 1):
        for place, digest in enumerate(batches):
            trail.note(step, "batch", "train", digest, 0, place)
        values = losses.items() if isinstance(losses, dict) else [("loss", value) for value in losses]
        trail.step(step, 1, [(step, name, value) for name, value in values], {})
        if comparison is not None:
            comparison.step_done(step)
            comparison.reached(step)


def again(
    run_dir: Path, before: list[Any], now: list[Any], why: str = "", first: int = 0, tail: bool = False
) -> StepComparison:
    """Steps that were killed, and what a start finds that executes them again."""
    (run_dir / "run.json").touch()
    execute(start(run_dir, first=first), before, first=first)
    earlier = read_earlier_steps(RunJournal(run_dir), Position(1, 0), first, tail=tail)
    comparison = StepComparison(earlier, lambda: why)
    trail = start(run_dir, 2, first)
    trail.compare = comparison.note
    execute(trail, now, comparison, first)
    return comparison


def nan(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


QUIET, OTHER = nan(0x7FF8000000000000), nan(0x7FF8000000000001)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (STEPS, STEPS, "3 steps executed again: 4 batch digests and 2 values of loss equal"),
        (
            [([], {"loss": value, "accuracy": -0.0}) for value in (0.3, math.nan, math.inf)],
            [([], {"loss": value, "accuracy": -0.0}) for value in (0.3, math.nan, math.inf)],
            "3 steps executed again: 6 values of 2 metrics equal",
        ),
        (
            [([None], [DEVICE]), ([9], [0.125]), ([10], [0.5, DEVICE])],
            [([7], [0.3]), ([9], [0.125]), ([10], [0.5, 0.5])],
            "3 steps executed again: 2 batch digests and 1 value of loss equal, "
            "1 batch digest and 2 values of loss not compared",
        ),
        (  # a metric that is new in the program
            STEPS[:1],
            [([7, 8], {"norm": 2.0})],
            "1 step executed again: 2 batch digests equal, 1 value of norm not compared",
        ),
        ([([7], []), ([], [])], [([7], []), ([], [])], "2 steps executed again: 1 batch digest equal, "
         "1 step left nothing to compare"),
        ([([1], {"a_time": 0.1})], [([1], {"a_time": 0.2})], "1 step executed again: 1 batch digest equal"),
    ],
)  # fmt: skip
def test_equal_steps_verify_a_resume(tmp_path: Path, before: list[Any], now: list[Any], said: str) -> None:
    comparison = again(tmp_path, before, now)
    comparison.end()
    assert comparison.report() == f"resume verified: {said}"


def test_numbers_that_cannot_be_expected_to_be_equal_are_not_compared(tmp_path: Path) -> None:
    why = "kernels are not deterministic here"
    report = again(tmp_path, STEPS, [([7, 8], [0.5, 0.26]), *STEPS[1:]], why).report()
    said = f"4 batch digests equal, 2 values of loss not compared ({why})"
    assert report == f"resume verified: 3 steps executed again: {said}"


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (
            [([7, 9], [0.375, 0.375])],
            "1 batch of train was the batch with digest 0000000000000008 and is the",
        ),
        ([([7], [0.5, 0.25])], "1 batch of train was drawn and is not drawn now"),
        ([([7, 8, 9], [0.5, 0.25])], "1 batch of train was not drawn and is drawn now"),
        ([([7, 8], [])], None),  # a metric that is collected no more
        ([STEPS[0], ([9], [0.125]), ([10], [1.0])], "3 loss was missing and is 1.0 now"),
        ([STEPS[0], ([9], []), ([10], [])], "2 loss was 0.125 and is missing now"),
        ([([7, 8], [0.375])], "1 loss was 0.375 (of 2 values) and is 0.375 (of 1 values) now"),
    ],
)
def test_a_batch_or_a_row_more_or_less_is_a_difference(
    tmp_path: Path, now: list[Any], what: str | None
) -> None:
    comparison = again(tmp_path, STEPS, now)
    comparison.end()
    if what is None or comparison.difference is None:
        assert what is comparison.difference is None
    else:
        assert comparison.report().startswith(f"resume differs: step {what}")
        assert (comparison.difference.component == "samples") == ("batch" in what)


def test_zeros_of_other_sign_and_nans_of_other_bits_differ(tmp_path: Path) -> None:
    before, now = (
        [([], [value]) for value in values] for values in ((QUIET, QUIET, 0.0), (QUIET, OTHER, -0.0))
    )
    comparison = again(tmp_path, before, now)
    assert (comparison.equal.total(), comparison.differing) == (1, 2)
    assert "was nan (bits 7ff8000000000000) and is nan (bits 7ff8000000000001) now" in comparison.report()


def test_the_first_difference_is_the_one_with_the_lowest_step(tmp_path: Path) -> None:
    before = [([], {"loss": 0.1}), ([], {"loss": 0.2, "other": 0.5})]
    comparison = again(tmp_path, before, [([], {"loss": 0.3}), ([], {"loss": 0.25, "other": 0.5})], first=6)
    report = comparison.report()
    assert report == "resume differs: step 7 loss was 0.1 and is 0.3 now (2 of 3 compared differ)"
    assert comparison.latest is not None and comparison.latest.step == 8


@pytest.mark.parametrize(
    ("earlier", "now", "what"),
    [
        ({"ends": {("train", 0): 15}}, (13, "pass"), "was at its end after step 15 and is at its end now"),
        ({"ends": {("train", 0): 15}}, (15, "pass"), None),
        ({"ends": {("train", 0): 15}}, (16, "batch"), "at its end after step 15 and is not at its end now"),
        (
            {"lasts": {("train", 0): 20}},
            (13, "pass"),
            "was not at its end until step 20 and is at its end now",
        ),
        ({"lasts": {("train", 0): 20}}, (20, "pass"), None),
    ],
)
def test_a_pass_that_ends_elsewhere_is_a_difference(earlier: Any, now: Any, what: str | None) -> None:
    comparison = StepComparison(EarlierSteps(10, 20, **earlier))
    comparison.note((0, *now, "train", 0), (0, 1))
    assert (comparison.difference is None) == (what is None)
    assert what is None or what in comparison.report()


def test_the_state_in_a_snapshot_is_compared(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    copies = {"step/random state": 5, "step/model": 5, "epoch/random state": 6}
    trail = start(tmp_path)
    for name, digest in copies.items():
        trail.note(1, "copy", name, digest)
    trail.step(1, 1, [], {})
    comparison = StepComparison(read_earlier_steps(RunJournal(tmp_path), Position(1, 0), 0))
    for name, digest in {**copies, "epoch/random state": 7, "step/new": 1}.items():
        comparison.note((0, 1, "copy", name, 0), (digest, 1))
    assert (comparison.equal["random state"], comparison.equal["state digest"]) == (1, 1)
    assert "step 1 random state was 0000000000000006 and is 0000000000000007 now" in comparison.report()


@pytest.mark.parametrize("phase", ["head", "tail"])
def test_rows_of_the_tail_are_compared_and_those_of_the_head_are_not(tmp_path: Path, phase: str) -> None:
    """At the checkpoint, where the tail is repeated, and at the last step, behind which a tail may follow."""
    (tmp_path / "run.json").touch()
    trail = start(tmp_path)
    execute(trail, STEPS[:2])
    for step in (1, 2):
        trail.rows(Block(1, phase, "valid", False, [step], [0.1], [1], [0]))
    earlier = read_earlier_steps(RunJournal(tmp_path), Position(1, 0), 1, tail=True)
    comparison = StepComparison(earlier)
    trail = start(tmp_path, 2, 1)
    trail.compare = comparison.note
    execute(trail, STEPS[1:2], comparison, first=1)
    assert comparison.done == (phase == "head")
    for step in (1, 2):
        trail.rows(Block(1, phase, "valid", False, [step], [0.1 * step], [1], [0]))
    comparison.reached(2)
    assert comparison.done and comparison.differing == (phase == "tail")
    assert comparison.equal["valid"] == (phase == "tail")


def test_it_ends_beyond_the_last_step_and_the_first_execution_counts(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    execute(start(tmp_path), [([], [1.0]), ([], {"loss": 2.0, "gone": 1.0})])
    execute(start(tmp_path, 2), [([], [1.0]), ([], [3.0])])
    comparison = StepComparison(read_earlier_steps(RunJournal(tmp_path), Position(1, 0), 0))
    trail = start(tmp_path, 3)
    trail.compare = comparison.note
    execute(trail, [([], [1.0]), ([], [2.0])], comparison)
    assert not comparison.done  # what the epoch's tail collects may follow
    comparison.reached(3)
    assert (comparison.done, comparison.equal.total(), comparison.differing) == (True, 2, 0)


def test_rows_of_the_journal_are_compared_where_no_trail_has_the_step(tmp_path: Path) -> None:
    """As after a power cut, or when a step of long ago is replayed; what both have is counted once."""
    (tmp_path / "run.json").touch()
    journal = Journal.open(tmp_path, 1, None, {})
    journal.append(Block(1, "step", "loss", False, [1, 2, 3], [1.0, 0.5, 0.25], [1] * 3, [0] * 3))
    position = journal.flush()
    journal.append(Block(1, "step", "loss", False, [4, 5, 6], [0.125, 2.0, 3.0], [1] * 3, [0] * 3))
    journal.append(Block(1, "step", "a_time", True, [4, 5], [7.0, 8.0], [1] * 2, [0] * 2))
    journal.close()
    execute(Trail(tmp_path, 1, 4, is_wall, pytest.fail), [([1], [2.0])], first=4)
    comparison = StepComparison(read_earlier_steps(RunJournal(tmp_path), position, 3))
    trail = start(tmp_path, 2, 3)
    trail.compare = comparison.note
    execute(trail, [([0], [0.125]), ([1], [2.0]), ([2], [4.0])], comparison, first=3)
    assert (comparison.done, comparison.steps, comparison.equal["loss"]) == (True, 3, 2)
    assert comparison.report().startswith("resume differs: step 6 loss was 3.0 and is 4.0 now (1 of 4 ")
