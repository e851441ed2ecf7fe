"""The trail: what steps found survives SIGKILL, in one write a step."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from everstep import hazard
from everstep.metrics.collector import is_wall
from everstep.record import Block, Trail, last_step, newest_step, read_trail
from everstep.record.journal_format import bits_float
from everstep.record.trail import TrailContent, packed
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
        trail.note(step, "batch", "train", step)
        trail.step(step, 1, [(step, f"m{i}", step + i / 64) for i in range(names)], {})


def read(trail: Trail) -> TrailContent:
    content = read_trail(trail.path)
    assert content is not None and content.last == last_step(trail.path)
    return content


def values(content: TrailContent, phase: str = "step") -> list[float | None]:
    return [None if m.value is None else bits_float(m.value) for m in content.marks if m.phase == phase]


def test_it_is_read_while_it_is_written(trail: Trail) -> None:
    walk(trail, 1, 3)
    trail.note(4, "batch", "train", 4)  # its step is not complete
    content = read(trail)
    assert (content.whole, content.last, newest_step(trail.path.parents[1], 1)) == (0, 3, 3)
    assert [m[:3] for m in content.marks[:2]] == [(1, "batch", "train"), (1, "step", "m0")]
    assert values(content) == [1.0, 2.0, 3.0]
    assert left_open(trail.path.parent)
    trail.close()
    trail.close()
    assert not left_open(trail.path.parent)


def test_values_on_a_device_are_marked_and_noted_when_they_are_read(trail: Trail) -> None:
    trail.step(1, 1, [(1, "loss", object()), (1, "step_time", 0.1)], {})
    for phase, name, wall, value in (
        ("step", "loss", False, 0.5),
        ("tail", "valid", False, 0.25),
        ("tail", "valid_time", True, 0.25),
    ):
        trail.rows(Block(1, phase, name, wall, [1], [value], [1], [0]))
    assert (values(read(trail)), values(read(trail), "tail")) == ([None, 0.5], [0.25])


def test_values_of_one_name_are_folded_as_the_journal_folds_them(trail: Trail) -> None:
    pending = [*((1, "loss", value) for value in (0.1, 0.2, 0.7)), (1, "zero", -0.0)]
    trail.step(1, 1, pending, {"loss": (1, 0.3, 2)})
    loss, zero = read(trail).marks
    assert (loss.value, loss.count) == (int(np.float64((0.3 + 0.1 + 0.2 + 0.7) / 5).view(np.uint64)), 5)
    assert (zero.value, zero.count) == (1 << 63, 1)


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


def test_a_commit_begins_a_large_file_anew_with_what_follows_its_copy(
    trail: Trail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a trail at each instant: a kill may come between two calls."""
    monkeypatch.setattr("everstep.record.trail.ENOUGH", 2_000)
    walk(trail, 1, 50)
    trail.copied(50)
    trail.rows(Block(1, "tail", "valid", False, [50], [0.5], [1], [0]))
    trail.copied(50)  # behind the tail, as at the end of data without a length
    walk(trail, 51, 53)
    trail.committed(40)  # of another copy
    assert read(trail).whole == 0
    truncate, seen = os.ftruncate, list[TrailContent]()

    def watched(descriptor: int, size: int) -> None:
        seen.append(read(trail))
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", watched)
    trail.committed(50)
    walk(trail, 54, 55)
    content = read(trail)
    assert (seen[0].whole, values(seen[0])) == (50, [51.0, 52.0, 53.0])
    assert (content.whole, values(content)) == (50, [51.0, 52.0, 53.0, 54.0, 55.0])
    assert values(content, "tail") == [0.5]
    trail.copied(55)
    trail.committed(55)
    assert read(trail).whole == 50


@pytest.mark.parametrize("point", ["create", "write"])
@pytest.mark.parametrize("code", ["ENOSPC", "EROFS"])
def test_a_disk_that_refuses_it_is_said_once_and_training_goes_on(
    tmp_path: Path, warnings: list[str], code: str, point: str
) -> None:
    (tmp_path / "journal").mkdir()
    hazard.arm(f"{code}:trail.{point}:1-4")
    trail = Trail(tmp_path, 1, 0, is_wall, warnings.append)
    walk(trail, 1, 3)
    assert len(warnings) == 1 and "the results of steps do not survive a kill" in warnings[0]
    assert read_trail(trail.path) is None
    hazard.arm(None)
    trail.copied(3)
    walk(trail, 4, 5)
    assert (read(trail).whole, read(trail).last, values(read(trail))) == (3, 5, [4.0, 5.0])
    assert len(warnings) == 1


def test_after_a_write_that_failed_later_steps_are_written_again(trail: Trail, warnings: list[str]) -> None:
    walk(trail, 1, 3)
    hazard.arm("ENOSPC:trail.write:1")
    walk(trail, 4, 6)
    content = read(trail)
    assert (content.whole, content.last, values(content)[3:]) == (4, 6, [5.0, 6.0])
    assert len(warnings) == 1 and "the disk is full: free space" in warnings[0]


def test_a_damaged_file_says_no_more_than_its_whole_frames(trail: Trail) -> None:
    walk(trail, 1, 5)
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


@pytest.mark.parametrize(
    "text",
    [
        f"[{1 << 62},0,[]]",  # steps that the file has no room for
        "7", "[1]", '["1",0,[]]', "[1,0,7]", "[1,0,[[1]]]", "[" * 30_000, "\\", "[true,0,[]]",
        '[1,0,[[1,"step","m",0,0,-1,1]]]', f'[1,0,[[1,"step","m",0,0,{1 << 64},1]]]',
        '[1,0,[[-1,"step","m",0,0,1,1]]]', '[1,0,[[1,["x"],"m",0,0,1,1]]]', '[1,0,[[1,"x","m",0,0,0.5,1]]]'
    ],
)  # fmt: skip
def test_a_forged_file_is_not_read_as_a_trail(trail: Trail, text: str) -> None:
    trail.path.write_bytes(packed(text.encode()))
    assert read_trail(trail.path) is None
    last_step(trail.path)


def test_a_value_that_was_on_the_host_is_noted_once(trail: Trail) -> None:
    """Else a resume would find it twice, and the second time where nothing is left to compare it with."""
    noted: list[tuple[int, bool]] = []
    trail.compare = lambda key, value: noted.append((key[1], value is not None))
    trail.step(1, 1, [(1, "loss", 0.5)], {})
    trail.step(2, 1, [(1, "loss", 0.5), (2, "loss", object())], {})
    trail.rows(Block(1, "step", "loss", False, [1, 2], [0.5, 0.25], [1, 1], [0, 0]))
    assert noted == [(1, True), (2, False), (2, True)]
