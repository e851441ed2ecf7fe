"""The trail: what steps found survives SIGKILL, without a system call in a step."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

import warm
from everstep import hazard
from everstep.metrics.collector import is_wall
from everstep.record import Block, Trail, read_trail, trail_path
from everstep.record.trail import SMALLEST
from everstep.record.trail_format import ABSENT, BITS, KEY, LARGEST, START, STATE, checksum, definition


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def trail(tmp_path: Path, told: list[str]) -> Trail:
    (tmp_path / "journal").mkdir()
    return Trail(tmp_path, 1, 0, is_wall, told.append)


def walk(trail: Trail, first: int, last: int, names: int = 1) -> None:
    for step in range(first, last + 1):
        trail.batch(step, "train", 0, 0, step)
        trail.step(step, 1, [(step, f"m{i}", step + i / 64) for i in range(names)], {})


def number(bits: int) -> float:
    (value,) = struct.unpack("=d", struct.pack("=Q", bits))
    return float(value)


def test_it_is_read_while_it_is_written(trail: Trail) -> None:
    walk(trail, 1, 3)
    trail.batch(4, "train", 0, 0, 4)  # its step is not complete
    found = read_trail(trail.path)
    assert found is not None
    assert (found.whole, found.last) == (0, 3)
    assert [(m.phase, m.name, m.step) for m in found.marks[:2]] == [("batch", "train", 1), ("step", "m0", 1)]
    assert [number(m.value) for m in found.marks if m.phase == "step"] == [1.0, 2.0, 3.0]


def test_values_on_a_device_are_marked_and_noted_when_they_are_read(trail: Trail) -> None:
    trail.step(1, 1, [(1, "loss", object()), (1, "step_time", 0.1)], {})
    trail.rows(Block(1, "step", "loss", False, [1], [0.5], [1], [0]))
    trail.rows(Block(1, "tail", "valid", False, [1], [0.25], [1], [0]))
    trail.rows(Block(1, "tail", "valid_time", True, [1], [0.25], [1], [0]))
    found = read_trail(trail.path)
    assert found is not None
    absent, loss, valid = found.marks
    assert absent.flags == ABSENT
    assert (loss.phase, number(loss.value), valid.phase, number(valid.value)) == ("step", 0.5, "tail", 0.25)


def writes() -> str:
    """How many system calls of this process have written so far."""
    return next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("syscw"))


def test_a_step_writes_without_a_system_call(trail: Trail) -> None:
    walk(trail, 1, 2)
    before = writes()
    walk(trail, 3, 100)
    assert writes() == before
    found = read_trail(trail.path)
    assert found is not None and found.last == 100


def test_it_grows_at_boundaries_and_keeps_two_intervals(trail: Trail, told: list[str]) -> None:
    walk(trail, 1, 3000)
    trail.tidy()
    assert trail.path.stat().st_size > SMALLEST
    walk(trail, 3001, 3010)
    found = read_trail(trail.path)
    assert found is not None
    assert (found.whole, found.last, len(found.marks)) == (0, 3010, 2 * 3010)
    for step in (2000, 3000):
        trail.committed(step)
    walk(trail, 3011, 9000)
    trail.tidy()
    found = read_trail(trail.path)
    assert found is not None
    assert (found.whole, found.last, found.marks[0].step) == (2000, 9000, 2001)
    assert not told


def test_a_new_file_has_the_records_of_the_old_one_and_no_more_names_than_they_need(trail: Trail) -> None:
    for step in range(1, 1501):
        trail.batch(step, f"stream {step // 1000}", step // 1000, 0, step << 40)
        trail.batch(step, "other", 0, 1, None)
        trail.mark(step, "copy", f"part {step // 800}", step)
        trail.step(step, 1 + step // 500, [(step, f"loss {step // 700}", -step / 3), (step, "acc", 0.5)], {})
        if step in (500, 1200):
            trail.committed(step)
    before = read_trail(trail.path)
    trail.tidy()
    after = read_trail(trail.path)
    assert before is not None and after is not None
    assert after.marks == [mark for mark in before.marks if mark.step > 500] and len(after.marks) == 5000
    assert (after.whole, after.last) == (500, 1500)
    walk(trail, 1501, 1502, names=9)  # names that the new file has yet to define
    found = read_trail(trail.path)
    assert found is not None and found.marks[: len(after.marks)] == after.marks
    assert [mark.name for mark in found.marks[-9:]] == [f"m{number}" for number in range(9)]
    assert b"loss 0" in trail.path.read_bytes()
    trail.committed(1502)
    trail.committed(1502)
    walk(trail, 1503, 16_000)
    trail.tidy()
    assert b"loss 0" not in trail.path.read_bytes()


def test_what_somebody_else_writes_into_the_file_stops_no_run(trail: Trail) -> None:
    walk(trail, 1, 3000)
    with trail.path.open("r+b") as file:
        file.seek(START)
        file.write(b"\xff" * 10_000)
    trail.tidy()
    walk(trail, 3001, 3002)
    found = read_trail(trail.path)
    assert found is not None and found.last == 3002


def test_a_value_that_does_not_fit_into_the_trail_is_known_to_be_missing(trail: Trail) -> None:
    walk(trail, 1, 5000)
    found = read_trail(trail.path)
    assert found is not None
    assert found.last == found.whole == 5000  # of no step since is all there


@pytest.mark.parametrize(("names", "length"), [(3000, 100), (300, 900), (1000, 1)])
def test_a_step_with_a_name_that_does_not_fit_into_the_trail_counts_as_incomplete(
    tmp_path: Path, told: list[str], names: int, length: int
) -> None:
    (tmp_path / "journal").mkdir()
    trail = Trail(tmp_path, 1, 0, is_wall, told.append)
    metrics = [f"{'x' * length}{i}" for i in range(names)]
    for step in range(1, 8):
        trail.batch(step, "train", 0, 0, step)
        trail.step(step, 1, [(step, name, 0.5) for name in metrics], {})
        found = read_trail(trail.path)
        assert found is not None
        for whole in range(found.whole + 1, step + 1):
            assert len([mark for mark in found.marks if mark.step == whole]) == 1 + names
        trail.tidy()  # makes room for the names, too
    assert found.whole < 7
    assert not told


def test_what_finds_no_room_at_an_older_step_does_not_make_newer_ones_whole(trail: Trail) -> None:
    walk(trail, 1, 5000)
    trail.batch(5001, "train", 0, 0, 1)
    trail.mark(4000, "pass", "other")
    trail.step(5001, 1, [], {})
    found = read_trail(trail.path)
    assert found is not None
    assert (found.whole, found.last) == (5001, 5001)


def test_more_batches_and_values_than_a_record_can_number_are_not_mixed_up(trail: Trail) -> None:
    trail.batch(1, "train", 0, 1 << 16, 7)
    trail.step(1, 1, [], {})
    trail.rows(Block(1, "tail", "valid", False, [1, 1], [0.25, 0.5], [1, 1], [0, 1 << 16]))
    found = read_trail(trail.path)
    assert found is not None
    assert found.whole == found.last == 1
    assert [number(mark.value) for mark in found.marks] == [0.25]


def test_at_its_largest_it_says_so_and_goes_on(
    trail: Trail, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.record.trail.LARGEST", SMALLEST)
    walk(trail, 1, 3000)
    trail.tidy()
    walk(trail, 3001, 3005)
    found = read_trail(trail.path)
    assert found is not None
    assert (found.whole, found.last, found.marks[0].step) == (3000, 3005, 3001)
    assert len(told) == 1 and "is full at" in told[0]
    assert LARGEST > SMALLEST


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "ENODEV", "EROFS"])
def test_a_disk_that_refuses_it_is_said_once_and_training_goes_on(
    tmp_path: Path, told: list[str], code: str
) -> None:
    (tmp_path / "journal").mkdir()
    hazard.arm(f"{code}:trail.create:1-2")
    trail = Trail(tmp_path, 1, 0, is_wall, told.append)
    walk(trail, 1, 3)
    trail.rows(Block(1, "tail", "valid", False, [1], [0.25], [1], [0]))
    trail.mark(3, "pass", "train")
    trail.tidy()
    assert len(told) == 1 and "the results of steps do not survive a kill" in told[0]
    assert list((tmp_path / "journal").iterdir()) == []
    trail.tidy()  # the disk has room again
    walk(trail, 4, 5)
    trail.close()
    found = read_trail(trail.path)
    assert found is not None
    assert (found.whole, found.last, len(found.marks)) == (3, 5, 4)
    assert len(told) == 1


def test_where_a_full_disk_could_refuse_a_mapped_page_it_is_written_by_calls(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Btrfs each written page gets a new place: without one, a write to a mapping is SIGBUS."""
    monkeypatch.setattr("everstep.record.trail._OVERWRITING", set())
    (tmp_path / "journal").mkdir()
    trail = Trail(tmp_path, 1, 0, is_wall, told.append)
    walk(trail, 1, 3)
    assert str(trail.path) not in Path("/proc/self/maps").read_text()
    hazard.arm("ENOSPC:trail.write:1-3")  # the disk is full for three steps
    walk(trail, 4, 6)
    found = read_trail(trail.path)
    assert found is not None and (found.last, len(found.marks)) == (3, 6)
    walk(trail, 7, 3000)
    trail.tidy()
    walk(trail, 3001, 3001)
    found = read_trail(trail.path)
    assert found is not None
    assert (found.whole, found.last, len(found.marks)) == (0, 3001, 2 * 3001)
    assert len(told) == 1 and "the disk is full: free space" in told[0]
    size = trail.path.stat().st_size
    trail.close()
    assert trail.path.stat().st_size == size


