"""Names in a checkpoint are the bare model's, whatever wraps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everstep.state import make_entry


def net(fill: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 1)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


def inner_wrapped(fill: float = 0.0) -> nn.Module:
    model = net(fill)
    model[2] = nn.DataParallel(model[2])
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


WRAPPED: dict[str, Any] = {
    "DataParallel": lambda fill=0.0: nn.DataParallel(net(fill)),
    "a part of it": inner_wrapped,
    "compiled": lambda fill=0.0: compiled(net(fill)),
    "compiled and wrapped": lambda fill=0.0: nn.DataParallel(compiled(net(fill))),
    "wrapped and compiled": lambda fill=0.0: compiled(nn.DataParallel(net(fill))),
}


def fills(model: nn.Module) -> set[float]:
    return {float(value) for parameter in model.parameters() for value in parameter.detach().flatten()}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_names_flags_buffers_and_attributes_go_in_and_out_of_a_wrapper(wrapped: Any) -> None:
    def made(model: nn.Module) -> tuple[nn.Module, Any, nn.Module, nn.Module]:
        inside = [each for each in model.modules() if isinstance(each, nn.Sequential)]
        norm, part = inside[0][1], inside[1]
        part.register_buffer("cache", torch.zeros(2), persistent=False)
        entry = make_entry("model", model)
        entry.enter()
        return model, entry, norm, part

    for saved, loaded in ((wrapped(3.0), net()), (net(3.0), wrapped())):
        (_, entry, norm, part), (model, into, other_norm, other_part) = made(saved), made(loaded)
        norm.eval()
        part[0].bias.requires_grad_(False)
        part.cache += 5
        tree = entry.save()
        assert not any(into.check(tree))
        into.load(tree)
        assert fills(model) == {3.0}
        assert not other_norm.training and other_part.training and not other_part[0].bias.requires_grad
        assert other_part.cache.tolist() == [5, 5] and not any(entry.check(into.save()))
        assert into.guarded(("2.0.weight",)) and not into.guarded(("1.running_mean",))
