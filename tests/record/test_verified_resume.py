"""Self-verifying resume in a run: said, recorded, a warning where it differs, a mark until it is accepted."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import uuid
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import DataLoader

import everstep
from everstep.checkpoint import Store
from everstep.cli.group import commands
from everstep.contracts.data import Cursor, Stream
from everstep.data.cursor import StreamWrapper
from everstep.errors import ConfigError, DivergenceError, Interrupted
from everstep.metrics.collector import is_clocked, is_wall
from everstep.record import WARNED, RunJournal, accept, data_digest, trail_path
from everstep.services import Retry
from everstep.supervisor.threads.signals import SignalWatch
from everstep.testing import ManualClock
from tiny_runs import Boom, Tiny, boom_at, events, quiet

NOTHING = "resume has nothing to verify: no step was executed again"
BREAK = everstep.services.Interrupt("a break", 3)


def start(run_dir: Path, **arguments: Any) -> Tiny:
    """Twelve steps: a checkpoint after each sixth, and something else that reads every seventh."""
    services = [everstep.Checkpoints(everstep.Every(steps=6))]
    tiny = Tiny(run_dir, **{"samples": 24, "max_epoch": 1, "services": services, **arguments})
    tiny.loop.on(everstep.services.Moment.AFTER_STEP, lambda boundary: None, every=7)
    return tiny


def crashed(run_dir: Path, at: int = 8, **arguments: Any) -> None:
    """A run that failed in this step."""
    with pytest.raises(Boom):
        start(run_dir, **arguments).train(inside=boom_at(at))


def halted(tiny: Tiny, strike: Any = 4) -> Tiny:
    """A start that is stopped cleanly in this step, or by a function that is called in each."""
    with pytest.raises(Interrupted, match="a break"):
        tiny.train(inside=stop_at(strike) if isinstance(strike, int) else strike)
    return tiny


def differing(tiny: Tiny) -> Tiny:
    """Its losses are other numbers than those of `Tiny`; its batches are the same."""
    tiny.update = lambda ids: tiny.loop.collect_metrics(loss=float(ids.sum()))  # type: ignore[method-assign]
    return tiny


def test_steps_executed_again_are_verified_and_that_is_on_disk_when_its_line_comes(tmp_path: Path) -> None:
    crashed(tmp_path)
    on_disk = {}

    def say(line: str) -> None:
        on_disk[line] = events(tmp_path, "verified")

    tiny = start(tmp_path, say=say).train()
    said = "resume verified: 1 step executed again: 1 batch digest and 1 value of loss equal"
    assert on_disk[said] == [{"report": said, "steps": 1}], "killed now, it would be called not verified"
    assert events(tmp_path, "verified") == on_disk[said] and tiny.loop.ending.warnings == ()


def test_other_numbers_are_a_warning_with_likely_causes_and_a_mark_of_the_run(tmp_path: Path) -> None:
    crashed(tmp_path)
    tiny = differing(start(tmp_path, on_divergence="stop"))
    said = r"step 7 loss was .*everstep accept RUN --divergence 7"
    with pytest.raises(DivergenceError, match=said) as caught:
        tiny.train()
    assert caught.value.step == 7 and not tiny.loop.ending.finished
    tiny = differing(start(tmp_path)).train()
    (warning,) = tiny.loop.ending.warnings
    assert warning.startswith("resume differs: step 7 loss was ")
    assert "not in state=" in warning and "everstep drill" in warning
    assert events(tmp_path, "verified")[0]["report"] == warning.splitlines()[0]
    (mark,) = events(tmp_path, "diverged")
    assert (mark["step"], mark["component"], mark["in_data"]) == (7, "loss", False)
    assert tiny.loop.ending.finished


class Reversed(StreamWrapper):
    """A stream that gives other batches than it says."""

    source, replayed = Stream.source, None

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return self.stream.open(purpose, pass_index, position, seed=seed + 1)


def with_other_batches(tiny: Tiny) -> Tiny:
    """The same number of samples, in an order that nobody restores."""
    tiny.data = Reversed(tiny.data)
    return tiny


def test_other_batches_stop_the_run_before_they_are_trained_on(tmp_path: Path) -> None:
    crashed(tmp_path)
    said = r"step 7 batch of train was .* the data gives other batches .* padding .*np\.empty"
    with pytest.raises(DivergenceError, match=said):
        with_other_batches(start(tmp_path)).train(inside=lambda loop, step: pytest.fail("it trains"))
    with_other_batches(start(tmp_path, on_divergence="warn")).train()


def test_a_pass_may_end_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Passes of three batches, of which a step draws two."""
    for fails_at in (2, 5, 8, -1):
        w, saves = np.zeros(1), everstep.Checkpoints(everstep.Every(steps=3))
        sv = quiet(tmp_path, {"w": w}, seed=1, max_step=9, services=[saves])
        with suppress(Boom), sv:
            batches = sv.stream(everstep.data.arrays(np.arange(6), batch_size=2, shuffle=True))
            while not sv.should_stop():
                if sv.step == fails_at:
                    raise Boom
                w += next(batches)[0].sum() - next(batches)[0].mean()
                sv.advance(loss=float(w[0]))
    assert sv.ending.finished and sv.ending.warnings == ()
    assert events(tmp_path, "diverged") == []


