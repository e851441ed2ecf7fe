"""The list of bad input: each is one clear error that says what to do, and nothing is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every, InitFrom, Supervisor, TrainLoop
from everstep.errors import ConfigError, DataError, MetricError, RunDirError, StateError, UsageError
from everstep.record import RunJournal
from everstep.services import Console, HangWatch, Moment, NaNGuard
from everstep.testing import nothing_left
from everstep.torch import ClipOptimizer as Clipped
from everstep.torch import MinibatchOptimizer as Minibatches
from tiny_runs import Tiny, quiet

Call = Callable[[Path], object]
NAN = float("nan")


def door(state: Any = None, **arguments: Any) -> Call:
    return lambda path: TrainLoop(path / "run", state, **arguments)


def opened(state: Any, **arguments: Any) -> Call:
    def call(path: Path) -> None:
        with quiet(path / "run", state, **arguments):
            raise AssertionError("it opened")

    return call


def in_a_step(call: Callable[[Any], object]) -> Call:
    def train(path: Path) -> None:
        Tiny(path / "run", max_epoch=1).train(lambda loop, step: call(loop))

    return train


def supervised(call: Callable[[Supervisor], object]) -> Call:
    def train(path: Path) -> None:
        with quiet(path / "run", max_step=1) as sv:
            call(sv)

    return train


def trained(name: str = "run", **arguments: Any) -> Call:
    return lambda path: Tiny(path / name, max_epoch=1, **arguments).train()


def endless(path: Path) -> None:
    with TrainLoop(path / "run", max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            loop.iter_steps()


class Other(everstep.Service):
    pass


class Looks(everstep.Service):
    """Only looks, and has no schedule."""

    def run(self, boundary: everstep.Boundary) -> everstep.Outcome | None:
        return everstep.Outcome({"runs": 1.0})


class Reports(Looks):
    default_schedule = Every(steps=1)
    controller = True


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=0.1)


NAMED = r'gives no names.*state=\{"model": model'
LISTED = r"services=.*; give a list, as in services=\["
WHOLE = "give an integer, 1 or more"
UNSAVED = r"(?s)state entry 'thing'.*"
FORMS = r"data_ranks=.*give a mesh.*a pair.*or 1"
NUMBER = r"seconds=.*: give a number, 0 or more"
POLICY = r'on_missing=\'ignore\'.*"error", "warn" or "skip"'
TWO_BEST = "two Best services have restore_at_end=True"
TWO_SAVES = r"Checkpoints\(Every\(epochs=1\) \| Every\(steps=500\)"
SCHEDULE = "is not a schedule"

REFUSED: list[tuple[Call, type[Exception], str]] = [
    # where a run is to be
    *((lambda path, make=make: make(None), ConfigError, r"path|run_dir.* is not a path; give a path, as in")
      for make in (TrainLoop, Supervisor, RunJournal, InitFrom, everstep.runs.best)),
    *((lambda path, no=no: TrainLoop(no), ConfigError, "is not a path") for no in (3, "", b"run")),
    (lambda path: TrainLoop("~no-such-user-anywhere/run"), ConfigError, "give the path without '~'"),
    (lambda path: Tiny(Path("/proc/everstep-run"), max_epoch=1).train(), RunDirError, "can be written"),
    (trained("file"), RunDirError, "file is a file; give a directory"),
    (trained("file/run"), RunDirError, "give a path that can be written"),
    (trained("."), RunDirError, r"is not a run directory: it holds file.*empty or new directory"),
    # the state
    *((door(state), ConfigError, NAMED)
      for state in (torch.nn.Sequential(torch.nn.ReLU()), torch.zeros(3), "model", ["model", "opt"], 7)),
    (door([("w", np.zeros(1)), ("w", np.zeros(2))]), ConfigError, "two state entries are named 'w'; give"),
    *((door({name: np.zeros(1)}), ConfigError, f"state name {name!r}") for name in ("", "a/b", 3)),
    (door({"thing": object()}), StateError, UNSAVED + r"state_dict\(\) and load_state_dict"),
    (door({"thing": 7}), StateError, UNSAVED + r"Slot\(value\)"),
    (door({"n": everstep.PerRank(5)}), StateError, r"'n' is a bare int \(5\).*Slot"),
    (lambda path: everstep.PerRank(everstep.PerRank([])), ConfigError, "declares the object twice"),
    (lambda path: everstep.PerRank([], merge=3), ConfigError, "merge=3: give a function"),  # type: ignore[arg-type]
    (opened({"bag": {"m": everstep.PerRank([1])}}), StateError, r"PerRank\(\[1\]\) is inside another object"),
    (opened({"all": {"layers": [1, {"act": object()}]}}), StateError, r"all.*layers.*1.*act"),
    # arguments of the doors
    *((door(seed=seed), ConfigError, f"seed={seed!r}") for seed in (-1, 1.5, True, "7")),
    *((door(on_change=value), ConfigError, '"error" or "override"') for value in ("keep", "", None)),
    *((door(**{name: value}), ConfigError, f"{name}={value!r}: give True or False")
      for name in ("lock", "show_eta") for value in (0, None, "yes")),
    *((door(groups=value), ConfigError, "give a list of prefixes") for value in ("encoder", 3, [1], None)),
    *((door(resume=value), ConfigError, f"resume={value!r}: give True") for value in (1.5, None)),
    (door(on_divergence="ignore"), ConfigError, "on_divergence='ignore'.*or leave it out"),
    (door(formatter="%.3f"), ConfigError, r"formatter='%\.3f': give an everstep"),
    *((door(max_time=value), ConfigError, "positive") for value in (0, -1, NAN, True, "60")),
    *((door(services=value), ConfigError, LISTED) for value in (everstep.Checkpoints(), 3, print)),
    *((door({"w": np.zeros(1)}, data_ranks=value), ConfigError, FORMS)
      for value in (2, 0, True, "dp", (2, 2), (-1, 2), (0, 0), (0, 1, 2), (0.0, 1.0), object())),
    (door(config=[1]), ConfigError, r"config=\[1\]: give a dictionary"),
    (door(config={"a": {"b": [object()]}}), ConfigError, r"config\['a'\]\['b'\]\[0\] is <object.*; give n"),
    (door(config={"a": math.inf}), ConfigError, r"config\['a'\] is inf, which JSON lacks"),
    (door(config={"note": 1}, config_free=["not"]), ConfigError, "has no 'not'; did you mean 'note'"),
    (door(services=[HangWatch(), HangWatch(5)]), ConfigError, "two HangWatch"),
    (door(services=[everstep.Checkpoints(), everstep.Checkpoints(keep_last=None)]), ConfigError, TWO_SAVES),
    (door(services=[everstep.Best(m, restore_at_end=True) for m in ("loss", "acc")]), ConfigError, TWO_BEST),
    (door(services=[Other("metrics")]), ConfigError, "'metrics' is taken by the metric windows"),
    *((door(watch=value), ConfigError, "give a name, or a pair") for value in (("a", "min", 2), 5, ())),
    (door(watch="val_los"), ConfigError, r'give watch=\("val_los", "min"\) or "max"'),
    (door(watch=("f1", "min"), services=[everstep.Best("f1", "max")]), ConfigError, "give one of the two"),
    *((door(**{name: value}), ConfigError, rf"{name}={value!r}: give an integer")
      for name in ("max_step", "max_epoch", "steps_per_epoch") for value in (0, -1, 1.5, True, "3")),
    (opened({"w": np.zeros(1)}, data_ranks=(0, 2)), ConfigError, "it is 0 of 1, 1 of 0"),
    (trained(ready=lambda: ["w", "v"]), UsageError, r"not ready: \['w', 'v'\] \(before local_init_fn\)"),
    (trained(ready=lambda: "the table is empty"), UsageError, "not ready: the table is empty"),
    (trained(ready=lambda: False), UsageError, r"ready\(\) returned False"),
    # InitFrom
    (lambda path: InitFrom("x", rename={"model/(": "y"}), ConfigError, r"'model/\(': .*re\.escape"),
    (lambda path: InitFrom("x", reset={"stepp"}), ConfigError, "'stepp': did you mean 'step'"),
    (lambda path: InitFrom("x", on_missing="ignore"), ConfigError, POLICY),  # type: ignore[arg-type]
    (lambda path: InitFrom("x", include="["), ConfigError, r"include='\['.*regular expression"),
    (lambda path: InitFrom("x", exclude="("), ConfigError, r"exclude='\('.*regular expression"),
    # schedules and services
    *((lambda path, make=make, value=value: make(value), ConfigError, WHOLE)
      for value in (0, 2.5, True, "3", NAN)
      for make in (lambda n: Every(steps=n), everstep.At, lambda n: everstep.services.StopAfter(epochs=n))),
    (lambda path: Every(), ConfigError, "exactly one of steps, epochs, seconds; got none"),
    (lambda path: Every(steps=1, epochs=2), ConfigError, r"got \['steps', 'epochs'\]"),
    (lambda path: everstep.At(), ConfigError, "at least one step number"),
    (lambda path: Every(steps=1) | 3, ConfigError, f"3 {SCHEDULE}"),  # type: ignore[operator]
    *((lambda path, one=one: one & Every(epochs=1), ConfigError, r"& Every.* is never due.*give one of")
      for one in (Every(steps=3), everstep.At(3), Every(steps=3) & Every(seconds=1))),
    *((lambda path, n=n: everstep.Checkpoints(keep_last=n), ConfigError, f"keep_last={n}")
      for n in (0, 2.5, True)),
    (lambda path: everstep.services.StopAfter(), ConfigError, "give steps=, epochs= or seconds="),
    (lambda path: everstep.services.StopAfter(seconds=0), ConfigError, "positive"),
    (lambda path: everstep.services.StopAfter(step=5), ConfigError, "'step'; did you mean 'steps'"),  # type: ignore[call-arg]
    (lambda path: NaNGuard("ignore"), ConfigError, '\'ignore\'.*"raise" or "stop"'),  # type: ignore[arg-type]
    (lambda path: NaNGuard(metrics="loss"), ConfigError, r"give a list of names, \['loss'\]"),
    (lambda path: everstep.Best("valid_loss", "lower"), ConfigError, "'lower'"),  # type: ignore[arg-type]
    (lambda path: everstep.Best("f1"), ConfigError, 'give mode="min"'),
    (lambda path: everstep.Checkpoints(100), ConfigError, "every=100"),  # type: ignore[arg-type]
    (lambda path: everstep.EarlyStop("loss", patience=2, every=5), ConfigError, "every=5"),  # type: ignore[arg-type]
    (lambda path: everstep.services.Console(plain_seconds=0), ConfigError, "plain_seconds=0"),
    *((lambda path, wrong=wrong: HangWatch(**wrong), ConfigError, next(iter(wrong)))
      for wrong in ({"after": 0}, {"after": NAN}, {"after": "1h"}, {"then": "end"})),
    (lambda path: Other(schedule="often"), ConfigError, r"or Every\(seconds=...\)$"),  # type: ignore[arg-type]
    (lambda path: everstep.Checkpoints("often"), ConfigError, SCHEDULE),  # type: ignore[arg-type]
    (lambda path: everstep.Checkpoints(keep_every=everstep.At(3)), ConfigError, "keep_every=At.*give a sch"),
    *((make(services=[Looks()]), ConfigError, r"give class Looks one.* = everstep\.Every\(steps=1\)")
      for make in (door, trained)),
    (door(services=[Reports()]), ConfigError, "'reports' is a controller.*give class Reports stage = e"),
    (trained(services=[everstep.Best("loss", restore_at_end=["wt"])]), ConfigError, "did you mean 'w'"),
    *((lambda path, part=part: everstep.Best("loss", restore_at_end=part), ConfigError, "a list of entries")
      for part in ("w", [], 3, [3])),
    # optimizers around optimizers
    (lambda path: Clipped(torch.optim.SGD), ConfigError, "give an optimizer, as in SGD"),  # type: ignore[arg-type]
    (lambda path: Clipped(sgd(), 1.0), ConfigError, r"clip=1\.0: give Clip"),  # type: ignore[arg-type]
    (lambda path: Clipped(torch.optim.LBFGS([torch.zeros(1)])), ConfigError, "and use LBFGS itself"),
    (lambda path: Minibatches(sgd(), 0), ConfigError, "num_minibatches=0: give an integer"),
    (lambda path: Minibatches(sgd(), num_minibatch=2), ConfigError, "did you mean 'num_minibatches'"),  # type: ignore[call-arg]
    # calls inside a loop
    *((in_a_step(lambda loop, given=given: loop.collect_metrics(given)), MetricError, "give a mapping")
      for given in (5, [("loss", 1.0)], "loss")),
    *((in_a_step(lambda loop, no=no: loop.collect_metrics(loss=no)), MetricError, f"^metric 'loss': .*{what}")
      for no, what in ((10**400, "an int of 1329 bits"), (10**5000, "an int of"), (np.ma.masked, "masked"))),
    *((in_a_step(lambda loop, name=name: loop.collect_metrics({"good": 1.0, name: 1.0})), MetricError,
       f"metric name {name!r}") for name in (1, None, "")),
    (in_a_step(lambda loop: loop.collect_metrics({"x": 1.0}, x=2.0)), MetricError, "'x' is given twice"),
    (in_a_step(lambda loop: loop.collect_metrics(x=[1.0], weight=[1])), MetricError, r"collector\('x'\)"),
    (in_a_step(lambda loop: loop.timeit("eval").__enter__()), ConfigError, "'eval_time'"),
    (endless, UsageError, "never ends; give it data, or set max_step"),
    *((supervised(lambda sv, n=n: sv.stream([1], passes=n)), ConfigError, f"passes={n}")
      for n in (0, -1, 1.5)),
    *((supervised(lambda sv, n=n: sv.loop(n, print)), ConfigError, NUMBER) for n in (-1, "1", None, NAN)),
    (supervised(lambda sv: (sv.stream([1]), sv.stream([2]))), ConfigError, "'train' is in use.*\"train2\""),
    (supervised(lambda sv: (sv.should_stop(), sv.advance(loss="high"))), MetricError, "'loss' is 'high'"),
    *((lambda path, call=call: call(quiet(path / "run")), UsageError, "before the with block; enter it")
      for call in (Supervisor.should_stop, Supervisor.advance, lambda sv: sv.stream([1]))),
    (supervised(lambda sv: sv.advance()), UsageError, r"before the first should_stop\(\)"),
    (supervised(lambda sv: next(sv.stream([1]))), UsageError, r"before the first should_stop\(\)"),
    (supervised(lambda sv: [sv.stream([]), sv.should_stop()] and next(sv._draws.streams[0])), DataError,
     "gave no batch in a whole pass"),
    (supervised(lambda sv: next(sv.stream(None))), UsageError, r"stream\(None\).*give it data"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "words"), REFUSED, ids=[f"{n}-{w}" for n, (_, _, w) in enumerate(REFUSED)]
)
def test_bad_input_is_one_clear_error(tmp_path: Path, call: Call, error: type[Exception], words: str) -> None:
    (tmp_path / "file").write_text("mine")
    with nothing_left(), pytest.raises(error, match=words):
        call(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_needs_no_schedule(tmp_path: Path) -> None:
    evaluations = frozenset({Moment.AFTER_EVALUATION})
    after_evaluations = type("AfterEvaluations", (Looks,), {"moments": evaluations})
    own_due = type("OwnDue", (Looks,), {"due": lambda self, when: when.at_epoch_end})
    services = [Other(), Looks(schedule=everstep.Never()), after_evaluations(), own_due()]
    Tiny(tmp_path / "run", max_epoch=1, services=services).train()
    assert {row.phase for row in RunJournal(tmp_path / "run").rows() if row.name == "runs"} == {"eval/owndue"}


def test_pairs_are_names_enough(tmp_path: Path) -> None:
    TrainLoop(tmp_path / "run", state=[("a", np.zeros(2)), ("b", np.zeros(2))])
    Supervisor(tmp_path / "run", state=zip("ab", (np.zeros(2), np.zeros(2)), strict=True))


@pytest.mark.parametrize("ready", [None, True, [], ""])
def test_what_counts_as_ready(tmp_path: Path, ready: Any) -> None:
    with Tiny(tmp_path / "run", ready=lambda: ready, max_epoch=1).loop as loop:
        assert loop.segment == 1


def test_what_the_checkpoint_lacks_of_a_dictionary_or_a_list_is_named(tmp_path: Path) -> None:
    def start(averages: list[Any], counts: dict[str, Any], max_step: int) -> list[str]:
        lines: list[str] = []
        state = {"averages": averages, "counts": counts}
        with everstep.Supervisor(
            tmp_path, state, max_step=max_step, services=[Console(sink=lines.append)]
        ) as sv:
            sv.stream(None)
            while not sv.should_stop():
                sv.advance()
        return lines

    assert not any("dropped" in line for line in start([np.zeros(1)], {"a": {"b": [1]}}, 1))
    lines = start([np.zeros(1), np.ones(1)], {"a": {"b": [1, 2], "c": 3}}, 2)
    assert "state 'averages': the checkpoint has no '1': dropped" in lines
    assert "state 'counts': the checkpoint has no 'a/c', 'a/b/1': dropped" in lines
