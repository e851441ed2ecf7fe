"""What a run has saved, in another one, by the bare model's names: `init_from=`, `load`, `runs.best`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep
from everstep import InitFrom
from everstep.errors import ConfigError, DamagedCheckpointError, NoCheckpointError, RestoreError, RunDirError
from everstep.record import RunDir, RunJournal
from everstep.state import make_entry
from everstep.supervisor import Loaded
from tiny_runs import Boom, flip_array, supervised

LOSSES = [3.0, 1.0, 2.0, 0.5]
"""By epoch; the run resumes from epoch 3 below, where 0.5 was not seen yet."""
LAST = "epoch-0004-step-00000008"


class Net:
    """A model and an optimizer; its first start ends after epoch 3, its second one is complete."""

    def __init__(self, out: int = 3, lr: float = 0.01, model: str = "model") -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, out), torch.nn.BatchNorm1d(out))
        self.model[0].register_buffer("seen", torch.zeros(1), persistent=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.notes = {"scale": np.ones(2), "epoch": 0}
        self.state = {model: self.model, "optimizer": self.optimizer, "notes": self.notes}
        self.before = snapshot(self.model)
        self.lines: list[str] = []

    def loop(self, run_dir: Path, max_epoch: int = 1, **arguments: Any) -> everstep.TrainLoop:
        saves = everstep.Checkpoints(everstep.Every(epochs=1), keep_last=9)
        services = [everstep.Best("valid/loss"), saves, everstep.services.Console(sink=self.lines.append)]
        arguments = {"seed": 1, "max_epoch": max_epoch, **arguments}
        return everstep.TrainLoop(run_dir, self.state, services=services, **arguments)

    def train(self, run_dir: Path, max_epoch: int, **arguments: Any) -> dict[int, Any]:
        """The weights after each epoch."""
        weights = {}
        with self.loop(run_dir, max_epoch, **arguments) as loop:
            for epoch in loop.iter_epochs():
                for _, (x,) in loop.iter_steps(everstep.data.arrays(torch.randn(4, 4), batch_size=2)):
                    loss = self.model(x).square().sum()
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.model[0].seen += 1
                self.notes.update(epoch=epoch)
                with loop.evaluation():
                    loop.collect_metrics({"valid/loss": LOSSES[epoch - 1]})
                weights[epoch] = snapshot(self.model)
        return weights

    def entered(self, run_dir: Path, start: Any, **arguments: Any) -> Net:
        """Enter and leave the block without a step."""
        with self.loop(run_dir, init_from=start, **arguments) as loop:
            self.step = loop.step
        return self

    @property
    def adam(self) -> dict[Any, Any]:
        state: dict[Any, Any] = self.optimizer.state_dict()["state"]
        return state

    def has(self, weights: dict[str, torch.Tensor], but: str = "^$") -> bool:
        """Whether the saved weights are these, and those that `but` finds are as before."""
        return all(
            torch.equal(tensor, (self.before if re.search(but, name) else weights)[name])
            for name, tensor in self.model.state_dict().items()
        )


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = [*model.state_dict().items(), *model.named_buffers()]
    return {name: tensor.clone() for name, tensor in tensors}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    weights = Net().train(run_dir, 3)
    return run_dir, weights | Net().train(run_dir, 4)


Trained = tuple[Path, dict[int, Any]]


def test_another_learning_rate_than_the_source_has_is_said(tmp_path: Path, trained: Trained) -> None:
    def entered(name: str, reset: Any = (), **given: float | None) -> tuple[Any, list[str]]:
        net, best = Net(lr=0.5), trained[0] / "best" / "valid.loss"
        net.optimizer.param_groups[0] |= given
        net.entered(tmp_path / name, InitFrom(best, reset=reset) if reset else best)
        return net.optimizer.param_groups[0], [line for line in net.lines if "learning rate" in line]

    group, (line,) = entered("theirs")
    assert group["lr"] == 0.01
    assert ", 0.01, and not with this program's, 0.5;" in line and "reset=['lr', 'step']" in line
    with pytest.raises(ConfigError, match=r"have no counters .* reset=\['lr', 'step'\]"):
        entered("ours", {"lr"})
    group, _ = entered("scheduled", {"lr", "step"}, initial_lr=0.6)  # as a schedule has put it there
    assert (group["lr"], group["initial_lr"]) == (0.5, 0.6)
    group, _ = entered("none", lr=None)  # as an optimizer has it that finds its own
    assert group["lr"] == 0.01
    group, lines = entered("ours", {"lr", "step"})
    assert group["lr"] == 0.5 and lines == []


def test_the_best_weights_by_the_folder_of_their_metric(tmp_path: Path, trained: Trained) -> None:
    run_dir, weights = trained
    assert len(list((run_dir / "best" / "valid.loss").iterdir())) > 1, "older ones that checkpoints speak of"
    net = Net()
    loaded = everstep.load(run_dir / "best" / "valid.loss", {"model": net.model})
    assert same(snapshot(net.model), weights[4])
    folder = run_dir / "best" / "valid.loss" / LAST
    assert loaded == Loaded(path=str(folder), step=8, epoch=4)
    (best,) = everstep.runs.best(run_dir).values()
    assert best == everstep.supervisor.BestRecord("valid/loss", 0.5, 8, 4, str(folder))
    # of a run that has gone back, the best is the one of that time
    shutil.copytree(run_dir, back := tmp_path / "run")
    shutil.rmtree(back / "checkpoints" / LAST)
    assert everstep.load(back / "best" / "valid.loss", {"model": net.model}).epoch == 2
    assert same(snapshot(net.model), weights[2])
    assert everstep.runs.best(str(back))["valid/loss"].value == 1.0


SOURCES: list[Callable[[Path], Any]] = [
    lambda run: run,
    lambda run: str(run / "checkpoints" / LAST),
    lambda run: InitFrom(run),
    lambda run: InitFrom(run / "best" / "valid.loss", include="^model|^notes"),
]


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_and_no_trace(trained: Trained, source: Callable[[Path], Any]) -> None:
    run_dir, weights = trained
    before, random_state, net = files(run_dir), torch.get_rng_state(), Net()
    torch.set_rng_state(random_state)
    loaded = everstep.load(source(run_dir), {"model": net.model, "notes": net.notes})
    assert loaded.step == 8 and net.notes["epoch"] == 4 and net.has(weights[4])
    assert files(run_dir) == before and torch.equal(torch.get_rng_state(), random_state)


def test_what_does_not_fit_is_refused_before_anything_is_loaded(trained: Trained) -> None:
    net = Net(out=5)
    with pytest.raises(RestoreError, match="does not fit the state") as raised:
        everstep.load(trained[0], {"notes": net.notes, "model": net.model, "ema": np.zeros(2)})
    assert raised.value.missing == ("ema",) and raised.value.unexpected == ()
    assert "model/0.weight (3, 4) float32 -> (5, 4) float32" in raised.value.reshaped
    assert net.notes["epoch"] == 0
    other = torch.optim.SGD([*net.model.parameters()][:1], lr=0.1)
    with pytest.raises(RestoreError) as raised:
        everstep.load(InitFrom(trained[0], on_reshaped="skip"), {"model": net.model, "optimizer": other})
    assert raised.value.reshaped == ("optimizer/parameters per group [4] -> [1]", "optimizer/Adam -> SGD")
    assert same(snapshot(net.model), net.before)


class Picky:
    """Takes its part of a state, and then refuses it, if it is picky."""

    value, picky = 1, True

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value, refuses = state["value"], self.picky
        self.picky = False
        if refuses:
            raise ValueError("not this one")


class Told(torch.nn.Module):
    """A model whose own code refuses a part, after torch has loaded the weights before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = torch.nn.Linear(2, 2), Extra()


