"""Self-verifying resume: the comparator."""

import math
import struct

import pytest

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

HERE = Position(1, 0)


def block(steps, values, name="loss", phase="step", counts=None):
    n = len(steps)
    return Block(1, phase, name, False, list(steps), list(values), counts or [1] * n, [0] * n)


def expected(tmp_path, *blocks, first=0, tail=False):
    """What the journal alone has, as after a power cut."""
    journal = Journal.open(tmp_path, 1, None, {})
    position = journal.flush()
    for one in blocks:
        journal.append(one)
    journal.close()
    return read_earlier_steps(RunJournal(tmp_path), position, first, tail=tail)


def traced(tmp_path, steps, first=0):
    """What the trail has of some steps: per step its batches (digests) and values of loss."""
    (tmp_path / "run.json").touch()
    Journal.open(tmp_path, 1, None, {}).close()
    trail = Trail(tmp_path, 1, first, lambda name: False, pytest.fail)
    for step, (batches, values) in enumerate(steps, first + 1):
        for place, digest in enumerate(batches):
            trail.batch(step, "train", 0, place, digest)
        trail.step(step, 1, [(step, "loss", value) for value in values], {})
    trail.close()
    return read_earlier_steps(RunJournal(tmp_path), HERE, first)


def executed_again(comparison, steps, first=0):
    """Execute steps again, as `traced` did; each is a boundary."""
    for step, (batches, values) in enumerate(steps, first + 1):
        for place, digest in enumerate(batches):
            comparison.batch(step, "train", 0, place, digest)
        comparison.step_done(step)
        if values:
            comparison.rows(block([step], [sum(values) / len(values)], counts=[len(values)]))
        comparison.reached(step)
    return comparison


def nan(bits):
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def test_equal_rows_verify_a_resume(tmp_path):
    rows = block([3, 4, 5], [0.3, math.nan, math.inf]), block([3, 4, 5], [1.0, 2.0, -0.0], "accuracy")
    comparison = StepComparison(expected(tmp_path, *rows, first=2))
    assert (comparison.done, comparison.report()) == (
        False,
        "resume not verified: nothing was executed again",
    )
    for step in (3, 4, 5):
        comparison.step_done(step)
    comparison.rows(rows[0])
    comparison.reached(5)
    assert not comparison.done
    comparison.rows(rows[1])
    comparison.reached(5)
    assert (comparison.done, comparison.equal.total(), comparison.differing) == (True, 6, 0)
    assert comparison.report() == "resume verified: 3 steps executed again: 6 values of 2 metrics equal"


STEPS = [([7, 8], [0.5, 0.25]), ([9], [0.125]), ([10], [])]


def test_batches_and_values_verify_a_resume(tmp_path):
    comparison = executed_again(StepComparison(traced(tmp_path, STEPS)), STEPS)
    assert comparison.report() == (
        "resume verified: 3 steps executed again: 4 batch digests and 2 values of loss equal"
    )


def test_what_was_not_on_the_host_is_not_compared(tmp_path):
    device = object()
    before = [([None], [device]), ([9], [0.125]), ([10], [0.5, device])]
    now = [([7], [0.3]), ([9], [0.125]), ([10], [0.5, 0.5])]
    assert executed_again(StepComparison(traced(tmp_path, before)), now).report() == (
        "resume verified: 3 steps executed again: 2 batch digests and 1 value of loss equal, "
        "1 batch digest and 2 values of loss not compared"
    )


def test_a_value_that_both_journal_and_trail_have_is_counted_once(tmp_path):
    traced(tmp_path, STEPS)
    journal = Journal.open(tmp_path, 2, None, {})
    journal.close()
    (tmp_path / "journal" / "segment-0002.evj").unlink()
    at = RunJournal(tmp_path).segments()[0].end
    (tmp_path / "journal" / "segment-0001.evj").unlink()
    journal = Journal.open(tmp_path, 1, None, {})
    journal.append(block([1, 2], [0.375, 0.125], counts=[2, 1]))
    journal.close()
    comparison = executed_again(
        StepComparison(read_earlier_steps(RunJournal(tmp_path), Position(1, at), 0)), STEPS
    )
    assert (comparison.equal["loss"], comparison.equal["batch digest"], comparison.uncompared.total()) == (
        2,
        4,
        0,
    )


def test_numbers_that_cannot_be_expected_to_be_equal_are_not_compared(tmp_path):
    comparison = StepComparison(traced(tmp_path, STEPS), lambda: "kernels are not deterministic here")
    now = [([7, 8], [0.5, 0.26]), *STEPS[1:]]
    assert executed_again(comparison, now).report() == (
        "resume verified: 3 steps executed again: 4 batch digests equal, "
        "2 values of loss not compared (kernels are not deterministic here)"
    )


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (
            [([7, 9], [0.375, 0.375])],
            "step 1 batch of train was the batch with digest 0000000000000008 and is the batch with digest 0",
        ),
        ([([7], [0.5, 0.25])], "step 1 batch of train was drawn and is not drawn now"),
        ([([7, 8, 9], [0.5, 0.25])], "step 1 batch of train was not drawn and is drawn now"),
        ([([7, 8], [])], None),
        ([STEPS[0], ([9], [0.125]), ([10], [1.0])], "step 3 loss was missing and is 1.0 now"),
        ([STEPS[0], ([9], []), ([10], [])], "step 2 loss was 0.125 and is missing now"),
    ],
)
def test_a_batch_or_a_row_more_or_less_is_a_difference(tmp_path, now, what):
    comparison = executed_again(StepComparison(traced(tmp_path, STEPS)), now)
    comparison.end()
    if what is None:
        assert comparison.difference is None  # a metric that is collected no more
    else:
        assert comparison.report().startswith(f"resume differs: {what}")
        assert (comparison.difference.component == "samples") == ("batch" in what)


