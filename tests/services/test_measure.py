"""Services that measure and tell; and the witness of a drilled run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from everstep.services import FinalValues, LogVariables, Profile, System, Throughput
from everstep.testing import ManualClock
from tiny_runs import Boom, Tiny, boom_at, rows, supervised


def printed(tiny: Tiny, word: str) -> list[str]:
    return [line for line in tiny.lines if word in line]


def test_variables_are_printed_on_a_schedule_of_their_own(tmp_path: Path) -> None:
    services = [LogVariables(["valid_*"]), LogVariables(["mine"], every=Every(steps=2), name="mine")]
    tiny = Tiny(tmp_path / "run", max_epoch=2, services=services, show_eta=False)

    def tail(loop: Any, epoch: int) -> None:
        loop.collect_metrics(valid_loss=0.5 / epoch, valid_accuracy=0.75)
        loop.print_logs()

    tiny.train(lambda loop, step: loop.collect_metrics(mine=step), tail)
    assert printed(tiny, "] valid loss") == [
        "[Epoch 1/2, Step 4] valid loss: 0.5; valid accuracy: 0.75",
        "[Epoch 2/2, Step 8] valid loss: 0.25; valid accuracy: 0.75",
    ]
    assert printed(tiny, "] mine") == [
        f"[Epoch {1 + (step > 4)}/2, Step {step}] mine: {step - 0.5} (±0.5)" for step in (2, 4, 6, 8)
    ]


def test_what_is_left_at_the_end_has_a_line(tmp_path: Path) -> None:
    """The window over a resume: `check_service`."""
    tiny = Tiny(tmp_path, max_epoch=1, services=[LogVariables(["mine"], every=Every(steps=3))])
    tiny.train(lambda loop, step: loop.collect_metrics(mine=step))
    assert [line.partition("] ")[2] for line in printed(tiny, "] mine")] == ["mine: 2 (±0.816497)", "mine: 4"]


def test_values_computed_at_the_clean_end_are_in_the_record(tmp_path: Path) -> None:
    calls: list[int] = []

    def start(crash: int = 0) -> FinalValues:
        final = FinalValues(lambda: {"calls": float(calls.append(1) or len(calls))})
        Tiny(tmp_path / "run", max_epoch=1, services=[final]).train(boom_at(crash))
        return final

    with pytest.raises(Boom):
        start(crash=2)
    assert calls == []
    assert start().values == {"calls": 1.0}
    (row,) = (row for row in rows(tmp_path / "run") if row[3] == "calls")
    assert row == (1, 4, "eval/final values", "calls", 0, (1.0).hex(), 1)
    failing = Tiny(tmp_path / "failing", max_epoch=1, services=[FinalValues(lambda: {"a": 1 / 0})]).train()
    assert failing.loop.ending.finished and "ZeroDivisionError" in failing.loop.ending.warnings[0]


class Slow:
    """Four batches, each of which takes a second."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[int]:
        for number in range(4):
            self.clock.advance(1.0)
            yield number


def test_speed_and_shares_in_a_train_loop(tmp_path: Path) -> None:
    clock = ManualClock()
    services = [Throughput(32, every=Every(epochs=1)), everstep.services.Console(sink=lambda line: None)]
    loop = everstep.TrainLoop(tmp_path / "run", max_epoch=2, services=services, clock=clock)
    loop.on(everstep.services.Moment.AFTER_STEP, lambda boundary: clock.advance(0.5), every=2)
    with loop:
        for _ in loop.iter_epochs():
            for _step, _batch in loop.iter_steps(Slow(clock)):
                clock.advance(2.0)
            with loop.evaluation():
                clock.advance(7.0)
    found = {row.name: row for row in RunJournal(tmp_path / "run").rows() if row.epoch == 2}
    assert all(row.wall for row in found.values())
    shares = {"data_share": 4, "step_share": 8, "evaluation_share": 7, "services_share": 1}
    speeds = {"steps_per_second": 4, "samples_per_second": 32 * 4}
    expected = {name: value / 20 for name, value in (speeds | shares).items()}
    assert {name: row.value for name, row in found.items()} == expected


def test_speed_and_shares_in_a_supervisor(tmp_path: Path) -> None:
    clock = ManualClock()
    speed = Throughput(every=Every(steps=5))
    with everstep.Supervisor(tmp_path / "run", services=[speed], max_step=10, clock=clock) as sv:
        batches = sv.stream(everstep.data.replay(Slow(clock)))
        while not sv.should_stop():
            next(batches)
            clock.advance(3.0)
            sv.advance()
    found = {row.name: row.value for row in RunJournal(tmp_path / "run").rows()}
    shares = [found[name] for name in ("steps_per_second", "data_share", "step_share")]
    assert shares == [0.25, 0.25, 0.75]


LINUX = {"cpu_share", "memory_share", "process_memory_gb"}
ANYWHERE = {"process_cpus", "disk_free_gb"}


