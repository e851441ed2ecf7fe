"""Twice as many starts or runs take twice the work, not four times: bytecodes are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from everstep.index.database import Database
from everstep.index.filters import parse_words
from everstep.index.run_queries import RunColumns
from everstep.index.shipping import sync
from everstep.record import Block, Journal, Position, RunDir, RunJournal
from everstep.record.step_comparison import read_earlier_steps
from tiny_runs import Tiny


def bytecodes(call: Callable[[], object]) -> int:
    """The number of bytecodes of everstep that a call executes."""
    count = 0

    def see(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "everstep" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def resume_after(folder: Path, starts: int, *, from_nothing: bool = False) -> Callable[[], object]:
    """A resume from a checkpoint after which many starts trained, but saved nothing."""
    Tiny(folder, max_epoch=1).train()
    parent = None if from_nothing else Position(1, RunJournal(folder).segments()[0].end)
    for number in range(2, starts + 2):
        journal = Journal.open(folder, number, parent, {})
        journal.append(Block(1, "step", "loss", False, [9], [0.5], [1], [0]))
        journal.close()

    def resume() -> None:
        journal = RunJournal(folder)
        read_earlier_steps(journal, parent, 4)
        assert not journal.meets(lambda facts: False, None, 4)

    return resume


def filter_of(folder: Path, runs: int) -> Callable[[], object]:
    for number in range(runs):
        run = RunDir.open(folder / f"run-{number}", seed=number)
        Journal.open(run.path, 1, None, {"config": {"lr": number}}).close()
    database = Database(folder / "everstep.db")
    sync(database, [folder])
    asked = parse_words("status=killed name!=run-1 config.lr<1000")
    return lambda: RunColumns(database).find(asked, ["step"])


@pytest.mark.parametrize("made", [resume_after, partial(resume_after, from_nothing=True), filter_of])
def test_work_grows_in_proportion(tmp_path: Path, made: Callable[[Path, int], Callable[[], object]]) -> None:
    few, many = (bytecodes(made(tmp_path / str(count), count)) for count in (30, 60))
    assert few > 1000 and many < 2.2 * few, (few, many)
