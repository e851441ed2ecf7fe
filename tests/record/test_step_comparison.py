"""The trail, which survives SIGKILL, and the comparison of steps that run again; digests of batches."""

from __future__ import annotations

import math
import os
import pickle
import struct
from copy import deepcopy
from logging import getLogger
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from everstep import hazard, record
from everstep.metrics.collector import is_wall
from everstep.record import Block, Journal, Position, RunJournal, StepComparison, Trail, batch_digest
from everstep.record.journal_format import bits_float
from everstep.record.trail import TrailContent, pack_line
from waiting import left_open

DEVICE = object()
STEPS: list[Any] = [([7, 8], [0.5, 0.25]), ([9], [0.125]), ([10], [])]
"""Batches (digests) and values of loss of each step."""


ODD: list[Any] = [([], {"loss": value, "accuracy": -0.0}) for value in (0.3, math.nan, math.inf)]


def start(run_dir: Path, segment: int = 1, first: int = 0) -> Trail:
    (run_dir / "run.json").touch()
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


def again(run_dir: Path, before: list[Any], now: list[Any], first: int = 0) -> StepComparison:
    """Steps that were killed, and what a start finds that executes them again."""
    execute(start(run_dir, first=first), before, first=first)
    comparison, trail = compared(run_dir, first)
    execute(trail, now, comparison, first)
    return comparison


def compared(run_dir, first=0, segment=2, position=Position(1, 0), tail=False):  # noqa: B008
    """The comparison of a further start with the steps before it, and its trail."""
    earlier = record.read_earlier_steps(RunJournal(run_dir), position, first, tail=tail)
    comparison, trail = StepComparison(earlier), start(run_dir, segment, first)
    trail.compare = comparison.note
    return comparison, trail