def test_a_file_that_is_deleted_is_made_again_at_the_next_boundary(trail: Trail, told: list[str]) -> None:
    walk(trail, 1, 3)
    trail.path.unlink()
    trail.tidy()
    walk(trail, 4, 5)
    found = read_trail(trail.path)
    assert found is not None
    assert (found.whole, found.last, len(found.marks)) == (0, 5, 10)
    assert not told


@pytest.mark.parametrize("left", [0, 64, 5000])
def test_a_file_that_is_cut_is_made_anew_at_the_next_boundary(trail: Trail, left: int) -> None:
    child = os.fork()
    if child == 0:  # where it goes wrong, the kernel ends the process
        trail = Trail(trail.path.parent.parent, 2, 3, is_wall, lambda message: None)
        walk(trail, 4, 5)
        os.truncate(trail.path, left)
        trail.tidy()
        walk(trail, 6, 7)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    found = read_trail(trail_path(trail.path.parent.parent, 2))
    assert found is not None
    assert (found.whole, found.last, len(found.marks)) == (5, 7, 4)


def test_a_damaged_file_is_not_read_as_a_trail(trail: Trail) -> None:
    walk(trail, 1, 5)
    trail.close()
    whole = trail.path.read_bytes()
    found = read_trail(trail.path)
    assert found is not None and len(found.marks) == 10
    step = 2 * BITS.size  # where only the last is gone, the state before it counts
    for cut in range(0, len(whole) - step, 7):
        trail.path.write_bytes(whole[:cut])
        assert read_trail(trail.path) is None
    for at in range(START, len(whole) - step, 32):  # pages that a power cut has not let reach the disk
        trail.path.write_bytes(whole[:at] + bytes(32) + whole[at + 32 :])
        torn = read_trail(trail.path)
        assert torn is None
    trail.path.unlink()
    assert read_trail(trail.path) is None
    trail.path.mkdir()
    assert read_trail(trail.path) is None


