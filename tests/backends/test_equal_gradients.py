"""The proof, at a first update, that ranks which compute with the same samples have the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from everstep.backends.torch.backend import BACKEND
from everstep.backends.torch.exact_ddp import prove_first_update
from everstep.contracts.group import DataRanks
from everstep.errors import ConfigError


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], 0.1)


def test_ranks_that_read_the_same_part_need_a_process_group() -> None:
    with pytest.raises(ConfigError, match=r"2 ranks.*torch\.distributed\.init_process_group\(\)"):
        BACKEND.require_synchronised({"optimizer": optimizer()}, DataRanks([0, 0]))
    BACKEND.require_synchronised({"generator": torch.Generator()}, DataRanks([0, 0]))


@pytest.mark.usefixtures("group_of_one")
def test_the_first_update_is_made_beside_hooks_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = []
    gather = dist.all_gather
    monkeypatch.setattr(dist, "all_gather", lambda *given: gathers.append(gather(*given)))
    stepping, steps = optimizer(), []
    for starts in (1, 2):  # a second loop of the process with the same optimizer
        prove_first_update(stepping, {})
        stepping.register_step_pre_hook(lambda *_: steps.append(1))
        stepping.step()
        stepping.step()
        assert len(gathers) == starts
    assert len(steps) == 6