def nan(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


QUIET, OTHER = nan(0x7FF8000000000000), nan(0x7FF8000000000001)


HALF = "2 batch digests and 1 value of loss equal, 1 batch digest and 2 values of loss not compared"


@pytest.mark.parametrize(("before", "now", "said"), [
    (STEPS, STEPS, "3 steps executed again: 4 batch digests and 2 values of loss equal"),
    (ODD, ODD, "3 steps executed again: 6 values of 2 metrics equal"),
    ([([None], [DEVICE]), ([9], [0.125]), ([10], [0.5, DEVICE])],
     [([7], [0.3]), ([9], [0.125]), ([10], [0.5, 0.5])], f"3 steps executed again: {HALF}"),
    # a metric that is new in the program
    (STEPS[:1], [([7, 8], {"norm": 2.0})],
     "1 step executed again: 2 batch digests equal, 1 value of norm not compared"),
    ([([7], []), ([], [])], [([7], []), ([], [])],
     "2 steps executed again: 1 batch digest equal, 1 step left nothing to compare"),
    ([([1], {"a_time": 0.1})], [([1], {"a_time": 0.2})], "1 step executed again: 1 batch digest equal"),
])  # fmt: skip
def test_equal_steps_verify_a_resume(tmp_path: Path, before: list[Any], now: list[Any], said: str) -> None:
    comparison = again(tmp_path, before, now)
    comparison.end()
    assert comparison.report() == f"resume verified: {said}"


@pytest.mark.parametrize(("now", "what"), [
    ([([7, 9], [0.375] * 2)], "1 batch of train was the batch with digest 0000000000000008 and is the"),
    ([([7], [0.5, 0.25])], "1 batch of train was drawn and is not drawn now"),
    ([([7, 8, 9], [0.5, 0.25])], "1 batch of train was not drawn and is drawn now"),
    ([([7, 8], [])], None),  # a metric that is collected no more
    ([STEPS[0], ([9], [0.125]), ([10], [1.0])], "3 loss was missing and is 1.0 now"),
    ([STEPS[0], ([9], []), ([10], [])], "2 loss was 0.125 and is missing now"),
    ([([7, 8], [0.375])], "1 loss was 0.375 (of 2 values) and is 0.375 (of 1 values) now"),
])  # fmt: skip
def test_a_batch_or_a_row_more_or_less_is_a_difference(tmp_path: Path, now: Any, what: str | None) -> None:
    comparison = again(tmp_path, STEPS, now)
    comparison.end()
    if what is None or comparison.difference is None:
        assert what is comparison.difference is None
    else:
        assert comparison.report().startswith(f"resume differs: step {what}")
        assert (comparison.difference.component == "samples") == ("batch" in what)


def test_zeros_of_other_sign_and_nans_of_other_bits_differ(tmp_path: Path) -> None:
    before, now = ([([], [each]) for each in v] for v in ((QUIET, QUIET, 0.0), (QUIET, OTHER, -0.0)))
    comparison = again(tmp_path, before, now)
    assert (comparison.equal.total(), comparison.differing) == (1, 2)
    assert "was nan (bits 7ff8000000000000) and is nan (bits 7ff8000000000001) now" in comparison.report()


def test_the_first_difference_is_the_one_with_the_lowest_step(tmp_path: Path) -> None:
    before = [([], {"loss": 0.1}), ([], {"loss": 0.2, "other": 0.5})]
    comparison = again(tmp_path, before, [([], {"loss": 0.3}), ([], {"loss": 0.25, "other": 0.5})], first=6)
    report = comparison.report()
    assert report == "resume differs: step 7 loss was 0.1 and is 0.3 now (2 of 3 compared differ)"
    assert comparison.latest is not None and comparison.latest.step == 8


ENDS, LASTS = {"ends": {("train", 0): 15}}, {"lasts": {("train", 0): 20}}


@pytest.mark.parametrize(("earlier", "now", "what"), [
    (ENDS, (13, "pass"), "was at its end after step 15 and is at its end now"),
    (ENDS, (15, "pass"), None),
    (ENDS, (16, "batch"), "at its end after step 15 and is not at its end now"),
    (LASTS, (13, "pass"), "was not at its end until step 20 and is at its end now"),
    (LASTS, (20, "pass"), None),
])  # fmt: skip
def test_a_pass_that_ends_elsewhere_is_a_difference(earlier: Any, now: Any, what: str | None) -> None:
    comparison = StepComparison(record.EarlierSteps(10, 20, **deepcopy(earlier)))  # it takes from them
    comparison.note((0, *now, "train", 0), (0, 1))
    assert (comparison.difference is None) == (what is None)
    assert what is None or what in comparison.report()


def test_the_state_in_a_snapshot_is_compared(tmp_path: Path) -> None:
    copies = {"step/random state": 5, "step/model": 5, "epoch/random state": 6}
    trail = start(tmp_path)
    for name, digest in copies.items():
        trail.note(1, "copy", name, digest)
    trail.step(1, 1, [], {})
    comparison = StepComparison(record.read_earlier_steps(RunJournal(tmp_path), Position(1, 0), 0))
    for name, digest in {**copies, "epoch/random state": 7, "step/new": 1}.items():
        comparison.note((0, 1, "copy", name, 0), (digest, 1))
    assert (comparison.equal["random state"], comparison.equal["state digest"]) == (1, 1)
    assert "step 1 random state was 0000000000000006 and is 0000000000000007 now" in comparison.report()


@pytest.mark.parametrize("phase", ["head", "tail"])
def test_rows_of_the_tail_are_compared_and_those_of_the_head_are_not(tmp_path: Path, phase: str) -> None:
    """At the checkpoint, where the tail is repeated, and at the last step, behind which a tail may follow."""
    trail = start(tmp_path)
    execute(trail, STEPS[:2])
    for step in (1, 2):
        trail.rows(Block(1, phase, "valid", False, [step], [0.1], [1], [0]))
    comparison, trail = compared(tmp_path, 1, tail=True)
    execute(trail, STEPS[1:2], comparison, first=1)
    assert comparison.done == (phase == "head")
    for step in (1, 2):
        trail.rows(Block(1, phase, "valid", False, [step], [0.1 * step], [1], [0]))
    comparison.reached(2)
    assert comparison.done and comparison.differing == (phase == "tail")
    assert comparison.equal["valid"] == (phase == "tail")


def test_it_ends_beyond_the_last_step_and_the_first_execution_counts(tmp_path: Path) -> None:
    execute(start(tmp_path), [([], [1.0]), ([], {"loss": 2.0, "gone": 1.0})])
    execute(start(tmp_path, 2), [([], [1.0]), ([], [3.0])])
    comparison, trail = compared(tmp_path, segment=3)
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
    comparison, trail = compared(tmp_path, 3, position=position)
    execute(trail, [([0], [0.125]), ([1], [2.0]), ([2], [4.0])], comparison, first=3)
    assert (comparison.done, comparison.steps, comparison.equal["loss"]) == (True, 3, 2)
    assert comparison.report().startswith("resume differs: step 6 loss was 3.0 and is 4.0 now (1 of 4 ")


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
    content = record.read_trail(trail.path)
    assert content is not None and content.last == record.last_step(trail.path)
    return content


def values(content: TrailContent, phase: str = "step") -> list[float | None]:
    return [None if m.value is None else bits_float(m.value) for m in content.marks if m.phase == phase]


def test_it_is_read_while_it_is_written(trail: Trail) -> None:
    walk(trail, 1, 3)
    trail.note(4, "batch", "train", 4)  # its step is not complete
    content = read(trail)
    assert (content.full_after, content.last, record.newest_step(trail.path.parents[1], 1)) == (0, 3, 3)
    assert [m[:3] for m in content.marks[:2]] == [(1, "batch", "train"), (1, "step", "m0")]
    assert values(content) == [1.0, 2.0, 3.0] and left_open(trail.path.parent)
    trail.close()
    trail.close()
    assert not left_open(trail.path.parent)


def test_values_on_a_device_are_marked_and_noted_when_they_are_read(trail: Trail) -> None:
    trail.step(1, 1, [(1, "loss", object()), (1, "step_time", 0.1)], {})
    for phase, name, value in (("step", "loss", 0.5), ("tail", "valid", 0.25), ("tail", "valid_time", 0.25)):
        trail.rows(Block(1, phase, name, name == "valid_time", [1], [value], [1], [0]))
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
    assert writes() - before == 98 and read(trail).last == 100


def test_a_commit_begins_a_large_file_anew_with_what_follows(trail: Trail, monkeypatch: Any) -> None:
    """It is a trail at each instant: a kill may come between two calls."""
    monkeypatch.setattr("everstep.record.trail.ENOUGH", 2_000)
    walk(trail, 1, 50)
    trail.copied(50)
    trail.rows(Block(1, "tail", "valid", False, [50], [0.5], [1], [0]))
    trail.copied(50)  # behind the tail, as at the end of data without a length
    walk(trail, 51, 53)
    trail.committed(40)  # of another copy
    assert read(trail).full_after == 0
    truncate, seen = os.ftruncate, list[TrailContent]()

    def watched(descriptor: int, size: int) -> None:
        seen.append(read(trail))
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", watched)
    trail.committed(50)
    walk(trail, 54, 55)
    content = read(trail)
    assert (seen[0].full_after, values(seen[0])) == (50, [51.0, 52.0, 53.0])
    assert (content.full_after, values(content)) == (50, [51.0, 52.0, 53.0, 54.0, 55.0])
    assert values(content, "tail") == [0.5]
    trail.copied(55)
    trail.committed(55)
    assert read(trail).full_after == 50


@pytest.mark.parametrize("point", ["create", "write"])
def test_a_disk_that_refuses_it_is_said_once(tmp_path: Path, warnings: Any, point: str) -> None:
    (tmp_path / "journal").mkdir()
    hazard.arm(f"ENOSPC:trail.{point}:1-4")
    trail = Trail(tmp_path, 1, 0, is_wall, warnings.append)
    walk(trail, 1, 3)
    assert len(warnings) == 1 and "the results of steps do not survive a kill" in warnings[0]
    assert "the disk is full: free space" in warnings[0] and record.read_trail(trail.path) is None
    hazard.arm(None)
    trail.copied(3)
    walk(trail, 4, 5)
    assert (read(trail).full_after, read(trail).last, values(read(trail))) == (3, 5, [4.0, 5.0])
    hazard.arm("EROFS:trail.write:1")  # later steps are written again
    walk(trail, 6, 8)
    content = read(trail)
    assert (content.full_after, content.last, values(content)[2:]) == (6, 8, [7.0, 8.0])
    assert len(warnings) == 1


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
        left = record.read_trail(trail.path)
        if left is not None:
            assert left.full_after == 0 and left.last < 5
            assert left.marks == [mark for mark in content.marks if mark.step <= left.last]
    trail.path.unlink()
    assert record.read_trail(trail.path) is None
    trail.path.mkdir()
    assert record.read_trail(trail.path) is None


@pytest.mark.parametrize("text", [
    f"[{1 << 62},0,[]]",  # steps that the file has no room for
    "7", "[1]", '["1",0,[]]', "[1,0,7]", "[1,0,[[1]]]", "[" * 30_000, "\\", "[true,0,[]]",
    '[1,0,[[1,"step","m",0,0,-1,1]]]', f'[1,0,[[1,"step","m",0,0,{1 << 64},1]]]',
    '[1,0,[[-1,"step","m",0,0,1,1]]]', '[1,0,[[1,["x"],"m",0,0,1,1]]]', '[1,0,[[1,"x","m",0,0,0.5,1]]]'
])  # fmt: skip
def test_a_forged_file_is_not_read_as_a_trail(trail: Trail, text: str) -> None:
    trail.path.write_bytes(pack_line(text.encode()))
    assert record.read_trail(trail.path) is None
    record.last_step(trail.path)


def test_a_value_that_was_on_the_host_is_noted_once(trail: Trail) -> None:
    """Else a resume would find it twice, and the second time where nothing is left to compare it with."""
    noted: list[tuple[int, bool]] = []
    trail.compare = lambda key, value: noted.append((key[1], value is not None))
    trail.step(1, 1, [(1, "loss", 0.5)], {})
    trail.step(2, 1, [(1, "loss", 0.5), (2, "loss", object())], {})
    trail.rows(Block(1, "step", "loss", False, [1, 2], [0.5, 0.25], [1, 1], [0, 0]))
    assert noted == [(1, True), (2, False), (2, True)]


@pytest.mark.parametrize("count", [1, 9, 5000, 40_000])
def test_how_an_array_lies_in_memory_makes_no_difference(count: int) -> None:
    for dtype in ("u1", "i2", "f4", "f8", "c16", "?"):
        values = np.random.default_rng(count).integers(0, 2, (count, 6)).astype(dtype)
        for strided in (values[:, ::2], values.T, values[::-1]):
            found = batch_digest(strided, 0)
            from_worker = pickle.loads(pickle.dumps(strided))
            assert found == batch_digest(from_worker, 0) == batch_digest(np.ascontiguousarray(strided), 0)
            assert found is not None


@pytest.mark.parametrize("count", [10, 5000, 400_000])
@pytest.mark.parametrize("contiguous", [True, False])
def test_values_at_either_end_and_many_between_count(count: int, contiguous: bool) -> None:
    values = np.zeros(2 * count, np.float32)[:: 1 if contiguous else 2]
    before = batch_digest(values, 0)
    for at in (0, -1, slice(count // 3, count // 2)):
        changed = values.copy()
        changed[at] = 1.0
        assert batch_digest(changed, 0) != before


def test_each_element_of_a_small_array_counts_and_dicts_are_equal_in_any_order() -> None:
    values = torch.zeros(128, 128)  # 64 KiB, the largest
    digests = {batch_digest((values, 1), 0)}
    for place in range(0, values.numel(), 97):
        values.view(-1)[place] += 1.0
        digests.add(batch_digest((values, 1), 0))
    assert len(digests) == 1 + len(range(0, values.numel(), 97))
    # as where keys were taken out of a set of texts: another order in each process
    assert batch_digest({"x": 1, "y": 2}, 0) == batch_digest({"y": 2, "x": 1}, 0)
    assert batch_digest({"x": 1, "y": 2}, 0) != batch_digest({"y": 1, "x": 2}, 0)


def test_small_batches_that_differ_in_form_have_different_digests() -> None:
    ones, row = torch.ones(2, 3), torch.ones(6)
    same_bytes = [ones, ones.view(3, 2), row, row.view(torch.int32), row.view(torch.int16)]
    arrays = [*same_bytes, torch.ones(3), torch.ones(0), torch.zeros(6), torch.ones(6, dtype=torch.float64)]
    forms = [
        *(lambda x: x, lambda x: (x,), lambda x: [[x]], lambda x: [[x], []], lambda x: (x, x)),
        *(lambda x: ((x, x),), lambda x: (x, [x]), lambda x: [x, 1], lambda x: [1, x]),
        *(lambda x: {"x": x}, lambda x: {"y": x}, lambda x: {"x": x, "y": x}, lambda x: {"x": (x,)}),
    ]
    digests = [batch_digest(form(array), 0) for form in forms for array in arrays]
    assert None not in digests and len(set(digests)) == len(digests)


class Marked(torch.Tensor):
    """As MONAI's and torchvision's: its elements lie in its memory."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise AssertionError("code of the batch's own class has run")


@pytest.mark.parametrize("side", [2, 50, 400])
def test_a_tensor_has_the_digest_of_its_values_whatever_holds_them(side: int) -> None:
    values = torch.arange(side * side, dtype=torch.float32).view(side, side)
    found = batch_digest([values], 0)
    same = [
        values.numpy().copy(), torch.nn.Parameter(values), values.clone().requires_grad_(),
        values.t().contiguous().t(), torch.stack([values, values], dim=2)[:, :, 1],
        values.clone().share_memory_(), values.as_subclass(Marked),
    ]  # fmt: skip
    assert [batch_digest([each], 0) for each in same] == [found] * len(same)
    assert batch_digest([values.bfloat16()], 0) == batch_digest([values.bfloat16().view(torch.int16)], 0)


def test_tensors_whose_memory_has_other_values_or_is_elsewhere_are_left_out() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise AssertionError("code of the batch's own class has run")

    numbers, plain = torch.ones(2, 2, dtype=torch.complex64), torch.ones(2, 2)
    elsewhere = plain.to_sparse(), plain.to_mkldnn(), plain.to("meta"), plain.as_subclass(Own)
    for left_out in (numbers.conj(), numbers.conj().imag, *elsewhere):
        assert batch_digest([left_out], 0) is None
        assert batch_digest([left_out, plain], 0) == batch_digest([object(), plain], 0)
    assert batch_digest([numbers], 0) is not None


def test_of_an_object_the_arrays_in_its_attributes_count() -> None:
    """As of torch_geometric's Data: its batches had no digest, and others were not told."""

    def graph(value: float, **attributes: Any) -> Any:
        return SimpleNamespace(**attributes, store=SimpleNamespace(mapping={"x": torch.full((2,), value)}))

    found = batch_digest([graph(1.0)], 0)
    assert found not in (None, batch_digest([graph(2.0)], 0))
    same = graph(1.0, seconds=2.5, name="a"), graph(1.0, log=getLogger("a"), kind=int)
    for each in same:
        each.itself = each  # it ends
        assert batch_digest([each, 1], 0) == batch_digest([each, 1], 0) is not None
        del each.itself
        assert batch_digest([each], 0) == found
    assert batch_digest([SimpleNamespace(name="a")], 0) is None


def test_a_program_may_resize_its_batch_after_the_digest() -> None:
    for shape in ((4,), (4, 2)):
        for batch in (torch.ones(shape), torch.ones(shape).t(), torch.ones(200, 200)):
            assert batch_digest([batch], 0) is not None
            batch.resize_(500, 500)
