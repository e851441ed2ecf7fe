"""Self-verifying resume: the comparator."""

import math
import struct

from everstep.record import Block, Journal, Replay, RunJournal


def block(steps, values, name="loss", phase="step", counts=None):
    n = len(steps)
    return Block(1, phase, name, False, list(steps), list(values), counts or [1] * n, [0] * n)


def expected(tmp_path, *blocks):
    journal = Journal.open(tmp_path, 1, None, {})
    for one in blocks:
        journal.append(one)
    journal.close()
    return RunJournal(tmp_path).superseded_after(None)


def nan(bits):
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def test_equal_rows_verify_a_resume(tmp_path):
    rows = block([3, 4, 5], [0.3, math.nan, math.inf]), block([3, 4, 5], [1.0, 2.0, -0.0], "accuracy")
    replay = Replay(expected(tmp_path, *rows))
    assert (replay.done, replay.report()) == (False, "nothing to verify")
    replay.check(rows[0])
    assert not replay.done
    replay.check(rows[1])
    assert (replay.done, replay.equal, replay.differing) == (True, 6, 0)
    assert replay.report() == "resume verified: 3 steps executed again, all equal"


def test_one_step_is_one_step(tmp_path):
    replay = Replay(expected(tmp_path, block([3], [0.3])))
    replay.check(block([3], [0.3]))
    assert replay.report() == "resume verified: 1 step executed again, all equal"


def test_nothing_to_verify():
    replay = Replay({})
    replay.check(block([1], [1.0]))
    assert (replay.done, replay.report()) == (True, "nothing to verify")


def test_the_first_difference_is_the_one_with_the_lowest_step(tmp_path):
    replay = Replay(expected(tmp_path, block([8, 9], [0.1, 0.2]), block([7, 8], [0.5, 0.1], "other")))
    replay.check(block([8, 9], [0.1, 0.25]))
    replay.check(block([7, 8], [0.5, 0.2], "other"))
    report = replay.report()
    assert report == "resume differs: step 8 other was 0.1 and is 0.2 now (2 of 4 rows differ)"


def test_one_bit_is_a_difference(tmp_path):
    replay = Replay(expected(tmp_path, block([1], [0.1])))
    replay.check(block([1], [math.nextafter(0.1, 1)]))
    assert replay.report().startswith("resume differs: step 1 loss was 0.1 and is 0.10000000000000002 now")


def test_zeros_of_other_sign_and_nans_of_other_bits_differ(tmp_path):
    quiet, other = nan(0x7FF8000000000000), nan(0x7FF8000000000001)
    replay = Replay(expected(tmp_path, block([1, 2, 3], [quiet, quiet, 0.0])))
    replay.check(block([1, 2, 3], [quiet, other, -0.0]))
    assert (replay.equal, replay.differing) == (1, 2)
    assert "was nan (bits 7ff8000000000000) and is nan (bits 7ff8000000000001) now" in replay.report()


def test_a_count_is_part_of_a_row(tmp_path):
    replay = Replay(expected(tmp_path, block([1], [0.1], counts=[2])))
    replay.check(block([1], [0.1], counts=[3]))
    assert "was 0.1 (of 2 values) and is 0.1 (of 3 values) now" in replay.report()


def test_head_rows_are_never_compared(tmp_path):
    replay = Replay(expected(tmp_path, block([1], [0.1], phase="head"), block([1], [0.1])))
    replay.check(block([1], [0.9], phase="head"))
    replay.check(block([1], [0.1]))
    assert (replay.done, replay.equal, replay.differing) == (True, 1, 0)


def test_rows_that_depend_on_the_clock_are_not_compared(tmp_path):
    replay = Replay(expected(tmp_path, block([1], [0.1])))
    replay.check(block([1], [0.9])._replace(wall=True))
    assert (replay.equal, replay.differing) == (0, 0)


def test_it_ends_when_all_metrics_had_the_chance_to_pass(tmp_path):
    rows = block([1, 2], [0.1, 0.2]), block([1, 2], [0.3, 0.4], "b"), block([2], [0.5], "no longer collected")
    replay = Replay(expected(tmp_path, *rows))
    replay.check(block([1, 2, 3], [0.1, 0.2, 0.3]))
    assert not replay.done  # the other metric's block of the same drain follows
    replay.check(block([1, 2, 3], [0.3, 0.4, 0.5], "b"))
    assert (replay.done, replay.equal) == (False, 4)
    replay.check(block([4], [0.3]))
    assert replay.done
    assert replay.report() == "resume verified: 2 steps executed again, all equal"
