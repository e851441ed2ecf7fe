"""Controllers state their settings once: `config()` and `repr` follow from the parameters of `__init__`."""

from __future__ import annotations

from typing import Any

import pytest

import everstep
from everstep import Every, SetValue
from everstep.services import Annealing, LossBound, Plateau, Require, Scheduled
from everstep.services.judges import Judge
from everstep.supervisor.opening.comparing import changed_controllers

EVERY_EPOCH = "Every(steps=None, epochs=1, seconds=None)"
EVERY_STEP = "Every(steps=1, epochs=None, seconds=None)"

STORED = [
    (
        everstep.EarlyStop("loss", patience=5),
        {
            "metric": "loss",
            "mode": "min",
            "patience": 5,
            "min_delta": 0.0,
            "min_steps": 0,
            "every": EVERY_EPOCH,
        },
    ),
    (
        LossBound(bound=9.0),
        {"metric": "loss", "bound": 9.0, "times": None, "last": 100, "policy": "raise", "every": EVERY_STEP},
    ),
    (
        Plateau("acc", then=SetValue("optimizer.lr", times=0.1), long=5, short=2),
        {
            "metric": "acc",
            "mode": "max",
            "then": "SetValue(target='optimizer.lr', value=None, times=0.1, least=-inf)",
            "long": 5,
            "short": 2,
            "cooldown": 5,
            "every": EVERY_EPOCH,
        },
    ),
    (
        Require("loss", 1.0, step=7),
        {
            "metric": "loss",
            "value": 1.0,
            "mode": "min",
            "step": 7,
            "epoch": None,
            "every": f"(At(7) | {EVERY_EPOCH})",
        },
    ),
    (
        Scheduled("optimizer.lr", Annealing(1.0, 0.5)),
        {
            "target": "optimizer.lr",
            "value": "Annealing(initial=1.0, ratio=0.5, every=1, least=-inf, most=inf)",
            "every": EVERY_STEP,
        },
    ),
    (everstep.StopAfter(steps=9), {"steps": 9, "epochs": None}),
]
"""Controllers, and what checkpoints of version 0.1 have of them."""


@pytest.mark.parametrize(("service", "stored"), STORED, ids=[type(s).__name__ for s, _ in STORED])
def test_a_controller_is_equal_to_what_earlier_checkpoints_have_of_it(
    service: Judge, stored: dict[str, Any]
) -> None:
    changes = changed_controllers({service.name: stored}, {service.name: service.config()}, None)
    assert not changes.touching
    assert not changes.unknown
    for name, value in stored.items():
        other = stored | {name: "other" if value is None else None}
        assert changed_controllers({service.name: other}, {service.name: service.config()}, None).touching


def test_the_repr_shows_the_settings() -> None:
    service = everstep.EarlyStop("loss", patience=5, every=Every(steps=3), name="mine")
    assert repr(service) == (
        "EarlyStop(name='mine', metric='loss', mode='min', patience=5, min_delta=0.0, min_steps=0, "
        "every=Every(steps=3, epochs=None, seconds=None))"
    )


def test_a_derived_controller_has_the_settings_of_the_one_above() -> None:
    class Patient(everstep.EarlyStop):
        def __init__(self, metric: str, times: int) -> None:
            super().__init__(metric, patience=10 * times)

    assert Patient("loss", 2).config() == everstep.EarlyStop("loss", patience=20).config()


def test_a_schedule_that_is_given_to_two_services_stays_as_it_is() -> None:
    first, second = LossBound(bound=1.0), LossBound(bound=1.0, name="second")
    assert first.schedule == LossBound.default_schedule
    assert first.schedule is not second.schedule
