"""Torch's objects: restored in place and bit for bit, refused beforehand where they do not fit."""

import warnings
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import RestoreError, StateError
from everstep.state import decode, digest, encode, make_entry


def snapshot(**objects: Any) -> Any:
    return encode({name: make_entry(name, obj).save() for name, obj in objects.items()})


def restore(encoded: Any, **objects: Any) -> None:
    tree = decode(encoded)
    for name, obj in objects.items():
        entry = make_entry(name, obj)
        assert not any(entry.check(tree[name]))
        entry.load(tree[name])


class Net(nn.Module):
    """Parameters, buffers, one that the state_dict leaves out and that grows, normalisation, extra state."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.seen: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def train(net: nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            dtype = next(net.parameters()).dtype
            loss = net(torch.randn(4, 1, 5, 5, generator=generator).to(dtype)).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize("size", [2, 5])
def test_a_module_comes_back_in_place_with_buffers_and_extra_state(size: int) -> None:
    net = Net()
    train(net, torch.optim.SGD(net.parameters(), 0.1), 2)
    net.seen, net.cache = (1, 2), torch.arange(float(size), requires_grad=True)
    encoded = snapshot(net=net)
    fresh = Net()
    weight = fresh.head.weight
    restore(encoded, net=fresh)
    assert fresh.head.weight is weight and weight.requires_grad
    assert fresh.seen == (1, 2) and torch.equal(fresh.cache, net.cache)
    assert fresh.cache.is_leaf and fresh.cache.requires_grad
    assert digest(snapshot(net=fresh)) == digest(encoded)
    assert "cache" not in fresh.state_dict()
    entry = make_entry("net", net)
    assert {name for name in entry.save() if entry.guarded((name,))} == dict(net.named_parameters()).keys()


def test_a_module_of_another_shape_is_refused_with_three_lists() -> None:
    tree = decode(snapshot(net=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))["net"]
    entry = make_entry("net", nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(3, 1).double()))
    found = entry.check(tree)
    assert found.missing == ["2.weight", "2.bias"]
    assert found.unexpected == ["1.weight", "1.bias"]
    assert found.reshaped == [
        "0.weight (3, 2) float32 -> (4, 2) float32",
        "0.bias (3,) float32 -> (4,) float32",
    ]
    with pytest.raises(RestoreError) as caught:
        entry.load(tree)
    assert caught.value.reshaped == tuple(found.reshaped)
    assert make_entry("net", nn.Linear(2, 3).half()).check(nn.Linear(2, 3).state_dict()).reshaped
    assert make_entry("net", nn.Linear(2, 3)).check([1]).reshaped == ["a list -> a Linear"]


def test_versions_of_submodules_reach_their_loading() -> None:
    class Versioned(nn.Linear):
        _version = 3
        loaded = None

        def _load_from_state_dict(self, state: Any, prefix: Any, metadata: Any, *rest: Any) -> None:
            Versioned.loaded = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    encoded = snapshot(net=nn.Sequential(Versioned(1, 1)))
    Versioned._version = 4
    restore(encoded, net=nn.Sequential(Versioned(1, 1)))
    assert Versioned.loaded == 3


class Alias(nn.Module):
    """Holds what its weights were when it was made, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.register_buffer("hidden", torch.zeros(2))
        self.first, self.weights = self.hidden, [each.data for each in self.parameters()]
        self.phase = torch.tensor([1 + 1j]).conj()


def test_an_attribute_that_shared_memory_with_a_weight_does_not_write_over_it() -> None:
    """Training has given the weight another place: the attribute keeps the first value, or a later one."""
    for write in (False, True):
        model, again = Alias(), Alias()
        again.linear.load_state_dict(model.linear.state_dict())
        one, other = make_entry("model", model), make_entry("model", again)
        one.enter(), other.enter()
        for _ in range(3):
            model.hidden = model.hidden + 1
            model.linear.weight.data = model.linear.weight.data - 1
        if write:
            model.first.sub_(1)
        other.load(decode(encode(one.save())))
        assert torch.equal(again.hidden, model.hidden) and torch.equal(again.first, model.first)
        assert torch.equal(again.linear.weight, model.linear.weight)
        assert torch.equal(again.weights[0], model.weights[0])


def test_buffers_that_the_program_makes_otherwise_are_refused() -> None:
    for tracks in (True, False):
        saved = make_entry("norm", nn.BatchNorm1d(2, track_running_stats=tracks)).save()
        found = make_entry("norm", nn.BatchNorm1d(2, track_running_stats=not tracks)).check(saved)
        assert "running_mean" in found.missing + found.unexpected