def test_a_metric_that_is_new_in_the_program_is_not_compared(tmp_path):
    comparison = StepComparison(traced(tmp_path, STEPS))
    executed_again(comparison, STEPS[:1])
    comparison.rows(block([1], [2.0], "norm"))
    assert (comparison.difference, comparison.uncompared["norm"]) == (None, 1)


@pytest.mark.parametrize(
    ("reference", "ended", "what"),
    [
        (
            EarlierSteps(10, 20, ends={("train", 0): 15}),
            13,
            "was at its end after step 15 and is at its end now",
        ),
        (
            EarlierSteps(10, 20, lasts={("train", 0): 20}),
            13,
            "was not at its end until step 20 and is at its end now",
        ),
    ],
)
def test_a_pass_that_ends_elsewhere_is_a_difference(reference, ended, what):
    comparison = StepComparison(reference)
    comparison.pass_ended(ended, "train", 0)
    assert what in comparison.report()
    assert comparison.difference.component == "samples"


def test_a_pass_that_goes_on_beyond_its_end_is_a_difference():
    comparison = StepComparison(EarlierSteps(10, 15, ends={("train", 0): 15}))
    comparison.batch(16, "train", 0, 0, 5)
    assert "pass of train was at its end after step 15 and is not at its end now" in comparison.report()


def test_the_state_in_a_snapshot_is_compared():
    copies = {(15, "step/random state"): 5, (16, "step/model"): 5, (20, "epoch/random state"): 6}
    comparison = StepComparison(EarlierSteps(10, 20, copies=copies))
    comparison.copied(15, "step", "random state", 5)
    comparison.copied(16, "step", "model", 5)
    comparison.copied(20, "epoch", "random state", 7)
    assert (comparison.equal["random state"], comparison.equal["state digest"]) == (1, 1)
    assert "step 20 random state was 0000000000000006 and is 0000000000000007 now" in comparison.report()


def test_the_first_difference_is_the_one_with_the_lowest_step(tmp_path):
    rows = block([8, 9], [0.1, 0.2]), block([7, 8], [0.5, 0.1], "other")
    comparison = StepComparison(expected(tmp_path, *rows, first=6))
    comparison.rows(block([8, 9], [0.1, 0.25]))
    comparison.rows(block([7, 8], [0.5, 0.2], "other"))
    report = comparison.report()
    assert report == "resume differs: step 8 other was 0.1 and is 0.2 now (2 of 4 compared differ)"


def test_zeros_of_other_sign_and_nans_of_other_bits_differ(tmp_path):
    quiet, other = nan(0x7FF8000000000000), nan(0x7FF8000000000001)
    comparison = StepComparison(expected(tmp_path, block([1, 2, 3], [quiet, quiet, 0.0])))
    comparison.rows(block([1, 2, 3], [quiet, other, -0.0]))
    assert (comparison.equal.total(), comparison.differing) == (1, 2)
    assert "was nan (bits 7ff8000000000000) and is nan (bits 7ff8000000000001) now" in comparison.report()


def test_a_count_is_part_of_a_row(tmp_path):
    comparison = StepComparison(expected(tmp_path, block([1], [0.1], counts=[2])))
    comparison.rows(block([1], [0.1], counts=[3]))
    assert "was 0.1 (of 2 values) and is 0.1 (of 3 values) now" in comparison.report()


def test_head_rows_are_never_compared(tmp_path):
    comparison = StepComparison(expected(tmp_path, block([1], [0.1], phase="head"), block([1], [0.1])))
    comparison.rows(block([1], [0.9], phase="head"))
    comparison.rows(block([1], [0.1]))
    comparison.reached(1)
    assert (comparison.done, comparison.equal.total(), comparison.differing) == (True, 1, 0)


def test_rows_that_depend_on_the_clock_are_not_compared(tmp_path):
    comparison = StepComparison(expected(tmp_path, block([1], [0.1])))
    comparison.rows(block([1], [0.9])._replace(wall=True))
    assert (comparison.equal.total(), comparison.differing) == (0, 0)


def test_it_ends_beyond_the_last_step(tmp_path):
    rows = block([1, 2], [0.1, 0.2]), block([2], [0.5], "no longer collected")
    comparison = StepComparison(expected(tmp_path, *rows))
    comparison.rows(block([1, 2], [0.1, 0.2]))
    comparison.reached(2)
    assert not comparison.done  # what the epoch's tail collects may follow
    comparison.reached(3)
    assert (comparison.done, comparison.equal.total(), comparison.differing) == (True, 2, 0)
