"""A checkpoint of a wrapped model: the misfit names the prefix, and the `rename=` that it gives works."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep import InitFrom
from everstep.errors import RestoreError
from everstep.supervisor.opening.wrapper_names import rename_for
from tiny_runs import quiet


def net(fill: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 1)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


def inner_wrapped(fill: float) -> nn.Module:
    model = net(fill)
    model[2] = nn.DataParallel(model[2])
    return model


class Holder(nn.Module):
    """Keeps the model under a name of its own, as a LightningModule does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backbone = model


WRAPPED: dict[str, Any] = {
    "DataParallel": lambda fill=0.0: nn.DataParallel(net(fill)),
    "a part of it": inner_wrapped,
    "a holder": lambda fill=0.0: Holder(net(fill)),
    "compiled and wrapped": lambda fill=0.0: nn.DataParallel(torch.compile(net(fill), backend="eager")),  # type: ignore[arg-type]
}


def saved(run_dir: Path, model: nn.Module) -> Path:
    with quiet(run_dir, {"model": model}, max_step=1) as sv:
        sv.stream(None)
        while not sv.should_stop():
            sv.advance()
    return run_dir


def remedy(error: RestoreError) -> dict[str, str]:
    found = re.search(r"InitFrom\(\.\.\., rename=(\{.*?\})\)", str(error))
    assert found, str(error)
    rename: dict[str, str] = ast.literal_eval(found[1])
    return rename


def fills(model: nn.Module) -> set[float]:
    return {float(value) for parameter in model.parameters() for value in parameter.detach().flatten()}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_the_prefix_of_a_wrapper_is_named_with_a_rename_that_works(tmp_path: Path, wrapped: Any) -> None:
    run = saved(tmp_path / "run", wrapped(3.0))
    plain = net()
    with pytest.raises(RestoreError, match="differ by what a wrapper adds") as on_load:
        everstep.load(run, {"model": plain})
    with pytest.raises(RestoreError) as on_start, quiet(tmp_path / "new", {"model": plain}, init_from=run):
        pass
    with pytest.raises(RestoreError) as on_resume, quiet(run, {"model": plain}):
        pass
    rename = remedy(on_load.value)
    assert rename == remedy(on_start.value) == remedy(on_resume.value)
    everstep.load(InitFrom(run, rename=rename), {"model": plain})
    assert fills(plain) == {3.0}
    with quiet(tmp_path / "warm", {"model": (again := net())}, init_from=InitFrom(run, rename=rename)):
        assert fills(again) == {3.0}


@pytest.mark.parametrize("kind", ["DataParallel", "a holder"])
def test_the_other_way_round(tmp_path: Path, kind: str) -> None:
    run = saved(tmp_path / "run", net(3.0))
    wrapped = WRAPPED[kind]()
    with pytest.raises(RestoreError) as raised:
        everstep.load(run, {"model": wrapped})
    everstep.load(InitFrom(run, rename=remedy(raised.value)), {"model": wrapped})
    assert fills(wrapped) == {3.0}


def test_names_that_differ_otherwise_get_no_such_advice() -> None:
    assert rename_for(["model/a", "model/b"], ["model/module.a"]) == {}
    assert rename_for(["model/a"], ["model/module.a", "model/c"]) == {}
    assert rename_for(["model/a"], ["model/b"]) == {}
    assert rename_for(["model"], []) == {} == rename_for([], ["model/module.a"])
    both = rename_for(["m/a", "n/b"], ["m/module.a", "n/module.b"])
    assert both == {"^m/module\\.": "m/", "^n/module\\.": "n/"}
