"""An exception that ends a run leaves a page in `failures/`; what else lies there harms nobody."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from everstep.cli.group import commands
from everstep.errors import Interrupted
from everstep.record import FailurePages, RunJournal, failures
from everstep.record.pages import KEPT
from everstep.testing import armed
from tiny_runs import Tiny


def fail_at(step: int, error: BaseException) -> Any:
    def inside(loop: Any, now: int) -> None:
        if now == step:
            raise error

    return inside


def failing(run_dir: Path, error: BaseException) -> Tiny:
    tiny = Tiny(run_dir, max_epoch=2)
    with pytest.raises(type(error)):
        tiny.train(fail_at(3, error))
    return tiny


def shown(run_dir: Path, *options: str) -> str:
    return CliRunner().invoke(commands, ["show", str(run_dir), *options], catch_exceptions=False).output


def test_an_exception_leaves_a_page_with_its_traceback(tmp_path: Path) -> None:
    failing(tmp_path, ValueError("of https://me:secret@host/data"))
    failing(tmp_path, KeyError("again"))
    first, second = failures(tmp_path)
    assert (first.kind, first.segment, first.rank, first.step, first.epoch) == ("error", 1, 0, 2, 1)
    assert (first.cause, first.pid) == (None, os.getpid())
    assert first.what.startswith("ValueError: of https://") and "secret" not in str(first)
    assert first.lines[0] == "Traceback (most recent call last):" and "secret" not in "".join(first.lines)
    assert any("in fail_at" in line or "in inside" in line for line in first.lines)
    assert (second.segment, second.what) == (2, "KeyError: 'again'")
    assert [each["what"] for each in json.loads(shown(tmp_path, "--json"))["failures"]] == [
        first.what,
        second.what,
    ]
    assert "KeyError: 'again'" in shown(tmp_path).partition("failures\n")[2]


def test_a_planned_end_leaves_no_page(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        Tiny(tmp_path, max_epoch=1).train(
            lambda loop, step: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None
        )
    Tiny(tmp_path, max_epoch=1).train()
    assert failures(tmp_path) == [] and not (tmp_path / "failures").exists()
    (left,) = RunJournal(tmp_path).events("interrupted", valid=False)
    assert (left.data["status"], left.data["reason"]) == (143, "SIGTERM")
    assert "failures" not in shown(tmp_path)


def test_a_full_disk_does_not_hide_the_error(tmp_path: Path) -> None:
    with armed("ENOSPC:failures.write:1"):
        tiny = failing(tmp_path, ValueError("the first"))
    assert failures(tmp_path) == [] and list((tmp_path / "failures").iterdir()) == []
    assert tiny.loop.ending is not None
    (warning,) = tiny.loop.ending.warnings
    assert "could not be written" in warning and "ValueError: the first" in warning


def test_the_newest_pages_of_each_rank_stay_and_a_page_of_a_deep_recursion_is_small(tmp_path: Path) -> None:
    lines = [f"{number}: {'x' * 1000}" for number in range(10_000)]
    path = FailurePages(tmp_path, 1, rank=0).write("error", "deep", lines, step=0, epoch=0)
    pages = FailurePages(tmp_path, 2, rank=1)
    for number in range(KEPT + 2):
        pages.write("hang", str(number), [], step=number, epoch=0)
    page, *others = failures(tmp_path)
    assert path.stat().st_size < 400_000 and (page.lines[0], page.lines[-1]) == (lines[0], lines[-1])
    assert [page.what for page in others] == [*map(str, range(2, KEPT + 2))]


STRANGERS: dict[str, Any] = {
    "text": b"not JSON",
    "huge": b" " * (2 << 20),
    "another time": {"time": 1e300},
    "another step": {"step": "3"},
    "lines that are none": {"lines": [{}]},
}


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("content", STRANGERS.values(), ids=STRANGERS.keys())
def test_what_is_no_page_is_passed_over(tmp_path: Path, content: Any) -> None:
    failing(tmp_path, ValueError("real"))
    (page,) = (tmp_path / "failures").iterdir()
    if isinstance(content, dict):
        content = json.dumps({**json.loads(page.read_text()), **content}).encode()
    (page.parent / "segment-0001-rank-0-error-002.json").write_bytes(content)
    os.mkfifo(page.parent / "segment-0001-rank-0-error-003.json")
    (page.parent / "notes.txt").write_text("mine")
    assert [failure.what for failure in failures(tmp_path)] == ["ValueError: real"]
    assert "ValueError: real" in shown(tmp_path)