def test_tensors_and_parameters_are_restored_in_place() -> None:
    parameter, buffer = nn.Parameter(torch.ones(2)), torch.ones(2, 2).t()[0]
    alias = buffer.view(2)
    encoded = snapshot(p=parameter, b=buffer)
    with torch.no_grad():
        parameter.zero_()
        buffer.zero_()
    restore(encoded, p=parameter, b=buffer)
    assert parameter.tolist() == alias.tolist() == [1, 1]
    assert parameter.requires_grad and parameter.is_leaf
    assert make_entry("p", parameter).guarded(())
    assert not make_entry("i", torch.arange(2)).guarded(())
    assert make_entry("p", parameter).check(torch.ones(3)).reshaped == ["(3,) float32 -> (2,) float32"]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adam capturable lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "rprop": torch.optim.Rprop,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
DIVERGES = ("lbfgs", torch.bfloat16)


@pytest.mark.campaign("long", gate=12)
@pytest.mark.parametrize(
    ("name", "dtype"), [c for c in product(OPTIMIZERS, DTYPES) if c != DIVERGES], ids=str
)
def test_every_optimizer_goes_on_to_the_same_bits(name: str, dtype: torch.dtype) -> None:
    net = Net().to(dtype)
    optimizer = OPTIMIZERS[name](net.parameters())
    train(net, optimizer, 2)
    encoded = snapshot(net=net, optimizer=optimizer)
    fresh = Net().to(dtype)
    other = OPTIMIZERS[name](fresh.parameters())
    train(fresh, other, 1)  # what was there before is gone
    restore(encoded, net=fresh, optimizer=other)
    assert digest(snapshot(net=fresh, optimizer=other)) == digest(encoded)
    for each in ((net, optimizer), (fresh, other)):
        train(*each, 3)
    assert digest(snapshot(net=fresh, optimizer=other)) == digest(snapshot(net=net, optimizer=optimizer))


def test_moments_of_another_dtype_than_their_parameter_keep_it() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    state["exp_avg"] = torch.full((3,), 1.0001)
    state["nested"] = {"list": [torch.tensor(1.0001)], "count": torch.tensor(3)}
    encoded = snapshot(optimizer=optimizer)
    other = torch.optim.Adam([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    restore(encoded, optimizer=other)
    assert digest(snapshot(optimizer=other)) == digest(encoded)


def test_moments_keep_their_memory_order_and_share_no_memory_with_the_snapshot() -> None:
    def build() -> tuple[Any, Any]:
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(conv.parameters())
        conv(torch.randn(1, 3, 5, 5)).sum().backward()
        return conv, optimizer

    def strides(optimizer: Any) -> Any:
        return [t.stride() for s in optimizer.state.values() for t in s.values()]

    (conv, optimizer), (fresh, other) = build(), build()
    optimizer.step()
    encoded = snapshot(conv=conv, optimizer=optimizer)
    clean = digest(encoded)
    for _ in range(2):
        restore(encoded, conv=fresh, optimizer=other)
        assert fresh.weight.stride() == conv.weight.stride() != torch.empty(4, 3, 3, 3).stride()
        assert strides(other) == strides(optimizer)
        other.step()
        assert digest(encoded) == clean


def test_moments_follow_layers_that_change_places() -> None:
    def build() -> tuple[Any, Any, dict[str, Any]]:
        net = nn.ModuleDict({"fast": nn.Linear(1, 1), "slow": nn.Linear(1, 1)})
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        entries = {"net": make_entry("net", net), "optimizer": make_entry("optimizer", optimizer)}
        for entry in entries.values():
            entry.relate(entries)
        return net, optimizer, entries

    def moments(net: Any, optimizer: Any) -> list[float]:
        return [optimizer.state[each]["momentum_buffer"].item() for each in net.parameters()]

    (net, optimizer, entries), (fresh, other, live) = build(), build()
    for value, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    entries["optimizer"].save()
    net["fast"], net["slow"] = net["slow"], net["fast"]
    saved = encode({name: entry.save() for name, entry in entries.items()})
    for name, tree in decode(saved).items():
        live[name].load(tree)
    assert moments(fresh, other) == moments(net, optimizer) == [2, 3, 0, 1]
    assert digest(encode({name: entry.save() for name, entry in live.items()})) == digest(saved)


def test_an_optimizer_of_other_groups_is_refused() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    tree = decode(snapshot(o=torch.optim.SGD(one.parameters(), 0.1)))["o"]
    entry = make_entry(
        "o", torch.optim.SGD([{"params": one.parameters()}, {"params": two.parameters()}], 0.1)
    )
    assert entry.check(tree).reshaped == ["parameters per group [2] -> [2, 2]"]
    assert entry.check({}).missing == ["state", "param_groups", "class"]
    with pytest.raises(RestoreError):
        entry.load(tree)
    assert entry.guarded(("state", 0, "exp_avg")) and not entry.guarded(("param_groups", 0, "lr"))


@pytest.mark.parametrize("learned", [False, True])
def test_a_rate_in_a_tensor_stays_that_tensor(learned: bool) -> None:
    """A compiled step reads it, and a program may hold it, or learn it."""
    saved = torch.optim.SGD(nn.Linear(1, 1).parameters(), torch.tensor(0.5))
    live = torch.optim.SGD(nn.Linear(1, 1).parameters(), rate := torch.tensor(0.1, requires_grad=learned))
    make_entry("o", live).load(decode(snapshot(o=saved))["o"])
    assert live.param_groups[0]["lr"] is rate and rate.item() == 0.5


class Lookahead(torch.optim.SGD):
    """Lookahead of alphadl has "slow_state": it trained, and no resume could load its checkpoint."""

    def state_dict(self) -> Any:
        return {"slow_state": {}, "param_groups": super().state_dict()["param_groups"]}


class Zero(torch.optim.SGD):
    """Each rank has a part, as of torch's ZeroRedundancyOptimizer."""

    def state_dict(self) -> Any:
        raise RuntimeError("Optimizer state has not been consolidated on this rank")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Lookahead, "has no 'state', so no resume could load it: give"),
        (Zero, "consolidated .*: use fully_shard"),
    ],
)
def test_an_optimizer_with_a_state_dict_that_no_resume_could_load_is_refused(kind: Any, words: str) -> None:
    with pytest.raises(StateError, match=f"of {kind.__name__} .*{words}"):
        make_entry("o", kind(nn.Linear(1, 1).parameters(), 0.1))


S = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Any] = {
    "step": lambda o: S.StepLR(o, 2),
    "multistep": lambda o: S.MultiStepLR(o, [2, 4, 4]),
    "constant": lambda o: S.ConstantLR(o, 0.5, 3),
    "linear": S.LinearLR,
    "exponential": lambda o: S.ExponentialLR(o, 0.9),
    "polynomial": lambda o: S.PolynomialLR(o, 7, 2.0),
    "cosine": lambda o: S.CosineAnnealingLR(o, 7),
    "restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: S.CyclicLR(o, 0.01, 0.1, 3),
    "onecycle": lambda o: S.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: S.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: S.MultiplicativeLR(o, lambda epoch: 0.9),
    "sequential": lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.1, 2), S.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 2), S.ExponentialLR(o, 0.9)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    "plateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_goes_on(name: str) -> None:
    def build() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def advance(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter in")  # SequentialLR's own
        one, other = build(), build()
        advance(*one, 3)
        restore(snapshot(o=one[0], s=one[1]), o=other[0], s=other[1])
        assert advance(*other, 5) == advance(*one, 5)


def test_a_scheduler_may_step_first_after_a_restore() -> None:
    def made() -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        return {"optimizer": optimizer, "schedule": S.ExponentialLR(optimizer, 0.5)}

    stepped, restored = made(), made()
    stepped["optimizer"].step()
    restore(snapshot(**stepped), **restored)
    restored["schedule"].step()  # torch's warning of a wrong order would be an error here
    assert restored["schedule"].get_last_lr() == [0.05]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_an_observer_of_quantization_loads_buffers_of_another_shape() -> None:
    """It gets the shape of the channels at its first batch; such a model could never be resumed."""
    from torch.ao import quantization

    def made() -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return quantization.prepare_qat(net.train())

    trained, fresh = made(), made()
    trained(torch.randn(5, 3))
    restore(snapshot(net=trained), net=fresh)
    assert digest(snapshot(net=fresh)) == digest(snapshot(net=trained))
    assert fresh[0].weight_fake_quant.scale.shape == (4,)
    wide = decode(snapshot(norm=nn.BatchNorm1d(3, affine=False)))  # torch's: no buffer is resized
    entry = make_entry("norm", nn.BatchNorm1d(2, affine=False))
    assert entry.check(wide["norm"]).reshaped[0].startswith("running_mean (3,)")


class HandsOn(torch.optim.Optimizer):
    """A wrapper that has the groups and the state of another optimizer, and loads into that one alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


def test_a_wrapper_that_hands_its_load_on_is_resumed_as_often_as_it_is_stopped(tmp_path: Path) -> None:
    def train(run: Path, max_epoch: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = HandsOn(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        state = {"model": model, "optimizer": optimizer}
        with everstep.TrainLoop(run, state, max_epoch=max_epoch, seed=0) as loop:
            for _ in loop.iter_epochs():
                for _, batch in loop.iter_steps([torch.ones(1, 2)] * 2):
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
        assert optimizer.param_groups is optimizer.optimizer.param_groups
        return loop.ending.digest

    assert [train(tmp_path / "run", n) for n in (1, 2, 3, 4)][-1] == train(tmp_path / "whole", 4)


class Sam(torch.optim.Optimizer):
    """As in davda54/sam: an optimizer inside has the same groups, and steps in a method of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad, alpha=self.param_groups[0]["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["old"])
        self.base.step()
        self.zero_grad()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


@pytest.mark.parametrize("named", [("outer",), ("base",), ("outer", "base")])
def test_groups_that_the_program_or_another_optimizer_holds_are_those_that_a_resume_loads(
    tmp_path: Path, named: tuple[str, ...]
) -> None:
    """`groups = optimizer.param_groups` set nothing after a resume, and nobody noticed."""

    def train(run: Path, max_step: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        outer = Sam(model.parameters())
        state = {"model": model, **{name: {"outer": outer, "base": outer.base}[name] for name in named}}
        groups, group = outer.param_groups, outer.param_groups[0]
        data = everstep.data.arrays(torch.randn(16, 2), batch_size=2)
        with everstep.TrainLoop(run, state, max_step=max_step, seed=0) as loop:
            for _ in loop.iter_epochs():
                for step, (batch,) in loop.iter_steps(data):
                    groups[0]["lr"] = 0.1 / step
                    group["momentum"] = 0.9 - step / 100
                    for update in (outer.first_step, outer.second_step):
                        model(batch).square().sum().backward()
                        update()
            assert loop._engine.user.updates == step  # one for each second step
        return model.weight.flatten().tolist()

    whole = train(tmp_path / "whole", 12)
    assert [train(tmp_path / "run", max_step) for max_step in (5, 12)][-1] == whole


class Switching(torch.optim.Optimizer):
    """One optimizer for some steps, then another, then lines of its own: all have the same groups."""

    def __init__(self, parameters: Any, turns: tuple[int, int]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.one, self.two = torch.optim.SGD(self.param_groups), torch.optim.Adam(self.param_groups)
        self.one.param_groups = self.two.param_groups = self.param_groups
        self.count, self.turns = 0, turns

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count <= self.turns[1]:
            return (self.one if self.count <= self.turns[0] else self.two).step(closure)
        with torch.no_grad():
            torch._foreach_mul_(self.param_groups[0]["params"], 0.9)


class Flat(torch.optim.Optimizer):
    """All moments lie in one tensor, of which the state has views; all gradients in another one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        sizes, self.rate = [each.numel() for each in self.param_groups[0]["params"]], torch.ones(())
        self.moments, self.gradients = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
        views = self.moments.split(sizes), self.gradients.split(sizes)
        for each, moment, gradient in zip(self.param_groups[0]["params"], *views, strict=True):
            inner = {"age": torch.zeros(()), "rate": self.rate}
            self.state[each] = {"moment": moment.view_as(each), "inner": inner}
            each.grad = gradient.view_as(each)
        self.ages = [each["inner"]["age"] for each in self.state.values()]
        self.state["all"] = self.rate  # by a name, as MADGRAD has the number of updates

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradients.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.moments.mul_(0.9).add_(self.gradients)
        torch._foreach_add_(self.ages, 1)
        self.rate.mul_(0.9)  # one for all parameters
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            each.sub_(state["moment"] * self.state["all"] * state["inner"]["rate"] / state["inner"]["age"])


@pytest.mark.parametrize("make", [Flat, *(partial(Switching, turns=t) for t in [(4, 8), (0, 20), (0, 0)])])
def test_a_step_counts_and_finds_its_tensors_whatever_the_optimizer_holds(tmp_path: Path, make: Any) -> None:
    """The first one inside alone was counted, and a run in which it did not step was refused.

    A resume gave the parameters other moments and gradients than the views of the tensors that step.
    """

    def train(run: Path, max_step: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = make(model.parameters())
        data = everstep.data.arrays(torch.randn(16, 2), batch_size=2)
        with everstep.TrainLoop(run, {"m": model, "o": optimizer}, max_step=max_step, seed=0) as loop:
            for _ in loop.iter_epochs():
                for _, (batch,) in loop.iter_steps(data):
                    optimizer.zero_grad()
                    model(batch).square().sum().backward()
                    optimizer.step()
            assert loop._engine.user.updates == max_step
        return model.weight.flatten().tolist()

    whole = train(tmp_path / "whole", 12)
    assert [train(tmp_path / "run", max_step) for max_step in (5, 12)][-1] == whole
