"""Self-verifying resume in a run: said, recorded, and a warning where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep.errors import DivergenceError, Interrupted
from everstep.record import trail_path
from tiny_runs import Boom, Tiny, boom_at, events

BREAK = everstep.services.Interrupt("a break", 3)


def start(run_dir: Path, **arguments: Any) -> Tiny:
    """Twelve steps: a checkpoint after each sixth, and something else that reads every seventh."""
    services = [everstep.Checkpoints(everstep.Every(steps=6))]
    tiny = Tiny(run_dir, **{"samples": 24, "max_epoch": 1, "services": services, **arguments})
    tiny.loop.on(everstep.services.Moment.AFTER_STEP, lambda boundary: None, every=7)
    return tiny


def crashed(run_dir: Path) -> None:
    """A run that failed in step 8."""
    with pytest.raises(Boom):
        start(run_dir).train(inside=boom_at(8))


def differing(tiny: Tiny) -> Tiny:
    """Its losses are other numbers than those of `Tiny`; its batches are the same."""
    tiny.update = lambda ids: tiny.loop.collect_metrics(loss=float(ids.sum()))  # type: ignore[method-assign]
    return tiny


def test_steps_executed_again_are_verified(tmp_path: Path) -> None:
    crashed(tmp_path)
    tiny = start(tmp_path).train()
    said = "resume verified: 1 step executed again: 1 batch digest and 1 value of loss equal"
    assert said in tiny.lines
    assert events(tmp_path, "verified") == [{"report": said, "steps": 1}]
    assert tiny.loop.ending.warnings == ()


def test_other_numbers_are_a_warning_with_likely_causes_and_a_mark_of_the_run(tmp_path: Path) -> None:
    crashed(tmp_path)
    tiny = differing(start(tmp_path)).train()
    (warning,) = tiny.loop.ending.warnings
    assert warning.startswith("resume differs: step 7 loss was ")
    assert "not in state=" in warning and "everstep drill" in warning
    assert events(tmp_path, "verified")[0]["report"] == warning.splitlines()[0]
    (mark,) = events(tmp_path, "diverged")
    assert (mark["step"], mark["component"], mark["in_data"]) == (7, "loss", False)
    assert tiny.loop.ending.finished


def test_other_numbers_stop_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    crashed(tmp_path)
    tiny = differing(start(tmp_path, on_divergence="stop"))
    with pytest.raises(
        DivergenceError, match=r"step 7 loss was .*everstep accept RUN --divergence 7"
    ) as caught:
        tiny.train()
    assert caught.value.step == 7
    assert not tiny.loop.ending.finished


def test_other_batches_stop_the_run_before_they_are_trained_on(tmp_path: Path) -> None:
    crashed(tmp_path)
    tiny = with_other_batches(start(tmp_path))
    weights = None

    def note(loop: object, step: int) -> None:
        nonlocal weights
        weights = step

    said = r"step 7 batch of train was .* the data gives other batches .* padding .*np\.empty"
    with pytest.raises(DivergenceError, match=said):
        tiny.train(inside=note)
    assert weights is None
    with_other_batches(start(tmp_path, on_divergence="warn")).train()


def test_a_pass_may_end_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Passes of three batches, of which a step draws two."""

    def train(fails_at: int) -> everstep.supervisor.Ending:
        w = np.zeros(1)
        services = [everstep.Checkpoints(everstep.Every(steps=3))]
        with everstep.Supervisor(tmp_path, {"w": w}, seed=1, max_step=9, services=services) as sv:
            batches = sv.stream(everstep.data.arrays(np.arange(6), batch_size=2, shuffle=True))
            while not sv.should_stop():
                if sv.step == fails_at:
                    raise Boom
                w += next(batches)[0].sum() - next(batches)[0].mean()
                sv.advance(loss=float(w[0]))
        return sv.ending

    for fails_at in (2, 5, 8):
        with pytest.raises(Boom):
            train(fails_at)
    ending = train(-1)
    assert ending.finished and ending.warnings == ()
    assert events(tmp_path, "diverged") == []


def with_other_batches(tiny: Tiny) -> Tiny:
    """The same number of samples, in an order that nobody restores."""
    tiny.data = Reversed(tiny.data)
    return tiny


