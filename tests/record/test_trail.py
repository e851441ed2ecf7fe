"""The trail: what steps found survives SIGKILL, in one write a step."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from everstep import hazard
from everstep.metrics.collector import is_wall
from everstep.record import Block, Trail, last_step, newest_step, read_trail
from everstep.record.journal_format import bits_float
from everstep.record.trail import ABSENT, BITS, KEY, MAGIC, TrailContent
from waiting import left_open


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def trail(tmp_path: Path, warnings: list[str]) -> Trail:
    (tmp_path / "journal").mkdir()
    return Trail(tmp_path, 1, 0, is_wall, warnings.append)


def walk(trail: Trail, first: int, last: int, names: int = 1) -> None:
    for step in range(first, last + 1):
        trail.batch(step, "train", 0, 0, step)
        trail.step(step, 1, [(step, f"m{i}", step + i / 64) for i in range(names)], {})


def read(trail: Trail) -> TrailContent:
    content = read_trail(trail.path)
    assert content is not None and content.last == last_step(trail.path)
    return content


def test_it_is_read_while_it_is_written(trail: Trail) -> None:
    walk(trail, 1, 3)
    trail.batch(4, "train", 0, 0, 4)  # its step is not complete
    content = read(trail)
    assert (content.whole, content.last) == (0, 3)
    assert [(m.phase, m.name, m.step) for m in content.marks[:2]] == [
        ("batch", "train", 1),
        ("step", "m0", 1),
    ]
    assert [bits_float(m.value) for m in content.marks if m.phase == "step"] == [1.0, 2.0, 3.0]


def test_values_on_a_device_are_marked_and_noted_when_they_are_read(trail: Trail) -> None:
    trail.step(1, 1, [(1, "loss", object()), (1, "step_time", 0.1)], {})
    trail.rows(Block(1, "step", "loss", False, [1], [0.5], [1], [0]))
    trail.rows(Block(1, "tail", "valid", False, [1], [0.25], [1], [0]))
    trail.rows(Block(1, "tail", "valid_time", True, [1], [0.25], [1], [0]))
    absent, loss, valid = read(trail).marks
    assert absent.flags == ABSENT
    assert [(each.phase, bits_float(each.value)) for each in (loss, valid)] == [("step", 0.5), ("tail", 0.25)]


def writes() -> int:
    """How many system calls of this process have written so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["syscw"])


def test_a_step_is_written_by_one_call(trail: Trail) -> None:
    walk(trail, 1, 2)
    before = writes()
    walk(trail, 3, 100, names=5)
    assert writes() - before == 98
    assert read(trail).last == 100


def test_a_large_file_makes_way_for_a_new_one(
    trail: Trail, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has lies beside the new one, and nothing of what lay before."""
    monkeypatch.setattr("everstep.record.trail.ENOUGH", 4_000)
    walk(trail, 1, 50)
    trail.boundary()
    trail.batch(51, "train", 0, 0, 51)
    walk(trail, 51, 99)
    content = read(trail)
    assert (content.whole, content.last) == (0, 99)
    assert [m.step for m in content.marks if m.phase == "step"] == list(range(1, 100))
    trail.boundary()
    walk(trail, 100, 101)
    content = read(trail)
    assert (content.whole, content.marks[0].step, newest_step(trail.path.parents[1], 1)) == (50, 51, 101)
    assert len(list(trail.path.parent.iterdir())) == 2
    for file in trail.path.parent.glob("*.earlier.trail"):
        file.unlink()
    assert (read(trail).whole, read(trail).marks[0].step) == (99, 100)
    assert not warnings


@pytest.mark.parametrize("point", ["create", "write", "rename"])
@pytest.mark.parametrize("code", ["ENOSPC", "EROFS"])
def test_a_disk_that_refuses_it_is_said_once_and_training_goes_on(
    tmp_path: Path, warnings: list[str], code: str, point: str
) -> None:
    (tmp_path / "journal").mkdir()
    hazard.arm(f"{code}:trail.{point}:1-2")
    trail = Trail(tmp_path, 1, 0, is_wall, warnings.append)
    walk(trail, 1, 3)
    trail.rows(Block(1, "tail", "valid", False, [1], [0.25], [1], [0]))
    trail.mark(3, "pass", "train")
    trail.boundary()
    assert len(warnings) == 1 and "the results of steps do not survive a kill" in warnings[0]
    assert read_trail(trail.path) is None
    trail.boundary()  # the disk has room again
    walk(trail, 4, 5)
    trail.close()
    content = read(trail)
    assert (content.whole, content.last, len(content.marks)) == (3, 5, 4)
    assert len(warnings) == 1


def test_after_a_write_that_failed_later_steps_are_written_again(trail: Trail, warnings: list[str]) -> None:
    walk(trail, 1, 3)
    hazard.arm("ENOSPC:trail.write:1")
    walk(trail, 4, 6)
    content = read(trail)
    assert (content.whole, content.last, [mark.step for mark in content.marks[6:]]) == (4, 6, [5, 5, 6, 6])
    assert len(warnings) == 1 and "the disk is full: free space" in warnings[0]


def test_a_damaged_file_says_no_more_than_its_whole_frames(trail: Trail) -> None:
    walk(trail, 1, 5)
    trail.close()
    whole, content = trail.path.read_bytes(), read(trail)
    damaged = [whole[:cut] for cut in range(0, len(whole), 7)]
    for bit in range(len(whole) * 8):
        harmed = bytearray(whole)
        harmed[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(harmed))
    for data in damaged:
        trail.path.write_bytes(data)
        left = read_trail(trail.path)
        if left is not None:
            assert left.whole == 0 and left.last < 5
            assert left.marks == [mark for mark in content.marks if mark.step <= left.last]
    trail.path.unlink()
    assert read_trail(trail.path) is None
    trail.path.mkdir()
    assert read_trail(trail.path) is None


@pytest.mark.parametrize("text", [None, b"7", b'["a"]', b"[" * 30_000, b"\xff"])
def test_a_forged_file_is_not_read_as_a_trail(trail: Trail, text: bytes | None) -> None:
    walk(trail, 1, 1)
    trail.close()
    last = 1 if text else 1 << 62  # steps that the file has no room for
    records = BITS.pack(0, 0, 0, len(text), 1, 0, KEY) + text if text else b""
    bodies = [struct.pack("=3Q", 0, 0, 0), struct.pack("=3Q", last, 0, len(records)) + records]
    frames = [struct.pack("=Q", xxhash.xxh3_64_intdigest(body)) + body for body in bodies]
    trail.path.write_bytes(MAGIC + b"".join(frames))
    assert last_step(trail.path) == last and read_trail(trail.path) is None


def test_closing_a_trail_releases_the_file(trail: Trail) -> None:
    assert left_open(trail.path.parent)
    trail.close()
    trail.close()
    assert not left_open(trail.path.parent)


def test_values_of_one_name_are_folded_as_the_journal_folds_them(trail: Trail) -> None:
    from everstep.record.step_comparison import _folded

    values = [0.1, 0.2, 0.7]
    trail.step(1, 1, [(1, "loss", value) for value in values], {"loss": (1, 0.3, 2)})
    ((key, row),) = _folded(read(trail).marks)
    assert key == (1, 1, "step", "loss", 0)
    assert row == (int(np.float64((0.3 + 0.1 + 0.2 + 0.7) / 5).view(np.uint64)), 5)
