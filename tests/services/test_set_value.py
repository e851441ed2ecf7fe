"""`SetValue`: a service changes a hyper-parameter, and a resumed run has the same values and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Boundary, Every, Outcome, Service, services
from everstep.errors import ConfigError, UsageError
from everstep.services import SetValue, Stage
from tiny_runs import quiet, rows


class Sets(Service):
    """Asks for the same change each time it is due."""

    stage = Stage.DECIDE
    controller = True

    def __init__(self, action: SetValue, steps: int = 1, sets: Any = None) -> None:
        super().__init__("sets", Every(steps=steps))
        self.action, self.sets = action, (action.target,) if sets is None else sets

    def run(self, boundary: Boundary) -> Outcome:
        return Outcome(actions=(self.action,))


def advance(
    run_dir: Path, state: Any, action: SetValue, steps: int = 3, service: Service | None = None
) -> None:
    with everstep.Supervisor(run_dir, state, services=[service or Sets(action)], max_step=steps) as sv:
        sv.stream(None)
        while not sv.should_stop():
            sv.advance()


def test_an_optimizers_option_in_every_group_and_the_rest_of_it_stays(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.Adam(groups, lr=1.0)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state_of_weight = optimizer.state[model.weight]
    state = {"model": model, "optimizer": optimizer}
    action = SetValue("optimizer.lr", times=0.5, least=0.2)
    with everstep.Supervisor(tmp_path / "run", state, services=[Sets(action, 2)], max_step=6) as sv:
        sv.stream(None)
        while not sv.should_stop():
            optimizer.step()
            sv.advance()
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert optimizer.state[model.weight] is state_of_weight
    assert state_of_weight["step"] == 7
    found = [(step, name, float.fromhex(value)) for _, step, _, name, _, value, _ in rows(tmp_path / "run")]
    assert found == [(2, "optimizer.lr", 0.5), (4, "optimizer.lr", 0.25), (6, "optimizer.lr", 0.2)]


REFUSED: list[tuple[Service, str]] = [
    (Sets(SetValue("optimiser.lr", 0.5)), "no state entry 'optimiser'.*did you mean 'optimizer'"),
    (Sets(SetValue("optimizer.rl", 0.5)), "'optimizer' has no number 'rl' to be set.*did you mean 'lr'"),
    (Sets(SetValue("optimizer.name", 0.5)), "'optimizer' has no number 'name'"),
    (Sets(SetValue("optimizer", 0.5)), "'optimizer' has no number ''"),
    (Sets(SetValue("w.lr", 0.5)), "'w' has no number 'lr'"),
    (Sets(SetValue("huge.rate", times=1e300)), r"makes inf of 1e\+300; give a finite value="),
    (Sets(SetValue("huge.rate", 0.5), sets=()), r"add to class Sets: sets = \('huge.rate',\)"),
    (Sets(SetValue("huge.rate", 0.5), sets="huge.rate"), "sets of service 'sets' is the string 'huge.rate'"),
    # a target that is known beforehand is looked up when the loop opens
    (services.Plateau("loss", then=SetValue("optimizer.rl", 0.5), every=Every(steps=9)), "did you mean 'lr'"),
    (services.When(Every(steps=9), SetValue("optimizer.rl", 0.5)), "did you mean 'lr'"),
    (services.Scheduled("optimiser.lr", lambda step: 0.5), "did you mean 'optimizer'"),
]


def test_a_target_that_cannot_be_set_is_refused(tmp_path: Path) -> None:
    state = {"optimizer": {"lr": 0.1, "name": "mine"}, "w": np.zeros(2), "huge": {"rate": 1e300}}
    for number, (service, message) in enumerate(REFUSED):
        with pytest.raises((ConfigError, UsageError), match=message):
            advance(tmp_path / str(number), state, SetValue("huge.rate", 0.5), service=service)
    assert state["huge"] == {"rate": 1e300}


def test_a_key_of_a_dictionary_a_slot_and_a_tensor_that_stays_the_same(tmp_path: Path) -> None:
    settings, slot = {"beta": 1.0}, everstep.Slot(8.0)
    model, rate = torch.nn.Linear(2, 1), torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    state = {"model": model, "optimizer": optimizer}
    service = Sets(SetValue("optimizer.lr", 0.25))
    with everstep.Supervisor(tmp_path / "tensor", state, services=[service], max_step=1) as sv:
        sv.stream(None)
        while not sv.should_stop():
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            sv.advance()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25
    advance(tmp_path / "dictionary", {"settings": settings}, SetValue("settings.beta", 0.5))
    advance(tmp_path / "slot", {"temperature": slot}, SetValue("temperature", times=0.5))
    assert settings == {"beta": 0.5}
    assert slot.value == 1.0


def test_it_is_no_action_for_another_thread(tmp_path: Path) -> None:
    with quiet(tmp_path / "run") as sv, pytest.raises(everstep.errors.UsageError, match="give Stop"):
        sv.call_soon(SetValue("w", 1.0))


schedulers = torch.optim.lr_scheduler


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda o: schedulers.LambdaLR(o, lambda k: 1 / (k + 1)), "LambdaLR 'plan'"),
        (lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=50), "OneCycleLR 'plan'"),
        (lambda o: schedulers.CyclicLR(o, 0.1, 1.0), "CyclicLR 'plan'"),
        (lambda o: schedulers.CosineAnnealingWarmRestarts(o, 9), "CosineAnnealingWarmRestarts 'plan'"),
        (
            lambda o: schedulers.SequentialLR(o, [schedulers.LambdaLR(o, lambda k: k + 1)], []),
            "LambdaLR 'plan'",
        ),
        (lambda o: schedulers.StepLR(o, 2), None),
        (lambda o: schedulers.ExponentialLR(o, 0.9), None),
        (lambda o: schedulers.CosineAnnealingLR(o, 50), None),
        (lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.9), None),
    ],
)
def test_a_scheduler_that_undoes_it_is_named_once(tmp_path: Path, make: Any, told: str | None) -> None:
    model = torch.nn.Linear(2, 1)

    def rates(run_dir: Path, services: list[Service]) -> tuple[list[float], everstep.supervisor.Ending]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        state = {"model": model, "optimizer": optimizer, "plan": make(optimizer)}
        found = []
        with everstep.Supervisor(run_dir, state, services=services, max_step=6) as sv:
            sv.stream(None)
            while not sv.should_stop():
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                state["plan"].step()
                sv.advance()
                found.append(optimizer.param_groups[0]["lr"])
        return found, sv.ending

    alone, _ = rates(tmp_path / "alone", [])
    found, ending = rates(tmp_path / "run", [Sets(SetValue("optimizer.lr", times=1e-6), 2)])
    undone = [k for k in (2, 4) if found[k] == pytest.approx(alone[k])]
    assert undone == ([2, 4] if told else [])
    if told is None:
        assert ending.warnings == ()
    else:
        (warning,) = ending.warnings
        assert f"service 'sets' sets optimizer.lr, and {told} computes it from" in warning