@pytest.mark.parametrize("boom", [8, 9])
def test_the_first_execution_is_compared_with_unless_it_had_diverged(tmp_path: Path, boom: int) -> None:
    """At step 8 of the first start nothing had diverged; step 8 of the second lies behind its divergence."""
    crashed(tmp_path)
    with pytest.raises(Boom):
        differing(start(tmp_path)).train(inside=boom_at(boom))
    tiny = (differing(start(tmp_path)) if boom == 8 else start(tmp_path)).train()
    found = [each for each in tiny.loop.ending.warnings if "resume differs: step 7 loss was " in each]
    assert len(found) == len(events(tmp_path, "diverged")) == (boom == 8)


def stop_at(at: int) -> Any:
    """A clean stop, as SIGTERM makes it."""
    return lambda loop, step: loop.call_soon(BREAK) if step == at else None


ONE_STEP = "resume verified: 1 step executed again: 1 batch digest and 1 value of loss equal"


@pytest.mark.parametrize(
    ("stop", "done", "saved"),
    # the last step of an epoch is repeated because of its tail; at a limit no step may follow
    [(4, 5, 4), (5, 6, 5), (6, 7, 6), (11, 12, 11), (12, 12, 11)],
)
def test_a_clean_stop_leaves_one_step_to_compare(tmp_path: Path, stop: int, done: int, saved: int) -> None:
    assert halted(start(tmp_path / "run"), stop).loop.step == done
    assert Store(tmp_path / "run").names()[-1].step == saved
    differs = differing(start(shutil.copytree(tmp_path / "run", tmp_path / "differs"))).train()
    assert differs.loop.ending.warnings[0].startswith(f"resume differs: step {saved + 1} loss was ")
    assert ONE_STEP in start(tmp_path / "run").train().lines
    assert events(tmp_path / "run", "verified") == [{"report": ONE_STEP, "steps": 1}]