class Reversed:
    """A stream that gives other batches than it says."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        if name == "stream":
            raise AttributeError(name)
        return getattr(self.stream, name)

    def open(self, *where: Any, seed: int) -> Any:
        return self.stream.open(*where, seed=seed + 1)


def test_the_first_execution_stays_what_is_compared_with(tmp_path: Path) -> None:
    crashed(tmp_path)
    with pytest.raises(Boom):
        differing(start(tmp_path)).train(inside=boom_at(8))
    tiny = differing(start(tmp_path)).train()
    assert any("resume differs: step 7 loss was " in each for each in tiny.loop.ending.warnings)
    assert [mark["step"] for mark in events(tmp_path, "diverged")] == [7]


def test_an_execution_after_a_divergence_is_not_compared_with(tmp_path: Path) -> None:
    crashed(tmp_path)
    with pytest.raises(Boom):
        differing(start(tmp_path)).train(inside=boom_at(9))
    tiny = start(tmp_path).train()
    assert tiny.loop.ending.warnings == ()
    assert events(tmp_path, "diverged") == []


def test_without_overlap_nothing_is_verified(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        start(tmp_path).train(inside=lambda loop, step: loop.call_soon(BREAK) if step == 4 else None)
    tiny = start(tmp_path).train()
    said = "resume not verified: nothing was executed again"
    assert said in tiny.lines
    assert events(tmp_path, "verified") == [{"report": said, "steps": 0}]


@pytest.mark.campaign("long")
@pytest.mark.parametrize("chosen", [{"resume": 0}, {"on_change": "override", "seed": 8}, {"resume": False}])
def test_what_a_person_supersedes_is_not_compared_with(tmp_path: Path, chosen: dict[str, Any]) -> None:
    crashed(tmp_path)
    with pytest.raises(Boom):
        differing(start(tmp_path, **chosen)).train(inside=boom_at(9))
    assert all("nothing was executed again" not in each["report"] for each in events(tmp_path, "verified"))
    tiny = differing(start(tmp_path, **(chosen if "seed" in chosen else {}))).train()
    assert not any("differs" in each for each in tiny.loop.ending.warnings)
    assert events(tmp_path, "diverged") == []


def test_a_start_killed_before_the_last_repeated_step_reports_what_it_verified(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        start(tmp_path).train(inside=boom_at(12))
    with pytest.raises(Boom):
        start(tmp_path).train(inside=boom_at(9))
    assert events(tmp_path, "verified")[0]["report"].startswith("resume verified: 2 steps executed again: 2 ")


def test_a_clean_end_leaves_nothing_to_compare(tmp_path: Path) -> None:
    start(tmp_path).train()
    assert not any("verified" in line for line in start(tmp_path).train().lines)


@pytest.mark.campaign("long")
def test_a_trail_goes_when_no_resume_can_need_it(tmp_path: Path) -> None:
    crashed(tmp_path)
    start(tmp_path).train()
    assert trail_path(tmp_path, 1).exists()
    start(tmp_path, max_epoch=2).train()
    assert not trail_path(tmp_path, 1).exists()
    assert trail_path(tmp_path, 3).exists()


def test_a_batch_drawn_ahead_is_found(tmp_path: Path) -> None:
    """As in nanoGPT's loop: the batch of a step is drawn at the end of the step before."""

    def train(stop: int | None) -> None:
        services = [
            everstep.Checkpoints(everstep.Every(steps=3)),
            everstep.services.Console(sink=lambda line: None),
        ]
        with everstep.Supervisor(
            tmp_path, {"w": np.zeros(1)}, services=services, seed=1, max_step=9, default_services=False
        ) as sv:
            batches, batch = sv.stream(everstep.data.arrays(np.arange(40), batch_size=2, shuffle=True)), None
            while not sv.should_stop():
                batch = next(batches) if batch is None else batch
                batch = next(batches)
                if sv.step + 1 == stop:
                    raise Boom
                sv.advance()

    with pytest.raises(Boom):
        train(6)
    with pytest.raises(DivergenceError, match="step 4 batch of train was"):
        train(None)
