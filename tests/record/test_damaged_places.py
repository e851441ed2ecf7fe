"""Whatever stands in the place of a run's files: it heals with a sentence, or is one error with a remedy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from befalling import becomes_file, is_gone

import everstep
from everstep import Every
from everstep.checkpoint import retire_others
from everstep.durable import remedy
from everstep.errors import CheckpointError, RunLockedError
from everstep.record import RunDir, RunLock
from everstep.testing import armed
from tiny_runs import Tiny


def test_every_parent_that_is_made_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def watched(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    RunDir.open(tmp_path / "a" / "b" / "run")
    assert synced >= {str(tmp_path / name) for name in ("", "a", "a/b", "a/b/run")}
    synced.clear()
    (tmp_path / "made").mkdir()
    RunDir.open(tmp_path / "made")
    assert str(tmp_path) in synced


@pytest.mark.parametrize(
    "note",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"started": "noon"}', b'{"started": NaN}',
        b'{"started": 1e300, "pid": {}}', b'{"pid": ' + b"9" * 300 + b"}", b'{"started": [1], "host": ["a"]}',
    ],
)  # fmt: skip
def test_a_damaged_note_of_the_lock_is_left_out(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "lock.json").write_bytes(note)
    lock = RunLock(tmp_path)
    told = lock.acquire()
    assert told is not None and told.startswith("took over the run from process ") and len(told) < 300
    assert json.loads((tmp_path / "lock.json").read_bytes())["pid"] == os.getpid()
    lock.release()


WORDS = {
    "ENOSPC": "free space", "EDQUOT": "raise the quota", "EROFS": "remount it", "ESTALE": "mount it again",
    "EACCES": "change its permissions", "EIO": "move the run to another disk", "EFBIG": "ulimit -f",
    "ENAMETOOLONG": "choose shorter names", "EMFILE": "ulimit -n",
}  # fmt: skip


def test_each_error_of_the_disk_has_its_own_remedy() -> None:
    texts = {name: remedy(OSError(getattr(errno, name), "...")) for name in WORDS}
    for name, text in texts.items():
        assert [each for each, words in WORDS.items() if words in text and each != "ENOSPC"] in ([name], [])
        assert WORDS[name] in text


def test_a_journal_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    program = Tiny(tmp_path, max_epoch=1)
    with armed("EIO:journal.write:1-"), pytest.raises(CheckpointError) as last:
        program.train()
    assert "free" not in str(last.value) and "move the run to another disk" in str(last.value)
    assert not any("ree space" in line for line in program.lines)


def test_a_pipe_with_the_name_of_best_weights_holds_nobody_up(tmp_path: Path) -> None:
    """Old best weights go while the run trains; what has become none of them stays."""
    pipe = tmp_path / "best" / "valid_loss" / "epoch-0000-step-00000001"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)

    def late(*_: Any) -> None:
        raise AssertionError("it waits for somebody to write into the pipe")

    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    try:
        retire_others(pipe.parent, (), top=tmp_path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert pipe.is_fifo()


def while_training(run: Path, harm: Callable[[Path], object], **more: Any) -> Tiny:
    """A run to which this is done at its sixth step of twelve."""
    program = Tiny(run, max_epoch=3, services=[everstep.Checkpoints(Every(steps=1))], **more)
    program.train(inside=lambda loop, step: harm(run) if step == 6 else None)
    return program


def test_a_lock_that_is_removed_while_the_run_trains_is_made_again(tmp_path: Path) -> None:
    lock, before = tmp_path / "run" / "lock", 0

    def harm(run: Path) -> None:
        nonlocal before
        before = lock.stat().st_ino
        is_gone(lock)

    program = while_training(tmp_path / "run", harm)
    assert lock.stat().st_ino != before  # the file that was removed was open until the new one was locked
    assert program.loop.ending.finished


def test_another_process_that_came_in_without_the_lock_ends_this_one(tmp_path: Path) -> None:
    """Two processes never write into one run: the one whose lock is gone sees that before its next save."""

    with pytest.raises(RunLockedError, match="another process has entered the run: this one saves no more"):
        while_training(tmp_path / "run", lambda run: becomes_file(run / "lock"))
    assert not list((tmp_path / "run" / "checkpoints").glob("*-00000007"))


@pytest.mark.campaign("long")
def test_the_file_of_a_lost_segment_may_be_brought_back(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    for epochs in (1, 2):
        Tiny(run, max_epoch=epochs).train()
    (run / "journal").rename(away)
    third = Tiny(run, max_epoch=3).train()
    assert any("restore the file" in line for line in third.lines)
    for path in away.glob("*.evj"):
        assert not (run / "journal" / path.name).exists()
        shutil.copy(path, run / "journal")
    assert third.result() == Tiny(tmp_path / "whole", max_epoch=3).train().result()