def updating(run_dir: Path, model: torch.nn.Module, before: Any, each: Any, stop: int = 0) -> Any:
    """How a training ends whose steps call `before` with their number, and `each` between loss and update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with suppress(Interrupted):
        with everstep.TrainLoop(run_dir, {"m": model, "o": optimizer}, max_epoch=1, seed=1) as loop:
            for _ in loop.iter_epochs():
                for step, x in loop.iter_steps([torch.full((1, 2), float(at)) for at in range(12)]):
                    before(step)
                    loss = model(x).square().sum()
                    optimizer.zero_grad()
                    loss.backward()
                    each()
                    optimizer.step()
                    loop.collect_metrics(loss=loss.detach())
                    stop_at(stop)(loop, step)
    return loop.ending


def test_an_update_that_the_loss_of_its_step_does_not_show_is_compared(tmp_path: Path) -> None:
    def train(stop: int = 0) -> Any:
        torch.manual_seed(0)
        model, moment = torch.nn.Linear(2, 1), [torch.zeros(1, 2)]

        def each() -> None:
            model.weight.grad += moment[0]
            moment[0] = 0.5 * moment[0] + model.weight.grad

        return updating(tmp_path, model, id, each, stop)

    assert not train(4).finished
    assert any("resume differs: step 5 state 'parameters' was " in each for each in train().warnings)


def test_an_update_of_parameters_that_are_frozen_in_turn_is_no_divergence(tmp_path: Path) -> None:
    for stop in (2, 5, 7, 0):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        ending = updating(tmp_path, model, lambda step: model[0].requires_grad_(step % 3 == 0), list, stop)  # noqa: B023
        assert ending.finished == (stop == 0)
    assert ending.diverged is None


def test_what_fails_in_the_step_after_the_save_leaves_as_interrupted(tmp_path: Path) -> None:
    tiny = start(tmp_path / "fails", services=[Retry([Boom], times=3, backoff=0)])
    halted(tiny, lambda loop, step: stop_at(4)(loop, step) or boom_at(5)(loop, step))
    assert "the step after the save failed (Boom: at 5)" in tiny.lines
    assert events(tmp_path / "fails", "decision") == []  # no try, which would have waited
    sv = quiet(tmp_path / "leaves", seed=1)

    def leaves() -> None:
        with sv:
            batches = sv.stream(everstep.data.arrays(np.arange(8), batch_size=2))
            while not sv.should_stop() and not sv.step:
                next(batches)
                sv.call_soon(BREAK)
                sv.advance()

    with pytest.raises(Interrupted) as left:
        leaves()
    assert left.value.code == 3 and not sv.ending.finished


def test_a_step_after_the_save_that_never_ends_is_left(tmp_path: Path, monkeypatch) -> None:
    """Its data comes from a process that the same Ctrl-C has ended, say."""
    limit = SignalWatch.limit
    monkeypatch.setattr(SignalWatch, "limit", lambda watch, seconds, act: limit(watch, 0.05, act))
    before, (of_pytest, _) = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    waits = Event()
    try:
        tiny = halted(start(tmp_path), lambda loop, at: stop_at(4)(loop, at) or (at > 4 and waits.wait(120)))
        assert "a break" in tiny.loop.ending.reason
        assert tiny.loop.step in (4, 5) and Store(tmp_path).names()[-1].step == 4
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, of_pytest)
    assert ONE_STEP in start(tmp_path).train().lines or tiny.loop.step == 4


def test_values_of_the_clock_are_no_divergence_by_their_names(tmp_path: Path) -> None:
    names = (
        "step_ms",
        "elapsed",
        "it_per_s",
        "samples/sec",
        "tokens_per_second",
        "throughput",
        "eval/fps",
        "charts/SPS",
    )
    others = (
        "reward/min", "loss/s", "kl_per_s", "mae_ms", "rmse_m/s", "beats_per_minute", "steps", "runtime",
    )  # fmt: skip
    ticks = itertools.count()

    def measured() -> Tiny:
        tiny = start(tmp_path)
        tiny.update = lambda ids: tiny.loop.collect_metrics({n: float(next(ticks)) for n in names})  # type: ignore[method-assign]
        return tiny

    halted(measured())
    assert "resume verified: 1 step executed again: 1 batch digest equal" in measured().train().lines
    assert not any(map(is_clocked, others)) and not any(map(is_wall, names))


def test_no_step_follows_that_would_lose_something_or_keep_somebody_waiting(tmp_path, monkeypatch) -> None:
    def supervised(name: str, data: Any, passes: int | None, stop: int) -> int:
        sv = quiet(tmp_path / name, {"w": np.zeros(1)}, seed=1)
        with suppress(Interrupted), sv:
            batches = sv.stream(data, passes=passes)
            while not sv.should_stop():
                if data is not None:
                    next(batches)
                if sv.step + 1 == stop:
                    sv.call_soon(BREAK)
                sv.advance()
        assert sv.ending.reason == "a break"
        return sv.step

    batches = everstep.data.arrays(np.arange(8), batch_size=2)
    no_length = type("Data", (), {"__iter__": lambda _: iter("abc")})()
    assert supervised("environment", None, None, 4) == 4
    assert supervised("stream", batches, 2, 4) == 5
    assert supervised("passes", batches, 2, 8) == 8
    assert supervised("no length", no_length, 1, 3) == 3
    slow = ManualClock()
    clocked = start(tmp_path / "slow", clock=slow)
    halted(clocked, lambda loop, step: slow.advance(10) or stop_at(4)(loop, step))
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    assert clocked.loop.step == halted(start(tmp_path / "session")).loop.step == 4


def test_a_step_after_the_save_that_is_left_by_break_is_the_last(tmp_path: Path) -> None:
    seen: list[int] = []
    with suppress(Interrupted), everstep.TrainLoop(tmp_path, max_epoch=2, seed=1) as loop:
        for _ in loop.iter_epochs():
            for _ in range(3):
                for step, _ in loop.iter_steps([np.zeros(1)] * 3):
                    seen.append(step)
                    stop_at(4)(loop, step)
                    if step > 4:
                        break
    assert seen == [1, 2, 3, 4, 5]


def test_a_step_after_the_save_that_fails_or_never_ends_loses_nothing(tmp_path: Path) -> None:
    straight = start(tmp_path / "straight").train()
    for strike in (4, lambda loop, step: stop_at(5)(loop, step) or boom_at(6)(loop, step)):
        halted(start(tmp_path / "run"), strike)
    assert [each.step for each in Store(tmp_path / "run").names() if each.step] == [4, 5]
    assert start(tmp_path / "run").train().loop.ending.digest == straight.loop.ending.digest


def test_a_run_that_had_ended_has_nothing_to_verify(tmp_path: Path) -> None:
    start(tmp_path).train()
    start(tmp_path, max_epoch=2).train()
    assert events(tmp_path, "verified") == [{"report": NOTHING, "steps": 0}]


class Noise(torch.utils.data.Dataset[Any]):
    """Augments, from NumPy's global generator and torch's, what steps may change in place."""

    def __init__(self) -> None:
        self.x = torch.arange(8.0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.x[index : index + 1], np.random.rand(), torch.rand(())


def split() -> Any:
    """Another part in each process: no seed of its own."""
    torch.manual_seed(random.getrandbits(40))
    return torch.utils.data.random_split(Noise(), [6, 2])[0]


class Lines(torch.utils.data.IterableDataset[Any]):
    """Augments lines, which are in an order of the process's own, or not."""

    def __init__(self, lines: Any) -> None:
        self.lines = lines

    def __iter__(self) -> Any:
        return ((line, random.random(), torch.rand(())) for line in self.lines)


