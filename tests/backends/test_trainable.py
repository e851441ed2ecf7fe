"""`everstep.torch.trainable`: only the trained part is saved, and the base is tried, not believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everstep
from everstep.checkpoint import read_checkpoint
from everstep.errors import ConfigError, RestoreError, StateError
from tiny_runs import Boom


class Lora(torch.nn.Module):
    """A frozen linear layer with a trained part of low rank."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(base.in_features, 2) / 4)
        self.b = torch.nn.Parameter(torch.zeros(2, base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


class Net(torch.nn.Module):
    """Low-rank adapters over a base with running means and a buffer that is not persistent."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = Lora(torch.nn.Linear(6, 8))
        self.norm = torch.nn.BatchNorm1d(8).requires_grad_(False)
        self.last = Lora(torch.nn.Linear(8, 3))
        self.register_buffer("table", torch.arange(1000.0))
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)) * self.mask)


X, Y = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


def train(
    run_dir: Path,
    *,
    net: Net | None = None,
    stop_at: int = 0,
    declare: Callable[[Any], Any] = everstep.torch.trainable,
    each: Callable[[Net, int], object] = lambda net, step: None,
    every: int = 1,
    frozen_too: bool = True,
) -> tuple[str, Net]:
    net = net or Net()
    parameters = [p for p in net.parameters() if frozen_too or p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    saves = everstep.Checkpoints(everstep.Every(steps=every), keep_last=None)
    state = {"model": declare(net), "optimizer": optimizer}
    data = everstep.data.arrays(X, Y, batch_size=8, shuffle=True)
    with everstep.TrainLoop(run_dir, state, max_epoch=4, seed=0, services=[saves]) as loop:
        for _epoch in loop.iter_epochs():
            for step, (x, y) in loop.iter_steps(data):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                each(net, step)
                if step == stop_at:
                    raise Boom
    return weights(net), net


def weights(net: Net) -> str:
    buffers = dict(net.named_buffers())
    return str({name: tensor.tolist() for name, tensor in {**net.state_dict(), **buffers}.items()})


def saved(run_dir: Path, entry: str = "model") -> Any:
    newest = max((run_dir / "checkpoints").iterdir())
    return read_checkpoint(newest).structure["user"][entry]


def test_only_what_is_trained_or_changes_is_saved(tmp_path: Path) -> None:
    train(tmp_path)
    tree = saved(tmp_path)
    running = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert {n for n in tree if not n.startswith("_")} == {"first.a", "first.b", "last.a", "last.b", *running}
    assert set(tree["_base"]) == {
        *(f"{part}.base.{kind}" for part in ("first", "last") for kind in ("weight", "bias")),
        "norm.weight", "norm.bias", "table", "mask",
    }  # fmt: skip


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("stop_at", [1, 5, 11])
def test_a_resume_is_the_run_that_was_never_stopped(tmp_path: Path, stop_at: int) -> None:
    undisturbed, _ = train(tmp_path / "a", declare=lambda model: model, every=12)
    assert train(tmp_path / "b", every=6)[0] == undisturbed
    with pytest.raises(Boom):
        train(tmp_path / "c", stop_at=stop_at, every=2)
    assert (
        train(tmp_path / "c", every=2, declare=lambda m: everstep.PerRank(everstep.torch.trainable(m)))[0]
        == undisturbed
    )


def test_init_from_takes_no_base_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, whole = Net(), Net(seed=5)
    torch.save({"first.base.weight": net.first.base.weight.detach()}, tmp_path / "base.pt")
    torch.save(whole.state_dict(), tmp_path / "whole.pt")
    state = {"model": everstep.torch.trainable(net)}
    start = everstep.InitFrom(tmp_path / "base.pt", on_missing="skip")
    with (
        pytest.raises(RestoreError, match=r"'model': no checkpoint has the base .* everstep\.load"),
        everstep.TrainLoop(tmp_path / "refused", state, max_epoch=1, init_from=start),
    ):
        pass
    before = net.last.base.weight.clone()
    start = everstep.InitFrom(tmp_path / "whole.pt", on_unexpected="skip")
    with everstep.TrainLoop(tmp_path / "run", state, max_epoch=1, init_from=start):
        assert torch.equal(net.first.a, whole.first.a) and torch.equal(net.last.base.weight, before)
    said = capsys.readouterr()
    (line,) = [line for line in (said.out + said.err).splitlines() if "base under trainable()" in line]
    assert "'model'" in line


def test_another_base_is_refused_by_name_and_nothing_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        train(tmp_path, stop_at=5)
    other = Net()
    with torch.no_grad():
        other.last.base.weight[0, 0] += 1e-3
    before = weights(other)
    with pytest.raises(RestoreError, match=r"model/last\.base\.weight") as refused:
        train(tmp_path, net=other)
    assert refused.value.reshaped == ("model/last.base.weight has other values",)
    assert "give it the same weights at each start" in str(refused.value) and weights(other) == before
    assert "another base than this run's: 1 frozen arrays differ: model/last.base.weight" in str(
        refused.value
    )
    with pytest.raises(RestoreError) as refused:
        train(tmp_path, net=Net(seed=5))
    assert len(refused.value.reshaped) == 4 and "reshaped" not in str(refused.value)
    assert (
        "4 frozen arrays differ: model/first.base.weight, model/first.base.bias, model/last.base.weight, ..."
        in str(refused.value)
    )
    other = Net()
    other.mask[0] = 0
    with pytest.raises(RestoreError, match="model/mask"):
        train(tmp_path, net=other)
    wider = Net()
    wider.more = torch.nn.Linear(2, 2)
    with pytest.raises(RestoreError, match=r"model/more\.weight"):
        train(tmp_path, net=wider)


def test_what_is_trained_alone_does_not_load_into_a_whole_model_and_the_error_says_how(
    tmp_path: Path,
) -> None:
    _, trained = train(tmp_path)
    net = Net()
    with pytest.raises(RestoreError, match=r"give everstep\.torch\.trainable\(model\), over the same base"):
        everstep.load(tmp_path, {"model": net})
    everstep.load(tmp_path, {"model": everstep.torch.trainable(net)})
    assert weights(net) == weights(trained)


def unfreeze(net: Net, step: int) -> None:
    if step == 4:
        net.last.base.requires_grad_(True)
    if step == 8:
        net.last.base.requires_grad_(False)
        net.first.a.requires_grad_(False)


def average(net: Net, step: int) -> None:
    with torch.no_grad():
        net.last.base.weight.lerp_(net.first.b.mean().expand(3, 8), 0.1)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("each", [unfreeze, average])
@pytest.mark.parametrize("stop_at", [3, 5, 8, 10])
def test_what_is_trained_later_frozen_later_or_changed_by_hand_is_saved(
    tmp_path: Path, each: Any, stop_at: int
) -> None:
    undisturbed, _ = train(tmp_path / "a", declare=lambda model: model, each=each, every=12)
    with pytest.raises(Boom):
        train(tmp_path / "b", each=each, stop_at=stop_at)
    assert train(tmp_path / "b", each=each)[0] == undisturbed


def test_a_change_past_torchs_count_is_an_error_and_no_such_state_is_committed(tmp_path: Path) -> None:
    def by_hand(net: Net, step: int) -> None:
        if step == 5:
            net.last.base.weight.data.add_(1)

    with pytest.raises(StateError, match=r"'model'.*'last\.base\.weight'.*past"):
        train(tmp_path, each=by_hand)
    # the fault of step 5 may be found while the save of step 4 waits for the writer
    assert max(int(path.name[-8:]) for path in (tmp_path / "checkpoints").iterdir()) < 5


@pytest.mark.campaign("long")
def test_in_a_container_it_is_the_same(tmp_path: Path) -> None:
    def boxed(model: Any) -> Any:
        return {"inside": everstep.torch.trainable(model)}

    # AdamW over the trained part alone: in a container the rest is not known as saved
    undisturbed, _ = train(tmp_path / "a", declare=lambda model: model, frozen_too=False)
    with pytest.raises(Boom):
        train(tmp_path / "b", declare=boxed, frozen_too=False, stop_at=5)
    assert "_base" in saved(tmp_path / "b")["inside"]
    assert train(tmp_path / "b", declare=boxed, frozen_too=False)[0] == undisturbed


@pytest.mark.campaign("long")
def test_the_whole_model_and_the_trained_part_meet(tmp_path: Path) -> None:
    """A checkpoint of the whole model is loaded whole, and saved whole from then on."""
    undisturbed, _ = train(tmp_path / "a", declare=lambda model: model)
    with pytest.raises(Boom):
        train(tmp_path / "b", declare=lambda model: model, stop_at=5)
    with pytest.raises(Boom):
        train(tmp_path / "b", net=Net(seed=7), stop_at=8)
    assert train(tmp_path / "b", net=Net(seed=8))[0] == undisturbed
    with pytest.raises(Boom):
        train(tmp_path / "c", stop_at=5)
    with pytest.raises(RestoreError, match=r"model/first\.base\.weight"):
        train(tmp_path / "c", declare=lambda model: model)


def test_a_rollback_to_before_a_part_was_trained_is_refused_by_name() -> None:
    net = Net()
    entry: Any = everstep.torch.trainable(net).entry()
    before = entry.save()
    kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in before.items()}
    net.last.base.requires_grad_(True)
    with torch.no_grad():
        net.last.base.bias += 1
    entry.save()
    assert [text.split(" ")[0] for text in entry.check(kept).reshaped] == ["last.base.bias"]
    with pytest.raises(ConfigError, match="takes a torch"):
        everstep.torch.trainable({})  # type: ignore[arg-type]
