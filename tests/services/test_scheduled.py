"""`Scheduled` and `Annealing`: at step k a value is the same in a fresh and in a resumed run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Every, Service
from everstep.errors import ConfigError
from everstep.services import Annealing, Scheduled
from everstep.testing import check_service
from gate import share
from tiny_runs import Boom, rows


def test_annealing_begins_with_the_initial_value() -> None:
    """Of step 1, as TFSnippet's AnnealingScalar, and for `every` steps; before the first it is that, too."""
    halved = Annealing(1.0, 0.5)
    assert [halved(step) for step in range(4)] == [1, 1, 0.5, 0.25]
    rarely = Annealing(1.0, 0.5, every=3)
    assert [rarely(step) for step in range(10)] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_annealing_stays_between_its_bounds() -> None:
    falling = Annealing(1.0, 0.5, every=10, least=0.2)
    assert [falling(step) for step in (10, 11, 20, 21, 31, 10**6)] == [1, 0.5, 0.5, 0.25, 0.2, 0.2]
    assert Annealing(1.0, 2.0, most=3.0)(9) == 3.0
    assert Annealing(1.0, 0.5) == Annealing(1.0, 0.5)


def train(
    run_dir: Path, services: Sequence[Service], crash: int = 0, **arguments: Any
) -> tuple[str | None, list[float], Any]:
    """Two steps an epoch; it tells the rate of each step of this start."""
    settings = {"rate": -1.0, "sum": 0.0}
    rates = []
    services = [*services, everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
    arguments = {"max_epoch": 6, "steps_per_epoch": 2, "seed": 1, **arguments}
    with everstep.TrainLoop(run_dir, {"settings": settings}, services=services, **arguments) as loop:
        for _ in loop.iter_epochs():
            for step in loop.iter_steps():
                rates.append(settings["rate"])
                settings["sum"] += settings["rate"] * step
                if step == crash:
                    raise Boom
    return loop.ending.digest, rates, rows(run_dir)


ANNEALED = [8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("every", "rates"),
    [
        (None, ANNEALED),
        (Every(steps=4), [8, 8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2]),
    ],
)
def test_each_step_has_its_value_after_any_crash(
    tmp_path: Path, every: everstep.schedule.Schedule | None, rates: list[float]
) -> None:
    def services() -> list[Service]:
        return [Scheduled("settings.rate", Annealing(8, 0.5, every=3, least=1), every=every)]

    whole = train(tmp_path / "whole", services())
    assert whole[1] == rates
    changes = {row[1]: float.fromhex(row[5]) for row in whole[2] if row[3] == "settings.rate"}
    settings = [-1, *rates, 1]  # the last is that of step 13, which a raised limit would make
    assert changes == {step: settings[step + 1] for step in range(13) if settings[step + 1] != settings[step]}
    for crash in share(range(1, 13), 3):
        run_dir = tmp_path / str(crash)
        with pytest.raises(Boom):
            train(run_dir, services(), crash)
        digest, seen, found = train(run_dir, services())
        assert (digest, found) == (whole[0], whole[2])
        assert seen == rates[12 - len(seen) :]


def test_another_schedule_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        train(tmp_path, [Scheduled("settings.rate", Annealing(8, 0.5))], crash=4)
    changed = [Scheduled("settings.rate", Annealing(8, 0.25))]
    with pytest.raises(ConfigError, match=r"schedule of settings\.rate.*ratio=0\.5.*ratio=0\.25"):
        train(tmp_path, changed)
    assert train(tmp_path, changed, on_change="override")[1][-1] == 8 * 0.25**11


@pytest.mark.campaign("long")
def test_it_keeps_the_laws() -> None:
    check_service(lambda: Scheduled("settings.rate", Annealing(1, 0.9)))
    check_service(lambda: Scheduled("settings.rate", lambda step: 1 / step, every=Every(steps=2)))


def test_misuse() -> None:
    with pytest.raises(ConfigError, match="every=0: give an integer, 1 or more"):
        Annealing(1.0, 0.5, every=0)
    for bounds in ({"least": 0.5, "most": 0.1}, {"least": 2.0}, {"most": 0.5}, {"least": float("nan")}):
        with pytest.raises(ConfigError, match=r"initial=1\.0.*give bounds so that the initial value"):
            Annealing(1.0, 0.5, **bounds)
    with pytest.raises(ConfigError, match="give a function of the step"):
        Scheduled("settings.rate", 0.5)  # type: ignore[arg-type]
