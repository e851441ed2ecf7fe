"""`everstep.torch.parallel` in real processes: what it wraps, opens and leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import outputs
from torch import nn

import everstep
from everstep.errors import ConfigError

MODEL = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import everstep
from everstep.errors import ConfigError
from everstep.state import make_entry
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 1)))
"""


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_process_gets_its_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    assert everstep.torch.parallel(model) is model
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert everstep.torch.parallel(model, bucket_cap_mb=1) is model
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"no option 'bucket_cap'.*did you mean 'bucket_cap_mb'"):
        everstep.torch.parallel(model, bucket_cap=1)
    with pytest.raises(ConfigError, match=r"give a torch.nn.Module"):
        everstep.torch.parallel([model])


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_gets_its_model_back() -> None:
    model = nn.Linear(1, 1)
    assert everstep.torch.parallel(model) is model


@pytest.mark.campaign("long")
def test_two_processes_wrap_and_leave_without_a_warning() -> None:
    program = (
        MODEL
        + """
wrapped = everstep.torch.parallel(model, bucket_cap_mb=2)
assert type(wrapped) is DDP and wrapped.module is model and dist.get_backend() == "gloo"
assert wrapped.bucket_bytes_cap == 2 << 20
assert everstep.torch.parallel(wrapped) is wrapped
say("weights", model[0].weight.double().sum().item().hex())
wrapped(torch.full((2, 3), float(rank + 1))).sum().backward()
say("gradients", model[2][0].bias.grad.item())
for wrong, text in [
    (lambda: everstep.torch.parallel(wrapped, bucket_cap_mb=1), "already"),
    (lambda: everstep.torch.parallel(nn.Linear(1, 1).requires_grad_(False)), "leave out"),
    (lambda: everstep.torch.parallel(nn.ModuleDict({"a": model})), "give each part"),
]:
    try:
        wrong()
    except ConfigError as error:
        assert text in str(error), error
        say("refused")
names = list(make_entry("model", model).save())
compiled = torch.compile(wrapped, backend="eager"), DDP(torch.compile(model, backend="eager"))
for each in (wrapped, *compiled):
    entry = make_entry("model", each)
    assert list(entry.save()) == names and "0.weight" in names
    entry.load(make_entry("model", model).save())
"""
    )
    first, second = (text.splitlines() for text in outputs(program, 2))
    assert [line[3:] for line in first] == [line[3:] for line in second]
    assert len(first) == 5 and first[1] == "0: gradients 2.0"


@pytest.mark.campaign("long")
def test_a_forked_child_leaves_the_group_of_its_parent_alone() -> None:
    program = (
        MODEL
        + """
wrapped = everstep.torch.parallel(model)
if (child := os.fork()) == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
wrapped(torch.ones(2, 3)).sum().backward()
say("trained")
"""
    )
    assert outputs(program, 2) == ["0: trained\n", "1: trained\n"]