CLEAN: dict[str, Any] = {
    "an iterable dataset": lambda: DataLoader(Lines(range(8)), 2),
    "batches": lambda: [np.full(2, at) for at in range(4)],
    "a loader": lambda: DataLoader(Noise(), 2, shuffle=True),
    "everstep's loader with workers": lambda: everstep.data.loader(Noise(), 2, num_workers=1),
}


OTHERS: dict[str, Any] = {
    "an iterable in another order": lambda: everstep.data.replay(random.sample(range(4), 4)),
    "an iterable dataset in another order": lambda: DataLoader(Lines(random.sample(range(8), 8)), 2),
    "a list in another order": lambda: random.sample([np.full(2, at) for at in range(4)], 4),
    "files in another order": lambda: DataLoader(random.sample(["a.png", "b.png", "c.png", "d.png"], 4)),
    "a pandas series in another order": lambda: DataLoader(pd.Series(random.sample(range(8), 8)), 2),
    "rows of Hugging Face": lambda: DataLoader(ROWS.shuffle(seed=random.getrandbits(32)), 2),
    "an unseeded split": lambda: DataLoader(split(), 2),
    "an unseeded split in everstep's loader": lambda: everstep.data.loader(split(), 2),
}
ROWS = datasets.Dataset.from_dict({"x": range(8)})


