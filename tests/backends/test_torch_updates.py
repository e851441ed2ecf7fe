"""Updates are counted where they happen; gradients are saved exactly while they are still to be used."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from everstep.backends import get
from everstep.errors import RestoreError
from everstep.state import decode, encode

TORCH = get("torch")


@pytest.fixture
def watch() -> Any:
    opened: list[Any] = []

    def build(**objects: Any) -> Any:
        opened.append(TORCH.update_counter(objects))
        return opened[-1]

    yield build
    for each in opened:
        each.close()


def net() -> nn.Linear:
    return nn.Linear(2, 1)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def backward(model: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()


def pending(counting: Any) -> dict[str, set[Any]]:
    """By entry, the keys of the gradients that a snapshot would hold."""
    tree = (counting.gradients() or {"grad": {}})["grad"]
    return {owner: set(grads) for owner, grads in tree.items()}


def two_updates(model: Any, *optimizers: Any) -> None:
    """After these it is known that each update has gradients of its own."""
    for _ in range(2):
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Holder:
    """Saves an optimizer that it holds."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return {"inner": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["inner"])


class Outer(torch.optim.SGD):
    """Steps an optimizer inside."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, 0.1)
        self.inner = torch.optim.SGD(params, 0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_updates_of_the_states_own_optimizers_are_counted_wherever_they_are(watch: Any) -> None:
    models = [net() for _ in range(5)]
    optimizers = [*map(sgd, models[:4]), Outer(models[4].parameters())]
    counting = watch(
        models=models[:3] + models[4:],
        first={"deep": [optimizers[0]]},
        held=Holder(optimizers[1]),
        last=optimizers[2],
        outer=optimizers[4],
    )
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model)
        optimizer.step()
    assert counting.updates == counting.optimizers == 4, "one belongs to nobody"
    assert counting.strangers() == []
    counting.close()
    optimizers[0].step()
    assert counting.updates == 4


@pytest.mark.parametrize("extra", ["nothing", "scheduler"])
def test_an_optimizer_that_the_state_lacks_is_a_stranger(watch: Any, extra: str) -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    counting = watch(model=model, **({"scheduler": scheduler} if extra == "scheduler" else {}))
    backward(model)
    optimizer.step(), optimizer.step()
    assert counting.strangers() == ["SGD that steps 2 of the state's arrays (model/weight, model/bias)"]
    assert (counting.updates, counting.optimizers) == (0, 0)


def test_an_optimizer_of_other_arrays_that_steps_on_and_on_is_a_stranger(watch: Any) -> None:
    counting = watch(config={"a": 1})
    for _ in range(2):  # made, used and dropped between two boundaries
        passing = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])
        passing.param_groups[0]["params"][0].grad = torch.ones(2)
        for _ in range(3):
            passing.step(lambda: 0.0)
        assert counting.strangers() == []
    staying = sgd(net())
    staying.step()
    assert counting.strangers() == []
    staying.step()
    assert counting.strangers() == ["SGD of arrays that are not in the state"]


class Wrapper:
    """Hands on each name that it does not know, and warns, as the wrappers of gymnasium 0.29."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        warnings.warn(f"env.{name} is deprecated", DeprecationWarning, stacklevel=2)
        return getattr(self.inner, name)

    def state_dict(self) -> dict[str, int]:
        return {}


def test_a_wrapper_is_not_asked_for_names_that_it_does_not_have(watch: Any) -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    inside = Wrapper(Wrapper(scheduler))
    counting = watch(model=model, optimizer=optimizer, envs=Wrapper(Wrapper(object())), inside=inside)
    assert counting.unscheduled() == [], "the scheduler is found inside"
    assert counting.recomputing("optimizer", "lr") == []


def test_parameters_that_no_entry_saves_are_named(watch: Any) -> None:
    first, second = net(), net()
    optimizer = sgd(first, second)
    tree = {"model": first.state_dict(), "optimizer": optimizer.state_dict()}
    found = watch(model=first, optimizer=optimizer).unsaved(tree)
    assert len(found) == len(list(second.parameters())) and "of 'optimizer'" in found[0]
    both = torch.nn.ModuleList([first, second])
    aliases = dict(both.state_dict())  # tensors that share their memory with the parameters
    for models, saved in ((both, both.state_dict()), (aliases, aliases)):
        counting = watch(models=models, optimizer=optimizer)
        assert counting.unsaved({"models": saved, "optimizer": {}}) == []


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
def test_gradients_exist_exactly_inside_an_accumulation_window(
    watch: Any, set_to_none: bool, zero_first: bool
) -> None:
    model = net()
    optimizer = sgd(model)
    counting = watch(model=model, optimizer=optimizer)
    open_window = set()
    for step in range(1, 13):
        if zero_first and step % 3 == 1:
            optimizer.zero_grad(set_to_none=set_to_none)
        backward(model)
        if step % 3 == 0:
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad(set_to_none=set_to_none)
        grads = (counting.gradients() or {"grad": {}})["grad"].values()
        if any(grad.any() for each in grads for grad in each.values()):
            open_window.add(step)
    always = {1, 2, 4, 5, 7, 8, 10, 11}  # and 3, the first update: reuse shows only at the second
    used_up = {6, 9, 12} if zero_first and not set_to_none else set()  # reused objects are always saved
    assert open_window - {3} == always | used_up


