"""The disk is tried before training, and leftovers of dead processes go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_samples import at, commit, resumed, seed_of, store_in

from everstep import hazard
from everstep.checkpoint import forecast, trial_write
from everstep.errors import RunDirError


def test_too_little_space_names_path_needed_and_free(tmp_path: Path) -> None:
    forecast(tmp_path, 1000)
    with pytest.raises(
        RunDirError, match=r"need 1,000,000,000,000,000,000 bytes, [\d,]+ are free .* free space"
    ) as e:
        forecast(tmp_path, 10**18)
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("ENOSPC", "the disk is full: free space"),
        ("EDQUOT", "quota"),
        ("EROFS", "read-only: remount it"),
        ("EACCES", "change its permissions"),
        ("EIO", "choose another directory"),
    ],
)
@pytest.mark.parametrize("point", ["open", "write", "fsync", "unlink", "fsync_folder"])
def test_a_bad_disk_is_found_before_training(tmp_path: Path, error: str, remedy: str, point: str) -> None:
    hazard.arm(f"{error}:checkpoint.{point}:1")
    try:
        with pytest.raises(RunDirError, match=remedy):
            trial_write(tmp_path)
    finally:
        hazard.arm(None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_is_a_file_or_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="a file has the name of a folder: move it away"):
        trial_write(tmp_path / "file")
    with pytest.raises(RunDirError, match="deleted, moved or unmounted: bring it back"):
        trial_write(tmp_path / "missing")


def test_a_directory_without_permission(read_only_dir: Path) -> None:
    with pytest.raises(RunDirError, match="permissions"):
        trial_write(read_only_dir)


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    commit(store, at(10))
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    folders = {
        "checkpoints": {
            dead.stdout.strip(): False,
            str(os.getpid()): False,
            str(os.getppid()): True,
            "x": False,
        },
        "best/loss": {dead.stdout.strip(): False, str(os.getppid()): True},
    }
    stays = set()
    for folder, pids in folders.items():
        for pid, alive in pids.items():
            left = tmp_path / folder / f".tmp-{at(20)}-{pid}"
            left.mkdir(parents=True)
            (left / "arrays.safetensors").touch()
            stays |= {left} if alive else set()
    for name in ("checkpoint", "lock.json", "run.json"):
        (tmp_path / f".tmp-{name}-{dead.stdout.strip()}").touch()
    store.clean()
    assert set(tmp_path.rglob(".tmp-*")) == stays
    assert seed_of(resumed(tmp_path)) == 10