def sealed(trail: Trail, records: bytes, last: int) -> bytes:
    """A file of these records with a right checksum."""
    facts = (START + len(records), last, 0)
    state = STATE.pack(*facts, checksum(*facts, xxhash.xxh3_64_intdigest(records)))
    return trail.path.read_bytes()[:16] + state + bytes(STATE.size) + records


def test_steps_that_a_forged_file_has_no_room_for_are_not_counted(trail: Trail) -> None:
    walk(trail, 1, 1)
    trail.close()
    trail.path.write_bytes(sealed(trail, b"", last=1 << 62))
    assert read_trail(trail.path) is None


def test_a_wrong_bit_in_a_trail_is_not_reported_as_another_batch_or_step(trail: Trail) -> None:
    """At the worst the last step is lost, for the state before it is whole."""
    walk(trail, 1, 5)
    trail.close()
    whole, there = trail.path.read_bytes(), read_trail(trail.path)
    assert there is not None
    found = []
    for bit in range(len(whole) * 8):
        harmed = bytearray(whole)
        harmed[bit // 8] ^= 1 << bit % 8
        trail.path.write_bytes(harmed)
        found.append(read_trail(trail.path))
    left = [each for each in found if each is not None]
    assert {each.last for each in left} == {4, 5} and {each.whole for each in left} == {0}
    assert all(each.marks == there.marks[: len(each.marks)] for each in left)
    assert len(left) < len(found) / 2


@pytest.mark.parametrize("text", [b"7", b'["a"]', b"[" * 30_000, b"\xff"])
def test_a_file_with_a_forged_name_is_not_read_as_a_trail(trail: Trail, text: bytes) -> None:
    walk(trail, 1, 1)
    trail.close()
    length = definition(text) - BITS.size
    forged = BITS.pack(0, 0, 0, len(text), 1, 0, KEY) + text.ljust(length)
    trail.path.write_bytes(sealed(trail, forged, last=1))
    assert read_trail(trail.path) is None


def test_a_forked_child_leaves_it_alone(trail: Trail) -> None:
    walk(trail, 1, 2)
    child = os.fork()
    if child == 0:
        try:
            walk(trail, 3, 5)
            trail.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    walk(trail, 3, 3)
    found = read_trail(trail.path)
    assert found is not None and found.last == 3
    trail.close()


def test_closing_a_trail_releases_the_file_and_cuts_its_spare_bytes(trail: Trail) -> None:
    before = set(os.listdir("/proc/self/fd"))
    trail.close()
    trail.close()
    assert len(set(os.listdir("/proc/self/fd"))) < len(before)
    assert trail_path(trail.path.parent.parent, 1).stat().st_size < 1000


def test_values_of_one_name_are_folded_as_the_journal_folds_them(trail: Trail) -> None:
    from everstep.record.earlier_steps import _folded

    values = [0.1, 0.2, 0.7]
    trail.step(1, 1, [(1, "loss", value) for value in values], {"loss": (1, 0.3, 2)})
    found = read_trail(trail.path)
    assert found is not None
    ((key, row),) = _folded(found.marks)
    assert key == (1, 1, "step", "loss", 0)
    assert row == (int(np.float64((0.3 + 0.1 + 0.2 + 0.7) / 5).view(np.uint64)), 5)


@pytest.mark.parametrize("lost", [False, True], ids=["killed", "and its journal lost"])
def test_a_trail_that_a_killed_start_was_making_is_deleted_by_the_next(tmp_path: Path, lost: bool) -> None:
    program = Path(__file__).parent.parent / "laws" / "law_support" / "victim_numpy.py"
    command = [sys.executable, str(program), str(tmp_path / "run"), "--steps", "4", "--sleep", "0"]
    armed = {**os.environ, "EVERSTEP_HAZARD": "kill:trail.rename:1"}
    assert warm.run(command, env=armed).returncode == -9
    assert list((tmp_path / "run" / "journal").glob(".tmp-*"))
    if lost:  # as by a power cut: the next start has the same number
        (tmp_path / "run" / "journal" / "segment-0001.evj").unlink()
    assert warm.run(command).returncode == 0
    assert not list((tmp_path / "run").rglob(".tmp-*"))