class Extra(torch.nn.Module):
    picky = True

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        refuses, self.picky = self.picky, False
        if refuses:
            raise ValueError("not this one")


LOADS: dict[str, Callable[[Path, Any], object]] = {
    "load": lambda path, state: everstep.load(path / "a", state),
    "init_from": lambda path, state: everstep.Supervisor(path / "b", state, init_from=path / "a").__enter__(),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("order", ["model picky", "picky model", "told"])
def test_an_object_that_refuses_its_part_leaves_all_objects_as_they_were(tmp_path: Path, order, load) -> None:
    """Its own code runs after all comparisons, and in the order of the list: it may look at the model."""
    made = {"model": torch.nn.Linear, "picky": lambda *_: Picky(), "told": lambda *_: Told()}
    other, state = ({name: made[name](2, 2) for name in order.split()} for _ in range(2))

    def step(sv: everstep.Supervisor) -> None:
        if "picky" in other:
            other["picky"].value = 2

    supervised(everstep.Supervisor(tmp_path / "a", other, max_step=1), step)
    model = state.get("model") or state["told"].first
    before, picky = model.weight.clone(), state.get("picky", Picky())
    with pytest.raises((RestoreError, ValueError), match="not this one"):
        load(tmp_path, state)
    assert torch.equal(model.weight, before) and picky.value == 1
    everstep.load(tmp_path / "a", state)
    assert not torch.equal(model.weight, before) and state.get("picky", Picky).value == 1 + ("picky" in state)


def test_only_the_bytes_of_the_entry_are_read(tmp_path: Path, trained: Trained) -> None:
    """The optimizer is damaged, and the model is loaded; a resume would pass the checkpoint over."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(trained[0] / "checkpoints" / LAST, folder)
    flip_array(folder, "user/optimizer/state/0/exp_avg")
    net = Net()
    everstep.load(folder, {"model": net.model})
    assert net.has(trained[1][4])
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        everstep.load(folder, {"optimizer": net.optimizer})
    flip_array(folder, "user/model/0.weight")
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        everstep.load(folder, {"model": net.model})


@pytest.mark.parametrize("source", [*SOURCES[:2], lambda run: run / "best" / "valid.loss"])
def test_a_warm_start_takes_the_weights_and_counts_from_zero(tmp_path: Path, trained, source) -> None:
    """init_fn runs first, the warm start has the last word."""
    calls: list[str] = []
    net, start = Net(), source(trained[0])
    best = "best" in str(start)
    names = {"include": "^model|^notes", "on_missing": "skip"}
    net.entered(tmp_path, InitFrom(start, **names) if best else start, init_fn=lambda: calls.append("init"))
    assert net.has(trained[1][4]) and net.step == 0 and calls == ["init"]
    assert best or net.adam[0]["step"] == 8  # the optimizer comes along
    assert any("initialised from" in line and LAST in line for line in net.lines)


def test_the_run_of_a_warm_start_is_left_as_it_is(tmp_path: Path, trained: Trained) -> None:
    shutil.copytree(trained[0], other := tmp_path / "other")
    with open(other / "checkpoints" / LAST / "arrays.safetensors", "r+b") as file:
        file.truncate(10)
    before = files(other)
    net = Net().entered(tmp_path / "run", other)
    assert files(other) == before and net.has(trained[1][3])
    assert any("init_from" in line and LAST in line and "passed over" in line for line in net.lines)
    with pytest.warns(RuntimeWarning, match=f"{LAST}.*passed over"):
        assert everstep.load(other, {"model": Net().model}).epoch == 3


def test_a_second_launch_ignores_it_and_says_so(tmp_path: Path, trained: Trained) -> None:
    weights = Net().train(tmp_path, 1, init_from=trained[0])[1]
    second = Net()
    second.train(tmp_path, 1, init_from=trained[0])
    assert same(snapshot(second.model), weights)
    assert any("init_from" in line and "is not used" in line for line in second.lines)


def test_the_record_names_the_run_with_whose_weights_a_run_began(tmp_path: Path, trained: Trained) -> None:
    """Also in later starts, and after a start from nothing that has saved nothing."""
    source = trained[0]
    name, fork = RunDir.open(source, create=False).id, source / "checkpoints" / "epoch-0003-step-00000006"
    began = {"best": source / "best" / "valid.loss", "init": source, "resume": fork}
    Net().entered(tmp_path / "best", began["best"])
    Net().train(tmp_path / "init", 1, init_from=source)
    Net().train(tmp_path / "resume", 4, resume=fork)
    for run in ("init", "resume"):
        with pytest.raises(KeyError), Net().loop(tmp_path / run, 4, resume=False):
            raise KeyError
        Net().loop(tmp_path / run, 4).__enter__().__exit__(None, None, None)
    for run, source in began.items():
        recorded = RunJournal(tmp_path / run).facts_since(1)
        first, last = recorded[0], recorded[-1]
        assert first["parent"] == last["parent"] and last["parent"]["run"] == name
        assert first["parent"]["path"].startswith(str(source)), run
        assert first["parent"]["path"].endswith(f"/{first['parent']['checkpoint']}")
    from_nothing = RunJournal(tmp_path / "init").facts_since(2)[0]
    assert from_nothing["starts_over"] and from_nothing["parent"] is None


OTHERWISE = {r"^model/0\.weight$": "model/x"}
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "include": ({"include": r"^model/0\."}, r"^1\."),
    "exclude": ({"exclude": r"bias$|^optimizer"}, "bias$"),
    "rename": ({"rename": {r"^model/": "net/"}}, "^$"),
    **{policy: ({"on_missing": policy, "on_unexpected": policy, "rename": OTHERWISE}, "^0.w")
       for policy in ("skip", "warn")},
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
def test_parts_by_name(tmp_path: Path, trained: Trained, choice: str) -> None:
    arguments, left = CHOICES[choice]
    net = Net(model="net" if choice == "rename" else "model")
    net.entered(tmp_path, InitFrom(trained[0], **arguments))
    assert net.has(trained[1][4], but=left)
    assert (net.adam == {}) == (choice in ("include", "exclude"))
    assert any("missing: model/0.weight" in line for line in net.lines) == (choice == "warn")


def test_the_default_error_lists_every_mismatch(tmp_path: Path, trained: Trained) -> None:
    net = Net(model="net")
    with pytest.raises(RestoreError, match=r"include=.*rename=") as raised:
        net.entered(tmp_path / "run", trained[0])
    names = [*net.model.state_dict()]
    assert raised.value.missing == tuple(f"net/{name}" for name in names)
    assert raised.value.unexpected == tuple(f"model/{name}" for name in names)
    net = Net(out=5)
    with pytest.raises(RestoreError, match="reshaped") as raised:
        net.entered(tmp_path / "run2", trained[0])
    assert len(raised.value.reshaped) == 6 and same(snapshot(net.model), net.before)
    net.entered(tmp_path / "run3", InitFrom(trained[0], on_reshaped="warn", reset={"step", "optimizer"}))
    assert net.has(trained[1][4], but="weight|bias|running")
    assert any("reshaped: model/0" in line for line in net.lines)


def test_steps_counted_on_and_a_failure_in_the_first_of_them(tmp_path: Path, trained: Trained) -> None:
    """The resume is from the checkpoint before that step: to the bit the run that did not fail."""
    digests, start = [], InitFrom(trained[0], reset=())
    for name, fails in (("whole", False), ("failed", True), ("failed", False)):
        torch.manual_seed(0)
        net = Net()
        data = everstep.data.arrays(torch.randn(4, 4), batch_size=2)
        with suppress(Boom), net.loop(tmp_path / name, 6, init_from=start) as loop:
            for _ in loop.iter_epochs():
                for _, (x,) in loop.iter_steps(data):
                    if fails:
                        raise Boom
                    net.optimizer.zero_grad()
                    net.model(x).square().sum().backward()
                    net.optimizer.step()
                loop.collect_metrics({"valid/loss": 1.0})
            digests.append(loop)
    assert len(digests) == 2 and digests[0].ending.digest == digests[1].ending.digest


def test_reset_parts(tmp_path: Path, trained: Trained) -> None:
    for name, (reset, found) in enumerate({
        (): (8, 0.01, 8), ("lr", "step"): (0, 0.5, 8), ("optimizer", "step"): (0, 0.5, None),
    }.items()):  # fmt: skip
        net = Net(lr=0.5).entered(tmp_path / str(name), InitFrom(trained[0], reset=reset), max_epoch=9)
        assert (net.step, net.optimizer.param_groups[0]["lr"], net.adam.get(0, {}).get("step")) == found


def test_a_choice_that_cannot_be_made(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "empty").mkdir()
    run, alone = trained[0], tmp_path / "best" / "valid.loss"
    shutil.copytree(run / "best" / "valid.loss", alone)
    nothing = r"selects nothing in .*after rename=: .*0\.weight"
    refused: list[tuple[Any, type[Exception], str]] = [
        (InitFrom(run, rename={r"^model/\d": "model/0"}), ConfigError, r"'model/0\.weight' and 'model/1"),
        (InitFrom(run, rename={"^model/": r"\1/"}), ConfigError, r"invalid group reference 1.*give a name"),
        (InitFrom(run, include="^modle/"), ConfigError, nothing),
        (InitFrom(run, include="^old/", rename={"^model": "m"}), ConfigError, nothing),
        (InitFrom(run, exclude="."), ConfigError, nothing),
        (tmp_path / "empty", NoCheckpointError, "neither a checkpoint.* nor a run with a checkpoint; check"),
        (tmp_path / "nowhere", NoCheckpointError, "neither a checkpoint, nor best weights"),
        (alone, NoCheckpointError, r"none of those that it names is there.*valid\.loss/epoch-0002-step"),
    ]
    net = Net()
    for start, error, words in refused:
        with pytest.raises(error, match=words):
            net.entered(tmp_path / "run", start)
        with pytest.raises(error, match=words):
            everstep.load(start, net.state)
    for wrong in (None, 3, "", b"x"):
        with pytest.raises(ConfigError, match="is not a path"):
            everstep.load(wrong, net.state)  # type: ignore[arg-type]
    with pytest.raises(RunDirError, match="is not a run"):
        everstep.runs.best(run.parent / "rum")


def test_what_may_refuse_is_loaded_first_and_a_model_needs_no_copy(tmp_path: Path) -> None:
    class Picky:
        model: torch.nn.Linear

        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            seen.append(self.model.bias.item())

    seen: list[float] = []
    for value in (5.0, 1.0):
        model, picky = torch.nn.Linear(1, 1), Picky()
        torch.nn.init.constant_(model.bias, value)
        picky.model = model
        state = {"model": model, "picky": picky}
        if value == 5.0:
            supervised(everstep.Supervisor(tmp_path, state, max_step=1))
            seen.clear()
        else:
            everstep.load(tmp_path, state)
            assert seen == [1.0] and model.bias.item() == 5.0


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
        assert {float(value) for each in model.parameters() for value in each.detach().flatten()} == {3.0}
        assert not other_norm.training and other_part.training and not other_part[0].bias.requires_grad
        assert other_part.cache.tolist() == [5, 5] and not any(entry.check(into.save()))
        assert into.guarded(("2.0.weight",)) and not into.guarded(("1.running_mean",))


def test_an_entry_with_a_new_name_begins_a_new_run_by_it(tmp_path: Path) -> None:
    def start(run: str, *names: str, **arguments: Any) -> list[float]:
        state = {name: np.full(1, float(at)) for at, name in enumerate(names, 1)}
        supervised(everstep.Supervisor(tmp_path / run, state, max_step=1, **arguments))
        return [float(each[0]) for each in state.values()]

    start("run", "actor", "actor_target")
    with pytest.raises(
        RestoreError, match=r"begin a new run .*InitFrom\(\.\.\., rename={'actor': 'policy'}\)"
    ):
        start("run", "policy", "actor_target")
    with pytest.raises(RestoreError, match=r"InitFrom\(\.\.\.\)"):  # which is which, nobody knows
        start("run", "policy", "policy_target")
    # `actor` is a name here, and no pattern that `actor_target` has, too
    source = InitFrom(tmp_path / "run", rename={"actor": "policy"})
    assert start("second", "actor_target", "policy", init_from=source) == [2.0, 1.0]
