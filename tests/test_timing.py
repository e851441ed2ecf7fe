"""Progress from counters, ETA under a simulated clock."""

import random

import pytest

from everstep.testing import ManualClock
from everstep.timing import Estimator, progress


@pytest.mark.parametrize(
    ("counters", "known", "expected"),
    [
        ((0, 0, None, None), {}, None),
        ((7, 2, None, None), {"steps_per_epoch": 5.0}, None),
        ((0, 0, 100, None), {}, 0.0),
        ((25, 1, 100, None), {}, 0.25),
        ((25, 1, 100, None), {"within_step": True}, 0.24),
        ((120, 1, 100, None), {}, 1.0),
        ((5, 1, None, 4), {"within_epoch": True, "steps_per_epoch": 10.0}, 0.125),
        ((5, 1, None, 4), {"within_epoch": True, "within_step": True, "steps_per_epoch": 10.0}, 0.1),
        ((5, 1, None, 4), {"within_epoch": True}, 0.0),
        ((10, 1, None, 4), {}, 0.25),
        ((30, 3, None, 4), {"within_epoch": True}, 0.5),
        ((30, 3, 40, 100), {"steps_per_epoch": 10.0}, 0.75),
        ((30, 3, 4000, 4), {"steps_per_epoch": 10.0}, 0.75),
        ((30, 3, 4000, 4), {}, 0.75),
    ],
)
def test_progress(counters: tuple[int, int, int | None, int | None], known: dict, expected: float) -> None:
    assert progress(*counters, **known) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("seed", "step_time", "every"), [(0, 0.004, 1), (1, 0.3, 7), (2, 45.0, 1)])
def test_within_five_percent_after_ten_percent(seed: int, step_time: float, every: int) -> None:
    """A slow first step, noise of 30 % on each, and an evaluation that costs a quarter of each epoch."""
    draw = random.Random(seed)
    epochs, steps_per_epoch = 40, 50
    total = epochs * steps_per_epoch
    clock = ManualClock(1000.0)
    estimator = Estimator(clock)
    told: list[tuple[float, float]] = []
    for step in range(1, total + 1):
        clock.advance(step_time * draw.uniform(0.7, 1.3) * (20 if step == 1 else 1))
        if step % every == 0 or step % steps_per_epoch == 0:
            estimator.update(step)
        if step % steps_per_epoch == 0:
            clock.advance(0.25 * steps_per_epoch * step_time)
            estimator.exclude(0.25 * steps_per_epoch * step_time)
        if 0.1 * total <= step < 0.9 * total:
            eta = estimator.eta(step, step / total)
            assert eta is not None
            told.append((clock(), eta))
    assert told
    for when, eta in told:
        assert eta == pytest.approx(clock() - when, rel=0.05)


def test_the_eta_counts_down_between_updates_and_never_below_zero() -> None:
    clock = ManualClock()
    estimator = Estimator(clock)
    assert estimator.eta(0, 0.0) is None
    clock.advance(10.0)
    estimator.update(1)
    assert estimator.eta(1, None) is None and estimator.eta(1, 0.0) is None
    clock.advance(4.0)
    assert estimator.eta(1, 0.25) == pytest.approx(26.0)
    clock.advance(1e6)
    assert estimator.eta(1, 0.25) == 0.0


def test_a_resumed_run_starts_its_rate_where_it_resumed() -> None:
    clock = ManualClock(50.0)
    estimator = Estimator(clock)
    clock.advance(500.0)
    estimator.start(900)
    clock.advance(2.0)
    estimator.update(901)
    assert estimator.rate() == pytest.approx(0.5)
    assert estimator.eta(901, 0.901) == pytest.approx(198.0)