def test_marks_keep_no_gradient_alive_and_know_a_new_one_at_the_old_address(watch: Any) -> None:
    model = net()
    optimizer = sgd(model)
    counting = watch(optimizer=optimizer)
    two_updates(model, optimizer)
    for _ in range(50):
        backward(model)
        optimizer.step()
        assert pending(counting) == {}
        alive = weakref.ref(model.weight.grad)
        optimizer.zero_grad()
        gc.collect()
        assert alive() is None
        backward(model)
        assert pending(counting) == {"optimizer": {0, 1}}
        optimizer.zero_grad()


def test_each_optimizer_has_its_window_and_parameters_without_one_have_names(watch: Any) -> None:
    a, b, c, bare = net(), net(), net(), nn.Parameter(torch.ones(2))
    first, second = sgd(a), sgd(b)
    counting = watch(a=a, b=b, c=c, bare=bare, first=first, second=second)
    two_updates(a, first), two_updates(b, second)
    backward(a), backward(b), backward(c)
    bare.sum().backward()
    first.step()
    assert pending(counting) == {"second": {"b.weight", "b.bias"}, "c": {"weight", "bias"}, "bare": {0}}


def test_a_loss_in_the_state_is_not_asked_for_a_gradient(watch: Any) -> None:
    model = net()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert pending(watch(model=model, loss=loss)) == {"model": {"weight", "bias"}}  # without torch's warning


def test_frozen_and_unused_parameters_do_not_hide_an_open_window(watch: Any) -> None:
    experts = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(20)])
    optimizer = sgd(experts)
    counting = watch(optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        experts[3].sum().backward()
        optimizer.step()
    assert pending(counting) == {}
    optimizer.zero_grad()
    experts[7].sum().backward()
    assert pending(counting) == {"optimizer": {7}}


def test_gradients_come_back_and_absent_ones_go(watch: Any) -> None:
    def build() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(net(), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, watch(model=model, optimizer=optimizer)

    model, optimizer, counting = build()
    model[1](torch.randn(1, 3, 5, 5)).sum().backward()
    tree = decode(encode(counting.gradients()))
    other, other_optimizer, other_counting = build()
    backward(other[0])
    other_counting.load_gradients(tree)
    assert other[0].weight.grad is None
    assert torch.equal(other[1].weight.grad, model[1].weight.grad)
    assert other[1].weight.grad.stride() == model[1].weight.grad.stride()
    model[1](torch.ones(1, 3, 5, 5)).sum().backward()
    other[1](torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step(), other_optimizer.step()
    assert torch.equal(other[1].weight, model[1].weight)

    assert (
        tree["grad"]["optimizer"]["model.1.weight"].sum() != other[1].weight.grad.sum()
    )  # the tree is not aliased
    other_counting.load_gradients(None)
    assert all(p.grad is None for p in other.parameters())
    with pytest.raises(RestoreError, match="optimizer/7"):
        counting.load_gradients({"grad": {"optimizer": {7: torch.ones(1)}}, "reused": {}})


def test_gradients_that_were_put_back_are_still_to_be_used(watch: Any) -> None:
    model = net()
    optimizer = sgd(model)
    counting = watch(optimizer=optimizer)
    two_updates(model, optimizer)
    backward(model)
    tree = decode(encode(counting.gradients()))
    optimizer.step()
    assert pending(counting) == {}
    counting.load_gradients(tree)
    assert repr(counting.gradients()["grad"]) == repr(tree["grad"])


def test_sparse_gradients_survive(watch: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    counting = watch(table=table, optimizer=torch.optim.SparseAdam(table.parameters()))
    with torch.sparse.check_sparse_tensor_invariants():
        table(torch.tensor([1, 1, 3])).sum().backward()
        expected = table.weight.grad.to_dense()
        tree = decode(encode(counting.gradients()))
        counting.load_gradients(tree)
        assert table.weight.grad.is_sparse and torch.equal(table.weight.grad.to_dense(), expected)


@pytest.mark.parametrize("zeroing", ["never", "in place"])
def test_gradients_that_serve_update_after_update_are_always_saved(watch: Any, zeroing: str) -> None:
    model = net()
    optimizer = sgd(model)
    counting = watch(model=model, optimizer=optimizer)
    for _ in range(3):
        if zeroing == "in place":
            optimizer.zero_grad(set_to_none=False)
        backward(model)
        optimizer.step()
    assert pending(counting) == {"optimizer": {"model.weight", "model.bias"}}