def stopped(run_dir: Path, make: Any, process: int = 0, stop: int = 0, boom: int = 0, **options: Any) -> Any:
    """Program that is stopped in a step (or the `tail` of its epoch), or fails; `each` is part of its steps.

    A process of its own draws the seeds that nobody gave.
    """
    lines: list[str] = []
    tail, each = options.pop("tail", False), options.pop("each", lambda loop, batch: None)
    random.seed(process), torch.manual_seed(process), np.random.seed(process)
    services = [everstep.services.Console(sink=lines.append), *options.pop("services", ())]
    options = {"max_epoch": 3, **options}
    with everstep.TrainLoop(run_dir, services=services, seed=1, **options) as loop:
        data = make() if callable(make) else make
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(data):
                each(loop, batch)
                if step == boom:
                    raise Boom
                if step == stop and not tail:
                    loop.call_soon(BREAK)
                torch.rand(3), np.random.rand()
            if step == stop and tail:
                loop.call_soon(BREAK)
    return lines


@pytest.mark.parametrize("kind", CLEAN)
def test_data_that_gives_the_same_batches_is_said_after_a_clean_stop(tmp_path: Path, kind: str) -> None:
    with pytest.raises(Interrupted):
        stopped(tmp_path, CLEAN[kind], 0, stop=6)
    said = "resume verified: 1 step executed again: 1 batch digest equal"
    assert said in stopped(tmp_path, CLEAN[kind], 1)


def of_processes(kind: str) -> Any:
    """A function that makes the data as three processes do, of which the second one has another seed."""
    made = iter([3, 4, 4])
    return lambda: (random.seed(next(made)), {**CLEAN, **OTHERS}[kind]())[1]


@pytest.mark.parametrize("kind", OTHERS)
def test_data_that_gives_other_batches_is_named_after_a_clean_stop(tmp_path: Path, kind: str) -> None:
    make = of_processes(kind)
    with pytest.raises(Interrupted):
        stopped(tmp_path, make, 0, stop=2)
    what = "step 2 batch of train was one of the 2" if "an iterable" in kind else "step 2 .* was of data with"
    what = "step 3 batch of train was the batch with" if "dataset" in kind else what
    with pytest.raises(DivergenceError, match=f"{what} .*random_split.*--divergence {what[5]}"):
        stopped(tmp_path, make, 1, on_divergence="stop")
    accept(tmp_path, int(what[5]))
    assert stopped(tmp_path, make, 2)[-1].startswith("ended: max_epoch 3 is reached")


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("kind", [*CLEAN, *OTHERS])
def test_other_data_after_whole_epochs_is_warned_of(tmp_path: Path, kind: str, declared: bool) -> None:
    """After one epoch, other data that is not declared may be meant for the next."""
    make = of_processes(kind)
    for process, limit in enumerate((1, 2, 3) if declared else (2, 3, 4)):
        data = make()
        streams = {"streams": {"train": data}} if declared else {}
        lines = stopped(tmp_path, data, process, max_epoch=limit, **streams)
        warned = any("has other data than at the checkpoint and in its first pass" in line for line in lines)
        assert warned == (process == 1 and kind in OTHERS and "an iterable" not in kind), process


def test_of_paths_the_names_of_the_files_count() -> None:
    one, other = ([f"/{folder}/{at}.png" for at in range(9)] for folder in "ab")
    assert data_digest([one]) == data_digest([other]) != data_digest([other[::-1]])


class Moments(Noise):
    def __getitem__(self, at: int) -> Any:
        return {"x": at, "id": str(uuid.uuid4())}


class Counts(Noise):
    calls = 0

    def __getitem__(self, at: int) -> Any:
        self.calls += 1
        return at, (np.float64(at), self.calls)


LOADERS: dict[str, Any] = {
    "a loader": lambda data: DataLoader(data, 2, shuffle=True),
    "a loader with a generator and a worker":
        lambda data: DataLoader(data, 2, shuffle=True, num_workers=1, generator=torch.Generator()),
    "everstep's loader": lambda data: everstep.data.loader(data, 2, shuffle=True),
}  # fmt: skip
PARTS = [(kind, Moments, r"batch\['id'\]") for kind in LOADERS]
PARTS += [(kind, Counts, r"batch\[1\]\[1\]") for kind in LOADERS if "worker" not in kind]


