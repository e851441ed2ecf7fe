"""Self-verifying resume in a run: said, recorded, and a warning where it differs."""

from __future__ import annotations

from pathlib import Path

import pytest

import everstep
from everstep.errors import Interrupted
from tiny_runs import Boom, Tiny, boom_at, events

BREAK = everstep.Interrupt("a break", 3)


def start(run_dir: Path) -> Tiny:
    """Twelve steps: a checkpoint after each sixth, and something else that reads every seventh."""
    tiny = Tiny(run_dir, samples=24, max_epoch=1, services=[everstep.Checkpoints(everstep.Every(steps=6))])
    tiny.loop.on(everstep.Moment.AFTER_STEP, lambda boundary: None, every=7)
    return tiny


def crashed(run_dir: Path) -> None:
    """A run that failed in step 8."""
    with pytest.raises(Boom):
        start(run_dir).train(inside=boom_at(8))


def test_steps_executed_again_are_verified(tmp_path: Path) -> None:
    crashed(tmp_path)
    tiny = start(tmp_path).train()
    said = "resume verified: 1 step executed again, all equal"
    assert said in tiny.lines
    assert events(tmp_path, "verified") == [{"report": said}]
    assert tiny.loop.ending.warnings == ()


def test_a_difference_is_a_warning_with_likely_causes(tmp_path: Path) -> None:
    crashed(tmp_path)
    tiny = start(tmp_path)
    tiny.update = lambda ids: tiny.loop.collect_metrics(loss=float(ids.sum()))  # type: ignore[method-assign]
    tiny.train()
    (warning,) = tiny.loop.ending.warnings
    assert warning.startswith("resume differs: step 7 loss was ")
    assert "not in state=" in warning and "everstep drill" in warning
    assert events(tmp_path, "verified")[0]["report"] == warning.splitlines()[0]


def test_without_overlap_there_is_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        start(tmp_path).train(inside=lambda loop, step: loop.call_soon(BREAK) if step == 4 else None)
    tiny = start(tmp_path).train()
    assert "nothing to verify" in tiny.lines
    assert events(tmp_path, "verified") == [{"report": "nothing to verify"}]
