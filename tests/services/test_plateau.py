"""`Plateau`: where a metric gets no better the learning rate is lowered, or the run stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crashing import check_crashes, collecting

import everstep
from everstep import SetValue, Stop
from everstep.errors import ConfigError
from everstep.services import Plateau
from everstep.testing import check_service
from tiny_runs import Boom, rows

LOWER = SetValue("optimizer.lr", times=0.5, least=0.2)


def train(run_dir: Path, crash: int = 0) -> tuple[str | None, float, list[Any]]:
    """A model whose validation loss stands still from the first epoch on; two steps an epoch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    data = everstep.data.arrays(torch.arange(8.0).reshape(4, 2) / 8, batch_size=2, shuffle=True)
    services = [Plateau("valid_loss", then=LOWER, long=3, short=1, cooldown=1)]
    with everstep.TrainLoop(
        run_dir, {"model": model, "optimizer": optimizer}, max_epoch=10, seed=1, services=services
    ) as loop:
        for _ in loop.iter_epochs():
            for step, (x,) in loop.iter_steps(data):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if step == crash:
                    raise Boom
            loop.collect_metrics(valid_loss=1.0)
    return loop.ending.digest, optimizer.param_groups[0]["lr"], rows(run_dir)


def test_the_learning_rate_falls_and_rests_and_is_exact_over_resumes(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    lowered = [(row[0], float.fromhex(row[5])) for row in whole[2] if row[3] == "optimizer.lr"]
    assert lowered == [(3, 0.5), (5, 0.25), (7, 0.2)]
    assert whole[1] == 0.2
    for crash in (5, 7, 11, 20):
        with pytest.raises(Boom):
            train(tmp_path / str(crash), crash)
        assert train(tmp_path / str(crash)) == whole


@pytest.mark.campaign("long", gate="share")
def test_it_stops(tmp_path: Path) -> None:
    tail = collecting("valid_accuracy", [0.1, 0.5, 0.9, 0.8, 0.7, 0.6])
    make = lambda: [Plateau("valid_accuracy", then=Stop("no better"), long=4, short=2)]  # noqa: E731
    tiny = check_crashes(tmp_path, make, tail, max_epoch=9)
    assert (tiny.loop.ending.reason, tiny.loop.ending.epoch) == ("no better", 6)


@pytest.mark.campaign("long", gate="share")
def test_what_gets_better_is_no_plateau_and_nan_does_not_count(tmp_path: Path) -> None:
    tail = collecting("perplexity", [9, 8, float("nan"), 7, 6, float("inf"), 5, 4])
    make = lambda: [Plateau("perplexity", "min", then=Stop("no better"), long=4, short=2)]  # noqa: E731
    assert check_crashes(tmp_path, make, tail, max_epoch=8).loop.ending.reason == "max_epoch 8 is reached"


@pytest.mark.campaign("long")
def test_it_keeps_the_laws() -> None:
    check_service(lambda: Plateau("loss", then=SetValue("settings.rate", 0.5), long=2, short=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"then": "lower"}, "give SetValue"),
        ({"then": LOWER, "long": 5, "short": 5}, "give a long that is larger than short"),
        ({"then": LOWER, "cooldown": -1}, "cooldown=-1"),
    ],
)
def test_misuse(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plateau("loss", **arguments)