@pytest.mark.parametrize(("kind", "data", "part"), PARTS)
def test_a_part_of_the_batch_that_always_differs_is_named(tmp_path: Path, kind: str, data, part) -> None:
    saves = everstep.Checkpoints(everstep.Every(steps=2))
    with pytest.raises(Boom):
        stopped(tmp_path, LOADERS[kind](data()), boom=4, services=[saves])
    said = rf"step [23] batch of train was .* differs in {part}: a value of the moment .* leave it out"
    with pytest.raises(DivergenceError, match=said):
        stopped(tmp_path, LOADERS[kind](data()), services=[saves])


def test_data_that_is_not_yet_as_it_was_warns_once_and_is_said_at_each_start(tmp_path: Path) -> None:
    """A line of the loop sets a part of the dataset, not in the first pass."""

    class Levels(Noise):
        level = np.zeros(1)

        def __getitem__(self, at: int) -> Any:
            return (*super().__getitem__(at), self.level)

    warnings, lines = list[int](), list[str]()
    for max_step in (6, 10, 13):
        data, console = Levels(), everstep.services.Console(sink=lines.append)
        with everstep.Supervisor(tmp_path, seed=1, max_step=max_step, services=[console]) as sv:
            batches = sv.stream(DataLoader(data, 2))
            while not sv.should_stop():
                data.level = np.full(1, float(sv.step // 5))
                next(batches)
                sv.advance()
        warnings.append(len(sv.ending.warnings))
    assert warnings == [0, 1, 0]
    (warning,) = (event.data["message"] for event in RunJournal(tmp_path).events(WARNED, valid=False))
    assert warning.startswith(
        "stream 'train': an array or a list that the data holds is not the one that was"
    )
    said = [line for line in lines if line.startswith("resume differs: step ")]
    assert [line[:23] for line in said] == ["resume differs: step 6 ", "resume differs: step 10"]
    assert [mark["step"] for mark in events(tmp_path, "diverged")] == [6, 10]


@pytest.mark.parametrize("clean", [True, False])
def test_an_object_that_steps_change_and_no_state_has(tmp_path: Path, clean: bool) -> None:
    """An environment in a variable: a crash and a signal leave steps to compare."""
    saves = everstep.Checkpoints(everstep.Every(steps=2))

    def train(**strike: int) -> list[str]:
        pole = [0.0]  # a new episode in each process

        def each(loop: Any, batch: Any) -> None:
            pole[0] += 1.0
            loop.collect_metrics(reward=pole[0])

        batches = [np.full(2, at) for at in range(6)]
        return stopped(tmp_path, batches, each=each, services=[saves], max_epoch=1, **strike)

    with pytest.raises(Interrupted if clean else Boom):
        train(**{"stop" if clean else "boom": 4})
    lines, step = train(), 5 if clean else 3
    said = f"resume differs: step {step} reward was {step}.0 and is 1.0 now"
    assert any(said in each for each in lines) and not any("resume verified" in each for each in lines)


def test_other_batches_behind_one_that_only_warned_stop_the_run(tmp_path: Path) -> None:
    """After a kill: what the data holds is compared, and the steps behind it are executed again."""

    def train(order: list[int], boom: int = 0) -> None:
        saves = everstep.Checkpoints(everstep.Every(steps=2))
        data = [np.full(2, at) for at in order]
        stopped(tmp_path, data, boom=boom, services=[saves], max_epoch=1, default_services=False)

    with pytest.raises(Boom):
        train([0, 1, 2, 3], boom=4)
    with pytest.raises(DivergenceError, match=r"step 3 batch of train was .*--divergence 2"):
        train([3, 2, 1, 0])
    accept(tmp_path, 2)
    train([3, 2, 1, 0])


def test_batches_that_steps_change_in_place_are_named(tmp_path: Path) -> None:
    """They are others in the second pass, and a new process has them as they were."""

    def train(**options: Any) -> None:
        batches = [np.full(2, float(at)) for at in range(3)]
        stopped(tmp_path, batches, each=lambda loop, batch: batch.__iadd__(1), **options)

    with pytest.raises(Interrupted):
        train(stop=5)
    with pytest.raises(DivergenceError, match=r"was the batch with .* change no batch in place"):
        train(on_divergence="stop")


@pytest.mark.campaign("long")
@pytest.mark.parametrize("chosen", [{"resume": 0}, {"on_change": "override", "seed": 8}, {"resume": False}])
def test_what_a_person_supersedes_is_not_compared_with(tmp_path: Path, chosen: dict[str, Any]) -> None:
    crashed(tmp_path)
    with pytest.raises(Boom):
        differing(start(tmp_path, **chosen)).train(inside=boom_at(9))
    assert all("no step was executed again" not in each["report"] for each in events(tmp_path, "verified"))
    tiny = differing(start(tmp_path, **(chosen if "seed" in chosen else {}))).train()
    assert not any("differs" in each for each in tiny.loop.ending.warnings)
    assert events(tmp_path, "diverged") == []


def test_copies_that_are_never_committed_leave_a_long_trail(tmp_path: Path, monkeypatch: Any) -> None:
    """The end of each epoch's steps is copied, for a signal in the tail; only epoch 4 is saved."""
    monkeypatch.setattr("everstep.record.trail.ENOUGH", 500)
    saves = everstep.Checkpoints(everstep.Every(epochs=4))
    options: dict[str, Any] = {"samples": 8, "max_epoch": 8, "services": [saves]}
    crashed(tmp_path, 28, **options)
    tiny = start(tmp_path, **options).train()
    said = "resume verified: 11 steps executed again: 11 batch digests, 4 random states, 8 state digests and"
    assert [line for line in tiny.lines if said in line], tiny.lines


@pytest.mark.campaign("long")
def test_a_trail_goes_when_no_resume_can_need_it(tmp_path: Path) -> None:
    crashed(tmp_path)
    start(tmp_path).train()
    assert trail_path(tmp_path, 1).exists()
    start(tmp_path, max_epoch=2).train()
    assert not trail_path(tmp_path, 1).exists() and trail_path(tmp_path, 3).exists()


@pytest.mark.parametrize("clean", [False, True])
def test_a_batch_drawn_ahead_is_found(tmp_path: Path, clean: bool) -> None:
    """As in nanoGPT's loop: the batch of a step is drawn at the end of the step before."""

    def train(stop: int | None) -> Any:
        services = [everstep.Checkpoints(everstep.Every(steps=3))]
        with quiet(tmp_path, {"w": np.zeros(1)}, services=services, seed=1, max_step=9) as sv:
            batches, batch = sv.stream(everstep.data.arrays(np.arange(40), batch_size=2, shuffle=True)), None
            while not sv.should_stop():
                batch = next(batches) if batch is None else batch
                batch = next(batches)
                if sv.step + 1 == stop:
                    if not clean:
                        raise Boom
                    sv.call_soon(BREAK)
                sv.advance()
        return sv.ending

    with pytest.raises(Interrupted if clean else Boom):
        train(6)
    with pytest.raises(DivergenceError, match=f"step {7 if clean else 4} batch of train was"):
        train(None)


def test_a_chosen_checkpoint_names_the_steps_that_are_not_compared(tmp_path: Path) -> None:
    def tiny(**options: Any) -> Tiny:
        services = [everstep.Checkpoints(everstep.Every(steps=3), keep_last=None)]
        return Tiny(tmp_path / "run", max_step=6, services=services, **options)

    tiny().train()
    lines = tiny(resume="step-00000003").train().lines
    assert any("resume not verified: steps 4 to 6 are not compared" in line for line in lines), lines


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """A finished run whose resume found other losses from step 7 on."""
    run_dir = tmp_path / "run"
    crashed(run_dir)
    differing(start(run_dir)).train()
    return run_dir


def cli(*arguments: str, folder: Path) -> str:
    done = CliRunner().invoke(commands, [*arguments, "--index", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def status(run_dir: Path) -> tuple[str, int | None]:
    """As the index has it."""
    (run,) = json.loads(cli("runs", "--json", folder=run_dir.parent))
    return run["status"], run["diverged"]


def marks(run_dir: Path) -> list[int]:
    return [event.data["step"] for event in RunJournal(run_dir).divergences()]


def test_the_lists_tell_a_divergence_and_an_accepted_run_is_what_it_was(diverged: Path) -> None:
    folder = diverged.parent
    assert "finished, diverged at 7" in cli("runs", folder=folder)
    shown = cli("show", str(diverged), folder=folder)
    assert "finished, diverged at 7" in shown.splitlines()[0] and "--divergence 7" in shown
    (found,) = json.loads(cli("runs", "diverged>6", "--json", folder=folder))
    assert (found["status"], found["diverged"]) == ("finished", 7)
    assert everstep.query("runs", {"diverged": 7}, index=folder)[0]["status"] == "finished"
    for epochs in (1, 2):  # the mark stays over later starts
        assert start(diverged, max_epoch=epochs).train().loop.ending.diverged == 7
    assert (marks(diverged), status(diverged)) == ([7], ("finished", 7))
    with pytest.raises(ConfigError, match="no divergence at step 8 to accept; it has at 7"):
        accept(diverged, 8)
    before = sorted(RunJournal(diverged).rows())
    said = cli("accept", str(diverged), "--divergence", "7", folder=folder)
    assert "the divergence at step 7 is accepted" in said
    assert (marks(diverged), status(diverged)) == ([], ("finished", None))
    assert "accepted" in cli("show", str(diverged), folder=folder)
    with pytest.raises(ConfigError, match="it has not diverged"):
        accept(diverged, 7)
    journal = RunJournal(diverged)
    assert (sorted(journal.rows()), journal.problems) == (before, []) and journal.ended() is not None
    again = start(diverged, max_epoch=2).train()
    assert again.seen == [] and again.loop.ending.finished and again.loop.ending.diverged is None
    start(diverged, max_epoch=3).train()
    assert status(diverged) == ("finished", None)


def test_a_run_that_other_batches_stopped_goes_on_once_they_are_accepted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    crashed(run_dir)
    for _ in range(2):
        with pytest.raises(DivergenceError, match="accept RUN --divergence 7"):
            with_other_batches(start(run_dir)).train()
    assert status(run_dir) == ("failed", 7)
    accept(run_dir, 7)
    tiny = with_other_batches(start(run_dir)).train()
    assert tiny.loop.ending.finished and tiny.loop.ending.warnings == ()
    assert status(run_dir) == ("finished", None)
    (said,) = [line for line in tiny.lines if line.startswith("resume ")]
    assert "not compared with earlier executions: a divergence was accepted at step 7" in said
    assert "start" not in said.partition("executions: ")[2]


@pytest.mark.campaign("long")
def test_a_choice_that_saved_nothing_and_is_taken_back_is_not_compared_with(tmp_path: Path) -> None:
    """Killed in step 8, gone on with another seed, killed again, and gone on as it was begun."""
    crashed(tmp_path)
    for at in (9, 8):
        crashed(tmp_path, at, seed=8, on_change="override")
    tiny = start(tmp_path).train()
    assert ONE_STEP in tiny.lines and marks(tmp_path) == []
    whole = start(tmp_path / "whole").train()
    assert tiny.w.tobytes() == whole.w.tobytes()


def test_a_step_that_failed_has_no_rows_whoever_reads_at_the_exit(tmp_path: Path) -> None:
    """Part of its values would be compared with all of them at the next start."""

    def training(fails: bool) -> Tiny:
        def inside(loop: Any, step: int) -> None:
            if step == 2 and fails:
                raise Boom
            loop.collect_metrics(loss=1e9)

        tiny = Tiny(tmp_path, max_epoch=1, services=[everstep.services.Require("loss", 1e12, step=100)])
        return tiny.train(inside=inside)

    with pytest.raises(Boom):
        training(True)
    assert {row.step for row in RunJournal(tmp_path).rows() if row.name == "loss"} == {1}
    assert training(False).loop.ending.finished and marks(tmp_path) == []