def recorded(run_dir: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in RunJournal(run_dir).rows():
        if row.phase == "eval/system":
            assert row.wall
            found.setdefault(row.name, []).append(row.value)
    return found


@pytest.mark.campaign("timed")
def test_what_it_records_is_so(tmp_path: Path) -> None:
    """One step computes, one sleeps, one takes memory."""
    held: list[Any] = []

    def inside(loop: Any, step: int) -> None:
        until = time.process_time() + 0.5
        while step == 1 and time.process_time() < until:
            pass
        if step == 2:
            time.sleep(0.5)
        if step == 3:
            held.append(bytearray(os.urandom(1)) * 300_000_000)
        if step == 4:
            time.sleep(0.1)  # the kernel counts in ticks of 10 ms: in a shorter time none may pass

    Tiny(tmp_path / "run", max_epoch=1, services=[System(every=Every(steps=1))]).train(inside)
    found = recorded(tmp_path / "run")
    names = {name for name in found if not name.startswith("gpu")}
    assert ANYWHERE <= names <= ANYWHERE | LINUX
    assert {len(values) for values in found.values()} == {4}
    busy = found["process_cpus"]
    assert busy[0] > 0.05 and busy[1] < busy[0] / 2
    assert found["disk_free_gb"][-1] == pytest.approx(shutil.disk_usage(tmp_path).free / 1e9, abs=2)
    for name, values in found.items():
        assert all(value >= 0 for value in values)
        assert not name.endswith("_share") or max(values) <= 1
    if sys.platform == "linux":
        assert names >= LINUX
        assert found["process_memory_gb"][2] - found["process_memory_gb"][1] > 0.25
        assert found["cpu_share"][0] > 0


def test_a_figure_that_cannot_be_had_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise PermissionError(path)

    monkeypatch.setattr("everstep.services.measure._text", refuse)
    Tiny(tmp_path, max_epoch=1, services=[System(every=Every(steps=1))]).train()
    assert {name for name in recorded(tmp_path) if not name.startswith("gpu")} == ANYWHERE


def profiled(run_dir: Path, service: Profile, crash: int = 0) -> list[str]:
    """The names of the traces."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)

    def step(sv: everstep.Supervisor) -> None:
        with torch.no_grad():
            model.weight.copy_(model(model.weight).tanh())
        boom_at(crash)(sv, sv.step + 1)

    supervised(everstep.Supervisor(run_dir, {"model": model}, services=[service], max_step=20, seed=1), step)
    return sorted(path.name for path in (run_dir / "logs" / "profile").iterdir())


def test_traces_of_whole_windows_and_no_more_than_asked_for(tmp_path: Path) -> None:
    names = profiled(tmp_path / "run", Profile(Every(steps=4), steps=2, keep=2))
    assert names == ["step-00000012.json", "step-00000016.json"]  # that of step 20 is cut short
    found = json.loads((tmp_path / "run" / "logs" / "profile" / "step-00000012.json").read_text())
    calls = [event for event in found["traceEvents"] if event.get("name") == "aten::linear"]
    assert len(calls) == 2


def test_a_crash_inside_a_window_and_windows_longer_than_the_schedule(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        profiled(tmp_path / "run", Profile(Every(steps=4)), crash=6)
    names = profiled(tmp_path / "run", Profile(Every(steps=8), steps=9))
    assert names == ["step-00000008.json"]


@pytest.mark.campaign("long")
def test_the_profiler_says_nothing_on_standard_error(tmp_path: Path) -> None:
    program = """
import os, sys, torch, everstep
from everstep.services import Profile
quiet = everstep.services.Console(sink=lambda line: None)
services = [Profile(everstep.Every(steps=2), steps=1, keep=2), quiet]
with everstep.Supervisor(sys.argv[1], services=services, max_step=8) as sv:
    sv.stream(None)
    while not sv.should_stop():
        torch.ones(2).sum()
        sv.advance()
assert "KINETO_LOG_LEVEL" not in os.environ
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def witnessed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Optimizer:
    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [{"lr": 0.1}]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_it_writes_every_place_of_every_step_and_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def train(run: str) -> None:
        also = {"notes": {"n": 1}, "opt": Optimizer()}
        Tiny(tmp_path / run, max_epoch=1, samples=4, also=also).train()

    train("plain")
    monkeypatch.setenv("EVERSTEP_DRILL", str(tmp_path / "file"))
    train("drilled")
    assert compare_runs(tmp_path / "plain", tmp_path / "drilled") == []
    found = witnessed(tmp_path / "file")
    steps = [("before", 1, 1), ("step", 1, 1), ("before", 1, 2), ("step", 1, 2)]
    places = [("enter", 0, 0), *steps, ("epoch", 1, 2), ("exit", 1, 2)]
    assert [(one["at"], one["epoch"], one["step"]) for one in found] == places
    assert {one["run"] for one in found} == {str(tmp_path / "drilled")}
    entries = {"weights/w", "weights/momentum", "state/notes", "optimizer/opt"}
    assert set(found[0]["parts"]) == entries and set(found[1]["parts"]) == {"samples/train", *entries}
    assert {"random/python", "random/numpy"} <= set(found[2]["parts"])


def test_batches_of_a_supervisor_are_noted_by_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_DRILL", str(tmp_path / "file"))
    with everstep.Supervisor(tmp_path / "run", {"w": np.zeros(2)}, seed=0, max_step=2) as sv:
        left, right = sv.stream([1, 2, 3, 4], "left"), sv.stream([5, 6], "right")
        while not sv.should_stop():
            next(left)
            if sv.step:
                next(left), next(right)
            sv.advance()
    steps = [one["parts"] for one in witnessed(tmp_path / "file") if one["at"] == "step"]
    kinds = [{part for part in parts if not part.startswith("random")} for parts in steps]
    assert kinds == [{"samples/left", "weights/w"}, {"samples/left", "samples/right", "weights/w"}]
