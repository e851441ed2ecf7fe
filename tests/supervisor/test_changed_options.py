"""What a start gives that the checkpoint was not made with: options, data, `config=`, the machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep.contracts.group import DataRanks
from everstep.data import arrays
from everstep.errors import ChangedError, ConfigError, DataError, RestoreError
from everstep.record import RunJournal
from everstep.supervisor.opening.configuration import changes, differences, fingerprint
from tiny_runs import Boom, Tiny, boom_at

Make = Callable[[Any], Any]
EPOCH = 3


class Program:
    """A parameter, its optimizer and its schedule; `train` makes one start."""

    def __init__(self, optimizer: Make, schedule: Make | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = optimizer(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.schedule = None if schedule is None else schedule(self.optimizer)
        if self.schedule is not None:
            self.state["schedule"] = self.schedule
        self.lines: list[str] = []
        self.rates: list[float] = []

    def train(self, run_dir: Path, epochs: int, services: Any = (), **arguments: Any) -> Program:
        services = [*services, everstep.services.Console(sink=self.lines.append)]
        loop = everstep.TrainLoop(run_dir, self.state, max_epoch=epochs, services=services, **arguments)
        with loop:
            for _ in loop.iter_epochs():
                for _, x in loop.iter_steps([torch.ones(1, 2)] * EPOCH):
                    self.optimizer.zero_grad()
                    self.model(x).square().sum().backward()
                    self.optimizer.step()
                    self.rates.append(self.optimizer.param_groups[0]["lr"])
                if self.schedule is not None:
                    self.schedule.step()
        return self

    def says(self, text: str) -> bool:
        return any(text in line for line in self.lines)


def test_a_run_goes_on_with_an_entry_more_or_one_less(tmp_path: Path) -> None:
    def program(*more: str) -> Program:
        made = Program(functools.partial(torch.optim.SGD, lr=1.0, momentum=0.5))
        made.state |= {name: everstep.Slot(0.5) for name in more}
        return made

    program().train(tmp_path, 1)
    more = program("best")
    with pytest.raises(RestoreError, match=r"missing in the checkpoint \(1\): best") as raised:
        more.train(tmp_path, 3)
    assert raised.value.__notes__[0].startswith(
        'or continue this run with on_change="override": state \'best'
    )
    assert not more.rates
    more.train(tmp_path, 3, on_change="override")
    assert more.says("state 'best': stored nothing, given as the program made it")
    more.state["best"].value = 2.0
    again = program("best").train(tmp_path, 4)
    assert again.state["best"].value == 0.5 and not again.says("changed since")
    fewer = program().train(tmp_path, 5, on_change="override")
    assert fewer.says("state 'best': stored a value, given nothing") and len(fewer.rates) == EPOCH
    renamed, scheduled = program(), Program(adam(1.0), lambda o: schedulers.LinearLR(o, start_factor=0.1))
    renamed.state["net"] = renamed.state.pop("model")
    # a schedule has set the rate before the checkpoint's comes back
    for other, words in ((renamed, r"rename=\{'model': 'net'\}"), (scheduled, "schedule")):
        with pytest.raises(RestoreError, match=words):
            other.train(tmp_path, 6, on_change="override")


def adam(lr: float, **options: Any) -> Make:
    return lambda parameters: torch.optim.Adam(parameters, lr, **options)


def _cosine(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    done = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * done)))


def cosine(total: int) -> Make:
    """As `get_cosine_schedule_with_warmup` of transformers."""
    return lambda o: schedulers.LambdaLR(o, partial(_cosine, num_warmup_steps=1, num_training_steps=total))


def to_power(epoch: int, power: float) -> float:
    return float(power**epoch)


def falling(power: float) -> Make:
    return lambda o: schedulers.LambdaLR(o, functools.partial(to_power, power=power))


def annealing(steps: int) -> Make:
    return lambda o: schedulers.CosineAnnealingLR(o, steps)


class Linear:
    """A schedule as timm's are: not torch's, and its state has its settings."""

    def __init__(self, optimizer: Any, t_initial: int, factor: float = 1.0) -> None:
        self.optimizer, self.t_initial, self.factor, self.t = optimizer, t_initial, factor, 0
        self.base = optimizer.param_groups[0]["lr"]

    def step(self) -> None:
        self.t += 1
        self.optimizer.param_groups[0]["lr"] = self.base * self.factor * max(0, 1 - self.t / self.t_initial)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Counted(Linear):
    """The same, but its state has only its place."""

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t}


def linear(t_initial: int, kind: type = Linear, **settings: float) -> Make:
    return lambda o: kind(o, t_initial, **settings)


HALF: Make = lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.5)  # noqa: E731
LESS: Make = lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.6)  # noqa: E731


LR = "lr: stored 0.1, given 0.7"
STEPS = r"'schedule': lr_lambdas\.0\.num_training_steps: stored 9, given "

CHANGES: dict[str, tuple[Program, Program, int, str]] = {
    name: (Program(*before), Program(*now), epochs, message)
    for name, before, now, epochs, message in [
        ("rate", [adam(0.1)], [adam(0.7)], 2, f"'optimizer': {LR}"),
        ("schedule", [adam(0.1), annealing(5)], [adam(0.1), annealing(9)], 2, "T_max: stored 5, given 9"),
        ("partial", [adam(0.1), cosine(9)], [adam(0.1), cosine(20)], 2, STEPS + "20"),
        ("lambda", [adam(0.1), HALF], [adam(0.1), LESS], 2, r"code of lr_lambdas\.0: stored \w{16}"),
        # a raised limit excuses only a longer schedule
        ("rate, further", [adam(0.1)], [adam(0.7)], 4, LR),
        ("both, further", [adam(0.1), cosine(9)], [adam(0.7), cosine(18)], 4, LR),
        ("shorter, further", [adam(0.1), cosine(9)], [adam(0.1), cosine(7)], 4, STEPS + "7"),
        ("factor, further", [adam(0.1), falling(0.5)], [adam(0.1), falling(0.9)], 4, "stored 0.5, given"),
    ]
}


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_must_be_chosen(tmp_path: Path, what: str) -> None:
    before, now, epochs, message = CHANGES[what]
    before.train(tmp_path / "run", 2)
    with pytest.raises(ConfigError, match=message) as raised:
        now.train(tmp_path / "run", epochs)
    assert 'on_change="override"' in str(raised.value)
    assert not now.rates


def test_what_is_the_same_or_only_computed_otherwise_is_free(tmp_path: Path) -> None:
    def schedule(optimizer: Any) -> Any:
        return schedulers.OneCycleLR(optimizer, 0.2, total_steps=8)

    straight = Program(adam(0.1), schedule).train(tmp_path / "straight", 5)
    Program(adam(0.1, foreach=False), schedule).train(tmp_path / "run", 2)
    again = Program(adam(0.1, foreach=True), schedule).train(tmp_path / "run", 5)
    assert again.rates == straight.rates[2 * EPOCH :] and not again.says("changed")


def test_a_chosen_learning_rate_is_used_from_there_on(tmp_path: Path) -> None:
    Program(adam(0.1)).train(tmp_path / "run", 2)
    now = Program(adam(0.01)).train(tmp_path / "run", 3, on_change="override")
    assert now.rates == [0.01] * EPOCH
    assert now.says("used as given: state 'optimizer': lr: stored 0.1, given 0.01")
    straight = Program(adam(0.01)).train(tmp_path / "run", 4)  # and from then on it is the stored one
    assert straight.rates == [0.01] * EPOCH


@pytest.mark.parametrize("kind", [Linear, Counted])
def test_a_setting_of_a_foreign_schedule_must_be_chosen_and_is_then_used(tmp_path: Path, kind: type) -> None:
    before, now = linear(10, kind), linear(10, kind, factor=0.5)
    Program(adam(0.1), before).train(tmp_path / "run", 2)
    with pytest.raises(ConfigError, match=r"'schedule': factor: stored 1\.0, given 0\.5"):
        Program(adam(0.1), now).train(tmp_path / "run", 4)
    again = Program(adam(0.1), now).train(tmp_path / "run", 4, on_change="override")
    assert again.rates[-1] == pytest.approx(0.1 * 0.5 * 0.7)
    same = Program(adam(0.1), now).train(tmp_path / "run", 5)
    assert not same.says("given") and same.rates[-1] == pytest.approx(0.1 * 0.5 * 0.6)


MADE = {"T_max": annealing, "num_training_steps": cosine, "t_initial": linear}


@pytest.mark.parametrize(("said", "make"), MADE.items())
def test_a_raised_limit_takes_the_schedule_that_is_made_with_it(tmp_path: Path, said: str, make: Any) -> None:
    """As in a script that gives its number of epochs to both."""
    Program(adam(0.1), make(4)).train(tmp_path / "run", 2)
    longer = Program(adam(0.1), make(8)).train(tmp_path / "run", 6)
    whole = Program(adam(0.1), make(8)).train(tmp_path / "whole", 6)
    assert make is not cosine or longer.rates == pytest.approx(whole.rates[2 * EPOCH :])
    assert longer.says(f"{said}: stored 4, given 8")


def test_what_cannot_be_compared_is_said_at_the_start(tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    exec("def made(epoch):\n    return 1.0", made)
    now = Program(adam(0.1), lambda o: schedulers.LambdaLR(o, made["made"])).train(tmp_path / "run", 1)
    [said] = [line for line in now.lines if "not compared" in line]
    assert "state 'schedule': code of lr_lambdas.0 (the source of made is not known)" in said


def warmed(steps: int, annealed: int) -> Make:
    return lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=steps), annealing(annealed)(o)], [2 * steps - 1]
    )


CHOSEN: dict[str, tuple[Make, Make]] = {
    "lambda": (falling(0.5), falling(0.5)),
    "warm-up, then cosine": (warmed(1, 4), warmed(2, 9)),
}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("before", "now"), CHOSEN.values(), ids=CHOSEN)
def test_a_chosen_schedule_goes_on_from_where_it_would_be(tmp_path: Path, before: Make, now: Make) -> None:
    Program(adam(0.1), before).train(tmp_path / "run", 2)
    resumed = Program(adam(0.4), now).train(tmp_path / "run", 5, on_change="override")
    straight = Program(adam(0.4), now).train(tmp_path / "straight", 5)
    assert resumed.rates == pytest.approx(straight.rates[2 * EPOCH :])
    again = Program(adam(0.4), now).train(tmp_path / "run", 6)
    assert again.rates == pytest.approx(Program(adam(0.4), now).train(tmp_path / "straight", 6).rates)


class Fading(schedulers.LRScheduler):
    """Changes an argument of its own, and makes its state anew each time."""

    def __init__(self, optimizer: Any, scale: float, kind: Make) -> None:
        self.scale, self.kind = scale, kind
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.scale *= 0.75
        return [rate * self.scale for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "base_lrs": self.base_lrs, "scale": self.kind(self.scale)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch, self.scale = state["last_epoch"], float(state["scale"])


@pytest.mark.parametrize(
    "kind", [torch.tensor, lambda value: torch.tensor(value, dtype=torch.bfloat16), np.float64, np.array]
)
def test_a_live_schedule_that_makes_its_state_anew_is_not_a_change(tmp_path: Path, kind: Make) -> None:
    """Its tensors are others at the second loop; what a new process gives is a change, if it is one."""
    program = Program(adam(0.1), lambda optimizer: Fading(optimizer, 1.5, kind))
    program.train(tmp_path, 1)
    program.train(tmp_path, 2)
    with pytest.raises(ConfigError, match="'schedule': scale: stored"):
        Program(adam(0.1), lambda optimizer: Fading(optimizer, 3.0, kind)).train(tmp_path, 3)


def test_inside_a_container(tmp_path: Path) -> None:
    before, now = Program(adam(0.1)), Program(adam(0.01))
    for program in (before, now):
        program.state = {"all": {"parts": [program.model, program.optimizer]}}
    before.train(tmp_path / "run", 2)
    with pytest.raises(ConfigError, match=r"state 'all': parts/1/lr: stored 0.1, given 0.01"):
        now.train(tmp_path / "run", 2)
    now.train(tmp_path / "run", 3, on_change="override")
    assert now.rates == [0.01] * EPOCH


X = torch.arange(8, dtype=torch.float64)
SAMPLES = TensorDataset(X)

EPOCH_END, INSIDE = 4, 6  # steps of a pass of 4 batches


def start(run_dir: Path, make: Callable[[int], Any], steps: int, **arguments: Any) -> Any:
    """One start of a loop that reads `make(epoch)`, to `steps`; the weights and the loop."""
    w, lines = np.zeros(1), []
    services = [everstep.services.Console(sink=lines.append)]
    arguments = {"seed": 5, "services": services, **arguments}
    with everstep.TrainLoop(run_dir, {"w": w}, max_step=steps, **arguments) as loop:
        for epoch in loop.iter_epochs():
            for step, batch in loop.iter_steps(make(epoch)):
                part = batch[0] if isinstance(batch, list | tuple) else batch
                w[0] = w[0] * 0.5 + float(part.sum()) * step
    return w[0], loop, lines


def two(_: int) -> Any:
    return arrays(X, batch_size=2)


CHANGED_DATA: dict[str, tuple[Callable[[int], Any], Callable[[int], Any], str]] = {
    "batch size": (two, lambda _: arrays(X, batch_size=4), "batch_size was 2 at the checkpoint and is 4 now"),
    "length": (two, lambda _: arrays(X[:7], batch_size=2), "length was 8.*is 7"),
    "kind": (lambda _: [X[:2]] * 4, two, "kind was 'sequence'.*is 'arrays'"),
    "shuffle": (lambda _: DataLoader(SAMPLES, 2), lambda _: DataLoader(SAMPLES, 2, shuffle=True),
        "sampler was 'SequentialSampler' at the checkpoint and is 'RandomSampler' now; give"),
}  # fmt: skip


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("at", [EPOCH_END, INSIDE], ids=["between passes", "inside a pass"])
@pytest.mark.parametrize("what", CHANGED_DATA)
def test_a_change_is_refused_with_both_values_or_chosen(tmp_path: Path, what: str, at: int) -> None:
    before, now, message = CHANGED_DATA[what]
    start(tmp_path / "run", before, at)
    with pytest.raises(DataError, match=f"stream 'train': .*{message}.*on_change=\"override\""):
        start(tmp_path / "run", now, 12)
    _, loop, lines = start(tmp_path / "run", now, 12, on_change="override")
    assert loop.ending.step == 12
    [said] = [line for line in lines if "is used as given" in line]
    assert ("starts from its beginning" in said) == (at == INSIDE)
    assert not any("as given" in line for line in start(tmp_path / "run", now, 14)[2])  # it is the run's now


def test_workers_of_a_plain_dataloader_are_free_between_passes(tmp_path: Path) -> None:
    start(tmp_path / "run", lambda _: DataLoader(SAMPLES, 2, num_workers=1), EPOCH_END)
    start(tmp_path / "run", lambda _: DataLoader(SAMPLES, 2), INSIDE)
    changed = "num_workers was 0 at the checkpoint and is 1 now; give the same until the pass ends, or pass"
    with pytest.raises(DataError, match=changed) as refused:
        start(tmp_path / "run", lambda _: DataLoader(SAMPLES, 2, num_workers=1), 8)
    assert "train2" not in str(refused.value)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", [EPOCH_END, INSIDE], ids=["between passes", "inside a pass"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_chosen_seed_begins_anew_only_what_depends_on_it(tmp_path: Path, shuffle: bool, at: int) -> None:
    def make(epoch: int) -> Any:
        return arrays(X, batch_size=2, shuffle=shuffle)

    start(tmp_path / "run", make, at)
    [_, loop, lines] = start(tmp_path / "run", make, 8, seed=6, on_change="override")
    said = [line for line in lines if "stream 'train' is used as given" in line]
    assert len(said) == shuffle and loop.seed == 6 and loop.step == 8
    assert all("seed was 5 at the checkpoint and is 6 now" in line for line in said)
    assert any("starts from its beginning" in line for line in said) == (shuffle and at == INSIDE)


def test_data_that_was_seen_to_vary_goes_on_and_says_so(tmp_path: Path) -> None:
    """The batch size grows with the epoch."""

    def make(epoch: int) -> Any:
        return arrays(X, batch_size=epoch, shuffle=True)

    start(tmp_path / "run", make, 8)
    with pytest.raises(DataError, match=r"batch_size was 1.*is 2 now.*name=\"train2\""):
        start(tmp_path / "run", make, 12)
    start(tmp_path / "run", make, 15, on_change="override")
    weight, loop, lines = start(tmp_path / "run", make, 17)
    whole, straight, _ = start(tmp_path / "straight", make, 17)
    assert (weight, loop.ending.digest, loop.epoch) == (whole, straight.ending.digest, 4)
    assert any("is used as given: batch_size was 3 at the checkpoint and is 4 now" in line for line in lines)


def train(path: Path, config: Any, epochs: int = 1, **arguments: Any) -> Tiny:
    return Tiny(path, max_epoch=epochs, config=config, **arguments).train()


def refused(path: Path, words: str, config: Any, epochs: int, error: Any = ChangedError, **options: Any):
    with pytest.raises(error, match=words) as raised:
        train(path, config, epochs, **options)
    return str(raised.value)


def test_it_is_recorded_with_each_start(tmp_path: Path) -> None:
    train(tmp_path / "run", {"lr": 0.1, "layers": (1, 2), "out": Path("x")})
    train(tmp_path / "run", None, 2)
    starts = RunJournal(tmp_path / "run").events("segment", valid=False)
    recorded = [{"lr": 0.1, "layers": [1, 2], "out": "x"}, {}]
    assert [start.data["facts"]["config"] for start in starts] == recorded


def test_a_difference_is_refused_shown_or_chosen(tmp_path: Path) -> None:
    before = {"optimizer": {"lr": 0.1, "decay": 0}, "seed": 1}
    now = {"optimizer": {"lr": 0.2, "decay": 0}, "seed": 1, "more": None, "new": 3}
    train(tmp_path, before)
    lines = r"\n  config.optimizer.lr: stored 0.1, given 0.2\n  config.new: stored none, given 3\n"
    told = refused(tmp_path, lines, now, 2)
    assert 'on_change="override"' in told and "more" not in told
    tiny = train(tmp_path, now, 2, on_change="override")
    assert any("config.optimizer.lr: stored 0.1, given 0.2" in line for line in tiny.lines)
    assert not any("config." in line for line in train(tmp_path, now, 3).lines)


@pytest.mark.parametrize(("stored", "given", "said"), [
    (None, ..., "t.x: stored null, given none"),
    (1, 1.0, "t.x: stored 1, given 1.0"),
    (0.0, -0.0, "t.x: stored 0.0, given -0.0"),
    (True, 1, "t.x: stored true, given 1"),
    ("1", 1, 't.x: stored "1", given 1'),
    ("none", ..., 't.x: stored "none", given none'),
    ([1, 2], {"0": 1, "1": 2}, 't.x: stored [1, 2], given {"0": 1, "1": 2}'),
    ({"a.b": 1}, {"a": {"b": 1}}, 't.x."a.b": stored 1, given none; t.x.a.b: stored none, given 1'),
    ([None], [None, None], "t.x.1: stored none, given null"),
    ([], {}, "t.x: stored [], given {}"),
    ([1, []], [1, None], "t.x.1: stored [], given null"),
    (..., {"a": {"b": 1}, "c": []}, "t.x.a.b: stored none, given 1; t.x.c: stored none, given []"),
    (1000.0, 1e3, ""),
    ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, ""),
])  # fmt: skip
def test_what_a_program_can_tell_apart_is_different(stored: Any, given: Any, said: str) -> None:
    both = ({"t": {"x": value} if value is not ... else {}} for value in (stored, given))
    assert "; ".join(map(str, differences(*both))) == said


def test_a_setting_that_is_new_and_none_changes_nothing() -> None:
    """So a newer schema goes on with the runs of an older one."""
    now = {"new": None, "trainer": {"steps": 1, "new": None}, "task": {"new": None}}
    found = differences({"trainer": {"steps": 1}, "task": {}}, now, sections=("trainer",))
    assert [each.path for each in found] == ["task.new"]


def test_limits_folders_and_settings_of_the_loader_are_free_and_others_by_name(tmp_path: Path) -> None:
    def config(epochs: int, note: str = "second", lr: float = 0.1) -> dict[str, Any]:
        free = {"epochs": epochs, "workers": 2 * epochs, "output_dir": f"{epochs}"}
        return {**free, "lr": lr, "note": {"text": note}}

    for epochs in (1, 2):
        train(tmp_path, config(epochs, "first"), epochs)
    refused(tmp_path, r'config\.note\.text: stored "first", given "second"', config(3), 3)
    for _ in range(2):
        train(tmp_path, config(3), 3, config_free=("note",))
    told = r"config\.lr: stored 0\.1, given 0\.2"
    refused(tmp_path, told, config(4, lr=0.2), 4, config_free=("note",))
    told = r"config has no 'not'; did you mean 'note'"
    refused(tmp_path, told, config(4), 4, ConfigError, config_free=("not",))


FORMS = ["%Y-%m-%d_%H-%M-%S", "run%Y%m%d-%H%M", "Walker__1__%s", "run_%s.25", "a %Y-%m-%d %H:%M:%S.123456"]


@pytest.mark.parametrize("form", FORMS)
def test_the_time_of_a_start_in_a_name_is_free(tmp_path: Path, form: str) -> None:
    """Scripts name a run by it, and a killed run is started again at another time."""
    now, before = datetime.now(), datetime.now() - timedelta(hours=5)
    first, second, seed = before.strftime(form), now.strftime(form), before.strftime("%s")
    for epochs, title in ((1, first), (2, second)):
        train(tmp_path, {"title": title, "seed": seed}, epochs)
    # a teacher of this morning, another name, none, a time that is none
    for title in (first, f"other {second}", "", "lr1-20263399_2599"):
        refused(tmp_path, r"config\.title: stored", {"title": title, "seed": seed}, 3)
    refused(tmp_path, r"config\.seed: stored", {"title": second, "seed": now.strftime("%s")}, 3)


def test_a_programs_limit_by_another_name_is_free_and_the_error_tells_how_to_free_it(tmp_path: Path) -> None:
    def config(epochs: int, frames: int = 16, **other: Any) -> dict[str, Any]:
        own = {"epoch": min(2, epochs), "io": {"workers": 2 if epochs == 1 else 0}}
        given = {"total_timesteps": 8 * epochs, "frames": frames, "num_steps": 4, "train": own}
        return {**given, "solver": {"steps": 9, "epochs": 2}, **other}

    for epochs in (1, 2):
        train(tmp_path, config(epochs, frames=8), epochs)
    refused(tmp_path, r"or config_free=\['frames'\] if that changes no step", config(3), 3)
    train(tmp_path, config(3), 3, config_free=("frames",))
    for other, told in (
        # of a reinforcement learner it is the length of a rollout
        ({"num_steps": 5}, r"config\.num_steps: stored 4, given 5"),
        ({"solver": {"steps": 8, "epochs": 2}}, r"config\.solver\.steps: stored 9, given 8"),
        ({"solver": {"steps": 9, "epochs": 3}}, r"config\.solver\.epochs: stored 2, given 3"),
    ):
        refused(tmp_path, told, config(4, **other), 4, config_free=("frames",))


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Here(Tiny):
    """A program whose numbers depend on the number of threads, as those of a kernel may."""

    def __init__(self, run_dir: Path, threads: int, **arguments: Any) -> None:
        torch.set_num_threads(threads)
        services = [everstep.Checkpoints(everstep.Every(steps=4))]
        super().__init__(run_dir, services=services, **{"max_epoch": 2, **arguments})

    def update(self, ids: Any) -> None:
        self.w += 1e-9 * torch.get_num_threads()
        super().update(ids)

    def said(self, text: str) -> list[int]:
        return [at for at, line in enumerate(self.lines) if text in line]


def crash(here: Here, at: int) -> Here:
    with pytest.raises(Boom):
        here.train(inside=boom_at(at))
    return here


DIFFERENCE = "torch.threads: stored 1, given 2"


def test_another_fingerprint_is_said_first_and_its_numbers_are_no_divergence(tmp_path: Path) -> None:
    crash(Here(tmp_path, 1), 7)
    now = Here(tmp_path, 2).train()
    (first,) = now.said("warning: the checkpoint was computed on another machine")
    assert first < now.said("resuming")[0]
    for words in (DIFFERENCE, "may differ from those of an uninterrupted run"):
        assert words in now.lines[first]
    assert not now.said("differs")
    assert now.said(
        "2 batch digests equal, 2 values of loss not compared (they were computed on another machine"
    )
    assert not now.loop.ending.one_fingerprint and DIFFERENCE in now.loop.ending.warnings[0]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_value_that_comes_no_more_is_a_divergence_where_numbers_are_comparable(
    tmp_path: Path, threads: int
) -> None:
    class Clips(Here):
        without = 0

        def update(self, ids: Any) -> None:
            super().update(ids)
            if self.loop.step != self.without:
                self.loop.collect_metrics(clipped=1.0)

    crash(Clips(tmp_path, 1), 7)
    now = Clips(tmp_path, threads)
    now.without = 6
    assert bool(now.train().said("step 6 clipped was 1.0")) == (threads == 1)


def test_the_run_stays_marked_and_a_finished_one_computes_nothing(tmp_path: Path) -> None:
    crash(Here(tmp_path / "a", 1), 5)
    Here(tmp_path / "a", 2).train()
    Here(tmp_path / "b", 1).train()
    for run, epochs, same in (("a", 2, False), ("a", 3, False), ("b", 2, True)):
        again = Here(tmp_path / run, 2, max_epoch=epochs).train()
        assert not again.said("machine") and again.loop.ending.one_fingerprint is same


def test_it_is_that_of_the_start_that_wrote_the_checkpoint(tmp_path: Path) -> None:
    """Not that of the start before: what it did was superseded, and its rows are no measure either."""
    crash(Here(tmp_path, 1), 5)
    crash(Here(tmp_path, 2), 7)
    back = Here(tmp_path, 1).train()
    assert not back.said("machine, or under other settings of it:") and not back.said("state=")
    assert back.loop.ending.one_fingerprint
    undisturbed = Here(tmp_path.with_name("undisturbed"), 1).train()
    assert back.result() == undisturbed.result()


def test_under_the_same_one_a_difference_is_the_program_s(tmp_path: Path) -> None:
    crash(Here(tmp_path, 1), 7)
    now = Here(tmp_path, 1)
    now.update = lambda ids: now.loop.collect_metrics(loss=0.5)  # type: ignore[method-assign]
    now.train()
    assert now.said("state=")


def test_a_framework_that_one_side_has_not_imported_is_no_difference() -> None:
    here = fingerprint({}, DataRanks([0]))
    assert changes({"numpy": here["numpy"], "machine": here["machine"]}, here) == []
    assert changes(None, here) == []
    other = {**here, "machine": {**here["machine"], "processor": "abacus"}}
    (found,) = changes(other, here)
    assert str(found) == f"machine.processor: stored abacus, given {here['machine']['processor']}"
