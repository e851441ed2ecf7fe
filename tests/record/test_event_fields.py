"""Events whose fields have wrong types are damaged: whoever reads a journal never meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import ConfigError, JournalError
from everstep.record import Journal, RunDir, RunJournal, read_segment
from everstep.record.event_fields import DEEPEST, levels
from everstep.record.journal_format import EVENT, pack_frame
from tiny_runs import Tiny

ROLLBACK = {
    "what": "rollback",
    "number": 1,
    "step": 3,
    "reason": "r",
    "first": 2,
    "checkpoint": "step-00000001",
    "batches": [],
}
BATCH = {"stream": "train", "pass_index": 0, "batch_index": 1, "samples": [1, 2]}

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("decision", {**ROLLBACK, "step": "Infinity"}, "'step' is 'Infinity'"),
    ("decision", {**ROLLBACK, "batches": [{**BATCH, "batch_index": "x"}]}, "'batches' is [{'stream'"),
    ("decision", {"what": "rollback"}, "'number' is missing"),
    ("decision", {"what": "accepted", "step": True}, "'step' is True"),
    ("verified", {"steps": "e400", "report": "resume verified"}, "'steps' is 'e400'"),
    ("verified", {"report": ["x"]}, "'report' is ['x']"),
    ("times", {"seconds": float("nan")}, "'seconds' is nan"),
    ("summary", {"name": ["x"], "step": 1, "text": "x"}, "'name' is ['x']"),
    ("summary", {"name": "x", "step": 1, "image": {"file": ["x"]}}, "'image' is {'file'"),
    ("checkpoint", {"name": "step-00000001", "bytes": 10**30}, "'bytes' is 1000000"),
    ("closed", {"status": "constructor"}, "'status' is 'constructor'"),
    ("segment", {"parent": None, "facts": {"resumed_from": ["x"]}}, "'facts' is {'resumed_from'"),
]


def test_events_of_wrong_types_are_told_and_skipped(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run")
    journal = Journal.open(run.path, 1, None, {"resumed_from": None})
    for kind, data, _ in WRONG:
        journal.event(kind, data)
    journal.event("ended", {"step": 1, "epoch": 0})
    journal.close()
    segment = read_segment(journal.path)
    assert [event.kind for event in segment.events] == ["segment", "ended"]
    for problem, (kind, _, told) in zip(segment.problems, WRONG, strict=True):
        assert f"is not an event of kind {kind!r} ({told}" in problem
    read = RunJournal(run.path)
    assert (read.rollbacks(), read.divergences(), read.problems) == ([], [], segment.problems)


def test_what_everstep_wrote_fits(tmp_path: Path) -> None:
    Tiny(tmp_path / "run", max_epoch=2).train()
    Tiny(tmp_path / "run", max_epoch=3).train()
    journals = [*(tmp_path / "run").glob("journal/*.evj")]
    assert len(journals) == 2 and not [each for path in journals for each in read_segment(path).problems]


def test_further_fields_and_kinds_are_kept(tmp_path: Path) -> None:
    journal = Journal.open(RunDir.open(tmp_path / "run").path, 1, None, {})
    journal.event(
        "decision", {**ROLLBACK, "batches": [{**BATCH, "why": "later"}], "segment": 9, "later": [1]}
    )
    journal.event("my own", {"step": "any"})
    journal.close()
    (rollback,) = RunJournal(tmp_path / "run").rollbacks()
    assert (rollback.segment, rollback.batches[0].batch_index) == (1, 1)
    assert read_segment(journal.path).problems == []


def test_a_service_cannot_write_what_nobody_reads(tmp_path: Path) -> None:
    def noted(loop: Any, step: int) -> None:
        loop.note("seen", {"step": "any"})
        with pytest.raises(ConfigError, match="'step' is 'any'; give another kind"):
            loop.note("diverged", {"step": "any"})

    Tiny(tmp_path / "run", max_epoch=1).train(noted)
    assert RunJournal(tmp_path / "run").problems == []


def test_deep_values_are_refused_and_not_read(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(DEEPEST):
        deep = {"a": deep}
    assert levels(deep) == DEEPEST
    journal = Journal.open(RunDir.open(tmp_path / "run").path, 1, None, {})
    with pytest.raises(JournalError, match="more than 200 levels"):
        journal.event("seen", {"config": deep})
    journal.event("seen", {"config": 10})
    journal.close()
    assert read_segment(journal.path).problems == []
    # as a later version, or a stranger, may have written it
    payload = json.dumps({"kind": "seen", "time": 1.0, "wall": True, "data": {"config": deep}}).encode()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + pack_frame(EVENT, len(whole), payload))
    (problem,) = read_segment(journal.path).problems
    assert "is not an event" in problem
