"""Files written whole: the old content or the new one, and nothing left beside them."""

import os

import pytest

from everstep import durable
from everstep.testing import armed


@pytest.mark.parametrize("point", ["open", "write", "fsync", "rename", "fsync_folder"])
def test_a_refused_write_leaves_the_old_file_or_the_new_one(tmp_path, point):
    path = tmp_path / "file"
    durable.write_whole(path, b"old", "room")
    with armed(f"ENOSPC:room.{point}:1"), pytest.raises(OSError, match="No space left"):
        durable.write_whole(path, b"new", "room")
    assert path.read_bytes() == (b"new" if point == "fsync_folder" else b"old")
    assert os.listdir(tmp_path) == ["file"]


def test_a_name_that_is_taken_can_be_left_alone(tmp_path):
    path = tmp_path / "file"
    for data in (b"first", b"second"):
        durable.write_whole(path, data, "room", replace=False)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_leftover_under_our_own_process_id_is_in_nobodys_way(tmp_path):
    path = tmp_path / "file"
    durable.temporary(path).write_bytes(b"half")
    durable.write_whole(path, b"whole", "room")
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["file"]
