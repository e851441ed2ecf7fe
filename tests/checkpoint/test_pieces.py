"""Pieces that ranks report for one array: together they must be the array, each element once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everstep.checkpoint import CheckpointName, Commit, Store, read_checkpoint
from everstep.checkpoint.pieces import described
from everstep.contracts.state import HostArray, Region
from everstep.errors import CheckpointError
from everstep.state import digest, encode

Box = tuple[tuple[int, ...], tuple[int, ...]]


def reported(whole: tuple[int, ...], boxes: list[Box]) -> None:
    first = boxes[0][1]
    region = Region(boxes[0][0], first, whole, (0,))
    array = HostArray("F32", first, np.zeros(4 * int(np.prod(first)), np.uint8), "torch", region=region)
    pieces = [
        {"w": {"file": f"pieces-{rank:05d}.safetensors", "key": "w", "offset": offset, "shape": shape}}
        for rank, (offset, shape) in enumerate(boxes)
    ]
    described({"w": array}, pieces)


@pytest.mark.parametrize(
    ("whole", "boxes"),
    [
        ((4, 2), [((0, 0), (4, 2))]),
        ((5, 2), [((0, 0), (3, 2)), ((3, 0), (2, 2)), ((5, 0), (0, 2))]),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
        ((3, 3), [((1, 1), (1, 1)), ((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]),
        ((), [((), ())]),
    ],
)
def test_pieces_that_make_the_array_are_described(whole: tuple[int, ...], boxes: list[Box]) -> None:
    reported(whole, boxes)
    reported(whole, [boxes[0], *boxes[:0:-1]])


@pytest.mark.parametrize(
    ("whole", "boxes"),
    [
        ((4, 2), [((0, 0), (2, 2))]),
        ((4, 2), [((0, 0), (2, 2)), ((0, 0), (2, 2))]),  # the volume alone would be right
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))]),
        ((4, 4), [((0, 0), (3, 3)), ((2, 2), (2, 2)), ((3, 0), (1, 3))]),
        ((4, 2), [((0, 0), (2, 2)), ((3, 0), (2, 2))]),
        ((), [((), ()), ((), ())]),
    ],
)
def test_pieces_with_a_gap_or_an_overlap_are_refused(whole: tuple[int, ...], boxes: list[Box]) -> None:
    with pytest.raises(CheckpointError, match="do not hold the array 'w'"):
        reported(whole, boxes)


def test_a_checkpoint_of_which_a_rank_has_read_its_part_is_adopted_whole(tmp_path: Path) -> None:
    """A run of sharded ranks forks a run of one process: the writer holds a part of each array."""
    store, other = Store(tmp_path / "a", 1), Store(tmp_path / "b", 1)
    for each in (store, other):
        each.run_dir.mkdir()
    whole = np.arange(12, dtype=np.float32)
    encoded = encode({"user": {"w": whole}})
    name = store.commit(Commit(CheckpointName(1), encoded, digest(encoded), meta={})).name

    def half(name: str, shape: tuple[int, ...]) -> Region | None:
        return Region((0,), (6,), shape, (0,)) if name == "user/w" else None

    part = read_checkpoint(store.path(name), regions=half)
    assert part.common.arrays["user/w"].data.nbytes == 24
    other.adopt(part)
    assert read_checkpoint(other.path(name)).arrays["user/w"].data.tobytes() == whole.tobytes()
